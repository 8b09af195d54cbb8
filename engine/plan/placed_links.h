// Where the ranks of a shape may sit, and what that makes of its links.
#ifndef MESHFILL_ENGINE_PLAN_PLACED_LINKS_H_
#define MESHFILL_ENGINE_PLAN_PLACED_LINKS_H_

#include <vector>

#include "engine/mesh/mesh.h"
#include "engine/mesh/placement.h"
#include "engine/mesh/topology.h"
#include "engine/plan/plan_request.h"
#include "engine/plan/rank_speed.h"

namespace meshfill {

struct PlacedLinks {
  Placement placement;
  int kv_inner = 0;
  Links links;

  bool NoFasterThan(const PlacedLinks& other) const;  // both of one KV ring
};

// Ranks in the order of the seats.
PlacedLinks RowFirstLinks(const PoolSpeed& speed, const PlanRequest& request, int heads, Tile tile);

// The boxes that may be faster than that, and than each other.
std::vector<PlacedLinks> BoxedLinks(const PlanRequest& request, int heads, Tile tile,
                                    const PlacedLinks& row_first);

// Ranks of a KV group that share the first one's node, side by side.
int KvRanksInANode(const Topology& topology, int heads, Tile tile, const Placement& placement);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_PLACED_LINKS_H_
