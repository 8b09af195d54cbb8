#include "server/cli/bench/bench_serve.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "kernels/return_if_error.h"
#include "server/cli/bench/load_clients.h"
#include "server/cli/bench/load_figures.h"
#include "server/cli/bench/load_report.h"
#include "server/cli/client.h"
#include "server/cli/commands/flags.h"
#include "server/config/address.h"
#include "server/config/config.h"
#include "server/config/priority_class.h"

namespace meshfill {
namespace {

constexpr int kWarmUps = 20;
constexpr int kMostAtOnce = 120;    // below a connection's streams (limits.max_streams)
constexpr double kCounted = 0.9;    // of the prompts: the first that are answered
constexpr size_t kAskedAgain = 20;  // answers under load that are compared with lone ones

// What is promised of a server (docs/operating.md).
constexpr double kMixLoad = 0.8, kOverload = 10;
constexpr double kMostShortSlowdown = 10, kMostLongSlowdown = 3;
constexpr double kMostMedianError = 0.1, kMostP95Error = 0.3, kMostDrift = 0.1;
constexpr double kLeastFlightRatio = 0.97, kLeastOfLone = 0.9, kLeastGoodput = 0.95;
constexpr double kMostRefusalSeconds = 0.01;
constexpr double kLeastShare = 0.45, kMostLoneMedianError = 0.2;
constexpr double kMostWaitOfMaxAge = 1.05;
constexpr double kMostPrompts = 1e7;
constexpr double kAges = 4;  // times queue.max_age that a flood of a class takes
constexpr int kFloods = 8;   // times as many prompts of the tenant that floods as in flight

enum class Scenario { kMix, kFlight, kOverload, kFlood, kClasses, kAlone };

absl::StatusOr<Scenario> ParseScenario(const std::string& text) {
  if (text == "mix") return Scenario::kMix;
  if (text == "flight") return Scenario::kFlight;
  if (text == "overload") return Scenario::kOverload;
  if (text == "flood") return Scenario::kFlood;
  if (text == "classes") return Scenario::kClasses;
  if (text == "alone") return Scenario::kAlone;
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "' is none of mix, flight, overload, flood, classes and alone"));
}

const char* NameOf(Scenario scenario) {
  switch (scenario) {
    case Scenario::kMix:
      return "mix";
    case Scenario::kFlight:
      return "flight";
    case Scenario::kOverload:
      return "overload";
    case Scenario::kFlood:
      return "flood";
    case Scenario::kClasses:
      return "classes";
    case Scenario::kAlone:
      return "alone";
  }
  return "?";
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

std::vector<double> EndsOf(const std::vector<LoadOutcome>& outcomes) {
  std::vector<double> ends;
  for (const LoadOutcome& outcome : outcomes) {
    if (outcome.status.ok()) ends.push_back(outcome.ended_at);
  }
  return ends;
}

class BenchServeCommand : public Command {
 public:
  explicit BenchServeCommand(CLI::App& parent)
      : Command(parent.add_subcommand("serve", "A running server under the load of many clients")) {
    server_.address = kDefaultListen;
    AddServerOption(*app_, server_, "The server")->default_str(server_.address);
    AddConnectionOptions(*app_, server_);
    AddParsedOption(
        *app_, "--scenario", scenario_, ParseScenario, "mix|flight|overload|flood|classes|alone",
        "Lengths mixed; many at once against one after the other; more than it can do; one "
        "tenant with many beside another; one of the lowest class beside many of the highest; one "
        "after the other, as predicted")
        ->required();
    AddCount(*app_, "--tokens", tokens_, "Of a prompt; the mix has ones of 16 and 128 times as many, too");
    app_->add_option("--seconds", seconds_, "While prompts come")
        ->check(PositiveNumber())
        ->capture_default_str();
    app_->add_option("--load", load_,
                     "Of what the server can do; left out: 0.8 of the mix, 10 of an overload")
        ->check(PositiveNumber());
    AddCount(*app_, "--in-flight", in_flight_, "Prompts at once");
    app_->add_option("--max-age", max_age_seconds_, "The server's queue.max_age, in seconds (classes)")
        ->check(PositiveNumber())
        ->capture_default_str();
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
      case Scenario::kFlood:
        RunFlood();
        break;
      case Scenario::kClasses:
        RETURN_IF_ERROR(RunClasses());
        break;
      case Scenario::kAlone:
        RunAlone();
        break;
    }
    report_.scenario = NameOf(scenario_);
    std::fputs(json_ ? JsonOf(report_).c_str() : TextOf(report_).c_str(), stdout);
    return absl::OkStatus();
  }

 private:
  // ---- Sending.
  std::vector<LoadOutcome> Send(const std::vector<LoadPrompt>& prompts, int most_at_once) {
    return SendLoad(*channel_, prompts, NextLoad(prompts.size(), most_at_once));
  }

  // No prompt is sent twice.
  LoadOptions NextLoad(size_t prompts, int most_at_once) {
    const uint64_t seed = seed_;
    seed_ += prompts;
    return {.vocab = vocab_, .most_at_once = most_at_once, .seed = seed};
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
    report_.requests = outcomes.size();
    report_.seconds = EndOf(outcomes);
    for (const LoadOutcome& outcome : outcomes) {
      report_.refusal_seconds.insert(report_.refusal_seconds.end(), outcome.refusal_seconds.begin(),
                                     outcome.refusal_seconds.end());
      most_refusals_ = std::max(most_refusals_, outcome.refusal_seconds.size());
      if (outcome.status.ok()) continue;
      if (report_.failed++ == 0) std::fprintf(stderr, "%s\n", outcome.status.ToString().c_str());
    }
    report_.checks.push_back(
        {.name = "failed", .value = static_cast<double>(report_.failed), .at_least = {}, .at_most = 0});
  }

  void Figure(const std::string& name, double value) { report_.figures.emplace_back(name, value); }
  void AtMost(const std::string& name, double value, double bound) {
    report_.checks.push_back({.name = name, .value = value, .at_least = {}, .at_most = bound});
  }
  void AtLeast(const std::string& name, double value, double bound) {
    report_.checks.push_back({.name = name, .value = value, .at_least = bound, .at_most = {}});
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

    for (const LoadClass& each : classes) report_.lengths.push_back({.of = each});
    const std::vector<double> first_comes = FirstComeFirstServed(prompts, classes);
    std::vector<PredictedTime> predictions;
    for (size_t i = 0; i < prompts.size(); ++i) {
      if (!outcomes[i].status.ok()) continue;
      const auto length =
          std::find_if(report_.lengths.begin(), report_.lengths.end(),
                       [&](const LengthFigures& each) { return each.of.tokens == prompts[i].tokens; });
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
    for (LengthFigures& length : report_.lengths) {
      std::vector<LoadPrompt> of_length;
      std::copy_if(prompts.begin(), prompts.end(), std::back_inserter(of_length),
                   [&](const LoadPrompt& prompt) { return prompt.tokens == length.of.tokens; });
      for (const double seconds : FirstComeFirstServed(of_length, classes)) {
        length.by_themselves.push_back(seconds / length.of.lone_seconds);
      }
    }
    const auto check_slowdown = [&](const LengthFigures& length, double bound) {
      if (length.slowdowns.empty()) return;
      AtMost(absl::StrCat("slowdown_p99_of_", length.of.tokens), Percentile(length.slowdowns, 0.99), bound);
    };
    check_slowdown(report_.lengths.front(), kMostShortSlowdown);
    check_slowdown(report_.lengths.back(), kMostLongSlowdown);
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
      report_.seconds += seconds;
      if (lone_.empty()) continue;
      ASSIGN_OR_RETURN(const double lone_speed, LoneTokensPerSecond());
      lone.push_back(lone_speed);
      of_lone.push_back(static_cast<double>(tokens_) * in_flight_ / seconds / lone_speed);
    }
    report_.requests = static_cast<size_t>(in_flight_) * rounds_;
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
    const std::vector<double> ends = EndsOf(outcomes);
    const double best = static_cast<double>(tokens_) / only.lone_seconds;
    Figure("best_tokens_per_second", best);
    Figure("most_refusals_of_one", static_cast<double>(most_refusals_));
    if (!ends.empty()) {
      const double counted = kCounted * static_cast<double>(ends.size());
      const double goodput = static_cast<double>(tokens_) * counted / Percentile(ends, kCounted);
      Figure("tokens_per_second", goodput);
      AtLeast("of_the_best", goodput / best, kLeastGoodput);
    }
    if (report_.refusal_seconds.empty()) return absl::OkStatus();
    Figure("refusal_seconds_median", Percentile(report_.refusal_seconds, 0.5));
    AtMost("refusal_seconds_p99", Percentile(report_.refusal_seconds, 0.99), kMostRefusalSeconds);
    return absl::OkStatus();
  }

  // Both tenants send all at once, and what is refused again: until the one with fewer prompts has ended.
  void RunFlood() {
    const LoadPrompt prompt = {.due_seconds = 0, .tokens = tokens_, .tenant = "flood"};
    const std::vector<LoadPrompt> flood(static_cast<size_t>(kFloods) * in_flight_, prompt);
    std::vector<LoadPrompt> others(static_cast<size_t>(in_flight_), prompt);
    for (LoadPrompt& other : others) other.tenant = "other";
    const LoadOptions flood_options = NextLoad(flood.size(), kMostAtOnce / 2);
    std::vector<LoadOutcome> outcomes;
    std::thread floods([&] { outcomes = SendLoad(*channel_, flood, flood_options); });
    const std::vector<LoadOutcome> of_others = Send(others, kMostAtOnce / 2);
    floods.join();
    const double share = ShareOf(EndsOf(of_others), EndsOf(outcomes), kCounted);
    outcomes.insert(outcomes.end(), of_others.begin(), of_others.end());
    Count(outcomes);
    AtLeast("share_of_the_other", share, kLeastShare);
  }

  // Prompts of the highest class come for several times queue.max_age, as fast as they are served, and soon
  // one of the lowest.
  absl::Status RunClasses() {
    ASSIGN_OR_RETURN(const double seconds_of_one, SecondsOf(tokens_, 1, 1));
    const double count = std::ceil(kAges * max_age_seconds_ / seconds_of_one);
    if (count > kMostPrompts) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%.3g prompts would come until %g times --max-age; lower it, and the server's "
                          "queue.max_age, or raise "
                          "--tokens",
                          count, kAges));
    }
    const LoadPrompt highest = {.due_seconds = 0, .tokens = tokens_, .tenant = "", .priority = kTopPriority};
    const LoadPrompt lowest = {
        .due_seconds = max_age_seconds_ / 10, .tokens = tokens_, .tenant = "", .priority = -kTopPriority};
    const LoadOptions of_lowest = NextLoad(1, 1);
    LoadOutcome waits;
    std::thread low([&] { waits = SendLoad(*channel_, {&lowest, 1}, of_lowest).front(); });
    std::vector<LoadOutcome> outcomes =
        Send(std::vector<LoadPrompt>(static_cast<size_t>(count), highest), in_flight_);
    low.join();
    const double flood_seconds = EndOf(outcomes);
    outcomes.push_back(waits);
    Count(outcomes);
    if (!waits.status.ok()) return absl::OkStatus();
    AtMost("wait_of_max_age", waits.wait_seconds / max_age_seconds_, kMostWaitOfMaxAge);
    AtMost("end_of_the_flood", waits.ended_at / flood_seconds, 1);  // beyond: the flood was too short
    return absl::OkStatus();
  }

  // After the warm-ups, from which a server learns what it measured wrongly at its start.
  void RunAlone() {
    const std::vector<LoadPrompt> prompts(static_cast<size_t>(in_flight_),
                                          {.due_seconds = 0, .tokens = tokens_, .tenant = ""});
    const std::vector<LoadOutcome> outcomes = Send(prompts, 1);
    Count(outcomes);
    std::vector<PredictedTime> predictions;
    for (const LoadOutcome& of : outcomes) {
      if (!of.status.ok()) continue;
      predictions.push_back({.predicted_seconds = of.predicted_wait_seconds + of.predicted_prefill_seconds,
                             .real_seconds = of.ended_at - of.accepted_at});
    }
    if (predictions.empty()) return;
    AtMost("prediction_median_error", FiguresOf(predictions).median_error, kMostLoneMedianError);
  }

  ServerOptions server_;
  Scenario scenario_ = Scenario::kMix;
  int64_t tokens_ = 1024;
  double seconds_ = 60;
  double load_ = 0;  // 0: the scenario's
  int in_flight_ = 64;
  double max_age_seconds_ = 600;
  int rounds_ = 3;
  std::vector<std::string> lone_;
  uint64_t seed_ = 1;
  bool json_ = false;

  std::optional<ServerChannel> channel_;
  std::vector<ServerChannel> lone_channels_;
  uint32_t vocab_ = 0;
  size_t most_refusals_ = 0;  // most refusals of one prompt
  LoadReport report_;
};

}  // namespace

std::unique_ptr<Command> AddBenchServeCommand(CLI::App& parent) {
  return std::make_unique<BenchServeCommand>(parent);
}

}  // namespace meshfill
