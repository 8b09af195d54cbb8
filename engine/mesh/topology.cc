#include "engine/mesh/topology.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "absl/strings/str_cat.h"
#include "engine/mesh/flows.h"

namespace meshfill {
namespace {

// The slowest of the links that the flows use.
Link Slowest(const Flows& flows, const Topology& topology) {
  Link link;
  if (flows.inside()) link = topology.same_node;
  if (flows.most() == 0) return link;
  const Link& between = topology.between_nodes;
  return {.latency_seconds = std::max(link.latency_seconds, between.latency_seconds),
          .bytes_per_second = std::min({link.bytes_per_second, between.bytes_per_second,
                                        topology.node_bytes_per_second / flows.most()})};
}

// The same in groups of `heads` side by side, all groups at once. `at_once`: by node, whether a rank there
// sends to all at once; others send to one after the other.
Link AllToAllLink(const Topology& topology, int heads, const std::vector<int>& node_of_rank,
                  const std::vector<bool>& at_once) {
  if (heads == 1) return {};
  std::vector<int64_t> out(at_once.size(), 0);  // messages
  std::vector<int> members(at_once.size(), 0);  // ranks of the present head group on each node
  const Link& between = topology.between_nodes;
  double alone = 0;  // seconds by byte of one message, of the slowest rank, with its node's port for itself
  bool leaves = false;
  for (size_t first = 0; first < node_of_rank.size(); first += heads) {
    const auto group = node_of_rank.begin() + static_cast<ptrdiff_t>(first);
    for (int i = 0; i < heads; ++i) ++members[group[i]];
    for (int i = 0; i < heads; ++i) {
      const int inside = members[group[i]] - 1, outside = heads - members[group[i]];
      out[group[i]] += outside;
      leaves = leaves || outside > 0;
      const int in_turn = at_once[group[i]] ? std::min(outside, 1) : outside;
      alone =
          std::max(alone, inside / topology.same_node.bytes_per_second + in_turn / between.bytes_per_second);
    }
    for (int i = 0; i < heads; ++i) members[group[i]] = 0;
  }
  if (!leaves) return topology.same_node;
  const double shared =
      static_cast<double>(*std::max_element(out.begin(), out.end())) / topology.node_bytes_per_second;
  return {.latency_seconds = std::max(topology.same_node.latency_seconds, between.latency_seconds),
          .bytes_per_second = (heads - 1) / std::max(alone, shared)};
}

}  // namespace

absl::Status CheckTopology(const Topology& topology) {
  for (const auto& [name, link] :
       {std::pair{"inside a node", topology.same_node}, std::pair{"between nodes", topology.between_nodes}}) {
    if (!(link.bytes_per_second > 0 && link.latency_seconds >= 0)) {
      return absl::InvalidArgumentError(absl::StrCat("the link ", name, " has ", link.bytes_per_second,
                                                     " bytes/s and ", link.latency_seconds,
                                                     " s of latency; use more than 0, and 0 or more"));
    }
  }
  if (!(topology.node_bytes_per_second > 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the flows of a node share ", topology.node_bytes_per_second, " bytes/s; use more than 0"));
  }
  std::set<int> left;  // nodes whose seats are behind
  for (size_t seat = 1; seat < topology.node_of_seat.size(); ++seat) {
    const int node = topology.node_of_seat[seat];
    if (node != topology.node_of_seat[seat - 1]) left.insert(topology.node_of_seat[seat - 1]);
    if (left.contains(node)) {
      return absl::InvalidArgumentError(
          absl::StrCat("node ", node, " has seat ", seat, " and others apart from it; sort seats by node"));
    }
  }
  return absl::OkStatus();
}

int SeatsPerNode(const Topology& topology, int seats) {
  int common = 0;
  int of_node = 0;
  for (int seat = 0; seat < seats; ++seat) {
    ++of_node;
    if (seat + 1 < seats && topology.node_of_seat[seat + 1] == topology.node_of_seat[seat]) continue;
    common = std::gcd(common, of_node);
    of_node = 0;
  }
  return common;
}

Links LinksOf(const Topology& topology, int heads, Tile tile, const Placement& placement, int kv_inner) {
  const int ranks = heads * tile.ranks();
  std::vector<int> node_of_rank(ranks);
  // Numbers the nodes, by their first seat.
  std::vector<int> number(topology.node_of_seat.size(), -1);
  std::vector<int> seats;  // by node
  for (size_t seat = 0; seat < number.size(); ++seat) {
    if (seat == 0 || topology.node_of_seat[seat] != topology.node_of_seat[seat - 1]) seats.push_back(0);
    ++seats.back();
    number[seat] = static_cast<int>(seats.size()) - 1;
  }
  const int nodes = static_cast<int>(seats.size());
  // A rank has a card as fast as one flow where its node has several; alone it has the node's port.
  std::vector<bool> at_once(seats.size());
  for (int node = 0; node < nodes; ++node) at_once[node] = seats[node] == 1 && !topology.one_flow_a_seat;
  for (int rank = 0; rank < ranks; ++rank) node_of_rank[rank] = number[placement.seat_of_rank[rank]];

  const Mesh mesh(tile, KvOrder::kRising, kv_inner);
  Flows q(nodes), kv(nodes), kv_outer(nodes);
  for (int mesh_rank = 0; mesh_rank < mesh.ranks(); ++mesh_rank) {
    const auto add = [&](Flows& flows, int from) {
      for (int member = 0; member < heads; ++member) {
        flows.Add(node_of_rank[from * heads + member], node_of_rank[mesh_rank * heads + member]);
      }
    };
    if (tile.a > 1) add(q, mesh.QReceiveFrom(mesh_rank));
    if (tile.b > 1) add(kv, mesh.KvReceiveFrom(mesh_rank));
    if (kv_inner != 0) add(kv_outer, mesh.KvOuterReceiveFrom(mesh_rank));
  }
  Links links(PerTraffic<Link>{{Traffic::kQ, Slowest(q, topology)},
                               {Traffic::kKv, Slowest(kv, topology)},
                               {Traffic::kO, Slowest(q, topology)},
                               {Traffic::kAllToAll, AllToAllLink(topology, heads, node_of_rank, at_once)}});
  const bool shares_inside = q.inside() + kv.inside() + kv_outer.inside() > 1;
  const auto inside = [&](const Flows& flows) {
    return shares_inside && flows.inside() ? topology.same_node : Link{};
  };
  const bool shares_port = (q.most() > 0) + (kv.most() > 0) + (kv_outer.most() > 0) > 1;
  const auto port = [&](const Flows& flows) {
    if (!shares_port || flows.most() == 0) return Link{};
    Link link{.latency_seconds = topology.between_nodes.latency_seconds,
              .bytes_per_second = topology.node_bytes_per_second / flows.most()};
    if (topology.one_flow_a_seat) {
      link.bytes_per_second = std::min(link.bytes_per_second, topology.between_nodes.bytes_per_second);
    }
    return link;
  };
  links.shared_inside = {{Traffic::kQ, inside(q)}, {Traffic::kKv, inside(kv)}, {Traffic::kO, inside(q)}};
  links.shared_port = {{Traffic::kQ, port(q)}, {Traffic::kKv, port(kv)}, {Traffic::kO, port(q)}};
  if (kv_inner != 0) {
    links.kv_outer = {.link = Slowest(kv_outer, topology),
                      .shared_inside = inside(kv_outer),
                      .shared_port = port(kv_outer)};
  }
  return links;
}

Link RingLink(const Topology& topology, const std::vector<int>& node_of_member) {
  const size_t members = node_of_member.size();
  Flows flows(1 + *std::max_element(node_of_member.begin(), node_of_member.end()));
  for (size_t i = 0; i < members; ++i) flows.Add(node_of_member[i], node_of_member[(i + 1) % members]);
  return Slowest(flows, topology);
}

}  // namespace meshfill
