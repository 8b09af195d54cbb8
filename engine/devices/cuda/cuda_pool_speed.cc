#include "engine/devices/cuda/cuda_pool_speed.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "engine/speed/pool_speed.h"
#include "kernels/return_if_error.h"
#include "kernels/stream.h"

namespace meshfill {
namespace {

// Bytes per second from one device to another.
absl::StatusOr<double> MeasureLink(Device& first, Device& second) {
  constexpr size_t kBytes = size_t{64} << 20;
  constexpr int kRuns = 3;
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> from, first.NewStream(nullptr));
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> to, second.NewStream(nullptr));
  ASSIGN_OR_RETURN(BufferRef chunk, from->Allocate(kBytes));
  std::chrono::steady_clock::time_point start;
  for (int run = -1; run < kRuns; ++run) {  // the first opens the way
    if (run == 0) start = std::chrono::steady_clock::now();
    ASSIGN_OR_RETURN(std::shared_ptr<const StreamPoint> ready, from->Mark());
    ASSIGN_OR_RETURN(DeviceMessage message, to->Fetch({chunk, std::move(ready)}));
    ASSIGN_OR_RETURN(BufferRef taken, to->TakeOver(std::move(message)));
    RETURN_IF_ERROR(to->Finish());
  }
  return kRuns * static_cast<double>(kBytes) /
         std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// What the probe, which knows no more than a model's shape, leaves out: each on one row.
absl::Status RunOtherOperations(const ModelShape& shape, Stream& stream) {
  const int64_t width = shape.experts.width;
  const std::vector<float> zeros(std::max({shape.hidden, int64_t{shape.head_dim}, 2 * width}));
  const size_t size_bytes = zeros.size() * sizeof(float);
  ASSIGN_OR_RETURN(const BufferRef x, stream.Place(zeros.data(), size_bytes));
  ASSIGN_OR_RETURN(const BufferRef y, stream.Place(zeros.data(), size_bytes));
  RETURN_IF_ERROR(stream.Scale(x->data<float>(), shape.hidden, 1));
  RETURN_IF_ERROR(stream.ApplySinks({.o = x->data<float>(),
                                     .lse = y->data<float>(),
                                     .sinks = y->data<float>(),
                                     .heads = 1,
                                     .tokens = 1,
                                     .head_dim = shape.head_dim}));
  if (width > 0) {
    RETURN_IF_ERROR(stream.Activate({.activation = {.gating = Gating::kClampedSwiGlu, .alpha = 1, .limit = 1},
                                     .x = x->data(),
                                     .tokens = 1,
                                     .width = width,
                                     .y = y->data()}));
  }
  return stream.Finish();
}

}  // namespace

absl::Status LoadCudaKernels(const ModelShape& shape, DevicesByRank devices) {
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    if (rank > 0 && devices[rank] == devices[rank - 1]) continue;
    ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, devices[rank]->NewStream(nullptr));
    RETURN_IF_ERROR(RunEachOperation(shape, *stream));
    RETURN_IF_ERROR(RunOtherOperations(shape, *stream));
  }
  return absl::OkStatus();
}

absl::StatusOr<PoolSpeed> MeasureCudaPoolSpeed(const ModelShape& shape, DevicesByRank devices) {
  const int ranks = static_cast<int>(devices.size());
  int on_first = 1;
  while (on_first < ranks && devices[on_first] == devices[0]) ++on_first;
  ASSIGN_OR_RETURN(PoolSpeed speed, MeasurePoolSpeed(shape, *devices[0], /*streams=*/1, on_first));
  if (on_first == ranks) return speed;
  ASSIGN_OR_RETURN(double link, MeasureLink(*devices[0], *devices[on_first]));
  speed.link_bytes_per_second = link;
  return speed;
}

}  // namespace meshfill
