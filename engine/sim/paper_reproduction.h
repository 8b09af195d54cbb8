// The paper's tables beside what the simulator says of the fitted cluster.
#ifndef MESHFILL_ENGINE_SIM_PAPER_REPRODUCTION_H_
#define MESHFILL_ENGINE_SIM_PAPER_REPRODUCTION_H_

#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/sim/cluster.h"
#include "engine/sim/paper_tables.h"

namespace meshfill::sim {

// Table 3: seconds of forward and backward.
struct ThroughputRow {
  PaperCell cell;
  double ring_seconds = 0;
  double mesh_seconds = 0;
  std::string mesh_tiles;  // "16x8 / 8x16": forward and backward
  double measured_ring_seconds() const { return SecondsOfThroughput(cell.ring); }
  double measured_mesh_seconds() const { return SecondsOfThroughput(cell.mesh); }
  double ring_error() const { return ring_seconds / measured_ring_seconds() - 1; }
  double mesh_error() const { return mesh_seconds / measured_mesh_seconds() - 1; }
  double gain() const { return ring_seconds / mesh_seconds; }
  double measured_gain() const { return cell.mesh / cell.ring; }
};
// What the cells with so many GPUs have in common. The means over all cells hide that one number of GPUs is
// far off.
struct ErrorsByGpus {
  int gpus = 0;
  double mesh_mean_error = 0;  // mean of the absolute relative errors
  double mesh_bias = 0;        // mean of the relative errors; below 0: simulated too fast
  double gain_ratio = 0;       // mean of gain / measured gain
};
struct ThroughputTable {
  std::vector<ThroughputRow> rows;
  double ring_rms_error = 0;
  double mesh_mean_error = 0;         // mean of the absolute relative errors
  std::vector<ErrorsByGpus> by_gpus;  // ascending
};
absl::StatusOr<ThroughputTable> ReproduceThroughput(std::span<const PaperCell> throughput,
                                                    const Cluster& cluster);

// Table 4. Its MFU is FLOPs of both passes / (seconds of Table 3 · GPUs · peak): the peak that both imply.
struct UtilisationTable {
  double peak_flops_per_second = 0;  // median over all cells
  // The same where MFU leaves out the product that the backward pass repeats, as is usual: 6 products, not 7.
  double usual_peak_flops_per_second() const { return peak_flops_per_second * 6 / 7; }
  double largest_error = 0;  // largest error of MFU, in percent points, beyond the rounding of both tables
};
// INVALID_ARGUMENT: the tables have different cells.
absl::StatusOr<UtilisationTable> ReproduceUtilisation(std::span<const PaperCell> throughput,
                                                      std::span<const PaperCell> utilisation);

// Table 5: GiB of attention forward. The paper's implementation keeps the caller's chunks and every chunk
// that a tile reuses (Buffers::kKeep), and merges partial outputs by PyTorch expressions; see
// kMergeTemporaries. Its measured memory tells which tile it ran, and that is not always the one that its
// rule finds here.
struct MemoryRow {
  PaperCell cell;
  double ring_gib = 0;
  double mesh_gib = 0;
  std::string mesh_tile;     // by the paper's rule
  double ours_gib = 0;       // the same tile in Meshfill's executor: chunks released, merged in place
  std::string nearest_tile;  // the tile whose memory comes nearest to the measured one
  double nearest_gib = 0;
  double nearest_seconds = 0;  // forward and backward with that tile, to compare with Table 3
  double ring_factor() const;  // the larger of the two over the smaller; ≥ 1
  double mesh_factor() const;
  double nearest_factor() const;
};
absl::StatusOr<std::vector<MemoryRow>> ReproduceMemory(std::span<const PaperCell> memory,
                                                       const Cluster& cluster);

// Q chunks in the element's type that out − σ(…)·(out − block) holds besides out: the block's output (1), its
// f32 copy (2), the difference (2), the product (2).
inline constexpr int kMergeTemporaries = 7;

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_PAPER_REPRODUCTION_H_
