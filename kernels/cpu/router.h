// Which experts each token goes to, and where its rows lie (kernels/experts.h): Stream::Route in two parts.
#ifndef MESHFILL_KERNELS_CPU_ROUTER_H_
#define MESHFILL_KERNELS_CPU_ROUTER_H_

#include <cstdint>

#include "kernels/experts.h"

namespace meshfill {

// Chooses the experts of tokens [begin, end): writes rows.weight, and to rows.row the number of each chosen
// expert. Any thread.
void ChooseExperts(const RouteArgs& args, int64_t begin, int64_t end);

// Sorts the rows of all tokens, whose experts have been chosen: writes begin, token and row, and counts each
// expert's tokens.
void SortRowsByExpert(const RouteArgs& args);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_ROUTER_H_
