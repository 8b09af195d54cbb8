#include <chrono>
#include <utility>

#include "engine/devices/cuda_pool.h"
#include "engine/speed/pool_speed.h"

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

absl::Status LoadCudaKernels(const ModelShape& shape, std::span<const CudaDevice> devices,
                             std::span<const std::unique_ptr<Backend>> backends) {
  const int ranks = static_cast<int>(backends.size());
  for (int rank = 0; rank < ranks; ++rank) {
    const bool first_there = rank == 0 || CudaDeviceOf(devices, rank, ranks).ordinal !=
                                              CudaDeviceOf(devices, rank - 1, ranks).ordinal;
    if (!first_there) continue;
    if (absl::Status status = RunEachOperation(shape, *backends[rank]); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<PoolSpeed> MeasureCudaPoolSpeed(const ModelShape& shape, std::span<const CudaDevice> devices,
                                               std::span<const std::unique_ptr<Backend>> backends) {
  const int ranks = static_cast<int>(backends.size());
  int on_first = 1;
  while (on_first < ranks && CudaDeviceOf(devices, on_first, ranks).ordinal == devices[0].ordinal) ++on_first;
  absl::StatusOr<PoolSpeed> speed = MeasurePoolSpeed(shape, *backends.front(), on_first);
  if (!speed.ok()) return speed;
  if (on_first == ranks) return speed;
  absl::StatusOr<double> link = MeasureLink(*backends[0], *backends[on_first]);
  if (!link.ok()) return link.status();
  speed->link_bytes_per_second = *link;
  return speed;
}

}  // namespace meshfill
