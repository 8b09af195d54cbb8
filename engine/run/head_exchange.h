// Head parallelism around a layer's attention: an all-to-all in each head group trades tokens for
// heads before the mesh, and back after it (DeepSpeed-Ulysses where one group is the whole pool).
//
// Ranks m·h … m·h + h−1 are head group m. For h = 3, of 6 query heads on one group's tokens:
//
//              before, and after    in between
//     tokens    0    1    2          0    1    2
//     heads 0   r0   r1   r2         r0   r0   r0      r0 holds all heads of its tokens before; heads 0 and 1
//           1   r0   r1   r2         r0   r0   r0      of the group's tokens, by position, in between
//           2   r0   r1   r2         r1   r1   r1
//           …
//
// An all-to-all is h − 1 rotations, in the s-th of which member k sends to k + s and receives from k − s (mod
// h), all under way at once. There are four in a layer: of Q, K, V, and of the finished O, in the compute
// dtype. A rank sends (h−1)·(Q + KV) of its own tokens with a member's heads, and O of every other member's
// tokens with its own.
#ifndef MESHFILL_ENGINE_RUN_HEAD_EXCHANGE_H_
#define MESHFILL_ENGINE_RUN_HEAD_EXCHANGE_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/comm/communicator.h"
#include "engine/model/model_shape.h"
#include "engine/plan/plan.h"
#include "engine/run/executor.h"
#include "engine/run/rank_stats.h"
#include "engine/run/timeline_recorder.h"
#include "kernels/stream.h"

namespace meshfill {

// A rank's finished output of one layer: part k has query heads [k·q_heads/h, (k+1)·q_heads/h).
struct LayerOutput {
  std::vector<BufferRef> parts;  // [h] of [q_heads/h, chunk_tokens, head_dim], dtype
  DType dtype = DType::kF32;     // f32 as the mesh left it with one head group, else the compute dtype
};

class HeadExchange {
 public:
  // All arguments outlive it. `model` has all heads and can be split into the plan's head groups.
  HeadExchange(const Plan& plan, const ModelShape& model, int rank, Stream& stream,
               Communicator& communicator, absl::Duration wait_timeout, RankStats& stats,
               TimelineRecorder* recorder = nullptr);

  // From all heads of this rank's tokens to this member's heads of the group's tokens, in the order of their
  // positions. Without head groups, the same chunks. On an error, this rank's peers wait until the caller
  // aborts the communicator; so for ToTokens.
  absl::StatusOr<LayerChunks> ToHeads(LayerChunks own);

  // From the mesh's output (AttentionExecutor::Run) to all heads of this rank's tokens.
  absl::StatusOr<LayerOutput> ToTokens(BufferRef mesh_output);

 private:
  // What moves for one member of the group, this one included.
  struct Moves {
    std::function<absl::StatusOr<BufferRef>(int member)> send;
    std::function<int64_t(int member)> receive_bytes;
    std::function<absl::Status(int member, BufferRef message)> accept;
  };
  absl::Status AllToAll(const Moves& moves);

  // `tensor`: [all_heads, own tokens, head_dim]; `to`: [heads, group's tokens, head_dim]; tokens are those
  // that `members` deals.
  absl::Status TensorToHeads(BufferRef tensor, const TokenLayout& members, int all_heads, int heads,
                             void* to);

  absl::Status Copy(const CopyHeadsArgs& args);
  // Rows of a message: [heads, member's tokens, head_dim].
  HeadRows MemberRows(const TokenLayout& members, int member, DType dtype) const;
  // Rows of its tokens in [heads, group's tokens, head_dim].
  HeadRows GroupRows(const TokenLayout& members, int member, DType dtype) const;

  const ModelShape& model_;
  const ModelShape slice_;        // with one member's heads
  const int heads_;               // h
  const int member_;              // of the group
  const int first_rank_;          // of the group
  const TokenLayout q_members_;   // the group's tokens over its members
  const TokenLayout kv_members_;  // likewise, of a cached prefix and the prompt
  Stream& stream_;
  Communicator& communicator_;
  const absl::Duration wait_timeout_;
  RankStats& stats_;
  TimelineRecorder* const recorder_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_HEAD_EXCHANGE_H_
