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
  void set_stream(Stream& stream);
  void set_layer(int layer) { layer_ = layer; }  // layer of the spans to come; -1: none
  bool keeps_spans() const { return capacity_ > 0; }

  Moment Now() const;

  // Fills in rank, layer and times.
  void Record(Span span, Clock::time_point start, Clock::time_point end);
  // Records `span`, if there is one, and adds its seconds to `*seconds`, if not null: now, or in Settle.
  void Record(std::optional<Span> span, double* seconds, Moment start, Moment end);
  // Call after the stream's Finish.
  void Settle();

  // Moves what was recorded to the end of `timeline`.
  void AppendTo(Timeline& timeline) &&;

 private:
  struct Unsettled {
    std::optional<Span> span;
    double* seconds;
    Moment start, end;  // moments of the device
  };

  void Keep(Span span, Clock::time_point start, Clock::time_point end);

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
Timeline CollectTimeline(std::vector<TimelineRecorder> recorders);

// Times its scope: adds to `*seconds` and records `span`, each if there is one, by the same two moments.
class SpanTimer {
 public:
  SpanTimer(double* seconds, TimelineRecorder* recorder, Span span)
      : SpanTimer(seconds, recorder,
                  recorder != nullptr && recorder->keeps_spans() ? std::optional<Span>(span) : std::nullopt) {
  }
  SpanTimer(double* seconds, TimelineRecorder* recorder) : SpanTimer(seconds, recorder, std::nullopt) {}
  ~SpanTimer();
  SpanTimer(const SpanTimer&) = delete;
  SpanTimer& operator=(const SpanTimer&) = delete;

 private:
  SpanTimer(double* seconds, TimelineRecorder* recorder, std::optional<Span> span)
      : seconds_(seconds), recorder_(recorder), span_(std::move(span)), start_(Now()) {}

  TimelineRecorder::Moment Now() const;

  double* const seconds_;
  TimelineRecorder* const recorder_;
  const std::optional<Span> span_;
  TimelineRecorder::Moment start_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_TIMELINE_RECORDER_H_
