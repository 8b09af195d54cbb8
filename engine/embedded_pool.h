// What the ranks of one process compute with: their devices, the weights where these read them, and what
// both were measured to do.
//
// The ranks are spread evenly over the devices of one platform, neighbours sharing one (4 ranks on 2 devices:
// 0 0 1 1). Each device has one copy of the weights, or a share of them; each rank of a run a stream.
#ifndef MESHFILL_ENGINE_EMBEDDED_POOL_H_
#define MESHFILL_ENGINE_EMBEDDED_POOL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/devices/platform.h"
#include "engine/engine_options.h"
#include "engine/model/model.h"
#include "engine/plan/cost_model.h"
#include "engine/run/peer_weights.h"
#include "engine/speed/pool_notes.h"
#include "engine/weight_choice.h"
#include "kernels/device.h"

namespace meshfill {

// What a plan asks of a pool.
struct EmbeddedPoolCapacity {
  PoolSpeed speed;
  int64_t memory_budget_bytes = 0;  // bytes for what one prefill takes (Prediction::run_bytes)
  int64_t kv_device_bytes = 0;      // bytes for K and V that stay with devices whose memory is not the host's
  bool kv_on_host = false;          // K and V that are kept are in other memory than the ranks' (PlanShape)
  bool one_memory = true;           // false: ranks are on several devices, between which chunks are copied
  bool many_messages = false;       // between workers with such devices (PlanRequest), not within this pool
  PlanWeights weights;
  std::optional<PlanWeights> shared_weights;  // weights of runs whose workers share them; none: they cannot
  std::vector<WeightModeBytes> weight_modes;  // modes that the weights could have had
};

struct EmbeddedPool {
  std::unique_ptr<const PoolDevices> hardware;
  std::vector<std::string> device_names;             // by rank
  std::vector<std::shared_ptr<const Model>> models;  // by rank; ranks of one device share theirs
  std::vector<std::shared_ptr<Device>> devices;      // by rank; ranks of one device share it
  std::unique_ptr<const PeerWeights> peers;          // weights that the devices share; null: they do not
  EmbeddedPoolCapacity capacity;
  double peak_flops = 0;  // sum of the ranks' peak FLOP/s
};

// Errors: those of Model::Load; INVALID_ARGUMENT, too, where the device that was asked for cannot be had or
// cannot compute this model, or not with such weights; RESOURCE_EXHAUSTED where the weights do not fit, with
// the bytes they need. `notes` hears how they are held, and where the pool's speed
// comes from.
absl::StatusOr<EmbeddedPool> LoadEmbeddedPool(const EngineOptions& options,
                                              const PoolNotes& notes = WarnOnStandardError);

// Capacity of the pool that LoadEmbeddedPool would make, measured without loading weights; those that stream
// are taken to come from memory. RESOURCE_EXHAUSTED where they would not fit.
absl::StatusOr<EmbeddedPoolCapacity> CapacityWithoutWeights(const EngineOptions& options,
                                                            const ModelShape& shape);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_EMBEDDED_POOL_H_
