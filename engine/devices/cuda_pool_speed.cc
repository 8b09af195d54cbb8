#include <chrono>
#include <utility>

#include "engine/devices/cuda_pool.h"
#include "engine/speed/pool_speed.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Bytes per second from one device to another.
absl::StatusOr<double> MeasureLink(Backend& from, Backend& to) {
  constexpr size_t kBytes = size_t{64} << 20;
  constexpr int kRuns = 3;
  ASSIGN_OR_RETURN(BufferRef chunk, from.Allocate(kBytes));
  std::chrono::steady_clock::time_point start;
  for (int run = -1; run < kRuns; ++run) {  // the first opens the way
    if (run == 0) start = std::chrono::steady_clock::now();
    ASSIGN_OR_RETURN(DeviceMessage message, to.Fetch({chunk, from.Mark()}));
    ASSIGN_OR_RETURN(BufferRef taken, to.TakeOver(std::move(message)));
    RETURN_IF_ERROR(to.Finish());
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
    RETURN_IF_ERROR(RunEachOperation(shape, *backends[rank]));
  }
  return absl::OkStatus();
}

absl::StatusOr<PoolSpeed> MeasureCudaPoolSpeed(const ModelShape& shape, std::span<const CudaDevice> devices,
                                               std::span<const std::unique_ptr<Backend>> backends) {
  const int ranks = static_cast<int>(backends.size());
  int on_first = 1;
  while (on_first < ranks && CudaDeviceOf(devices, on_first, ranks).ordinal == devices[0].ordinal) ++on_first;
  ASSIGN_OR_RETURN(PoolSpeed speed, MeasurePoolSpeed(shape, *backends.front(), on_first));
  if (on_first == ranks) return speed;
  ASSIGN_OR_RETURN(double link, MeasureLink(*backends[0], *backends[on_first]));
  speed.link_bytes_per_second = link;
  return speed;
}

}  // namespace meshfill
