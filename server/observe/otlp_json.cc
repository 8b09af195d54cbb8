#include "server/observe/otlp_json.h"

#include <utility>
#include <vector>

#include "nlohmann/json.hpp"

namespace meshfill {
namespace {

using Json = nlohmann::ordered_json;

// Values of the protocol's enums.
constexpr int kInternal = 1, kServer = 2;  // SpanKind
constexpr int kError = 2;                  // StatusCode

Json ValueJson(const std::string& text) { return {{"stringValue", text}}; }
Json ValueJson(int64_t number) { return {{"intValue", std::to_string(number)}}; }
Json ValueJson(double number) { return {{"doubleValue", number}}; }

Json AttributesJson(std::span<const std::pair<std::string, TraceSpan::Value>> attributes) {
  Json list = Json::array();
  for (const auto& [key, value] : attributes) {
    list.push_back(
        {{"key", key}, {"value", std::visit([](const auto& each) { return ValueJson(each); }, value)}});
  }
  return list;
}

Json SpanJson(const TraceSpan& span) {
  Json json = {{"traceId", span.trace_id}, {"spanId", span.id}};
  if (!span.parent_id.empty()) json["parentSpanId"] = span.parent_id;
  json["name"] = span.name;
  json["kind"] = span.serves_call ? kServer : kInternal;
  json["startTimeUnixNano"] = std::to_string(absl::ToUnixNanos(span.begin));
  json["endTimeUnixNano"] = std::to_string(absl::ToUnixNanos(span.end));
  json["attributes"] = AttributesJson(span.attributes);
  if (!span.error.empty()) json["status"] = {{"code", kError}, {"message", span.error}};
  return json;
}

}  // namespace

std::string OtlpJson(std::span<const TraceSpan> spans, const std::string& host) {
  Json list = Json::array();
  for (const TraceSpan& span : spans) list.push_back(SpanJson(span));
  const std::vector<std::pair<std::string, TraceSpan::Value>> process = {
      {"service.name", std::string("meshfill")},
      {"service.version", std::string(MESHFILL_VERSION)},
      {"host.name", host}};
  const Json scope = {{"name", "meshfill"}, {"version", MESHFILL_VERSION}};
  const Json of_process = {{"resource", {{"attributes", AttributesJson(process)}}},
                           {"scopeSpans", Json::array({{{"scope", scope}, {"spans", std::move(list)}}})}};
  const Json body = {{"resourceSpans", Json::array({of_process})}};
  return body.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace meshfill
