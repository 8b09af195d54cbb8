#include <chrono>
#include <utility>

#include "engine/cuda_pool.h"
#include "engine/pool_speed.h"

namespace meshfill {
namespace {

// Bytes per second from one device to another.
absl::StatusOr<double> MeasureLink(Backend& from, Backend& to) {
  constexpr size_t kBytes = size_t{64} << 20;
  constexpr int kRuns = 3;
  absl::StatusOr<BufferRef> chunk = from.Allocate(kBytes);
  if (!chunk.ok()) return chunk.status();
  std::chrono::steady_clock::time_point start;
  for (int run = -1; run < kRuns; ++run) {  // the first opens the way
    if (run == 0) start = std::chrono::steady_clock::now();
    absl::StatusOr<DeviceMessage> message = to.Fetch({*chunk, from.Mark()});
    if (!message.ok()) return message.status();
    absl::StatusOr<BufferRef> taken = to.TakeOver(*std::move(message));
    if (!taken.ok()) return taken.status();
    if (absl::Status status = to.Finish(); !status.ok()) return status;
  }
  return kRuns * static_cast<double>(kBytes) /
         std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

absl::StatusOr<PoolSpeed> MeasureCudaPoolSpeed(const ModelShape& shape, std::span<const CudaDevice> devices,
                                               std::span<const std::unique_ptr<Backend>> backends) {
  const int ranks = static_cast<int>(backends.size());
  std::vector<Backend*> together;
  while (static_cast<int>(together.size()) < ranks &&
         CudaDeviceOf(devices, static_cast<int>(together.size()), ranks).ordinal == devices[0].ordinal) {
    together.push_back(backends[together.size()].get());
  }
  const int on_first = static_cast<int>(together.size());
  absl::StatusOr<PoolSpeed> speed = MeasurePoolSpeed(shape, together, on_first);
  if (!speed.ok()) return speed;
  speed->lone_rank_speedup = on_first;
  if (on_first == ranks) return speed;
  absl::StatusOr<double> link = MeasureLink(*backends[0], *backends[on_first]);
  if (!link.ok()) return link.status();
  speed->link_bytes_per_second = *link;
  return speed;
}

}  // namespace meshfill
