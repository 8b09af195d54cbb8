// Every strategy on one cluster, each with the best of its own settings and placements.
#ifndef MESHFILL_ENGINE_SIM_STRATEGIES_H_
#define MESHFILL_ENGINE_SIM_STRATEGIES_H_

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/mesh/placement.h"
#include "engine/sim/attention_job.h"
#include "engine/sim/cluster.h"
#include "engine/sim/rank_program.h"
#include "engine/sim/simulator.h"

namespace meshfill::sim {

enum class StrategyKind {
  kRing,            // a = 1, row-first
  kPassQ,           // b = 1, row-first
  kPaperMesh,       // the paper's own rule (placed_mesh.h)
  kUlysses,         // h = n
  kUsp,             // h × ring, any h and placement; backward, dKV beside KV where that is faster
  kBurst,           // double ring; queries move in the backward pass
  kLoongTrain,      // h × double ring, any h, window and placement
  kStarTrail,       // any h, team and placement
  kTwoWayRing,      // KV both ways round, forward only
  kAllGather,       // all KV gathered first, forward only
  kAttention2d,     // any h, tile and placement, forward only
  kTasp,            // h × parallel rings, any h and number of rings, forward only
  kTensorParallel,  // TP × CP, any TP from 2 on; CP gathers KV or passes it round, forward only
  kPlanned,         // h × mesh, any h, tile and placement: forward, what Meshfill's planner chooses
  kPlannedLanes,    // the same with two communications at once (mesh_lanes.h), or a two-way ring
};
inline constexpr int kStrategyKinds = 15;

std::span<const StrategyKind, kStrategyKinds> AllStrategies();
const char* StrategyName(StrategyKind kind);  // "ring", "usp", "planned", …
absl::StatusOr<StrategyKind> ParseStrategy(
    std::string_view name);          // INVALID_ARGUMENT with the names there are
bool IsRunnable(StrategyKind kind);  // a plan of the executor, so that the planner may choose it
// Published by others: neither Meshfill's plan, nor what that may become with more messages at once.
bool IsRival(StrategyKind kind);

// One pass of a strategy.
struct PassResult {
  std::string settings;  // "4·8x8, box 2x4x1"
  double seconds = 0;
  double compute_seconds = 0;       // mean of the ranks
  PerTraffic<double> wait_seconds;  // mean of the ranks
  PerTraffic<int64_t> sent_bytes;   // by one rank
  int64_t peak_bytes = 0;
  RankProgram program;  // what was simulated, so that it can be again, with a timeline
  Placement placement;
};

// The best settings by lockstep estimate are simulated, `shortlist` of them, and the fastest is returned. The
// planner's forward plan is one setting.
// nullopt where the strategy does not apply: more head groups than heads, no team that fits, no backward
// pass.
absl::StatusOr<std::optional<PassResult>> RunStrategy(StrategyKind kind, const AttentionJob& job, Pass pass,
                                                      int ranks, const Cluster& cluster, int shortlist = 12);

struct StrategyResult {
  StrategyKind kind = StrategyKind::kRing;
  std::vector<PassResult> passes;  // empty where the strategy does not apply
  double seconds() const {
    double sum = 0;
    for (const PassResult& pass : passes) sum += pass.seconds;
    return sum;
  }
};

// Runs `kinds` in turn. kPlannedLanes also considers what the runnable kinds among them found: one
// communication at a time is a case of two.
absl::StatusOr<std::vector<StrategyResult>> CompareStrategies(std::span<const StrategyKind> kinds,
                                                              const AttentionJob& job,
                                                              std::span<const Pass> passes, int ranks,
                                                              const Cluster& cluster);

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_STRATEGIES_H_
