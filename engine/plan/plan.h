// The plan of one prefill: an immutable value, the same on every rank, that all of them act on.
#ifndef MESHFILL_ENGINE_PLAN_PLAN_H_
#define MESHFILL_ENGINE_PLAN_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "engine/mesh/placement.h"
#include "engine/mesh/traffic.h"
#include "engine/plan/plan_shape.h"
#include "engine/plan/plan_weights.h"
#include "engine/schedule/schedule.h"
#include "kernels/device.h"

namespace meshfill {

// How a plan's shapes are scheduled.
enum class ScheduleChoice {
  kAuto,    // whatever is predicted to take the least time
  kGreedy,  // Algorithm 2 of the paper
};

// Bytes that one rank sends. Those of kO count 4 bytes of LSE for each query and head.
using CommBytes = PerTraffic<int64_t>;

// What a prefill's seconds go to, as the measured speeds say. Each part is corrected by itself
// (speed_correction.h). The seconds are products + attention + (transfers − hidden) + weights + fixed.
struct PartSeconds {
  double products = 0;   // projections, MLP, LM head, and what is between them; weights that stream
  double attention = 0;  // blocks, merges, chunks reordered
  double transfers = 0;  // chunks between ranks
  double hidden = 0;     // the part of `transfers` that goes on beside blocks, work on tokens, and each other
  double weights = 0;    // what weights that workers share add
  double fixed = 0;      // whatever the prompt's length

  PartSeconds& operator+=(const PartSeconds& other) {
    products += other.products;
    attention += other.attention;
    transfers += other.transfers;
    hidden += other.hidden;
    weights += other.weights;
    fixed += other.fixed;
    return *this;
  }
  bool operator==(const PartSeconds&) const = default;
};

struct Prediction {
  double seconds = 0;            // the whole prefill
  double compute_seconds = 0;    // a rank's own
  double comm_wait_seconds = 0;  // exposed communication
  CommBytes comm_bytes;          // bytes of the rank that sends most, over all layers
  int64_t peak_bytes = 0;        // activations and weights of all ranks together
  int64_t run_bytes = 0;      // what the run takes of peak_bytes: all but the weights that are loaded anyway
  int64_t weight_bytes = 0;   // what weights take of peak_bytes
  double weight_seconds = 0;  // seconds that streamed weights add
  PartSeconds parts;
  bool operator==(const Prediction&) const = default;
};

// A shape, and what was decided for it.
struct Plan : PlanShape {
  int64_t slice_tokens = Grain().slice_tokens;  // tokens whose projections and MLP a rank computes at a time
  Placement placement;                          // empty: row-first
  Schedule schedule;
  Prediction predicted;

  int SeatOf(int rank) const;  // index in the pool of the device that runs the rank
  int RankAt(int seat) const;  // its inverse; both in time O(ranks)
  std::string DebugString() const;
  bool operator==(const Plan&) const = default;
};

// The best plan of one shape, without its schedule.
struct PlanCandidate : PlanShape {
  std::string placement;  // its name; empty: row-first
  Prediction predicted;
};

struct PlanChoice {
  Plan plan;  // a prompt in pieces: the last piece's plan, with the prediction of all
  std::vector<PlanCandidate> candidates;  // every shape that was considered for it, best first
  std::vector<Plan> pieces;  // run one after the other (engine/plan/pieces.h); none: the prompt is whole
  PlanWeights weights;       // weights that the predictions count
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_PLAN_H_
