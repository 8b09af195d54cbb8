#include "server/cli/bench/load_report.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"
#include "server/cli/progress_bar.h"

namespace meshfill {
namespace {

nlohmann::ordered_json ErrorJson(const std::vector<PredictedTime>& times) {
  const PredictionFigures figures = FiguresOf(times);
  return {{"median", figures.median_error}, {"p95", figures.p95_error}, {"bias", figures.bias}};
}

}  // namespace

std::string JsonOf(const LoadReport& report) {
  const auto percentiles = [](const std::vector<double>& values) -> nlohmann::ordered_json {
    return {{"median", Percentile(values, 0.5)}, {"p99", Percentile(values, 0.99)}};
  };
  nlohmann::ordered_json json = {{"scenario", report.scenario},
                                 {"requests", report.requests},
                                 {"failed", report.failed},
                                 {"refusals", report.refusal_seconds.size()},
                                 {"seconds", report.seconds},
                                 {"lengths", nlohmann::ordered_json::array()},
                                 {"figures", nlohmann::ordered_json::object()},
                                 {"checks", nlohmann::ordered_json::array()}};
  for (const LengthFigures& length : report.lengths) {
    nlohmann::ordered_json& each = json["lengths"].emplace_back();
    each = {{"tokens", length.of.tokens},
            {"requests", length.slowdowns.size()},
            {"lone_seconds", length.of.lone_seconds}};
    if (length.slowdowns.empty()) continue;
    each["slowdown"] = percentiles(length.slowdowns);
    each["first_come_first_served"] = percentiles(length.first_comes);
    each["by_themselves"] = percentiles(length.by_themselves);
    each["prediction_error"] = {{"all", ErrorJson(length.predictions)},
                                {"of_wait", ErrorJson(length.wait_predictions)},
                                {"of_prefill", ErrorJson(length.prefill_predictions)}};
  }
  for (const auto& [name, value] : report.figures) json["figures"][name] = value;
  for (const LoadCheck& check : report.checks) {
    nlohmann::ordered_json& each = json["checks"].emplace_back();
    each = {{"name", check.name}, {"value", check.value}};
    if (check.at_least.has_value()) each["at_least"] = *check.at_least;
    if (check.at_most.has_value()) each["at_most"] = *check.at_most;
    each["met"] = check.met();
  }
  return absl::StrCat(json.dump(), "\n");
}

std::string TextOf(const LoadReport& report) {
  std::string text = absl::StrFormat("%s: %d requests in %s, %d failed, %d tries refused\n", report.scenario,
                                     report.requests, FormatSeconds(report.seconds), report.failed,
                                     report.refusal_seconds.size());
  for (const LengthFigures& length : report.lengths) {
    absl::StrAppendFormat(&text, "%d tokens, alone %s: %d", length.of.tokens,
                          FormatSeconds(length.of.lone_seconds), length.slowdowns.size());
    if (!length.slowdowns.empty()) {
      absl::StrAppendFormat(
          &text,
          ", slowdown median %.3g, 99th percentile %.3g; calculated: first come, first served %.3g, %.3g; by "
          "themselves %.3g, %.3g",
          Percentile(length.slowdowns, 0.5), Percentile(length.slowdowns, 0.99),
          Percentile(length.first_comes, 0.5), Percentile(length.first_comes, 0.99),
          Percentile(length.by_themselves, 0.5), Percentile(length.by_themselves, 0.99));
      for (const auto& [name, times] : {std::pair{"predictions off", &length.predictions},
                                        std::pair{"by the wait", &length.wait_predictions},
                                        std::pair{"by the prefill", &length.prefill_predictions}}) {
        const PredictionFigures figures = FiguresOf(*times);
        absl::StrAppendFormat(&text, "; %s: median %.3g, 95th percentile %.3g, bias %+.3g", name,
                              figures.median_error, figures.p95_error, figures.bias);
      }
    }
    absl::StrAppend(&text, "\n");
  }
  for (const auto& [name, value] : report.figures) absl::StrAppendFormat(&text, "%s %.4g\n", name, value);
  for (const LoadCheck& check : report.checks) {
    absl::StrAppendFormat(&text, "%-24s %8.4g  %s %g: %s\n", check.name, check.value,
                          check.at_least.has_value() ? "at least" : "at most",
                          check.at_least.has_value() ? *check.at_least : *check.at_most,
                          check.met() ? "met" : "NOT MET");
  }
  return text;
}

}  // namespace meshfill
