#include "engine/run/timeline_recorder.h"

#include <utility>

#include "kernels/monotonic_time.h"

namespace meshfill {
namespace {

// The host queues nothing while the run is paused, and the device soon has nothing to do.
double SecondsBetween(const TimelineRecorder::Moment& start, const TimelineRecorder::Moment& end) {
  return end.device->SecondsSince(*start.device) -
         std::chrono::duration<double>(end.paused - start.paused).count();
}

TimelineRecorder::Clock::duration ToClock(double seconds) {
  return std::chrono::duration_cast<TimelineRecorder::Clock::duration>(
      std::chrono::duration<double>(seconds));
}

}  // namespace

void TimelineRecorder::set_stream(Stream& stream) {
  stream_ = &stream;
  first_ = Now();
  if (first_.device == nullptr) stream_ = nullptr;
}

TimelineRecorder::Moment TimelineRecorder::Now() const {
  std::shared_ptr<const StreamPoint> device;  // none where the device has failed: its next operation tells
  if (stream_ != nullptr) device = stream_->Mark().value_or(nullptr);
  if (run_ == nullptr) return {Clock::now(), std::move(device), {}};
  const StopToken::Moment moment = run_->Now();
  return {ToSteadyTime(moment.run_time()), std::move(device), absl::ToChronoNanoseconds(moment.paused)};
}

void TimelineRecorder::Record(Span span, Clock::time_point start, Clock::time_point end) {
  span.rank = rank_;
  span.layer = layer_;
  Keep(span, start, end);
}

void TimelineRecorder::Record(std::optional<Span> span, double* seconds, Moment start, Moment end) {
  if (start.device != nullptr && end.device != nullptr) {
    if (span.has_value()) span->rank = rank_, span->layer = layer_;
    unsettled_.push_back({std::move(span), seconds, std::move(start), std::move(end)});
    return;
  }
  if (seconds != nullptr) *seconds += std::chrono::duration<double>(end.host - start.host).count();
  if (span.has_value()) Record(*span, start.host, end.host);
}

void TimelineRecorder::Settle() {
  for (Unsettled& each : unsettled_) {
    const double start = SecondsBetween(first_, each.start), end = SecondsBetween(first_, each.end);
    if (each.seconds != nullptr) *each.seconds += SecondsBetween(each.start, each.end);
    if (each.span.has_value()) Keep(*each.span, first_.host + ToClock(start), first_.host + ToClock(end));
  }
  unsettled_.clear();
}

void TimelineRecorder::AppendTo(Timeline& timeline) && {
  timeline.spans.insert(timeline.spans.end(), spans_.begin(), spans_.end());
  timeline.dropped_spans += dropped_;
  spans_ = {};
  dropped_ = 0;
}

void TimelineRecorder::Keep(Span span, Clock::time_point start, Clock::time_point end) {
  if (spans_.size() == capacity_) {
    ++dropped_;
    return;
  }
  span.start_seconds = std::chrono::duration<double>(start - origin_).count();
  span.end_seconds = std::chrono::duration<double>(end - origin_).count();
  spans_.push_back(span);
}

Timeline CollectTimeline(std::vector<TimelineRecorder> recorders) {
  Timeline timeline{.ranks = static_cast<int>(recorders.size())};
  for (TimelineRecorder& recorder : recorders) std::move(recorder).AppendTo(timeline);
  return timeline;
}

SpanTimer::~SpanTimer() {
  if (seconds_ == nullptr && !span_.has_value()) return;
  TimelineRecorder::Moment end = Now();
  if (recorder_ != nullptr) {
    recorder_->Record(span_, seconds_, std::move(start_), std::move(end));
  } else {
    *seconds_ += std::chrono::duration<double>(end.host - start_.host).count();
  }
}

TimelineRecorder::Moment SpanTimer::Now() const {
  if (seconds_ == nullptr && !span_.has_value()) return {};
  if (recorder_ == nullptr) return {.host = TimelineRecorder::Clock::now(), .device = nullptr, .paused = {}};
  return recorder_->Now();
}

}  // namespace meshfill
