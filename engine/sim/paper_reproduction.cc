#include "engine/sim/paper_reproduction.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/sim/placed_mesh.h"
#include "engine/sim/simulator.h"
#include "kernels/return_if_error.h"

namespace meshfill::sim {
namespace {

constexpr double kGib = 1024.0 * 1024 * 1024;

absl::StatusOr<double> SimulatedSeconds(const AttentionJob& job, Pass pass, const PlacedMesh& mesh,
                                        Profile profile, const Cluster& cluster) {
  ASSIGN_OR_RETURN(Simulation simulation,
                   Simulate(MeshProgram(job, pass, mesh, cluster, profile), mesh.placement, cluster));
  return simulation.seconds;
}

absl::StatusOr<ThroughputRow> ThroughputRowOf(const PaperCell& cell, const Cluster& cluster) {
  ThroughputRow row{.cell = cell};
  const AttentionJob job = PaperJob(cell);
  const PlacedMesh ring{.tile = {.a = 1, .b = cell.gpus}, .placement = RowFirst(cell.gpus)};
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    const PlacedMesh mesh = PaperMesh(job, pass, cell.gpus, cluster);
    ASSIGN_OR_RETURN(double ring_seconds, SimulatedSeconds(job, pass, ring, Profile::kShared, cluster));
    ASSIGN_OR_RETURN(double mesh_seconds, SimulatedSeconds(job, pass, mesh, Profile::kIsolated, cluster));
    row.ring_seconds += ring_seconds;
    row.mesh_seconds += mesh_seconds;
    absl::StrAppend(&row.mesh_tiles, row.mesh_tiles.empty() ? "" : " / ", mesh.tile.DebugString());
  }
  return row;
}

ErrorsByGpus ErrorsOf(int gpus, std::span<const ThroughputRow* const> rows) {
  ErrorsByGpus errors{.gpus = gpus};
  for (const ThroughputRow* row : rows) {
    errors.mesh_mean_error += std::abs(row->mesh_error());
    errors.mesh_bias += row->mesh_error();
    errors.gain_ratio += row->gain() / row->measured_gain();
  }
  const auto cells = static_cast<double>(rows.size());
  errors.mesh_mean_error /= cells;
  errors.mesh_bias /= cells;
  errors.gain_ratio /= cells;
  return errors;
}

double FactorOf(double x, double y) { return std::max(x / y, y / x); }

double PaperGib(const AttentionJob& job, const PlacedMesh& mesh, const Cluster& cluster) {
  const RankProgram program =
      MeshProgram(job, Pass::kForward, mesh, cluster, Profile::kIsolated, Buffers::kKeep);
  const int64_t chunk_tokens = job.tokens / mesh.tile.ranks();
  const int64_t q_bytes = ChunkBytesOf(job, chunk_tokens, job.q_heads, job.kv_heads).q;
  return static_cast<double>(program.peak_bytes + kMergeTemporaries * q_bytes) / kGib;
}

absl::StatusOr<MemoryRow> MemoryRowOf(const PaperCell& cell, const Cluster& cluster) {
  const AttentionJob job = PaperJob(cell);
  const auto row_first = [&](Tile tile) {
    return PlacedMesh{.tile = tile, .placement = RowFirst(cell.gpus)};
  };
  const PlacedMesh mesh = PaperMesh(job, Pass::kForward, cell.gpus, cluster);
  MemoryRow row{
      .cell = cell,
      .ring_gib = PaperGib(job, row_first({.a = 1, .b = cell.gpus}), cluster),
      .mesh_gib = PaperGib(job, mesh, cluster),
      .mesh_tile = mesh.tile.DebugString(),
      .ours_gib = static_cast<double>(
                      MeshProgram(job, Pass::kForward, mesh, cluster, Profile::kIsolated).peak_bytes) /
                  kGib};
  Tile nearest;
  double nearest_factor = std::numeric_limits<double>::infinity();
  for (const Tile tile : TilesOf(cell.gpus)) {
    const double gib = PaperGib(job, row_first(tile), cluster);
    if (FactorOf(gib, cell.mesh) >= nearest_factor) continue;
    nearest_factor = FactorOf(gib, cell.mesh);
    row.nearest_gib = gib;
    nearest = tile;
  }
  row.nearest_tile = nearest.DebugString();
  for (Pass pass : {Pass::kForward, Pass::kBackward}) {
    ASSIGN_OR_RETURN(double seconds,
                     SimulatedSeconds(job, pass, row_first(nearest), Profile::kIsolated, cluster));
    row.nearest_seconds += seconds;
  }
  return row;
}

// What a figure printed with one decimal may be off.
constexpr double kRounding = 0.05;

}  // namespace

absl::StatusOr<ThroughputTable> ReproduceThroughput(std::span<const PaperCell> throughput,
                                                    const Cluster& cluster) {
  ThroughputTable table;
  for (const PaperCell& cell : throughput) {
    ASSIGN_OR_RETURN(ThroughputRow row, ThroughputRowOf(cell, cluster));
    table.rows.push_back(std::move(row));
  }
  double squares = 0;
  std::map<int, std::vector<const ThroughputRow*>> by_gpus;
  for (const ThroughputRow& row : table.rows) {
    squares += row.ring_error() * row.ring_error();
    table.mesh_mean_error += std::abs(row.mesh_error()) / static_cast<double>(table.rows.size());
    by_gpus[row.cell.gpus].push_back(&row);
  }
  table.ring_rms_error = std::sqrt(squares / static_cast<double>(table.rows.size()));
  for (const auto& [gpus, rows] : by_gpus) table.by_gpus.push_back(ErrorsOf(gpus, rows));
  return table;
}

absl::StatusOr<UtilisationTable> ReproduceUtilisation(std::span<const PaperCell> throughput,
                                                      std::span<const PaperCell> utilisation) {
  struct Figure {
    double flops_per_second;  // one GPU's
    double rounding;          // relative rounding of the throughput
    double mfu_percent;
  };
  std::vector<Figure> figures;
  if (throughput.size() != utilisation.size()) {
    return absl::InvalidArgumentError(absl::StrCat("throughput of ", throughput.size(), " cells but MFU of ",
                                                   utilisation.size(), ": give both tables whole"));
  }
  for (size_t c = 0; c < throughput.size(); ++c) {
    const PaperCell& cell = throughput[c];
    const PaperCell& mfu = utilisation[c];
    if (cell.causal != mfu.causal || cell.tokens != mfu.tokens || cell.gpus != mfu.gpus) {
      return absl::InvalidArgumentError(
          absl::StrCat("cell ", c, " of the throughput and of the MFU table differ: give them in one order"));
    }
    const AttentionJob job = PaperJob(cell);
    const double flops = (job.Flops(Pass::kForward) + job.Flops(Pass::kBackward)) / cell.gpus;
    figures.push_back({flops / SecondsOfThroughput(cell.ring), kRounding / cell.ring, mfu.ring});
    figures.push_back({flops / SecondsOfThroughput(cell.mesh), kRounding / cell.mesh, mfu.mesh});
  }
  std::vector<double> peaks;
  for (const Figure& figure : figures) peaks.push_back(100 * figure.flops_per_second / figure.mfu_percent);
  std::nth_element(peaks.begin(), peaks.begin() + peaks.size() / 2, peaks.end());
  UtilisationTable table{.peak_flops_per_second = peaks[peaks.size() / 2]};
  for (const Figure& figure : figures) {
    const double percent = 100 * figure.flops_per_second / table.peak_flops_per_second;
    const double error = std::abs(percent - figure.mfu_percent) - kRounding - percent * figure.rounding;
    table.largest_error = std::max(table.largest_error, error);
  }
  return table;
}

double MemoryRow::ring_factor() const { return FactorOf(ring_gib, cell.ring); }
double MemoryRow::mesh_factor() const { return FactorOf(mesh_gib, cell.mesh); }
double MemoryRow::nearest_factor() const { return FactorOf(nearest_gib, cell.mesh); }

absl::StatusOr<std::vector<MemoryRow>> ReproduceMemory(std::span<const PaperCell> memory,
                                                       const Cluster& cluster) {
  std::vector<MemoryRow> rows;
  for (const PaperCell& cell : memory) {
    ASSIGN_OR_RETURN(MemoryRow row, MemoryRowOf(cell, cluster));
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace meshfill::sim
