// A kind of device that ranks compute on ("cpu", "cuda"): which of them this machine has, and what a pool of
// ranks asks of them. The folder engine/devices/<name>/ has all that the engine knows of a backend;
// engine/platforms.cc names it.
//
//     Platform ──Find──► PoolDevices ──Make──► Device, of neighbouring ranks ──► Stream, of one rank of a run
#ifndef MESHFILL_ENGINE_DEVICES_PLATFORM_H_
#define MESHFILL_ENGINE_DEVICES_PLATFORM_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/comm/data_plane.h"
#include "engine/model/model_shape.h"
#include "engine/plan/cost_model.h"
#include "kernels/device.h"
#include "kernels/dtype.h"
#include "kernels/kernel_bench.h"

namespace meshfill {

// What a pool looks for.
struct DeviceRequest {
  int ranks = 1;                          // ≥ 1, spread over the devices
  std::optional<DType> dtype;             // to compute in; nullopt: open
  int threads = 0;                        // CPU threads of the pool; 0: one per core
  int communication_multiprocessors = 0;  // GPU multiprocessors that attention leaves to communication
  std::vector<int> devices = {};          // by number, one for each rank; empty: the first ones
};

using DevicesByRank = std::span<const std::shared_ptr<Device>>;

// The device of a rank: the ranks are spread evenly, and neighbours share one (3 ranks on 2 devices: 0 0 1).
inline int DeviceOfRank(int rank, int ranks, int devices) { return rank * devices / ranks; }

// The devices that the ranks of one pool use. Immutable, thread-safe.
class PoolDevices {
 public:
  virtual ~PoolDevices() = default;

  virtual int count() const = 0;                         // 1 to the request's ranks
  virtual std::string DeviceName(int device) const = 0;  // for an operator: "cpu", "NVIDIA H100 80GB HBM3"
  virtual std::optional<DType> dtype() const = 0;  // the ranks' compute dtype; nullopt: the weights' own
  // True: the ranks' memory is the host's. False: what is kept for clients is copied to the host.
  virtual bool in_host_memory() const = 0;

  // INVALID_ARGUMENT: a model that the devices do not compute.
  virtual absl::Status CheckModel(const ModelShape& shape) const = 0;
  virtual absl::StatusOr<std::unique_ptr<Device>> Make(int device, DType dtype) const = 0;
  // What the weights' matrices are held in, for ranks that compute in `dtype`.
  virtual DType WeightDType(DType dtype) const = 0;
  // Bytes that a rank's products take at most to widen weights in FP8 and MXFP4.
  virtual int64_t WidenedBytes(const ModelShape& shape) const = 0;
  // Bytes that each device has free at least, before there are weights; 0: not known.
  virtual absl::StatusOr<int64_t> FreeBytes() const = 0;
  // Once, when the devices have their weights: takes what later runs take at their first use.
  virtual absl::Status WarmUp(const ModelShape& shape, DevicesByRank devices) const = 0;

  // All that the measured speed depends on (PoolKey).
  virtual std::string SpeedKey(const ModelShape& shape, DevicesByRank devices) const = 0;
  // Measures while nothing else runs; takes some tenths of a second.
  virtual absl::StatusOr<PoolSpeed> MeasureSpeed(const ModelShape& shape, DevicesByRank devices) const = 0;
  // FLOP/s of all devices together, against which MFU is stated.
  virtual absl::StatusOr<double> PeakFlops(DevicesByRank devices) const = 0;
  // Bytes that the activations of one prefill may take, of all ranks together: a part of what is free
  // now, less the weights that are yet to come. A plan gives each rank an equal part of them, which the
  // rank's device has, beside the parts of the other ranks there.
  virtual absl::StatusOr<int64_t> BudgetBytes(int64_t weights_to_come) const = 0;

  // The first device's own kernels on random inputs. Errors name the option that it cannot do.
  virtual absl::StatusOr<KernelBenchResult> BenchAttention(const AttentionBenchOptions& options) const = 0;
  virtual absl::StatusOr<KernelBenchResult> BenchGemm(const GemmBenchOptions& options) const = 0;

  // How the ranks reach those of other processes. INVALID_ARGUMENT: more ranks than it connects, or
  // it cannot encrypt.
  virtual absl::StatusOr<std::unique_ptr<DataPlane>> MakeDataPlane(const DataPlaneOptions& options) const = 0;
};

class Platform {
 public:
  virtual ~Platform() = default;
  virtual std::string name() const = 0;  // as a person asks for it: "cuda"

  // The devices for the ranks of a pool. FAILED_PRECONDITION: this machine has none for this request; the
  // message says why and what to do. INVALID_ARGUMENT: the request is wrong for the devices that there are.
  virtual absl::StatusOr<std::unique_ptr<PoolDevices>> Find(const DeviceRequest& request) const = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_DEVICES_PLATFORM_H_
