#include "engine/weight_choice.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "engine/comm/checksum.h"
#include "engine/devices/free_memory.h"
#include "engine/model/layer_shape.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

constexpr absl::Duration kFirstReadTimeout = absl::Seconds(60);

// Seconds of the clock, and of the processor for this process.
struct Instant {
  std::chrono::steady_clock::time_point wall = std::chrono::steady_clock::now();
  double busy_seconds = static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
};

// Sets the seconds of weights from the time that `sample_bytes` have taken since `begin`. `on_ranks_cores`:
// it was taken from cores that ranks compute on.
void SetSeconds(const WeightBytes& bytes, double sample_bytes, const Instant& begin,
                const EngineOptions& options, bool on_ranks_cores, PlanWeights& weights) {
  const Instant end;
  const double cores =
      options.threads > 0 ? options.threads : std::max(1u, std::thread::hardware_concurrency());
  const double scale = static_cast<double>(bytes.most_layer) / sample_bytes;
  weights.layer_seconds = scale * std::chrono::duration<double>(end.wall - begin.wall).count();
  const double busy = on_ranks_cores ? scale * (end.busy_seconds - begin.busy_seconds) / cores : 0;
  weights.layer_busy_seconds = std::min(weights.layer_seconds, busy);
  weights.head_seconds =
      weights.layer_seconds * static_cast<double>(bytes.head) / static_cast<double>(bytes.most_layer);
}

// Whether the devices of this process share weights, where those are sharded: else the workers of a pool do.
bool DevicesShare(const PoolDevices& hardware) { return !hardware.in_host_memory(); }

absl::Status CheckWeightMode(const EngineOptions& options, const PoolDevices& hardware) {
  if (options.weights != WeightMode::kSharded) return absl::OkStatus();
  if (DevicesShare(hardware)) {
    if (hardware.count() > 1) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("model.weights is sharded, and this process has one ", hardware.DeviceName(0),
                     ", which has nobody to share with; set resident, streamed or auto, or give it more"));
  }
  if (options.of_worker) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "model.weights is sharded, which is for the workers of a pool and for GPUs; the ranks of one process "
      "have one copy of the weights together: set resident, streamed or auto");
}

// The seconds of weights that workers share: of a thread that sends and receives as much as a layer.
void MeasureSharing(const EngineOptions& options, const WeightBytes& bytes, PlanWeights& weights) {
  constexpr size_t kSample = size_t{16} << 20;
  std::vector<std::byte> from(kSample, std::byte{1}), to(kSample);
  const Instant begin;
  uint64_t sums = 0;
  for (int pass = 0; pass < 2; ++pass) sums += Checksum(from.data(), kSample);  // what leaves, and what comes
  for (int pass = 0; pass < 3; ++pass) {  // into the socket, out of it, to its place
    std::memcpy(to.data(), from.data(), kSample);
    from[pass] = static_cast<std::byte>(sums);
  }
  SetSeconds(bytes, static_cast<double>(kSample), begin, options, /*on_ranks_cores=*/true, weights);
}

}  // namespace

std::string WeightNote(const PlanWeights& weights, const PoolDevices& hardware) {
  const bool sharded = weights.mode == WeightMode::kSharded,
             among_devices = sharded && DevicesShare(hardware);
  std::string memory;
  if (weights.loaded_bytes > 0) {
    memory = absl::StrCat(sharded && !among_devices ? "a part of " : "", GibText(weights.loaded_bytes),
                          " of memory");
  }
  if (weights.run_bytes > 0) {
    absl::StrAppend(&memory, memory.empty() ? "" : ", and ", GibText(weights.run_bytes),
                    memory.empty() ? " of memory" : "", " for each prefill");
  }
  return absl::StrCat("the weights are ", WeightModeName(weights.mode),
                      among_devices ? absl::StrCat(", among ", hardware.count(), " GPUs")
                      : sharded     ? ", among the pool's workers"
                                    : "",
                      ": ", memory);
}

bool LeaveRoom(int64_t weight_bytes, int64_t free_bytes, int64_t memory_budget_bytes) {
  const int64_t spare = memory_budget_bytes > 0 ? memory_budget_bytes : free_bytes / 5;
  return free_bytes == 0 || weight_bytes <= std::max(free_bytes - spare, free_bytes / 10);
}

absl::StatusOr<ChosenWeights> ChooseWeights(const EngineOptions& options, const ModelShape& shape,
                                            const PoolDevices& hardware) {
  RETURN_IF_ERROR(CheckWeightMode(options, hardware));
  const WeightBytes bytes = WeightBytesOf(shape, hardware.WeightDType(shape.dtype));
  const int64_t copies = hardware.count();
  const int64_t widened = options.ranks * hardware.WidenedBytes(shape);
  // Where the ranks compute in the host's memory, the table's rows are read from the file.
  const int64_t table = hardware.in_host_memory() ? 0 : bytes.embedding;
  const PlanWeights resident{.loaded_bytes = copies * (bytes.layers + bytes.head + table),
                             .run_bytes = widened};
  const PlanWeights streamed{.mode = WeightMode::kStreamed,
                             .loaded_bytes = copies * table,
                             .run_bytes = copies * kPartsAhead * bytes.most_layer + widened};
  const bool devices_share = DevicesShare(hardware) && copies > 1;
  PlanWeights sharded{.mode = WeightMode::kSharded,
                      .loaded_bytes = bytes.layers + bytes.head,
                      .run_bytes = kPartsAhead * bytes.most_layer + widened};
  if (devices_share) {
    sharded.loaded_bytes += copies * table;
    sharded.run_bytes = streamed.run_bytes;
  } else {  // a worker's share is not known before the pool is: the leader counts it
    sharded.layer_bytes = bytes.most_layer;
    sharded.head_bytes = bytes.head;
  }
  ASSIGN_OR_RETURN(const int64_t free_of_each, hardware.FreeBytes());
  const int64_t free = copies * free_of_each;
  const auto fits = [free](int64_t needed) { return free == 0 || needed <= free; };
  const auto leave_room = [&](const PlanWeights& weights) {
    return LeaveRoom(weights.loaded_bytes, free, options.memory_budget_bytes);
  };
  const WeightMode mode =
      options.weights.value_or(leave_room(resident)                   ? WeightMode::kResident
                               : devices_share && leave_room(sharded) ? WeightMode::kSharded
                                                                      : WeightMode::kStreamed);
  const bool may_share = options.may_share && mode == WeightMode::kStreamed && !DevicesShare(hardware);
  if (may_share || (mode == WeightMode::kSharded && !devices_share)) {
    MeasureSharing(options, bytes, sharded);
  }
  const PlanWeights& chosen = mode == WeightMode::kResident   ? resident
                              : mode == WeightMode::kStreamed ? streamed
                                                              : sharded;
  const auto needs = [&](const PlanWeights& weights) {
    const bool counts_loaded = weights.mode != WeightMode::kSharded || devices_share;
    return weights.run_bytes + (counts_loaded ? weights.loaded_bytes : 0);
  };
  if (fits(needs(chosen))) {
    std::vector<WeightModeBytes> modes = {
        {WeightMode::kResident, resident.loaded_bytes, fits(resident.loaded_bytes)}};
    if (devices_share) modes.push_back({WeightMode::kSharded, needs(sharded), fits(needs(sharded))});
    modes.push_back({WeightMode::kStreamed, needs(streamed), fits(needs(streamed))});
    return ChosenWeights{.plan = chosen,
                         .shared = may_share ? std::optional(sharded) : std::nullopt,
                         .modes = std::move(modes)};
  }
  const bool would_stream = mode != WeightMode::kStreamed && fits(needs(streamed));
  return absl::ResourceExhaustedError(absl::StrCat(
      hardware.in_host_memory() ? "" : absl::StrCat(hardware.DeviceName(0), ": "), "the weights need ",
      GibText(needs(chosen)), " of memory ", WeightModeName(mode), ", and ", GibText(free), " are free; ",
      would_stream ? absl::StrCat("set model.weights to streamed, which needs ", GibText(needs(streamed)))
                   : absl::StrCat("use a ", hardware.in_host_memory() ? "machine" : "GPU", " with more")));
}

absl::Status MeasureStream(const EngineOptions& options, const PoolDevices& hardware, const Model& model,
                           const std::function<std::unique_ptr<WeightFeed>()>& open, PlanWeights& weights) {
  const DType packed = hardware.WeightDType(model.shape().dtype);
  const Instant begin;
  const std::unique_ptr<WeightFeed> feed = open();
  RETURN_IF_ERROR(feed->Take(0, 0, kFirstReadTimeout).status());
  const LayerShape first = LayerShapeOf(model.shape(), model.config().layers.front());
  SetSeconds(WeightBytesOf(model.shape(), packed), static_cast<double>(LayerMatrixBytes(first, packed)),
             begin, options, hardware.in_host_memory(), weights);
  return absl::OkStatus();
}

absl::Status MeasurePeerCopies(const EngineOptions& options, const PoolDevices& hardware,
                               const ModelShape& shape, Device& to, Device& from, PlanWeights& weights) {
  constexpr size_t kSample = size_t{64} << 20;
  BufferCopy copy;
  ASSIGN_OR_RETURN(copy.from, from.Allocate(kSample));
  ASSIGN_OR_RETURN(copy.to, to.Allocate(kSample));
  RETURN_IF_ERROR(to.Copy({&copy, 1}));  // opens the way
  const Instant begin;
  RETURN_IF_ERROR(to.Copy({&copy, 1}));
  SetSeconds(WeightBytesOf(shape, hardware.WeightDType(shape.dtype)), static_cast<double>(kSample), begin,
             options, hardware.in_host_memory(), weights);
  return absl::OkStatus();
}

absl::Status MeasurePacking(const EngineOptions& options, const PoolDevices& hardware,
                            const ModelShape& shape, Device& device, PlanWeights& weights) {
  constexpr int64_t kWidth = 2048;
  const std::vector<float> zeros(kWidth * kWidth);
  const WeightRows rows{.data = zeros.data(), .dtype = device.dtype(), .rows = kWidth};
  RETURN_IF_ERROR(device.PackWeight({&rows, 1}, kWidth).status());  // begins its threads
  const Instant begin;
  RETURN_IF_ERROR(device.PackWeight({&rows, 1}, kWidth).status());
  const DType packed = hardware.WeightDType(shape.dtype);
  SetSeconds(WeightBytesOf(shape, packed), static_cast<double>(kWidth * kWidth * DTypeBytes(packed)), begin,
             options, hardware.in_host_memory(), weights);
  return absl::OkStatus();
}

}  // namespace meshfill
