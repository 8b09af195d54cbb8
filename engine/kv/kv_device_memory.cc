#include "engine/kv/kv_device_memory.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "kernels/return_if_error.h"

namespace meshfill {

// Slabs on their way to the host, for another one. What did not get there stays.
class KvDeviceMemory::Leaving final : public KvKeeping {
 public:
  Leaving(std::shared_ptr<KvDeviceMemory> memory, Part& part) : memory_(std::move(memory)), part_(part) {}
  ~Leaving() override {
    for (One& one : slabs_) one.copies.clear();  // nothing is written from here on
    End();
  }

  // Adds a slab that leaves. Under the memory's lock, before Start.
  void Add(uint64_t number, const Held& held) {
    memory_->mu_.AssertHeld();
    slabs_.push_back(
        {.number = number, .shape = held.slab->shape(), .kv = held.kv, .host = nullptr, .copies = {}});
    claim_bytes_ += held.slab->shape().bytes();
  }
  // Also under the lock, before Start. Claims what leaves, or the `bytes` of slab `number` that make it
  // leave, whichever is more.
  void Claim(uint64_t number, int64_t bytes) {
    memory_->mu_.AssertHeld();
    for_number_ = number;
    claim_bytes_ = std::max(claim_bytes_, bytes);
    part_.claimed_bytes += claim_bytes_;
  }

  absl::Status Start(Stream& stream) {
    for (One& one : slabs_) {
      ASSIGN_OR_RETURN(one.host, NewSlabMemory(one.shape));
      ASSIGN_OR_RETURN(const BufferRef kv, stream.TakeOver(std::exchange(one.kv, {})));
      ASSIGN_OR_RETURN(one.copies, StartSlabCopy(one.shape, kv, one.host.get(), stream));
    }
    return absl::OkStatus();
  }

  absl::Status Finish() override {
    for (One& one : slabs_) {
      for (const std::unique_ptr<HostCopy>& copy : one.copies) RETURN_IF_ERROR(copy->Wait());
      one.copies.clear();
    }
    left_ = true;
    End();
    return absl::OkStatus();
  }

 private:
  struct One {
    uint64_t number = 0;
    KvSlabShape shape;
    DeviceMessage kv;
    SlabMemory host;
    HostCopies copies;  // copies from `kv` to `host`
  };

  // Slabs that are gone meanwhile are nobody's concern.
  void End() {
    std::vector<DeviceMessage> gone;  // freed after the lock
    const MutexLock lock(memory_->mu_);
    part_.claimed_bytes -= std::exchange(claim_bytes_, 0);
    for (One& one : slabs_) {
      const auto held = memory_->held_.find(one.number);
      if (held == memory_->held_.end()) continue;
      KvSlab& slab = *held->second.slab;
      if (left_ && !slab.on_host()) slab.SetHost(std::move(one.host));  // else a reader was faster
      if (left_) {
        gone.push_back(memory_->Erase(held));
      } else {
        memory_->Settle(held->second, true);
      }
    }
    slabs_.clear();
    const auto held = memory_->held_.find(std::exchange(for_number_, 0));
    if (left_ && held != memory_->held_.end()) memory_->Settle(held->second, true);
  }

  const std::shared_ptr<KvDeviceMemory> memory_;
  Part& part_;
  std::vector<One> slabs_;
  uint64_t for_number_ = 0;
  int64_t claim_bytes_ = 0;
  bool left_ = false;
};

KvDeviceMemory::KvDeviceMemory(std::span<const std::shared_ptr<Device>> devices, int64_t budget_bytes) {
  const MutexLock lock(mu_);
  const int64_t of_rank = budget_bytes / std::max<int64_t>(1, std::ssize(devices));
  for (const std::shared_ptr<Device>& device : devices) {
    if (parts_.empty() || parts_.back().device != device) parts_.push_back({.device = device, .by_use = {}});
    parts_.back().budget_bytes += of_rank;  // neighbours share a device
  }
}

int64_t KvDeviceMemory::bytes() const {
  const MutexLock lock(mu_);
  int64_t bytes = 0;
  for (const Part& part : parts_) bytes += part.bytes;
  return bytes;
}

KvDeviceMemory::Part& KvDeviceMemory::PartOf(const Device& device) {
  return *std::find_if(parts_.begin(), parts_.end(),
                       [&](const Part& part) { return part.device.get() == &device; });
}

absl::StatusOr<KvDeviceMemory::Holding> KvDeviceMemory::Hold(KvSlab& slab, const BufferRef& kv,
                                                             Stream& stream) {
  const int64_t bytes = slab.shape().bytes();
  DeviceMessage message = {.buffer = kv, .ready = nullptr};
  ASSIGN_OR_RETURN(message.ready, stream.Mark());
  std::vector<DeviceMessage> gone;  // freed after the lock
  std::unique_ptr<Leaving> leaving;
  {
    const MutexLock lock(mu_);
    Part& part = PartOf(stream.device());
    const std::optional<std::vector<uint64_t>> others = RoomFor(part, bytes);
    if (bytes == 0 || !others.has_value()) return Holding();
    for (const uint64_t number : *others) {
      const auto other = held_.find(number);
      if (other->second.slab->on_host()) {
        gone.push_back(Erase(other));
        continue;
      }
      if (leaving == nullptr) leaving = std::make_unique<Leaving>(shared_from_this(), part);
      leaving->Add(number, other->second);
      Settle(other->second, false);
    }
    slab.device_memory_ = shared_from_this();
    slab.number_ = ++numbers_;
    part.bytes += bytes;
    part.by_use.push_front(slab.number_);
    const auto held = held_.emplace(
        slab.number_,
        Held{.slab = &slab, .kv = std::move(message), .part = &part, .use = part.by_use.begin()});
    if (leaving == nullptr) {
      Settle(held.first->second, true);
      return Holding{.held = true, .beside = nullptr};
    }
    leaving->Claim(slab.number_, bytes);
  }
  RETURN_IF_ERROR(leaving->Start(stream));
  return Holding{.held = true, .beside = std::move(leaving)};
}

std::optional<std::vector<uint64_t>> KvDeviceMemory::RoomFor(const Part& part, int64_t bytes) const {
  std::vector<uint64_t> going;
  int64_t missing = part.claimed_bytes + bytes - part.budget_bytes;
  for (auto number = part.by_use.rbegin(); missing > 0; ++number) {
    if (number == part.by_use.rend()) return std::nullopt;
    const Held& held = held_.at(*number);
    if (!held.settled) continue;
    missing -= held.slab->shape().bytes();
    going.push_back(*number);
  }
  return going;
}

void KvDeviceMemory::Settle(Held& held, bool settled) {
  if (held.settled == settled) return;
  held.settled = settled;
  held.part->claimed_bytes += settled ? held.slab->shape().bytes() : -held.slab->shape().bytes();
}

DeviceMessage KvDeviceMemory::Erase(std::map<uint64_t, Held>::iterator held) {
  Held& gone = held->second;
  Settle(gone, false);
  gone.part->bytes -= gone.slab->shape().bytes();
  gone.part->by_use.erase(gone.use);
  DeviceMessage kv = std::move(gone.kv);
  held_.erase(held);
  return kv;
}

std::optional<DeviceMessage> KvDeviceMemory::Use(const KvSlab& slab, const Device& device) {
  const MutexLock lock(mu_);
  const auto held = held_.find(slab.number_);
  if (held == held_.end() || held->second.part->device.get() != &device) return std::nullopt;
  Numbers& by_use = held->second.part->by_use;
  by_use.splice(by_use.begin(), by_use, held->second.use);
  return held->second.kv;
}

absl::Status KvDeviceMemory::CopyToHost(KvSlab& slab) {
  const MutexLock one_at_a_time(copying_);
  std::shared_ptr<Device> device;
  DeviceMessage message;
  {
    const MutexLock lock(mu_);
    if (slab.on_host()) return absl::OkStatus();
    const Held& held = held_.at(slab.number_);  // it is somewhere
    device = held.part->device;
    message = held.kv;
  }
  ASSIGN_OR_RETURN(SlabMemory host, NewSlabMemory(slab.shape()));
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, device->NewStream(nullptr));
  ASSIGN_OR_RETURN(const BufferRef kv, stream->TakeOver(std::move(message)));
  ASSIGN_OR_RETURN(const HostCopies copies, StartSlabCopy(slab.shape(), kv, host.get(), *stream));
  for (const std::unique_ptr<HostCopy>& copy : copies) RETURN_IF_ERROR(copy->Wait());
  const MutexLock lock(mu_);
  if (!slab.on_host()) slab.SetHost(std::move(host));  // else a run that wanted its room was faster
  return absl::OkStatus();
}

void KvDeviceMemory::Forget(const KvSlab& slab) {
  DeviceMessage gone;  // freed after the lock
  const MutexLock lock(mu_);
  const auto held = held_.find(slab.number_);
  if (held != held_.end()) gone = Erase(held);
}

}  // namespace meshfill
