#include "server/cli/bench/bench_weights.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "engine/embedded_engine.h"
#include "kernels/median.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"
#include "nlohmann/json.hpp"
#include "server/cli/bench/cold_files.h"
#include "server/cli/commands/flags.h"
#include "server/cli/progress_bar.h"
#include "server/cli/result_text.h"
#include "server/config/config.h"
#include "server/pool/pool_engine.h"
#include "server/pool/worker/worker_process.h"

namespace meshfill {
namespace {

constexpr int64_t kWarmUpTokens = 64;
constexpr absl::Duration kJoinTimeout = absl::Seconds(60);
// Timeouts of the pool: workers compute on the same cores as the front-end, and may be late.
constexpr int kPatienceSeconds = 120;

// Memory of this process that no file stands behind; 0 where the system does not say.
int64_t AnonymousBytes() {
  std::ifstream status("/proc/self/status");
  for (std::string key, rest; status >> key;) {
    int64_t kib = 0;
    if (key == "RssAnon:" && status >> kib) return kib * 1024;
    std::getline(status, rest);
  }
  return 0;
}

// The most of it while the object lives.
class AnonymousPeak {
 public:
  AnonymousPeak() : thread_([this] { Watch(); }) {}
  ~AnonymousPeak() { Stop(); }
  int64_t Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    return most_;
  }

 private:
  void Watch() {
    do {  // looks once, however short the run
      most_ = std::max(most_, AnonymousBytes());
      absl::SleepFor(absl::Milliseconds(5));
    } while (!stop_);
  }

  std::atomic<bool> stop_{false};
  int64_t most_ = 0;    // the thread's, until it has ended
  std::thread thread_;  // last: it uses all of the above
};

// Figures of one way to hold the weights, over all rounds.
struct Measured {
  std::vector<double> seconds;
  double weight_seconds = 0;  // the last plan's figure
  int64_t weight_bytes = 0;
  int64_t anonymous_bytes = 0;  // the most
};

// What the disk takes for all weights.
struct MeasuredDisk {
  int64_t bytes = 0;
  std::vector<double> seconds;
};

// A pool of workers that are in this process, each with one rank.
class LocalPool {
 public:
  static absl::StatusOr<std::unique_ptr<LocalPool>> Start(v1::Config config, int workers, WeightMode mode) {
    v1::PoolSection& pool = *config.mutable_pool();
    pool.set_control_listen("127.0.0.1:0");
    pool.mutable_silence_timeout()->set_seconds(kPatienceSeconds);
    pool.mutable_hang_timeout()->set_seconds(kPatienceSeconds);
    config.mutable_kv()->set_cache(false);
    config.mutable_model()->set_weights(mode == WeightMode::kSharded ? v1::ModelSection::WEIGHTS_SHARDED
                                                                     : v1::ModelSection::WEIGHTS_RESIDENT);
    std::unique_ptr<LocalPool> local(new LocalPool);
    ASSIGN_OR_RETURN(local->engine_, PoolEngine::Listen(config, local->metrics_));
    const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    for (int worker = 0; worker < workers; ++worker) {
      v1::PoolSection::Worker& section = *pool.mutable_worker();
      section.set_name(absl::StrCat("worker ", worker));
      section.set_ranks(1);
      section.set_threads(static_cast<uint32_t>(std::max(1, cores / workers)));
      ASSIGN_OR_RETURN(auto started, WorkerProcess::Start(config, local->engine_->control_address()));
      local->workers_.push_back(std::move(started));
    }
    local->clock_ = std::thread([pool = local.get()] { pool->Tick(); });
    const absl::Time deadline = MonotonicNow() + kJoinTimeout;
    while (std::ssize(local->engine_->members()) < workers) {
      if (MonotonicNow() >= deadline) {
        return absl::DeadlineExceededError(absl::StrCat(local->engine_->members().size(), " of ", workers,
                                                        " workers joined within ",
                                                        absl::FormatDuration(kJoinTimeout)));
      }
      absl::SleepFor(WorkerProcess::kTick);
    }
    return local;
  }
  ~LocalPool() {
    stop_ = true;
    if (clock_.joinable()) clock_.join();
    workers_.clear();
  }

  PrefillEngine& engine() { return *engine_; }

 private:
  LocalPool() = default;
  void Tick() {
    while (!stop_) {
      for (const auto& worker : workers_) worker->Tick();
      absl::SleepFor(WorkerProcess::kTick);
    }
  }

  Metrics metrics_;
  std::unique_ptr<PoolEngine> engine_;
  std::vector<std::unique_ptr<WorkerProcess>> workers_;
  std::atomic<bool> stop_{false};
  std::thread clock_;  // last: it uses all of the above
};

class BenchWeightsCommand : public Command {
 public:
  explicit BenchWeightsCommand(CLI::App& parent)
      : Command(parent.add_subcommand(
            "weights", "Weights that stream, or that workers or GPUs share, beside the same that stay")) {
    config_.AddTo(*app_)->required();
    AddCount(*app_, "--tokens", tokens_, "Tokens of a prompt");
    AddCount(*app_, "--rounds", rounds_, "Prompts of each");
    app_->add_option("--workers", workers_,
                     "Compare sharded with resident instead, in a pool of so many workers in this process")
        ->type_name("N")
        ->check(CLI::Range(2, kMaxHostRanks));
    app_->add_flag("--shared", shared_, "Compare sharded with resident instead, on the GPUs of this process")
        ->excludes("--workers");
    app_->add_flag("--cold", cold_,
                   "Stream from files that are not in the page cache, and compare with what takes longer: to "
                   "compute, or to read the files from the disk")
        ->excludes("--workers")
        ->excludes("--shared");
    app_->add_option("--seed", seed_, "Of the tokens")->capture_default_str();
    AddJsonFlag(*app_, json_);
  }

  // In turn, so that what else the machine does meets both alike; one model at a time is in memory.
  absl::Status Run() override {
    ASSIGN_OR_RETURN(const v1::Config config, config_.Load());
    RETURN_IF_ERROR(config_.CheckModelPath(config));
    if (workers_ > 0 || shared_) modes_[1] = WeightMode::kSharded;
    for (int round = 0; round < rounds_; ++round) {
      for (size_t turn = 0; turn < modes_.size(); ++turn) {
        const size_t mode = (turn + static_cast<size_t>(round)) % modes_.size();
        RETURN_IF_ERROR(Measure(config, modes_[mode], measured_[mode]));
      }
    }
    std::fputs(json_ ? Json().c_str() : Text().c_str(), stdout);
    return absl::OkStatus();
  }

 private:
  absl::Status Measure(const v1::Config& config, WeightMode mode, Measured& measured) {
    AnonymousPeak peak;
    if (workers_ > 0) {
      ASSIGN_OR_RETURN(const std::unique_ptr<LocalPool> pool, LocalPool::Start(config, workers_, mode));
      RETURN_IF_ERROR(WarmUp(pool->engine()));
      return Measure(pool->engine(), peak, measured);
    }
    EngineOptions options = ToEngineOptions(config);
    options.weights = mode;
    ASSIGN_OR_RETURN(const std::unique_ptr<PrefillEngine> engine, LoadEmbeddedEngine(options));
    RETURN_IF_ERROR(WarmUp(*engine));
    if (cold_ && mode == WeightMode::kStreamed) RETURN_IF_ERROR(MakeCold(options.model_path));
    return Measure(*engine, peak, measured);
  }

  // Also measures the disk.
  absl::Status MakeCold(const std::string& model_path) {
    ASSIGN_OR_RETURN(const ColdFiles files, ColdFiles::Of(model_path));
    ASSIGN_OR_RETURN(const double seconds, files.Read());
    disk_.bytes = files.bytes();
    disk_.seconds.push_back(seconds);
    return files.Drop();
  }

  absl::Status WarmUp(PrefillEngine& engine) const {
    RETURN_IF_ERROR(engine.MakePlan(tokens_, {}).status());  // before the prompt is
    return RunPrefill(engine, {Prompt(engine, std::min(tokens_, kWarmUpTokens)), {}}).status();
  }

  absl::Status Measure(PrefillEngine& engine, AnonymousPeak& peak, Measured& measured) const {
    ASSIGN_OR_RETURN(const PrefillResult result, RunPrefill(engine, {Prompt(engine, tokens_), {}}));
    measured.seconds.push_back(result.prefill_seconds);
    measured.weight_seconds = result.plan.predicted.weight_seconds;
    measured.weight_bytes = result.plan.predicted.weight_bytes;
    measured.anonymous_bytes = std::max(measured.anonymous_bytes, peak.Stop());
    return absl::OkStatus();
  }

  std::vector<uint32_t> Prompt(PrefillEngine& engine, int64_t tokens) const {
    std::mt19937_64 random(seed_);
    std::vector<uint32_t> prompt(static_cast<size_t>(tokens));
    for (uint32_t& id : prompt) id = static_cast<uint32_t>(random() % engine.model().vocab);
    return prompt;
  }

  double Ratio() const { return Median(measured_[0].seconds) / Median(measured_[1].seconds); }
  // Over the longer of computing and reading: nothing that streams from this disk takes less.
  double OverLeast() const {
    return Median(measured_[1].seconds) / std::max(Median(measured_[0].seconds), Median(disk_.seconds));
  }

  std::string Json() const {
    nlohmann::ordered_json json = {{"tokens", tokens_}, {"rounds", rounds_}};
    if (workers_ > 0) json["workers"] = workers_;
    for (size_t mode = 0; mode < modes_.size(); ++mode) {
      const Measured& of = measured_[mode];
      json[WeightModeName(modes_[mode])] = {
          {"seconds", Median(of.seconds)},
          {"tokens_per_second", static_cast<double>(tokens_) / Median(of.seconds)},
          {"weight_seconds", of.weight_seconds},
          {"weight_bytes", of.weight_bytes},
          {"anonymous_bytes", of.anonymous_bytes}};
    }
    json[absl::StrCat(WeightModeName(modes_[1]), "_over_resident")] = Ratio();
    if (cold_) {
      json["disk"] = {{"bytes", disk_.bytes}, {"seconds", Median(disk_.seconds)}};
      json["cold_over_least"] = OverLeast();
    }
    return absl::StrCat(json.dump(), "\n");
  }

  std::string Text() const {
    std::string text = absl::StrFormat("%d tokens, median of %d\n", tokens_, rounds_);
    for (size_t mode = 0; mode < modes_.size(); ++mode) {
      const Measured& of = measured_[mode];
      absl::StrAppendFormat(&text, "%-9s  %s  %.1f tokens/s  weights %s  most anonymous memory %s\n",
                            WeightModeName(modes_[mode]), FormatSeconds(Median(of.seconds)),
                            static_cast<double>(tokens_) / Median(of.seconds),
                            FormatBytes(static_cast<double>(of.weight_bytes)),
                            FormatBytes(static_cast<double>(of.anonymous_bytes)));
    }
    absl::StrAppendFormat(&text, "%s over resident, tokens/s: %.3f\n", WeightModeName(modes_[1]), Ratio());
    if (cold_) {
      absl::StrAppendFormat(
          &text, "disk       %s for %s\nstreamed from the disk over the longer of both, seconds: %.3f\n",
          FormatSeconds(Median(disk_.seconds)), FormatBytes(static_cast<double>(disk_.bytes)), OverLeast());
    }
    return text;
  }

  ConfigFlags config_;
  int64_t tokens_ = 16384;
  int rounds_ = 3;
  uint64_t seed_ = 1;
  bool json_ = false;
  int workers_ = 0;  // 0: an embedded pool
  bool cold_ = false;
  bool shared_ = false;
  std::array<WeightMode, 2> modes_ = {WeightMode::kResident, WeightMode::kStreamed};
  std::array<Measured, 2> measured_;  // by mode
  MeasuredDisk disk_;
};

}  // namespace

std::unique_ptr<Command> AddBenchWeightsCommand(CLI::App& parent) {
  return std::make_unique<BenchWeightsCommand>(parent);
}

}  // namespace meshfill
