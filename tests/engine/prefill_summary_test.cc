#include "engine/prefill_summary.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "engine/plan/planner.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

const ModelShape kModel = {.layers = 1,
                           .hidden = 8,
                           .intermediate = 8,
                           .q_heads = 1,
                           .kv_heads = 1,
                           .head_dim = 8,
                           .vocab = 8,
                           .context_tokens = 100};

// 100 tokens, `cached` of them from the cache.
PrefillResult NoRanksTold(int64_t cached = 0) {
  return {.logits = std::vector<float>(8),
          .plan = MakePlan(kModel, {}, {.tokens = 100 - cached, .cached_tokens = cached})->plan,
          .cached_tokens = cached,
          .prefill_seconds = 2};
}

// The same whatever a rank waits for.
TEST(MeasuredSecondsTest, AreThoseOfTheAverageRank) {
  std::mt19937_64 random(TestSeed());
  const auto seconds = [&] { return std::uniform_real_distribution<double>(0, 10)(random); };
  for (const int ranks : {1, 2, 5}) {
    PrefillResult result = NoRanksTold();
    result.prefill_seconds = seconds();
    double attention = 0, waits = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      RankStats& stats = result.ranks.emplace_back();
      stats.block_seconds = seconds();
      stats.merge_seconds = seconds();
      attention += stats.block_seconds + stats.merge_seconds;
      for (Traffic traffic : kPrefillTraffics) {
        stats.wait_seconds[traffic] = seconds();
        waits += stats.wait_seconds[traffic];
      }
    }
    const MeasuredSeconds measured = MeasuredSecondsOf(result.prefill_seconds, result.ranks);
    EXPECT_EQ(measured.all, result.prefill_seconds);
    EXPECT_NEAR(measured.attention, attention / ranks, 1e-12);
    EXPECT_NEAR(measured.comm_wait, waits / ranks, 1e-12);
  }
  EXPECT_EQ(MeasuredSecondsOf(1, {}).comm_wait, 0) << "no rank told anything";
}

TEST(SummarisePrefillTest, StatesWhatTheSlowestRankTook) {
  for (const int slowest : {0, 1, 2}) {
    PrefillResult result = NoRanksTold();
    result.ranks.resize(3);
    for (int rank = 0; rank < 3; ++rank) {
      RankStats& stats = result.ranks[rank];
      stats.attention_seconds = rank == slowest ? 7 : 1 + rank;
      stats.wait_seconds[Traffic::kKv] = rank == slowest ? 5 : rank;
      stats.sent[Traffic::kQ] = rank == slowest ? 1000 : 10 * rank;
    }
    ASSERT_TRUE(SummarisePrefill(kModel, "m", 1e9, 1, result).ok());
    EXPECT_EQ(result.attention_seconds, 7);
    EXPECT_EQ(result.comm_wait_seconds, 5);
    EXPECT_EQ(result.comm_bytes.total(), 1000);
  }
}

// Nobody computes what is cached, and only the last token has logits.
TEST(SummarisePrefillTest, MfuCountsWhatWasComputed) {
  for (const int64_t cached : {0, 1, 64}) {
    PrefillResult result = NoRanksTold(cached);
    result.ranks.resize(1);
    result.ranks[0].attention_seconds = 0.5;
    ASSERT_TRUE(SummarisePrefill(kModel, "m", 1e6, 1, result).ok());
    const double of_prefix = cached == 0 ? 0 : ModelFlops(kModel, cached) - LmHeadFlops(kModel);
    EXPECT_NEAR(result.mfu * 2 * 1e6, ModelFlops(kModel, 100) - of_prefix, 1e-3) << cached;
    EXPECT_NEAR(result.attention_mfu * 0.5 * 1e6,
                AttentionFlops(kModel, 100) - AttentionFlops(kModel, cached), 1e-3)
        << cached;
  }
}

TEST(SummarisePrefillTest, LogitsThatAreNoNumbersAreAnError) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float bad : {std::nanf(""), infinity, -infinity}) {
    PrefillResult result = NoRanksTold();
    result.logits[5] = bad;
    const absl::Status status = SummarisePrefill(kModel, "m", 1e9, 1, result);
    EXPECT_TRUE(absl::IsInternal(status)) << status;
    EXPECT_NE(status.message().find("token 5"), std::string::npos) << status;
  }
}

TEST(SummarisePrefillTest, TheBestTokensComeFirstAndOfTiesTheLowest) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 50; ++draw) {
    PrefillResult result = NoRanksTold();
    std::vector<uint32_t> expected(result.logits.size());
    for (float& logit : result.logits) logit = static_cast<float>(Draw(random, 0, 3));
    std::iota(expected.begin(), expected.end(), 0);
    std::stable_sort(expected.begin(), expected.end(), [&](uint32_t left, uint32_t right) {
      return result.logits[left] > result.logits[right];
    });
    const int top_k = Draw(random, 1, static_cast<int>(expected.size()));
    ASSERT_TRUE(SummarisePrefill(kModel, "m", 1e9, top_k, result).ok());
    ASSERT_EQ(std::ssize(result.top), top_k);
    for (int i = 0; i < top_k; ++i) {
      EXPECT_EQ(result.top[i].token, expected[i]);
      EXPECT_EQ(result.top[i].logit, result.logits[expected[i]]);
    }
  }
}

}  // namespace
}  // namespace meshfill
