#include "server/cli/simulation_report.h"

#include <utility>

#include "engine/sim/paper_fit.h"

namespace meshfill {
namespace {

absl::StatusOr<Comparison> Compare(const Scenario& scenario, const sim::AttentionJob& job,
                                   std::span<const sim::Pass> passes, int gpus) {
  auto results = sim::CompareStrategies(scenario.strategies, job, passes, gpus, scenario.cluster);
  if (!results.ok()) return results.status();
  return Comparison{.job = job, .gpus = gpus, .results = *std::move(results)};
}

absl::Status ReproducePaper(const Scenario& scenario, SimulationReport& report) {
  auto throughput = sim::ReproduceThroughput(scenario.throughput, scenario.cluster);
  if (!throughput.ok()) return throughput.status();
  report.throughput = *std::move(throughput);
  auto flat = sim::ReproduceThroughput(scenario.throughput, sim::Flat(scenario.cluster));
  if (!flat.ok()) return flat.status();
  report.flat_throughput = *std::move(flat);
  auto utilisation = sim::ReproduceUtilisation(scenario.throughput, scenario.mfu);
  if (!utilisation.ok()) return utilisation.status();
  report.utilisation = *utilisation;
  auto memory = sim::ReproduceMemory(scenario.memory, scenario.cluster);
  if (!memory.ok()) return memory.status();
  report.memory = *std::move(memory);
  return absl::OkStatus();
}

}  // namespace

const sim::StrategyResult* Comparison::Find(sim::StrategyKind kind) const {
  for (const sim::StrategyResult& result : results) {
    if (result.kind == kind && !result.passes.empty()) return &result;
  }
  return nullptr;
}

const sim::StrategyResult* Comparison::FastestRival() const {
  const sim::StrategyResult* fastest = nullptr;
  for (const sim::StrategyResult& result : results) {
    const bool own = result.kind == sim::StrategyKind::kPlanned ||
                     result.kind == sim::StrategyKind::kPlannedLanes ||
                     result.kind == sim::StrategyKind::kTwoWayRing;
    if (own || result.passes.empty()) continue;
    if (fastest == nullptr || result.seconds() < fastest->seconds()) fastest = &result;
  }
  return fastest;
}

absl::StatusOr<SimulationReport> RunScenario(const Scenario& scenario) {
  SimulationReport report{.cluster = scenario.cluster};
  if (scenario.report == Scenario::Report::kStrategies) {
    for (int gpus : scenario.gpus) {
      auto comparison = Compare(scenario, scenario.job, scenario.passes, gpus);
      if (!comparison.ok()) return comparison.status();
      report.comparisons.push_back(*std::move(comparison));
    }
    return report;
  }
  if (absl::Status status = ReproducePaper(scenario, report); !status.ok()) return status;
  constexpr sim::Pass kPasses[] = {sim::Pass::kForward, sim::Pass::kBackward};
  for (const sim::PaperCell& cell : scenario.throughput) {
    auto comparison = Compare(scenario, sim::PaperJob(cell), kPasses, cell.gpus);
    if (!comparison.ok()) return comparison.status();
    report.comparisons.push_back(*std::move(comparison));
  }
  return report;
}

}  // namespace meshfill
