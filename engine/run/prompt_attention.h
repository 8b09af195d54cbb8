// One prompt's part of a rank's run: what is not local to a token. Its rotary tables, its K and V, which are
// kept and put behind a cached prefix, and its attention over the mesh, with heads exchanged around it.
//
//     Prepare ──► for each layer: NewChunks ──► [the slice is projected into HeadsOf them] ──► Begin
//                                 Attend, once all slices have begun ──► FinishToTokens, each slice
//             ──► EndKeeping
//
// The runner (rank_runner.h) computes the tokens of all its prompts together, and calls each for this.
#ifndef MESHFILL_ENGINE_RUN_PROMPT_ATTENTION_H_
#define MESHFILL_ENGINE_RUN_PROMPT_ATTENTION_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/comm/communicator.h"
#include "engine/kv/kv_sink.h"
#include "engine/kv/kv_slabs.h"
#include "engine/model/layer.h"
#include "engine/model/model_config.h"
#include "engine/plan/plan.h"
#include "engine/run/executor.h"
#include "engine/run/head_exchange.h"
#include "engine/run/prefix_reader.h"
#include "engine/run/rank_stats.h"
#include "engine/run/timeline_recorder.h"
#include "kernels/stream.h"

namespace meshfill {

// A prompt, or the part of it that a rank computes.
struct RankPrompt {
  const Plan& plan;
  std::span<const uint32_t> ids;    // the rank's tokens, by slot
  KvSink* kv = nullptr;             // where their K and V go; null: they are dropped
  const KvSlabs* prefix = nullptr;  // K and V of the plan's cached tokens; null: there are none
  int64_t tokens_ahead = 0;         // prompt tokens of later runs; above 0: this run has no logits
};

class PromptAttention {
 public:
  // All arguments outlive it, but `prompt`; what it names does.
  PromptAttention(const RankPrompt& prompt, const ModelConfig& config, int rank, Stream& stream,
                  Communicator& communicator, absl::Duration wait_timeout, RankStats& stats,
                  TimelineRecorder* recorder);

  const RankPrompt& prompt() const { return prompt_; }
  int64_t tokens() const { return chunk_tokens_; }  // of the rank's chunk
  int slices() const { return exchange_.slices(); }
  SlotRange OwnSlots(int slice) const { return exchange_.OwnSlots(slice); }

  // INTERNAL where the ids are not those of the rank's chunk, where the prefix lacks cached tokens of the
  // plan, and where a token's keys are not dealt to the rank that computes them (CanFollow).
  absl::Status Check() const;
  // Places the rotary tables. A prefix passes through `staging`, which has room for K and V of
  // `staging_tokens` tokens.
  absl::Status Prepare(const BufferRef& staging, int64_t staging_tokens);

  // Sends the prefix to the members of the head group, apart from the rank's own keys and values, where there
  // is one and they exchange in slices.
  absl::Status SendPrefix(int layer);
  // Chunks of a slice's tokens, and where their projections go.
  absl::StatusOr<LayerChunks> NewChunks(const SlotRange& slots);
  Layer::Heads HeadsOf(const LayerChunks& chunks, const SlotRange& slots, LayerRope rope) const;
  // A slice has been projected: its chunks leave.
  absl::Status Begin(int layer, int slice, LayerChunks chunks);
  // Attention of a layer that has been begun in all slices.
  absl::Status Attend(int64_t window, const float* sinks);
  absl::StatusOr<LayerOutput> FinishToTokens(int slice) { return exchange_.FinishToTokens(slice); }

  // Returns when the layer before's K and V are kept: one layer's are at a time (peak_bytes.h).
  absl::Status EndKeeping();

 private:
  // Tables of one rotary embedding.
  struct RopeTables {
    std::unique_ptr<float[]> host;  // cos, then sin; goes after them
    BufferRef cos, sin;             // [chunk_tokens, rotated_dim/2], f32
  };

  absl::StatusOr<BufferRef> Elements(int64_t count, DType dtype);
  absl::StatusOr<RopeTables> PlaceRopeTables(const RopeConfig& rope);
  // K or V of `tokens` tokens, into `slot` and on of another.
  absl::Status CopyHalf(int half, const BufferRef& from, int64_t tokens, const BufferRef& to,
                        int64_t to_slots, int64_t slot);
  // Gathers the K and V of all slices that are to be kept: the one slice's as they are.
  absl::Status KeepKv(const BufferRef& kv, const SlotRange& slots);
  // Hands the layer's K and V to the sink.
  absl::Status BeginKeeping(int layer);
  // The keys and values that queries see: those of the prefix that the rank has, then its own.
  absl::StatusOr<BufferRef> BehindPrefix(BufferRef own, int layer);

  const RankPrompt prompt_;
  const ModelConfig& config_;
  const ModelShape& shape_;
  const int rank_;
  Stream& stream_;
  TimelineRecorder* const recorder_;
  const int64_t chunk_tokens_;
  const int64_t prefix_slots_;  // slots of cached keys, before those of the rank's chunk
  HeadExchange exchange_;
  AttentionExecutor executor_;
  std::map<LayerRope, RopeTables> ropes_;
  std::optional<PrefixReader> prefix_;  // none: there is no prefix
  BufferRef kept_;                      // K and V of a layer's chunk, while slices come
  std::unique_ptr<KvKeeping> keeping_;  // goes on beside the layer; null: nothing does
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_PROMPT_ATTENTION_H_
