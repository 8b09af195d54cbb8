// What one Prefill call does when, as spans of its caller's trace:
//
//     prefill ├──────────────────────────────────────────────────────┤   the call
//      upload ├────────┤
//        plan  ├┤                                                        by the header; anew behind a prefix
//       queue          ├─────┤
//     compute                ├──────────────────────────────┤            the engine has the prompt
//       layer                ├────┤├────┤├────┤├────┤                    children of compute
//      result                                               ├────────┤   until the client has read it
//
// Workers tell of their layers now and then: a span `layer` may be of several. Where a run fails and begins
// anew, so do its layers. Not thread-safe. All times are of MonotonicNow.
#ifndef MESHFILL_SERVER_OBSERVE_PREFILL_TRACE_H_
#define MESHFILL_SERVER_OBSERVE_PREFILL_TRACE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "engine/prefill_engine.h"
#include "server/observe/trace_span.h"

namespace meshfill {

class PrefillTrace {
 public:
  // Who called, for what.
  struct Request {
    std::string id;
    std::string tenant;
    int64_t tokens = 0;
  };

  // The trace of a call that began at `begin`. `traceparent` is as ParseTraceparent has it
  // (server/api/traceparent.h); without one, the call is the root of a new trace.
  PrefillTrace(absl::string_view traceparent, absl::Time begin);

  const std::string& trace_id() const { return trace_id_; }  // 32 hexadecimal digits
  // Whether the caller's trace is recorded, as its flag says; a new one is.
  bool recorded() const { return recorded_; }

  void OnPlanned(absl::Time begin, absl::Time end);
  void OnUploaded(absl::Time now);
  void OnComputeBegin(absl::Time now);
  void OnLayerDone(int layers_done, absl::Time now);
  void OnComputed(const absl::StatusOr<PrefillResult>& result, absl::Time now);

  // The call is over. The spans by the wall clock, which shows `wall_now` where the other one shows `now`.
  std::vector<TraceSpan> Finish(const Request& request, const absl::Status& status, absl::Time now,
                                absl::Time wall_now);

 private:
  TraceSpan& Add(const char* name, const std::string& parent, absl::Time begin, absl::Time end);

  std::string trace_id_;
  std::string parent_id_;  // the caller's span; empty: none
  bool recorded_ = true;
  const absl::Time begin_;
  const std::string root_id_ = NewSpanId();
  const std::string compute_id_ = NewSpanId();
  absl::Time uploaded_at_ = absl::InfiniteFuture();  // infinite: not yet, as those that follow
  absl::Time compute_begin_ = absl::InfiniteFuture();
  absl::Time computed_at_ = absl::InfiniteFuture();
  absl::Time layer_begin_;
  int layers_done_ = 0;
  std::vector<std::pair<std::string, TraceSpan::Value>> computed_;  // attributes of what was computed
  std::vector<TraceSpan> spans_;
};

// The trace of a `traceparent` as ParseTraceparent has it, where its caller records it; empty: none.
std::string RecordedTraceId(absl::string_view traceparent);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_PREFILL_TRACE_H_
