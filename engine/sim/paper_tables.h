// The measured tables of the Mesh-Attention paper (Tables 3, 4 and 5), as CSV files in configs/scenarios/.
#ifndef MESHFILL_ENGINE_SIM_PAPER_TABLES_H_
#define MESHFILL_ENGINE_SIM_PAPER_TABLES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/sim/attention_job.h"

namespace meshfill::sim {

// One cell for Ring-Attention and one for Mesh-Attention; the unit is the table's.
struct PaperCell {
  bool causal = true;
  int64_t tokens = 0;
  int gpus = 0;
  double ring = 0;
  double mesh = 0;
};

// Lines that begin with # are comments; then "causal,seqlen,gpus,ring,mesh" and one cell a line. NOT_FOUND:
// no such file. INVALID_ARGUMENT, "FILE:LINE: …": a line that is not a cell, or one that nothing simulates:
// 2^31 tokens or more, more than kMaxGpus, or figures outside 1e-9 to 1e9.
absl::StatusOr<std::vector<PaperCell>> ReadPaperTable(const std::string& path);

// Throughput in Table 3's unit, 1e-2 iterations a second, as seconds.
inline double SecondsOfThroughput(double centi_iterations_per_second) {
  return 100 / centi_iterations_per_second;
}

// Attention of the paper's experiments: 32 heads of 128, bf16. Gradients travel in f32: with that, and with
// no other type, the volumes of Figure 9b (85.5 % below Ring with 256 GPUs, 51.8 % below its own with 32) are
// those of tiles 8×32 and 4×8.
AttentionJob PaperJob(const PaperCell& cell);

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_PAPER_TABLES_H_
