#include "engine/kv/kv_prompt.h"

#include <new>
#include <utility>

#include "absl/strings/str_cat.h"

namespace meshfill {

KvPrompt::~KvPrompt() {
  if (on_gone_ != nullptr) on_gone_();
}

void KvPrompt::Watch(std::function<void()> on_layer, std::function<void()> on_gone) {
  on_layer_ = std::move(on_layer);
  on_gone_ = std::move(on_gone);
}

void KvPrompt::Begin(const TokenLayout& layout) {
  auto slabs = std::make_shared<KvSlabs>(KvSlabs{.shape = shape_, .layout = layout, .slabs = {}});
  slabs->slabs.resize(shape_.layers);
  for (auto& of_layer : slabs->slabs) of_layer.resize(layout.ranks());
  const MutexLock lock(mu_);
  slabs_.swap(slabs);
  ranks_missing_.assign(shape_.layers, layout.ranks());
}

absl::StatusOr<std::byte*> KvPrompt::Place(int rank, int layer) {
  std::shared_ptr<KvSlabs> slabs;
  {
    const MutexLock lock(mu_);
    if (dropped_) return nullptr;
    slabs = slabs_;
  }
  const auto bytes = static_cast<size_t>(shape_.LayerBytes(slabs->layout.ChunkTokens(rank)));
  std::unique_ptr<std::byte[]>& slab = slabs->slabs[layer][rank];  // no other thread's
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
    if (--ranks_missing_[layer] > 0) return;
  }
  if (on_layer_ != nullptr) on_layer_();
}

void KvPrompt::Drop() {
  const MutexLock lock(mu_);
  dropped_ = true;
}

std::shared_ptr<const KvSlabs> KvPrompt::Layer(int layer) const {
  const MutexLock lock(mu_);
  return slabs_ != nullptr && ranks_missing_[layer] == 0 ? slabs_ : nullptr;
}

}  // namespace meshfill
