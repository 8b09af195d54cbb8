// Spans as an OpenTelemetry collector takes them: the body of a POST of OTLP over HTTP, in its JSON form
// (opentelemetry.io/docs/specs/otlp: ids in hexadecimal digits, integers of 64 bits as strings).
#ifndef MESHFILL_SERVER_OBSERVE_OTLP_JSON_H_
#define MESHFILL_SERVER_OBSERVE_OTLP_JSON_H_

#include <span>
#include <string>

#include "server/observe/trace_span.h"

namespace meshfill {

// The spans of a process on `host`, as OTLP's JSON. Bytes that are no UTF-8 are replaced.
std::string OtlpJson(std::span<const TraceSpan> spans, const std::string& host);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_OTLP_JSON_H_
