#include "server/pictures/trace_json.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace meshfill {
namespace {

const char* Category(SpanKind kind) {
  switch (kind) {
    case SpanKind::kWork:
      return "work";
    case SpanKind::kWait:
      return "wait";
    case SpanKind::kTransfer:
      return "transfer";
  }
  return "";
}

// Whole nanoseconds, written as µs: what touches in the timeline touches in the trace.
std::string Micros(int64_t nanos) { return absl::StrFormat("%d.%03d", nanos / 1000, nanos % 1000); }

// Names are this program's own and need no escaping.
void AppendMetadata(absl::string_view event, int rank, int lane, absl::string_view argument,
                    std::string& json) {
  absl::StrAppendFormat(&json, R"({"ph":"M","pid":%d,"tid":%d,"name":"%s","args":{%s}},)", rank, lane, event,
                        argument);
  json += '\n';
}

void AppendNames(int rank, std::string& json) {
  AppendMetadata("process_name", rank, 0, absl::StrFormat(R"("name":"rank %d")", rank), json);
  AppendMetadata("process_sort_index", rank, 0, absl::StrFormat(R"("sort_index":%d)", rank), json);
  for (int lane = 0; lane < kLanes; ++lane) {
    const char* const name = LaneName(static_cast<Lane>(lane));
    AppendMetadata("thread_name", rank, lane, absl::StrFormat(R"("name":"%s")", name), json);
    AppendMetadata("thread_sort_index", rank, lane, absl::StrFormat(R"("sort_index":%d)", lane), json);
  }
}

void AppendSpan(const Span& span, std::string& json) {
  const int64_t start = std::llround(span.start_seconds * 1e9), end = std::llround(span.end_seconds * 1e9);
  absl::StrAppendFormat(&json, R"({"ph":"X","pid":%d,"tid":%d,"ts":%s,"dur":%s,"name":"%s","cat":"%s")",
                        span.rank, static_cast<int>(span.lane()), Micros(start), Micros(end - start),
                        span.Name(), Category(span.kind));
  if (span.layer >= 0) absl::StrAppendFormat(&json, R"(,"args":{"layer":%d})", span.layer);
  json += "},\n";
}

}  // namespace

std::string TraceJson(const Timeline& timeline) {
  std::string json = absl::StrFormat(
      R"({"displayTimeUnit":"ms","otherData":{"ranks":%d,"dropped_spans":%d},"traceEvents":[)",
      timeline.ranks, timeline.dropped_spans);
  json += '\n';
  for (int rank = 0; rank < timeline.ranks; ++rank) AppendNames(rank, json);
  for (const Span& span : timeline.spans) AppendSpan(span, json);
  json.erase(json.size() - 2);  // the last comma: there is a rank, so there is an event
  return json + "\n]}\n";
}

}  // namespace meshfill
