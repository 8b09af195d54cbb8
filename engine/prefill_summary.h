// What every engine checks of a prompt before its prefill, and makes of its ranks' outputs after it.
#ifndef MESHFILL_ENGINE_PREFILL_SUMMARY_H_
#define MESHFILL_ENGINE_PREFILL_SUMMARY_H_

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "engine/model_shape.h"
#include "engine/prefill_engine.h"

namespace meshfill {

// OUT_OF_RANGE: more tokens than the model's context. INVALID_ARGUMENT: a bad top_k.
absl::Status CheckPromptOptions(const ModelShape& model, const std::string& model_name, int64_t tokens,
                                const PrefillOptions& options);
// INVALID_ARGUMENT: an id outside the vocabulary, its index named.
absl::Status CheckTokenIds(const ModelShape& model, const std::string& model_name,
                           std::span<const uint32_t> tokens);

// Fills the rest of a result whose plan, logits, ranks and prefill_seconds are there. INTERNAL: NaN or Inf in
// the logits.
absl::Status SummarisePrefill(const ModelShape& model, const std::string& model_name, double peak_flops,
                              int top_k, PrefillResult& result);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PREFILL_SUMMARY_H_
