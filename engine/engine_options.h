// What an embedded pool is made of, and what its plans choose from.
#ifndef MESHFILL_ENGINE_ENGINE_OPTIONS_H_
#define MESHFILL_ENGINE_ENGINE_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/mesh/layout.h"
#include "engine/model/layer_shape.h"
#include "engine/plan/planner.h"
#include "engine/plan/rank_speed.h"
#include "kernels/dtype.h"

namespace meshfill {

inline constexpr int kMaxHostRanks = 64;  // most ranks of one process, embedded or a worker

struct EngineOptions {
  std::string model_path;       // a Hugging Face folder
  int ranks = 1;                // 1 to kMaxHostRanks
  std::string device = "auto";  // one of DeviceNames() (platforms.h), over whose devices the ranks are spread
  std::optional<DType> dtype;   // compute dtype, f32 or bf16; default: f32 for f32 weights, else bf16
  // Default: what fits (weight_choice.h).
  std::optional<WeightMode> weights;
  bool of_worker = false;  // the ranks are a worker's of a pool, which may share its weights
  bool may_share = false;  // a worker's weights that stream are shared in runs where that is faster
  std::optional<LayoutKind> layout = LayoutKind::kStriped;  // nullopt: the planner's choice
  int64_t stripe = 64;
  std::optional<DType> partial_dtype = DType::kF32;  // dtype on the wire; nullopt: the planner's choice
  ScheduleChoice schedule = ScheduleChoice::kAuto;
  bool whole_exchanges = false;     // head groups exchange whole chunks, even where slices are faster
  double peak_flops = 0;            // sum of the ranks' peak FLOP/s; 0: measured at load
  int64_t memory_budget_bytes = 0;  // activations of one prefill; 0: 80 % of what is free after load
  // K and V that are kept. Where the ranks' memory is the host's, `kv_memory_bytes` bounds them; default: an
  // eighth of what activations may take. Else `kv_host_memory_bytes` does (default: an eighth of the host's
  // free memory after load), and `kv_memory_bytes` of them stay with the devices (default: 0), beside
  // memory_budget_bytes, or out of what is measured
  std::optional<int64_t> kv_memory_bytes;
  std::optional<int64_t> kv_host_memory_bytes;
  // Whether they serve later prompts that begin alike, those too that no client wants kept. Default: on CPUs;
  // behind GPUs, a copy that nobody asked for may slow a prefill down
  std::optional<bool> kv_cache;
  int communication_multiprocessors = 0;  // GPU multiprocessors that attention leaves to communication (NCCL)
  std::vector<int> devices = {};          // each rank's GPU, by number; empty: the first ones
  int threads = 0;                        // CPU threads of the pool; 0: one per core
  std::string speed_profile_path;  // keeps the measured speed (pool_profile.h); empty: measured at load
  bool measure_speed = false;      // measures the speed at load, whatever the profile keeps
  // The speed that plans count with, but for its slice_tokens, instead of a measured one
  std::optional<PoolSpeed> speed = std::nullopt;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_ENGINE_OPTIONS_H_
