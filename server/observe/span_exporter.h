// Sends spans to an OpenTelemetry collector, by OTLP over HTTP (otlp_json.h), from a thread of its own.
//
//     Export ──► queue, kMaxSpans and kMaxBytes ──► POST of up to kBatchSpans ──► collector
//         └ full: dropped, counted                └ refused: dropped; unreachable or busy: tried again later
//
// Nobody waits for the collector but Flush. The log has a line when it fails and when it is back, and one a
// minute meanwhile.
#ifndef MESHFILL_SERVER_OBSERVE_SPAN_EXPORTER_H_
#define MESHFILL_SERVER_OBSERVE_SPAN_EXPORTER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/mutex.h"
#include "server/observe/trace_span.h"

namespace meshfill {

class SpanExporter {
 public:
  static constexpr size_t kMaxSpans = 16384;     // some 10 MB of those that have no long texts
  static constexpr size_t kMaxBytes = 16 << 20;  // whatever the texts that clients choose
  static constexpr size_t kBatchSpans = 512;

  struct Counts {
    uint64_t exported = 0;
    uint64_t dropped = 0;
  };

  // `endpoint`: http:// or https://; without a path it means /v1/traces. A collector that takes longer than
  // `timeout` to answer is unreachable. INVALID_ARGUMENT: the endpoint is no such URL.
  static absl::StatusOr<std::unique_ptr<SpanExporter>> Start(const std::string& endpoint,
                                                             absl::Duration timeout);
  ~SpanExporter();  // what has not been sent is lost

  // Takes a request's spans, all or none. From any thread; never waits.
  void Export(std::vector<TraceSpan> spans);
  // Waits until all spans have been sent or dropped, to `deadline` at most. What cannot be sent at once is
  // dropped.
  void Flush(absl::Time deadline);

  Counts counts() const;

 private:
  class Connection;  // keeps libcurl's header out of this one

  enum class Sent { kTaken, kRefused, kUnreachable };

  explicit SpanExporter(std::unique_ptr<Connection> connection);

  void Run();
  // The next spans; empty: it is time to stop.
  std::vector<TraceSpan> NextBatch();
  // Whether the spans are done with. Waits where they are to be sent again.
  bool Settle(size_t spans, Sent sent, const std::string& why);
  void TellOf(Sent sent, const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::unique_ptr<Connection> connection_;  // used by the thread alone
  const std::string host_;

  mutable Mutex mu_;
  CondVar changed_;
  std::deque<TraceSpan> queue_ ABSL_GUARDED_BY(mu_);
  size_t sending_ ABSL_GUARDED_BY(mu_) = 0;  // spans that have left the queue, and are not done with
  size_t sending_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  size_t queue_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  bool flushing_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  Counts counts_ ABSL_GUARDED_BY(mu_);
  int failures_ ABSL_GUARDED_BY(mu_) = 0;  // in a row
  absl::Time told_at_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  std::thread thread_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_SPAN_EXPORTER_H_
