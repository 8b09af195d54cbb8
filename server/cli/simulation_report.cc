#include "server/cli/simulation_report.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "engine/sim/paper_fit.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

absl::StatusOr<Comparison> Compare(const Scenario& scenario, const sim::AttentionJob& job,
                                   std::span<const sim::Pass> passes, int gpus) {
  ASSIGN_OR_RETURN(auto results,
                   sim::CompareStrategies(scenario.strategies, job, passes, gpus, scenario.cluster));
  return Comparison{.job = job, .gpus = gpus, .results = std::move(results)};
}

absl::Status ReproducePaper(const Scenario& scenario, SimulationReport& report) {
  ASSIGN_OR_RETURN(auto throughput, sim::ReproduceThroughput(scenario.throughput, scenario.cluster));
  report.throughput = std::move(throughput);
  ASSIGN_OR_RETURN(auto flat, sim::ReproduceThroughput(scenario.throughput, sim::Flat(scenario.cluster)));
  report.flat_throughput = std::move(flat);
  ASSIGN_OR_RETURN(auto utilisation, sim::ReproduceUtilisation(scenario.throughput, scenario.mfu));
  report.utilisation = utilisation;
  ASSIGN_OR_RETURN(auto memory, sim::ReproduceMemory(scenario.memory, scenario.cluster));
  report.memory = std::move(memory);
  return absl::OkStatus();
}

}  // namespace

const sim::StrategyResult* Comparison::Find(sim::StrategyKind kind) const {
  for (const sim::StrategyResult& result : results) {
    if (result.kind == kind && !result.passes.empty()) return &result;
  }
  return nullptr;
}

double Comparison::FastestRivalSeconds(std::optional<size_t> pass) const {
  double fastest = std::numeric_limits<double>::infinity();
  for (const sim::StrategyResult& result : results) {
    if (!sim::IsRival(result.kind) || result.passes.empty()) continue;
    fastest = std::min(fastest, pass.has_value() ? result.passes[*pass].seconds : result.seconds());
  }
  return fastest;
}

absl::StatusOr<SimulationReport> RunScenario(const Scenario& scenario) {
  SimulationReport report{.cluster = scenario.cluster};
  if (scenario.report == Scenario::Report::kStrategies) {
    for (int gpus : scenario.gpus) {
      ASSIGN_OR_RETURN(auto comparison, Compare(scenario, scenario.job, scenario.passes, gpus));
      report.comparisons.push_back(std::move(comparison));
    }
    return report;
  }
  if (scenario.report == Scenario::Report::kSweep) {
    ASSIGN_OR_RETURN(report.sweep, sim::RunSweep(scenario.sweep, scenario.strategies));
    return report;
  }
  RETURN_IF_ERROR(ReproducePaper(scenario, report));
  constexpr sim::Pass kPasses[] = {sim::Pass::kForward, sim::Pass::kBackward};
  for (const sim::PaperCell& cell : scenario.throughput) {
    ASSIGN_OR_RETURN(auto comparison, Compare(scenario, sim::PaperJob(cell), kPasses, cell.gpus));
    report.comparisons.push_back(std::move(comparison));
  }
  return report;
}

}  // namespace meshfill
