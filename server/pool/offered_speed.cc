#include "server/pool/offered_speed.h"

#include <algorithm>

namespace meshfill {

v1::Speed ToProto(const PoolSpeed& speed) {
  v1::Speed message;
  message.set_gemm_flops_per_second(speed.gemm_flops_per_second);
  message.set_attention_flops_per_second(speed.attention_flops_per_second);
  message.set_merge_bytes_per_second(speed.merge_bytes_per_second);
  message.set_lm_head_bytes_per_second(speed.lm_head_bytes_per_second);
  message.set_slice_seconds(speed.slice_seconds);
  message.set_block_row_seconds(speed.block_row_seconds);
  message.set_token_seconds(speed.token_seconds);
  message.set_start_seconds(speed.start_seconds);
  message.set_lone_rank_speedup(speed.lone_rank_speedup);
  message.set_slice_tokens(static_cast<uint64_t>(speed.slice_tokens));
  return message;
}

PoolSpeed FromProto(const v1::Speed& message) {
  PoolSpeed speed;
  speed.gemm_flops_per_second = message.gemm_flops_per_second();
  speed.attention_flops_per_second = message.attention_flops_per_second();
  speed.merge_bytes_per_second = message.merge_bytes_per_second();
  speed.lm_head_bytes_per_second = message.lm_head_bytes_per_second();
  speed.slice_seconds = message.slice_seconds();
  speed.block_row_seconds = message.block_row_seconds();
  speed.token_seconds = message.token_seconds();
  speed.start_seconds = message.start_seconds();
  speed.lone_rank_speedup = message.lone_rank_speedup();
  speed.slice_tokens = static_cast<int64_t>(message.slice_tokens());
  return speed;
}

v1::Weights ToProto(const PlanWeights& weights) {
  v1::Weights message;
  message.set_streamed(weights.mode == WeightMode::kStreamed);
  message.set_sharded(weights.mode == WeightMode::kSharded);
  message.set_loaded_bytes(static_cast<uint64_t>(weights.loaded_bytes));
  message.set_run_bytes(static_cast<uint64_t>(weights.run_bytes));
  message.set_layer_seconds(weights.layer_seconds);
  message.set_layer_busy_seconds(weights.layer_busy_seconds);
  message.set_head_seconds(weights.head_seconds);
  message.set_layer_bytes(static_cast<uint64_t>(weights.layer_bytes));
  message.set_head_bytes(static_cast<uint64_t>(weights.head_bytes));
  return message;
}

PlanWeights FromProto(const v1::Weights& message) {
  return {.mode = message.sharded()    ? WeightMode::kSharded
                  : message.streamed() ? WeightMode::kStreamed
                                       : WeightMode::kResident,
          .loaded_bytes = static_cast<int64_t>(message.loaded_bytes()),
          .run_bytes = static_cast<int64_t>(message.run_bytes()),
          .layer_seconds = message.layer_seconds(),
          .layer_busy_seconds = message.layer_busy_seconds(),
          .head_seconds = message.head_seconds(),
          .layer_bytes = static_cast<int64_t>(message.layer_bytes()),
          .head_bytes = static_cast<int64_t>(message.head_bytes())};
}

PoolSpeed SlowerOf(const PoolSpeed& left, const PoolSpeed& right) {
  PoolSpeed speed = left;
  for (const auto& [name, value, kind] : kSpeedFields) {
    const auto [low, high] = std::minmax(left.*value, right.*value);
    speed.*value = kind == SpeedField::Kind::kSeconds ? high : low;
  }
  speed.slice_tokens = std::min(left.slice_tokens, right.slice_tokens);
  speed.lone_rank_speedup = 1;
  return speed;
}

double SecondsPerFlop(const PoolSpeed& speed) {
  return 1 / speed.gemm_flops_per_second + 1 / speed.attention_flops_per_second;
}

}  // namespace meshfill
