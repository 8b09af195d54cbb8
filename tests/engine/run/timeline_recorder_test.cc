// Spans by the clock of who computes: the host's, or a device's that queues its operations.
#include "engine/run/timeline_recorder.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "kernels/stop_token.h"
#include "tests/engine/run/watched_stream.h"

namespace meshfill {
namespace {

using Clock = TimelineRecorder::Clock;

class Point final : public StreamPoint {
 public:
  explicit Point(double at) : at_(at) {}
  double SecondsSince(const StreamPoint& earlier) const override {
    return at_ - static_cast<const Point&>(earlier).at_;
  }

 private:
  const double at_;
};

// A device whose clock goes as the test says.
class ClockedStream final : public WatchedStream {
 public:
  ClockedStream() : WatchedStream(DType::kF32) {}
  absl::StatusOr<std::shared_ptr<const StreamPoint>> Mark() override {
    if (failed) return absl::UnavailableError("the device has failed");
    return std::make_shared<const Point>(now);
  }
  double now = 10;
  bool failed = false;
};

Timeline Recorded(TimelineRecorder recorder) {
  Timeline timeline;
  std::move(recorder).AppendTo(timeline);
  return timeline;
}

TEST(TimelineRecorder, SpansOfADeviceAreByItsClockOnceItHasFinished) {
  const Clock::time_point origin = Clock::now();
  TimelineRecorder recorder(3, origin);
  ClockedStream stream;
  recorder.set_stream(stream);
  recorder.set_layer(7);
  const double begun = std::chrono::duration<double>(Clock::now() - origin).count();
  stream.now = 12;
  const TimelineRecorder::Moment start = recorder.Now();
  stream.now = 12.5;
  const TimelineRecorder::Moment end = recorder.Now();
  double seconds = 1;
  recorder.Record(Span{.what = "mlp"}, &seconds, start, end);
  recorder.Record(std::nullopt, &seconds, start, end);
  recorder.Record(Span{.what = "block"}, nullptr, start, end);
  EXPECT_EQ(seconds, 1) << "it has not finished";
  recorder.set_layer(8);
  recorder.Settle();
  EXPECT_DOUBLE_EQ(seconds, 2);
  recorder.Settle();
  EXPECT_DOUBLE_EQ(seconds, 2) << "each counts once";
  const Timeline timeline = Recorded(std::move(recorder));
  ASSERT_EQ(timeline.spans.size(), 2u);
  for (const Span& span : timeline.spans) {
    EXPECT_EQ(span.rank, 3);
    EXPECT_EQ(span.layer, 7) << "the layer that it was recorded in";
    EXPECT_NEAR(span.start_seconds, begun + 2, 1);  // 2 s behind the first point
    EXPECT_NEAR(span.seconds(), 0.5, 1e-6);
  }
}

TEST(TimelineRecorder, SpansOfADeviceThatHasFailedAreByTheHostsClock) {
  TimelineRecorder recorder(0, Clock::now());
  ClockedStream stream;
  recorder.set_stream(stream);
  const TimelineRecorder::Moment start = recorder.Now();
  stream.failed = true;
  const TimelineRecorder::Moment end = recorder.Now();
  double seconds = 0;
  recorder.Record(Span{.what = "mlp"}, &seconds, start, end);
  EXPECT_GE(seconds, 0);
  EXPECT_EQ(Recorded(std::move(recorder)).spans.size(), 1u) << "at once";
}

TEST(TimelineRecorder, PausesAreNotCounted) {
  StopToken run;
  TimelineRecorder recorder(0, Clock::now(), TimelineRecorder::kCapacity, &run);
  ClockedStream stream;
  recorder.set_stream(stream);
  const TimelineRecorder::Moment start = recorder.Now();
  run.Pause();
  run.Resume();
  stream.now += 1;  // the device's clock goes on
  TimelineRecorder::Moment end = recorder.Now();
  end.paused = start.paused + std::chrono::milliseconds(400);
  double seconds = 0;
  recorder.Record(std::nullopt, &seconds, start, end);
  recorder.Settle();
  EXPECT_NEAR(seconds, 0.6, 1e-6);
}

TEST(TimelineRecorder, CountsWhatItHasNoRoomFor) {
  TimelineRecorder recorder(0, Clock::now(), /*capacity=*/2);
  EXPECT_TRUE(recorder.keeps_spans());
  double seconds = 0;
  for (int i = 0; i < 5; ++i) recorder.Record(Span{.what = "mlp"}, &seconds, recorder.Now(), recorder.Now());
  const Timeline timeline = Recorded(std::move(recorder));
  EXPECT_EQ(timeline.spans.size(), 2u);
  EXPECT_EQ(timeline.dropped_spans, 3);
  EXPECT_FALSE(TimelineRecorder(0, Clock::now(), /*capacity=*/0).keeps_spans());
}

}  // namespace
}  // namespace meshfill
