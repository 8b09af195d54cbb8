// Nodes with slow links between them: where ranks sit, and when messages go along several rings at once.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <random>
#include <set>

#include "engine/plan/cost_model.h"
#include "engine/plan/shape_schedules.h"
#include "engine/schedule/multi_ring_schedule.h"
#include "gtest/gtest.h"
#include "tests/engine/plan/planner_inputs.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

// Nodes of `seats` each, whose flows share one slow link.
Topology SlowNodes(int nodes, int seats) {
  Topology topology = {.same_node = {.latency_seconds = 1e-6, .bytes_per_second = 100e9},
                       .between_nodes = {.latency_seconds = 1e-5, .bytes_per_second = 2e9},
                       .node_bytes_per_second = 2e9};
  for (int seat = 0; seat < nodes * seats; ++seat) topology.node_of_seat.push_back(seat / seats);
  return topology;
}

TEST(MakePlan, KeepsTheRingThatMovesMoreInsideANode) {
  // With f32 partial outputs, a step along Q moves three times what one along KV does; 16 ranks of tile 4×4.
  PlanRequest request = {.tokens = 65536, .ranks = 16, .tile = Tile{4, 4}, .topology = SlowNodes(4, 4)};
  const auto by_rows = MakePlan(Llama(8, 4, DType::kBf16), kSlowLink, request);
  ASSERT_TRUE(by_rows.ok()) << by_rows.status();
  EXPECT_TRUE(by_rows->plan.placement.seat_of_rank.empty()) << by_rows->plan.DebugString();
  EXPECT_EQ(by_rows->plan.links[Traffic::kQ], request.topology.same_node);
  // After a long prefix the keys weigh more: a node holds a KV group.
  request.cached_tokens = 1 << 20;
  const auto by_columns = MakePlan(Llama(8, 4, DType::kBf16), kSlowLink, request);
  ASSERT_TRUE(by_columns.ok()) << by_columns.status();
  EXPECT_EQ(by_columns->plan.placement.name, "box 1x4x1");
  EXPECT_EQ(by_columns->plan.links[Traffic::kKv], request.topology.same_node);
  EXPECT_EQ(by_columns->candidates.front().placement, "box 1x4x1");
}

// Where a node's flows share nothing, links inside a node are all that a box gains.
TEST(MakePlan, ABoxGainsByLinksInsideANodeAlone) {
  Topology topology = SlowNodes(4, 4);
  topology.node_bytes_per_second = 4 * topology.between_nodes.bytes_per_second;
  const auto plan = MakePlan(
      Llama(8, 4, DType::kBf16), kSlowLink,
      {.tokens = 65536, .cached_tokens = 1 << 20, .ranks = 16, .tile = Tile{4, 4}, .topology = topology});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->plan.placement.name, "box 1x4x1");
}

// One after the other, messages would take longer inside nodes than both at once with ranks in order.
TEST(MakePlan, ABoxGainsByMessagesAlongBothRings) {
  Topology topology = SlowNodes(2, 2);
  topology.same_node.bytes_per_second = 1.25e9;  // a flow through the port: 1e9
  const auto choice = MakePlan(Llama(8, 8, DType::kBf16), kSlowLink,
                               {.tokens = 65536,
                                .cached_tokens = 65536,
                                .ranks = 4,
                                .tile = Tile{2, 2},
                                .one_memory = false,
                                .topology = topology,
                                .many_rings = true});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->plan.placement.name, "box 1x2x1") << choice->plan.DebugString();
}

// A box is taken for less than a hundredth, too.
TEST(MakePlan, SitsInABoxForHalfAPercent) {
  const ModelShape model = Llama(8, 4, DType::kBf16);
  int little = 0;
  for (int exponent = 0; exponent < 240; ++exponent) {
    PoolSpeed speed = kSlowLink;
    speed.attention_flops_per_second = std::exp2(32 + exponent / 16.0);
    const PlanRequest request = {.tokens = 65536,
                                 .cached_tokens = 1 << 20,
                                 .ranks = 16,
                                 .tile = Tile{4, 4},
                                 .one_memory = false,
                                 .topology = SlowNodes(4, 4)};
    const auto choice = MakePlan(model, speed, request);
    ASSERT_TRUE(choice.ok()) << choice.status();
    const Plan& plan = choice->plan;
    PlanShape in_order = plan;
    in_order.links = LinksOf(request.topology, 1, plan.tile, RowFirst(16));
    double least = std::numeric_limits<double>::infinity();
    for (const SharedSchedule& schedule : ShapeSchedules(ScheduleChoice::kAuto).Of(model, speed, in_order)) {
      least = std::min(least, PredictTime(model, speed, in_order, *schedule).seconds);
    }
    const double gain = 1 - plan.predicted.seconds / least;
    EXPECT_TRUE(plan.placement.seat_of_rank.empty() || gain > 0.0019) << gain;
    little += !plan.placement.seat_of_rank.empty() && gain < 0.009 ? 1 : 0;
  }
  EXPECT_GT(little, 0);
}

TEST(MakePlan, APlacedPlanIsAPermutationAndNoSlowerThanRanksInOrder) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  int placed = 0;
  for (int draw = 0; draw < 100; ++draw) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << draw);
    const ModelShape model = Llama(8, 1 << Draw(random, 0, 3), DType::kBf16);
    PoolSpeed speed = kSlowLink;
    speed.attention_flops_per_second = std::exp2(Draw(random, 36, 46));
    PlanRequest request = {
        .tokens = Draw<int64_t>(random, 1000, 100000), .ranks = Draw(random, 1, 32), .one_memory = false};
    const int node_seats = 1 << Draw(random, 0, 3);
    request.topology = SlowNodes(32 / node_seats, node_seats);
    if (Draw(random, 0, 1) == 0) {
      const Tile tile = {.a = 1 << Draw(random, 0, 2), .b = 1 << Draw(random, 0, 3)};
      request.tile = tile;
      request.ranks = tile.ranks();
      request.cached_tokens = Draw<int64_t>(random, 0, 1 << 20);
    }
    const auto choice = MakePlan(model, speed, request);
    ASSERT_TRUE(choice.ok()) << choice.status();
    const Plan& plan = choice->plan;
    std::set<int> seats;
    for (int rank = 0; rank < plan.ranks(); ++rank) {
      seats.insert(plan.SeatOf(rank));
      EXPECT_EQ(plan.RankAt(plan.SeatOf(rank)), rank);
    }
    EXPECT_EQ(std::ssize(seats), plan.ranks());
    EXPECT_EQ(*seats.rbegin(), plan.ranks() - 1);
    const auto links_of = [&](const Placement& placement) {
      return LinksOf(request.topology, plan.heads, plan.tile, placement);
    };
    const Placement row_first = RowFirst(plan.ranks());
    const bool in_order = plan.placement.seat_of_rank.empty();
    EXPECT_EQ(plan.links, links_of(in_order ? row_first : plan.placement));
    placed += in_order ? 0 : 1;
    const Prediction unplaced = Predict(model, speed,
                                        {.layout = plan.layout,
                                         .heads = plan.heads,
                                         .tile = plan.tile,
                                         .cached_tokens = request.cached_tokens,
                                         .links = links_of(row_first),
                                         .one_memory = false},
                                        plan.schedule);
    EXPECT_LE(plan.predicted.seconds, unplaced.seconds * (1 + 1e-9));
    EXPECT_LE(LeastSeconds(model, speed,
                           {.layout = plan.layout,
                            .heads = plan.heads,
                            .tile = plan.tile,
                            .cached_tokens = request.cached_tokens,
                            .links = plan.links}),
              plan.predicted.seconds * (1 + 1e-9));
    EXPECT_EQ(plan.predicted.peak_bytes, unplaced.peak_bytes);
  }
  EXPECT_GT(placed, 0);
}

// Nodes of four with a slow link between them: one ring stays inside, the other leaves.
TEST(MakePlan, SendsAlongBothRingsAtOnceWhereThatIsFaster) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  int taken = 0, much = 0;
  for (int draw = 0; draw < 100; ++draw) {
    const ModelShape model = Llama(8, 1 << Draw(random, 0, 3), DType::kBf16);
    PoolSpeed speed = kSlowLink;
    speed.attention_flops_per_second = std::exp2(Draw(random, 36, 46));
    PlanRequest request = {.tokens = Draw<int64_t>(random, 1000, 100000),
                           .ranks = 16,
                           .tile = TilesOf(16)[Draw<size_t>(random, 1, 3)],
                           .one_memory = false,
                           .topology = SlowNodes(4, 4)};
    // A node's port has the flows of four: what stays inside takes as long or less.
    request.topology.same_node.bytes_per_second = 0.5e9 * std::exp2(Draw(random, 0, 3));
    const auto one = MakePlan(model, speed, request);
    request.many_rings = true;
    const auto both = MakePlan(model, speed, request);
    request.schedule = ScheduleChoice::kGreedy;
    const auto greedy = MakePlan(model, speed, request);
    ASSERT_TRUE(one.ok() && both.ok() && greedy.ok());
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << draw << ": "
                                    << both->plan.DebugString());
    const auto spans = [](const Step& step) { return step.spans > 1; };
    const auto outlasts = [&](const Plan& plan) {
      return std::any_of(plan.schedule.steps.begin(), plan.schedule.steps.end(), spans);
    };
    EXPECT_FALSE(outlasts(one->plan));
    EXPECT_FALSE(outlasts(greedy->plan));
    // Of ragged chunks a double ring has another busiest rank.
    if (both->plan.kv_inner == 0) {
      EXPECT_EQ(both->plan.predicted.comm_bytes, one->plan.predicted.comm_bytes);
    }
    EXPECT_LE(both->plan.predicted.seconds, one->plan.predicted.seconds * 1.011);
    EXPECT_LE(LeastSeconds(model, speed, both->plan, true), both->plan.predicted.seconds * (1 + 1e-9));
    if (!outlasts(both->plan)) continue;
    EXPECT_TRUE(both->plan.tile.a > 1 && both->plan.tile.b > 1);
    ++taken;
    much += both->plan.predicted.seconds < 0.9 * one->plan.predicted.seconds;
  }
  EXPECT_GT(taken, 10) << "seed " << seed;
  EXPECT_GT(much, 0) << "seed " << seed;
}

// Where attention hides nothing, they gain a tenth of a percent.
TEST(MakePlan, SendsAlongOneRingAtATimeWhereBothGainLittle) {
  const ModelShape model = Llama(8, 8, DType::kBf16);
  PlanRequest request = {
      .tokens = 65536, .ranks = 16, .tile = Tile{4, 4}, .one_memory = false, .topology = SlowNodes(4, 4)};
  const auto one = MakePlan(model, kSlowLink, request);
  request.many_rings = true;
  const auto both = MakePlan(model, kSlowLink, request);
  ASSERT_TRUE(one.ok() && both.ok());
  const Plan& plan = one->plan;
  const Schedule at_once = MultiRingSchedule(plan.tile, 0, RingSecondsOf(model, kSlowLink, plan));
  const double gain = 1 - Predict(model, kSlowLink, plan, at_once).seconds / plan.predicted.seconds;
  ASSERT_GT(gain, 0);
  ASSERT_LT(gain, 0.002);
  EXPECT_EQ(both->plan.DebugString(), plan.DebugString());
  EXPECT_EQ(both->plan.predicted.seconds, plan.predicted.seconds);
}

// Nodes of four with a slow link between them: KV goes round in a node while the next node's comes.
TEST(MakePlan, GoesRoundADoubleRingWhereThatIsFaster) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  int taken = 0, much = 0, along_q_too = 0;
  for (int draw = 0; draw < 100; ++draw) {
    const ModelShape model = Llama(8, 1 << Draw(random, 0, 3), DType::kBf16);
    PoolSpeed speed = kSlowLink;
    speed.attention_flops_per_second = std::exp2(Draw(random, 36, 46));
    const int a = Draw(random, 1, 2);
    PlanRequest request = {.tokens = Draw<int64_t>(random, 1000, 100000),
                           .ranks = 16,
                           .tile = Tile{.a = a, .b = 16 / a},
                           .one_memory = false,
                           .topology = SlowNodes(4, 4)};
    request.topology.same_node.bytes_per_second = 0.5e9 * std::exp2(Draw(random, 0, 3));
    const auto one = MakePlan(model, speed, request);
    request.many_rings = true;
    const auto many = MakePlan(model, speed, request);
    request.schedule = ScheduleChoice::kGreedy;
    const auto greedy = MakePlan(model, speed, request);
    ASSERT_TRUE(one.ok() && many.ok() && greedy.ok());
    const Plan& plan = many->plan;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << draw << ": " << plan.DebugString());
    EXPECT_EQ(one->plan.kv_inner, 0);
    EXPECT_EQ(greedy->plan.kv_inner, 0);
    EXPECT_EQ(plan.schedule.kv_inner, plan.kv_inner);
    EXPECT_LE(plan.predicted.seconds, one->plan.predicted.seconds * 1.011);
    EXPECT_LE(LeastSeconds(model, speed, plan, true), plan.predicted.seconds * (1 + 1e-9));
    EXPECT_EQ(plan.predicted, Predict(model, speed, plan, plan.schedule));
    if (plan.kv_inner == 0) continue;
    EXPECT_TRUE(plan.kv_inner == 2 || plan.kv_inner == 4) << "ranks of a KV group in a node";
    ++taken;
    along_q_too += a > 1;
    much += plan.predicted.seconds < 0.9 * one->plan.predicted.seconds;
  }
  EXPECT_GT(taken, 10) << "seed " << seed;
  EXPECT_GT(much, 0) << "seed " << seed;
  EXPECT_GT(along_q_too, 0) << "seed " << seed;
}

// Where messages take long to start, an inner ring of half a node's ranks may be the best.
TEST(MakePlan, AnInnerRingMayBeAPartOfItsNode) {
  const ModelShape model = {.layers = 1,
                            .q_heads = 32,
                            .kv_heads = 32,
                            .head_dim = 128,
                            .context_tokens = 1 << 20,
                            .dtype = DType::kBf16};
  const double at_once = std::numeric_limits<double>::infinity();
  const PoolSpeed speed = {.gemm_flops_per_second = at_once,
                           .attention_flops_per_second = 56.8e12,
                           .merge_bytes_per_second = at_once};
  PlanRequest request = {.tokens = 1 << 20,
                         .ranks = 128,
                         .tile = Tile{4, 32},
                         .partial_dtype = DType::kBf16,
                         .one_memory = false,
                         .many_rings = true};
  request.topology = {.same_node = {.latency_seconds = 1e-4, .bytes_per_second = 20e9},
                      .between_nodes = {.latency_seconds = 5.5e-3, .bytes_per_second = 1.92e9},
                      .node_bytes_per_second = 5.5e9};
  for (int seat = 0; seat < 128; ++seat) request.topology.node_of_seat.push_back(seat / 8);
  const auto choice = MakePlan(model, speed, request);
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->plan.placement.name, "box 1x8x1") << "eight ranks of a KV group in a node";
  EXPECT_EQ(choice->plan.kv_inner, 4);
}

TEST(MakePlan, ATopologyMustSeatEveryRank) {
  const absl::Status status =
      MakePlan(Llama(8, 2, DType::kBf16), kSlowLink, {.tokens = 8, .ranks = 4, .topology = SlowNodes(1, 3)})
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(Mentions(status, "3 seats for 4 ranks")) << status;
  Topology slow = SlowNodes(2, 2);
  slow.between_nodes.bytes_per_second = 0;
  EXPECT_TRUE(Mentions(
      MakePlan(Llama(8, 2, DType::kBf16), kSlowLink, {.tokens = 8, .ranks = 4, .topology = slow}).status(),
      "between nodes has 0 bytes/s"));
}

}  // namespace
}  // namespace meshfill
