#include "server/cli/bench/load_report.h"

#include <gtest/gtest.h>

#include "nlohmann/json.hpp"

namespace meshfill {
namespace {

using nlohmann::json;

LoadReport Report() {
  return {.scenario = "mix",
          .requests = 5,
          .failed = 1,
          .refusal_seconds = {0.001, 0.002},
          .seconds = 12.5,
          .lengths = {{.of = {.tokens = 1024, .share = 0.9, .lone_seconds = 0.25},
                       .slowdowns = {3, 1, 2},
                       .first_comes = {8, 9, 7},
                       .by_themselves = {1, 4, 1.5},
                       .predictions = {{.predicted_seconds = 2, .real_seconds = 1},
                                       {.predicted_seconds = 1, .real_seconds = 1},
                                       {.predicted_seconds = 3, .real_seconds = 2}},
                       .wait_predictions = {{.predicted_seconds = 1, .real_seconds = 2}},
                       .prefill_predictions = {{.predicted_seconds = 5, .real_seconds = 4}}},
                      {.of = {.tokens = 16384, .share = 0.1, .lone_seconds = 4},
                       .slowdowns = {},
                       .first_comes = {},
                       .by_themselves = {},
                       .predictions = {},
                       .wait_predictions = {},
                       .prefill_predictions = {}}},
          .figures = {{"tokens_per_second", 1234.5}},
          .checks = {{.name = "failed", .value = 1, .at_least = {}, .at_most = 0},
                     {.name = "of_the_best", .value = 0.96, .at_least = 0.95, .at_most = {}}}};
}

TEST(LoadReport, Json) {
  const std::string text = JsonOf(Report());
  EXPECT_EQ(text.find('\n'), text.size() - 1);
  EXPECT_EQ(json::parse(text), json::parse(R"({
    "scenario": "mix", "requests": 5, "failed": 1, "refusals": 2, "seconds": 12.5,
    "lengths": [
      {"tokens": 1024, "requests": 3, "lone_seconds": 0.25,
       "slowdown": {"median": 2.0, "p99": 3.0}, "first_come_first_served": {"median": 8.0, "p99": 9.0},
       "by_themselves": {"median": 1.5, "p99": 4.0},
       "prediction_error": {"all": {"median": 0.5, "p95": 1.0, "bias": 0.5},
                            "of_wait": {"median": 0.5, "p95": 0.5, "bias": -0.5},
                            "of_prefill": {"median": 0.25, "p95": 0.25, "bias": 0.25}}},
      {"tokens": 16384, "requests": 0, "lone_seconds": 4.0}],
    "figures": {"tokens_per_second": 1234.5},
    "checks": [{"name": "failed", "value": 1.0, "at_most": 0.0, "met": false},
               {"name": "of_the_best", "value": 0.96, "at_least": 0.95, "met": true}]})"));
}

TEST(LoadReport, Text) {
  EXPECT_EQ(
      TextOf(Report()),
      "mix: 5 requests in 12.5 s, 1 failed, 2 tries refused\n"
      "1024 tokens, alone 250 ms: 3, slowdown median 2, 99th percentile 3; calculated: first come, first "
      "served 8, 9; by themselves 1.5, 4; predictions off: median 0.5, 95th percentile 1, bias +0.5; by the "
      "wait: median 0.5, 95th percentile 0.5, bias -0.5; by the prefill: median 0.25, 95th percentile 0.25, "
      "bias +0.25\n"
      "16384 tokens, alone 4.0 s: 0\n"
      "tokens_per_second 1234\n"
      "failed                          1  at most 0: NOT MET\n"
      "of_the_best                  0.96  at least 0.95: met\n");
}

}  // namespace
}  // namespace meshfill
