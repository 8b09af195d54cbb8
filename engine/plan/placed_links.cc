#include "engine/plan/placed_links.h"

#include <algorithm>
#include <utility>

namespace meshfill {
namespace {

// The slower one of those that both rings have.
const Link& SharedLink(const Links& links, Traffic traffic) {
  const Link& port = links.shared_port[traffic];
  return port == Link{} ? links.shared_inside[traffic] : port;
}

}  // namespace

bool PlacedLinks::NoFasterThan(const PlacedLinks& other) const {
  const auto slower = [](const Link& link, const Link& than) {
    return link.latency_seconds >= than.latency_seconds && link.bytes_per_second <= than.bytes_per_second;
  };
  return std::all_of(kPrefillTraffics.begin(), kPrefillTraffics.end(), [&](Traffic traffic) {
    return slower(links[traffic], other.links[traffic]) &&
           slower(SharedLink(links, traffic), SharedLink(other.links, traffic));
  });
}

PlacedLinks RowFirstLinks(const PoolSpeed& speed, const PlanRequest& request, int heads, Tile tile) {
  PlacedLinks placed;
  const bool placed_nowhere = request.topology.node_of_seat.empty();
  placed.links = placed_nowhere ? Links(Links::Alike(speed.link()))
                                : LinksOf(request.topology, heads, tile, RowFirst(request.ranks));
  return placed;
}

int KvRanksInANode(const Topology& topology, int heads, Tile tile, const Placement& placement) {
  const Grid grid = MeshGrid(heads, tile);
  const auto node = [&](int y) { return topology.node_of_seat[placement.seat_of_rank[grid.Rank(0, y, 0)]]; };
  int ranks = 1;
  while (ranks < tile.b && node(ranks) == node(0)) ++ranks;
  return ranks;
}

std::vector<PlacedLinks> BoxedLinks(const PlanRequest& request, int heads, Tile tile,
                                    const PlacedLinks& row_first) {
  std::vector<PlacedLinks> kept;
  const int seats_per_node = SeatsPerNode(request.topology, request.ranks);
  for (Placement& placement : PlacementsOf(MeshGrid(heads, tile), seats_per_node)) {
    PlacedLinks placed;
    placed.placement = std::move(placement);
    placed.links = LinksOf(request.topology, heads, tile, placed.placement);
    const auto no_better = [&](const PlacedLinks& other) { return placed.NoFasterThan(other); };
    if (no_better(row_first) || std::any_of(kept.begin(), kept.end(), no_better)) continue;
    std::erase_if(kept, [&](const PlacedLinks& other) { return other.NoFasterThan(placed); });
    kept.push_back(std::move(placed));
  }
  return kept;
}

}  // namespace meshfill
