// How a pool plans: over which ranks, in what memory, and with weights that are streamed or shared.
#include "server/pool/pool_planner.h"

#include <memory>

#include "engine/kv/kv_prompt.h"
#include "tests/server/pool/leader_fixture.h"

namespace meshfill {
namespace {

// What is left is planned anew: all ranks, or fewer with the rest idle, whatever is predicted to be faster.
TEST(PoolPlannerTest, PlansOverWhoIsLeft) {
  for (int ranks = 1; ranks <= 16; ++ranks) {
    const PoolCapacity capacity{.ranks = ranks};
    const auto best = PlanForPool(Shape(), EngineOptions(), capacity, 4096, {});
    ASSERT_TRUE(best.ok()) << best.status();
    EXPECT_LE(best->plan.ranks(), ranks);
    EXPECT_GE(best->plan.ranks(), ranks - ranks / 4);
    for (const PlanCandidate& candidate : best->candidates) {
      EXPECT_LE(best->plan.predicted.seconds, candidate.predicted.seconds);
    }
    for (int fewer = ranks; fewer >= ranks - ranks / 4; --fewer) {
      const auto choice = MakePlan(Shape(), PoolSpeed{}, {.tokens = 4096, .ranks = fewer});
      ASSERT_TRUE(choice.ok()) << choice.status();
      EXPECT_LE(best->plan.predicted.seconds, choice->plan.predicted.seconds) << fewer << " of " << ranks;
    }
  }
}

class FasterPartTest : public testing::Test {
 protected:
  // Four workers, of which the last is so many times as slow.
  static PoolCapacity WithSlow(double times) {
    PoolCapacity capacity = {.ranks = 4, .speed = Slow(times), .first_seats = {0, 1, 2, 3}};
    capacity.topology.node_of_seat = {0, 1, 2, 3};
    capacity.faster_parts = {Three(PoolSpeed())};
    return capacity;
  }
  static PoolSpeed Slow(double times) {
    PoolSpeed speed;
    speed.gemm_flops_per_second /= times;
    speed.attention_flops_per_second /= times;
    return speed;
  }
  static PoolCapacity Three(const PoolSpeed& speed) {
    PoolCapacity capacity = {.ranks = 3, .speed = speed, .first_seats = {0, 1, 2}};
    capacity.topology.node_of_seat = {0, 1, 2};
    return capacity;
  }
  static absl::StatusOr<PlanChoice> PlanOn(const PoolCapacity& part, const PrefillOptions& options = {}) {
    return PlanForPool(Shape(), EngineOptions(), part, 4096, options);
  }
  static absl::StatusOr<PlanChoice> PlanOnFastestOf(const PoolCapacity& capacity,
                                                    const PrefillOptions& options = {}) {
    return PlanOnFastest(capacity, options, [&](const PoolCapacity& part) { return PlanOn(part, options); });
  }
};

// Though the slow one has too little memory to take part.
TEST_F(FasterPartTest, RunsWhereItFits) {
  PoolCapacity capacity = WithSlow(10);
  capacity.rank_memory_bytes = 1;
  ASSERT_FALSE(PlanOn(capacity).ok());
  const auto choice = PlanOnFastestOf(capacity);
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->plan, PlanOn(Three(PoolSpeed()))->plan);
  capacity.faster_parts[0].rank_memory_bytes = 2;
  EXPECT_EQ(PlanOnFastestOf(capacity).status(), PlanOn(capacity).status());
}

// As fast as a pool without the one that is idle.
TEST_F(FasterPartTest, RunsWhereItIsFaster) {
  for (const double times : {1.0, 1.1, 1.3, 2.0, 10.0}) {
    SCOPED_TRACE(times);
    const auto best = PlanOnFastestOf(WithSlow(times));
    const auto all = PlanOn(WithSlow(times)), three = PlanOn(Three(PoolSpeed()));
    ASSERT_TRUE(best.ok() && all.ok() && three.ok());
    EXPECT_EQ(best->plan, IsFaster(three, all) ? three->plan : all->plan);
    if (times >= 2) {
      EXPECT_EQ(best->plan, three->plan);
    }
  }
}

TEST_F(FasterPartTest, AFixedTileIsForAllRanks) {
  const PrefillOptions options = {.tile = Tile{2, 2}};
  int planned = 0;
  const auto choice = PlanOnFastest(WithSlow(10), options, [&](const PoolCapacity& part) {
    ++planned;
    return PlanOn(part, options);
  });
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(planned, 1);
}

TEST_F(FasterPartTest, KeptKvIsSpreadOverAllWorkers) {
  const PrefillOptions options = {.kv = std::make_shared<KvPrompt>(KvShapeOf(Shape()), 4096)};
  ASSERT_EQ(PlanOnFastestOf(WithSlow(10))->plan.ranks(), 3);
  EXPECT_EQ(PlanOnFastestOf(WithSlow(10), options)->plan, PlanOn(WithSlow(10), options)->plan);
}

TEST_F(FasterPartTest, KeptKvIsOnTheFastWhereTheSlowHaveNoMemory) {
  const PrefillOptions options = {.kv = std::make_shared<KvPrompt>(KvShapeOf(Shape()), 4096)};
  PoolCapacity capacity = WithSlow(10);
  capacity.rank_memory_bytes = 1;
  ASSERT_FALSE(PlanOn(capacity, options).ok());
  const auto choice = PlanOnFastestOf(capacity, options);
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->plan.ranks(), 3);
}

TEST_F(FasterPartTest, SharedWeightsNeedAllWorkers) {
  PoolCapacity capacity = WithSlow(10);
  const PlanWeights shared = {
      .mode = WeightMode::kSharded, .loaded_bytes = 1000, .run_bytes = 100, .layer_bytes = 50};
  capacity.rank_weights = {.mode = WeightMode::kStreamed, .layer_seconds = 100};
  capacity.faster_parts[0].rank_weights = capacity.rank_weights;
  capacity.shared_weights = shared;
  EXPECT_EQ(PlanOnFastestOf(capacity)->weights.mode, WeightMode::kSharded);
  EXPECT_EQ(PlanOnFastestOf(capacity)->plan.ranks(), 4) << "three would have to stream them";
  capacity.shared_weights.reset();
  capacity.rank_weights = shared;
  EXPECT_EQ(PlanOnFastestOf(capacity)->plan.ranks(), 4);
}

TEST(PoolPlannerTest, AFixedTileIsForAllRanks) {
  PrefillOptions options;
  options.tile = Tile{2, 2};
  EXPECT_EQ(PlanForPool(Shape(), EngineOptions(), {.ranks = 4}, 100, options)->plan.tile, (Tile{2, 2}));
  EXPECT_EQ(PlanForPool(Shape(), EngineOptions(), {.ranks = 5}, 100, options).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(PoolPlannerTest, MemoryIsWhatTheTightestRankHas) {
  EXPECT_EQ(PlanForPool(Shape(), EngineOptions(), {.ranks = 4, .rank_memory_bytes = 1000}, 4096, {})
                .status()
                .code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(PlanForPool(Shape(), EngineOptions(), {.ranks = 0}, 4096, {}).status().code(),
            absl::StatusCode::kUnavailable);
}

// A prompt that fits without the room for short ones leaves it to them; one that does not has it.
TEST(PoolPlannerTest, LeavesRoomToShortPrompts) {
  constexpr int64_t kTokens = 1 << 16;
  const PrefillOptions options = {.tile = Tile{1, 4}};  // another may need less
  PoolCapacity capacity = {.ranks = 4, .rank_memory_bytes = 1 << 30, .rank_kv_bytes = 1 << 30};
  const auto alone = PlanForPool(Shape(), EngineOptions(), capacity, kTokens, options);
  ASSERT_TRUE(alone.ok()) << alone.status();
  const int64_t needed = (alone->plan.predicted.run_bytes + 3) / 4;
  for (const int64_t spare : {0, 1000}) {
    capacity.rank_memory_bytes = needed + 1000;
    capacity.short_rank_bytes = 1000 + spare;
    for (const bool for_kv : {true, false}) {
      capacity.rank_kv_bytes = for_kv ? 1 << 30 : 0;
      const auto choice = PlanForPool(Shape(), EngineOptions(), capacity, kTokens, options);
      ASSERT_TRUE(choice.ok()) << choice.status();
      EXPECT_EQ(choice->pieces.size() > 1, for_kv && spare > 0) << spare;
      if (for_kv) {
        EXPECT_LE(choice->plan.predicted.run_bytes,
                  4 * (capacity.rank_memory_bytes - capacity.short_rank_bytes));
      }
    }
  }
  // So do workers that share weights, of what they have beside these.
  capacity = {.ranks = 4, .rank_memory_bytes = 1 << 30, .first_seats = {0, 2}, .rank_kv_bytes = 1 << 30};
  capacity.topology.node_of_seat = {0, 0, 1, 1};
  capacity.rank_weights = {.mode = WeightMode::kStreamed, .run_bytes = 1 << 29, .layer_seconds = 100};
  capacity.shared_weights =
      PlanWeights{.mode = WeightMode::kSharded, .loaded_bytes = 1000, .layer_bytes = 50};
  capacity.shared_rank_memory_bytes = needed + 1000;
  capacity.short_rank_bytes = 1000;
  EXPECT_TRUE(PlanForPool(Shape(), EngineOptions(), capacity, kTokens, options)->pieces.empty());
  capacity.short_rank_bytes = 2000;
  EXPECT_GT(PlanForPool(Shape(), EngineOptions(), capacity, kTokens, options)->pieces.size(), 1u);
}

TEST(PoolPlannerTest, TheRoomForShortPromptsIsOfARanksMemoryAndWeights) {
  PoolCapacity rank = {.ranks = 1, .rank_memory_bytes = 1 << 30};
  const int64_t bare = ShortRoomOf(Shape(), EngineOptions(), rank);
  EXPECT_EQ(bare, MakePlan(Shape(), rank.speed,
                           {.tokens = rank.speed.slice_tokens, .keeps_kv = true, .kv_on_host = true})
                      ->plan.predicted.run_bytes);
  rank.rank_weights = {.mode = WeightMode::kStreamed, .run_bytes = 1000, .layer_seconds = 1};
  EXPECT_EQ(ShortRoomOf(Shape(), EngineOptions(), rank), bare + 1000);
  rank.rank_memory_bytes = 800;
  EXPECT_EQ(ShortRoomOf(Shape(), EngineOptions(), rank), 100);
}

// Every rank is planned with its share of what its worker's weights take.
TEST(PoolPlannerTest, LayersThatPassTakeOfTheMemory) {
  PoolCapacity capacity = {.ranks = 4, .rank_memory_bytes = 1 << 30};
  const auto bare = PlanForPool(Shape(), EngineOptions(), capacity, 4096, {});
  ASSERT_TRUE(bare.ok()) << bare.status();
  capacity.rank_weights = {.mode = WeightMode::kStreamed, .run_bytes = 1000, .layer_seconds = 1};
  const auto streamed = PlanForPool(Shape(), EngineOptions(), capacity, 4096, {});
  ASSERT_TRUE(streamed.ok()) << streamed.status();
  EXPECT_EQ(streamed->plan.predicted.run_bytes,
            bare->plan.predicted.run_bytes + 1000 * streamed->plan.ranks());
  EXPECT_GT(streamed->plan.predicted.weight_seconds, 0);
  capacity.rank_weights.run_bytes = capacity.rank_memory_bytes;
  EXPECT_EQ(PlanForPool(Shape(), EngineOptions(), capacity, 4096, {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

// Weights that workers would stream are shared where that is predicted to be faster, and has room.
TEST(PoolPlannerTest, StreamsOrSharesWhicheverIsFaster) {
  PoolCapacity capacity = {.ranks = 4, .rank_memory_bytes = 1 << 30, .first_seats = {0, 2}};
  capacity.topology.node_of_seat = {0, 0, 1, 1};
  capacity.rank_weights = {.mode = WeightMode::kStreamed, .run_bytes = 1000, .layer_seconds = 1};
  const PlanWeights shared = {.mode = WeightMode::kSharded,
                              .loaded_bytes = 3000,
                              .run_bytes = 400,
                              .layer_seconds = 1e-6,
                              .layer_busy_seconds = 1e-6,
                              .head_seconds = 1e-6,
                              .layer_bytes = 200,
                              .head_bytes = 600};
  const auto chosen = [&] {
    const auto choice = PlanForPool(Shape(), EngineOptions(), capacity, 4096, {});
    EXPECT_TRUE(choice.ok()) << choice.status();
    return choice.ok() ? choice->weights.mode : WeightMode::kResident;
  };
  EXPECT_EQ(chosen(), WeightMode::kStreamed);  // they cannot share
  capacity.shared_weights = shared;
  capacity.shared_rank_memory_bytes = 1 << 29;
  EXPECT_EQ(chosen(), WeightMode::kSharded);  // the files are slow
  const auto by_sharing = PlanForPool(Shape(), EngineOptions(), capacity, 4096, {});
  capacity.shared_rank_memory_bytes = 1;  // no room beside the shares
  EXPECT_EQ(chosen(), WeightMode::kStreamed);
  capacity.shared_rank_memory_bytes = 1 << 29;
  const auto fast_links = capacity.topology;
  capacity.topology.between_nodes.bytes_per_second = 10;
  EXPECT_EQ(chosen(), WeightMode::kStreamed);  // the link is slower
  capacity.topology = fast_links;
  capacity.rank_weights.layer_seconds = 0;
  EXPECT_EQ(chosen(), WeightMode::kStreamed);  // neither adds anything to speak of
  // As where they are always shared.
  capacity.rank_weights = shared;
  capacity.rank_memory_bytes = capacity.shared_rank_memory_bytes;
  capacity.shared_weights.reset();
  const auto always = PlanForPool(Shape(), EngineOptions(), capacity, 4096, {});
  ASSERT_TRUE(by_sharing.ok() && always.ok());
  EXPECT_EQ(by_sharing->plan, always->plan);
}

// A worker that were idle would keep its share to itself: all take part.
TEST(PoolPlannerTest, AllWorkersThatShareWeightsTakePart) {
  for (int ranks = 2; ranks <= 13; ++ranks) {
    PoolCapacity capacity = {
        .ranks = ranks,
        .topology = {.same_node = {.bytes_per_second = 1e9}},
        .rank_memory_bytes = 1 << 30,
        .rank_weights = {
            .mode = WeightMode::kSharded, .loaded_bytes = 1000, .run_bytes = 100, .layer_bytes = 50}};
    for (int seat = 0; seat < ranks; ++seat) {
      capacity.first_seats.push_back(seat);
      capacity.topology.node_of_seat.push_back(0);
    }
    const auto choice = PlanForPool(Shape(), EngineOptions(), capacity, 4096, {});
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(choice->plan.ranks(), ranks);
    EXPECT_EQ(choice->weights.run_bytes, ranks * 100);
    EXPECT_EQ(choice->plan.predicted.weight_bytes, 1000 + ranks * 100);
    EXPECT_GT(choice->plan.predicted.comm_bytes[Traffic::kGather], 0);
  }
}

// Longer ones than the default, as windows may have got them; what a request asks for is not changed for it.
TEST(PoolPlannerTest, FollowsAPrefixInItsStripes) {
  const PoolCapacity capacity{.ranks = 2};
  const CachedPrefix cached = {.tokens = 6144, .ranks = 2, .stripe = 512};
  EXPECT_EQ(UsableTokensOf(cached, EngineOptions(), 8192, {}), 6144);
  EXPECT_EQ(UsableTokensOf(cached, EngineOptions(), 8192, {.stripe = 512}), 6144);
  EXPECT_EQ(UsableTokensOf(cached, EngineOptions(), 8192, {.stripe = 64}), 0);
  EXPECT_EQ(UsableTokensOf(cached, EngineOptions(), 6400, {}), 5120) << "a stripe is computed at least";
  const auto choice = PlanForPool(Shape(), EngineOptions(), capacity, 8192, {}, cached);
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->plan.cached_tokens, 6144);
  EXPECT_EQ(choice->plan.layout.stripe(), 512);
  const auto other = PlanForPool(Shape(), EngineOptions(), capacity, 8192, {.stripe = 64}, cached);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(other->plan.cached_tokens, 0);
  EXPECT_EQ(other->plan.layout.stripe(), 64);
}

}  // namespace
}  // namespace meshfill
