#include "server/observe/prefill_trace.h"

#include <algorithm>
#include <utility>

namespace meshfill {
namespace {

// In "00-TRACE-PARENT-FLAGS".
constexpr size_t kTraceAt = 3, kTraceDigits = 32;
constexpr size_t kParentAt = 36, kParentDigits = 16;
constexpr size_t kFlagsEnd = 54;  // the lowest bit of the last digit: sampled

bool IsSampled(absl::string_view traceparent) {
  const char digit = traceparent[kFlagsEnd];
  return ((digit <= '9' ? digit - '0' : digit - 'a' + 10) & 1) != 0;
}

std::string TraceIdOf(absl::string_view traceparent) {
  return std::string(traceparent.substr(kTraceAt, kTraceDigits));
}

}  // namespace

PrefillTrace::PrefillTrace(absl::string_view traceparent, absl::Time begin) : begin_(begin) {
  if (traceparent.empty()) {
    trace_id_ = NewTraceId();
    return;
  }
  trace_id_ = TraceIdOf(traceparent);
  parent_id_ = std::string(traceparent.substr(kParentAt, kParentDigits));
  recorded_ = IsSampled(traceparent);
}

void PrefillTrace::OnPlanned(absl::Time begin, absl::Time end) { Add("plan", root_id_, begin, end); }

void PrefillTrace::OnUploaded(absl::Time now) { uploaded_at_ = now; }

void PrefillTrace::OnComputeBegin(absl::Time now) {
  if (layers_done_ == 0) compute_begin_ = layer_begin_ = now;
}

void PrefillTrace::OnLayerDone(int layers_done, absl::Time now) {
  if (layers_done <= layers_done_) layers_done_ = 0;  // another run
  TraceSpan& span = Add("layer", compute_id_, layer_begin_, now);
  span.attributes = {{"meshfill.layer", int64_t{layers_done_}},
                     {"meshfill.layers", int64_t{layers_done} - layers_done_}};
  layers_done_ = layers_done;
  layer_begin_ = now;
}

void PrefillTrace::OnComputed(const absl::StatusOr<PrefillResult>& result, absl::Time now) {
  computed_at_ = now;
  if (!result.ok()) return;
  const Plan& plan = result->plan;
  computed_ = {{"meshfill.ranks", int64_t{plan.ranks()}},
               {"meshfill.heads", int64_t{plan.heads}},
               {"meshfill.tile.a", int64_t{plan.tile.a}},
               {"meshfill.tile.b", int64_t{plan.tile.b}},
               {"meshfill.attempts", int64_t{result->attempts}},
               {"meshfill.pack_prompts", int64_t{result->pack_prompts}},
               {"meshfill.cached_tokens", int64_t{result->cached_tokens}},
               {"meshfill.paused_seconds", result->paused_seconds},
               {"meshfill.attention_seconds", result->attention_seconds},
               {"meshfill.comm_wait_seconds", result->comm_wait_seconds},
               {"meshfill.mfu", result->mfu}};
}

std::vector<TraceSpan> PrefillTrace::Finish(const Request& request, const absl::Status& status,
                                            absl::Time now, absl::Time wall_now) {
  computed_at_ = std::min(computed_at_, now);
  Add("upload", root_id_, begin_, std::min(uploaded_at_, now));
  if (uploaded_at_ <= now) Add("queue", root_id_, uploaded_at_, std::min(compute_begin_, computed_at_));
  if (compute_begin_ <= computed_at_) {
    TraceSpan& compute = Add("compute", root_id_, compute_begin_, computed_at_);
    compute.id = compute_id_;
    compute.attributes = std::move(computed_);
    if (status.ok()) Add("result", root_id_, computed_at_, now);
  }
  TraceSpan& root = Add("prefill", parent_id_, begin_, now);
  root.id = root_id_;
  root.serves_call = true;
  root.attributes = {
      {"rpc.system", std::string("grpc")},    {"rpc.service", std::string("meshfill.v1.PrefillService")},
      {"rpc.method", std::string("Prefill")}, {"rpc.grpc.status_code", static_cast<int64_t>(status.code())},
      {"meshfill.request_id", request.id},    {"meshfill.tenant", request.tenant},
      {"meshfill.tokens", request.tokens}};
  if (!status.ok()) root.error = absl::StatusCodeToString(status.code());
  for (TraceSpan& span : spans_) {
    span.begin = wall_now - (now - span.begin);
    span.end = wall_now - (now - span.end);
  }
  return std::exchange(spans_, {});
}

TraceSpan& PrefillTrace::Add(const char* name, const std::string& parent, absl::Time begin, absl::Time end) {
  return spans_.emplace_back(TraceSpan{.trace_id = trace_id_,
                                       .id = NewSpanId(),
                                       .parent_id = parent,
                                       .name = name,
                                       .begin = begin,
                                       .end = end});
}

std::string RecordedTraceId(absl::string_view traceparent) {
  return !traceparent.empty() && IsSampled(traceparent) ? TraceIdOf(traceparent) : "";
}

}  // namespace meshfill
