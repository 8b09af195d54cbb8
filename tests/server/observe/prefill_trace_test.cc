#include "server/observe/prefill_trace.h"

#include <algorithm>
#include <map>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/observe/otlp_json.h"

namespace meshfill {
namespace {

using ::testing::ElementsAre;
using ::testing::MatchesRegex;

constexpr char kParent[] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

// Seconds by the monotonic clock, and by the wall's.
absl::Time At(double seconds) { return absl::FromUnixSeconds(1000) + absl::Seconds(seconds); }
absl::Time Wall(double seconds) { return absl::FromUnixSeconds(1'900'000'000) + absl::Seconds(seconds); }

absl::StatusOr<PrefillResult> SomeResult() {
  const Plan plan = {
      {.layout = *TokenLayout::Make(LayoutKind::kStriped, 6, 600, 64), .tile = {.a = 2, .b = 3}},
      /*slice_tokens=*/64,
      /*placement=*/{},
      /*schedule=*/{},
      /*predicted=*/{}};
  PrefillResult result = {.plan = plan};
  result.plan.heads = 2;
  result.attempts = 2;
  result.pack_prompts = 3;
  result.cached_tokens = 128;
  result.paused_seconds = 0.75;
  result.attention_seconds = 1.5;
  result.comm_wait_seconds = 0.25;
  result.mfu = 0.5;
  return result;
}

// A call that uploads for 1 s, waits for 2 and computes three layers for 1 s each; its client then reads for
// 0.5.
std::vector<TraceSpan> WholeCall(PrefillTrace& trace) {
  trace.OnPlanned(At(0.25), At(0.5));
  trace.OnUploaded(At(1));
  trace.OnComputeBegin(At(3));
  for (int layer = 1; layer <= 3; ++layer) trace.OnLayerDone(layer, At(3 + layer));
  trace.OnComputed(SomeResult(), At(6.25));
  return trace.Finish({.id = "42", .tenant = "search", .tokens = 600}, absl::OkStatus(), At(6.75),
                      Wall(6.75));
}

std::vector<const TraceSpan*> Named(const std::vector<TraceSpan>& spans, const std::string& name) {
  std::vector<const TraceSpan*> found;
  for (const TraceSpan& span : spans) {
    if (span.name == name) found.push_back(&span);
  }
  return found;
}

// From when to when it lasts, in seconds.
std::pair<double, double> Lasts(const TraceSpan& span) {
  return {absl::ToDoubleSeconds(span.begin - Wall(0)), absl::ToDoubleSeconds(span.end - Wall(0))};
}

TEST(PrefillTrace, APhaseIsAChildOfTheCallAndALayerOneOfCompute) {
  PrefillTrace trace(kParent, At(0));
  ASSERT_TRUE(trace.recorded());
  const std::vector<TraceSpan> spans = WholeCall(trace);
  const TraceSpan& root = *Named(spans, "prefill").at(0);
  EXPECT_EQ(root.parent_id, "b7ad6b7169203331");
  EXPECT_TRUE(root.serves_call);
  EXPECT_TRUE(root.error.empty());
  EXPECT_EQ(Lasts(root), std::pair(0.0, 6.75));
  const std::map<std::string, std::pair<double, double>> phases = {{"upload", {0, 1}},
                                                                   {"plan", {0.25, 0.5}},
                                                                   {"queue", {1, 3}},
                                                                   {"compute", {3, 6.25}},
                                                                   {"result", {6.25, 6.75}}};
  for (const auto& [name, lasts] : phases) {
    const auto found = Named(spans, name);
    ASSERT_EQ(found.size(), 1u) << name;
    EXPECT_EQ(found[0]->parent_id, root.id) << name;
    EXPECT_EQ(Lasts(*found[0]), lasts) << name;
  }
  const auto layers = Named(spans, "layer");
  ASSERT_EQ(layers.size(), 3u);
  for (int layer = 0; layer < 3; ++layer) {
    EXPECT_EQ(layers[layer]->parent_id, Named(spans, "compute")[0]->id);
    EXPECT_EQ(Lasts(*layers[layer]), std::pair(3.0 + layer, 4.0 + layer));
  }
  std::set<std::string> ids;
  for (const TraceSpan& span : spans) {
    EXPECT_EQ(span.trace_id, "0af7651916cd43dd8448eb211c80319c");
    EXPECT_THAT(span.id, MatchesRegex("[0-9a-f]{16}"));
    ids.insert(span.id);
  }
  EXPECT_EQ(ids.size(), spans.size());
  EXPECT_EQ(spans.size(), 1 + phases.size() + layers.size());
}

TEST(PrefillTrace, AnswersToTheCallersFlagAndBeginsTracesOfItsOwn) {
  EXPECT_FALSE(PrefillTrace("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", At(0)).recorded());
  EXPECT_FALSE(PrefillTrace("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-fe", At(0)).recorded());
  EXPECT_TRUE(PrefillTrace("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-ff", At(0)).recorded());
  PrefillTrace first("", At(0)), second("", At(0));
  ASSERT_TRUE(first.recorded());
  const TraceSpan root = *Named(WholeCall(first), "prefill").at(0);
  EXPECT_THAT(root.trace_id, MatchesRegex("[0-9a-f]{32}"));
  EXPECT_EQ(root.parent_id, "");
  EXPECT_NE(root.trace_id, WholeCall(second)[0].trace_id);
}

TEST(PrefillTrace, ARunThatBeginsAnewBeginsWithItsFirstLayer) {
  PrefillTrace trace(kParent, At(0));
  trace.OnUploaded(At(0));
  trace.OnComputeBegin(At(1));
  trace.OnComputeBegin(At(2));  // the engine had no room before
  trace.OnLayerDone(2, At(3));  // told of two at once
  trace.OnComputeBegin(At(4));  // the second run
  trace.OnLayerDone(2, At(5));
  trace.OnLayerDone(1, At(5.5));  // of the third run
  trace.OnLayerDone(2, At(6));
  trace.OnComputed(SomeResult(), At(6));
  const std::vector<TraceSpan> spans = trace.Finish({}, absl::OkStatus(), At(6), Wall(6));
  std::vector<std::pair<int64_t, int64_t>> first_and_count;
  for (const TraceSpan* layer : Named(spans, "layer")) {
    first_and_count.emplace_back(std::get<int64_t>(layer->attributes.at(0).second),
                                 std::get<int64_t>(layer->attributes.at(1).second));
  }
  EXPECT_THAT(first_and_count,
              ElementsAre(std::pair(0, 2), std::pair(0, 2), std::pair(0, 1), std::pair(1, 1)));
  EXPECT_EQ(Lasts(*Named(spans, "queue").at(0)), std::pair(0.0, 2.0));
  EXPECT_EQ(Lasts(*Named(spans, "compute").at(0)), std::pair(2.0, 6.0));
  EXPECT_EQ(Lasts(*Named(spans, "layer").at(0)), std::pair(2.0, 3.0));
  EXPECT_EQ(Lasts(*Named(spans, "layer").at(1)), std::pair(3.0, 5.0));
}

TEST(PrefillTrace, EachDigitOfAnIdIsDrawn) {
  for (const auto& [draw, digits] : {std::pair(&NewSpanId, 16), std::pair(&NewTraceId, 32)}) {
    std::vector<std::set<char>> seen(digits);
    for (int i = 0; i < 64; ++i) {
      const std::string id = draw();
      ASSERT_EQ(id.size(), seen.size());
      for (size_t digit = 0; digit < id.size(); ++digit) seen[digit].insert(id[digit]);
    }
    for (const std::set<char>& each : seen) EXPECT_GT(each.size(), 1u);
  }
}

// However far a call gets, its spans lie within it.
TEST(PrefillTrace, EndsWhereItsCallEnds) {
  const auto names_after = [](int steps) {
    PrefillTrace trace(kParent, At(0));
    if (steps > 0) trace.OnUploaded(At(1));
    if (steps > 1) trace.OnComputeBegin(At(2));
    if (steps > 2) trace.OnComputed(absl::InternalError("NaN"), At(3));
    const auto spans = trace.Finish({}, absl::CancelledError("gone"), At(4), Wall(4));
    std::set<std::string> names;
    for (const TraceSpan& span : spans) {
      names.insert(span.name);
      EXPECT_GE(span.begin, Wall(0)) << span.name;
      EXPECT_LE(span.begin, span.end) << span.name;
      EXPECT_LE(span.end, Wall(4)) << span.name;
    }
    EXPECT_EQ(Named(spans, "prefill").at(0)->error, "CANCELLED");
    return names;
  };
  EXPECT_THAT(names_after(0), ElementsAre("prefill", "upload"));
  EXPECT_THAT(names_after(1), ElementsAre("prefill", "queue", "upload"));
  EXPECT_THAT(names_after(2), ElementsAre("compute", "prefill", "queue", "upload"));
  EXPECT_THAT(names_after(3), ElementsAre("compute", "prefill", "queue", "upload"));
}

// A span's attributes, by key.
nlohmann::json ValuesOf(const nlohmann::json& span) {
  nlohmann::json values;
  for (const auto& attribute : span.at("attributes")) {
    values[attribute.at("key").get<std::string>()] = attribute.at("value");
  }
  return values;
}

TEST(OtlpJson, IsWhatTheProtocolSays) {
  PrefillTrace trace(kParent, At(0));
  std::vector<TraceSpan> spans = WholeCall(trace);
  spans[0].error = "bad \xff byte";
  const auto body = nlohmann::json::parse(OtlpJson(spans, "node-1"));
  const auto& of_process = body.at("resourceSpans").at(0);
  const auto& attributes = of_process.at("resource").at("attributes");
  EXPECT_EQ(attributes.at(0),
            nlohmann::json::parse(R"({"key":"service.name","value":{"stringValue":"meshfill"}})"));
  EXPECT_EQ(attributes.at(2),
            nlohmann::json::parse(R"({"key":"host.name","value":{"stringValue":"node-1"}})"));
  const auto& list = of_process.at("scopeSpans").at(0).at("spans");
  ASSERT_EQ(list.size(), spans.size());
  EXPECT_EQ(list.at(0).at("status").at("code"), 2);
  const auto root =
      std::find_if(list.begin(), list.end(), [](const auto& span) { return span.at("name") == "prefill"; });
  EXPECT_EQ(root->at("traceId"), "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(root->at("parentSpanId"), "b7ad6b7169203331");
  EXPECT_EQ(root->at("kind"), 2);
  EXPECT_EQ(root->at("startTimeUnixNano"), "1900000000000000000");
  EXPECT_EQ(root->at("endTimeUnixNano"), "1900000006750000000");
  EXPECT_FALSE(root->contains("status"));
  EXPECT_EQ(ValuesOf(*root), nlohmann::json::parse(R"({
      "rpc.system": {"stringValue": "grpc"},
      "rpc.service": {"stringValue": "meshfill.v1.PrefillService"},
      "rpc.method": {"stringValue": "Prefill"},
      "rpc.grpc.status_code": {"intValue": "0"},
      "meshfill.request_id": {"stringValue": "42"},
      "meshfill.tenant": {"stringValue": "search"},
      "meshfill.tokens": {"intValue": "600"}})"))
      << "64 bits are text";
  const auto compute =
      std::find_if(list.begin(), list.end(), [](const auto& span) { return span.at("name") == "compute"; });
  EXPECT_EQ(compute->at("parentSpanId"), root->at("spanId"));
  EXPECT_EQ(ValuesOf(*compute), nlohmann::json::parse(R"({
      "meshfill.ranks": {"intValue": "6"},
      "meshfill.heads": {"intValue": "2"},
      "meshfill.tile.a": {"intValue": "2"},
      "meshfill.tile.b": {"intValue": "3"},
      "meshfill.attempts": {"intValue": "2"},
      "meshfill.pack_prompts": {"intValue": "3"},
      "meshfill.cached_tokens": {"intValue": "128"},
      "meshfill.paused_seconds": {"doubleValue": 0.75},
      "meshfill.attention_seconds": {"doubleValue": 1.5},
      "meshfill.comm_wait_seconds": {"doubleValue": 0.25},
      "meshfill.mfu": {"doubleValue": 0.5}})"));
  EXPECT_EQ(list.at(0).at("kind"), 1);
}

TEST(OtlpJson, ARootOfItsOwnHasNoParent) {
  const TraceSpan root = {.trace_id = "a", .id = "b", .name = "prefill"};
  const auto body = nlohmann::json::parse(OtlpJson({&root, 1}, "node-1"));
  const auto& span = body.at("resourceSpans").at(0).at("scopeSpans").at(0).at("spans").at(0);
  EXPECT_EQ(span.at("spanId"), "b");
  EXPECT_FALSE(span.contains("parentSpanId"));
}

TEST(RecordedTraceIdTest, IsThatOfACallerThatSaysSampled) {
  const std::string unsampled = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0";
  for (const char digit : {'1', '3', 'b'}) {
    EXPECT_EQ(RecordedTraceId(unsampled + digit), "0af7651916cd43dd8448eb211c80319c") << digit;
  }
  for (const char digit : {'0', '2', 'a'}) EXPECT_EQ(RecordedTraceId(unsampled + digit), "") << digit;
  EXPECT_EQ(RecordedTraceId(""), "");
}

}  // namespace
}  // namespace meshfill
