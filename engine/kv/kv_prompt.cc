#include "engine/kv/kv_prompt.h"

#include <algorithm>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

int64_t TokensOf(const TokenLayout& layout, const std::vector<bool>& ranks) {
  int64_t tokens = 0;
  for (int rank = 0; rank < layout.ranks(); ++rank) tokens += ranks[rank] ? layout.ChunkTokens(rank) : 0;
  return tokens;
}

}  // namespace

KvPrompt::KvPrompt(const KvShape& shape, const TokenLayout& layout, std::vector<bool> here,
                   int64_t cached_tokens)
    : shape_(shape),
      tokens_(cached_tokens + layout.tokens()),
      here_(std::move(here)),
      kept_tokens_(TokensOf(layout, here_)) {}

void KvPrompt::Watch(std::function<void()> on_layer, std::unique_ptr<KvCharge> charge) {
  on_layer_ = std::move(on_layer);
  const MutexLock lock(mu_);
  charge_ = std::move(charge);
}

void KvPrompt::Begin(const TokenLayout& layout, std::shared_ptr<const KvSlabs> before) {
  auto slabs = before == nullptr ? std::make_shared<KvSlabs>() : std::make_shared<KvSlabs>(*before);
  slabs->shape = shape_;
  const int64_t first_token = slabs->tokens();
  auto run = std::make_shared<KvRunSlabs>(KvRunSlabs{.layout = layout, .slabs = {}, .charges = {}});
  run->slabs.resize(shape_.layers);
  for (auto& of_layer : run->slabs) of_layer.resize(layout.ranks());

  std::vector<Run> gone;  // what they charge and hold is given back after the lock
  const MutexLock lock(mu_);
  const auto replaced = [&](const Run& own) {
    return std::none_of(slabs->pieces.begin(), slabs->pieces.end(),
                        [&](const KvPiece& piece) { return piece.run == own.slabs; });
  };
  for (Run& own : runs_) {
    if (!replaced(own)) continue;
    run->charges.insert(run->charges.end(), own.slabs->charges.begin(), own.slabs->charges.end());
    gone.push_back(own);
  }
  std::erase_if(runs_, replaced);
  Charge(layout.tokens(), first_token, run->charges);
  slabs->pieces.push_back({.first_token = first_token, .tokens = layout.tokens(), .run = run});
  slabs_ = std::move(slabs);
  const auto ranks = here_.empty() ? layout.ranks() : std::count(here_.begin(), here_.end(), true);
  runs_.push_back(
      {.slabs = std::move(run), .ranks_missing = std::vector(shape_.layers, static_cast<int>(ranks))});
}

void KvPrompt::Charge(int64_t tokens, int64_t before, std::vector<std::shared_ptr<const KvCharge>>& charges) {
  if (charge_ == nullptr) return;
  int64_t wanted = KvBytesOf(here_.empty() ? tokens : kept_tokens_);
  for (const auto& charge : charges) wanted -= charge->bytes();
  if (wanted > 0) charges.push_back(charge_->Split(wanted));
  charge_->Drop(charge_->bytes() - KvBytesOf(tokens_ - before - tokens));
}

absl::StatusOr<std::byte*> KvPrompt::Place(int rank, int layer) {
  std::shared_ptr<KvRunSlabs> run;
  {
    const MutexLock lock(mu_);
    if (dropped_ && !kept_for_runs_) return nullptr;
    run = runs_.back().slabs;
  }
  const auto bytes = static_cast<size_t>(shape_.LayerBytes(run->layout.ChunkTokens(rank)));
  std::unique_ptr<std::byte[]>& slab = run->slabs[layer][rank];  // no other thread's
  slab.reset(new (std::nothrow) std::byte[bytes]);
  if (slab == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for the ", bytes, " bytes of K and V that rank ", rank, " keeps of layer ",
                     layer, "; lower kv.memory_bytes, or send shorter prompts"));
  }
  return slab.get();
}

void KvPrompt::OnLayerKept(int rank, int layer) {
  {
    const MutexLock lock(mu_);
    if (--runs_.back().ranks_missing[layer] > 0) return;
  }
  if (on_layer_ != nullptr) on_layer_();
}

void KvPrompt::Drop() {
  const MutexLock lock(mu_);
  dropped_ = true;
}

void KvPrompt::KeepForRuns() {
  const MutexLock lock(mu_);
  kept_for_runs_ = true;
}

bool KvPrompt::charged() const {
  const MutexLock lock(mu_);
  return charge_ != nullptr;
}

std::shared_ptr<const KvSlabs> KvPrompt::Layer(int layer) const {
  const MutexLock lock(mu_);
  const bool begun = slabs_ != nullptr && slabs_->tokens() == tokens_;
  const auto has_layer = [layer](const Run& run) { return run.ranks_missing[layer] == 0; };
  return begun && std::all_of(runs_.begin(), runs_.end(), has_layer) ? slabs_ : nullptr;
}

std::shared_ptr<const KvSlabs> KvPrompt::slabs() const {
  const MutexLock lock(mu_);
  return slabs_;
}

}  // namespace meshfill
