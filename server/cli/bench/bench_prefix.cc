#include "server/cli/bench/bench_prefix.h"

#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/embedded_engine.h"
#include "engine/kv/block_hash.h"
#include "kernels/median.h"
#include "kernels/return_if_error.h"
#include "nlohmann/json.hpp"
#include "server/cli/commands/flags.h"
#include "server/config/config.h"

namespace meshfill {
namespace {

class BenchPrefixCommand : public Command {
 public:
  explicit BenchPrefixCommand(CLI::App& parent)
      : Command(parent.add_subcommand(
            "prefix", "Prefills that compute all, with and without the cache, and behind a cached prefix")) {
    config_.AddTo(*app_)->required();
    AddCount(*app_, "--tokens", tokens_, "Tokens of a prompt");
    AddCount(*app_, "--cached", cached_,
             "Of these, tokens that an earlier prompt has in common (0: all but 1024)");
    AddCount(*app_, "--rounds", rounds_, "Rounds; medians are printed");
    AddJsonFlag(*app_, json_);
  }

  // In turn, so that what else the machine does meets all alike.
  absl::Status Run() override {
    ASSIGN_OR_RETURN(const v1::Config config, config_.Load());
    if (cached_ == 0) cached_ = tokens_ - 1024;
    if (cached_ < 1 || cached_ >= tokens_) {
      return absl::InvalidArgumentError(absl::StrCat("--cached ", cached_, " of --tokens ", tokens_,
                                                     ": leave at least one token to compute"));
    }
    block_tokens_ = static_cast<int>(config.kv().block_tokens());
    ASSIGN_OR_RETURN(const std::unique_ptr<PrefillEngine> engine,
                     LoadEmbeddedEngine(ToEngineOptions(config)));
    RETURN_IF_ERROR(engine->MakePlan(tokens_, {}).status());  // before the prompts are
    for (int round = 0; round < rounds_; ++round) {
      const std::vector<uint32_t> prompt = RandomTokens(tokens_, engine->model().vocab);
      std::vector<uint32_t> alike = RandomTokens(tokens_, engine->model().vocab);
      std::copy_n(prompt.begin(), cached_, alike.begin());
      for (const bool with_cache : {round % 2 == 0, round % 2 != 0}) {
        RETURN_IF_ERROR(Measure(*engine, prompt, with_cache, with_cache ? miss_ : cold_));
      }
      RETURN_IF_ERROR(Measure(*engine, alike, true, hit_));
    }
    const double cold = Median(cold_), miss = Median(miss_), hit = Median(hit_);
    if (json_) {
      absl::PrintF("%s\n", nlohmann::ordered_json({{"tokens", tokens_},
                                                   {"cached_tokens", last_cached_},
                                                   {"cold_seconds", cold},
                                                   {"miss_seconds", miss},
                                                   {"hit_seconds", hit},
                                                   {"miss_of_cold", miss / cold},
                                                   {"hit_of_cold", hit / cold}})
                               .dump());
      return absl::OkStatus();
    }
    absl::PrintF("cold, no cache  %8.3f s\n", cold);
    absl::PrintF("miss, kept      %8.3f s  %5.3f of cold\n", miss, miss / cold);
    absl::PrintF("hit, %d of %d  %8.3f s  %5.3f of cold\n", last_cached_, tokens_, hit, hit / cold);
    return absl::OkStatus();
  }

 private:
  std::vector<uint32_t> RandomTokens(int64_t count, int64_t vocab) {
    std::vector<uint32_t> tokens(count);
    for (uint32_t& token : tokens) token = static_cast<uint32_t>(random_() % vocab);
    return tokens;
  }

  absl::Status Measure(PrefillEngine& engine, const std::vector<uint32_t>& prompt, bool with_cache,
                       std::vector<double>& seconds) {
    PrefillOptions options;
    if (with_cache) {
      BlockHasher hasher(block_tokens_, "");
      hasher.Append(prompt);
      options.block_names = std::make_shared<const KvBlockNames>(
          KvBlockNames{.tenant = "",
                       .block_tokens = block_tokens_,
                       .hashes = hasher.hashes(),
                       .long_rope = engine.model().HasLongRope(std::ssize(prompt))});
    }
    ASSIGN_OR_RETURN(const PrefillResult result, RunPrefill(engine, {prompt, options}));
    seconds.push_back(result.prefill_seconds);
    last_cached_ = result.cached_tokens;
    return absl::OkStatus();
  }

  ConfigFlags config_;
  int64_t tokens_ = 32768;
  int64_t cached_ = 0;
  int rounds_ = 5;
  bool json_ = false;

  std::mt19937_64 random_{1};
  int block_tokens_ = 16;
  int64_t last_cached_ = 0;
  std::vector<double> cold_, miss_, hit_;
};

}  // namespace

std::unique_ptr<Command> AddBenchPrefixCommand(CLI::App& parent) {
  return std::make_unique<BenchPrefixCommand>(parent);
}

}  // namespace meshfill
