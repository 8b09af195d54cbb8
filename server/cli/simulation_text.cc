#include <algorithm>
#include <cmath>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "server/cli/simulation_report.h"

namespace meshfill {
namespace {

using sim::StrategyKind;

std::string ClusterText(const sim::Cluster& cluster) {
  const auto link = [](const char* name, const Link& link) {
    return absl::StrFormat("  %-14s %.4g GB/s a flow, %.4g ms until it starts\n", name,
                           link.bytes_per_second / 1e9, link.latency_seconds * 1e3);
  };
  std::string text =
      absl::StrFormat("cluster of %d GPUs a node\n  %-14s %.4g TFLOP/s a GPU\n", cluster.gpus_per_node,
                      "attention", cluster.attention_flops_per_second / 1e12);
  absl::StrAppend(&text, link("same node", cluster.same_node), link("between nodes", cluster.between_nodes));
  if (!std::isinf(cluster.node_bytes_per_second)) {
    absl::StrAppendFormat(&text, "  %-14s %.4g GB/s each way, shared by its flows\n", "node",
                          cluster.node_bytes_per_second / 1e9);
  }
  return text;
}

std::string JobText(const sim::AttentionJob& job) {
  return absl::StrFormat("%d tokens, %d query heads and %d KV heads of %d, %s", job.tokens, job.q_heads,
                         job.kv_heads, job.head_dim, job.causal ? "causal" : "full");
}

std::string SettingsText(const sim::StrategyResult& result) {
  return absl::StrJoin(result.passes, "  |  ", [](std::string* out, const sim::PassResult& pass) {
    absl::StrAppend(out, pass.settings);
  });
}

// How many times as fast as the paper's mesh the planner's choice is.
std::string GainText(const Comparison& comparison) {
  const sim::StrategyResult* planned = comparison.Find(StrategyKind::kPlanned);
  const sim::StrategyResult* mesh = comparison.Find(StrategyKind::kPaperMesh);
  if (planned == nullptr || mesh == nullptr) return "-";
  return absl::StrFormat("%.2f", mesh->seconds() / planned->seconds());
}

// One line a comparison: seconds by strategy, and what the planner chose.
std::string ComparisonsText(const Scenario& scenario, const SimulationReport& report, bool name_cell) {
  std::string text = name_cell ? absl::StrFormat("%-6s %8s ", "mask", "tokens") : "";
  absl::StrAppendFormat(&text, "%5s", "gpus");
  for (StrategyKind kind : scenario.strategies) {
    absl::StrAppendFormat(&text, " %*s", std::max<int>(9, std::string_view(StrategyName(kind)).size()),
                          StrategyName(kind));
  }
  absl::StrAppend(&text, "   gain*  planned\n");
  for (const Comparison& comparison : report.comparisons) {
    if (name_cell) {
      absl::StrAppendFormat(&text, "%-6s %8d ", comparison.job.causal ? "causal" : "full",
                            comparison.job.tokens);
    }
    absl::StrAppendFormat(&text, "%5d", comparison.gpus);
    for (const sim::StrategyResult& result : comparison.results) {
      const int width = std::max<int>(9, std::string_view(StrategyName(result.kind)).size());
      absl::StrAppend(&text, result.passes.empty() ? absl::StrFormat(" %*s", width, "-")
                                                   : absl::StrFormat(" %*.4g", width, result.seconds()));
    }
    const sim::StrategyResult* planned = comparison.Find(StrategyKind::kPlanned);
    absl::StrAppendFormat(&text, "  %6s  %s\n", GainText(comparison),
                          planned == nullptr ? "-" : SettingsText(*planned));
  }
  return absl::StrCat(text, "* of planned over paper_mesh\n");
}

// How the planner's plans stand to the fastest rival, over all comparisons. Virtual time is in whole
// nanoseconds: a millionth is rounding.
std::string StandingText(const SimulationReport& report, StrategyKind planner, std::optional<size_t> pass,
                         const std::string& name) {
  int compared = 0;
  int behind = 0;
  double least = 0;
  double sum_of_logs = 0;
  for (const Comparison& comparison : report.comparisons) {
    const sim::StrategyResult* planned = comparison.Find(planner);
    const double fastest = comparison.FastestRivalSeconds(pass);
    if (planned == nullptr || std::isinf(fastest)) continue;
    const double ratio = fastest / (pass.has_value() ? planned->passes[*pass].seconds : planned->seconds());
    least = compared == 0 ? ratio : std::min(least, ratio);
    sum_of_logs += std::log(ratio);
    behind += ratio < 1 - 1e-6 ? 1 : 0;
    ++compared;
  }
  if (compared == 0) return "";
  const std::string slower =
      behind == 0 ? absl::StrFormat("never slower than the fastest rival, in %d sizes", compared)
                  : absl::StrFormat("slower than the fastest rival in %d of %d sizes, by %.2g %% at most",
                                    behind, compared, 100 * (1 / least - 1));
  return absl::StrFormat("%s: %s; the rival takes %.3f times as long in the geometric mean\n", name, slower,
                         std::exp(sum_of_logs / compared));
}

// The same of each pass by itself, where there are several.
std::string StandingsText(const SimulationReport& report, StrategyKind planner) {
  const std::string name = StrategyName(planner);
  std::string text = StandingText(report, planner, std::nullopt, name);
  if (report.comparisons.empty()) return text;
  const sim::StrategyResult* first = report.comparisons.front().Find(planner);
  if (first == nullptr || first->passes.size() < 2) return text;
  absl::StrAppend(&text, StandingText(report, planner, 0, absl::StrCat(name, ", forward alone")),
                  StandingText(report, planner, 1, absl::StrCat(name, ", backward alone")));
  return text;
}

std::string ThroughputText(const sim::ThroughputTable& table) {
  std::string text =
      absl::StrFormat("%-6s %8s %5s  %18s %6s  %18s %6s  %s\n", "mask", "tokens", "gpus", "ring measured/sim",
                      "error", "mesh measured/sim", "error", "mesh tiles forward / backward");
  for (const sim::ThroughputRow& row : table.rows) {
    absl::StrAppendFormat(&text, "%-6s %8d %5d  %9.2f %8.2f %+5.0f%%  %9.2f %8.2f %+5.0f%%  %s\n",
                          row.cell.causal ? "causal" : "full", row.cell.tokens, row.cell.gpus,
                          row.measured_ring_seconds(), row.ring_seconds, 100 * row.ring_error(),
                          row.measured_mesh_seconds(), row.mesh_seconds, 100 * row.mesh_error(),
                          row.mesh_tiles);
  }
  return text;
}

std::string ErrorsText(const char* name, const sim::ThroughputTable& table) {
  std::string text = absl::StrFormat("%s: ring %.1f %% rms, mesh %.1f %% on average\n", name,
                                     100 * table.ring_rms_error, 100 * table.mesh_mean_error);
  for (const sim::ErrorsByGpus& errors : table.by_gpus) {
    absl::StrAppendFormat(
        &text, "  %4d gpus  mesh %4.1f %% (%+5.1f %%), its gain over ring %.2f times the measured one\n",
        errors.gpus, 100 * errors.mesh_mean_error, 100 * errors.mesh_bias, errors.gain_ratio);
  }
  return text;
}

std::string MemoryText(const std::vector<sim::MemoryRow>& rows, const sim::ThroughputTable& throughput) {
  std::string text = absl::StrFormat("%-6s %8s %5s  %14s %6s  %14s %6s %-7s %8s  %-7s %6s  %s\n", "mask",
                                     "tokens", "gpus", "ring GiB", "factor", "mesh GiB", "factor", "tile",
                                     "executor", "nearest", "factor", "its seconds, measured/sim");
  int within = 0;
  double nearest_error = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    const sim::MemoryRow& row = rows[r];
    within += row.mesh_factor() <= 1.5 ? 1 : 0;
    absl::StrAppendFormat(&text,
                          "%-6s %8d %5d  %6.1f %7.2f %6.2f  %6.1f %7.2f %6.2f %-7s %8.2f  %-7s %6.2f  ",
                          row.cell.causal ? "causal" : "full", row.cell.tokens, row.cell.gpus, row.cell.ring,
                          row.ring_gib, row.ring_factor(), row.cell.mesh, row.mesh_gib, row.mesh_factor(),
                          row.mesh_tile, row.ours_gib, row.nearest_tile, row.nearest_factor());
    if (r < throughput.rows.size()) {
      const double measured = throughput.rows[r].measured_mesh_seconds();
      nearest_error += std::abs(row.nearest_seconds / measured - 1) / static_cast<double>(rows.size());
      absl::StrAppendFormat(&text, "%.2f %.2f", measured, row.nearest_seconds);
    }
    absl::StrAppend(&text, "\n");
  }
  absl::StrAppendFormat(
      &text,
      "mesh within a factor of 1.5 in %d of %d cells with the tile of the paper's rule. `nearest`: the tile "
      "whose memory is nearest; some tile\nalways is, and the seconds of these are %.1f %% off on average, "
      "those of the rule's tiles %.1f %%. `executor`: the rule's tile with\nchunks released at their last "
      "use and merged in place, as Meshfill does\n",
      within, rows.size(), 100 * nearest_error, 100 * throughput.mesh_mean_error);
  return text;
}

std::string PaperText(const Scenario& scenario, const SimulationReport& report) {
  std::string text = ClusterText(report.cluster);
  absl::StrAppend(&text, "\nTable 3: seconds of attention forward and backward\n",
                  ThroughputText(report.throughput));
  absl::StrAppend(
      &text, ErrorsText("shared node links", report.throughput),
      ErrorsText("flat, nothing shared", report.flat_throughput),
      "the flat cluster fits ring as well, and promises a gain that mesh had not: its flows share "
      "the nodes' links\n");
  absl::StrAppendFormat(
      &text,
      "\nTable 4: peak of %.1f TFLOP/s a GPU, or %.1f where MFU leaves out the repeated product of the "
      "backward pass, as is usual;\nMFU off by at most %.2f points beyond rounding\n",
      report.utilisation.peak_flops_per_second / 1e12,
      report.utilisation.usual_peak_flops_per_second() / 1e12, report.utilisation.largest_error);
  absl::StrAppend(&text, "\nTable 5: memory of attention forward, measured and simulated\n",
                  MemoryText(report.memory, report.throughput));
  absl::StrAppend(&text, "\nEvery strategy on this cluster: seconds of forward and backward\n",
                  ComparisonsText(scenario, report, /*name_cell=*/true));
  return text;
}

std::string SweepText(const std::vector<sim::SweepResult>& cells) {
  std::string text =
      absl::StrFormat("%-14s %7s %8s %5s %-8s  %10s %-24s  %10s %-15s %-26s %6s  %s\n", "cluster", "heads",
                      "tokens", "gpus", "pass", "planned ms", "plan", "rival ms", "fastest rival",
                      "its settings", "ratio*", "slower for want of");
  for (const sim::SweepResult& cell : cells) {
    absl::StrAppendFormat(&text, "%-14s %7s %8d %5d %-8s  %10.4g %-24s  %10.4g %-15s %-26s %6.3f  %s\n",
                          cell.cluster, absl::StrCat(cell.job.q_heads, "/", cell.job.kv_heads),
                          cell.job.tokens, cell.gpus, sim::PassName(cell.pass), cell.planned.seconds * 1e3,
                          cell.planned.settings, cell.rival.seconds * 1e3, StrategyName(cell.rival.kind),
                          cell.rival.settings, 1 / cell.slowdown(), sim::SlowerReasonName(cell.reason));
  }
  const sim::SweepSummary summary = sim::SummaryOf(cells);
  absl::StrAppendFormat(&text,
                        "* of the fastest rival over planned\nplanned: slower than the fastest rival by more "
                        "than %.1f %% in %d of %d cells",
                        100 * sim::SweepResult::kTie, summary.slower, summary.cells);
  if (summary.slower > 0) absl::StrAppendFormat(&text, ", %.3f times as long at most", summary.most);
  absl::StrAppendFormat(&text, "; the fastest rival takes %.3f times as long in the geometric mean",
                        summary.over_rivals);
  if (summary.over_head_rings.has_value()) {
    absl::StrAppendFormat(&text, ", the better of USP and LoongTrain %.3f times", *summary.over_head_rings);
  }
  for (const auto& [reason, count] : summary.reasons) {
    absl::StrAppendFormat(&text, "\n  %4d for want of: %s", count, sim::SlowerReasonName(reason));
  }
  return absl::StrCat(text, "\n");
}

}  // namespace

std::string SimulationText(const Scenario& scenario, const SimulationReport& report) {
  if (scenario.report == Scenario::Report::kSweep) return SweepText(report.sweep);
  std::string text;
  if (scenario.report == Scenario::Report::kMeshAttentionPaper) {
    text = PaperText(scenario, report);
  } else {
    text = absl::StrCat(ClusterText(report.cluster), "\n", JobText(scenario.job), ", ",
                        absl::StrJoin(scenario.passes, " and ",
                                      [](std::string* out, sim::Pass pass) { *out += sim::PassName(pass); }),
                        ": seconds\n", ComparisonsText(scenario, report, /*name_cell=*/false));
  }
  absl::StrAppend(&text, StandingsText(report, StrategyKind::kPlanned),
                  StandingsText(report, StrategyKind::kPlannedLanes));
  return text;
}

}  // namespace meshfill
