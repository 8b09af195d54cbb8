// What every engine makes of its ranks' outputs after a prefill.
#ifndef MESHFILL_ENGINE_PREFILL_SUMMARY_H_
#define MESHFILL_ENGINE_PREFILL_SUMMARY_H_

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "engine/model/model_shape.h"
#include "engine/plan/speed_correction.h"
#include "engine/prefill_engine.h"
#include "engine/run/rank_stats.h"

namespace meshfill {

// Fills the rest of a result whose plan, logits, ranks and prefill_seconds are there. INTERNAL: NaN or Inf in
// the logits.
absl::Status SummarisePrefill(const ModelShape& model, const std::string& model_name, double peak_flops,
                              int top_k, PrefillResult& result);

// Whether none is NaN or Inf: else the weights overflow on the prompt, or a device is broken.
bool AreFinite(std::span<const float> logits);

// What a prefill took that was over after `seconds`.
MeasuredSeconds MeasuredSecondsOf(double seconds, std::span<const RankStats> ranks);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PREFILL_SUMMARY_H_
