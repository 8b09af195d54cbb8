// Runs a plan's schedule for one layer's attention on one rank: Mesh-Attention's Algorithm 1 in the order of
// its Algorithm 2.
//
// With h head groups there are h meshes of n/h ranks side by side: rank m·h + k is rank m of mesh k, which
// attends with one slice of the heads (ModelShape::HeadSlice) over the tokens of the groups
// (TokenLayout::Groups). head_exchange.h brings the chunks into this form and the outputs back.
#ifndef MESHFILL_ENGINE_RUN_EXECUTOR_H_
#define MESHFILL_ENGINE_RUN_EXECUTOR_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/comm/communicator.h"
#include "engine/model/model_shape.h"
#include "engine/plan/plan.h"
#include "engine/run/rank_stats.h"
#include "engine/run/timeline_recorder.h"
#include "kernels/stream.h"

namespace meshfill {

// The chunks of one layer on one rank: of all heads and its own tokens, or of the heads of its mesh and the
// tokens of its head group. Queries are dealt by the plan's layout, keys by its kv_layout(): whoever calls
// has put a cached prefix in its place.
struct LayerChunks {
  BufferRef q;   // [q_heads, q_chunk_tokens, head_dim], compute dtype
  BufferRef kv;  // K, then V, each [kv_heads, kv_chunk_tokens, head_dim], compute dtype
};

class AttentionExecutor {
 public:
  // All arguments outlive the executor. The plan's schedule has passed CheckSchedule. `model` has all heads.
  AttentionExecutor(const Plan& plan, const ModelShape& model, int rank, Stream& stream,
                    Communicator& communicator, absl::Duration wait_timeout, RankStats& stats,
                    TimelineRecorder* recorder = nullptr);

  // Attention of one layer over chunks of the mesh's heads and the group's tokens; `window` is this layer's
  // sliding window (0: none), `sinks` its attention sinks, [q_heads] of all heads, as the stream reads them
  // (null: it has none). Returns O#0: this rank's finished output, [q_heads, chunk_tokens, head_dim] of those
  // heads and tokens, f32, with its LSE, [q_heads, chunk_tokens], f32, behind it. Chunks are released as soon
  // as their last block has run and their last send has left. Deterministic: merges happen in the schedule's
  // order. On an error, this rank's peers wait until the caller aborts the communicator.
  absl::StatusOr<BufferRef> Run(LayerChunks chunks, int64_t window, const float* sinks = nullptr);

 private:
  const Plan& plan_;
  const ModelShape& model_;
  const int rank_;
  Stream& stream_;
  Communicator& communicator_;
  const absl::Duration wait_timeout_;
  RankStats& stats_;
  TimelineRecorder* const recorder_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_EXECUTOR_H_
