#include "engine/sim/paper_fit.h"

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "engine/sim/lockstep.h"
#include "engine/sim/nelder_mead.h"
#include "engine/sim/placed_mesh.h"
#include "kernels/return_if_error.h"

namespace meshfill::sim {
namespace {

constexpr Pass kPasses[] = {Pass::kForward, Pass::kBackward};

// One cell's programs, both passes; estimated in lockstep.
struct CellPrograms {
  double measured_seconds = 0;
  std::vector<RankProgram> programs;
  Placement placement;

  double RelativeError(const Cluster& cluster) const {
    double seconds = 0;
    for (const RankProgram& program : programs) seconds += LockstepSeconds(program, placement, cluster);
    return seconds / measured_seconds - 1;
  }
};

// A ring's schedule is one block and one message a step, whatever they cost.
std::vector<CellPrograms> RingPrograms(std::span<const PaperCell> cells, const Cluster& any_cluster) {
  std::vector<CellPrograms> all;
  for (const PaperCell& cell : cells) {
    const PlacedMesh ring{.tile = {.a = 1, .b = cell.gpus}, .placement = RowFirst(cell.gpus)};
    CellPrograms one{.measured_seconds = SecondsOfThroughput(cell.ring), .placement = ring.placement};
    for (Pass pass : kPasses) one.programs.push_back(MeshProgram(PaperJob(cell), pass, ring, any_cluster));
    all.push_back(std::move(one));
  }
  return all;
}

// The paper's shapes and schedules rest on isolated profiles, so that the shared link does not change them.
std::vector<CellPrograms> MeshPrograms(std::span<const PaperCell> cells, const Cluster& cluster) {
  std::vector<CellPrograms> all;
  for (const PaperCell& cell : cells) {
    CellPrograms one{.measured_seconds = SecondsOfThroughput(cell.mesh), .placement = RowFirst(cell.gpus)};
    for (Pass pass : kPasses) {
      const PlacedMesh mesh = PaperMesh(PaperJob(cell), pass, cell.gpus, cluster);
      one.programs.push_back(MeshProgram(PaperJob(cell), pass, mesh, cluster, Profile::kIsolated));
    }
    all.push_back(std::move(one));
  }
  return all;
}

Cluster WithConstants(Cluster cluster, const FitAssumptions& assumptions, const std::vector<double>& logs) {
  cluster.attention_flops_per_second = std::exp(logs[0]);
  cluster.between_nodes.bytes_per_second = std::exp(logs[1]);
  cluster.between_nodes.latency_seconds = std::exp(logs[2]);
  cluster.same_node.latency_seconds =
      assumptions.same_node_latency_seconds.value_or(cluster.between_nodes.latency_seconds);
  return cluster;
}

double RingRms(const std::vector<CellPrograms>& cells, const Cluster& cluster) {
  double sum = 0;
  for (const CellPrograms& cell : cells) sum += std::pow(cell.RelativeError(cluster), 2);
  return std::sqrt(sum / static_cast<double>(cells.size()));
}

double MeshMeanError(const std::vector<CellPrograms>& cells, const Cluster& cluster) {
  double sum = 0;
  for (const CellPrograms& cell : cells) sum += std::abs(cell.RelativeError(cluster));
  return sum / static_cast<double>(cells.size());
}

Cluster FitRing(std::span<const PaperCell> cells, const FitAssumptions& assumptions, const Cluster& start) {
  const std::vector<CellPrograms> rings = RingPrograms(cells, start);
  const auto error = [&](const std::vector<double>& logs) {
    return RingRms(rings, WithConstants(start, assumptions, logs));
  };
  return WithConstants(
      start, assumptions,
      NelderMead(error,
                 {std::log(start.attention_flops_per_second), std::log(start.between_nodes.bytes_per_second),
                  std::log(start.between_nodes.latency_seconds)},
                 /*step=*/0.5)
          .at);
}

// On a grid in steps of 1 %, from what one flow needs to what no 64 flows could fill.
double FitNodeLink(std::span<const PaperCell> cells, Cluster cluster) {
  const std::vector<CellPrograms> meshes = MeshPrograms(cells, cluster);
  double best = Cluster::kUnshared;
  double best_error = std::numeric_limits<double>::infinity();
  const double flow = cluster.between_nodes.bytes_per_second;
  for (double node = flow; node < 64 * flow; node *= 1.01) {
    cluster.node_bytes_per_second = node;
    const double error = MeshMeanError(meshes, cluster);
    if (error >= best_error) continue;
    best_error = error;
    best = node;
  }
  return best;
}

}  // namespace

absl::StatusOr<Cluster> FitPaperCluster(std::span<const PaperCell> throughput,
                                        const FitAssumptions& assumptions) {
  if (throughput.empty()) return absl::InvalidArgumentError("no cells to fit a cluster to");
  Cluster start{.gpus_per_node = assumptions.gpus_per_node,
                .same_node = {.latency_seconds = assumptions.same_node_latency_seconds.value_or(1e-3),
                              .bytes_per_second = assumptions.same_node_bytes_per_second},
                .between_nodes = {.latency_seconds = 1e-3, .bytes_per_second = 1e9},
                .attention_flops_per_second = 100e12};
  RETURN_IF_ERROR(CheckCluster(start));
  Cluster cluster = FitRing(throughput, assumptions, start);
  cluster.node_bytes_per_second = FitNodeLink(throughput, cluster);
  return cluster;
}

Cluster Flat(const Cluster& cluster) {
  Cluster flat = WithoutSharing(cluster);
  flat.same_node = flat.between_nodes;
  return flat;
}

}  // namespace meshfill::sim
