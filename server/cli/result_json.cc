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

Json CommBytesJson(const CommBytes& bytes) {
  Json json = Json::object();
  for (Traffic traffic : kPrefillTraffics) {
    if (traffic != Traffic::kGather || bytes[traffic] > 0) json[TrafficName(traffic)] = bytes[traffic];
  }
  return json;
}

void AddPrediction(const Prediction& predicted, Json& json) {
  json["seconds"] = predicted.seconds;
  json["compute_seconds"] = predicted.compute_seconds;
  json["comm_wait_seconds"] = predicted.comm_wait_seconds;
  json["comm_bytes"] = CommBytesJson(predicted.comm_bytes);
  json["peak_bytes"] = predicted.peak_bytes;
}

// Programs compare the plan's object: what follows is in it only where it is not as usual.
void AddWireAndPlacement(absl::string_view partial_dtype, absl::string_view placement, Json& plan) {
  if (partial_dtype != DTypeName(DType::kF32)) plan["partial_dtype"] = partial_dtype;
  if (placement != kRowFirst) plan["placement"] = placement;
}

void AddDoubleRing(uint64_t kv_inner, Json& plan) {
  if (kv_inner > 0) plan["kv_inner"] = kv_inner;
}

void AddExchange(uint64_t exchange_tokens, Json& plan) {
  if (exchange_tokens > 0) plan["exchange_tokens"] = exchange_tokens;
}

void AddPieces(uint64_t pieces, uint64_t piece_tokens, Json& plan) {
  if (pieces <= 1) return;
  plan["pieces"] = pieces;
  plan["piece_tokens"] = piece_tokens;
}

}  // namespace

std::string PrefillJson(const v1::PrefillResult& result) {
  Json top = Json::array();
  for (const v1::TokenLogit& best : result.top())
    top.push_back({{"token", best.token()}, {"logit", best.logit()}});
  const v1::PlanSummary& plan = result.plan();
  const v1::PrefillResult::Seconds& seconds = result.seconds();
  const v1::CommBytes& bytes = result.comm_bytes();
  Json ran = {{"ranks", plan.ranks()},
              {"heads", plan.heads()},
              {"a", plan.a()},
              {"b", plan.b()},
              {"layout", LayoutName(plan.layout())},
              {"stripe", plan.stripe()}};
  AddWireAndPlacement(plan.partial_dtype(), PlacementName(plan.placement()), ran);
  AddDoubleRing(plan.kv_inner(), ran);
  AddExchange(plan.exchange_tokens(), ran);
  AddPieces(plan.pieces(), plan.piece_tokens(), ran);
  Json object({{"request_id", result.request_id()},
               {"tokens", result.tokens()},
               {"first_token", result.first_token()},
               {"top", std::move(top)},
               {"plan", std::move(ran)},
               {"seconds",
                {{"queue", seconds.queue()},
                 {"prefill", seconds.prefill()},
                 {"attention", seconds.attention()},
                 {"comm_wait", seconds.comm_wait()}}},
               {"comm_bytes",
                {{"q", bytes.q()}, {"kv", bytes.kv()}, {"o", bytes.o()}, {"all_to_all", bytes.all_to_all()}}},
               {"mfu", result.mfu()}});
  if (bytes.gather() > 0) object["comm_bytes"]["gather"] = bytes.gather();
  if (result.cached_tokens() > 0) object["cached_tokens"] = result.cached_tokens();
  if (result.attempts() > 1) object["attempts"] = result.attempts();
  return Dump(object);
}

std::string PoolJson(const v1::PoolStatus& status) { return Dump(MessageJson(status)); }

std::string PlanJson(const PlanChoice& choice, std::span<const WeightModeBytes> weight_modes,
                     std::span<const std::string> not_yet) {
  const Plan& plan = choice.plan;
  Json steps = Json::array();
  for (const Step& step : plan.schedule.steps) {
    Json blocks = Json::array();
    for (const BlockIndex& block : step.blocks) blocks.push_back(Json::array({block.u, block.v}));
    steps.push_back({{"comm", CommName(step.comm)}, {"blocks", std::move(blocks)}});
    if (step.spans > 1) steps.back()["spans"] = step.spans;
  }
  Json candidates = Json::array();
  for (const PlanCandidate& candidate : choice.candidates) {
    Json entry = {{"a", candidate.tile.a}, {"b", candidate.tile.b}, {"heads", candidate.heads}};
    AddPrediction(candidate.predicted, entry);
    entry["ranks"] = candidate.ranks();
    entry["layout"] = LayoutName(candidate.layout.kind());
    entry["partial_dtype"] = DTypeName(candidate.partial_dtype);
    entry["placement"] = PlacementName(candidate.placement);
    candidates.push_back(std::move(entry));
  }
  Json modes = Json::array();
  for (const WeightModeBytes& each : weight_modes) {
    Json& mode = modes.emplace_back(
        Json{{"mode", WeightModeName(each.mode)}, {"bytes", each.bytes}, {"fits", each.fits}});
    if (each.seconds > 0) mode["seconds"] = each.seconds;
  }
  Json weights = {{"mode", WeightModeName(choice.weights.mode)},
                  {"bytes", plan.predicted.weight_bytes},
                  {"seconds", plan.predicted.weight_seconds},
                  {"modes", std::move(modes)}};
  Json predicted = Json::object();
  AddPrediction(plan.predicted, predicted);
  Json object({{"ranks", plan.ranks()},
               {"heads", plan.heads},
               {"a", plan.tile.a},
               {"b", plan.tile.b},
               {"layout", LayoutName(plan.layout.kind())},
               {"stripe", plan.layout.stripe()},
               {"steps", std::move(steps)},
               {"predicted", std::move(predicted)},
               {"candidates", std::move(candidates)},
               {"weights", std::move(weights)}});
  AddWireAndPlacement(DTypeName(plan.partial_dtype), PlacementName(plan.placement.name), object);
  AddDoubleRing(static_cast<uint64_t>(plan.kv_inner), object);
  AddExchange(static_cast<uint64_t>(plan.exchanges() == 1 ? 0 : plan.exchange_tokens), object);
  if (!choice.pieces.empty()) {
    AddPieces(choice.pieces.size(), static_cast<uint64_t>(choice.pieces.front().layout.tokens()), object);
  }
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
