#include "engine/kv/kv_slab.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/kv/kv_device_memory.h"
#include "kernels/return_if_error.h"

namespace meshfill {

namespace {

constexpr size_t kMappedBytes = size_t{1} << 20;  // from here on a slab is mapped

// Null: there is none.
SlabMemory Allocate(size_t bytes) {
  if (bytes < kMappedBytes) return SlabMemory(new (std::nothrow) std::byte[bytes]);
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  madvise(mapped, bytes, MADV_HUGEPAGE);  // a hint: without huge pages it is only slower
  return SlabMemory(static_cast<std::byte*>(mapped), {.mapped_bytes = bytes});
}

}  // namespace

void FreeSlabMemory::operator()(std::byte* memory) const {
  if (mapped_bytes > 0) {
    munmap(memory, mapped_bytes);
  } else {
    delete[] memory;
  }
}

absl::StatusOr<SlabMemory> NewSlabMemory(const KvSlabShape& shape) {
  SlabMemory memory = Allocate(static_cast<size_t>(shape.bytes()));
  if (memory != nullptr) return memory;
  return absl::ResourceExhaustedError(
      absl::StrCat("no memory for the ", shape.bytes(),
                   " bytes of K and V that a rank keeps of a layer; lower kv.memory_bytes (behind GPUs "
                   "kv.host_memory_bytes), or send shorter prompts"));
}

absl::StatusOr<HostCopies> StartSlabCopy(const KvSlabShape& shape, const BufferRef& kv, std::byte* to,
                                         Stream& stream) {
  const KvShape& model = shape.model;
  const HeadRows heads_outermost = {
      .dtype = model.dtype, .head_stride = shape.tokens * model.head_dim, .slot_stride = model.head_dim};
  const HeadRows tokens_outermost = {.dtype = model.dtype,
                                     .head_stride = model.head_dim,
                                     .slot_stride = int64_t{model.kv_heads} * model.head_dim,
                                     .slots = {.width = std::max<int64_t>(1, shape.tokens)}};
  const size_t half_bytes = static_cast<size_t>(shape.bytes()) / 2;
  HostCopies copies;
  for (const size_t offset : {size_t{0}, half_bytes}) {
    ASSIGN_OR_RETURN(std::unique_ptr<HostCopy> copy,
                     stream.CopyHeadsToHost({.from = kv->data<std::byte>() + offset,
                                             .from_rows = heads_outermost,
                                             .to = to + offset,
                                             .to_rows = tokens_outermost,
                                             .heads = model.kv_heads,
                                             .tokens = shape.tokens,
                                             .head_dim = model.head_dim},
                                            kv));
    if (copy != nullptr) copies.push_back(std::move(copy));
  }
  return copies;
}

KvSlab::~KvSlab() {
  if (device_memory_ != nullptr) device_memory_->Forget(*this);
}

absl::StatusOr<std::byte*> KvSlab::Place() {
  ASSIGN_OR_RETURN(SlabMemory memory, NewSlabMemory(shape_));
  SetHost(std::move(memory));
  return host_memory_.get();
}

void KvSlab::SetHost(SlabMemory host) {
  host_memory_ = std::move(host);
  host_.store(host_memory_.get(), std::memory_order_release);
}

absl::Status KvSlab::BringToHost() {
  return on_host() ? absl::OkStatus() : device_memory_->CopyToHost(*this);
}

std::optional<DeviceMessage> KvSlab::On(const Device& device) const {
  return device_memory_ == nullptr ? std::nullopt : device_memory_->Use(*this, device);
}

}  // namespace meshfill
