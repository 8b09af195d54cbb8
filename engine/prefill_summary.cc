#include "engine/prefill_summary.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

// The best `count` tokens: by falling logit, ties by rising id.
std::vector<TokenLogit> BestTokens(const std::vector<float>& logits, int count) {
  const auto better = [](const TokenLogit& a, const TokenLogit& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
  };
  std::vector<TokenLogit> best;  // a heap, its worst one in front
  best.reserve(static_cast<size_t>(count));
  for (size_t id = 0; id < logits.size(); ++id) {
    const TokenLogit token = {static_cast<uint32_t>(id), logits[id]};
    if (std::ssize(best) == count) {
      if (!better(token, best.front())) continue;
      std::pop_heap(best.begin(), best.end(), better);
      best.pop_back();
    }
    best.push_back(token);
    std::push_heap(best.begin(), best.end(), better);
  }
  std::sort_heap(best.begin(), best.end(), better);
  return best;
}

bool IsFinite(float logit) { return std::isfinite(logit); }

}  // namespace

bool AreFinite(std::span<const float> logits) { return std::all_of(logits.begin(), logits.end(), IsFinite); }

MeasuredSeconds MeasuredSecondsOf(double seconds, std::span<const RankStats> ranks) {
  MeasuredSeconds measured = {.all = seconds};
  for (const RankStats& stats : ranks) {
    measured.attention += stats.block_seconds + stats.merge_seconds;
    measured.comm_wait += stats.comm_wait_seconds();
  }
  const double count = std::max<double>(1, static_cast<double>(ranks.size()));
  measured.attention /= count;
  measured.comm_wait /= count;
  return measured;
}

absl::Status SummarisePrefill(const ModelShape& model, const std::string& model_name, double peak_flops,
                              int top_k, PrefillResult& result) {
  for (const RankStats& stats : result.ranks) {
    result.attention_seconds = std::max(result.attention_seconds, stats.attention_seconds);
    result.comm_wait_seconds = std::max(result.comm_wait_seconds, stats.comm_wait_seconds());
    if (stats.sent.total() > result.comm_bytes.total()) result.comm_bytes = stats.sent;
  }
  if (!AreFinite(result.logits)) {
    const auto bad = std::find_if_not(result.logits.begin(), result.logits.end(), IsFinite);
    return absl::InternalError(absl::StrCat("the logit of token ", bad - result.logits.begin(), " is ", *bad,
                                            "; the weights of model ", model_name,
                                            " overflow on this prompt; try dtype f32"));
  }
  result.top = BestTokens(result.logits, top_k);
  result.expert_loads = ExpertLoadsOf(result.ranks, model.layers, model.experts.count);
  const int64_t tokens = result.tokens(), cached = result.cached_tokens;
  const double attention_flops = AttentionFlops(model, tokens) - AttentionFlops(model, cached);
  const double token_flops = static_cast<double>(tokens - cached) * ProjectionFlopsPerToken(model);
  result.mfu = (attention_flops + token_flops + LmHeadFlops(model)) / (result.prefill_seconds * peak_flops);
  result.attention_mfu = attention_flops / (result.attention_seconds * peak_flops);
  return absl::OkStatus();
}

}  // namespace meshfill
