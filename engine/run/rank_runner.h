// One rank's part of a prefill: every layer of the transformer over this rank's tokens, of one prompt, or of
// several that share the pass.
//
//     embed
//     → for each layer: [norm, q k v, RoPE] by slices → behind a cached prefix: its K and V before these
//                       → tokens to heads in the head group
//                       → attention over the mesh → heads to tokens → [o, norm, MLP] by slices
//     → on the rank that holds the last token: norm, LM head on that one row
//
// Everything but attention is local to a token, so it runs in the plan's slices and its intermediates stay
// small whatever the chunk's length. The residual stream is f32. Prompts that share a pass
// (engine/plan/pack.h) fill the slices together, and each attends to itself (prompt_attention.h). Where head
// groups exchange in more slices than one (head_exchange.h), a slice's tokens go from one layer's attention
// to the next one's at once, while other slices are under way.
#ifndef MESHFILL_ENGINE_RUN_RANK_RUNNER_H_
#define MESHFILL_ENGINE_RUN_RANK_RUNNER_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/comm/communicator.h"
#include "engine/comm/link_probe.h"
#include "engine/comm/message_gate.h"
#include "engine/model/model.h"
#include "engine/model/weight_feed.h"
#include "engine/plan/plan.h"
#include "engine/run/prompt_attention.h"
#include "engine/run/rank_stats.h"
#include "engine/run/timeline_recorder.h"
#include "kernels/stream.h"

namespace meshfill {

struct RankRun {
  // The prompt. Several share the pass: each is whole, by a plan for one rank, of which this is rank 0.
  std::span<const RankPrompt> prompts;
  const Model& model;
  WeightFeed& weights;  // gives the model's weights
  int reader;           // this rank's number among the feed's readers
  int rank;
  Stream& stream;
  Communicator& communicator;
  absl::Duration wait_timeout;
  std::function<void(int layer)> on_layer_done;  // after each layer of this rank, from 0
  TimelineRecorder* recorder = nullptr;          // null: no timeline is kept
  std::span<const LinkProbe> probes;             // before the first layer; the same on all ranks
  MessageGate* gate = nullptr;                   // of the layers' messages; null: there is none
  int gate_rank = 0;
};

struct RankOutput {
  RankStats stats;
  std::vector<float> logits;  // [prompts, vocab] of those whose last token is here, where they are wanted
  std::vector<std::optional<Link>> links;  // by probe; none: this rank sat out
  double probe_seconds = 0;                // seconds that the probes took; no part of the stats
};

// Whether it reads the LM head: the last token's rank does, where the logits are wanted.
bool ReadsHead(const Plan& plan, int rank, bool wants_logits = true);

// Leaves the feed when all has run. After an error operations may be queued that read the weights: the stream
// has to have finished before the feed goes. INTERNAL where a prompt is not what its plan says
// (PromptAttention::Check), or cannot share a pass.
absl::StatusOr<RankOutput> RunRank(const RankRun& run);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_RANK_RUNNER_H_
