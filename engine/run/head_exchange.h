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
//
// In one slice, the plan's PlanShape::exchanges(), nothing else goes on meanwhile: Q, K and V move one after
// the other, each once the one before has its place. In more slices a rank's tokens are cut at multiples of
// exchange_tokens (a shorter chunk has empty slices at its end), and each is an all-to-all of its own. What
// is local to a token then goes on while they are under way, for slices of 3:
//
//     rank        attention l | token work 0 | token work 1 | token work 2 | attention l + 1
//     arrives                 | O 0   O 1   O 2
//     leaves                                 | Q, K, V 0    | Q, K, V 1    | Q, K, V 2
//
// The messages are the same, each cut in as many. All ranks start them in the same order: O of all slices, K
// and V of a cached prefix, then Q, K and V of each slice.
#ifndef MESHFILL_ENGINE_RUN_HEAD_EXCHANGE_H_
#define MESHFILL_ENGINE_RUN_HEAD_EXCHANGE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/comm/communicator.h"
#include "engine/model/model_shape.h"
#include "engine/plan/layer_reach.h"
#include "engine/plan/plan.h"
#include "engine/run/executor.h"
#include "engine/run/rank_stats.h"
#include "engine/run/timeline_recorder.h"
#include "kernels/stream.h"

namespace meshfill {

// A rank's finished output of a slice of its tokens in one layer: part k has query heads [k·q_heads/h,
// (k+1)·q_heads/h).
struct LayerOutput {
  std::vector<BufferRef> parts;  // [h] of [q_heads/h, slice's tokens, head_dim], dtype
  DType dtype = DType::kF32;     // f32 as the mesh left it with one head group, else the compute dtype
};

class HeadExchange {
 public:
  // All arguments outlive it. `model` has all heads and can be split into the plan's head groups.
  HeadExchange(const Plan& plan, const ModelShape& model, int rank, Stream& stream,
               Communicator& communicator, absl::Duration wait_timeout, RankStats& stats,
               TimelineRecorder* recorder = nullptr);

  int slices() const { return slices_; }
  // This rank's tokens of a slice, by slot of its chunk.
  SlotRange OwnSlots(int slice) const { return Slots(q_, member_, slice); }

  // From all heads of this rank's tokens to this member's heads of the group's tokens, in the order of their
  // positions. Each slice in turn, `own` with its tokens; in one slice its keys are all of kv_layout(), in
  // more those of a cached prefix come before, by StartPrefix. On an error, this rank's peers wait until the
  // caller aborts the communicator; so for all that follow.
  absl::Status StartToHeads(int slice, LayerChunks own);
  // K [kv_heads, tokens, head_dim], then V likewise, of the rank's cached tokens. In more slices than one.
  absl::Status StartPrefix(const BufferRef& kv);
  // Call once all slices have been started. Without head groups: the chunks that were given.
  absl::StatusOr<LayerChunks> FinishToHeads();

  // From the mesh's output (AttentionExecutor::Run) to all heads of this rank's tokens: all slices at once,
  // which are then taken each in turn.
  absl::Status StartToTokens(BufferRef mesh_output);
  absl::StatusOr<LayerOutput> FinishToTokens(int slice);

 private:
  static constexpr int kPrefix = -1;  // stands for a slice: the cached tokens before the first one

  // What is exchanged: of these tokens over the group's members, a member's `heads` of all.
  struct Tensor {
    TokenLayout members;
    bool keys;  // they include the cached ones
    int all_heads;
    int heads;
  };
  // An all-to-all that has begun.
  struct UnderWay {
    BufferRef own;                                         // this member's message to itself
    std::vector<std::unique_ptr<PendingReceive>> pending;  // [h − 1], by rotation
    TimelineRecorder::Moment start;
  };
  struct TensorUnderWay {
    const Tensor* tensor;
    int slice;
    int half;  // 1: V
    UnderWay messages;
  };
  absl::StatusOr<UnderWay> Start(const std::function<absl::StatusOr<BufferRef>(int member)>& send,
                                 const std::function<int64_t(int member)>& receive_bytes);
  absl::Status Finish(UnderWay under_way,
                      const std::function<absl::Status(int member, BufferRef message)>& accept);

  // `data`: all heads of the slice of the rank's own tokens, [all_heads, tokens, head_dim].
  absl::StatusOr<UnderWay> StartTensor(const Tensor& tensor, int slice, const BufferRef& data);
  // `to`: [heads, group's tokens, head_dim].
  absl::Status FinishTensor(const Tensor& tensor, int slice, UnderWay under_way, void* to);
  absl::StatusOr<LayerChunks> ExchangeWhole(LayerChunks own);

  SlotRange Slots(const Tensor& tensor, int member, int slice) const;
  int64_t TensorBytes(int64_t heads, int64_t tokens) const;
  // Copies a member's slots, [heads, slots, head_dim] in the compute dtype as they travel, into their places
  // among the group's tokens, or from there.
  absl::Status CopyIn(const Tensor& tensor, int member, SlotRange slots, const void* message, void* group);
  absl::Status CopyOut(const Tensor& tensor, int member, SlotRange slots, const void* group, void* message);
  struct Rows {
    HeadRows group;
    HeadRows message;
    int64_t tokens;
  };
  std::vector<Rows> RowsOf(const Tensor& tensor, int member, SlotRange slots, DType group_dtype) const;

  const ModelShape& model_;
  const ModelShape one_;  // the model with one member's heads
  const int heads_;       // h
  const int member_;      // index in the head group
  const int first_rank_;  // the head group's first rank
  const int slices_;
  const int64_t slice_tokens_;
  const Tensor q_;
  const Tensor kv_;  // K, or V
  Stream& stream_;
  Communicator& communicator_;
  const absl::Duration wait_timeout_;
  RankStats& stats_;
  TimelineRecorder* const recorder_;

  LayerChunks whole_;  // chunks of a layer in one slice; their all-to-alls have yet to begin
  BufferRef output_;   // without head groups
  std::vector<TensorUnderWay> to_heads_;
  std::vector<UnderWay> to_tokens_;    // by slice
  TimelineRecorder::Moment last_end_;  // end of the last transfer that was recorded
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_HEAD_EXCHANGE_H_
