#include "engine/plan/plan_weights.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "engine/plan/plan.h"

namespace meshfill {

PlanWeights PlanWeights::Share(int64_t ranks, int64_t of) const {
  PlanWeights share = *this;
  share.loaded_bytes = (loaded_bytes * ranks + of - 1) / of;
  share.run_bytes = (run_bytes * ranks + of - 1) / of;
  return share;
}

PlanWeights MostOf(const PlanWeights& left, const PlanWeights& right) {
  return {.mode = std::max(left.mode, right.mode),
          .loaded_bytes = std::max(left.loaded_bytes, right.loaded_bytes),
          .run_bytes = std::max(left.run_bytes, right.run_bytes),
          .layer_seconds = std::max(left.layer_seconds, right.layer_seconds),
          .layer_busy_seconds = std::max(left.layer_busy_seconds, right.layer_busy_seconds),
          .head_seconds = std::max(left.head_seconds, right.head_seconds)};
}

absl::Status CheckPlanWeights(const PlanWeights& weights) {
  const struct {
    const char* name;
    double value;
  } numbers[] = {{"loaded_bytes", static_cast<double>(weights.loaded_bytes)},
                 {"run_bytes", static_cast<double>(weights.run_bytes)},
                 {"layer_seconds", weights.layer_seconds},
                 {"layer_busy_seconds", weights.layer_busy_seconds},
                 {"head_seconds", weights.head_seconds}};
  for (const auto& [name, value] : numbers) {
    if (std::isfinite(value) && value >= 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("weights with ", name, " of ", value, ": it must be finite, and 0 or more"));
  }
  return absl::OkStatus();
}

void CountWeights(const PlanWeights& weights, int layers, Prediction& predicted) {
  const double layer = (predicted.compute_seconds + predicted.comm_wait_seconds) / std::max(1, layers);
  if (weights.mode == WeightMode::kStreamed) {
    const double longer = std::max(layer + weights.layer_busy_seconds, weights.layer_seconds) - layer;
    predicted.weight_seconds = weights.layer_seconds + layers * longer + weights.head_seconds;
  }
  predicted.seconds += predicted.weight_seconds;
  predicted.weight_bytes = weights.loaded_bytes + weights.run_bytes;
  predicted.run_bytes += weights.run_bytes;
  predicted.peak_bytes += predicted.weight_bytes;
}

}  // namespace meshfill
