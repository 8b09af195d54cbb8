#include "server/observe/status_page.h"

#include <utility>

#include "engine/mesh/placement_name.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "nlohmann/json.hpp"

namespace meshfill {
namespace {

constexpr char kEmptySvg[] = R"(<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>)";

using Json = nlohmann::ordered_json;
using google::protobuf::FieldDescriptor;

Json MessageJson(const google::protobuf::Message& message);

// `index`: of a repeated field's value; -1: of a single one.
Json FieldJson(const google::protobuf::Message& message, const FieldDescriptor& field, int index) {
  const google::protobuf::Reflection& all = *message.GetReflection();
  const bool one = index < 0;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      return one ? all.GetString(message, &field) : all.GetRepeatedString(message, &field, index);
    case FieldDescriptor::CPPTYPE_UINT32:
      return one ? all.GetUInt32(message, &field) : all.GetRepeatedUInt32(message, &field, index);
    case FieldDescriptor::CPPTYPE_INT32:
      return one ? all.GetInt32(message, &field) : all.GetRepeatedInt32(message, &field, index);
    case FieldDescriptor::CPPTYPE_UINT64:
      return one ? all.GetUInt64(message, &field) : all.GetRepeatedUInt64(message, &field, index);
    case FieldDescriptor::CPPTYPE_INT64:
      return one ? all.GetInt64(message, &field) : all.GetRepeatedInt64(message, &field, index);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return one ? all.GetFloat(message, &field) : all.GetRepeatedFloat(message, &field, index);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return one ? all.GetDouble(message, &field) : all.GetRepeatedDouble(message, &field, index);
    case FieldDescriptor::CPPTYPE_BOOL:
      return one ? all.GetBool(message, &field) : all.GetRepeatedBool(message, &field, index);
    case FieldDescriptor::CPPTYPE_ENUM:
      return std::string(
          (one ? all.GetEnum(message, &field) : all.GetRepeatedEnum(message, &field, index))->name());
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return MessageJson(one ? all.GetMessage(message, &field)
                             : all.GetRepeatedMessage(message, &field, index));
  }
  return Json();
}

// Every field, zeros and empty lists, too, and 64-bit numbers as numbers: protobuf's own JSON leaves out the
// former and quotes the latter. None of them is above 2^53.
Json MessageJson(const google::protobuf::Message& message) {
  Json json = Json::object();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor& field = *message.GetDescriptor()->field(i);
    const std::string name(field.name());
    if (!field.is_repeated()) {
      json[name] = FieldJson(message, field, -1);
      continue;
    }
    json[name] = Json::array();
    for (int at = 0; at < message.GetReflection()->FieldSize(message, &field); ++at) {
      json[name].push_back(FieldJson(message, field, at));
    }
  }
  return json;
}

Json RankJson(const RankStats& stats) {
  Json waits = Json::object();
  for (Traffic traffic : kPrefillTraffics) waits[OperationName(traffic)] = stats.wait_seconds[traffic];
  return {{"total_seconds", stats.total_seconds},
          {"attention_seconds", stats.attention_seconds},
          {"block_seconds", stats.block_seconds},
          {"merge_seconds", stats.merge_seconds},
          {"wait_seconds", std::move(waits)}};
}

Json ReportJson(const PrefillReport& report) {
  const Plan& plan = report.plan;
  Json ranks = Json::array();
  for (const RankStats& stats : report.ranks) ranks.push_back(RankJson(stats));
  return {{"number", report.number},
          {"tokens", plan.cached_tokens + plan.layout.tokens()},
          {"prefill_seconds", report.prefill_seconds},
          {"predicted_seconds", plan.predicted.seconds},
          {"mfu", report.mfu},
          {"attention_mfu", report.attention_mfu},
          {"plan",
           {{"ranks", plan.ranks()},
            {"heads", plan.heads},
            {"a", plan.tile.a},
            {"b", plan.tile.b},
            {"layout", LayoutName(plan.layout.kind())},
            {"stripe", plan.layout.stripe()},
            {"partial_dtype", DTypeName(plan.partial_dtype)},
            {"placement", PlacementName(plan.placement.name)}}},
          {"ranks", std::move(ranks)}};
}

bool Serves(const v1::PoolStatus& pool) {
  return pool.state() == v1::PoolStatus::STATE_READY && pool.ranks() > 0;
}

}  // namespace

std::string StatusJson(const v1::PoolStatus& pool, const PrefillReport* last) {
  const Json status = {{"pool", MessageJson(pool)},
                       {"last_prefill", last == nullptr ? Json() : ReportJson(*last)}};
  return status.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::vector<HttpPage> StatusPages(const std::function<v1::PoolStatus()>& pool_status,
                                  const LastPrefill& last_prefill) {
  return {{"/", "text/html; charset=utf-8", [] { return std::string(kStatusPageHtml); }},
          {"/readyz", "text/plain",
           [pool_status] { return Serves(pool_status()) ? "serves\n" : "does not serve\n"; },
           [pool_status] { return Serves(pool_status()); }},
          {"/status.json", "application/json",
           [pool_status, &last_prefill] { return StatusJson(pool_status(), last_prefill.report().get()); }},
          {"/last_prefill.svg", "image/svg+xml", [&last_prefill] {
             const auto last = last_prefill.report();
             return last == nullptr ? std::string(kEmptySvg) : PrefillReportSvg(*last);
           }}};
}

}  // namespace meshfill
