// K and V of one rank's tokens in one layer, where a run left them: in host memory, in that of the device
// that computed them (kv_device_memory.h), or in both.
//
//     on the host      K, then V, each [tokens, kv_heads, head_dim]    as readers want them
//     on the device    K, then V, each [kv_heads, tokens, head_dim]    as the run's attention had them
//
// RoPE applied, by slot of the rank's chunk.
#ifndef MESHFILL_ENGINE_KV_KV_SLAB_H_
#define MESHFILL_ENGINE_KV_KV_SLAB_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/kv/kv_shape.h"
#include "kernels/buffer.h"
#include "kernels/stream.h"

namespace meshfill {

class KvDeviceMemory;

// Copies to the host that are on their way; none: what they were to bring is there.
using HostCopies = std::vector<std::unique_ptr<HostCopy>>;

struct KvSlabShape {
  KvShape model;
  int64_t tokens = 0;

  int64_t bytes() const { return model.LayerBytes(tokens); }
  int64_t slot_bytes() const { return model.kv_heads * model.head_bytes(); }  // K or V of one token
};

// Gives a slab's memory back.
struct FreeSlabMemory {
  size_t mapped_bytes = 0;  // of its own mapping; 0: it is of the heap
  void operator()(std::byte* memory) const;
};
using SlabMemory = std::unique_ptr<std::byte[], FreeSlabMemory>;

// Host memory for a slab. A large one is a mapping of its own: slabs of prompts of many lengths come and go,
// and what is freed between others would stay with the heap. RESOURCE_EXHAUSTED: there is none.
absl::StatusOr<SlabMemory> NewSlabMemory(const KvSlabShape& shape);

// Begins to copy K and V from where a device has them to where the host does, `to`, of shape.bytes(). `kv` is
// what earlier operations of `stream` left, and nobody writes it from now on.
absl::StatusOr<HostCopies> StartSlabCopy(const KvSlabShape& shape, const BufferRef& kv, std::byte* to,
                                         Stream& stream);

// Who fills it does so before anybody else knows of it. From then on it is thread-safe.
class KvSlab {
 public:
  explicit KvSlab(const KvSlabShape& shape) : shape_(shape) {}
  // A slab of the K and V at `host`. That memory outlives the slab.
  KvSlab(const KvSlabShape& shape, std::byte* host) : shape_(shape), host_(host) {}
  ~KvSlab();
  KvSlab(const KvSlab&) = delete;
  KvSlab& operator=(const KvSlab&) = delete;

  const KvSlabShape& shape() const { return shape_; }

  // Host memory for its K and V, which it has from now on. RESOURCE_EXHAUSTED: there is none.
  absl::StatusOr<std::byte*> Place();

  // What is on the host stays there.
  bool on_host() const { return host_.load(std::memory_order_acquire) != nullptr; }
  // K's row of a slot (half 0), or V's (half 1), on the host.
  const std::byte* Row(int half, int64_t slot) const {
    return host_.load(std::memory_order_acquire) + (half * shape_.tokens + slot) * shape_.slot_bytes();
  }
  // Copies it to the host where it is not there; returns when it is. RESOURCE_EXHAUSTED: there is no memory.
  // UNAVAILABLE: its device has failed.
  absl::Status BringToHost();
  // K and V in the memory of `device`, for a stream of it to take over; none: they are not there. A use.
  std::optional<DeviceMessage> On(const Device& device) const;

 private:
  friend class KvDeviceMemory;
  void SetHost(SlabMemory host);

  const KvSlabShape shape_;
  SlabMemory host_memory_;
  std::atomic<std::byte*> host_{nullptr};
  std::shared_ptr<KvDeviceMemory> device_memory_;  // null: it never was there
  uint64_t number_ = 0;                            // there
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_KV_SLAB_H_
