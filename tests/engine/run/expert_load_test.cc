#include "engine/run/expert_load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

using testing::ElementsAre;
using testing::FieldsAre;
using testing::IsEmpty;

RankStats Counted(std::vector<int64_t> tokens_per_expert) {
  return {.tokens_per_expert = std::move(tokens_per_expert)};
}

TEST(ExpertLoadTest, IsOfAllRanksTogether) {
  const std::vector<RankStats> ranks = {Counted({90, 0, 10, 0}), Counted({0, 60, 40, 0})};
  EXPECT_THAT(ExpertLoadsOf(ranks, 1, 4), ElementsAre(FieldsAre(0, 1.8, 0.25)));
  EXPECT_THAT(ExpertLoadsOf({&ranks[0], 1}, 1, 4), ElementsAre(FieldsAre(0, 3.6, 0.5)));
}

TEST(ExpertLoadTest, LeavesDenseLayersOut) {
  EXPECT_THAT(ExpertLoadsOf(std::vector{Counted({0, 0, 7, 7, 0, 0, 0, 3})}, 4, 2),
              ElementsAre(FieldsAre(1, 1, 0), FieldsAre(3, 2, 0.5)));
  EXPECT_THAT(ExpertLoadsOf(std::vector{RankStats()}, 4, 0), IsEmpty());
  EXPECT_THAT(ExpertLoadsOf({}, 4, 2), IsEmpty());
}

// Workers send the counts.
TEST(ExpertLoadTest, LeavesOutCountsOfAnotherModel) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const std::vector<RankStats> ranks = {Counted({1, 3}), Counted({5}), Counted({}), Counted({1, 1, 1, 1})};
  EXPECT_THAT(ExpertLoadsOf(ranks, 1, 2), ElementsAre(FieldsAre(0, 1.5, 0)));
  EXPECT_THAT(ExpertLoadsOf(std::vector{Counted({kMost, kMost}), Counted({kMost, kMost})}, 1, 2),
              ElementsAre(FieldsAre(0, 1, 0)));
}

TEST(ExpertLoadTest, RunsOfARankAddUp) {
  RankStats all;
  for (const auto& counts : std::vector<std::vector<int64_t>>{{}, {1, 2}, {}, {10, 20}})
    all += Counted(counts);
  EXPECT_THAT(all.tokens_per_expert, ElementsAre(11, 22));
}

TEST(RankStatsTest, RunsOfARankAddUp) {
  RankStats all = {.attention_seconds = 1,
                   .block_seconds = 2,
                   .merge_seconds = 3,
                   .wait_seconds = {{Traffic::kQ, 4.0}},
                   .total_seconds = 5,
                   .sent = {{Traffic::kO, 6}},
                   .blocks = 7};
  all += {.attention_seconds = 10,
          .block_seconds = 20,
          .merge_seconds = 30,
          .wait_seconds = {{Traffic::kQ, 40.0}, {Traffic::kKv, 400.0}},
          .total_seconds = 50,
          .sent = {{Traffic::kO, 60}, {Traffic::kGather, 600}},
          .blocks = 70};
  EXPECT_EQ(all.attention_seconds, 11);
  EXPECT_EQ(all.block_seconds, 22);
  EXPECT_EQ(all.merge_seconds, 33);
  EXPECT_EQ(all.wait_seconds, (PerTraffic<double>{{Traffic::kQ, 44.0}, {Traffic::kKv, 400.0}}));
  EXPECT_EQ(all.comm_wait_seconds(), 444);
  EXPECT_EQ(all.total_seconds, 55);
  EXPECT_EQ(all.sent, (CommBytes{{Traffic::kO, 66}, {Traffic::kGather, 600}}));
  EXPECT_EQ(all.blocks, 77);
}

// Random tokens that choose `used` of the experts, dealt to any rank.
TEST(ExpertLoadTest, IsWithinItsBounds) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 50; ++draw) {
    const int experts = Draw(random, 1, 40), used = Draw(random, 1, experts), layers = Draw(random, 1, 4);
    std::vector<RankStats> ranks(Draw(random, 1, 5), Counted(std::vector<int64_t>(layers * experts)));
    std::vector<int64_t> of_last(experts);
    for (int layer = 0; layer < layers; ++layer) {
      for (int token = Draw(random, 1, 60); token > 0; --token) {
        std::vector<int> order(experts);
        for (int e = 0; e < experts; ++e) order[e] = e;
        std::shuffle(order.begin(), order.end(), random);
        for (int i = 0; i < used; ++i) {
          ++ranks[random() % ranks.size()].tokens_per_expert[layer * experts + order[i]];
          if (layer == layers - 1) ++of_last[order[i]];
        }
      }
    }
    const auto loads = ExpertLoadsOf(ranks, layers, experts);
    ASSERT_EQ(std::ssize(loads), layers);
    for (const ExpertLoad& load : loads) {
      EXPECT_GE(load.imbalance, 1 - 1e-12);
      EXPECT_LE(load.imbalance, (1 + 1e-12) * experts / used);
      EXPECT_LE(load.idle, 1 - static_cast<double>(used) / experts + 1e-12);
    }
    EXPECT_DOUBLE_EQ(loads.back().idle * experts, std::count(of_last.begin(), of_last.end(), 0));
  }
}

}  // namespace
}  // namespace meshfill
