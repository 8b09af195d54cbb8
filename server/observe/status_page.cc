#include "server/observe/status_page.h"

#include <utility>

#include "engine/mesh/placement_name.h"
#include "nlohmann/json.hpp"
#include "server/config/message_json.h"

namespace meshfill {
namespace {

constexpr char kEmptySvg[] = R"(<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>)";

using Json = nlohmann::ordered_json;

Json RankJson(const RankStats& stats) {
  Json waits = Json::object();
  for (Traffic traffic : kPrefillTraffics) {
    const double wait = stats.wait_seconds[traffic];
    if (traffic != Traffic::kGather || wait > 0) waits[OperationName(traffic)] = wait;
  }
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
