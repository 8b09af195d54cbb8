// Head groups: where the planner takes them, and what their all-to-alls cost.
#include <optional>

#include "gtest/gtest.h"
#include "tests/engine/plan/planner_inputs.h"

namespace meshfill {
namespace {

TEST(MakePlan, TakesTheCallersHeadGroups) {
  const ModelShape model = Llama(8, 2, DType::kBf16);
  const auto head_groups = MakePlan(model, kSlowLink, {.tokens = 4096, .ranks = 12, .heads = 2});
  ASSERT_TRUE(head_groups.ok()) << head_groups.status();
  EXPECT_EQ(head_groups->plan.heads, 2);
  EXPECT_EQ(head_groups->candidates.size(), TilesOf(6).size());
  const auto shape =
      MakePlan(model, kSlowLink, {.tokens = 4096, .ranks = 12, .tile = Tile{.a = 3, .b = 1}, .heads = 4});
  ASSERT_TRUE(shape.ok()) << shape.status();
  EXPECT_EQ(shape->plan.heads, 4);
  EXPECT_EQ(shape->plan.tile, (Tile{.a = 3, .b = 1}));
  EXPECT_EQ(shape->candidates.size(), 1u);
  const auto tile_alone =
      MakePlan(model, kSlowLink, {.tokens = 4096, .ranks = 12, .tile = Tile{.a = 3, .b = 4}});
  ASSERT_TRUE(tile_alone.ok()) << tile_alone.status();
  EXPECT_EQ(tile_alone->plan.heads, 1);
  const auto ulysses = MakePlan(model, kSlowLink, {.tokens = 4096, .ranks = 8, .heads = 8});
  ASSERT_TRUE(ulysses.ok()) << ulysses.status();
  EXPECT_EQ(ulysses->plan.tile, (Tile{.a = 1, .b = 1}));
}

// A member's share is 1/h of its heads, on h times as many tokens: with equal chunks the compute is that of
// one head group but for the reordering, and the wait is that of four all-to-alls and of the mesh.
TEST(MakePlan, PredictsHeadGroups) {
  const ModelShape model = Llama(8, 2, DType::kBf16);
  const PoolSpeed speed = {.gemm_flops_per_second = 1e12,
                           .attention_flops_per_second = 1e12,
                           .merge_bytes_per_second = 1e9,
                           .link_bytes_per_second = 1e9,
                           .link_latency_seconds = 1e-3};
  const auto prediction = [&](std::optional<int> heads) {
    return MakePlan(model, speed, {.tokens = 8192, .ranks = 4, .heads = heads})->plan.predicted;
  };
  const double q_chunk = 2048 * 8 * 64 * 2;
  const double kv_chunk = 2048 * 2 * 2 * 64 * 2;
  const Prediction ulysses = prediction(4);
  const Prediction one_rank_of_four =
      MakePlan(
          model,
          {.gemm_flops_per_second = 4e12, .attention_flops_per_second = 4e12, .merge_bytes_per_second = 1e9},
          {.tokens = 8192, .ranks = 1})
          ->plan.predicted;
  const double lm_head = LmHeadFlops(model) * (1 / 1e12 - 1 / 4e12);  // not shared
  const double reordered = (2 * q_chunk + 2 * kv_chunk) / 1e9;        // 4 members share 2 KV heads
  EXPECT_NEAR(ulysses.compute_seconds, one_rank_of_four.compute_seconds + lm_head + model.layers * reordered,
              1e-9);
  EXPECT_NEAR(ulysses.comm_wait_seconds, model.layers * (4e-3 + 3 * (2 * q_chunk / 4 + kv_chunk / 2) / 1e9),
              1e-9);
  EXPECT_EQ(ulysses.comm_bytes,
            (CommBytes{{Traffic::kAllToAll,
                        static_cast<int64_t>(model.layers * 3 * (2 * q_chunk / 4 + kv_chunk / 2))}}));
}

// Where bytes decide: an all-to-all moves each Q once, a mesh moves √n − 1 of them.
TEST(MakePlan, TakesHeadGroupsOnASlowLink) {
  const auto choice = MakePlan(Llama(8, 8, DType::kBf16), kSlowLink,
                               {.tokens = 65536, .ranks = 8, .partial_dtype = DType::kBf16});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->plan.heads, 8);
  const auto few_heads = MakePlan(Llama(2, 2, DType::kBf16), kSlowLink,
                                  {.tokens = 65536, .ranks = 8, .partial_dtype = DType::kBf16});
  ASSERT_TRUE(few_heads.ok()) << few_heads.status();
  EXPECT_EQ(few_heads->plan.heads, 2);
  EXPECT_EQ(few_heads->plan.tile, (Tile{.a = 2, .b = 2}));
}

// Slices of an exchange need two layers' weights at once.
TEST(MakePlan, ExchangesInSlicesWhereWeightsStay) {
  PlanRequest request = {.tokens = 65536,
                         .ranks = 4,
                         .tile = Tile{1, 1},
                         .heads = 4,
                         .one_memory = false,
                         .hides_exchanges = true};
  EXPECT_GT(MakePlan(Llama(8, 8, DType::kBf16), kSlowLink, request)->plan.exchanges(), 1);
  request.weights.mode = WeightMode::kStreamed;
  EXPECT_EQ(MakePlan(Llama(8, 8, DType::kBf16), kSlowLink, request)->plan.exchanges(), 1);
  request.weights.mode = WeightMode::kResident;
  request.hides_exchanges = false;
  EXPECT_EQ(MakePlan(Llama(8, 8, DType::kBf16), kSlowLink, request)->plan.exchanges(), 1);
}

TEST(MakePlan, SlicesOfAnExchangeGainAPercent) {
  PlanRequest request = {.tokens = 65536, .ranks = 4, .tile = Tile{1, 1}, .heads = 4, .one_memory = false};
  PoolSpeed speed = kSlowLink;
  int sliced = 0, whole = 0;
  for (speed.link_bytes_per_second = 1e9; speed.link_bytes_per_second < 1e14;
       speed.link_bytes_per_second *= 1.3) {
    request.hides_exchanges = false;
    const double at_once = MakePlan(Llama(8, 8, DType::kBf16), speed, request)->plan.predicted.seconds;
    request.hides_exchanges = true;
    const auto choice = MakePlan(Llama(8, 8, DType::kBf16), speed, request);
    const bool in_slices = choice->plan.exchanges() > 1;
    ++(in_slices ? sliced : whole);
    EXPECT_LE(choice->plan.predicted.seconds, (in_slices ? 0.99 : 1) * at_once)
        << speed.link_bytes_per_second << " bytes/s";
  }
  EXPECT_GT(sliced, 0);
  EXPECT_GT(whole, 0);
}

}  // namespace
}  // namespace meshfill
