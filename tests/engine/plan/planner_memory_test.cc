// The memory that plans state, by what lives when, and budgets that they keep to.
#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/plan/peak_bytes.h"
#include "engine/schedule/schedule.h"
#include "gtest/gtest.h"
#include "tests/engine/layer_kinds.h"
#include "tests/engine/plan/planner_inputs.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

// What lives whatever the tile: residual, RoPE tables, slices, Q, KV.
int64_t FixedBytes(const ModelShape& model, int64_t tokens, int ranks) {
  const int64_t element = model.dtype == DType::kF32 ? 4 : 2;
  const int64_t slice = std::min<int64_t>(PoolSpeed().slice_tokens, tokens / ranks) * ranks;
  const int64_t qkv_or_gate_up = std::max<int64_t>((model.q_heads + 2 * model.kv_heads) * 64, 2 * 1024);
  return tokens * 512 * 4 + tokens * 64 * 4 + slice * (512 + qkv_or_gate_up + 1024) * element +
         tokens * (model.q_heads + 2 * model.kv_heads) * 64 * element;
}

TEST(MakePlan, StatesPeakMemory) {
  const int64_t tokens = 8192;
  const ModelShape model = Llama(8, 2, DType::kBf16);
  const int64_t o_f32 = tokens * 8 * (64 * 4 + 4);
  const int64_t o_bf16 = tokens * 8 * (64 * 2 + 4);
  const auto peak = [&](int ranks, Tile tile, DType wire) {
    return MakePlan(model, kSlowLink, {.tokens = tokens, .ranks = ranks, .tile = tile, .partial_dtype = wire})
        ->plan.predicted.peak_bytes;
  };
  EXPECT_EQ(peak(1, {1, 1}, DType::kF32), FixedBytes(model, tokens, 1) + o_f32);
  EXPECT_EQ(peak(4, {1, 4}, DType::kF32), FixedBytes(model, tokens, 4) + o_f32);
  // Row 0 is begun first, row 1 whole before it leaves: two rows; its bf16 form is made while both live.
  EXPECT_EQ(peak(4, {2, 2}, DType::kF32), FixedBytes(model, tokens, 4) + 2 * o_f32);
  EXPECT_EQ(peak(4, {2, 2}, DType::kBf16), FixedBytes(model, tokens, 4) + 2 * o_f32 + o_bf16);
  // K and V of all layers where they stay.
  const auto kept = MakePlan(model, kSlowLink, {.tokens = tokens, .tile = Tile{1, 1}, .keeps_kv = true});
  EXPECT_EQ(kept->plan.predicted.peak_bytes,
            peak(1, {1, 1}, DType::kF32) + model.layers * tokens * 2 * 2 * 64 * 2);
}

// The last stripe is short: one rank has fewer tokens than the others, and each is counted as those that have
// most.
TEST(MakePlan, CountsTheLargestChunkForAll) {
  const int64_t tokens = 8192;
  const ModelShape model = Llama(8, 2, DType::kBf16);
  const auto peak = [&](Tile tile) {
    const auto choice = MakePlan(
        model, kSlowLink, {.tokens = tokens - 60, .ranks = 4, .tile = tile, .partial_dtype = DType::kF32});
    EXPECT_EQ(choice->plan.layout.LargestChunkTokens(), tokens / 4);
    return choice->plan.predicted.peak_bytes;
  };
  EXPECT_EQ(peak({2, 2}) - peak({1, 4}), tokens * 8 * (64 * 4 + 4)) << "a partial output more";
}

// Between processes a chunk of Q is given back once it has gone on: a row more is one partial output more.
TEST(MakePlan, StatesTheMemoryOfQueriesThatGoOn) {
  const int64_t tokens = 60 * 64;
  const ModelShape model = Llama(8, 2, DType::kBf16);
  const auto peak = [&](int ranks) {
    return MakePlan(model, kSlowLink,
                    {.tokens = tokens,
                     .ranks = ranks,
                     .tile = Tile{ranks, 1},
                     .schedule = ScheduleChoice::kGreedy,
                     .one_memory = false})
        ->plan.predicted.peak_bytes;
  };
  const int64_t o = tokens * 8 * (64 * 4 + 4);
  EXPECT_EQ(peak(5) - peak(4), o);
  EXPECT_EQ(peak(6) - peak(5), o);
}

// Where keys take more than outputs, the most is alive while a rank's own go behind those of the prefix.
TEST(MakePlan, StatesTheMemoryOfKeysThatGoBehindAPrefix) {
  const int64_t tokens = 8192, cached = 4096;
  const ModelShape model = Llama(8, 8, DType::kF32);
  const auto plan = MakePlan(model, kSlowLink, {.tokens = tokens, .cached_tokens = cached});
  EXPECT_EQ(plan->plan.predicted.peak_bytes,
            FixedBytes(model, tokens, 1) + (cached + tokens) * 2 * 8 * 64 * 4);
}

// Each rotary embedding has tables of its own.
TEST(MakePlan, StatesTheMemoryOfEachRope) {
  const int64_t tokens = 8192;
  const ModelShape one = Llama(8, 2, DType::kBf16);
  std::vector<LayerForm> forms(one.layers);
  forms.back().rope = LayerRope::kLocal;
  ModelShape two = one;
  two.kinds = LayerKindsOf(forms);
  const auto peak = [&](const ModelShape& model) {
    return MakePlan(model, kSlowLink, {.tokens = tokens, .tile = Tile{1, 1}})->plan.predicted.peak_bytes;
  };
  EXPECT_EQ(peak(two), peak(one) + tokens * 64 * 4);
}

// What leaves for the host costs the ranks its own chunk, where attention would not have it any more.
TEST(MakePlan, StatesTheChunkThatLeavesForTheHost) {
  const int64_t tokens = 8192;
  const ModelShape model = Llama(8, 2, DType::kBf16);
  const int64_t own_kv = tokens * 2 * 2 * 64 * 2;
  const auto more = [&](PlanRequest request) {
    const auto free = MakePlan(model, kSlowLink, request);
    request.keeps_kv = request.kv_on_host = true;
    return MakePlan(model, kSlowLink, request)->plan.predicted.peak_bytes - free->plan.predicted.peak_bytes;
  };
  EXPECT_EQ(more({.tokens = tokens}), 0) << "in one memory attention has it to its end";
  EXPECT_EQ(more({.tokens = tokens, .cached_tokens = 1024}), own_kv) << "beside the prefix's and its own";
  EXPECT_EQ(more({.tokens = tokens, .ranks = 4, .tile = Tile{1, 2}, .heads = 2}), own_kv);
  EXPECT_EQ(more({.tokens = tokens, .ranks = 4, .tile = Tile{1, 4}, .one_memory = false}), own_kv);
}

TEST(MakePlan, StatesPeakMemoryOfHeadGroups) {
  const int64_t tokens = 8192;
  const auto peak = [&](const ModelShape& model, int ranks, int heads) {
    return MakePlan(
               model, kSlowLink,
               {.tokens = tokens, .ranks = ranks, .tile = Tile{.a = 1, .b = ranks / heads}, .heads = heads})
        ->plan.predicted.peak_bytes;
  };
  const ModelShape grouped = Llama(8, 2, DType::kBf16);
  const int64_t o = tokens * 8 * (64 * 4 + 4);
  const int64_t kv = tokens * 2 * 2 * 64 * 2;  // what a member that lags has yet to take
  EXPECT_EQ(peak(grouped, 4, 2), FixedBytes(grouped, tokens, 4) + o + kv);
  EXPECT_EQ(peak(grouped, 8, 8), FixedBytes(grouped, tokens, 8) + 3 * kv + o + kv) << "KV four times in all";
  const ModelShape full = Llama(8, 8, DType::kF32);
  EXPECT_EQ(peak(full, 4, 4), FixedBytes(full, tokens, 4) + o + tokens * 2 * 8 * 64 * 4);
}

// Between processes: those of the prefix as they were, and for other heads, on their way and arrived.
TEST(PeakBytes, KeysOfAPrefixAreThereThreeTimesWhereSlicesAreExchanged) {
  const ModelShape model = Llama(8, 8, DType::kF32);
  const int64_t tokens = 8192;
  const int ranks = 4;
  const Tile tile = {.a = 1, .b = 1};
  const auto peak = [&](int64_t cached) {
    const PlanShape shape = {.layout = *TokenLayout::Make(LayoutKind::kStriped, ranks, tokens, 64),
                             .heads = ranks,
                             .tile = tile,
                             .cached_tokens = cached,
                             .one_memory = false,
                             .exchange_tokens = 512};
    return PeakBytes(model, 512, shape, GreedySchedule(tile, {}));
  };
  const int64_t prefix = 16 * tokens;
  EXPECT_EQ(peak(2 * prefix) - peak(prefix), 3 * model.kv_bytes(prefix));
}

// In one memory, where a window spares messages: once with the ranks that compute, and once in front of one
// that lags.
TEST(PeakBytes, KeysOfAPrefixAreThereTwiceWhereRanksMayBeLayersAhead) {
  ModelShape model = Llama(8, 8, DType::kF32);
  SetWindow(model, 100, 1);
  const int64_t tokens = 8192;
  const Tile tile = {.a = 1, .b = 4};
  const auto peak = [&](int64_t cached) {
    const PlanShape shape = {.layout = *TokenLayout::Make(LayoutKind::kStriped, tile.ranks(), tokens, 64),
                             .tile = tile,
                             .cached_tokens = cached};
    return PeakBytes(model, 512, shape, GreedySchedule(tile, {}));
  };
  const int64_t prefix = 16 * tokens;
  EXPECT_EQ(peak(2 * prefix) - peak(prefix), 2 * model.kv_bytes(prefix));
}

// Not what the fastest of those that do not fit would take.
TEST(MakePlan, SaysTheLeastMemoryThatWouldDo) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 40; ++i) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << i);
    const ModelShape model = Llama(8, 1 << Draw(random, 0, 3), DType::kBf16);
    // Of one shape, with several schedules, or of all.
    const Tile tile = {.a = Draw(random, 2, 5), .b = Draw(random, 2, 5)};
    PlanRequest request = {.tokens = Draw<int64_t>(random, 1000, 20'000), .ranks = tile.ranks()};
    if (Draw(random, 0, 3) > 0) {
      request.tile = tile;
      request.heads = 1;
    }
    request.one_memory = Draw(random, 0, 1) == 1;
    request.many_rings = Draw(random, 0, 1) == 1;
    request.memory_budget_bytes = 1;
    const std::string refused(MakePlan(model, kSlowLink, request).status().message());
    const size_t at = refused.find("needs at least ");
    ASSERT_NE(at, std::string::npos) << refused;
    request.memory_budget_bytes = std::stoll(refused.substr(at + std::string("needs at least ").size()));
    EXPECT_TRUE(MakePlan(model, kSlowLink, request).ok());
    --request.memory_budget_bytes;
    EXPECT_FALSE(MakePlan(model, kSlowLink, request).ok());
  }
}

TEST(MakePlan, KeepsToTheMemoryBudget) {
  const ModelShape model = Llama(8, 1, DType::kBf16);
  PlanRequest request = {.tokens = 8192, .ranks = 8};
  const auto free = MakePlan(model, kSlowLink, request);
  ASSERT_TRUE(free.ok());
  std::vector<int64_t> peaks;
  for (const PlanCandidate& candidate : free->candidates) peaks.push_back(candidate.predicted.peak_bytes);
  std::sort(peaks.begin(), peaks.end());
  ASSERT_LT(peaks.front(), peaks.back());

  request.memory_budget_bytes = peaks.back() - 1;
  const auto tight = MakePlan(model, kSlowLink, request);
  ASSERT_TRUE(tight.ok()) << tight.status();
  for (const PlanCandidate& candidate : tight->candidates) {
    EXPECT_LE(candidate.predicted.peak_bytes, request.memory_budget_bytes);
  }
  request.memory_budget_bytes = peaks.front();
  EXPECT_TRUE(MakePlan(model, kSlowLink, request).ok());

  request.memory_budget_bytes = peaks.front() - 1;
  const absl::Status none = MakePlan(model, kSlowLink, request).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Mentions(none, std::to_string(peaks.front()))) << none;
  EXPECT_TRUE(Mentions(none, std::to_string(peaks.front() - 1))) << none;
}

// A shape keeps its fastest schedule where that takes the whole budget.
TEST(MakePlan, ABudgetMayBeFilled) {
  const ModelShape model = Llama(8, 1, DType::kBf16);
  PoolSpeed speed = kSlowLink;
  for (speed.link_bytes_per_second = 1e8; speed.link_bytes_per_second < 1e12;
       speed.link_bytes_per_second *= 4) {
    const auto free = MakePlan(model, speed, {.tokens = 8192, .ranks = 12});
    ASSERT_TRUE(free.ok()) << free.status();
    for (const PlanCandidate& shape : free->candidates) {
      const auto filled = MakePlan(model, speed,
                                   {.tokens = 8192,
                                    .ranks = 12,
                                    .tile = shape.tile,
                                    .heads = shape.heads,
                                    .memory_budget_bytes = shape.predicted.run_bytes});
      ASSERT_TRUE(filled.ok()) << filled.status();
      EXPECT_EQ(filled->plan.predicted, shape.predicted) << shape.DebugString();
    }
  }
}

TEST(MakePlan, DropsShapesOfWhichNoScheduleFits) {
  const ModelShape model = Llama(8, 1, DType::kBf16);
  PlanRequest request = {.tokens = 8192, .ranks = 8, .heads = 1, .schedule = ScheduleChoice::kGreedy};
  const auto free = MakePlan(model, kSlowLink, request);
  ASSERT_TRUE(free.ok());
  int64_t largest = 0;
  for (const PlanCandidate& candidate : free->candidates) {
    largest = std::max(largest, candidate.predicted.peak_bytes);
  }
  request.memory_budget_bytes = largest - 1;
  const auto greedy = MakePlan(model, kSlowLink, request);
  ASSERT_TRUE(greedy.ok()) << greedy.status();
  EXPECT_LT(greedy->candidates.size(), free->candidates.size());
  request.schedule = ScheduleChoice::kAuto;  // which sends outputs earlier, so that the shape fits
  const auto any = MakePlan(model, kSlowLink, request);
  ASSERT_TRUE(any.ok()) << any.status();
  EXPECT_EQ(any->candidates.size(), free->candidates.size());
}

TEST(MakePlan, LayersThatPassTakeOfTheBudget) {
  const ModelShape model = Llama(8, 2, DType::kBf16);
  PlanRequest request = {.tokens = 4096};
  const int64_t activations = MakePlan(model, kSlowLink, request)->plan.predicted.run_bytes;
  request.weights = {.mode = WeightMode::kStreamed, .run_bytes = 1'000'000};
  for (const auto& [budget, fits] : {std::pair<int64_t, bool>{activations + 1'000'000, true},
                                     {activations + 999'999, false},
                                     {1'000'000, false}}) {
    request.memory_budget_bytes = budget;
    const absl::Status status = MakePlan(model, kSlowLink, request).status();
    EXPECT_EQ(status.ok(), fits) << budget << ": " << status;
    if (!fits) {
      EXPECT_TRUE(Mentions(status, std::to_string(activations + 1'000'000) + " bytes")) << status;
      EXPECT_TRUE(Mentions(status, "layers that pass")) << status;
    }
  }
}

TEST(MakePlan, ABudgetThatNothingFitsNamesTheSmallestThatWould) {
  const ModelShape model = Llama(8, 2, DType::kBf16);
  PlanRequest request = {.tokens = 4096, .ranks = 4, .memory_budget_bytes = 1};
  const absl::Status refused = MakePlan(model, kSlowLink, request).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  const std::string message(refused.message());
  const size_t at = message.find("at least ");
  ASSERT_NE(at, std::string::npos) << message;
  request.memory_budget_bytes = std::stoll(message.substr(at + 9));
  const auto fits = MakePlan(model, kSlowLink, request);
  ASSERT_TRUE(fits.ok()) << fits.status();
  EXPECT_EQ(fits->plan.predicted.peak_bytes, request.memory_budget_bytes);
  EXPECT_NE(message.find(fits->plan.tile.DebugString()), std::string::npos) << message;
  --request.memory_budget_bytes;
  EXPECT_FALSE(MakePlan(model, kSlowLink, request).ok());
}

}  // namespace
}  // namespace meshfill
