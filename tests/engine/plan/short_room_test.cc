#include "engine/plan/short_room.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "engine/plan/planner.h"
#include "gtest/gtest.h"
#include "tests/engine/plan/planner_inputs.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

int64_t RunBytes(const ModelShape& model, const PlanRequest& request) {
  return MakePlan(model, kSlowLink, request)->plan.predicted.run_bytes;
}

TEST(ShortRoomBytes, IsWhatASliceTakesOfARankOrAnEighthOfIt) {
  std::mt19937_64 random(TestSeed());
  const ModelShape model = Llama(8, 2, DType::kBf16);
  PlanRequest on_rank = {.weights = {.mode = WeightMode::kStreamed, .run_bytes = 1000, .layer_seconds = 1}};
  PlanRequest slice = on_rank;
  slice.tokens = kSlowLink.slice_tokens;
  slice.keeps_kv = true;
  const int64_t slice_bytes = RunBytes(model, slice);
  for (int draw = 0; draw < 50; ++draw) {
    // Whatever the caller wants of its own prompt.
    on_rank.tokens = Draw<int64_t>(random, 1, 1 << 20);
    on_rank.cached_tokens = Draw<int64_t>(random, 0, 1000);
    on_rank.ranks = Draw(random, 1, 8);
    on_rank.tile = Tile{1, on_rank.ranks};
    on_rank.heads = 1;
    on_rank.memory_budget_bytes = Draw<int64_t>(random, 1, 16 * slice_bytes);
    EXPECT_EQ(ShortRoomBytes(model, kSlowLink, on_rank),
              std::min(slice_bytes, on_rank.memory_budget_bytes / 8));
  }
}

TEST(ShortRoomBytes, IsNothingWithoutALimit) {
  EXPECT_EQ(ShortRoomBytes(Llama(8, 2, DType::kBf16), kSlowLink, {.memory_budget_bytes = 0}), 0);
  EXPECT_EQ(ShortRoomBytes(Llama(8, 2, DType::kBf16), kSlowLink, {.memory_budget_bytes = -5}), 0);
}

TEST(ShortRoomBytes, CountsNoTokensBeyondTheContext) {
  ModelShape model = Llama(8, 2, DType::kBf16);
  model.context_tokens = 100;
  EXPECT_EQ(ShortRoomBytes(model, kSlowLink, {.memory_budget_bytes = int64_t{1} << 40}),
            RunBytes(model, {.tokens = 100, .keeps_kv = true}));
}

// What `plan` was asked for, and what came of it where so much memory is needed.
struct Asked {
  absl::StatusOr<PlanChoice> choice;
  std::vector<int64_t> memory_bytes;
};
Asked PlanNeeding(int64_t needed, int64_t memory_bytes, int64_t short_bytes,
                  absl::StatusCode code = absl::StatusCode::kFailedPrecondition) {
  Asked asked;
  asked.choice = PlanBesideShort(memory_bytes, short_bytes, [&](int64_t bytes) -> absl::StatusOr<PlanChoice> {
    asked.memory_bytes.push_back(bytes);
    if (bytes < needed) return absl::Status(code, std::to_string(bytes));
    return MakePlan(Llama(8, 2, DType::kBf16), kSlowLink, {.tokens = 1});
  });
  return asked;
}

TEST(PlanBesideShort, TakesAllOfTheMemoryOnlyWhereThatIsNeeded) {
  EXPECT_EQ(PlanNeeding(900, 1000, 100).memory_bytes, (std::vector<int64_t>{900}));
  const Asked all = PlanNeeding(901, 1000, 100);
  EXPECT_EQ(all.memory_bytes, (std::vector<int64_t>{900, 1000}));
  EXPECT_TRUE(all.choice.ok());
  EXPECT_EQ(PlanNeeding(500, 1000, 0).memory_bytes, (std::vector<int64_t>{1000}));
  // 0 would be no limit.
  EXPECT_EQ(PlanNeeding(500, 1000, 1000).memory_bytes, (std::vector<int64_t>{1000}));
  EXPECT_EQ(PlanNeeding(500, 0, 100).memory_bytes, (std::vector<int64_t>{0}));
}

TEST(RoomBeside, LongOnesTogetherLeaveTheRoomAndShortOnesMayTakeIt) {
  constexpr int64_t kMemory = 1000, kShort = 100;
  const auto room = [](TakenBytes taken, bool is_short) {
    return RoomBeside(kMemory, kShort, taken, is_short);
  };
  EXPECT_EQ(room({700, 700}, true), 300);
  EXPECT_EQ(room({700, 700}, false), 200);
  EXPECT_EQ(room({700, 650}, false), 250) << "the short one is in the room that is left";
  EXPECT_EQ(room({700, 400}, false), 300) << "short ones have more than that";
  EXPECT_EQ(MostBeside(kMemory, kShort, {700, 700}), 200);
  EXPECT_EQ(MostBeside(kMemory, kShort, {850, 850}), 100);
  EXPECT_EQ(MostBeside(kMemory, kShort, {950, 850}), 50);
  EXPECT_EQ(MostBeside(kMemory, kShort, {1000, 1000}), 0);
}

TEST(PlanBesideShort, SaysWhatAllOfTheMemoryIsTooLittleFor) {
  EXPECT_EQ(PlanNeeding(2000, 1000, 100).choice.status().message(), "1000");
  const Asked wrong = PlanNeeding(2000, 1000, 100, absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(wrong.memory_bytes, (std::vector<int64_t>{900})) << "more memory makes it no better";
  EXPECT_TRUE(absl::IsInvalidArgument(wrong.choice.status()));
}

}  // namespace
}  // namespace meshfill
