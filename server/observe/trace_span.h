// A span of OpenTelemetry: a named stretch of time within a trace, and what made it.
#ifndef MESHFILL_SERVER_OBSERVE_TRACE_SPAN_H_
#define MESHFILL_SERVER_OBSERVE_TRACE_SPAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/time/time.h"

namespace meshfill {

struct TraceSpan {
  using Value = std::variant<std::string, int64_t, double>;

  std::string trace_id;      // 32 hexadecimal digits
  std::string id;            // 16
  std::string parent_id;     // 16; empty: it is the root of its trace
  std::string name;          // one of a fixed set
  bool serves_call = false;  // a client's call; false: an internal span
  absl::Time begin;          // by the wall clock
  absl::Time end;
  std::vector<std::pair<std::string, Value>> attributes;
  std::string error;  // empty: it went well
};

// The memory that it takes, about.
size_t BytesOf(const TraceSpan& span);

std::string NewTraceId();
std::string NewSpanId();

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_TRACE_SPAN_H_
