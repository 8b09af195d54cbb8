// Timelines: what a recorder keeps, and that the timeline of a real run agrees with the ranks' statistics.
#include "engine/schedule/timeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "engine/embedded_engine.h"
#include "engine/model/make_model.h"
#include "engine/plan/planner.h"
#include "engine/plan/predicted_timeline.h"
#include "engine/prefill_engine.h"
#include "engine/run/timeline_recorder.h"
#include "tests/engine/layer_kinds.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/run/watched_stream.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

using Clock = TimelineRecorder::Clock;

TEST(Span, IsNamedAsTheScheduleAndTheMetrics) {
  EXPECT_EQ((Span{.what = "block", .block = BlockIndex{2, 11}}).Name(), "block (2,11)");
  EXPECT_EQ((Span{.what = "block", .blocks = 3}).Name(), "3 blocks");
  EXPECT_EQ((Span{.what = "block", .blocks = 1}).Name(), "1 block");
  EXPECT_EQ((Span{.what = "mlp"}).Name(), "mlp");
  EXPECT_EQ((Span{.kind = SpanKind::kWait, .what = "recv_kv"}).Name(), "wait recv_kv");
  EXPECT_EQ((Span{.kind = SpanKind::kTransfer, .what = "recv_kv"}).Name(), "recv_kv");
}

TEST(TimelineRecorder, KeepsUpToItsCapacityAndCountsTheRest) {
  const Clock::time_point origin = Clock::now();
  TimelineRecorder recorder(/*rank=*/3, origin, /*capacity=*/5);
  recorder.set_layer(7);
  for (int i = 0; i < 12; ++i) {
    recorder.Record({.what = "mlp"}, origin + std::chrono::seconds(i), origin + std::chrono::seconds(i + 1));
  }
  Timeline timeline{.ranks = 4, .spans = {{.what = "embed"}}, .dropped_spans = 1};
  std::move(recorder).AppendTo(timeline);
  EXPECT_EQ(timeline.dropped_spans, 1 + 7);
  ASSERT_EQ(timeline.spans.size(), 1u + 5);
  EXPECT_EQ(timeline.end_seconds(), 5);
  const Span& last = timeline.spans.back();
  EXPECT_EQ(std::tie(last.rank, last.layer, last.start_seconds), std::make_tuple(3, 7, 4.0));
}

TEST(Timeline, IsIdleWhereARankNeitherComputesNorWaits) {
  Timeline timeline{.ranks = 3};
  EXPECT_EQ(timeline.idle_share(), 0);
  const auto add = [&](int rank, SpanKind kind, int layer, double start, double end) {
    timeline.spans.push_back(
        {.rank = rank, .kind = kind, .layer = layer, .start_seconds = start, .end_seconds = end});
  };
  add(0, SpanKind::kWork, -1, 0, 5);  // of no layer
  add(0, SpanKind::kWork, 0, 10, 12);
  add(0, SpanKind::kWait, 0, 12, 13);
  add(0, SpanKind::kTransfer, 0, 10, 20);  // beside it
  add(0, SpanKind::kWork, 1, 14, 18);
  EXPECT_DOUBLE_EQ(timeline.idle_share(), 1.0 / 8);
  add(1, SpanKind::kWork, 0, 10, 11);
  add(1, SpanKind::kWork, 1, 13, 14);
  EXPECT_DOUBLE_EQ(timeline.idle_share(), 0.5);
  add(2, SpanKind::kWork, 0, 10, 11);
  EXPECT_DOUBLE_EQ(timeline.idle_share(), 0.5) << "of the rank that is idle for longest";
}

TEST(SpanTimer, AddsToTheSumWhatItRecords) {
  TimelineRecorder recorder(0, Clock::now());
  double seconds = 0;
  for (int i = 0; i < 3; ++i) SpanTimer timer(&seconds, &recorder, {.what = "merge"});
  Timeline timeline;
  std::move(recorder).AppendTo(timeline);
  double recorded = 0;
  for (const Span& span : timeline.spans) recorded += span.seconds();
  EXPECT_EQ(timeline.spans.size(), 3u);
  EXPECT_NEAR(recorded, seconds, 1e-9);
}

// A device whose clock stands at `seconds`.
class ClockedStream : public WatchedStream {
 public:
  ClockedStream() : WatchedStream(DType::kF32) {}
  absl::StatusOr<std::shared_ptr<const StreamPoint>> Mark() override {
    return std::make_shared<const Point>(seconds);
  }
  double seconds = 0;

 private:
  struct Point final : StreamPoint {
    explicit Point(double at) : at(at) {}
    double SecondsSince(const StreamPoint& earlier) const override {
      return at - static_cast<const Point&>(earlier).at;
    }
    const double at;
  };
};

// What is queued has the device's times, from where the stream began, once it has been passed.
TEST(TimelineRecorder, ADevicesTimesAreKnownOnceTheyAreSettled) {
  ClockedStream stream;
  stream.seconds = 100;
  const Clock::time_point origin = Clock::now();
  TimelineRecorder recorder(/*rank=*/2, origin);
  recorder.set_stream(stream);
  const double begun = std::chrono::duration<double>(Clock::now() - origin).count();
  double seconds = 1;
  recorder.set_layer(4);
  stream.seconds = 102;
  {
    SpanTimer timer(&seconds, &recorder, {.what = "mlp"});
    stream.seconds = 105;
  }
  recorder.set_layer(9);
  EXPECT_EQ(seconds, 1);
  for (int i = 0; i < 2; ++i) {
    recorder.Settle();  // the second time there is nothing
    EXPECT_DOUBLE_EQ(seconds, 4);
  }
  Timeline timeline;
  std::move(recorder).AppendTo(timeline);
  ASSERT_EQ(timeline.spans.size(), 1u);
  const Span& span = timeline.spans[0];
  EXPECT_EQ(std::tie(span.rank, span.layer), std::make_tuple(2, 4));
  EXPECT_NEAR(span.seconds(), 3, 1e-6);
  EXPECT_GE(span.start_seconds, 2 - 1e-6);
  EXPECT_LE(span.start_seconds, 2 + begun + 1e-6);
}

// By the host's clock, and by a device's that has nothing to do meanwhile.
TEST(TimelineRecorder, PausesAreNoPartOfASpan) {
  for (const bool on_device : {false, true}) {
    StopToken run;
    ClockedStream stream;
    TimelineRecorder recorder(0, Clock::now(), TimelineRecorder::kCapacity, &run);
    if (on_device) recorder.set_stream(stream);
    double seconds = 0;
    const Clock::time_point before = Clock::now();
    {
      SpanTimer timer(&seconds, &recorder, {.what = "mlp"});
      run.Pause();
      while (run.PausedTime() < absl::Milliseconds(5)) std::this_thread::yield();
      run.Resume();
      stream.seconds += 60;
    }
    recorder.Settle();
    const double paused = absl::ToDoubleSeconds(run.PausedTime());
    if (on_device) {
      EXPECT_NEAR(seconds, 60 - paused, 1e-6);
    } else {
      EXPECT_LE(seconds, std::chrono::duration<double>(Clock::now() - before).count() - paused + 1e-6);
    }
    Timeline timeline;
    std::move(recorder).AppendTo(timeline);
    ASSERT_EQ(timeline.spans.size(), 1u);
    EXPECT_NEAR(timeline.spans[0].seconds(), seconds, 1e-6);
  }
}

TEST(TimelineRecorder, WithoutRoomForSpansTimesAddUp) {
  ClockedStream stream;
  TimelineRecorder recorder(0, Clock::now(), /*capacity=*/0);
  EXPECT_FALSE(recorder.keeps_spans());
  recorder.set_stream(stream);
  double seconds = 0;
  for (int i = 0; i < 3; ++i) {
    SpanTimer timer(&seconds, &recorder, {.what = "merge"});
    stream.seconds += 2;
  }
  recorder.Settle();
  EXPECT_DOUBLE_EQ(seconds, 6);
  Timeline timeline;
  std::move(recorder).AppendTo(timeline);
  EXPECT_TRUE(timeline.spans.empty());
  EXPECT_EQ(timeline.dropped_spans, 0);
}

ModelShape ModelOf(int layers) {
  return {.layers = layers,
          .hidden = 512,
          .intermediate = 1024,
          .q_heads = 8,
          .kv_heads = 2,
          .head_dim = 64,
          .vocab = 1000};
}

// The layers of a prediction add up to it.
TEST(PredictLayer, AddsUpToThePrediction) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 100; ++draw) {
    ModelShape model = ModelOf(Draw(random, 1, 5));
    if (Draw(random, 0, 1) == 1) {  // all layers are alike: with a window
      SetWindow(model, 500, model.layers);
    }
    const PoolSpeed speed{.attention_flops_per_second = 1e9 * Draw(random, 1, 1000),
                          .link_bytes_per_second = 1e7 * Draw(random, 1, 1000)};
    const int heads = 1 << Draw(random, 0, 2);
    const Tile tile{Draw(random, 1, 4), Draw(random, 1, 4)};
    const auto choice = MakePlan(model, speed,
                                 {.tokens = Draw<int64_t>(random, 1, 20000),
                                  .ranks = heads * tile.ranks(),
                                  .tile = tile,
                                  .heads = heads,
                                  .partial_dtype = Draw(random, 0, 1) == 1 ? DType::kBf16 : DType::kF32,
                                  .many_rings = Draw(random, 0, 1) == 1});
    ASSERT_TRUE(choice.ok()) << choice.status();
    const Timeline timeline = PredictLayer(model, speed, choice->plan);
    EXPECT_EQ(timeline.ranks, heads * tile.ranks());
    const Prediction& predicted = choice->plan.predicted;
    std::vector<double> wait(timeline.ranks, 0);
    for (const Span& span : timeline.spans) {
      if (span.kind == SpanKind::kWait) wait[span.rank] += span.seconds();
    }
    // Of messages that go one by one, each is a span of its own seconds.
    const auto& steps = choice->plan.schedule.steps;
    if (std::all_of(steps.begin(), steps.end(), [](const Step& step) { return step.spans == 1; })) {
      double transfers = 0;
      for (const Span& span : timeline.spans) {
        if (span.rank == 0 && span.kind == SpanKind::kTransfer) transfers += span.seconds();
      }
      EXPECT_NEAR(model.layers * transfers, predicted.parts.transfers,
                  1e-9 + 1e-6 * predicted.parts.transfers);
    }
    for (const double seconds : wait) {
      EXPECT_NEAR(model.layers * seconds, predicted.comm_wait_seconds,
                  1e-9 + 1e-6 * predicted.comm_wait_seconds);
    }
    // What is not attention does not depend on its speed.
    const Tile ring = {1, heads * tile.ranks()};
    const Prediction rest =
        Predict(model, {.attention_flops_per_second = 1e300, .merge_bytes_per_second = 1e300},
                {.layout = choice->plan.layout, .tile = ring}, GreedySchedule(ring, {}));
    EXPECT_NEAR(model.layers * timeline.end_seconds(), predicted.seconds - rest.compute_seconds,
                1e-9 + 1e-6 * predicted.seconds);
  }
}

TEST(PredictLayer, IsOfALayerThatSeesAllKeys) {
  ModelShape model = ModelOf(4);
  const auto choice = MakePlan(model, {}, {.tokens = 20'000, .ranks = 4, .tile = Tile{2, 2}});
  ASSERT_TRUE(choice.ok()) << choice.status();
  const double seconds = PredictLayer(model, {}, choice->plan).end_seconds();
  SetWindow(model, 500, 2);
  EXPECT_DOUBLE_EQ(PredictLayer(model, {}, choice->plan).end_seconds(), seconds);
  SetWindow(model, 500, 4);
  EXPECT_LT(PredictLayer(model, {}, choice->plan).end_seconds(), seconds);
}

// Prefills of random plans, with a timeline.
class RunTimelineTest : public testing::Test {
 protected:
  static constexpr int kRanks = 8;
  static constexpr int kLayers = 3;

  RunTimelineTest() {
    const absl::Status made = MakeModel({.layers = kLayers,
                                         .hidden = 64,
                                         .intermediate = 64,
                                         .q_heads = 4,
                                         .kv_heads = 2,
                                         .head_dim = 16,
                                         .vocab = 100,
                                         .context_tokens = 4096},
                                        folder_.path());
    EXPECT_TRUE(made.ok()) << made;
    auto engine =
        LoadEmbeddedEngine({.model_path = folder_.path(), .ranks = kRanks, .peak_flops = 1e12, .threads = 2});
    EXPECT_TRUE(engine.ok()) << engine.status();
    if (engine.ok()) engine_ = *std::move(engine);
  }

  PrefillResult Run(int heads, Tile tile, int64_t tokens, bool keep_timeline) {
    const std::vector<uint32_t> prompt(tokens, 5);
    auto result = RunPrefill(
        *engine_, {prompt, {.tile = tile, .heads = heads, .stripe = 16, .keep_timeline = keep_timeline}});
    EXPECT_TRUE(result.ok()) << result.status();
    return *std::move(result);
  }

  TempFolder folder_;
  std::unique_ptr<PrefillEngine> engine_;
};

// Spans of one rank and lane, by start: each ends before the next begins.
void ExpectNoOverlap(const Timeline& timeline) {
  std::map<std::pair<int, Lane>, std::vector<const Span*>> lanes;
  for (const Span& span : timeline.spans) lanes[{span.rank, span.lane()}].push_back(&span);
  EXPECT_EQ(static_cast<int>(lanes.size()), 2 * timeline.ranks) << "each rank computes and communicates";
  for (auto& [lane, spans] : lanes) {
    std::sort(spans.begin(), spans.end(),
              [](const Span* a, const Span* b) { return a->start_seconds < b->start_seconds; });
    for (size_t i = 1; i < spans.size(); ++i) {
      EXPECT_LE(spans[i - 1]->end_seconds, spans[i]->start_seconds)
          << "rank " << lane.first << ": " << spans[i - 1]->Name() << " and " << spans[i]->Name();
    }
  }
}

void ExpectAgreesWithStats(const Timeline& timeline, const std::vector<RankStats>& ranks) {
  for (int rank = 0; rank < timeline.ranks; ++rank) {
    std::map<std::string, double> seconds;
    for (const Span& span : timeline.spans) {
      if (span.rank == rank) seconds[span.block.has_value() ? "block" : span.Name()] += span.seconds();
    }
    const auto expect_near = [&](const std::string& name, double stats_seconds) {
      EXPECT_NEAR(seconds[name], stats_seconds, 0.01 * stats_seconds + 1e-9)
          << "rank " << rank << ": " << name;
    };
    for (Traffic traffic : kPrefillTraffics) {
      expect_near(std::string("wait ") + OperationName(traffic), ranks[rank].wait_seconds[traffic]);
    }
    expect_near("block", ranks[rank].block_seconds);
    EXPECT_NEAR(seconds["merge"] + seconds["convert"] + seconds["reorder"], ranks[rank].merge_seconds,
                0.01 * ranks[rank].merge_seconds + 1e-9);
    for (const char* name : {"embed", "projections", "output projection", "mlp"})
      EXPECT_GT(seconds[name], 0) << name;
  }
}

TEST_F(RunTimelineTest, AgreesWithTheStatisticsAndHasEveryBlockAndMessage) {
  std::mt19937_64 random(TestSeed());
  for (const auto& [heads, tile] :
       {std::pair(1, Tile{2, 4}), {1, Tile{8, 1}}, {2, Tile{1, 4}}, {2, Tile{2, 2}}, {4, Tile{2, 1}}}) {
    const int64_t tokens = Draw<int64_t>(random, kRanks * 16, 2000);
    SCOPED_TRACE(testing::Message() << heads << " head groups of " << tile.DebugString() << ", " << tokens);
    const PrefillResult result = Run(heads, tile, tokens, /*keep_timeline=*/true);
    ASSERT_TRUE(result.timeline.has_value());
    const Timeline& timeline = *result.timeline;
    EXPECT_EQ(timeline.ranks, kRanks);
    EXPECT_EQ(timeline.dropped_spans, 0);
    EXPECT_LE(timeline.end_seconds(), result.prefill_seconds);
    ExpectNoOverlap(timeline);
    ExpectAgreesWithStats(timeline, result.ranks);

    std::map<std::tuple<int, int, std::string>, int> seen;  // rank, layer, name
    for (const Span& span : timeline.spans) ++seen[{span.rank, span.layer, span.Name()}];
    const auto [a, b] = tile;
    for (int rank = 0; rank < kRanks; ++rank) {
      for (int layer = 0; layer < kLayers; ++layer) {
        for (int block = 0; block < a * b; ++block) {
          const Span span{.what = "block", .block = BlockIndex{block / b, block % b}};
          EXPECT_EQ((seen[{rank, layer, span.Name()}]), 1) << span.Name();
        }
        EXPECT_EQ((seen[{rank, layer, "recv_q"}]), a - 1);
        EXPECT_EQ((seen[{rank, layer, "recv_kv"}]), b - 1);
        EXPECT_EQ((seen[{rank, layer, "send_o"}]), a - 1);
        EXPECT_EQ((seen[{rank, layer, "all_to_all"}]), heads > 1 ? 4 : 0);
      }
    }
  }
}

TEST_F(RunTimelineTest, IsOffByDefaultAndChangesNoBit) {
  EXPECT_FALSE(PrefillOptions{}.keep_timeline);
  const PrefillResult without = Run(1, {2, 4}, 999, /*keep_timeline=*/false);
  const PrefillResult with = Run(1, {2, 4}, 999, /*keep_timeline=*/true);
  EXPECT_FALSE(without.timeline.has_value());
  EXPECT_EQ(without.logits, with.logits);
}

}  // namespace
}  // namespace meshfill
