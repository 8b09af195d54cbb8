// What weights take of memory and of time, as plans count them.
#ifndef MESHFILL_ENGINE_PLAN_PLAN_WEIGHTS_H_
#define MESHFILL_ENGINE_PLAN_PLAN_WEIGHTS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "engine/mesh/topology.h"
#include "engine/model/layer_shape.h"

namespace meshfill {

struct Prediction;

// Bytes are of all ranks together; the ranks of a process that share weights count them once.
struct PlanWeights {
  WeightMode mode = WeightMode::kResident;
  int64_t loaded_bytes = 0;  // bytes in memory whether something runs or not
  int64_t run_bytes =
      0;  // what each run takes beside them: two layers that stream past, and what FP8 is widened into
  // Where they stream:
  double layer_seconds = 0;       // from the call for a layer until it is there, when nothing else runs
  double layer_busy_seconds = 0;  // part of layer_seconds in which the ranks' cores are busy with the load
  double head_seconds = 0;        // the same as layer_seconds for the LM head
  // The rest is for weights that workers share, and counts one worker: its largest layer, and its LM head
  int64_t layer_bytes = 0;
  int64_t head_bytes = 0;
  int64_t sent_bytes = 0;              // what one worker sends to the others in a run
  int64_t sent_head_bytes = 0;         // the part of sent_bytes that is the LM head's
  double gather_bytes_per_second = 0;  // speed of the link for shared weights, beside chunks; 0: none come

  PlanWeights Share(int64_t ranks, int64_t of) const;  // what `ranks` of `of` ranks have of these
  PlanWeights WithoutHead() const;                     // weights of a run whose logits nobody needs
  bool operator==(const PlanWeights&) const = default;
};

// What a process would need of memory for weights held so, one prefill's layers included.
struct WeightModeBytes {
  WeightMode mode;
  int64_t bytes;
  bool fits;           // they fit in what is free now
  double seconds = 0;  // predicted with the weights held so; 0: no plan was made
  // For GPUs that are not here, of a node's host: streamed weights, and K and V that stay; 0: none are known.
  int64_t host_bytes = 0;
  int64_t host_memory_bytes = 0;  // what that host has for them; 0: not bounded

  bool fits_host() const;
};

// Weights that `workers` workers share, of all together: each keeps an equal part, and gathers the others' by
// `link`. `one` is what a worker offers: all the weights, what its runs take, and how long it takes to send
// and receive as much as a layer, whatever the link.
PlanWeights SharedAmong(const PlanWeights& one, int workers, const Link& link);
// What each of them keeps, 256 bytes of each part more or less.
int64_t ShareBytes(const PlanWeights& one, int workers);

// The same for every process of a pool: what the one that needs most, and longest, does.
PlanWeights MostOf(const PlanWeights& left, const PlanWeights& right);

// INVALID_ARGUMENT names the number that is negative or not finite.
absl::Status CheckPlanWeights(const PlanWeights& weights);

// Adds them to the prediction of a run's compute, communication and activations. A layer comes while the one
// before it is computed: the first is waited for, a later one as far as its coming takes longer than that
// layer. It takes cores from it, too; and where it is gathered, half of the link while chunks are on it.
void CountWeights(const PlanWeights& weights, int layers, Prediction& predicted);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_PLAN_WEIGHTS_H_
