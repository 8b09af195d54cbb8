#include "server/cli/bench/bench_prefill.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/embedded_engine.h"
#include "engine/prefill_engine.h"
#include "kernels/median.h"
#include "kernels/return_if_error.h"
#include "nlohmann/json.hpp"
#include "server/cli/commands/flags.h"
#include "server/cli/progress_bar.h"
#include "server/cli/result_text.h"

namespace meshfill {
namespace {

constexpr int64_t kWarmUpTokens = 2048;

// A pool under one plan, and what its runs took.
struct Contender {
  std::unique_ptr<PrefillEngine> engine;
  PrefillOptions options;
  std::vector<PrefillResult> runs;  // without their logits
  double idle_share = 0;            // with --idle
};

template <typename T>
double Median(const std::vector<T>& values, double (*of)(const T&)) {
  std::vector<double> numbers;
  for (const T& value : values) numbers.push_back(of(value));
  return meshfill::Median(std::move(numbers));
}

double Seconds(const PrefillResult& run) { return run.prefill_seconds; }
double CommWaitShare(const PrefillResult& run) {
  return run.attention_seconds > 0 ? run.comm_wait_seconds / run.attention_seconds : 0;
}
double Mfu(const PrefillResult& run) { return run.mfu; }
double Itself(const double& value) { return value; }

// Peak resident memory of this process so far.
int64_t PeakResidentBytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

std::vector<uint32_t> RandomTokens(int64_t count, int64_t vocab, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint32_t> tokens(static_cast<size_t>(count));
  for (uint32_t& token : tokens) token = static_cast<uint32_t>(random() % static_cast<uint64_t>(vocab));
  return tokens;
}

class BenchPrefillCommand : public Command {
 public:
  explicit BenchPrefillCommand(CLI::App& parent)
      : Command(parent.add_subcommand(
            "prefill", "Prefill random tokens, under one plan or under two in turns on the same cores")) {
    app_->add_option("--model", engine_.model_path, "Model folder")->type_name("DIR")->required();
    app_->add_option("--tokens", tokens_, "Tokens in the prompt")
        ->type_name("N")
        ->check(WholeNumber(1))
        ->required();
    AddRanksOption(*app_, ranks_)
        ->description(
            absl::StrCat("Ranks, 1 to ", kMaxHostRanks, " (default: heads*A*B of --heads and --tile)"));
    AddTileOption(*app_, tile_);
    AddHeadsOption(*app_, heads_);
    AddParsedOption(*app_, "--compare", compare_, ParseTile, "AxB",
                    "Run this tile, on A*B ranks, in turns with the other; 1x1 is one rank alone");
    AddLayoutOption(*app_, layout_);
    AddStripeOption(*app_, stripe_);
    AddDTypeOption(*app_, engine_.dtype);
    AddDeviceOption(*app_, engine_.device);
    app_->add_option("--threads", engine_.threads, "CPU threads of the pool (default: one per core)")
        ->check(WholeNumber(1));
    app_->add_option("--repeats", repeats_, "Runs of each plan; medians are reported")
        ->check(WholeNumber(1))
        ->capture_default_str();
    app_->add_option("--seed", seed_, "Of the random tokens")->capture_default_str();
    app_->add_flag("--idle", idle_,
                   "One more run of each plan: in what share of its layers' time a device had nothing to do");
    AddJsonFlag(*app_, json_);
  }

  absl::Status Run() override {
    const int ranks = ranks_.value_or(heads_.value_or(1) * tile_.value_or(Tile()).ranks());
    RETURN_IF_ERROR(AddContender(ranks, tile_, heads_));
    if (compare_.has_value()) {
      RETURN_IF_ERROR(AddContender(compare_->ranks(), compare_, 1));
    }
    RETURN_IF_ERROR(RunInTurns());
    RETURN_IF_ERROR(idle_ ? MeasureIdle() : absl::OkStatus());
    std::fputs(json_ ? Json().c_str() : Text().c_str(), stdout);
    return absl::OkStatus();
  }

 private:
  absl::Status AddContender(int ranks, std::optional<Tile> tile, std::optional<int> heads) {
    EngineOptions options = engine_;
    options.ranks = ranks;
    if (layout_.has_value()) options.layout = layout_;
    options.stripe = stripe_.value_or(options.stripe);
    ASSIGN_OR_RETURN(std::unique_ptr<PrefillEngine> engine, LoadEmbeddedEngine(options));
    Contender contender{.engine = std::move(engine), .options = {}, .runs = {}};
    contender.options.tile = tile;
    contender.options.heads = heads;
    RETURN_IF_ERROR(contender.engine->MakePlan(tokens_, contender.options).status());  // before the prompt is
    contenders_.push_back(std::move(contender));
    return absl::OkStatus();
  }

  std::vector<uint32_t> Prompt() const {
    return RandomTokens(tokens_, contenders_.front().engine->model().vocab, seed_);
  }

  absl::Status MeasureIdle() {
    const std::vector<uint32_t> tokens = Prompt();
    for (Contender& contender : contenders_) {
      PrefillOptions options = contender.options;
      options.keep_timeline = true;
      ASSIGN_OR_RETURN(PrefillResult run, RunPrefill(*contender.engine, {tokens, options}));
      contender.idle_share = run.timeline->idle_share();
    }
    return absl::OkStatus();
  }

  absl::Status RunInTurns() {
    const std::vector<uint32_t> tokens = Prompt();
    for (Contender& contender : contenders_) {
      ASSIGN_OR_RETURN(PlanChoice choice, contender.engine->MakePlan(tokens_, contender.options));
      // Whole slices: a GPU picks the algorithms of a shape when it first meets it.
      const int64_t warm_up =
          std::max(kWarmUpTokens, choice.plan.slice_tokens * int64_t{choice.plan.ranks()});
      ASSIGN_OR_RETURN(
          PrefillResult run,
          RunPrefill(*contender.engine,
                     {std::span(tokens).first(std::min<size_t>(tokens.size(), warm_up)), contender.options}));
    }
    for (int repeat = 0; repeat < repeats_; ++repeat) {
      for (Contender& contender : contenders_) {
        ASSIGN_OR_RETURN(PrefillResult run, RunPrefill(*contender.engine, {tokens, contender.options}));
        run.logits = {};
        contender.runs.push_back(std::move(run));
      }
    }
    return absl::OkStatus();
  }

  double TokensPerSecond(const Contender& contender) const {
    return static_cast<double>(tokens_) / Median(contender.runs, Seconds);
  }

  // Tokens/s of the first plan over the second's, turn by turn: what drifts in the machine hits both.
  double MedianRatio() const {
    std::vector<double> ratios;
    for (int repeat = 0; repeat < repeats_; ++repeat) {
      ratios.push_back(Seconds(contenders_[1].runs[repeat]) / Seconds(contenders_[0].runs[repeat]));
    }
    return Median(ratios, Itself);
  }

  std::string Json() const {
    nlohmann::ordered_json runs = nlohmann::ordered_json::array();
    for (const Contender& contender : contenders_) {
      const Plan& plan = contender.runs.front().plan;
      runs.push_back({{"ranks", plan.ranks()},
                      {"heads", plan.heads},
                      {"a", plan.tile.a},
                      {"b", plan.tile.b},
                      {"seconds", Median(contender.runs, Seconds)},
                      {"tokens_per_second", TokensPerSecond(contender)},
                      {"comm_wait_share", Median(contender.runs, CommWaitShare)},
                      {"mfu", Median(contender.runs, Mfu)}});
      if (idle_) runs.back()["idle_share"] = contender.idle_share;
    }
    nlohmann::ordered_json json = {{"tokens", tokens_},
                                   {"repeats", repeats_},
                                   {"backend", contenders_.front().engine->backend_name()},
                                   {"runs", std::move(runs)}};
    if (contenders_.size() > 1) json["tokens_per_second_ratio"] = MedianRatio();
    json["peak_resident_bytes"] = PeakResidentBytes();
    return absl::StrCat(json.dump(), "\n");
  }

  std::string Text() const {
    std::string text =
        absl::StrFormat("%s tokens, %d run%s each, %s\n\n%-6s %5s %5s  %10s  %10s  %10s  %6s\n",
                        FormatCount(static_cast<double>(tokens_)), repeats_, repeats_ == 1 ? "" : "s",
                        contenders_.front().engine->backend_name(), "tile", "heads", "ranks", "seconds",
                        "tokens/s", "comm wait", "MFU");
    for (const Contender& contender : contenders_) {
      const Plan& plan = contender.runs.front().plan;
      absl::StrAppendFormat(&text, "%-6s %5d %5d  %10s  %10s  %8.1f %%  %4.1f %%\n", plan.tile.DebugString(),
                            plan.heads, plan.ranks(), FormatSeconds(Median(contender.runs, Seconds)),
                            FormatCount(TokensPerSecond(contender)),
                            100 * Median(contender.runs, CommWaitShare), 100 * Median(contender.runs, Mfu));
    }
    for (const Contender& contender : contenders_) {
      if (idle_)
        absl::StrAppendFormat(&text, "\n%s: nothing to do for %.1f %% of the layers' time\n",
                              contender.runs.front().plan.tile.DebugString(), 100 * contender.idle_share);
    }
    if (contenders_.size() > 1)
      absl::StrAppendFormat(&text, "\nfirst over second: %.3f of its tokens/s\n", MedianRatio());
    absl::StrAppend(&text, "\npeak resident memory: ", FormatBytes(static_cast<double>(PeakResidentBytes())),
                    "\n");
    return text;
  }

  EngineOptions engine_;
  int64_t tokens_ = 0;
  std::optional<int> ranks_;
  std::optional<Tile> tile_;
  std::optional<int> heads_;
  std::optional<Tile> compare_;
  std::optional<LayoutKind> layout_;
  std::optional<int64_t> stripe_;
  int repeats_ = 3;
  uint64_t seed_ = 1;
  bool idle_ = false;
  bool json_ = false;
  std::vector<Contender> contenders_;
};

}  // namespace

std::unique_ptr<Command> AddBenchPrefillCommand(CLI::App& parent) {
  return std::make_unique<BenchPrefillCommand>(parent);
}

}  // namespace meshfill
