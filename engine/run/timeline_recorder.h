// Records one rank's spans while it runs. Memory is bounded: beyond its capacity spans are counted, not kept.
//
// Used from the rank's own thread alone. Where no recorder is given, a SpanTimer is an ordinary stopwatch.
//
// A stream that queues its operations is timed on its device: a span begins and ends at points of it
// (Stream::Mark), and its seconds are known once these have been passed: Settle adds them up then.
//
// While the run is paused, its time stands still: pauses are no part of any span.
#ifndef MESHFILL_ENGINE_RUN_TIMELINE_RECORDER_H_
#define MESHFILL_ENGINE_RUN_TIMELINE_RECORDER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/schedule/timeline.h"
#include "kernels/monotonic_time.h"
#include "kernels/stop_token.h"
#include "kernels/stream.h"

namespace meshfill {

class TimelineRecorder {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr size_t kCapacity = size_t{1} << 18;  // spans of one rank, 16 MiB

  // A moment of the rank: by the host's clock, or a point of its stream.
  struct Moment {
    Clock::time_point host;                     // the host's clock, less the run's pauses before it
    std::shared_ptr<const StreamPoint> device;  // null: the operations called before have run
    Clock::duration paused = {};                // the run's pauses before it
  };

  // Spans are timed from `origin`, the same for all ranks of a run. `run` may be null: it is never paused.
  TimelineRecorder(int rank, Clock::time_point origin, size_t capacity = kCapacity,
                   const StopToken* run = nullptr)
      : rank_(rank), origin_(origin), capacity_(capacity), run_(run) {}

  // Moments are the stream's from now on; it has nothing queued, and outlives the last Settle.
  void set_stream(Stream& stream) {
    stream_ = &stream;
    first_ = Now();
    if (first_.device == nullptr) stream_ = nullptr;
  }
  void set_layer(int layer) { layer_ = layer; }  // layer of the spans to come; -1: none
  bool keeps_spans() const { return capacity_ > 0; }

  Moment Now() const {
    std::shared_ptr<const StreamPoint> device;  // none where the device has failed: its next operation tells
    if (stream_ != nullptr) device = stream_->Mark().value_or(nullptr);
    if (run_ == nullptr) return {Clock::now(), std::move(device), {}};
    const StopToken::Moment moment = run_->Now();
    return {ToSteadyTime(moment.run_time()), std::move(device), absl::ToChronoNanoseconds(moment.paused)};
  }

  // Fills in rank, layer and times.
  void Record(Span span, Clock::time_point start, Clock::time_point end) {
    span.rank = rank_;
    span.layer = layer_;
    Keep(span, start, end);
  }

  // Records `span`, if there is one, and adds its seconds to `*seconds`, if not null: now, or in Settle.
  void Record(std::optional<Span> span, double* seconds, Moment start, Moment end) {
    if (start.device != nullptr && end.device != nullptr) {
      if (span.has_value()) span->rank = rank_, span->layer = layer_;
      unsettled_.push_back({std::move(span), seconds, std::move(start), std::move(end)});
      return;
    }
    if (seconds != nullptr) *seconds += std::chrono::duration<double>(end.host - start.host).count();
    if (span.has_value()) Record(*span, start.host, end.host);
  }

  // Call after the stream's Finish.
  void Settle() {
    for (Unsettled& each : unsettled_) {
      const double start = SecondsBetween(first_, each.start), end = SecondsBetween(first_, each.end);
      if (each.seconds != nullptr) *each.seconds += SecondsBetween(each.start, each.end);
      if (each.span.has_value()) Keep(*each.span, first_.host + ToClock(start), first_.host + ToClock(end));
    }
    unsettled_.clear();
  }

  // Moves what was recorded to the end of `timeline`.
  void AppendTo(Timeline& timeline) && {
    timeline.spans.insert(timeline.spans.end(), spans_.begin(), spans_.end());
    timeline.dropped_spans += dropped_;
    spans_ = {};
    dropped_ = 0;
  }

 private:
  struct Unsettled {
    std::optional<Span> span;
    double* seconds;
    Moment start, end;  // moments of the device
  };

  // The host queues nothing while the run is paused, and the device soon has nothing to do.
  static double SecondsBetween(const Moment& start, const Moment& end) {
    return end.device->SecondsSince(*start.device) -
           std::chrono::duration<double>(end.paused - start.paused).count();
  }

  static Clock::duration ToClock(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

  void Keep(Span span, Clock::time_point start, Clock::time_point end) {
    if (spans_.size() == capacity_) {
      ++dropped_;
      return;
    }
    span.start_seconds = std::chrono::duration<double>(start - origin_).count();
    span.end_seconds = std::chrono::duration<double>(end - origin_).count();
    spans_.push_back(span);
  }

  const int rank_;
  const Clock::time_point origin_;
  const size_t capacity_;
  const StopToken* const run_;
  Stream* stream_ = nullptr;  // null: the host's clock tells all
  Moment first_;              // the stream's first moment
  std::vector<Unsettled> unsettled_;
  int layer_ = -1;
  std::vector<Span> spans_;
  int64_t dropped_ = 0;
};

// Makes one run's timeline from its ranks' recorders.
inline Timeline CollectTimeline(std::vector<TimelineRecorder> recorders) {
  Timeline timeline{.ranks = static_cast<int>(recorders.size())};
  for (TimelineRecorder& recorder : recorders) std::move(recorder).AppendTo(timeline);
  return timeline;
}

// Times its scope: adds to `*seconds` and records `span`, each if there is one, by the same two moments.
class SpanTimer {
 public:
  SpanTimer(double* seconds, TimelineRecorder* recorder, Span span)
      : SpanTimer(seconds, recorder,
                  recorder != nullptr && recorder->keeps_spans() ? std::optional<Span>(span) : std::nullopt) {
  }
  SpanTimer(double* seconds, TimelineRecorder* recorder) : SpanTimer(seconds, recorder, std::nullopt) {}
  ~SpanTimer() {
    if (seconds_ == nullptr && !span_.has_value()) return;
    TimelineRecorder::Moment end = Now();
    if (recorder_ != nullptr) {
      recorder_->Record(span_, seconds_, std::move(start_), std::move(end));
    } else {
      *seconds_ += std::chrono::duration<double>(end.host - start_.host).count();
    }
  }
  SpanTimer(const SpanTimer&) = delete;
  SpanTimer& operator=(const SpanTimer&) = delete;

 private:
  SpanTimer(double* seconds, TimelineRecorder* recorder, std::optional<Span> span)
      : seconds_(seconds), recorder_(recorder), span_(std::move(span)), start_(Now()) {}

  TimelineRecorder::Moment Now() const {
    if (seconds_ == nullptr && !span_.has_value()) return {};
    if (recorder_ == nullptr)
      return {.host = TimelineRecorder::Clock::now(), .device = nullptr, .paused = {}};
    return recorder_->Now();
  }

  double* const seconds_;
  TimelineRecorder* const recorder_;
  const std::optional<Span> span_;
  TimelineRecorder::Moment start_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_TIMELINE_RECORDER_H_
