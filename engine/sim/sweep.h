// The planner's plan beside the fastest rival in many cells: clusters × jobs × numbers of GPUs × passes, each
// pass by itself. Where the plan is slower, the cell says why.
#ifndef MESHFILL_ENGINE_SIM_SWEEP_H_
#define MESHFILL_ENGINE_SIM_SWEEP_H_

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/sim/attention_job.h"
#include "engine/sim/cluster.h"
#include "engine/sim/strategies.h"

namespace meshfill::sim {

struct SweepCluster {
  std::string name;
  Cluster cluster;
};

struct Sweep {
  std::vector<SweepCluster> clusters;
  std::vector<AttentionJob> jobs;
  std::vector<int> gpus;
  std::vector<Pass> passes;
};

// What a rival has that the plan lacks.
enum class SlowerReason {
  kNone,           // the plan is not slower
  kEstimate,       // a plan that Meshfill runs, and the planner predicted to be slower
  kOneMessage,     // a second message, in a backward pass: one along Q and one along KV at once
  kDoubleRing,     // a double ring of another window than the planner tries
  kParallelRings,  // several flows of a ring
  kCollectives,    // gathers
};
const char* SlowerReasonName(SlowerReason reason);  // "", "estimate", "one message", …

struct SweepResult {
  struct Run {
    StrategyKind kind = StrategyKind::kPlanned;
    std::string settings;
    double seconds = 0;
  };

  std::string cluster;
  AttentionJob job;
  Pass pass = Pass::kForward;
  int gpus = 0;
  Run planned;
  Run rival;                         // the fastest
  std::optional<double> head_rings;  // seconds of the better of USP and LoongTrain, if they are rivals
  SlowerReason reason = SlowerReason::kNone;

  double slowdown() const { return planned.seconds / rival.seconds; }  // above 1: the rival is faster
  // Whether the rival is faster by more than kTie: ranks in or out of step change one plan's seconds by that
  // much.
  bool slower() const { return slowdown() > 1 + kTie; }
  static constexpr double kTie = 0.005;
};

struct SweepSummary {
  int cells = 0;
  int slower = 0;
  double most = 0;                        // largest slowdown
  double over_rivals = 1;                 // geometric mean of rival / planned
  std::optional<double> over_head_rings;  // geometric mean of the better of USP and LoongTrain / planned
  std::vector<std::pair<SlowerReason, int>> reasons;  // why cells are slower, most frequent first
};
SweepSummary SummaryOf(std::span<const SweepResult> results);

// `kinds`: those of them that are rivals (IsRival) are. Cells in which none of them applies are left out.
absl::StatusOr<std::vector<SweepResult>> RunSweep(const Sweep& sweep, std::span<const StrategyKind> kinds);

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_SWEEP_H_
