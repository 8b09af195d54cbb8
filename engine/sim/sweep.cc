#include "engine/sim/sweep.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"

namespace meshfill::sim {
namespace {

SweepResult::Run RunOf(StrategyKind kind, PassResult result) {
  return {.kind = kind, .settings = std::move(result.settings), .seconds = result.seconds};
}

// What explains that the rival is faster, where two messages at once do not.
SlowerReason MovementOf(StrategyKind rival) {
  switch (rival) {
    case StrategyKind::kBurst:
    case StrategyKind::kLoongTrain:
      return SlowerReason::kDoubleRing;
    case StrategyKind::kTasp:
      return SlowerReason::kParallelRings;
    default:
      return SlowerReason::kCollectives;
  }
}

absl::StatusOr<SlowerReason> ReasonOf(const SweepResult& cell, const Cluster& cluster) {
  if (!cell.slower()) return SlowerReason::kNone;
  if (IsRunnable(cell.rival.kind)) return SlowerReason::kEstimate;
  ASSIGN_OR_RETURN(const std::optional<PassResult> lanes,
                   RunStrategy(StrategyKind::kPlannedLanes, cell.job, cell.pass, cell.gpus, cluster));
  const bool enough = lanes.has_value() && lanes->seconds <= cell.rival.seconds * (1 + SweepResult::kTie);
  if (!enough) return MovementOf(cell.rival.kind);
  // Forward, plans may have as many messages.
  return cell.pass == Pass::kForward ? SlowerReason::kEstimate : SlowerReason::kOneMessage;
}

// nullopt: no rival applies, or the planner does not.
absl::StatusOr<std::optional<SweepResult>> RunCell(SweepResult cell, const Cluster& cluster,
                                                   std::span<const StrategyKind> kinds) {
  const auto run = [&](StrategyKind kind) {
    return RunStrategy(kind, cell.job, cell.pass, cell.gpus, cluster);
  };
  ASSIGN_OR_RETURN(std::optional<PassResult> planned, run(StrategyKind::kPlanned));
  if (!planned.has_value()) return std::nullopt;
  cell.planned = RunOf(StrategyKind::kPlanned, *std::move(planned));
  bool has_rival = false;
  for (const StrategyKind kind : kinds) {
    if (!IsRival(kind)) continue;
    ASSIGN_OR_RETURN(std::optional<PassResult> result, run(kind));
    if (!result.has_value()) continue;
    const double seconds = result->seconds;
    if (kind == StrategyKind::kUsp || kind == StrategyKind::kLoongTrain) {
      cell.head_rings = std::min(cell.head_rings.value_or(seconds), seconds);
    }
    if (!has_rival || seconds < cell.rival.seconds) cell.rival = RunOf(kind, *std::move(result));
    has_rival = true;
  }
  if (!has_rival) return std::nullopt;
  ASSIGN_OR_RETURN(cell.reason, ReasonOf(cell, cluster));
  return cell;
}

}  // namespace

const char* SlowerReasonName(SlowerReason reason) {
  switch (reason) {
    case SlowerReason::kNone:
      return "";
    case SlowerReason::kEstimate:
      return "estimate";
    case SlowerReason::kOneMessage:
      return "one message";
    case SlowerReason::kDoubleRing:
      return "double ring";
    case SlowerReason::kParallelRings:
      return "parallel rings";
    case SlowerReason::kCollectives:
      return "collectives";
  }
  return "?";
}

SweepSummary SummaryOf(std::span<const SweepResult> results) {
  SweepSummary summary{.cells = static_cast<int>(results.size())};
  double rivals = 0, head_rings = 0;  // sums of logarithms
  int with_head_rings = 0;
  std::map<SlowerReason, int> reasons;
  for (const SweepResult& cell : results) {
    summary.most = std::max(summary.most, cell.slowdown());
    rivals -= std::log(cell.slowdown());
    if (cell.head_rings.has_value()) {
      head_rings += std::log(*cell.head_rings / cell.planned.seconds);
      ++with_head_rings;
    }
    if (!cell.slower()) continue;
    ++summary.slower;
    ++reasons[cell.reason];
  }
  if (!results.empty()) summary.over_rivals = std::exp(rivals / static_cast<double>(results.size()));
  if (with_head_rings > 0) summary.over_head_rings = std::exp(head_rings / with_head_rings);
  summary.reasons.assign(reasons.begin(), reasons.end());
  std::stable_sort(summary.reasons.begin(), summary.reasons.end(),
                   [](const auto& x, const auto& y) { return x.second > y.second; });
  return summary;
}

absl::StatusOr<std::vector<SweepResult>> RunSweep(const Sweep& sweep, std::span<const StrategyKind> kinds) {
  std::vector<SweepResult> results;
  for (const SweepCluster& cluster : sweep.clusters) {
    for (const AttentionJob& job : sweep.jobs) {
      for (const Pass pass : sweep.passes) {
        for (const int gpus : sweep.gpus) {
          ASSIGN_OR_RETURN(std::optional<SweepResult> cell,
                           RunCell({.cluster = cluster.name, .job = job, .pass = pass, .gpus = gpus},
                                   cluster.cluster, kinds));
          if (cell.has_value()) results.push_back(*std::move(cell));
        }
      }
    }
  }
  return results;
}

}  // namespace meshfill::sim
