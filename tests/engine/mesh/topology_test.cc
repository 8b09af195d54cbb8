#include "engine/mesh/topology.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>

#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

constexpr Link kInside = {.latency_seconds = 1e-6, .bytes_per_second = 100e9};
constexpr Link kBetween = {.latency_seconds = 1e-5, .bytes_per_second = 4e9};

Topology Nodes(std::vector<int> sizes, double node_bytes_per_second) {
  Topology topology = {
      .same_node = kInside, .between_nodes = kBetween, .node_bytes_per_second = node_bytes_per_second};
  for (size_t node = 0; node < sizes.size(); ++node) {
    topology.node_of_seat.insert(topology.node_of_seat.end(), sizes[node], static_cast<int>(node));
  }
  return topology;
}

TEST(Topology, RowFirstKeepsQRingsInANodeAndABoxTheKvRings) {
  const Topology topology = Nodes({4, 4}, 8e9);
  const Links row_first = LinksOf(topology, 1, {.a = 4, .b = 2}, RowFirst(8));
  EXPECT_EQ(row_first[Traffic::kQ], kInside);
  EXPECT_EQ(row_first[Traffic::kKv].latency_seconds, kBetween.latency_seconds);
  EXPECT_EQ(row_first[Traffic::kKv].bytes_per_second, 2e9);  // four flows leave each node

  const Grid grid = MeshGrid(1, {.a = 4, .b = 2});
  const Links boxed =
      LinksOf(topology, 1, {.a = 4, .b = 2}, Boxed(grid, {.planes = 1, .rows = 2, .columns = 2}));
  EXPECT_EQ(boxed[Traffic::kKv], kInside);
  EXPECT_EQ(boxed[Traffic::kQ].bytes_per_second, 4e9);  // two flows leave: each at its own speed
}

TEST(Topology, RingsShareTheLinksThatBothHave) {
  const Topology two = Nodes({4, 4}, 8e9), one = Nodes({8}, 8e9);
  const auto links = [](const Topology& topology, Tile tile) {
    return LinksOf(topology, 1, tile, RowFirst(tile.ranks()));
  };
  // Every Q message stays in its node, every KV message leaves it.
  const PerTraffic<Link> none;
  const PerTraffic<Link> on_all_rings = {
      {Traffic::kQ, kInside}, {Traffic::kKv, kInside}, {Traffic::kO, kInside}};
  const Links apart = links(two, {.a = 4, .b = 2});
  EXPECT_EQ(apart.shared_inside, none);
  EXPECT_EQ(apart.shared_port, none);
  // KV stays in a node as well, for three of four ranks: the link there is what Q finds, too.
  const Links beside = links(two, {.a = 2, .b = 4});
  ASSERT_EQ(beside[Traffic::kQ], kInside);
  ASSERT_NE(beside[Traffic::kKv], kInside);
  EXPECT_EQ(beside.shared_inside, on_all_rings);
  EXPECT_EQ(beside.shared_port, none);
  // Neither leaves, and both leave.
  const Links inside = links(one, {.a = 4, .b = 2});
  EXPECT_EQ(inside.shared_inside, on_all_rings);
  EXPECT_EQ(inside.shared_port, none);
  // One Q flow goes through the port of a node of two GPUs, and two KV flows do.
  const Links outside = links(Nodes({2, 2, 2, 2}, 9e9), {.a = 4, .b = 2});
  EXPECT_EQ(outside.shared_inside[Traffic::kKv], Link());
  EXPECT_EQ(outside[Traffic::kQ].bytes_per_second, kBetween.bytes_per_second);
  EXPECT_EQ(outside.shared_port[Traffic::kQ].bytes_per_second, 9e9);
  EXPECT_EQ(outside.shared_port[Traffic::kO], outside.shared_port[Traffic::kQ]);
  EXPECT_EQ(outside.shared_port[Traffic::kKv].bytes_per_second, 4.5e9);
  EXPECT_EQ(outside.shared_port[Traffic::kKv].latency_seconds, kBetween.latency_seconds);
}

// What nobody has measured: a rank's Q and KV leave by one card.
TEST(Topology, ASeatOfOneFlowSharesItAmongItsMessages) {
  Topology topology = Nodes({1, 1, 1, 1}, std::numeric_limits<double>::infinity());
  const Tile tile = {.a = 2, .b = 2};
  const Links apart = LinksOf(topology, 1, tile, RowFirst(4));
  EXPECT_TRUE(std::isinf(apart.shared_port[Traffic::kQ].bytes_per_second));
  topology.one_flow_a_seat = true;
  const Links shared = LinksOf(topology, 1, tile, RowFirst(4));
  EXPECT_EQ(shared[Traffic::kQ], kBetween);
  EXPECT_EQ(shared.shared_port[Traffic::kQ], kBetween);
  EXPECT_EQ(shared.shared_port[Traffic::kKv], kBetween);
  topology.node_bytes_per_second = 1e9;
  EXPECT_EQ(LinksOf(topology, 1, tile, RowFirst(4)).shared_port[Traffic::kKv].bytes_per_second, 1e9);
}

// Two nodes of four, as 2x4: the two KV groups have two ranks in each node.
TEST(Topology, ADoubleRingLeavesANodeAlongItsOuterRingAlone) {
  const Tile tile = {.a = 2, .b = 4};
  const Links one = LinksOf(Nodes({4, 4}, 8e9), 1, tile, RowFirst(8));
  EXPECT_EQ(one[Traffic::kKv].bytes_per_second, 4e9);  // two flows leave
  EXPECT_EQ(one.kv_outer, Links::Outer());
  const Links both = LinksOf(Nodes({4, 4}, 8e9), 1, tile, RowFirst(8), /*kv_inner=*/2);
  EXPECT_EQ(both[Traffic::kQ], kInside);
  EXPECT_EQ(both[Traffic::kKv], kInside);
  EXPECT_EQ(both.kv_outer.link, (Link{kBetween.latency_seconds, 2e9}));  // four leave
  // Q and the inner rings share the links inside; nothing else is on the ports.
  EXPECT_EQ(both.shared_inside[Traffic::kQ], kInside);
  EXPECT_EQ(both.shared_inside[Traffic::kKv], kInside);
  EXPECT_EQ(both.kv_outer.shared_inside, Link());
  EXPECT_EQ(both.kv_outer.shared_port, Link());
  // In nodes of two Q stays, and what goes along the inner rings leaves beside the outer one.
  const Links apart = LinksOf(Nodes({2, 2, 2, 2}, 9e9), 1, tile, RowFirst(8), /*kv_inner=*/2);
  EXPECT_EQ(apart.shared_port[Traffic::kQ], Link());
  EXPECT_EQ(apart.shared_port[Traffic::kKv], (Link{kBetween.latency_seconds, 4.5e9}));
  EXPECT_EQ(apart.kv_outer.shared_port, (Link{kBetween.latency_seconds, 4.5e9}));
  // On one node both rings of KV share its links, with no Q ring beside them.
  const Links inside = LinksOf(Nodes({4}, 9e9), 1, {.a = 1, .b = 4}, RowFirst(4), /*kv_inner=*/2);
  EXPECT_EQ(inside.shared_inside[Traffic::kQ], Link());
  EXPECT_EQ(inside.shared_inside[Traffic::kKv], kInside);
  EXPECT_EQ(inside.kv_outer.link, kInside);
  EXPECT_EQ(inside.kv_outer.shared_inside, kInside);
}

TEST(Topology, AllToAllsShareTheNodesLink) {
  const Topology topology = Nodes({2, 2}, 8e9);
  EXPECT_EQ(LinksOf(topology, 2, {.a = 1, .b = 2}, RowFirst(4))[Traffic::kAllToAll], kInside);
  const Links apart = LinksOf(topology, 4, {.a = 1, .b = 1}, RowFirst(4));
  // Of three messages of a rank, one stays and two leave; four leave a node.
  EXPECT_DOUBLE_EQ(apart[Traffic::kAllToAll].bytes_per_second, 3 / (1 / 100e9 + 2 / 4e9));
  const Links shared = LinksOf(Nodes({2, 2}, 1e9), 4, {.a = 1, .b = 1}, RowFirst(4));
  EXPECT_DOUBLE_EQ(shared[Traffic::kAllToAll].bytes_per_second, 3 / (4 / 1e9));
  // A rank that is alone on its node sends to all at once, as fast as flows are or the port is.
  const auto alone = [](double port) {
    return LinksOf(Nodes({1, 1, 1, 1}, port), 4, {.a = 1, .b = 1}, RowFirst(4))[Traffic::kAllToAll];
  };
  EXPECT_DOUBLE_EQ(alone(100e9).bytes_per_second, 3 * kBetween.bytes_per_second);
  EXPECT_DOUBLE_EQ(alone(6e9).bytes_per_second, 6e9);
  Topology one_flow = Nodes({1, 1, 1, 1}, 100e9);
  one_flow.one_flow_a_seat = true;
  EXPECT_DOUBLE_EQ(LinksOf(one_flow, 4, {.a = 1, .b = 1}, RowFirst(4))[Traffic::kAllToAll].bytes_per_second,
                   kBetween.bytes_per_second);
  // With a seat beside it that has no rank it has but one of two cards.
  const Placement every_other = {.seat_of_rank = {0, 2, 4, 6}};
  const Links half = LinksOf(Nodes({2, 2, 2, 2}, 100e9), 4, {.a = 1, .b = 1}, every_other);
  EXPECT_DOUBLE_EQ(half[Traffic::kAllToAll].bytes_per_second, kBetween.bytes_per_second);
}

// Message by message: what a rank sends to one after the other, and what all of a node send through its port.
TEST(Topology, AllToAllsTakeWhatTheirSlowestRankOrPortTakes) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int draw = 0; draw < 200; ++draw) {
    const int heads = Draw(random, 2, 5), groups = Draw(random, 1, 4), ranks = heads * groups;
    std::vector<int> sizes;
    for (int seats = 0; seats < ranks; seats += sizes.back()) sizes.push_back(Draw(random, 1, 4));
    Topology topology = Nodes(sizes, 1e9 * Draw(random, 1, 20));
    topology.one_flow_a_seat = Draw(random, 0, 1) == 1;
    Placement placement = RowFirst(ranks);
    std::shuffle(placement.seat_of_rank.begin(), placement.seat_of_rank.end(), random);
    const auto node = [&](int rank) { return topology.node_of_seat[placement.seat_of_rank[rank]]; };
    std::vector<int> leaving(sizes.size(), 0);
    double alone = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      double inside = 0, outside = 0;
      for (int to = rank / heads * heads; to < (rank / heads + 1) * heads; ++to) {
        if (to == rank) continue;
        (node(to) == node(rank) ? inside : outside) += 1;
      }
      leaving[node(rank)] += static_cast<int>(outside);
      if (sizes[node(rank)] == 1 && !topology.one_flow_a_seat) outside = std::min(outside, 1.0);
      alone = std::max(alone, inside / kInside.bytes_per_second + outside / kBetween.bytes_per_second);
    }
    const int most = *std::max_element(leaving.begin(), leaving.end());
    const double seconds = std::max(alone, most / topology.node_bytes_per_second);
    const Link link = LinksOf(topology, heads, {.a = 1, .b = groups}, placement)[Traffic::kAllToAll];
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << draw);
    EXPECT_NEAR(link.bytes_per_second * seconds, heads - 1, 1e-9);
    EXPECT_EQ(link.latency_seconds, most > 0 ? kBetween.latency_seconds : kInside.latency_seconds);
  }
}

TEST(Topology, ARingHasOneFlowOutOfEachNode) {
  EXPECT_EQ(RingLink(Nodes({4}, 8e9), {0, 0, 0, 0}), kInside);
  EXPECT_EQ(RingLink(Nodes({1, 1, 1, 1}, 100e9), {0, 1, 2, 3}), kBetween);
  EXPECT_EQ(RingLink(Nodes({3, 2}, 8e9), {0, 0, 0, 1, 1}), kBetween);
  EXPECT_DOUBLE_EQ(RingLink(Nodes({3, 2}, 1e9), {0, 0, 0, 1, 1}).bytes_per_second, 1e9);
  Topology slow_inside = Nodes({2, 2}, 8e9);
  slow_inside.same_node = {.latency_seconds = 1e-3, .bytes_per_second = 1e9};
  EXPECT_EQ(RingLink(slow_inside, {0, 0, 1, 1}), slow_inside.same_node);
}

// Every message that the mesh sends, one by one.
TEST(Topology, LinksAreThoseOfTheSlowestMessage) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int draw = 0; draw < 300; ++draw) {
    const int heads = Draw(random, 1, 3);
    const Tile tile = {.a = Draw(random, 1, 4), .b = Draw(random, 1, 4)};
    const int ranks = heads * tile.ranks();
    std::vector<int> sizes;
    for (int seats = 0; seats < ranks; seats += sizes.back()) sizes.push_back(Draw(random, 1, 5));
    const Topology topology = Nodes(sizes, 1e9 * Draw(random, 1, 20));
    Placement placement = RowFirst(ranks);
    std::shuffle(placement.seat_of_rank.begin(), placement.seat_of_rank.end(), random);
    const auto node = [&](int rank) { return topology.node_of_seat[placement.seat_of_rank[rank]]; };
    const auto expected = [&](auto&& from) {
      std::map<int, int> out, in;
      bool inside = false;
      int most = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        if (node(from(rank)) == node(rank)) {
          inside = true;
        } else {
          most = std::max({most, ++out[node(from(rank))], ++in[node(rank)]});
        }
      }
      Link link;
      if (inside) link = kInside;
      if (most > 0) {
        link.latency_seconds = kBetween.latency_seconds;
        link.bytes_per_second = std::min(kBetween.bytes_per_second, topology.node_bytes_per_second / most);
      }
      return link;
    };
    const Links links = LinksOf(topology, heads, tile, placement);
    const Mesh mesh(tile);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << draw);
    if (tile.a > 1) {
      EXPECT_EQ(links[Traffic::kQ],
                expected([&](int rank) { return mesh.QReceiveFrom(rank / heads) * heads + rank % heads; }));
    }
    if (tile.b > 1) {
      EXPECT_EQ(links[Traffic::kKv],
                expected([&](int rank) { return mesh.KvReceiveFrom(rank / heads) * heads + rank % heads; }));
    }
  }
}

TEST(Topology, BoxesFillWhatDividesEveryNode) {
  EXPECT_EQ(SeatsPerNode(Nodes({8, 8}, 1), 16), 8);
  EXPECT_EQ(SeatsPerNode(Nodes({8, 8}, 1), 12), 4);
  EXPECT_EQ(SeatsPerNode(Nodes({3, 2}, 1), 5), 1);
  EXPECT_EQ(SeatsPerNode(Nodes({8}, 1), 6), 6);
}

TEST(Topology, IsRefusedWithTheReason) {
  EXPECT_TRUE(CheckTopology(Nodes({2, 2}, 1)).ok());
  const auto message = [](const Topology& topology) {
    return std::string(CheckTopology(topology).message());
  };
  Topology slow = Nodes({2}, 1);
  slow.same_node.bytes_per_second = 0;
  EXPECT_NE(message(slow).find("inside a node has 0 bytes/s"), std::string::npos) << message(slow);
  Topology early = Nodes({2}, 1);
  early.between_nodes.latency_seconds = -1;
  EXPECT_NE(message(early).find("between nodes has 4e+09 bytes/s and -1 s"), std::string::npos)
      << message(early);
  EXPECT_NE(message(Nodes({2}, 0)).find("share 0 bytes/s"), std::string::npos);
  Topology mixed = Nodes({2, 2}, 1);
  mixed.node_of_seat = {0, 1, 0};
  EXPECT_NE(message(mixed).find("node 0 has seat 2"), std::string::npos) << message(mixed);
}

}  // namespace
}  // namespace meshfill
