#include "server/cli/result_json.h"

#include <algorithm>
#include <utility>

#include "engine/mesh/placement_name.h"
#include "nlohmann/json.hpp"
#include "server/config/message_json.h"

namespace meshfill {
namespace {

using Json = nlohmann::ordered_json;

// Ids and names that a client chose may be any bytes: what is no UTF-8 is replaced, never thrown on.
std::string Dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

Json CommBytesJson(const v1::CommBytes& bytes) {
  Json json = {{"q", bytes.q()}, {"kv", bytes.kv()}, {"o", bytes.o()}, {"all_to_all", bytes.all_to_all()}};
  if (bytes.gather() > 0) json["gather"] = bytes.gather();
  return json;
}

void AddPrediction(const v1::PlanReply::Prediction& predicted, Json& json) {
  json["seconds"] = predicted.seconds();
  json["compute_seconds"] = predicted.compute_seconds();
  json["comm_wait_seconds"] = predicted.comm_wait_seconds();
  json["comm_bytes"] = CommBytesJson(predicted.comm_bytes());
  json["peak_bytes"] = predicted.peak_bytes();
}

// How the prompt is shared.
Json SharedJson(const v1::PlanSummary& plan) {
  return {{"ranks", plan.ranks()},
          {"heads", plan.heads()},
          {"a", plan.a()},
          {"b", plan.b()},
          {"layout", LayoutName(plan.layout())},
          {"stripe", plan.stripe()}};
}

// Programs compare the plan's object: what follows is in it only where it is not as usual.
void AddUnusual(const v1::PlanSummary& plan, Json& json) {
  const std::string placement = PlacementName(plan.placement());
  if (plan.partial_dtype() != DTypeName(DType::kF32)) json["partial_dtype"] = plan.partial_dtype();
  if (placement != kRowFirst) json["placement"] = placement;
  if (plan.kv_inner() > 0) json["kv_inner"] = plan.kv_inner();
  if (plan.exchange_tokens() > 0) json["exchange_tokens"] = plan.exchange_tokens();
  if (plan.pieces() <= 1) return;
  json["pieces"] = plan.pieces();
  json["piece_tokens"] = plan.piece_tokens();
}

}  // namespace

double TtftSeconds(const v1::PrefillResult& result, double upload_seconds) {
  return upload_seconds + result.seconds().queue() + result.seconds().prefill();
}

std::string PrefillJson(const v1::PrefillResult& result, double upload_seconds) {
  Json top = Json::array();
  for (const v1::TokenLogit& best : result.top())
    top.push_back({{"token", best.token()}, {"logit", best.logit()}});
  const v1::PrefillResult::Seconds& seconds = result.seconds();
  Json ran = SharedJson(result.plan());
  AddUnusual(result.plan(), ran);
  Json object({{"request_id", result.request_id()},
               {"tokens", result.tokens()},
               {"first_token", result.first_token()},
               {"top", std::move(top)},
               {"plan", std::move(ran)},
               {"seconds",
                {{"queue", seconds.queue()},
                 {"prefill", seconds.prefill()},
                 {"attention", seconds.attention()},
                 {"comm_wait", seconds.comm_wait()},
                 {"ttft", TtftSeconds(result, upload_seconds)}}},
               {"comm_bytes", CommBytesJson(result.comm_bytes())},
               {"mfu", result.mfu()}});
  if (result.cached_tokens() > 0) object["cached_tokens"] = result.cached_tokens();
  if (result.attempts() > 1) object["attempts"] = result.attempts();
  if (result.pack_prompts() > 1) object["pack_prompts"] = result.pack_prompts();
  return Dump(object);
}

std::string PoolJson(const v1::PoolStatus& status) { return Dump(MessageJson(status)); }

std::string PlanJson(const v1::PlanReply& reply, std::span<const WeightModeBytes> weight_modes,
                     std::span<const std::string> not_yet) {
  Json steps = Json::array();
  for (const v1::PlanReply::Step& step : reply.steps()) {
    Json blocks = Json::array();
    for (const v1::PlanReply::Block& block : step.blocks()) {
      blocks.push_back(Json::array({block.u(), block.v()}));
    }
    steps.push_back({{"comm", step.comm()}, {"blocks", std::move(blocks)}});
    if (step.spans() > 1) steps.back()["spans"] = step.spans();
  }
  Json candidates = Json::array();
  for (const v1::PlanReply::Candidate& candidate : reply.candidates()) {
    Json entry = {{"a", candidate.a()}, {"b", candidate.b()}, {"heads", candidate.heads()}};
    AddPrediction(candidate.predicted(), entry);
    entry["ranks"] = candidate.ranks();
    entry["layout"] = LayoutName(candidate.layout());
    entry["partial_dtype"] = candidate.partial_dtype();
    entry["placement"] = PlacementName(candidate.placement());
    candidates.push_back(std::move(entry));
  }
  Json modes = Json::array();
  for (const WeightModeBytes& each : weight_modes) {
    Json& mode = modes.emplace_back(
        Json{{"mode", WeightModeName(each.mode)}, {"bytes", each.bytes}, {"fits", each.fits}});
    if (each.seconds > 0) mode["seconds"] = each.seconds;
    if (each.host_bytes > 0) mode["host_bytes"] = each.host_bytes;
    if (each.host_memory_bytes > 0) mode["host_memory_bytes"] = each.host_memory_bytes;
  }
  Json weights = {{"mode", reply.weights()},
                  {"bytes", reply.predicted().weight_bytes()},
                  {"seconds", reply.predicted().weight_seconds()},
                  {"modes", std::move(modes)}};
  Json predicted = Json::object();
  AddPrediction(reply.predicted(), predicted);
  Json object = SharedJson(reply.plan());
  object["steps"] = std::move(steps);
  object["predicted"] = std::move(predicted);
  object["candidates"] = std::move(candidates);
  object["weights"] = std::move(weights);
  AddUnusual(reply.plan(), object);
  if (!not_yet.empty()) object["not_yet"] = not_yet;
  return Dump(object);
}

const char* LayoutName(v1::Layout layout) {
  switch (layout) {
    case v1::LAYOUT_STRIPED:
      return "striped";
    case v1::LAYOUT_ZIGZAG:
      return "zigzag";
    case v1::LAYOUT_CONTIGUOUS:
      return "contiguous";
    default:
      return "unspecified";
  }
}

}  // namespace meshfill
