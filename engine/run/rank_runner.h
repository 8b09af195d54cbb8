// One rank's part of a prefill: every layer of the transformer over this rank's tokens.
//
//     embed
//     → for each layer: [norm, q k v, RoPE] by slices → behind a cached prefix: its K and V before these
//                       → tokens to heads in the head group
//                       → attention over the mesh → heads to tokens → [o, norm, MLP] by slices
//     → on the rank that holds the last token: norm, LM head on that one row
//
// Everything but attention is local to a token, so it runs in the plan's slices and its intermediates stay
// small whatever the chunk's length. The residual stream is f32. Where head groups exchange in more slices
// than one (head_exchange.h), a slice's tokens go from one layer's attention to the next one's at once, while
// other slices are under way.
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
#include "engine/kv/kv_sink.h"
#include "engine/kv/kv_slabs.h"
#include "engine/model/model.h"
#include "engine/model/weight_feed.h"
#include "engine/plan/plan.h"
#include "engine/run/rank_stats.h"
#include "engine/run/timeline_recorder.h"
#include "kernels/stream.h"

namespace meshfill {

struct RankRun {
  const Plan& plan;
  const Model& model;
  WeightFeed& weights;  // gives the model's weights
  int reader;           // this rank's number among the feed's readers
  int rank;
  std::span<const uint32_t> ids;  // this rank's tokens, by slot
  Stream& stream;
  Communicator& communicator;
  absl::Duration wait_timeout;
  std::function<void(int layer)> on_layer_done;  // after each layer of this rank, from 0
  KvSink* kv;                                    // where this rank's K and V go; null: they are dropped
  const KvSlabs* prefix = nullptr;               // K and V of the plan's cached tokens; null: there are none
  int64_t tokens_ahead = 0;              // prompt tokens of later runs; above 0: this run has no logits
  TimelineRecorder* recorder = nullptr;  // null: no timeline is kept
  std::span<const LinkProbe> probes;     // before the first layer; the same on all ranks
  MessageGate* gate = nullptr;           // of the layers' messages; null: there is none
  int gate_rank = 0;
};

struct RankOutput {
  RankStats stats;
  std::vector<float> logits;               // [vocab] on the last token's rank, where they are wanted
  std::vector<std::optional<Link>> links;  // by probe; none: this rank sat out
  double probe_seconds = 0;                // seconds that the probes took; no part of the stats
};

// Whether it reads the LM head: the last token's rank does, where the logits are wanted.
bool ReadsHead(const Plan& plan, int rank, bool wants_logits = true);

// Leaves the feed when all has run. After an error operations may be queued that read the weights: the stream
// has to have finished before the feed goes. INTERNAL where the ids are not those of the rank's chunk, where
// the prefix lacks cached tokens of the plan, and where a token's keys are not dealt to the rank that
// computes them (CanFollow, engine/plan/plan_shape.h).
absl::StatusOr<RankOutput> RunRank(const RankRun& run);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_RANK_RUNNER_H_
