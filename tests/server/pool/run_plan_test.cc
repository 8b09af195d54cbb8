#include "server/pool/run_plan.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "engine/plan/planner.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/schedule/random_schedule.h"

namespace meshfill {
namespace {

ModelShape Shape() {
  return {.layers = 2,
          .hidden = 64,
          .intermediate = 128,
          .q_heads = 8,
          .kv_heads = 2,
          .head_dim = 8,
          .vocab = 100,
          .context_tokens = 1 << 20};
}

Plan RandomPlan(std::mt19937_64& random) {
  const LayoutKind kinds[] = {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous};
  const auto choice = MakePlan(Shape(), PoolSpeed{},
                               {.tokens = Draw<int64_t>(random, 1, 500),
                                .cached_tokens = Draw(random, 0, 1) * Draw<int64_t>(random, 1, 500),
                                .ranks = Draw(random, 1, 12),
                                .layout = kinds[Draw(random, 0, 2)],
                                .stripe = Draw<int64_t>(random, 1, 20),
                                .partial_dtype = Draw(random, 0, 1) == 0 ? DType::kF32 : DType::kBf16});
  EXPECT_TRUE(choice.ok()) << choice.status();
  Plan plan = choice->plan;
  if (Draw(random, 0, 1) == 0) {
    plan.kv_inner = DrawKvInner(random, plan.tile);
    plan.schedule = RandomSchedule(random, plan.tile, plan.kv_inner);
  }
  plan.slice_tokens = Draw<int64_t>(random, 1, 9000);
  plan.exchange_tokens = plan.slice_tokens * Draw(random, 0, 1) * Draw(random, 16, 40);
  if (Draw(random, 0, 1) == 0) {
    plan.placement = RowFirst(plan.ranks());
    std::shuffle(plan.placement.seat_of_rank.begin(), plan.placement.seat_of_rank.end(), random);
  }
  return plan;
}

std::vector<uint32_t> RandomTokens(std::mt19937_64& random, int64_t count) {
  std::vector<uint32_t> tokens(count);
  for (uint32_t& id : tokens) id = Draw<uint32_t>(random, 0, 99);
  return tokens;
}

TEST(RunPlanTest, APlanArrivesAsItWasSent) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 200; ++round) {
    const Plan plan = RandomPlan(random);
    const auto arrived = FromRunPlan(ToRunPlan(plan));
    ASSERT_TRUE(arrived.ok()) << arrived.status() << " " << plan.DebugString();
    // Workers act on all but what led to the plan.
    Plan expected = plan;
    expected.links = {};
    expected.placement.name.clear();
    expected.predicted = {.seconds = plan.predicted.seconds};
    EXPECT_EQ(*arrived, expected) << plan.DebugString();
    for (int rank = 0; rank < plan.ranks(); ++rank) EXPECT_EQ(arrived->RankAt(plan.SeatOf(rank)), rank);
  }
}

TEST(RunPlanTest, TheHashSeesEveryChange) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 100; ++round) {
    const Plan plan = RandomPlan(random);
    const std::vector<uint32_t> tokens = RandomTokens(random, plan.layout.tokens());
    std::vector<std::vector<uint32_t>> shards;
    for (int rank = 0; rank < plan.ranks(); ++rank) {
      shards.push_back(plan.layout.Deal(rank, std::span<const uint32_t>(tokens)));
    }
    const uint64_t hash = RunHash(plan, 0, shards);
    EXPECT_EQ(RunHash(*FromRunPlan(ToRunPlan(plan)), 0, shards), hash);
    EXPECT_NE(RunHash(plan, 1, shards), hash);

    std::vector<std::vector<uint32_t>> other = shards;
    std::vector<uint32_t>& shard = other[plan.layout.RankOf(0)];
    shard[Draw<size_t>(random, 0, shard.size() - 1)] ^= 1u << Draw(random, 0, 31);
    EXPECT_NE(RunHash(plan, 0, other), hash);
    if (plan.ranks() > 1 && !shards[0].empty()) {
      other = shards;
      other[1].insert(other[1].begin(), other[0].back());
      other[0].pop_back();
      EXPECT_NE(RunHash(plan, 0, other), hash) << "a token is its neighbour's";
    }

    Plan changed = plan;
    changed.partial_dtype = plan.partial_dtype == DType::kF32 ? DType::kBf16 : DType::kF32;
    EXPECT_NE(RunHash(changed, 0, shards), hash);
    changed = plan;
    ++changed.kv_inner;
    EXPECT_NE(RunHash(changed, 0, shards), hash);
    changed = plan;
    ++changed.cached_tokens;
    EXPECT_NE(RunHash(changed, 0, shards), hash);
    changed = plan;
    ++changed.slice_tokens;
    EXPECT_NE(RunHash(changed, 0, shards), hash);
    changed = plan;
    changed.exchange_tokens += changed.slice_tokens;
    EXPECT_NE(RunHash(changed, 0, shards), hash);
    if (plan.ranks() > 1) {
      changed = plan;
      changed.placement = RowFirst(plan.ranks());
      for (int rank = 0; rank < plan.ranks(); ++rank) {
        changed.placement.seat_of_rank[rank] = (plan.SeatOf(rank) + 1) % plan.ranks();
      }
      EXPECT_NE(RunHash(changed, 0, shards), hash);
    }
    changed = plan;
    changed.schedule.steps.back().blocks.push_back({0, 0});
    EXPECT_NE(RunHash(changed, 0, shards), hash);
    changed = plan;
    ++changed.schedule.steps.front().spans;
    EXPECT_NE(RunHash(changed, 0, shards), hash);
  }
}

TEST(RunPlanTest, WhatIsNoPlanIsRefused) {
  std::mt19937_64 random(TestSeed());
  const v1::RunPlan good = ToRunPlan(RandomPlan(random));
  const auto refused = [&](auto change) {
    v1::RunPlan plan = good;
    change(plan);
    return !FromRunPlan(plan).ok();
  };
  EXPECT_FALSE(refused([](v1::RunPlan&) {}));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) { plan.set_layout("diagonal"); }));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) { plan.set_ranks(plan.ranks() + 1); }));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) { plan.set_a(0); }));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) { plan.set_heads(1u << 31); }));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) { plan.set_tokens(0); }));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) { plan.set_tokens(uint64_t{1} << 40); }));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) { plan.set_cached_tokens(uint64_t{1} << 31); }));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) { plan.set_cached_tokens(~uint64_t{0}); }));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) { plan.set_partial_dtype("f16"); }));
  for (uint32_t kv_inner : {1u, 13u, 1u << 31, ~0u}) {
    EXPECT_TRUE(refused([kv_inner](v1::RunPlan& plan) { plan.set_kv_inner(kv_inner); })) << kv_inner;
  }
  EXPECT_TRUE(refused([](v1::RunPlan& plan) {
    plan.set_slice_tokens(7);
    plan.set_exchange_tokens(8);
  }));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) { plan.set_exchange_tokens(uint64_t{1} << 33); }));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) { plan.clear_partial_dtype(); }));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) { plan.mutable_steps(0)->add_blocks(0); }));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) {
    plan.set_layout("striped");
    plan.clear_stripe();
  }));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) { plan.clear_steps(); }));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) { plan.add_seats(plan.ranks()); }));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) {
    plan.clear_seats();
    for (uint32_t rank = 0; rank <= plan.ranks(); ++rank) plan.add_seats(rank);
  }));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) {
    plan.clear_seats();
    for (uint32_t rank = 0; rank < plan.ranks(); ++rank) plan.add_seats(rank == 0 ? 1 : rank);
  }));
  EXPECT_TRUE(refused([](v1::RunPlan& plan) { plan.mutable_steps(0)->set_comm("kiss"); }));
  for (uint32_t spans : {0u, 1000u, 1u << 31, ~0u}) {
    EXPECT_TRUE(refused([spans](v1::RunPlan& plan) { plan.mutable_steps(0)->set_spans(spans); })) << spans;
  }
  EXPECT_TRUE(refused([](v1::RunPlan& plan) {
    plan.mutable_steps(0)->add_blocks(1u << 31);
    plan.mutable_steps(0)->add_blocks(0);
  }));
}

TEST(RunPlanTest, StatsAndOutcomesArriveAsTheyWereSent) {
  RankStats stats;
  stats.attention_seconds = 1;
  stats.block_seconds = 2;
  stats.merge_seconds = 3;
  stats.wait_seconds = {{Traffic::kQ, 4}, {Traffic::kKv, 5}, {Traffic::kO, 6}, {Traffic::kAllToAll, 7}};
  stats.total_seconds = 8;
  stats.sent = {{Traffic::kQ, 9}, {Traffic::kKv, 10}, {Traffic::kO, 11}, {Traffic::kAllToAll, 12}};
  stats.blocks = 13;
  stats.tokens_per_expert = {0, 14, int64_t{1} << 40, 0, 0, 15};
  const RankStats arrived = FromProto(ToProto(stats));
  EXPECT_EQ(arrived.attention_seconds, 1);
  EXPECT_EQ(arrived.block_seconds, 2);
  EXPECT_EQ(arrived.merge_seconds, 3);
  EXPECT_EQ(arrived.wait_seconds, stats.wait_seconds);
  EXPECT_EQ(arrived.total_seconds, 8);
  EXPECT_EQ(arrived.sent, stats.sent);
  EXPECT_EQ(arrived.blocks, 13);
  EXPECT_EQ(arrived.tokens_per_expert, stats.tokens_per_expert);
  const absl::Status status = absl::DataLossError("a byte \xFF is gone");
  EXPECT_EQ(FromOutcome(ToOutcome(status)), status);
  EXPECT_TRUE(FromOutcome(ToOutcome(absl::OkStatus())).ok());
}

}  // namespace
}  // namespace meshfill
