#include "server/cli/result_json.h"

#include <gtest/gtest.h>

#include <bit>
#include <random>

#include "nlohmann/json.hpp"
#include "server/api/plan_proto.h"
#include "server/api/result_proto.h"

namespace meshfill {
namespace {

// A result whose figures are easy to read.
PrefillResult ExampleResult() {
  PrefillResult result{.plan = {{.layout = TokenLayout::Make(LayoutKind::kStriped, 4, 4096, 64).value()}}};
  result.plan.tile = {2, 2};
  result.top = {{17, 9.25f}, {3, -1.5f}};
  result.prefill_seconds = 0.8125;
  result.attention_seconds = 0.5;
  result.comm_wait_seconds = 0.0625;
  result.comm_bytes = {{Traffic::kQ, 1}, {Traffic::kKv, 2}, {Traffic::kO, 3}, {Traffic::kAllToAll, 4}};
  result.mfu = 0.625;
  return result;
}

TEST(PrefillJson, IsTheObjectOfTheDesign) {
  v1::PrefillResult result = ToProto(ExampleResult(), "r-1");
  result.mutable_seconds()->set_queue(0.25);
  EXPECT_EQ(PrefillJson(result, /*upload_seconds=*/0.5),
            R"({"request_id":"r-1","tokens":4096,"first_token":17,)"
            R"("top":[{"token":17,"logit":9.25},{"token":3,"logit":-1.5}],)"
            R"("plan":{"ranks":4,"heads":1,"a":2,"b":2,"layout":"striped","stripe":64},)"
            R"("seconds":{"queue":0.25,"prefill":0.8125,"attention":0.5,"comm_wait":0.0625,"ttft":1.5625},)"
            R"("comm_bytes":{"q":1,"kv":2,"o":3,"all_to_all":4},"mfu":0.625})");
}

TEST(PrefillJson, SaysWhatWasCachedAndThePiecesWhereThereAreAny) {
  v1::PrefillResult result = ToProto(ExampleResult(), "r-1");
  result.set_cached_tokens(512);
  result.mutable_plan()->set_pieces(3);
  result.mutable_plan()->set_piece_tokens(1408);
  const std::string json = PrefillJson(result, /*upload_seconds=*/0);
  EXPECT_NE(json.find(R"("stripe":64,"pieces":3,"piece_tokens":1408})"), std::string::npos) << json;
  EXPECT_NE(json.find(R"("mfu":0.625,"cached_tokens":512})"), std::string::npos) << json;
}

TEST(PrefillJson, SaysWhatWasGatheredWhereWeightsAreShared) {
  v1::PrefillResult result = ToProto(ExampleResult(), "r-1");
  result.mutable_comm_bytes()->set_gather(5);
  const std::string json = PrefillJson(result, /*upload_seconds=*/0);
  EXPECT_NE(json.find(R"("all_to_all":4,"gather":5})"), std::string::npos) << json;
}

TEST(PrefillJson, SaysWireAndPlacementWhereTheyAreNotAsUsual) {
  v1::PrefillResult result = ToProto(ExampleResult(), "r-1");
  result.mutable_plan()->set_partial_dtype("bf16");
  result.mutable_plan()->set_placement("box 1x2x1");
  const std::string json = PrefillJson(result, /*upload_seconds=*/0);
  EXPECT_NE(json.find(R"("stripe":64,"partial_dtype":"bf16","placement":"box 1x2x1"})"), std::string::npos)
      << json;
}

TEST(PrefillJson, LogitsReadBackToTheSameBits) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  PrefillResult result = ExampleResult();
  result.top.clear();
  while (result.top.size() < 500) {
    const float logit = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isfinite(logit)) result.top.push_back({static_cast<uint32_t>(random()), logit});
  }
  const nlohmann::json read = nlohmann::json::parse(PrefillJson(ToProto(result, ""), /*upload_seconds=*/0));
  for (size_t i = 0; i < result.top.size(); ++i) {
    EXPECT_EQ(read["top"][i]["token"].get<uint32_t>(), result.top[i].token);
    EXPECT_EQ(std::bit_cast<uint32_t>(read["top"][i]["logit"].get<float>()),
              std::bit_cast<uint32_t>(result.top[i].logit));
  }
}

TEST(PrefillJson, AnyRequestIdStaysOneLineOfValidJson) {
  const std::string json = PrefillJson(ToProto(ExampleResult(), "a\"\n\xff\\"), /*upload_seconds=*/0);
  EXPECT_EQ(json.find('\n'), std::string::npos);
  EXPECT_EQ(nlohmann::json::parse(json)["request_id"], "a\"\n\xef\xbf\xbd\\");
}

TEST(PrefillJson, NamesEveryLayout) {
  for (const LayoutKind kind : {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous}) {
    EXPECT_STREQ(LayoutName(ToProto(kind)), LayoutName(kind));
  }
}

TEST(PlanJson, IsTheObjectOfTheDesign) {
  PlanChoice choice{.plan = {{.layout = TokenLayout::Make(LayoutKind::kStriped, 2, 100, 16).value()}},
                    .candidates = {}};
  choice.plan.tile = {1, 2};
  choice.plan.schedule = {.tile = {1, 2},
                          .steps = {{Traffic::kKv, {{0, 0}}}, {std::nullopt, {{0, 1}, {0, 0}}}}};
  choice.plan.predicted = {.seconds = 1.5,
                           .compute_seconds = 1.25,
                           .comm_wait_seconds = 0.25,
                           .comm_bytes = {{Traffic::kKv, 640}},
                           .peak_bytes = 4096,
                           .weight_bytes = 1024,
                           .weight_seconds = 0.5};
  choice.weights.mode = WeightMode::kStreamed;
  choice.candidates = {{choice.plan, "", choice.plan.predicted},
                       {{.layout = TokenLayout::Make(LayoutKind::kZigzag, 2, 100, 16).value(),
                         .tile = {2, 1},
                         .partial_dtype = DType::kBf16},
                        "box 1x2x1",
                        {}}};
  const std::string predicted = R"("seconds":1.5,"compute_seconds":1.25,"comm_wait_seconds":0.25,)"
                                R"("comm_bytes":{"q":0,"kv":640,"o":0,"all_to_all":0},"peak_bytes":4096)";
  EXPECT_EQ(
      PlanJson(ToProto(choice), std::vector<WeightModeBytes>{{WeightMode::kResident, 4096, false},
                                                             {WeightMode::kStreamed, 64, true, 0.5, 8, 9}}),
      R"({"ranks":2,"heads":1,"a":1,"b":2,"layout":"striped","stripe":16,)"
      R"("steps":[{"comm":"kv","blocks":[[0,0]]},{"comm":"none","blocks":[[0,1],[0,0]]}],)"
      R"("predicted":{)" +
          predicted + R"(},"candidates":[{"a":1,"b":2,"heads":1,)" + predicted +
          R"(,"ranks":2,"layout":"striped","partial_dtype":"f32","placement":"row-first"},)"
          R"({"a":2,"b":1,"heads":1,"seconds":0.0,"compute_seconds":0.0,"comm_wait_seconds":0.0,)"
          R"("comm_bytes":{"q":0,"kv":0,"o":0,"all_to_all":0},"peak_bytes":0,)"
          R"("ranks":2,"layout":"zigzag","partial_dtype":"bf16","placement":"box 1x2x1"}],)"
          R"("weights":{"mode":"streamed","bytes":1024,"seconds":0.5,)"
          R"("modes":[{"mode":"resident","bytes":4096,"fits":false},)"
          R"({"mode":"streamed","bytes":64,"fits":true,"seconds":0.5,"host_bytes":8,"host_memory_bytes":9}]}})");
}

}  // namespace
}  // namespace meshfill
