// Kept K and V that stay in the memory of the devices that computed them, under a budget: those that were
// used last. A run that begins with the same tokens reads them there.
//
//     Hold ──► on the device ──► another wants the room, and this was not used for longest:
//                │  ▲ Use          copied to the host, and dropped
//                └──► CopyToHost, for a reader: in both; later dropped without a copy
//
// The run that wants room makes it: as its own layer stays, it copies older ones to the host, beside what it
// computes. Where there are not enough of these, its own layer goes. Until they are there, both are here: a
// part holds its budget, and the layers for which room is being made. Those would be here, too, were they on
// their way to the host themselves: the plans of their runs count them (peak_bytes.h).
//
// Each device has as large a part of the budget as it has of the ranks. Thread-safe.
#ifndef MESHFILL_ENGINE_KV_KV_DEVICE_MEMORY_H_
#define MESHFILL_ENGINE_KV_KV_DEVICE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/kv/kv_sink.h"
#include "engine/kv/kv_slab.h"
#include "kernels/mutex.h"
#include "kernels/stream.h"

namespace meshfill {

class KvDeviceMemory final : public std::enable_shared_from_this<KvDeviceMemory> {
 public:
  struct Holding {
    bool held = false;
    std::unique_ptr<KvKeeping> beside;  // what goes on to make room; null: nothing does
  };

  // `devices` by rank; the budget is of all of them together.
  KvDeviceMemory(std::span<const std::shared_ptr<Device>> devices, int64_t budget_bytes);

  int64_t bytes() const;  // bytes of the slabs that it holds

  // Holds K and V of a new slab, `kv`, which earlier operations of `stream` left, and which nobody writes
  // from now on. Not held: a slab that is empty, or that there is no room for. The error of a copy.
  absl::StatusOr<Holding> Hold(KvSlab& slab, const BufferRef& kv, Stream& stream);

  // KvSlab calls these for slabs that were held, as it says.
  std::optional<DeviceMessage> Use(const KvSlab& slab, const Device& device);
  absl::Status CopyToHost(KvSlab& slab);
  void Forget(const KvSlab& slab);

 private:
  using Numbers = std::list<uint64_t>;
  struct Part {  // one device's part
    std::shared_ptr<Device> device;
    int64_t budget_bytes = 0;
    int64_t bytes = 0;
    // Bytes of settled slabs. While room is being made, also the larger of what comes and what goes, so that
    // the budget holds however that ends.
    int64_t claimed_bytes = 0;
    Numbers by_use;  // the last used first
  };
  struct Held {
    KvSlab* slab;
    DeviceMessage kv;
    Part* part;
    Numbers::iterator use;
    bool settled = false;  // it neither leaves nor waits for others to leave
  };
  class Leaving;

  Part& PartOf(const Device& device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Which of a part's slabs may go for `bytes` more to have room: those not used for longest. None: even all
  // of them do not make it.
  std::optional<std::vector<uint64_t>> RoomFor(const Part& part, int64_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Settle(Held& held, bool settled) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  DeviceMessage Erase(std::map<uint64_t, Held>::iterator held) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  std::vector<Part> parts_ ABSL_GUARDED_BY(mu_);        // its size, devices and budgets never change
  std::map<uint64_t, Held> held_ ABSL_GUARDED_BY(mu_);  // by number
  uint64_t numbers_ ABSL_GUARDED_BY(mu_) = 0;           // numbers given so far
  Mutex copying_;  // held for a reader's copy: one at a time, each with a stream of its own
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_KV_DEVICE_MEMORY_H_
