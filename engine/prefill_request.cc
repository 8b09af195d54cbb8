#include "engine/prefill_request.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "engine/plan/pieces.h"

namespace meshfill {

PlanRequest PlanRequestOf(const EngineOptions& engine, const PrefillOptions& options, int64_t tokens) {
  PlanRequest request = {.tokens = tokens,
                         .ranks = engine.ranks,
                         .layout = options.layout.has_value() ? options.layout : engine.layout,
                         .stripe = options.stripe.value_or(engine.stripe),
                         .tile = options.tile,
                         .heads = options.heads,
                         .partial_dtype = engine.partial_dtype,
                         .schedule = engine.schedule};
  const bool fixed = options.tile.has_value() || options.stripe.has_value();
  if (!request.layout.has_value() && fixed) request.layout = LayoutKind::kStriped;
  return request;
}

int64_t GranuleTokens(const EngineOptions& engine, const PrefillOptions& options, int ranks) {
  const int64_t round = RoundTokens(ranks, options.stripe.value_or(engine.stripe));
  return options.block_names == nullptr ? round : std::lcm<int64_t>(round, options.block_names->block_tokens);
}

int64_t UsableCachedTokens(const EngineOptions& engine, const PrefillOptions& options, int ranks,
                           int64_t cached, int64_t tokens) {
  const auto layout = options.layout.has_value() ? options.layout : engine.layout;
  if (layout.value_or(LayoutKind::kStriped) != LayoutKind::kStriped) return 0;
  const int64_t granule = GranuleTokens(engine, options, ranks);
  const int64_t most = tokens - options.stripe.value_or(engine.stripe);
  return most < 0 ? 0 : std::min(cached, most) / granule * granule;
}

bool ChoosesMesh(const PrefillOptions& options) {
  return options.tile.has_value() || options.heads.has_value() || options.layout.has_value() ||
         options.stripe.has_value();
}

std::vector<SubmeshSeconds> SubmeshesUpTo(
    int most, const PrefillOptions& options,
    const std::function<absl::StatusOr<PlanChoice>(const PrefillOptions& on_submesh)>& plan) {
  std::vector<SubmeshSeconds> submeshes;
  if (options.tile.has_value() || options.heads.has_value()) return submeshes;
  PrefillOptions on_submesh = options;
  for (int count = 2; count <= most; count = count < most ? std::min(2 * count, most) : most + 1) {
    on_submesh.submeshes = count;
    const absl::StatusOr<PlanChoice> choice = plan(on_submesh);
    if (!choice.ok() || !choice->pieces.empty()) break;  // smaller ones have less memory
    submeshes.push_back({.submeshes = count, .seconds = choice->plan.predicted.seconds});
  }
  return submeshes;
}

absl::Status PromptTooLong(const ModelShape& model, const std::string& model_name, uint64_t tokens) {
  return absl::OutOfRangeError(absl::StrCat("the prompt has ", tokens, " tokens; model ", model_name,
                                            " is for ", model.context_tokens,
                                            " at most; shorten the prompt"));
}

absl::Status CheckPromptOptions(const ModelShape& model, const std::string& model_name, int64_t tokens,
                                const PrefillOptions& options) {
  if (tokens > model.context_tokens) {
    return PromptTooLong(model, model_name, static_cast<uint64_t>(tokens));
  }
  if (options.top_k < 1 || options.top_k > model.vocab) {
    return absl::InvalidArgumentError(absl::StrCat(
        "top_k is ", options.top_k, "; it must be 1 to the vocabulary's ", model.vocab, "; ask for fewer"));
  }
  if (options.block_names != nullptr && options.block_names->long_rope != model.HasLongRope(tokens)) {
    return absl::InternalError(absl::StrCat("the names of the blocks are not those of a prompt of ", tokens,
                                            " tokens, by which longrope chooses its factors"));
  }
  return absl::OkStatus();
}

absl::Status CheckTokenIds(const ModelShape& model, const std::string& model_name,
                           std::span<const uint32_t> tokens, int64_t first) {
  const int64_t vocab = model.vocab;
  const auto bad = std::find_if(tokens.begin(), tokens.end(), [vocab](uint32_t id) { return id >= vocab; });
  if (bad == tokens.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("token ", first + (bad - tokens.begin()), " has id ", *bad,
                                                 ", outside the vocabulary of ", vocab,
                                                 "; use the tokenizer of model ", model_name));
}

}  // namespace meshfill
