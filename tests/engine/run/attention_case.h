// A layer of attention over a mesh: a plan and a prompt, drawn at random, a run of its ranks as threads, and
// how far it is from attention by its definition.
#ifndef MESHFILL_TESTS_ENGINE_RUN_ATTENTION_CASE_H_
#define MESHFILL_TESTS_ENGINE_RUN_ATTENTION_CASE_H_

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/plan/plan.h"
#include "engine/run/executor.h"
#include "tests/engine/run/watched_stream.h"

namespace meshfill {

// A prompt's Q, K and V of one layer, by token; K and V have its cached prefix, too.
struct Prompt {
  std::vector<float> q;      // [q_heads, tokens, head_dim]
  std::vector<float> k;      // [kv_heads, cached tokens + tokens, head_dim]
  std::vector<float> v;      // [kv_heads, cached tokens + tokens, head_dim]
  std::vector<float> sinks;  // [q_heads], or empty
};

// One layer of a prompt under a plan.
struct Case {
  Plan plan;
  ModelShape model;
  int64_t window;
  Prompt prompt;

  int64_t tokens() const { return plan.layout.tokens(); }
  int64_t cached() const { return plan.cached_tokens; }
  int64_t keys() const { return cached() + tokens(); }

  // What a rank attends with: all of the prompt's heads and its own tokens, unless there are head groups.
  ModelShape slice() const { return model.HeadSlice(plan.heads); }
  TokenLayout groups() const { return plan.layout.Groups(plan.heads); }
  TokenLayout kv_groups() const { return plan.kv_layout().Groups(plan.heads); }
  int64_t chunk_tokens(int rank) const { return groups().ChunkTokens(rank / plan.heads); }
  int64_t token_at(int rank, int64_t slot) const { return groups().TokenAt(rank / plan.heads, slot); }
  int first_head(int rank, int heads) const { return rank % plan.heads * heads / plan.heads; }  // of so many

  std::string DebugString() const {
    return plan.DebugString() + ", " + plan.schedule.DebugString() + ", " + std::to_string(model.q_heads) +
           "/" + std::to_string(model.kv_heads) + " heads of " + std::to_string(model.head_dim) +
           ", window " + std::to_string(window) + (prompt.sinks.empty() ? "" : ", sinks");
  }
};

// A random prompt of this layout and tile, under a greedy or a random schedule, with sinks or without.
// `heads`: head groups; `window` 0: none; `kv_inner` 0: one ring along KV.
Case MakeCase(std::mt19937_64& random, const TokenLayout& layout, Tile tile, DType partial_dtype,
              int64_t window, int heads = 1, int64_t cached_tokens = 0, int kv_inner = 0);

// Of any layout, shape, window and schedule on up to 16 ranks, with f32 partial outputs.
Case DrawCase(std::mt19937_64& random, int64_t cached_tokens = 0);

// The rank's Q, K and V on `stream`, as its projections would leave them.
LayerChunks ChunksOf(const Case& c, int rank, Stream& stream);

struct RankEnd {
  absl::Status status;
  std::vector<float> o;  // [q_heads, chunk_tokens, head_dim]
  RankStats stats;
};

// Runs each rank on its thread as its caller would: whoever fails aborts the others. `prepare` may set up a
// stream. By rank.
std::vector<RankEnd> RunMesh(const Case& c, absl::Duration wait_timeout, int layers,
                             const std::function<void(int rank, WatchedStream&)>& prepare,
                             const StopToken* stop = nullptr);

inline std::vector<RankEnd> RunMesh(const Case& c) { return RunMesh(c, absl::Seconds(60), 1, nullptr); }

// From attention by its definition, in double, over all of the prompt's outputs; infinite where a rank failed
// or an output is no number.
double LargestError(const Case& c, const std::vector<RankEnd>& ends);

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_RUN_ATTENTION_CASE_H_
