#include "server/cli/bench/bench_pieces.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/embedded_engine.h"
#include "kernels/median.h"
#include "kernels/return_if_error.h"
#include "nlohmann/json.hpp"
#include "server/cli/commands/flags.h"
#include "server/config/config.h"

namespace meshfill {
namespace {

// Relative to the largest logit.
double WorstDifference(const std::vector<float>& left, const std::vector<float>& right) {
  double largest = 0, worst = 0;
  for (size_t i = 0; i < left.size(); ++i) {
    largest = std::max(largest, std::abs(double{left[i]}));
    worst = std::max(worst, std::abs(double{left[i]} - right[i]));
  }
  return worst / largest;
}

class BenchPiecesCommand : public Command {
 public:
  explicit BenchPiecesCommand(CLI::App& parent)
      : Command(parent.add_subcommand(
            "pieces", "A prompt in pieces, in a part of the memory, beside the same prompt whole")) {
    config_.AddTo(*app_)->required();
    AddCount(*app_, "--tokens", tokens_, "Tokens of the prompt");
    AddCount(*app_, "--part", part_,
             "Memory for activations, K and V: one part of so many that the whole prompt takes");
    AddCount(*app_, "--rounds", rounds_, "Rounds; medians are printed");
    AddJsonFlag(*app_, json_);
  }

  // In turn, so that what else the machine does meets both alike.
  absl::Status Run() override {
    ASSIGN_OR_RETURN(const v1::Config config, config_.Load());
    EngineOptions options = ToEngineOptions(config);
    options.kv_cache = false;
    ASSIGN_OR_RETURN(const std::unique_ptr<PrefillEngine> whole, LoadEmbeddedEngine(options));
    const ModelShape& model = whole->model();
    ASSIGN_OR_RETURN(const PlanChoice whole_plan, whole->MakePlan(tokens_, {}));
    if (!whole_plan.pieces.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("a prompt of ", tokens_,
                       " tokens does not fit the memory whole; lower --tokens, or raise memory_bytes"));
    }
    const int64_t whole_bytes = whole_plan.plan.predicted.run_bytes;
    const int64_t kept_bytes = model.layers * model.kv_bytes(tokens_);
    if (whole_bytes / part_ <= kept_bytes) {
      return absl::InvalidArgumentError(absl::StrCat("K and V of ", tokens_, " tokens, which stay, take ",
                                                     kept_bytes, " bytes, and a part of ", part_, " is ",
                                                     whole_bytes / part_, "; lower --part"));
    }
    options.memory_budget_bytes = whole_bytes / part_ - kept_bytes;
    options.kv_memory_bytes = options.kv_host_memory_bytes = kept_bytes;
    ASSIGN_OR_RETURN(const std::unique_ptr<PrefillEngine> pieces, LoadEmbeddedEngine(options));

    std::vector<uint32_t> prompt(static_cast<size_t>(tokens_));
    std::mt19937_64 random(1);
    for (uint32_t& token : prompt)
      token = static_cast<uint32_t>(random() % static_cast<uint64_t>(model.vocab));
    std::vector<double> whole_seconds, pieces_seconds;
    std::optional<PrefillResult> one, other;
    for (int round = 0; round < rounds_; ++round) {
      ASSIGN_OR_RETURN(one, RunPrefill(*whole, {prompt, {}}));
      whole_seconds.push_back(one->prefill_seconds);
      ASSIGN_OR_RETURN(other, RunPrefill(*pieces, {prompt, {}}));
      pieces_seconds.push_back(other->prefill_seconds);
    }
    Print(*one, *other, whole_bytes, kept_bytes, Median(whole_seconds), Median(pieces_seconds));
    return absl::OkStatus();
  }

 private:
  void Print(const PrefillResult& whole, const PrefillResult& pieces, int64_t whole_bytes, int64_t kept_bytes,
             double whole_seconds, double pieces_seconds) const {
    const int64_t piece_bytes = pieces.plan.predicted.run_bytes;
    const double worst = WorstDifference(whole.logits, pieces.logits);
    if (json_) {
      absl::PrintF("%s\n", nlohmann::ordered_json({{"tokens", tokens_},
                                                   {"pieces", pieces.pieces},
                                                   {"piece_tokens", pieces.piece_tokens},
                                                   {"whole_bytes", whole_bytes},
                                                   {"piece_bytes", piece_bytes},
                                                   {"kept_bytes", kept_bytes},
                                                   {"whole_seconds", whole_seconds},
                                                   {"pieces_seconds", pieces_seconds},
                                                   {"seconds_of_whole", pieces_seconds / whole_seconds},
                                                   {"worst_logit", worst}})
                               .dump());
      return;
    }
    constexpr double kMiB = 1 << 20;
    absl::PrintF("whole      %9.3f s  %9.1f MiB of activations\n", whole_seconds, whole_bytes / kMiB);
    absl::PrintF("%2d pieces  %9.3f s  %9.1f MiB, and %.1f MiB of K and V that stay\n", pieces.pieces,
                 pieces_seconds, piece_bytes / kMiB, kept_bytes / kMiB);
    absl::PrintF("of whole   %9.3f    %9.3f, with K and V %.3f\n", pieces_seconds / whole_seconds,
                 static_cast<double>(piece_bytes) / static_cast<double>(whole_bytes),
                 static_cast<double>(piece_bytes + kept_bytes) / static_cast<double>(whole_bytes));
    absl::PrintF("logits differ by %.1e of the largest\n", worst);
  }

  ConfigFlags config_;
  int64_t tokens_ = 32768;
  int64_t part_ = 4;
  int rounds_ = 3;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> AddBenchPiecesCommand(CLI::App& parent) {
  return std::make_unique<BenchPiecesCommand>(parent);
}

}  // namespace meshfill
