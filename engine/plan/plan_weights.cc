#include "engine/plan/plan_weights.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "engine/plan/plan.h"

namespace meshfill {
namespace {

// A layer of a run whose weights are there.
struct LayerSeconds {
  double compute = 0;  // a rank computes
  double wait = 0;     // it waits for chunks
  double chunks = 0;   // the link moves chunks, where weights come by it, too
};

// What the layer takes longer while weights come that would take `coming` seconds by themselves.
//
// Chunks and weights share the link evenly while both are on their way: a chunk then takes twice its time.
//
//     link    chunk waited for | chunk beside a block |  idle
//     rank         waits       |          computes
//     beside     as long again | longer than computes?   weights alone
double AddedBeside(const LayerSeconds& layer, const PlanWeights& weights, double coming) {
  if (coming == 0) return 0;
  const double busy = weights.layer_busy_seconds * coming / weights.layer_seconds;
  const double compute = layer.compute + busy;
  const double waited = std::min(layer.wait, layer.chunks);  // for the link, not for one another
  const double beside = layer.chunks - waited;
  const double slower = waited + std::max(0.0, 2 * beside - compute);  // with weights beside all chunks
  // What has come of them when such a layer ends.
  const double came = layer.chunks + std::max(0.0, compute - 2 * beside) + layer.wait - waited;
  return busy + (coming < came ? slower * coming / came : slower + coming - came);
}

}  // namespace

PlanWeights PlanWeights::Share(int64_t ranks, int64_t of) const {
  PlanWeights share = *this;
  share.loaded_bytes = (loaded_bytes * ranks + of - 1) / of;
  share.run_bytes = (run_bytes * ranks + of - 1) / of;
  return share;
}

PlanWeights PlanWeights::WithoutHead() const {
  PlanWeights layers = *this;
  layers.head_seconds = 0;
  layers.sent_bytes -= sent_head_bytes;
  layers.sent_head_bytes = 0;
  return layers;
}

bool WeightModeBytes::fits_host() const { return host_memory_bytes == 0 || host_bytes <= host_memory_bytes; }

int64_t ShareBytes(const PlanWeights& one, int workers) { return (one.loaded_bytes + workers - 1) / workers; }

PlanWeights SharedAmong(const PlanWeights& one, int workers, const Link& link) {
  PlanWeights shared = one;
  shared.run_bytes = workers * one.run_bytes;
  const auto others = [workers](int64_t bytes) { return bytes - bytes / workers; };
  shared.sent_head_bytes = one.head_bytes / workers;
  shared.sent_bytes = others(one.loaded_bytes - one.head_bytes) + shared.sent_head_bytes;
  shared.layer_bytes = others(one.layer_bytes);
  shared.head_bytes = others(one.head_bytes);
  shared.gather_bytes_per_second = link.bytes_per_second;
  const auto seconds = [&](int64_t bytes) {
    return (workers - 1) * link.latency_seconds + static_cast<double>(bytes) / link.bytes_per_second;
  };
  const double part = 1 - 1.0 / workers;
  shared.layer_seconds = std::max(seconds(shared.layer_bytes), part * one.layer_seconds);
  shared.layer_busy_seconds = part * one.layer_busy_seconds;
  shared.head_seconds = std::max(seconds(shared.head_bytes), part * one.head_seconds);
  return shared;
}

PlanWeights MostOf(const PlanWeights& left, const PlanWeights& right) {
  return {.mode = std::max(left.mode, right.mode),
          .loaded_bytes = std::max(left.loaded_bytes, right.loaded_bytes),
          .run_bytes = std::max(left.run_bytes, right.run_bytes),
          .layer_seconds = std::max(left.layer_seconds, right.layer_seconds),
          .layer_busy_seconds = std::max(left.layer_busy_seconds, right.layer_busy_seconds),
          .head_seconds = std::max(left.head_seconds, right.head_seconds),
          .layer_bytes = std::max(left.layer_bytes, right.layer_bytes),
          .head_bytes = std::max(left.head_bytes, right.head_bytes)};
}

absl::Status CheckPlanWeights(const PlanWeights& weights) {
  const struct {
    const char* name;
    double value;
  } numbers[] = {{"loaded_bytes", static_cast<double>(weights.loaded_bytes)},
                 {"run_bytes", static_cast<double>(weights.run_bytes)},
                 {"layer_seconds", weights.layer_seconds},
                 {"layer_busy_seconds", weights.layer_busy_seconds},
                 {"head_seconds", weights.head_seconds},
                 {"layer_bytes", static_cast<double>(weights.layer_bytes)},
                 {"head_bytes", static_cast<double>(weights.head_bytes)}};
  for (const auto& [name, value] : numbers) {
    if (std::isfinite(value) && value >= 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("weights with ", name, " of ", value, ": it must be finite, and 0 or more"));
  }
  return absl::OkStatus();
}

void CountWeights(const PlanWeights& weights, int layers, Prediction& predicted) {
  if (weights.mode != WeightMode::kResident) {
    const int count = std::max(1, layers);
    LayerSeconds layer = {.compute = predicted.compute_seconds / count,
                          .wait = predicted.comm_wait_seconds / count};
    if (weights.gather_bytes_per_second > 0) {
      layer.chunks =
          static_cast<double>(predicted.comm_bytes.total()) / weights.gather_bytes_per_second / count;
    }
    // Beside the last layer comes the LM head's first part, about as large as a layer.
    const double beside_last = std::min(weights.layer_seconds, weights.head_seconds);
    predicted.weight_seconds = weights.layer_seconds +
                               (count - 1) * AddedBeside(layer, weights, weights.layer_seconds) +
                               AddedBeside(layer, weights, beside_last) + weights.head_seconds - beside_last;
  }
  predicted.comm_bytes[Traffic::kGather] = weights.sent_bytes;
  predicted.seconds += predicted.weight_seconds;
  PartSeconds& parts = predicted.parts;
  (weights.mode == WeightMode::kSharded ? parts.weights : parts.products) += predicted.weight_seconds;
  predicted.weight_bytes = weights.loaded_bytes + weights.run_bytes;
  predicted.run_bytes += weights.run_bytes;
  predicted.peak_bytes += predicted.weight_bytes;
}

}  // namespace meshfill
