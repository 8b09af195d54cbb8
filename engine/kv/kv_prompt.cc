#include "engine/kv/kv_prompt.h"

#include <algorithm>
#include <utility>

#include "kernels/return_if_error.h"

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

// A slab that is copied to the host.
class KvPrompt::OnItsWay final : public KvKeeping {
 public:
  OnItsWay(KvPrompt& prompt, int rank, int layer, HostCopies copies)
      : prompt_(prompt), rank_(rank), layer_(layer), copies_(std::move(copies)) {}

  bool there() const { return copies_.empty(); }

  absl::Status Finish() override {
    for (const std::unique_ptr<HostCopy>& copy : copies_) RETURN_IF_ERROR(copy->Wait());
    prompt_.OnLayerKept(rank_, layer_);
    return absl::OkStatus();
  }

 private:
  KvPrompt& prompt_;
  const int rank_;
  const int layer_;
  const HostCopies copies_;
};

void KvPrompt::Watch(std::function<void()> on_layer, std::unique_ptr<KvCharge> charge,
                     std::shared_ptr<KvDeviceMemory> device_memory) {
  on_layer_ = std::move(on_layer);
  device_memory_ = std::move(device_memory);
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

KvSlab* KvPrompt::NewSlab(int rank, int layer) {
  std::shared_ptr<KvRunSlabs> run;
  {
    const MutexLock lock(mu_);
    if (dropped_ && !kept_without_lease_) return nullptr;
    run = runs_.back().slabs;
  }
  std::unique_ptr<KvSlab>& slab = run->slabs[layer][rank];  // no other thread's
  slab = std::make_unique<KvSlab>(KvSlabShape{.model = shape_, .tokens = run->layout.ChunkTokens(rank)});
  return slab.get();
}

absl::StatusOr<std::byte*> KvPrompt::Place(int rank, int layer) {
  KvSlab* const slab = NewSlab(rank, layer);
  return slab == nullptr ? nullptr : slab->Place();
}

absl::StatusOr<std::unique_ptr<KvKeeping>> KvPrompt::Keep(int rank, int layer, const BufferRef& kv,
                                                          Stream& stream) {
  KvSlab* const slab = NewSlab(rank, layer);
  if (slab == nullptr) return nullptr;
  if (device_memory_ != nullptr) {
    ASSIGN_OR_RETURN(KvDeviceMemory::Holding holding, device_memory_->Hold(*slab, kv, stream));
    if (holding.held) {
      OnLayerKept(rank, layer);
      return std::move(holding.beside);
    }
  }
  ASSIGN_OR_RETURN(std::byte * to, slab->Place());
  ASSIGN_OR_RETURN(HostCopies copies, StartSlabCopy(slab->shape(), kv, to, stream));
  auto on_its_way = std::make_unique<OnItsWay>(*this, rank, layer, std::move(copies));
  if (!on_its_way->there()) return on_its_way;
  RETURN_IF_ERROR(on_its_way->Finish());
  return nullptr;
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

void KvPrompt::KeepWithoutLease() {
  const MutexLock lock(mu_);
  kept_without_lease_ = true;
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
