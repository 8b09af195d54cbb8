// Layouts and the dtype that partial outputs travel in, where both are left to the planner.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "engine/plan/comm_bytes.h"
#include "gtest/gtest.h"
#include "tests/engine/layer_kinds.h"
#include "tests/engine/plan/planner_inputs.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

TEST(MakePlan, TakesTheFastestLayoutAndWireDTypeThatAreLeftOpen) {
  std::mt19937_64 random(TestSeed());
  std::set<LayoutKind> layouts;
  std::set<DType> dtypes;
  for (int draw = 0; draw < 100; ++draw) {
    const ModelShape model = Llama(8, 8, DType::kBf16);
    PoolSpeed speed = kSlowLink;
    speed.attention_flops_per_second = std::exp2(Draw(random, 30, 46));
    PlanRequest request = {.tokens = Draw<int64_t>(random, 1, 20000), .ranks = Draw(random, 1, 16)};
    request.layout = std::nullopt;
    request.partial_dtype = std::nullopt;
    const auto choice = MakePlan(model, speed, request);
    ASSERT_TRUE(choice.ok()) << choice.status();
    layouts.insert(choice->plan.layout.kind());
    dtypes.insert(choice->plan.partial_dtype);
    for (int kind = 0; kind < 3; ++kind) {
      for (DType dtype : {DType::kF32, DType::kBf16}) {
        request.layout = static_cast<LayoutKind>(kind);
        request.partial_dtype = dtype;
        const auto fixed = MakePlan(model, speed, request);
        ASSERT_TRUE(fixed.ok()) << fixed.status();
        EXPECT_LE(choice->plan.predicted.seconds, fixed->plan.predicted.seconds * 1.031);  // 1 % three times
        EXPECT_EQ(fixed->plan.layout.kind(), *request.layout);
        EXPECT_EQ(fixed->plan.partial_dtype, dtype);
      }
    }
  }
  EXPECT_TRUE(layouts.contains(LayoutKind::kStriped) && layouts.contains(LayoutKind::kZigzag));
  EXPECT_EQ(dtypes, (std::set{DType::kF32, DType::kBf16}));
}

// A gain of less than a hundredth is within the error of any prediction, also where the bound promised more.
TEST(MakePlan, AWireDTypeIsTakenForAHundredthAtLeast) {
  const ModelShape model = Llama(8, 8, DType::kBf16);
  int less = 0, more = 0;
  for (const Tile tile : {Tile{2, 2}, Tile{3, 3}, Tile{4, 2}, Tile{5, 3}}) {
    for (int exponent = 0; exponent < 96; ++exponent) {
      PoolSpeed speed = kSlowLink;
      speed.attention_flops_per_second = 1e12;
      speed.link_bytes_per_second = std::exp2(28 + exponent / 8.0);
      PlanRequest request = {.tokens = 16384, .ranks = tile.ranks(), .tile = tile};
      const auto plan = [&](std::optional<DType> dtype) {
        request.partial_dtype = dtype;
        return MakePlan(model, speed, request)->plan;
      };
      const Plan f32 = plan(DType::kF32), bf16 = plan(DType::kBf16);
      const double gain = 1 - bf16.predicted.seconds / f32.predicted.seconds;
      EXPECT_EQ(plan(std::nullopt).partial_dtype, gain > 0.01 ? DType::kBf16 : DType::kF32)
          << "a gain of " << gain;
      const bool promising = LeastSeconds(model, speed, bf16) < 0.98 * f32.predicted.seconds;
      less += promising && gain > 0 && gain < 0.01 ? 1 : 0;
      more += gain > 0.01 ? 1 : 0;
    }
  }
  EXPECT_GT(less, 0);
  EXPECT_GT(more, 0);
}

// Of layouts that tie: contiguous chunks for windows alone, but stripes where another prompt may follow.
TEST(MakePlan, WindowsAloneAreContiguousUnlessTheirKeysAreKept) {
  for (const int with_window : {0, 2, 4}) {
    ModelShape model = Llama(8, 8, DType::kBf16);
    if (with_window > 0) SetWindow(model, 100, with_window);
    for (const bool keeps_kv : {false, true}) {
      const auto choice =
          MakePlan(model, kSlowLink, {.tokens = 4096, .layout = std::nullopt, .keeps_kv = keeps_kv});
      EXPECT_EQ(choice->plan.layout.kind(),
                with_window == model.layers && !keeps_kv ? LayoutKind::kContiguous : LayoutKind::kStriped)
          << with_window << " layers with a window" << (keeps_kv ? ", kept" : "");
    }
  }
}

// On links that cost nothing, all layouts tie.
TEST(MakePlan, LongWindowsAreNoReasonForContiguousChunks) {
  ModelShape model = Llama(8, 8, DType::kBf16);
  PoolSpeed speed = kSlowLink;
  speed.link_bytes_per_second = 1e15;
  for (const auto& [window, layout] :
       {std::pair(1024, LayoutKind::kContiguous), std::pair(1025, LayoutKind::kStriped),
        std::pair(2048, LayoutKind::kStriped)}) {
    SetWindow(model, window, model.layers);
    const auto choice = MakePlan(model, speed, {.tokens = 4096, .layout = std::nullopt});
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(choice->plan.layout.kind(), layout) << "a window of " << window;
  }
}

// Between shapes, too: the fastest contiguous plan often has another shape than the fastest striped one.
TEST(MakePlan, ContiguousChunksAreTakenForAHundredthAtLeast) {
  std::mt19937_64 random(TestSeed());
  int ties = 0, taken = 0;
  for (int draw = 0; draw < 300; ++draw) {
    ModelShape model = Llama(8, 8, DType::kBf16);
    PlanRequest request = {.tokens = Draw<int64_t>(random, 2000, 20000), .ranks = 4 * Draw(random, 1, 4)};
    SetWindow(model, Draw<int64_t>(random, request.tokens / 4 + 1, request.tokens), model.layers);
    PoolSpeed speed = kSlowLink;
    speed.attention_flops_per_second = std::exp2(Draw(random, 36, 42));
    const auto seconds = [&](LayoutKind layout) {
      request.layout = layout;
      return MakePlan(model, speed, request)->plan.predicted.seconds;
    };
    const double striped = seconds(LayoutKind::kStriped), contiguous = seconds(LayoutKind::kContiguous);
    request.layout = std::nullopt;
    const auto choice = MakePlan(model, speed, request);
    ASSERT_TRUE(choice.ok()) << choice.status();
    const bool is_contiguous = choice->plan.layout.kind() == LayoutKind::kContiguous;
    ASSERT_TRUE(!is_contiguous || contiguous < 0.99 * striped)
        << choice->plan.DebugString() << ": " << contiguous << " s, in stripes " << striped;
    ties += contiguous < striped && contiguous >= 0.99 * striped ? 1 : 0;
    taken += is_contiguous ? 1 : 0;
  }
  EXPECT_GT(ties, 0);
  EXPECT_GT(taken, 0);
}

// Long stripes are uneven. Where each rank attends to all tokens, for some heads, zigzag gains less than a
// hundredth; every other shape takes it.
TEST(MakePlan, APlanThatWinsATieStandsBeforeTheFasterOnesInTheirOrder) {
  PoolSpeed speed = kSlowLink;
  speed.gemm_flops_per_second = speed.link_bytes_per_second = 1e15;
  speed.attention_flops_per_second = 7e13;
  const auto choice = MakePlan(Llama(8, 8, DType::kBf16), speed,
                               {.tokens = 17500, .ranks = 4, .layout = std::nullopt, .stripe = 1024});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->plan.layout.kind(), LayoutKind::kStriped);
  std::vector<double> others;
  for (const PlanCandidate& candidate : choice->candidates) others.push_back(candidate.predicted.seconds);
  others.erase(others.begin());
  ASSERT_GT(others.size(), 2u);
  EXPECT_LT(others[1], choice->plan.predicted.seconds);
  EXPECT_TRUE(std::is_sorted(others.begin(), others.end())) << testing::PrintToString(others);
}

constexpr PoolSpeed kH100 = {.gemm_flops_per_second = 600e12,
                             .attention_flops_per_second = 600e12,
                             .merge_bytes_per_second = 1e12,
                             .block_row_seconds = 1e-11};

// H100 nodes of eight with one 400 Gb/s port each.
PlanRequest OnNodesOfOnePort(int ranks, int64_t tokens) {
  PlanRequest request = {.tokens = tokens, .ranks = ranks, .layout = std::nullopt, .one_memory = false};
  request.topology = {.same_node = {.latency_seconds = 5e-6, .bytes_per_second = 360e9},
                      .between_nodes = {.latency_seconds = 1e-5, .bytes_per_second = 45e9},
                      .node_bytes_per_second = 45e9};
  for (int seat = 0; seat < ranks; ++seat) request.topology.node_of_seat.push_back(seat / 8);
  return request;
}

ModelShape ModelOfWindows(int64_t window, int layers, int with_window) {
  ModelShape model = {.layers = layers,
                      .hidden = 4096,
                      .intermediate = 14336,
                      .q_heads = 32,
                      .kv_heads = 8,
                      .head_dim = 128,
                      .vocab = 32000,
                      .context_tokens = 1 << 20,
                      .dtype = DType::kBf16};
  SetWindow(model, window, with_window);
  return model;
}

// A rank needs no more than the window's keys before its own, and contiguous chunks send no more.
TEST(MakePlan, SendsAModelOfWindowsItsHalosAlone) {
  const int64_t window = 4096;
  const ModelShape model = ModelOfWindows(window, 32, 32);
  for (int ranks : {8, 16, 32, 64}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks");
    PlanRequest request = OnNodesOfOnePort(ranks, 131072);
    const auto choice = MakePlan(model, kH100, request);
    request.layout = LayoutKind::kStriped;
    const auto striped = MakePlan(model, kH100, request);
    ASSERT_TRUE(choice.ok() && striped.ok()) << choice.status() << striped.status();
    const Prediction& predicted = choice->plan.predicted;
    EXPECT_EQ(choice->plan.layout.kind(), LayoutKind::kContiguous) << choice->plan.DebugString();
    EXPECT_LE(static_cast<double>(predicted.comm_bytes.total()),
              1.1 * static_cast<double>(model.layers * model.kv_bytes(window)));
    EXPECT_LT(predicted.seconds, striped->plan.predicted.seconds);
    if (ranks == 64) {
      EXPECT_LT(predicted.seconds, 0.3 * 0.264) << "of what it took before windows cut messages";
    }
  }
}

// With full layers between them, window layers send what the layout of all layers makes them. In halos, the
// window's keys once for each rank: one where all layers are contiguous; in R rounds of stripes each rank has
// R of them, as far as they are not all keys. Prints the table of docs/tuning.md.
TEST(MakePlan, SendsWindowLayersBetweenFullOnesWhatTheirLayoutMakesThem) {
  const int64_t window = 4096;
  const ModelShape model = ModelOfWindows(window, 30, 25);
  struct Expected {
    int ranks;
    double most_halos;
    double most_of_full;  // of what a full layer sends
  };
  for (const Expected& expected :
       {Expected{8, 28, 1}, Expected{16, 1.1, 0.04}, Expected{32, 1.1, 0.04}, Expected{64, 2.4, 0.41}}) {
    SCOPED_TRACE(testing::Message() << expected.ranks << " ranks");
    const auto choice = MakePlan(model, kH100, OnNodesOfOnePort(expected.ranks, 131072));
    ASSERT_TRUE(choice.ok()) << choice.status();
    const Plan& plan = choice->plan;
    int64_t sent = 0, full = 0;
    for (int rank = 0; rank < expected.ranks; ++rank) {
      sent = std::max(sent, LayerCommBytes(model, plan, window, rank).total());
      full = std::max(full, LayerCommBytes(model, plan, 0, rank).total());
    }
    const double halos = static_cast<double>(sent) / static_cast<double>(model.kv_bytes(window));
    std::printf("%d ranks: %s: a window layer sends %.2f halos, a full one %.2f\n", expected.ranks,
                plan.DebugString().c_str(), halos,
                static_cast<double>(full) / static_cast<double>(model.kv_bytes(window)));
    EXPECT_LE(halos, expected.most_halos);
    EXPECT_LE(static_cast<double>(sent), expected.most_of_full * static_cast<double>(full));
  }
}

// With full layers between those with a window, longer stripes serve both where a prompt has rounds enough,
// and contiguous chunks where it has not. Nothing changes where the request says the layout. Prints the table
// of docs/tuning.md.
TEST(MakePlan, LongStripesServeWindowsAndFullLayers) {
  struct Expected {
    int64_t window, tokens;
    int ranks;
    int64_t stripe;  // 0: contiguous
    double gain;     // at least, over stripes as asked for
  };
  for (const Expected& expected :
       {Expected{4096, 1 << 20, 16, 2048, 1.15}, Expected{4096, 1 << 20, 32, 1024, 1.4},
        Expected{4096, 1 << 20, 64, 512, 1.6}, Expected{4096, 1 << 19, 64, 512, 1.9},
        Expected{4096, 131072, 16, 0, 1.2}, Expected{1024, 131072, 8, 256, 1.02},
        Expected{4096, 131072, 32, 0, 1.5}}) {
    SCOPED_TRACE(testing::Message() << "a window of " << expected.window << ", " << expected.tokens
                                    << " tokens, " << expected.ranks << " ranks");
    const ModelShape model = ModelOfWindows(expected.window, 30, 25);
    PlanRequest request = OnNodesOfOnePort(expected.ranks, expected.tokens);
    const auto choice = MakePlan(model, kH100, request);
    request.layout = LayoutKind::kContiguous;
    const auto contiguous = MakePlan(model, kH100, request);
    request.layout = LayoutKind::kStriped;
    const auto asked_for = MakePlan(model, kH100, request);
    ASSERT_TRUE(choice.ok() && asked_for.ok()) << choice.status() << asked_for.status();
    const TokenLayout& layout = choice->plan.layout;
    std::printf(
        "%ld tokens, a window of %ld, %d GPUs: stripes of %ld %.2f s, contiguous %.2f, chosen %.2f: %s\n",
        expected.tokens, expected.window, expected.ranks, request.stripe, asked_for->plan.predicted.seconds,
        contiguous->plan.predicted.seconds, choice->plan.predicted.seconds, layout.DebugString().c_str());
    EXPECT_EQ(layout.kind(), expected.stripe == 0 ? LayoutKind::kContiguous : LayoutKind::kStriped);
    if (expected.stripe > 0) {
      EXPECT_EQ(layout.stripe(), expected.stripe);
    }
    EXPECT_EQ(asked_for->plan.layout.stripe(), request.stripe);
    EXPECT_GT(asked_for->plan.predicted.seconds, expected.gain * choice->plan.predicted.seconds);
  }
  // No window, no reason.
  const auto full = MakePlan(ModelOfWindows(4096, 30, 0), kH100, OnNodesOfOnePort(64, 1 << 20));
  ASSERT_TRUE(full.ok()) << full.status();
  EXPECT_EQ(full->plan.layout.stripe(), 64);
}

// Shapes are compared by what longer stripes may add for the last rank, too, of which no prediction knows; a
// layout that comes before gains a tie of 1 %, three times at most.
TEST(MakePlan, NoShapeIsTakenForStripesThatAreUneven) {
  int uneven = 0;
  for (const int64_t window : {1024, 2048, 4096, 8192}) {
    for (const int ranks : {8, 16, 32, 64}) {
      for (int64_t tokens = 1 << 16; tokens <= 1 << 20; tokens *= 2) {
        for (int with_window = 5; with_window < 30; with_window += 4) {
          const PlanRequest request = OnNodesOfOnePort(ranks, tokens);
          const auto choice = MakePlan(ModelOfWindows(window, 30, with_window), kH100, request);
          ASSERT_TRUE(choice.ok()) << choice.status();
          const auto seconds = [&](const PlanCandidate& of) {
            const bool striped = of.layout.kind() == LayoutKind::kStriped;
            const int64_t longer = striped ? of.layout.stripe() - request.stripe : 0;
            return of.predicted.seconds *
                   (1 + static_cast<double>(longer * ranks) / static_cast<double>(tokens));
          };
          const PlanCandidate& taken = choice->candidates.front();
          for (const PlanCandidate& other : choice->candidates) {
            EXPECT_LE(seconds(taken), 1.031 * seconds(other));
            uneven += other.predicted.seconds * 1.031 < taken.predicted.seconds ? 1 : 0;
          }
        }
      }
    }
  }
  EXPECT_GT(uneven, 0) << "none was faster but for its stripes: the test shows nothing";
}

// What costs accuracy and gains nothing is not chosen.
TEST(MakePlan, TiesGoToStripesAndF32) {
  PlanRequest request = {.tokens = 16384, .ranks = 4, .tile = Tile{1, 4}};
  request.layout = std::nullopt;
  request.partial_dtype = std::nullopt;
  const auto choice = MakePlan(Llama(8, 8, DType::kBf16), kSlowLink, request);
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->plan.layout.kind(), LayoutKind::kStriped);
  EXPECT_EQ(choice->plan.partial_dtype, DType::kF32);
}

}  // namespace
}  // namespace meshfill
