#include "server/cli/bench/bench_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/embedded_engine.h"
#include "engine/plan/planner.h"
#include "engine/prefill_engine.h"
#include "engine/speed/pool_speed.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/median.h"
#include "kernels/return_if_error.h"
#include "nlohmann/json.hpp"
#include "server/cli/bench/bench_models.h"
#include "server/cli/commands/flags.h"
#include "server/cli/progress_bar.h"

namespace meshfill {
namespace {

constexpr double kPredictionTolerance = 0.15;  // predicted within this of measured
constexpr double kChoiceTolerance = 0.03;      // the chosen plan within this of the best
constexpr size_t kFinalists = 3;               // plans that are measured again, beside the chosen

// One of the random prefills.
struct Shape {
  std::string model;
  int64_t tokens = 0;
  int ranks = 1;
  LayoutKind layout = LayoutKind::kStriped;
  int64_t stripe = 64;
  bool planners_choice = true;
  int heads = 1;
  Tile tile;
  double predicted_seconds = 0;  // medians of the repeats
  double measured_seconds = 0;
  double ratio = 0;  // predicted over measured
};

// All plans of one of them, in turns.
struct Choice {
  size_t shape = 0;
  size_t plans = 0;
  std::string chosen;
  std::string best;
  double excess = 0;  // chosen over best, −1; 0 where it is the best
  double spread = 0;  // worst over best, −1
};

class BenchPlanCommand : public Command {
 public:
  explicit BenchPlanCommand(CLI::App& parent)
      : Command(parent.add_subcommand(
            "plan",
            "Random prefills: predicted against measured seconds, the chosen plan against all others")) {
    app_->add_option("--model", model_, "Model folder (default: small models of random weights)")
        ->type_name("DIR");
    AddCount("--shapes", shapes_wanted_, "Random prefills");
    AddCount("--choices", choices_wanted_, "How many of them run under all plans");
    AddCount("--repeats", repeats_, "Runs of each plan; medians count");
    AddCount("--threads", threads_, "CPU threads of the pool (default: one per core)");
    app_->add_option("--max-seconds", max_seconds_,
                     "Prompts are halved until one run is predicted below this")
        ->check(PositiveNumber())
        ->capture_default_str();
    app_->add_option("--seed", seed_, "Of the random prefills")->capture_default_str();
    AddJsonFlag(*app_, json_);
  }

  absl::Status Run() override {
    if (threads_ == 0) threads_ = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    BenchModels models;
    if (model_.empty()) {
      RETURN_IF_ERROR(models.Make());
    }
    const std::vector<std::string> folders =
        model_.empty() ? models.folders() : std::vector<std::string>{model_};
    std::mt19937_64 random(seed_);
    for (int i = 0; i < shapes_wanted_; ++i) {
      RETURN_IF_ERROR(RunShape(folders[random() % folders.size()], random));
    }
    std::fputs(json_ ? Json().c_str() : Summary().c_str(), stdout);
    return absl::OkStatus();
  }

 private:
  void AddCount(const std::string& name, int& value, const std::string& help) {
    CLI::Option* option = app_->add_option(name, value, help)->check(WholeNumber(1))->type_name("N");
    if (value != 0) option->capture_default_str();
  }

  absl::Status RunShape(const std::string& folder, std::mt19937_64& random) {
    Shape shape = {.model = folder.substr(folder.find_last_of('/') + 1),
                   .tokens = static_cast<int64_t>(std::exp2(std::uniform_real_distribution<>(9, 14)(random))),
                   .ranks = static_cast<int>(1 + random() % 8),
                   .layout = static_cast<LayoutKind>(random() % 3),
                   .stripe = int64_t{16} << random() % 4,
                   .planners_choice = random() % 2 == 0};
    ASSIGN_OR_RETURN(std::unique_ptr<PrefillEngine> engine,
                     LoadEmbeddedEngine({.model_path = folder,
                                         .ranks = shape.ranks,
                                         .layout = shape.layout,
                                         .stripe = shape.stripe,
                                         .peak_flops = 1,  // nobody asks for MFU
                                         .threads = threads_}));
    ASSIGN_OR_RETURN(PlanChoice plans, PlanOf(*engine, shape));
    const PlanCandidate& candidate =
        plans.candidates[shape.planners_choice ? 0 : random() % plans.candidates.size()];
    shape.heads = candidate.heads;
    shape.tile = candidate.tile;
    RETURN_IF_ERROR(ComparePrediction(*engine, shape));
    shapes_.push_back(shape);
    if (!json_) std::fputs(Line(shape).c_str(), stdout);
    if (std::ssize(choices_) >= choices_wanted_ || plans.candidates.size() < 2) return absl::OkStatus();
    return CompareChoice(*engine, plans);
  }

  // The plan of the prompt, shortened until it runs in --max-seconds.
  absl::StatusOr<PlanChoice> PlanOf(const PrefillEngine& engine, Shape& shape) const {
    shape.tokens = std::min(shape.tokens, engine.model().context_tokens);
    absl::StatusOr<PlanChoice> plans = engine.MakePlan(shape.tokens, {});
    while (plans.ok() && shape.tokens > 1 && plans->plan.predicted.seconds > max_seconds_) {
      shape.tokens /= 2;
      plans = engine.MakePlan(shape.tokens, {});
    }
    return plans;
  }

  // The pool's speed is measured before and after each run: what else the machine does then, and it changes
  // from second to second, is in both. The prediction is the mean of those under the two. Measuring takes the
  // caches from the model, which a pool at work does not do: each run that counts comes after one that does
  // not.
  absl::Status ComparePrediction(PrefillEngine& engine, Shape& shape) {
    ASSIGN_OR_RETURN(double before, Predicted(engine, shape));
    std::vector<double> predicted, measured, ratios;
    for (int repeat = 0; repeat < repeats_; ++repeat) {
      RETURN_IF_ERROR(Measured(engine, shape.tokens, shape.heads, shape.tile).status());
      ASSIGN_OR_RETURN(const double seconds, Measured(engine, shape.tokens, shape.heads, shape.tile));
      ASSIGN_OR_RETURN(double after, Predicted(engine, shape));
      predicted.push_back((before + after) / 2);
      measured.push_back(seconds);
      ratios.push_back(predicted.back() / measured.back());
      before = after;
    }
    shape.predicted_seconds = Median(predicted);
    shape.measured_seconds = Median(measured);
    shape.ratio = Median(ratios);
    return absl::OkStatus();
  }

  absl::StatusOr<double> Predicted(const PrefillEngine& engine, const Shape& shape) const {
    const std::unique_ptr<Device> device = MakeCpuDevice(engine.model().dtype, threads_, shape.ranks);
    ASSIGN_OR_RETURN(PoolSpeed speed,
                     MeasurePoolSpeed(engine.model(), *device, std::min(threads_, shape.ranks), shape.ranks));
    ASSIGN_OR_RETURN(PlanChoice plan, MakePlan(engine.model(), speed,
                                               {.tokens = shape.tokens,
                                                .ranks = shape.ranks,
                                                .layout = shape.layout,
                                                .stripe = shape.stripe,
                                                .tile = shape.tile,
                                                .heads = shape.heads}));
    return plan.plan.predicted.seconds;
  }

  static absl::StatusOr<double> Measured(PrefillEngine& engine, int64_t count, int heads, Tile tile) {
    std::vector<uint32_t> tokens(static_cast<size_t>(count));
    for (size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = static_cast<uint32_t>(i * 2654435761 % static_cast<uint64_t>(engine.model().vocab));
    }
    PrefillOptions options;
    options.heads = heads;
    options.tile = tile;
    ASSIGN_OR_RETURN(PrefillResult run, RunPrefill(engine, {tokens, options}));
    return run.prefill_seconds;
  }

  // Seconds of each plan over those of the first. Every plan once in each turn, and compared turn by turn:
  // what drifts in the machine hits all.
  absl::StatusOr<std::vector<double>> RelativeSeconds(PrefillEngine& engine, int64_t tokens,
                                                      const std::vector<PlanCandidate>& plans) const {
    std::vector<std::vector<double>> relative(plans.size());  // by turn
    for (int repeat = 0; repeat < repeats_; ++repeat) {
      std::vector<double> turn;
      for (const PlanCandidate& plan : plans) {
        ASSIGN_OR_RETURN(double seconds, Measured(engine, tokens, plan.heads, plan.tile));
        turn.push_back(seconds);
      }
      for (size_t i = 0; i < turn.size(); ++i) relative[i].push_back(turn[i] / turn[0]);
    }
    std::vector<double> medians;
    for (const std::vector<double>& turns : relative) medians.push_back(Median(turns));
    return medians;
  }

  // The least of many medians is less than that plan takes: which is best is judged by turns of their own of
  // the chosen plan and the fastest others.
  absl::Status CompareChoice(PrefillEngine& engine, const PlanChoice& plans) {
    const int64_t tokens = plans.plan.layout.tokens();
    ASSIGN_OR_RETURN(const std::vector<double> all, RelativeSeconds(engine, tokens, plans.candidates));
    std::vector<size_t> others(all.size() - 1);
    std::iota(others.begin(), others.end(), 1);
    std::sort(others.begin(), others.end(), [&](size_t x, size_t y) { return all[x] < all[y]; });
    others.resize(std::min(others.size(), kFinalists));
    std::vector<PlanCandidate> finalists = {plans.candidates.front()};
    for (const size_t other : others) finalists.push_back(plans.candidates[other]);
    ASSIGN_OR_RETURN(const std::vector<double> fresh, RelativeSeconds(engine, tokens, finalists));
    const auto best = std::min_element(fresh.begin(), fresh.end());
    const auto worst = std::max_element(all.begin(), all.end());
    const PlanCandidate& fastest = finalists[best - fresh.begin()];
    choices_.push_back({.shape = shapes_.size() - 1,
                        .plans = all.size(),
                        .chosen = Name(plans.plan.heads, plans.plan.tile),
                        .best = Name(fastest.heads, fastest.tile),
                        .excess = 1 / *best - 1,
                        .spread = *worst / *best - 1});
    return absl::OkStatus();
  }

  static std::string Name(int heads, Tile tile) { return absl::StrCat(heads, "·", tile.DebugString()); }

  size_t GoodPredictions() const {
    return std::count_if(shapes_.begin(), shapes_.end(), [](const Shape& shape) {
      return std::abs(shape.ratio - 1) <= kPredictionTolerance;
    });
  }
  size_t GoodChoices() const {
    return std::count_if(choices_.begin(), choices_.end(),
                         [](const Choice& choice) { return choice.excess <= kChoiceTolerance; });
  }
  double Quantile(double share) const {
    std::vector<double> ratios;
    for (const Shape& shape : shapes_) ratios.push_back(shape.ratio);
    std::sort(ratios.begin(), ratios.end());
    return ratios[static_cast<size_t>(std::ceil(share * static_cast<double>(ratios.size() - 1)))];
  }

  static std::string Line(const Shape& shape) {
    return absl::StrFormat(
        "%-20s %6d tokens  %d ranks  %-10s %4d  %-6s %s  predicted %9s  measured %9s  %5.2f\n", shape.model,
        shape.tokens, shape.ranks, LayoutName(shape.layout), shape.stripe, Name(shape.heads, shape.tile),
        shape.planners_choice ? "chosen" : "random", FormatSeconds(shape.predicted_seconds),
        FormatSeconds(shape.measured_seconds), shape.ratio);
  }

  std::string Summary() const {
    std::string text = absl::StrFormat(
        "\npredicted over measured: %.2f to %.2f, median %.2f; within %.0f %%: %d of %d\n", Quantile(0),
        Quantile(1), Quantile(0.5), 100 * kPredictionTolerance, GoodPredictions(), shapes_.size());
    for (const Choice& choice : choices_) {
      const Shape& shape = shapes_[choice.shape];
      absl::StrAppendFormat(
          &text,
          "%-20s %6d tokens  %d ranks  %-10s  of %2d plans chose %-6s best %-6s  +%.1f %% (worst +%.0f %%)\n",
          shape.model, shape.tokens, shape.ranks, LayoutName(shape.layout), choice.plans, choice.chosen,
          choice.best, 100 * choice.excess, 100 * choice.spread);
    }
    absl::StrAppendFormat(&text, "the chosen plan within %.0f %% of the best measured: %d of %d\n",
                          100 * kChoiceTolerance, GoodChoices(), choices_.size());
    return text;
  }

  std::string Json() const {
    nlohmann::ordered_json shapes = nlohmann::ordered_json::array();
    for (const Shape& shape : shapes_) {
      shapes.push_back({{"model", shape.model},
                        {"tokens", shape.tokens},
                        {"ranks", shape.ranks},
                        {"layout", LayoutName(shape.layout)},
                        {"stripe", shape.stripe},
                        {"heads", shape.heads},
                        {"a", shape.tile.a},
                        {"b", shape.tile.b},
                        {"planners_choice", shape.planners_choice},
                        {"predicted_seconds", shape.predicted_seconds},
                        {"measured_seconds", shape.measured_seconds},
                        {"ratio", shape.ratio}});
    }
    nlohmann::ordered_json choices = nlohmann::ordered_json::array();
    for (const Choice& choice : choices_) {
      choices.push_back({{"shape", choice.shape},
                         {"plans", choice.plans},
                         {"chosen", choice.chosen},
                         {"best", choice.best},
                         {"excess", choice.excess},
                         {"spread", choice.spread}});
    }
    const nlohmann::ordered_json json = {
        {"seed", seed_},
        {"repeats", repeats_},
        {"threads", threads_},
        {"ratio", {{"min", Quantile(0)}, {"median", Quantile(0.5)}, {"max", Quantile(1)}}},
        {"within_15_percent", GoodPredictions()},
        {"choices_within_3_percent", GoodChoices()},
        {"shapes", std::move(shapes)},
        {"choices", std::move(choices)}};
    return absl::StrCat(json.dump(), "\n");
  }

  std::string model_;
  int shapes_wanted_ = 20;
  int choices_wanted_ = 6;
  int repeats_ = 5;
  int threads_ = 0;
  double max_seconds_ = 1;
  uint64_t seed_ = 1;
  bool json_ = false;
  std::vector<Shape> shapes_;
  std::vector<Choice> choices_;
};

}  // namespace

std::unique_ptr<Command> AddBenchPlanCommand(CLI::App& parent) {
  return std::make_unique<BenchPlanCommand>(parent);
}

}  // namespace meshfill
