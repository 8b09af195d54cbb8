// What every engine makes of its ranks' outputs after a prefill.
#ifndef MESHFILL_ENGINE_PREFILL_SUMMARY_H_
#define MESHFILL_ENGINE_PREFILL_SUMMARY_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "engine/model/model_shape.h"
#include "engine/plan/speed_correction.h"
#include "engine/prefill_engine.h"

namespace meshfill {

// Fills the rest of a result whose plan, logits, ranks and prefill_seconds are there. INTERNAL: NaN or Inf in
// the logits.
absl::Status SummarisePrefill(const ModelShape& model, const std::string& model_name, double peak_flops,
                              int top_k, PrefillResult& result);

// What the prefill took, from its ranks and its prefill_seconds.
MeasuredSeconds MeasuredSecondsOf(const PrefillResult& result);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PREFILL_SUMMARY_H_
