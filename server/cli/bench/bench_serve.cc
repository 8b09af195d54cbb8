#include "server/cli/bench/bench_serve.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "kernels/return_if_error.h"
#include "nlohmann/json.hpp"
#include "server/cli/bench/load_clients.h"
#include "server/cli/bench/load_figures.h"
#include "server/cli/client.h"
#include "server/cli/commands/flags.h"
#include "server/cli/progress_bar.h"
#include "server/config/address.h"
#include "server/config/config.h"

namespace meshfill {
namespace {

constexpr int kWarmUps = 20;
constexpr int kMostAtOnce = 120;  // below a connection's streams (limits.max_streams)
constexpr double kOverloadCounted = 0.9;
constexpr size_t kAskedAgain = 20;  // answers under load that are compared with lone ones

// What is promised of a server (docs/operating.md).
constexpr double kMixLoad = 0.8, kOverload = 10;
constexpr double kMostShortSlowdown = 10, kMostLongSlowdown = 3;
constexpr double kMostMedianError = 0.1, kMostP95Error = 0.3, kMostDrift = 0.1;
constexpr double kLeastFlightRatio = 0.97, kLeastOfLone = 0.9, kLeastGoodput = 0.95;
constexpr double kMostRefusalSeconds = 0.01;

enum class Scenario { kMix, kFlight, kOverload };

absl::StatusOr<Scenario> ParseScenario(const std::string& text) {
  if (text == "mix") return Scenario::kMix;
  if (text == "flight") return Scenario::kFlight;
  if (text == "overload") return Scenario::kOverload;
  return absl::InvalidArgumentError(absl::StrCat("'", text, "' is none of mix, flight and overload"));
}

const char* NameOf(Scenario scenario) {
  switch (scenario) {
    case Scenario::kMix:
      return "mix";
    case Scenario::kFlight:
      return "flight";
    case Scenario::kOverload:
      return "overload";
  }
  return "?";
}

struct LengthFigures {
  LoadClass of;
  std::vector<double> slowdowns;    // TTFT over lone TTFT
  std::vector<double> first_comes;  // TTFT over lone TTFT, if prompts were served first come, first served
  // Wait and prefill; the same where only one of them were wrong.
  std::vector<PredictedTime> predictions, wait_predictions, prefill_predictions;
};

nlohmann::ordered_json ErrorJson(const std::vector<PredictedTime>& times) {
  const PredictionFigures figures = FiguresOf(times);
  return {{"median", figures.median_error}, {"p95", figures.p95_error}, {"bias", figures.bias}};
}

// Other plans round otherwise: the best token of each may be another's second best.
bool SameAnswer(const std::vector<uint32_t>& one, const std::vector<uint32_t>& other) {
  const auto has_best = [](const std::vector<uint32_t>& top, const std::vector<uint32_t>& of) {
    return !of.empty() && std::find(top.begin(), top.end(), of.front()) != top.end();
  };
  return has_best(one, other) && has_best(other, one);
}

double EndOf(const std::vector<LoadOutcome>& outcomes) {
  double end = 0;
  for (const LoadOutcome& outcome : outcomes) end = std::max(end, outcome.ended_at);
  return end;
}

class BenchServeCommand : public Command {
 public:
  explicit BenchServeCommand(CLI::App& parent)
      : Command(parent.add_subcommand("serve", "A running server under the load of many clients")) {
    server_.address = kDefaultListen;
    AddServerOption(*app_, server_, "The server")->default_str(server_.address);
    AddConnectionOptions(*app_, server_);
    AddParsedOption(*app_, "--scenario", scenario_, ParseScenario, "mix|flight|overload",
                    "Lengths mixed; many at once against one after the other; more than it can do")
        ->required();
    AddCount(*app_, "--tokens", tokens_, "Of a prompt; the mix has ones of 16 and 128 times as many, too");
    app_->add_option("--seconds", seconds_, "While prompts come")
        ->check(PositiveNumber())
        ->capture_default_str();
    app_->add_option("--load", load_,
                     "Of what the server can do; left out: 0.8 of the mix, 10 of an overload")
        ->check(PositiveNumber());
    AddCount(*app_, "--in-flight", in_flight_, "Prompts at once");
    AddCount(*app_, "--rounds", rounds_, "Pairs of many at once and one after the other");
    app_->add_option(
            "--lone", lone_,
            "Servers of one worker each: what they reach together, all at once, is what as many workers "
            "of one server are held against (flight)")
        ->type_name("HOST:PORT")
        ->check([](const std::string& text) { return std::string(ParseHostPort(text).status().message()); });
    app_->add_option("--seed", seed_, "Of moments, lengths and tokens")->capture_default_str();
    AddJsonFlag(*app_, json_);
  }

  absl::Status Run() override {
    ASSIGN_OR_RETURN(channel_, ServerChannel::Open(server_));
    for (const std::string& address : lone_) {
      ServerOptions lone = server_;
      lone.address = address;
      ASSIGN_OR_RETURN(ServerChannel channel, ServerChannel::Open(lone));
      lone_channels_.push_back(std::move(channel));
    }
    ASSIGN_OR_RETURN(const v1::PoolStatus pool, GetPool(*channel_, kCallTimeout));
    if (pool.vocab() == 0) {
      return absl::UnavailableError(
          absl::StrCat("server ", server_.address, " is loading its model; try again soon"));
    }
    vocab_ = pool.vocab();
    RETURN_IF_ERROR(OneAfterTheOther(tokens_, kWarmUps).status());
    switch (scenario_) {
      case Scenario::kMix:
        RETURN_IF_ERROR(RunMix());
        break;
      case Scenario::kFlight:
        RETURN_IF_ERROR(RunFlight());
        break;
      case Scenario::kOverload:
        RETURN_IF_ERROR(RunOverload());
        break;
    }
    std::fputs(json_ ? Json().c_str() : Text().c_str(), stdout);
    return absl::OkStatus();
  }

 private:
  // ---- Sending.
  std::vector<LoadOutcome> Send(const std::vector<LoadPrompt>& prompts, int most_at_once) {
    const uint64_t seed = seed_;
    seed_ += prompts.size();  // no prompt is sent twice
    return SendLoad(*channel_, prompts, {.vocab = vocab_, .most_at_once = most_at_once, .seed = seed});
  }

  // Runs `at_once` prompts at a time. Seconds until the last one ended, or the first error.
  absl::StatusOr<double> SecondsOf(int64_t tokens, int count, int at_once) {
    const std::vector<LoadOutcome> outcomes =
        Send(std::vector<LoadPrompt>(count, {.due_seconds = 0, .tokens = tokens, .tenant = ""}), at_once);
    for (const LoadOutcome& outcome : outcomes) RETURN_IF_ERROR(outcome.status);
    return EndOf(outcomes);
  }

  // Seconds of each.
  absl::StatusOr<std::vector<double>> OneAfterTheOther(int64_t tokens, int count) {
    std::vector<double> seconds(count);
    for (double& each : seconds) {
      ASSIGN_OR_RETURN(each, SecondsOf(tokens, 1, 1));
    }
    return seconds;
  }

  // Sends some of the prompts that were answered again, each alone and without the cache, evenly drawn: how
  // many of these have another answer, or none. `seed` is the load's.
  int AnswersThatDiffer(const std::vector<LoadPrompt>& prompts, const std::vector<LoadOutcome>& outcomes,
                        uint64_t seed) {
    int differ = 0;
    const size_t step = prompts.size() / kAskedAgain + 1;
    for (size_t i = 0; i < prompts.size(); i += step) {
      if (!outcomes[i].status.ok()) continue;
      LoadPrompt again = prompts[i];
      again.due_seconds = 0;
      const LoadOptions options = {.vocab = vocab_, .seed = seed + i, .ignore_cache = true};
      const LoadOutcome alone = SendLoad(*channel_, {&again, 1}, options).front();
      if (!SameAnswer(outcomes[i].top, alone.top)) ++differ;
    }
    return differ;
  }

  // Counts what failed and what was refused.
  void Count(const std::vector<LoadOutcome>& outcomes) {
    requests_ = outcomes.size();
    load_seconds_ = EndOf(outcomes);
    for (const LoadOutcome& outcome : outcomes) {
      refusal_seconds_.insert(refusal_seconds_.end(), outcome.refusal_seconds.begin(),
                              outcome.refusal_seconds.end());
      most_refusals_ = std::max(most_refusals_, outcome.refusal_seconds.size());
      if (outcome.status.ok()) continue;
      if (failed_++ == 0) std::fprintf(stderr, "%s\n", outcome.status.ToString().c_str());
    }
    checks_.push_back(
        {.name = "failed", .value = static_cast<double>(failed_), .at_least = {}, .at_most = 0});
  }

  void Figure(const std::string& name, double value) { figures_.emplace_back(name, value); }
  void AtMost(const std::string& name, double value, double bound) {
    checks_.push_back({.name = name, .value = value, .at_least = {}, .at_most = bound});
  }
  void AtLeast(const std::string& name, double value, double bound) {
    checks_.push_back({.name = name, .value = value, .at_least = bound, .at_most = {}});
  }

  // ---- Scenarios.
  absl::Status RunMix() {
    std::vector<LoadClass> classes = {{.tokens = tokens_, .share = 0.9},
                                      {.tokens = 16 * tokens_, .share = 0.09},
                                      {.tokens = 128 * tokens_, .share = 0.01}};
    const std::vector<int> lone_counts = {16, 6, 2};
    std::vector<std::vector<double>> lone(classes.size());
    const auto measure_lone = [&]() -> absl::Status {
      for (size_t i = 0; i < classes.size(); ++i) {
        ASSIGN_OR_RETURN(const std::vector<double> seconds,
                         OneAfterTheOther(classes[i].tokens, lone_counts[i]));
        lone[i].insert(lone[i].end(), seconds.begin(), seconds.end());
        classes[i].lone_seconds = Percentile(lone[i], 0.5);
      }
      return absl::OkStatus();
    };
    RETURN_IF_ERROR(measure_lone());
    const std::vector<LoadPrompt> prompts =
        PoissonPrompts(classes, load_ > 0 ? load_ : kMixLoad, seconds_, seed_);
    if (prompts.empty()) return absl::InvalidArgumentError("no prompt comes in that time; raise --seconds");
    const uint64_t seed = seed_;
    const std::vector<LoadOutcome> outcomes = Send(prompts, kMostAtOnce);
    Count(outcomes);
    RETURN_IF_ERROR(measure_lone());  // what else the machine does may have changed

    for (const LoadClass& each : classes) lengths_.push_back({.of = each});
    const std::vector<double> first_comes = FirstComeFirstServed(prompts, classes);
    std::vector<PredictedTime> predictions;
    for (size_t i = 0; i < prompts.size(); ++i) {
      if (!outcomes[i].status.ok()) continue;
      const auto length = std::find_if(lengths_.begin(), lengths_.end(), [&](const LengthFigures& each) {
        return each.of.tokens == prompts[i].tokens;
      });
      length->slowdowns.push_back((outcomes[i].ended_at - prompts[i].due_seconds) / length->of.lone_seconds);
      length->first_comes.push_back(first_comes[i] / length->of.lone_seconds);
      const LoadOutcome& of = outcomes[i];
      const double real_seconds = of.ended_at - of.accepted_at;
      const double wait_error = of.predicted_wait_seconds - of.wait_seconds;
      const double prefill_error = of.predicted_prefill_seconds - of.prefill_seconds;
      predictions.push_back({.predicted_seconds = of.predicted_wait_seconds + of.predicted_prefill_seconds,
                             .real_seconds = real_seconds});
      length->predictions.push_back(predictions.back());
      length->wait_predictions.push_back({std::max(0.0, real_seconds + wait_error), real_seconds});
      length->prefill_predictions.push_back({std::max(0.0, real_seconds + prefill_error), real_seconds});
    }
    const auto check_slowdown = [&](const LengthFigures& length, double bound) {
      if (length.slowdowns.empty()) return;
      AtMost(absl::StrCat("slowdown_p99_of_", length.of.tokens), Percentile(length.slowdowns, 0.99), bound);
    };
    check_slowdown(lengths_.front(), kMostShortSlowdown);
    check_slowdown(lengths_.back(), kMostLongSlowdown);
    if (predictions.empty()) return absl::OkStatus();
    AtMost("answers_that_differ", AnswersThatDiffer(prompts, outcomes, seed), 0);
    const PredictionFigures figures = FiguresOf(predictions);
    AtMost("prediction_median_error", figures.median_error, kMostMedianError);
    AtMost("prediction_p95_error", figures.p95_error, kMostP95Error);
    AtMost("prediction_drift", figures.drift, kMostDrift);
    return absl::OkStatus();
  }

  absl::Status RunFlight() {
    std::vector<double> ratios, together, in_turn, lone, of_lone;
    if (!lone_.empty()) RETURN_IF_ERROR(LoneTokensPerSecond().status());  // they warm up
    for (int round = 0; round < rounds_; ++round) {
      ASSIGN_OR_RETURN(const double turn_seconds, SecondsOf(tokens_, in_flight_, 1));
      ASSIGN_OR_RETURN(const double seconds, SecondsOf(tokens_, in_flight_, in_flight_));
      in_turn.push_back(turn_seconds);
      together.push_back(seconds);
      ratios.push_back(turn_seconds / seconds);
      load_seconds_ += seconds;
      if (lone_.empty()) continue;
      ASSIGN_OR_RETURN(const double lone_speed, LoneTokensPerSecond());
      lone.push_back(lone_speed);
      of_lone.push_back(static_cast<double>(tokens_) * in_flight_ / seconds / lone_speed);
    }
    requests_ = static_cast<size_t>(in_flight_) * rounds_;
    const double tokens = static_cast<double>(tokens_) * in_flight_;
    Figure("tokens_per_second", tokens / Percentile(together, 0.5));
    Figure("one_after_the_other_tokens_per_second", tokens / Percentile(in_turn, 0.5));
    AtLeast("of_one_after_the_other", Percentile(ratios, 0.5), kLeastFlightRatio);
    if (lone_.empty()) return absl::OkStatus();
    Figure("lone_tokens_per_second", Percentile(lone, 0.5));
    AtLeast("of_lone_workers", Percentile(of_lone, 0.5), kLeastOfLone);
    return absl::OkStatus();
  }

  // Of the lone servers together, each with its share of the prompts in flight: the sum of their speeds while
  // all of them are busy.
  absl::StatusOr<double> LoneTokensPerSecond() {
    const int count = std::max<int>(1, in_flight_ / static_cast<int>(lone_.size()));
    std::vector<absl::StatusOr<double>> speeds(lone_.size(), absl::UnknownError("not run"));
    std::vector<std::thread> threads;
    for (size_t i = 0; i < lone_channels_.size(); ++i) {
      const uint64_t seed = seed_;
      seed_ += static_cast<uint64_t>(count);
      threads.emplace_back([this, count, i, &speeds, seed] {
        speeds[i] = SpeedOf(
            SendLoad(lone_channels_[i],
                     std::vector<LoadPrompt>(count, {.due_seconds = 0, .tokens = tokens_, .tenant = ""}),
                     {.vocab = vocab_, .most_at_once = count, .seed = seed}));
      });
    }
    for (std::thread& thread : threads) thread.join();
    double sum = 0;
    for (const absl::StatusOr<double>& speed : speeds) {
      RETURN_IF_ERROR(speed.status());
      sum += *speed;
    }
    return sum;
  }

  absl::StatusOr<double> SpeedOf(const std::vector<LoadOutcome>& outcomes) const {
    for (const LoadOutcome& outcome : outcomes) RETURN_IF_ERROR(outcome.status);
    return static_cast<double>(tokens_) * static_cast<double>(outcomes.size()) / EndOf(outcomes);
  }

  // The best is what as many at once reach, with the queue always filled.
  absl::Status RunOverload() {
    std::vector<double> seconds_of_one;
    for (int round = 0; round < rounds_; ++round) {
      ASSIGN_OR_RETURN(const double seconds, SecondsOf(tokens_, 2 * in_flight_, in_flight_));
      seconds_of_one.push_back(seconds / (2 * in_flight_));
    }
    const LoadClass only = {.tokens = tokens_, .share = 1, .lone_seconds = Percentile(seconds_of_one, 0.5)};
    const std::vector<LoadPrompt> prompts =
        PoissonPrompts({&only, 1}, load_ > 0 ? load_ : kOverload, seconds_, seed_);
    if (prompts.empty()) return absl::InvalidArgumentError("no prompt comes in that time; raise --seconds");
    const std::vector<LoadOutcome> outcomes = Send(prompts, kMostAtOnce);
    Count(outcomes);
    std::vector<double> ends;
    for (const LoadOutcome& outcome : outcomes) {
      if (outcome.status.ok()) ends.push_back(outcome.ended_at);
    }
    const double best = static_cast<double>(tokens_) / only.lone_seconds;
    Figure("best_tokens_per_second", best);
    Figure("most_refusals_of_one", static_cast<double>(most_refusals_));
    if (!ends.empty()) {
      const double counted = kOverloadCounted * static_cast<double>(ends.size());
      const double goodput = static_cast<double>(tokens_) * counted / Percentile(ends, kOverloadCounted);
      Figure("tokens_per_second", goodput);
      AtLeast("of_the_best", goodput / best, kLeastGoodput);
    }
    if (refusal_seconds_.empty()) return absl::OkStatus();
    Figure("refusal_seconds_median", Percentile(refusal_seconds_, 0.5));
    AtMost("refusal_seconds_p99", Percentile(refusal_seconds_, 0.99), kMostRefusalSeconds);
    return absl::OkStatus();
  }

  // ---- What it prints.
  std::string Json() const {
    const auto percentiles = [](const std::vector<double>& values) -> nlohmann::ordered_json {
      return {{"median", Percentile(values, 0.5)}, {"p99", Percentile(values, 0.99)}};
    };
    nlohmann::ordered_json json = {{"scenario", NameOf(scenario_)},
                                   {"requests", requests_},
                                   {"failed", failed_},
                                   {"refusals", refusal_seconds_.size()},
                                   {"seconds", load_seconds_},
                                   {"lengths", nlohmann::ordered_json::array()},
                                   {"figures", nlohmann::ordered_json::object()},
                                   {"checks", nlohmann::ordered_json::array()}};
    for (const LengthFigures& length : lengths_) {
      nlohmann::ordered_json& each = json["lengths"].emplace_back();
      each = {{"tokens", length.of.tokens},
              {"requests", length.slowdowns.size()},
              {"lone_seconds", length.of.lone_seconds}};
      if (length.slowdowns.empty()) continue;
      each["slowdown"] = percentiles(length.slowdowns);
      each["first_come_first_served"] = percentiles(length.first_comes);
      each["prediction_error"] = {{"all", ErrorJson(length.predictions)},
                                  {"of_wait", ErrorJson(length.wait_predictions)},
                                  {"of_prefill", ErrorJson(length.prefill_predictions)}};
    }
    for (const auto& [name, value] : figures_) json["figures"][name] = value;
    for (const LoadCheck& check : checks_) {
      nlohmann::ordered_json& each = json["checks"].emplace_back();
      each = {{"name", check.name}, {"value", check.value}};
      if (check.at_least.has_value()) each["at_least"] = *check.at_least;
      if (check.at_most.has_value()) each["at_most"] = *check.at_most;
      each["met"] = check.met();
    }
    return absl::StrCat(json.dump(), "\n");
  }

  std::string Text() const {
    std::string text =
        absl::StrFormat("%s: %d requests in %s, %d failed, %d tries refused\n", NameOf(scenario_), requests_,
                        FormatSeconds(load_seconds_), failed_, refusal_seconds_.size());
    for (const LengthFigures& length : lengths_) {
      absl::StrAppendFormat(&text, "%d tokens, alone %s: %d", length.of.tokens,
                            FormatSeconds(length.of.lone_seconds), length.slowdowns.size());
      if (!length.slowdowns.empty()) {
        absl::StrAppendFormat(
            &text,
            ", slowdown median %.3g, 99th percentile %.3g; first come, first served: %.3g, %.3g (calculated)",
            Percentile(length.slowdowns, 0.5), Percentile(length.slowdowns, 0.99),
            Percentile(length.first_comes, 0.5), Percentile(length.first_comes, 0.99));
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
    for (const auto& [name, value] : figures_) absl::StrAppendFormat(&text, "%s %.4g\n", name, value);
    for (const LoadCheck& check : checks_) {
      absl::StrAppendFormat(&text, "%-24s %8.4g  %s %g: %s\n", check.name, check.value,
                            check.at_least.has_value() ? "at least" : "at most",
                            check.at_least.has_value() ? *check.at_least : *check.at_most,
                            check.met() ? "met" : "NOT MET");
    }
    return text;
  }

  ServerOptions server_;
  Scenario scenario_ = Scenario::kMix;
  int64_t tokens_ = 1024;
  double seconds_ = 60;
  double load_ = 0;  // 0: the scenario's
  int in_flight_ = 64;
  int rounds_ = 3;
  std::vector<std::string> lone_;
  uint64_t seed_ = 1;
  bool json_ = false;

  std::optional<ServerChannel> channel_;
  std::vector<ServerChannel> lone_channels_;
  uint32_t vocab_ = 0;
  size_t requests_ = 0;
  int failed_ = 0;
  double load_seconds_ = 0;
  std::vector<double> refusal_seconds_;
  size_t most_refusals_ = 0;  // most refusals of one prompt
  std::vector<LengthFigures> lengths_;
  std::vector<std::pair<std::string, double>> figures_;
  std::vector<LoadCheck> checks_;
};

}  // namespace

std::unique_ptr<Command> AddBenchServeCommand(CLI::App& parent) {
  return std::make_unique<BenchServeCommand>(parent);
}

}  // namespace meshfill
