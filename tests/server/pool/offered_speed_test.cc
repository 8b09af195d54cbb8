// Speeds and weights as workers offer them: they arrive as they were sent, and the slowest counts.
#include "server/pool/offered_speed.h"

#include "gtest/gtest.h"

namespace meshfill {
namespace {

TEST(OfferedSpeedTest, WeightsArriveAsTheyWereSent) {
  const PlanWeights weights = {.mode = WeightMode::kStreamed,
                               .loaded_bytes = 1,
                               .run_bytes = 2,
                               .layer_seconds = 3,
                               .layer_busy_seconds = 4,
                               .head_seconds = 5,
                               .layer_bytes = 6,
                               .head_bytes = 7};
  EXPECT_EQ(FromProto(ToProto(weights)), weights);
  const PlanWeights sharded = {.mode = WeightMode::kSharded, .layer_bytes = 1};
  EXPECT_EQ(FromProto(ToProto(sharded)), sharded);
  EXPECT_EQ(FromProto(ToProto(PlanWeights{})), PlanWeights());
}

TEST(OfferedSpeedTest, APoolIsAsFastAsItsSlowestPart) {
  PoolSpeed left, right;
  left.gemm_flops_per_second = 1;
  right.attention_flops_per_second = 2;
  left.slice_seconds = 3;
  right.start_seconds = 4;
  right.slice_tokens = 512;
  left.lone_rank_speedup = right.lone_rank_speedup = 5;
  const PoolSpeed slower = SlowerOf(left, right);
  EXPECT_EQ(slower.gemm_flops_per_second, 1);
  EXPECT_EQ(slower.attention_flops_per_second, 2);
  EXPECT_EQ(slower.slice_seconds, 3);
  EXPECT_EQ(slower.start_seconds, 4);
  EXPECT_EQ(slower.slice_tokens, 512);
  EXPECT_EQ(slower.lone_rank_speedup, 1);
  EXPECT_EQ(FromProto(ToProto(slower)), slower);
  EXPECT_TRUE(CheckPoolSpeed(slower).ok());
  EXPECT_FALSE(CheckPoolSpeed(FromProto(v1::Speed())).ok());
}

}  // namespace
}  // namespace meshfill
