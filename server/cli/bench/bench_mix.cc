#include "server/cli/bench/bench_mix.h"

#include <algorithm>
#include <cstdio>
#include <future>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "engine/embedded_engine.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"
#include "nlohmann/json.hpp"
#include "server/cli/commands/flags.h"
#include "server/cli/progress_bar.h"
#include "server/config/config.h"
#include "server/pool/pool_engine.h"
#include "server/queue/prefill_queue.h"

namespace meshfill {
namespace {

constexpr double kTailShare = 0.95;
constexpr absl::Duration kJoinTimeout = absl::Minutes(2);
constexpr absl::Duration kPoll = absl::Milliseconds(50);

double Percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1) + 0.5)];
}

// One prompt in the queue.
class Sent final : public PrefillQueue::Waiter {
 public:
  void OnLayerDone(int, int, double) override {}
  void OnPrefillDone(absl::StatusOr<PrefillResult> result, double) override {
    ended_at_ = MonotonicNow();
    result_.set_value(std::move(result));
  }

  absl::Status Submit(PrefillQueue& queue, const std::string& id, std::vector<uint32_t> tokens,
                      double predicted_seconds, std::shared_ptr<Sent> self) {
    begin_ = MonotonicNow();
    ASSIGN_OR_RETURN(
        slot_,
        queue.Reserve(
            {.id = id, .tenant = {}, .tokens = std::ssize(tokens), .predicted_seconds = predicted_seconds}));
    return slot_->Submit(std::move(tokens), {}, std::move(self)).status();
  }
  // Seconds from Submit to the result.
  absl::StatusOr<double> Seconds() {
    absl::StatusOr<PrefillResult> result = result_.get_future().get();
    RETURN_IF_ERROR(result.status());
    return absl::ToDoubleSeconds(ended_at_ - begin_);
  }

 private:
  absl::Time begin_, ended_at_;
  std::unique_ptr<PrefillQueue::Slot> slot_;
  std::promise<absl::StatusOr<PrefillResult>> result_;
};

class BenchMixCommand : public Command {
 public:
  explicit BenchMixCommand(CLI::App& parent)
      : Command(parent.add_subcommand(
            "mix",
            "Short prompts that come while a long one runs: their latency, and what it costs the other")) {
    config_.AddTo(*app_)->required();
    AddCount(*app_, "--long", long_tokens_, "Tokens of the long prompt");
    AddCount(*app_, "--short", short_tokens_, "Tokens of a short one");
    AddCount(*app_, "--count", count_, "Short prompts, at random moments of the long ones");
    AddCount(*app_, "--rounds", rounds_, "Long prompts; each alone, too");
    AddCount(*app_, "--workers", workers_, "Workers to wait for, where the config has pool.control_listen");
    app_->add_option("--seed", seed_, "Of the tokens and moments")->capture_default_str();
    AddJsonFlag(*app_, json_);
  }

  // In turn, so that what else the machine does meets all alike.
  absl::Status Run() override {
    ASSIGN_OR_RETURN(const v1::Config config, config_.Load());
    ASSIGN_OR_RETURN(const std::unique_ptr<PrefillEngine> engine, Engine(config));
    random_.seed(seed_);
    PrefillQueue queue(*engine, {}, metrics_, last_prefill_);
    for (int warm_up = 0; warm_up < 3; ++warm_up) {
      RETURN_IF_ERROR(Alone(*engine, queue, short_tokens_).status());
    }
    double alone_seconds = 0, mixed_seconds = 0, short_seconds = 0;
    for (int round = 0; round < rounds_; ++round) {
      ASSIGN_OR_RETURN(const double long_alone, Alone(*engine, queue, long_tokens_));
      const int count = count_ * (round + 1) / rounds_ - count_ * round / rounds_;
      std::vector<double> alone;
      for (int i = 0; i < std::max(1, count); ++i) {
        ASSIGN_OR_RETURN(const double seconds, Alone(*engine, queue, short_tokens_));
        alone.push_back(seconds);
      }
      short_alone_.insert(short_alone_.end(), alone.begin(), alone.end());
      ASSIGN_OR_RETURN(const double mixed, Mixed(*engine, queue, long_alone, count));
      alone_seconds += long_alone;
      mixed_seconds += mixed;
      short_seconds += Percentile(alone, 0.5) * count;
    }
    long_alone_seconds_ = alone_seconds / rounds_;
    long_mixed_seconds_ = mixed_seconds / rounds_;
    long_loss_ = (mixed_seconds - short_seconds) / alone_seconds - 1;
    std::fputs(json_ ? Json().c_str() : Text().c_str(), stdout);
    return absl::OkStatus();
  }

 private:
  // The config's engine: an embedded pool, or, with pool.control_listen, a pool of `workers_` workers.
  absl::StatusOr<std::unique_ptr<PrefillEngine>> Engine(const v1::Config& config) {
    if (config.pool().control_listen().empty()) {
      workers_ = 0;
      return LoadEmbeddedEngine(ToEngineOptions(config));
    }
    ASSIGN_OR_RETURN(std::unique_ptr<PoolEngine> pool, PoolEngine::Listen(config, metrics_));
    std::fprintf(stderr, "%d workers join at %s\n", workers_, pool->control_address().c_str());
    const absl::Time deadline = MonotonicNow() + kJoinTimeout;
    while (std::ssize(pool->members()) < workers_) {
      if (MonotonicNow() >= deadline) {
        return absl::DeadlineExceededError(
            absl::StrCat(pool->members().size(), " of ", workers_, " workers joined at ",
                         pool->control_address(), " within ", absl::FormatDuration(kJoinTimeout),
                         "; start `meshfill worker --join` there, or name fewer with --workers"));
      }
      absl::SleepFor(kPoll);
    }
    return pool;
  }

  std::vector<uint32_t> Prompt(const PrefillEngine& engine, int64_t tokens) {
    std::vector<uint32_t> prompt(static_cast<size_t>(tokens));
    for (uint32_t& id : prompt) id = static_cast<uint32_t>(random_() % engine.model().vocab);
    return prompt;
  }

  absl::StatusOr<std::shared_ptr<Sent>> Send(const PrefillEngine& engine, PrefillQueue& queue,
                                             int64_t tokens) {
    ASSIGN_OR_RETURN(const PlanChoice choice, engine.MakePlan(tokens, {}));
    auto sent = std::make_shared<Sent>();
    RETURN_IF_ERROR(sent->Submit(queue, absl::StrCat("bench ", ++last_id_), Prompt(engine, tokens),
                                 choice.plan.predicted.seconds, sent));
    return sent;
  }

  absl::StatusOr<double> Alone(const PrefillEngine& engine, PrefillQueue& queue, int64_t tokens) {
    ASSIGN_OR_RETURN(const std::shared_ptr<Sent> sent, Send(engine, queue, tokens));
    return sent->Seconds();
  }

  // Seconds of the long one, while so many short ones come.
  absl::StatusOr<double> Mixed(const PrefillEngine& engine, PrefillQueue& queue, double long_seconds,
                               int count) {
    std::vector<double> moments;
    for (int i = 0; i < count; ++i) {
      moments.push_back(std::uniform_real_distribution<double>(0, 0.95 * long_seconds)(random_));
    }
    std::sort(moments.begin(), moments.end());
    ASSIGN_OR_RETURN(const std::shared_ptr<Sent> long_one, Send(engine, queue, long_tokens_));
    const absl::Time begin = MonotonicNow();
    for (const double moment : moments) {
      absl::SleepFor(begin + absl::Seconds(moment) - MonotonicNow());
      ASSIGN_OR_RETURN(const double seconds, Alone(engine, queue, short_tokens_));
      short_behind_.push_back(seconds);
    }
    return long_one->Seconds();
  }

  std::string Json() const {
    const nlohmann::ordered_json json = {
        {"long_tokens", long_tokens_},
        {"short_tokens", short_tokens_},
        {"count", short_behind_.size()},
        {"workers", workers_},
        {"short_alone_seconds", Percentile(short_alone_, 0.5)},
        {"short_behind_seconds",
         {{"median", Percentile(short_behind_, 0.5)}, {"p95", Percentile(short_behind_, kTailShare)}}},
        {"long_alone_seconds", long_alone_seconds_},
        {"long_mixed_seconds", long_mixed_seconds_},
        {"long_loss", long_loss_}};
    return absl::StrCat(json.dump(), "\n");
  }

  std::string Text() const {
    return absl::StrFormat(
        "%d tokens alone: %s\n"
        "%d tokens behind %d, at %d random moments: median %s, 95th percentile %s\n"
        "%d tokens alone: %s, with the short ones: %s, which is %.1f %% beyond their own time\n",
        short_tokens_, FormatSeconds(Percentile(short_alone_, 0.5)), short_tokens_, long_tokens_,
        short_behind_.size(), FormatSeconds(Percentile(short_behind_, 0.5)),
        FormatSeconds(Percentile(short_behind_, kTailShare)), long_tokens_,
        FormatSeconds(long_alone_seconds_), FormatSeconds(long_mixed_seconds_), 100 * long_loss_);
  }

  ConfigFlags config_;
  int64_t long_tokens_ = 65536;
  int64_t short_tokens_ = 100;
  int count_ = 50;
  int rounds_ = 3;
  int workers_ = 1;
  uint64_t seed_ = 1;
  bool json_ = false;
  std::mt19937_64 random_;
  Metrics metrics_;
  LastPrefill last_prefill_;
  int last_id_ = 0;
  std::vector<double> short_alone_, short_behind_;
  double long_alone_seconds_ = 0;
  double long_mixed_seconds_ = 0;
  double long_loss_ = 0;
};

}  // namespace

std::unique_ptr<Command> AddBenchMixCommand(CLI::App& parent) {
  return std::make_unique<BenchMixCommand>(parent);
}

}  // namespace meshfill
