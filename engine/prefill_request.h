// What a request asks of an engine: checked, and turned into what is planned.
#ifndef MESHFILL_ENGINE_PREFILL_REQUEST_H_
#define MESHFILL_ENGINE_PREFILL_REQUEST_H_

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/engine_options.h"
#include "engine/model/model_shape.h"
#include "engine/plan/planner.h"
#include "engine/prefill_engine.h"

namespace meshfill {

// What a prompt of `tokens` is planned from: the engine's options where the request leaves them open. A
// layout that both leave open is striped where the request fixes the tile or the stripe.
PlanRequest PlanRequestOf(const EngineOptions& engine, const PrefillOptions& options, int64_t tokens);

// What a run on so many ranks computes, or finds cached, in multiples: whole rounds of stripes, and of the
// cache's blocks, so that what comes behind begins where a block does.
int64_t GranuleTokens(const EngineOptions& engine, const PrefillOptions& options, int ranks);
// How many of `cached` tokens, with which a prompt of `tokens` begins, a run on `ranks` ranks can reuse. At
// least a stripe is always computed: a shorter one would be dealt otherwise.
int64_t UsableCachedTokens(const EngineOptions& engine, const PrefillOptions& options, int ranks,
                           int64_t cached, int64_t tokens);

// Whether the client chose the tile, the head groups or the layout: then the prompt shares no pass.
bool ChoosesMesh(const PrefillOptions& options);

// What a prompt takes by `plan` on one of two sub-meshes, four, eight and so on, and of `most`, as far as it
// has room there whole. None: `most` is 1, or the caller's tile or head groups are for all ranks.
std::vector<SubmeshSeconds> SubmeshesUpTo(
    int most, const PrefillOptions& options,
    const std::function<absl::StatusOr<PlanChoice>(const PrefillOptions& on_submesh)>& plan);

// OUT_OF_RANGE: what a prompt of more tokens than the model's context is told.
absl::Status PromptTooLong(const ModelShape& model, const std::string& model_name, uint64_t tokens);
// OUT_OF_RANGE: more tokens than the model's context. INVALID_ARGUMENT: a bad top_k. INTERNAL: block names
// that are of a prompt of another length.
absl::Status CheckPromptOptions(const ModelShape& model, const std::string& model_name, int64_t tokens,
                                const PrefillOptions& options);
// INVALID_ARGUMENT: an id outside the vocabulary, named by its index in the prompt. `tokens` are those from
// `first` on.
absl::Status CheckTokenIds(const ModelShape& model, const std::string& model_name,
                           std::span<const uint32_t> tokens, int64_t first = 0);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PREFILL_REQUEST_H_
