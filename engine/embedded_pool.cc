#include "engine/embedded_pool.h"

#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/devices/free_memory.h"
#include "engine/platforms.h"
#include "engine/speed/layer_probe.h"
#include "engine/speed/pool_profile.h"
#include "engine/weight_choice.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

absl::StatusOr<std::unique_ptr<PoolDevices>> Devices(const EngineOptions& options) {
  return FindDevices(options.device, {.ranks = options.ranks,
                                      .dtype = options.dtype,
                                      .threads = options.threads,
                                      .communication_multiprocessors = options.communication_multiprocessors,
                                      .devices = options.devices});
}

// The devices by rank. `make` is called once for each device.
absl::StatusOr<std::vector<std::shared_ptr<Device>>> MakeByRank(
    const PoolDevices& hardware, int ranks,
    const std::function<absl::StatusOr<std::shared_ptr<Device>>(int device)>& make) {
  std::vector<std::shared_ptr<Device>> of_device, of_rank;
  for (int rank = 0; rank < ranks; ++rank) {
    const int device = DeviceOfRank(rank, ranks, hardware.count());
    if (device == static_cast<int>(of_device.size())) {
      ASSIGN_OR_RETURN(std::shared_ptr<Device> made, make(device));
      of_device.push_back(std::move(made));
    }
    of_rank.push_back(of_device[device]);
  }
  return of_rank;
}

absl::StatusOr<std::unique_ptr<const PeerWeights>> LoadPeers(const EmbeddedPool& pool) {
  std::vector<PeerWeights::Place> places;
  for (size_t rank = 0; rank < pool.models.size(); ++rank) {  // neighbours share a device
    const ModelTensors* const tensors = pool.models[rank]->tensors();
    if (places.empty() || places.back().tensors != tensors) {
      places.push_back({.tensors = tensors, .device = pool.devices[rank].get()});
    }
  }
  return PeerWeights::Load(places);
}

absl::StatusOr<PoolSpeed> SpeedOf(const EngineOptions& options, const ModelShape& shape,
                                  const PoolDevices& hardware, DevicesByRank devices,
                                  const PoolNotes& notes) {
  if (options.speed.has_value()) {
    PoolSpeed speed = *options.speed;
    speed.slice_tokens = SliceTokensOf(shape, devices.front()->grain());
    return speed;
  }
  const auto measure = [&] { return hardware.MeasureSpeed(shape, devices); };
  return KeptPoolSpeed(options.speed_profile_path, hardware.SpeedKey(shape, devices), options.measure_speed,
                       measure, notes);
}

absl::StatusOr<EmbeddedPoolCapacity> Capacity(const EngineOptions& options, const ModelShape& shape,
                                              const PoolDevices& hardware, DevicesByRank devices,
                                              const ChosenWeights& weights, int64_t weights_to_come,
                                              const PoolNotes& notes) {
  ASSIGN_OR_RETURN(PoolSpeed speed, SpeedOf(options, shape, hardware, devices, notes));
  const int64_t kv_device_bytes = hardware.in_host_memory() ? 0 : options.kv_memory_bytes.value_or(0);
  int64_t budget = options.memory_budget_bytes;
  if (budget <= 0) {
    ASSIGN_OR_RETURN(budget, hardware.BudgetBytes(weights_to_come));
    if (kv_device_bytes >= budget) {
      return absl::InvalidArgumentError(absl::StrCat("kv.memory_bytes is ", kv_device_bytes,
                                                     ", but the devices have ", budget,
                                                     " bytes for it and for activations; lower it"));
    }
    budget -= kv_device_bytes;
  }
  return EmbeddedPoolCapacity{.speed = speed,
                              .memory_budget_bytes = budget,
                              .kv_device_bytes = kv_device_bytes,
                              .kv_on_host = !hardware.in_host_memory(),
                              .one_memory = hardware.count() == 1,
                              .many_messages = hardware.in_host_memory(),
                              .weights = weights.plan,
                              .shared_weights = weights.shared,
                              .weight_modes = weights.modes};
}

}  // namespace

absl::StatusOr<EmbeddedPool> LoadEmbeddedPool(const EngineOptions& options, const PoolNotes& notes) {
  EmbeddedPool pool;
  ASSIGN_OR_RETURN(pool.hardware, Devices(options));
  const PoolDevices& hardware = *pool.hardware;
  const int64_t total = TotalMemoryBytes();
  if (hardware.in_host_memory() && total > 0 && options.memory_budget_bytes > total) {
    return absl::InvalidArgumentError(absl::StrCat(options.of_worker ? "pool.worker" : "pool.embedded",
                                                   ".memory_bytes is ", GibText(options.memory_budget_bytes),
                                                   ", but this machine or its container has ", GibText(total),
                                                   "; give less, or leave it out"));
  }
  std::vector<std::shared_ptr<const Model>> on_device;
  std::optional<ChosenWeights> weights;  // of all devices
  const auto load = [&](int index) -> absl::StatusOr<std::shared_ptr<Device>> {
    std::shared_ptr<Device> device;
    const auto place_for = [&](const ModelShape& shape) -> absl::StatusOr<WeightPlace> {
      if (!weights.has_value()) {
        RETURN_IF_ERROR(hardware.CheckModel(shape));
        ASSIGN_OR_RETURN(weights, ChooseWeights(options, shape, hardware));
      }
      ASSIGN_OR_RETURN(device, hardware.Make(index, shape.dtype));
      return WeightPlace(device.get(), weights->plan.mode, hardware.in_host_memory());
    };
    ASSIGN_OR_RETURN(std::shared_ptr<const Model> model,
                     Model::Load(options.model_path, hardware.dtype(), place_for));
    on_device.push_back(std::move(model));
    return device;
  };
  ASSIGN_OR_RETURN(pool.devices, MakeByRank(hardware, options.ranks, load));
  for (int rank = 0; rank < options.ranks; ++rank) {
    const int device = DeviceOfRank(rank, options.ranks, hardware.count());
    pool.device_names.push_back(hardware.DeviceName(device));
    pool.models.push_back(on_device[device]);
  }
  const ModelShape& shape = pool.models.front()->shape();
  RETURN_IF_ERROR(hardware.WarmUp(shape, pool.devices));
  const Model& model = *pool.models.front();
  if (weights->plan.mode == WeightMode::kSharded && !hardware.in_host_memory()) {
    ASSIGN_OR_RETURN(pool.peers, LoadPeers(pool));
    for (int twice = 0; twice < 2; ++twice) {  // the first takes memory for its layers, and opens the ways
      RETURN_IF_ERROR(MeasureStream(
          options, hardware, model, [&] { return pool.peers->Open(*model.tensors(), 1, false, nullptr); },
          weights->plan));
    }
  } else if (weights->plan.mode == WeightMode::kStreamed) {
    RETURN_IF_ERROR(MeasureStream(
        options, hardware, model, [&] { return model.OpenFeed(1, false, nullptr); }, weights->plan));
  }
  notes(WeightNote(weights->plan, hardware), /*warning=*/false);
  ASSIGN_OR_RETURN(pool.capacity, Capacity(options, shape, hardware, pool.devices, *weights,
                                           /*weights_to_come=*/0, notes));
  pool.peak_flops = options.peak_flops;
  if (pool.peak_flops <= 0) {
    ASSIGN_OR_RETURN(const double measured, hardware.PeakFlops(pool.devices));
    pool.peak_flops = KeptPeakFlops(options.speed_profile_path, hardware.SpeedKey(shape, pool.devices),
                                    options.measure_speed, measured);
  }
  return pool;
}

absl::StatusOr<EmbeddedPoolCapacity> CapacityWithoutWeights(const EngineOptions& options,
                                                            const ModelShape& shape) {
  ASSIGN_OR_RETURN(const std::unique_ptr<PoolDevices> hardware, Devices(options));
  const auto make = [&](int device) -> absl::StatusOr<std::shared_ptr<Device>> {
    return hardware->Make(device, shape.dtype);
  };
  ASSIGN_OR_RETURN(const std::vector<std::shared_ptr<Device>> devices,
                   MakeByRank(*hardware, options.ranks, make));
  ASSIGN_OR_RETURN(ChosenWeights weights, ChooseWeights(options, shape, *hardware));
  const bool shared_by_devices = weights.plan.mode == WeightMode::kSharded && !hardware->in_host_memory();
  if (shared_by_devices) {
    RETURN_IF_ERROR(
        MeasurePeerCopies(options, *hardware, shape, *devices.front(), *devices.back(), weights.plan));
  } else if (weights.plan.mode == WeightMode::kStreamed) {
    RETURN_IF_ERROR(MeasurePacking(options, *hardware, shape, *devices.front(), weights.plan));
  }
  // Whether the devices' weights can be divided, asked for the LM head.
  const bool divides = devices.front()->FormOf(shape.vocab, shape.hidden, {}).ok();
  if (!divides) weights.shared.reset();
  if (weights.plan.mode == WeightMode::kSharded && !shared_by_devices) {
    return Capacity(options, shape, *hardware, devices, weights, /*weights_to_come=*/0, WarnOnStandardError);
  }
  return Capacity(options, shape, *hardware, devices, weights, weights.plan.loaded_bytes,
                  WarnOnStandardError);
}

}  // namespace meshfill
