// How much of the all-to-alls of head groups (engine/run/head_exchange.h) the work on tokens leaves exposed,
// where it goes on in slices. S = 3, of a rank and of its port, with b, c, f a slice's arrival, work and
// leaving:
//
//     rank   ▒▒ c0 c1 c2 ▒▒▒▒▒▒        ▒ waits: for the first slice to arrive, and for the last to leave
//     port   b0 b1 b2 f0 f1 f2         b comes first: all slices of O are ready when attention is over
#ifndef MESHFILL_ENGINE_PLAN_EXPOSED_EXCHANGE_H_
#define MESHFILL_ENGINE_PLAN_EXPOSED_EXCHANGE_H_

#include <algorithm>

namespace meshfill {

// What crosses a rank's port between two layers' attention, in seconds; slices are taken to be equal.
struct ExchangeSeconds {
  int slices = 1;
  double arrives = 0;  // a slice of attention's outputs
  double prefix = 0;   // K and V of cached tokens, of all: behind the outputs
  double leaves = 0;   // a slice of Q, K and V
};

struct ExposedSeconds {
  double to_tokens = 0;  // before a slice's work
  double to_heads = 0;   // after the last one's
};

// Beside `work` seconds of all slices. The last slices' ends are the largest of what is linear in the slice's
// number, so that the first and the last slice tell.
inline ExposedSeconds ExposedOf(const ExchangeSeconds& exchange, double work) {
  const auto& [slices, arrives, prefix, leaves] = exchange;
  const double slice = work / slices;
  const double worked = std::max(arrives + work, slices * arrives + slice);
  const double port_free = slices * arrives + prefix;
  const double end =
      std::max(std::max(arrives + slice, port_free) + slices * leaves, std::max(worked, port_free) + leaves);
  return {.to_tokens = worked - work, .to_heads = end - worked};
}

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_EXPOSED_EXCHANGE_H_
