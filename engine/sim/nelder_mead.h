// Minimises a function of a few variables without derivatives (Nelder and Mead, 1965).
#ifndef MESHFILL_ENGINE_SIM_NELDER_MEAD_H_
#define MESHFILL_ENGINE_SIM_NELDER_MEAD_H_

#include <functional>
#include <vector>

namespace meshfill::sim {

struct Minimum {
  std::vector<double> at;
  double value = 0;
};

// Starts from a simplex of `start` and one vertex `step` away along each axis. Ends when all vertices agree
// within `tolerance` in every variable, or after `max_evaluations`. Deterministic.
Minimum NelderMead(const std::function<double(const std::vector<double>&)>& function,
                   std::vector<double> start, double step, double tolerance = 1e-6,
                   int max_evaluations = 2000);

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_NELDER_MEAD_H_
