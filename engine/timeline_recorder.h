// Records one rank's spans while it runs. Memory is bounded: beyond its capacity spans are counted, not kept.
//
// Used from the rank's own thread alone. Where no recorder is given, a SpanTimer is an ordinary stopwatch.
#ifndef MESHFILL_ENGINE_TIMELINE_RECORDER_H_
#define MESHFILL_ENGINE_TIMELINE_RECORDER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/timeline.h"

namespace meshfill {

class TimelineRecorder {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr size_t kCapacity = size_t{1} << 18;  // spans of one rank, 16 MiB

  // Spans are timed from `origin`, the same for all ranks of a run.
  TimelineRecorder(int rank, Clock::time_point origin, size_t capacity = kCapacity)
      : rank_(rank), origin_(origin), capacity_(capacity) {}

  void set_layer(int layer) { layer_ = layer; }  // of the spans to come; -1: none

  // Fills in rank, layer and times.
  void Record(Span span, Clock::time_point start, Clock::time_point end) {
    if (spans_.size() == capacity_) {
      ++dropped_;
      return;
    }
    span.rank = rank_;
    span.layer = layer_;
    span.start_seconds = std::chrono::duration<double>(start - origin_).count();
    span.end_seconds = std::chrono::duration<double>(end - origin_).count();
    spans_.push_back(span);
  }

  // Moves what was recorded to the end of `timeline`.
  void AppendTo(Timeline& timeline) && {
    timeline.spans.insert(timeline.spans.end(), spans_.begin(), spans_.end());
    timeline.dropped_spans += dropped_;
    spans_ = {};
    dropped_ = 0;
  }

 private:
  const int rank_;
  const Clock::time_point origin_;
  const size_t capacity_;
  int layer_ = -1;
  std::vector<Span> spans_;
  int64_t dropped_ = 0;
};

// Of one run, a recorder for each rank.
inline Timeline CollectTimeline(std::vector<TimelineRecorder> recorders) {
  Timeline timeline{.ranks = static_cast<int>(recorders.size())};
  for (TimelineRecorder& recorder : recorders) std::move(recorder).AppendTo(timeline);
  return timeline;
}

// Times its scope: adds to `*seconds` and records `span`, each if not null, by the same two readings of the
// clock.
class SpanTimer {
 public:
  SpanTimer(double* seconds, TimelineRecorder* recorder, Span span)
      : seconds_(seconds), recorder_(recorder), span_(span) {}
  ~SpanTimer() {
    const TimelineRecorder::Clock::time_point end = TimelineRecorder::Clock::now();
    if (seconds_ != nullptr) *seconds_ += std::chrono::duration<double>(end - start_).count();
    if (recorder_ != nullptr) recorder_->Record(span_, start_, end);
  }
  SpanTimer(const SpanTimer&) = delete;
  SpanTimer& operator=(const SpanTimer&) = delete;

 private:
  double* const seconds_;
  TimelineRecorder* const recorder_;
  const Span span_;
  const TimelineRecorder::Clock::time_point start_ = TimelineRecorder::Clock::now();
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_TIMELINE_RECORDER_H_
