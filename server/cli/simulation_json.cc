#include <cmath>
#include <utility>

#include "nlohmann/json.hpp"
#include "server/cli/simulation_report.h"

namespace meshfill {
namespace {

using Json = nlohmann::ordered_json;

Json LinkJson(const Link& link) {
  return {{"latency_seconds", link.latency_seconds}, {"flow_bytes_per_second", link.bytes_per_second}};
}

Json ClusterJson(const sim::Cluster& cluster) {
  const bool shared = !std::isinf(cluster.node_bytes_per_second);
  return {{"gpus_per_node", cluster.gpus_per_node},
          {"same_node", LinkJson(cluster.same_node)},
          {"between_nodes", LinkJson(cluster.between_nodes)},
          {"node_bytes_per_second", shared ? Json(cluster.node_bytes_per_second) : Json(nullptr)},
          {"attention_flops_per_second", cluster.attention_flops_per_second}};
}

Json PassJson(const sim::PassResult& pass) {
  Json waits = Json::object();
  Json bytes = Json::object();
  for (Traffic traffic : kAllTraffics) {
    waits[OperationName(traffic)] = pass.wait_seconds[traffic];
    bytes[OperationName(traffic)] = pass.sent_bytes[traffic];
  }
  return {{"settings", pass.settings},
          {"seconds", pass.seconds},
          {"compute_seconds", pass.compute_seconds},
          {"wait_seconds", std::move(waits)},
          {"sent_bytes", std::move(bytes)},
          {"peak_bytes", pass.peak_bytes}};
}

Json ComparisonJson(const Comparison& comparison) {
  Json strategies = Json::object();
  for (const sim::StrategyResult& result : comparison.results) {
    if (result.passes.empty()) continue;
    Json passes = Json::array();
    for (const sim::PassResult& pass : result.passes) passes.push_back(PassJson(pass));
    strategies[sim::StrategyName(result.kind)] = {{"seconds", result.seconds()},
                                                  {"passes", std::move(passes)}};
  }
  return {{"tokens", comparison.job.tokens},
          {"causal", comparison.job.causal},
          {"gpus", comparison.gpus},
          {"strategies", std::move(strategies)}};
}

Json CellJson(const sim::PaperCell& cell) {
  return {{"tokens", cell.tokens}, {"causal", cell.causal}, {"gpus", cell.gpus}};
}

Json ThroughputJson(const sim::ThroughputTable& table) {
  Json cells = Json::array();
  for (const sim::ThroughputRow& row : table.rows) {
    Json cell = CellJson(row.cell);
    cell["ring"] = {{"measured_seconds", row.measured_ring_seconds()}, {"seconds", row.ring_seconds}};
    cell["mesh"] = {{"measured_seconds", row.measured_mesh_seconds()},
                    {"seconds", row.mesh_seconds},
                    {"tiles", row.mesh_tiles}};
    cells.push_back(std::move(cell));
  }
  Json by_gpus = Json::array();
  for (const sim::ErrorsByGpus& errors : table.by_gpus) {
    by_gpus.push_back({{"gpus", errors.gpus},
                       {"mesh_mean_error", errors.mesh_mean_error},
                       {"mesh_bias", errors.mesh_bias},
                       {"gain_ratio", errors.gain_ratio}});
  }
  return {{"ring_rms_error", table.ring_rms_error},
          {"mesh_mean_error", table.mesh_mean_error},
          {"gain_ratio_at_most_gpus", table.by_gpus.back().gain_ratio},
          {"by_gpus", std::move(by_gpus)},
          {"cells", std::move(cells)}};
}

Json MemoryJson(const std::vector<sim::MemoryRow>& rows) {
  Json cells = Json::array();
  for (const sim::MemoryRow& row : rows) {
    Json cell = CellJson(row.cell);
    cell["ring"] = {{"measured_gib", row.cell.ring}, {"gib", row.ring_gib}};
    cell["mesh"] = {{"measured_gib", row.cell.mesh},
                    {"gib", row.mesh_gib},
                    {"tile", row.mesh_tile},
                    {"executor_gib", row.ours_gib}};
    cell["nearest"] = {
        {"tile", row.nearest_tile}, {"gib", row.nearest_gib}, {"seconds", row.nearest_seconds}};
    cells.push_back(std::move(cell));
  }
  return cells;
}

Json RunJson(const sim::SweepResult::Run& run) {
  return {{"strategy", sim::StrategyName(run.kind)}, {"settings", run.settings}, {"seconds", run.seconds}};
}

Json SweepJson(const Scenario& scenario, const std::vector<sim::SweepResult>& results) {
  Json clusters = Json::object();
  for (const sim::SweepCluster& cluster : scenario.sweep.clusters) {
    clusters[cluster.name] = ClusterJson(cluster.cluster);
  }
  Json cells = Json::array();
  for (const sim::SweepResult& cell : results) {
    cells.push_back({{"cluster", cell.cluster},
                     {"tokens", cell.job.tokens},
                     {"q_heads", cell.job.q_heads},
                     {"kv_heads", cell.job.kv_heads},
                     {"gpus", cell.gpus},
                     {"pass", sim::PassName(cell.pass)},
                     {"planned", RunJson(cell.planned)},
                     {"rival", RunJson(cell.rival)},
                     {"slower_for_want_of", sim::SlowerReasonName(cell.reason)}});
  }
  const sim::SweepSummary summary = sim::SummaryOf(results);
  Json reasons = Json::object();
  for (const auto& [reason, count] : summary.reasons) reasons[sim::SlowerReasonName(reason)] = count;
  const bool has_head_rings = summary.over_head_rings.has_value();
  return {{"clusters", std::move(clusters)},
          {"cells", std::move(cells)},
          {"slower", summary.slower},
          {"most", summary.most},
          {"over_rivals", summary.over_rivals},
          {"over_head_rings", has_head_rings ? Json(*summary.over_head_rings) : Json(nullptr)},
          {"reasons", std::move(reasons)}};
}

}  // namespace

std::string SimulationJson(const Scenario& scenario, const SimulationReport& report) {
  if (scenario.report == Scenario::Report::kSweep) {
    return Json{{"sweep", SweepJson(scenario, report.sweep)}}.dump();
  }
  Json json = {{"cluster", ClusterJson(report.cluster)}};
  if (scenario.report == Scenario::Report::kMeshAttentionPaper) {
    json["throughput"] = ThroughputJson(report.throughput);
    json["flat_throughput"] = ThroughputJson(report.flat_throughput);
    json["mfu"] = {{"peak_flops_per_second", report.utilisation.peak_flops_per_second},
                   {"usual_peak_flops_per_second", report.utilisation.usual_peak_flops_per_second()},
                   {"largest_error_points", report.utilisation.largest_error}};
    json["memory"] = MemoryJson(report.memory);
  }
  Json comparisons = Json::array();
  for (const Comparison& comparison : report.comparisons) comparisons.push_back(ComparisonJson(comparison));
  json["comparisons"] = std::move(comparisons);
  return json.dump();
}

}  // namespace meshfill
