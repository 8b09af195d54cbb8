// What connects the seats of a pool, and so what the messages of a placed plan take.
//
//     one process     a chunk is handed over: PoolSpeed has that link, of an embedded pool
//     one node        shared memory, loopback, NVLink: same_node
//     between nodes   a flow runs at most at its own bandwidth, and the flows out of a node share the node's
#ifndef MESHFILL_ENGINE_MESH_TOPOLOGY_H_
#define MESHFILL_ENGINE_MESH_TOPOLOGY_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "engine/mesh/mesh.h"
#include "engine/mesh/placement.h"
#include "engine/mesh/traffic.h"

namespace meshfill {

struct Link {
  double latency_seconds = 0;
  double bytes_per_second = std::numeric_limits<double>::infinity();

  double Seconds(double bytes) const { return latency_seconds + bytes / bytes_per_second; }
  bool operator==(const Link&) const = default;
};

struct Topology {
  std::vector<int> node_of_seat;  // [seats], those of a node side by side
  Link same_node;
  Link between_nodes;  // the link of one flow between two nodes
  double node_bytes_per_second = std::numeric_limits<double>::infinity();  // all flows of a node, each way
  bool one_flow_a_seat = false;  // all flows of a seat to other nodes share the bandwidth of one, each way
  bool operator==(const Topology&) const = default;
};

// INVALID_ARGUMENT naming what is not positive, or a node whose seats are not side by side.
absl::Status CheckTopology(const Topology& topology);

// The seats that a box may fill on the first `seats`: the most that divide each node's share of them.
int SeatsPerNode(const Topology& topology, int seats);

// Links as a plan's messages find them when all ranks send at once: Q and O along the Q rings, KV along the
// KV rings, all-to-alls in head groups. All ranks wait for the slowest.
struct Links : PerTraffic<Link> {
  Links() = default;
  Links(const PerTraffic<Link>& each)  // NOLINT: of one kind, which is as those inside a node
      : PerTraffic<Link>(each), shared_inside(each) {}

  // What several rings have, as a ring's messages find it: the links inside nodes, and a node's port, which
  // the flows of a message through it divide. What a ring does not share takes no time.
  PerTraffic<Link> shared_inside;
  PerTraffic<Link> shared_port;

  // The same three of KV from one inner ring to the next, where KV goes round a double ring (mesh.h).
  struct Outer {
    Link link, shared_inside, shared_port;
    bool operator==(const Outer&) const = default;
  };
  Outer kv_outer;

  bool operator==(const Links&) const = default;
};

// The topology has a seat for each rank of the placement. `kv_inner`: as in mesh.h. In an all-to-all of head
// groups a rank sends to one after the other where its node has several seats, each with a card as fast as
// one flow, or where a seat has one flow; elsewhere to all at once.
Links LinksOf(const Topology& topology, int heads, Tile tile, const Placement& placement, int kv_inner = 0);

// The link that each of some members finds when each sends to the next one and the last to the first, as
// those do that share weights. `node_of_member`: those of a node side by side, so that one flow leaves each
// node.
Link RingLink(const Topology& topology, const std::vector<int>& node_of_member);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MESH_TOPOLOGY_H_
