#include "server/cli/bench/bench.h"

#include <vector>

#include "server/cli/bench/bench_attention.h"
#include "server/cli/bench/bench_comm.h"
#include "server/cli/bench/bench_experts.h"
#include "server/cli/bench/bench_gemm.h"
#include "server/cli/bench/bench_kv.h"
#include "server/cli/bench/bench_layer.h"
#include "server/cli/bench/bench_mix.h"
#include "server/cli/bench/bench_pieces.h"
#include "server/cli/bench/bench_plan.h"
#include "server/cli/bench/bench_prefill.h"
#include "server/cli/bench/bench_prefix.h"
#include "server/cli/bench/bench_schedules.h"
#include "server/cli/bench/bench_serve.h"
#include "server/cli/bench/bench_weights.h"

namespace meshfill {
namespace {

class BenchCommand : public Command {
 public:
  explicit BenchCommand(CLI::App& parent)
      : Command(parent.add_subcommand("bench", "Measure speed, as ratios taken in one run")) {
    app_->require_subcommand(1);
    benches_.push_back(AddBenchAttentionCommand(*app_));
    benches_.push_back(AddBenchCommCommand(*app_));
    benches_.push_back(AddBenchExpertsCommand(*app_));
    benches_.push_back(AddBenchGemmCommand(*app_));
    benches_.push_back(AddBenchKvCommand(*app_));
    benches_.push_back(AddBenchLayerCommand(*app_));
    benches_.push_back(AddBenchMixCommand(*app_));
    benches_.push_back(AddBenchPiecesCommand(*app_));
    benches_.push_back(AddBenchPlanCommand(*app_));
    benches_.push_back(AddBenchPrefixCommand(*app_));
    benches_.push_back(AddBenchPrefillCommand(*app_));
    benches_.push_back(AddBenchSchedulesCommand(*app_));
    benches_.push_back(AddBenchServeCommand(*app_));
    benches_.push_back(AddBenchWeightsCommand(*app_));
  }

  absl::Status Run() override {
    for (const std::unique_ptr<Command>& bench : benches_) {
      if (bench->app().parsed()) return bench->Run();
    }
    return absl::InvalidArgumentError("no benchmark named");
  }

 private:
  std::vector<std::unique_ptr<Command>> benches_;
};

}  // namespace

std::unique_ptr<Command> AddBenchCommand(CLI::App& parent) { return std::make_unique<BenchCommand>(parent); }

}  // namespace meshfill
