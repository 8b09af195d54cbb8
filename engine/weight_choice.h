// How the weights of a pool's ranks in this process are held: what fits, what was chosen, what it takes.
#ifndef MESHFILL_ENGINE_WEIGHT_CHOICE_H_
#define MESHFILL_ENGINE_WEIGHT_CHOICE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/devices/platform.h"
#include "engine/engine_options.h"
#include "engine/model/model.h"
#include "engine/plan/plan_weights.h"

namespace meshfill {

struct ChosenWeights {
  PlanWeights plan;  // where they stream: without seconds
  std::optional<PlanWeights>
      shared;  // in runs whose workers share what they would stream; none: they may not
  std::vector<WeightModeBytes> modes;  // the modes that the devices can do
};

// INVALID_ARGUMENT: the options ask for what the devices cannot. RESOURCE_EXHAUSTED: the weights do not fit
// the devices' memory so; the message has the bytes, and what would.
absl::StatusOr<ChosenWeights> ChooseWeights(const EngineOptions& options, const ModelShape& shape,
                                            const PoolDevices& hardware);

// "the weights are sharded, among 8 GPUs: 25.1 GiB of memory, and 2.0 GiB for each prefill".
std::string WeightNote(const PlanWeights& weights, const PoolDevices& hardware);

// Whether weights may take so much where nobody says how they are held: where they leave a fifth of what is
// free, or the budget that prefills were given, and where they are a tenth of what is free or less.
// `free_bytes` 0: not known. `memory_budget_bytes` 0: none was given.
bool LeaveRoom(int64_t weight_bytes, int64_t free_bytes, int64_t memory_budget_bytes);

// The seconds of weights that stream, or that devices share: of the first layer of a model, taken from a feed
// as a run would. Where there are no files: of packing alone, or of copies from one device to another.
absl::Status MeasureStream(const EngineOptions& options, const PoolDevices& hardware, const Model& model,
                           const std::function<std::unique_ptr<WeightFeed>()>& open, PlanWeights& weights);
absl::Status MeasurePeerCopies(const EngineOptions& options, const PoolDevices& hardware,
                               const ModelShape& shape, Device& to, Device& from, PlanWeights& weights);
absl::Status MeasurePacking(const EngineOptions& options, const PoolDevices& hardware,
                            const ModelShape& shape, Device& device, PlanWeights& weights);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_WEIGHT_CHOICE_H_
