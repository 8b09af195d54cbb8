#include "engine/sim/simulator.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "engine/sim/head_groups.h"
#include "engine/sim/lockstep.h"
#include "engine/sim/mesh_lanes.h"
#include "engine/sim/network.h"
#include "engine/sim/placed_mesh.h"
#include "engine/sim/rival_programs.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill::sim {
namespace {

// 2 GPUs a node; a flow between nodes takes 1 s for 100 bytes and starts after 0.5 s.
Cluster SmallCluster() {
  return {.gpus_per_node = 2,
          .same_node = {.latency_seconds = 0, .bytes_per_second = 1000},
          .between_nodes = {.latency_seconds = 0.5, .bytes_per_second = 100},
          .node_bytes_per_second = 150,
          .attention_flops_per_second = 10};
}

// Every rank sends `bytes` to the rank `distance` before it while it computes for `seconds`.
RankProgram OneStep(int ranks, int distance, int64_t bytes, double seconds) {
  ProgramBuilder builder(ranks);
  std::vector<int> from(ranks);
  for (int rank = 0; rank < ranks; ++rank) from[rank] = (rank + distance) % ranks;
  const int channel = builder.AddChannel(Traffic::kKv, from);
  builder.Start(channel, bytes);
  builder.Compute(10 * seconds, 1);
  builder.Wait(channel);
  return std::move(builder).Build();
}

double SecondsOf(const RankProgram& program, const Placement& placement, const Cluster& cluster) {
  const auto simulation = Simulate(program, placement, cluster);
  EXPECT_TRUE(simulation.ok()) << simulation.status();
  return simulation.ok() ? simulation->seconds : 0;
}

TEST(Simulator, WaitsForWhatIsNotHidden) {
  const auto simulation = Simulate(OneStep(4, 1, 200, 1.0), RowFirst(4), SmallCluster());
  ASSERT_TRUE(simulation.ok());
  // Ranks 1 and 3 receive between nodes, one flow each way: 0.5 + 2 s. The others inside: 0.2 s, hidden.
  EXPECT_DOUBLE_EQ(simulation->seconds, 2.5);
  for (int rank : {1, 3}) {
    EXPECT_DOUBLE_EQ(simulation->ranks[rank].wait_seconds[Traffic::kKv], 1.5);
  }
  for (int rank : {0, 2}) EXPECT_DOUBLE_EQ(simulation->ranks[rank].wait_seconds.total(), 0);
  for (const RankTimes& rank : simulation->ranks) EXPECT_DOUBLE_EQ(rank.compute_seconds, 1.0);
}

TEST(Simulator, FlowsOfANodeShareItsLink) {
  // Both GPUs of a node send out: 75 bytes a second each, not 100.
  EXPECT_NEAR(SecondsOf(OneStep(4, 2, 150, 0), RowFirst(4), SmallCluster()), 0.5 + 150.0 / 75, 1e-8);
  Cluster unshared = SmallCluster();
  unshared.node_bytes_per_second = Cluster::kUnshared;
  EXPECT_NEAR(SecondsOf(OneStep(4, 2, 150, 0), RowFirst(4), unshared), 0.5 + 150.0 / 100, 1e-8);
  // The same ranks placed so that their rings stay inside nodes.
  EXPECT_NEAR(SecondsOf(OneStep(4, 2, 150, 0), {.seat_of_rank = {0, 2, 1, 3}}, SmallCluster()), 0.15, 1e-8);
}

TEST(Simulator, MessagesOfAChannelGoOneByOne) {
  ProgramBuilder builder(4);
  const int channel = builder.AddChannel(Traffic::kQ, {2, 3, 0, 1});
  for (int message = 0; message < 3; ++message) builder.Start(channel, 75);
  for (int message = 0; message < 3; ++message) builder.Wait(channel);
  const RankProgram program = std::move(builder).Build();
  EXPECT_NEAR(SecondsOf(program, RowFirst(4), SmallCluster()), 3 * (0.5 + 1.0), 1e-8);
  EXPECT_NEAR(LockstepSeconds(program, RowFirst(4), SmallCluster()), 3 * (0.5 + 1.0), 1e-8);
}

// As the simulation has them: they start at once, and then share the link of their node, or their port.
TEST(Lockstep, MessagesOfSeveralChannelsShareTheirLinks) {
  ProgramBuilder builder(4);
  std::vector<int> channels;
  for (int shift = 1; shift < 4; ++shift) {
    channels.push_back(
        builder.AddChannel(Traffic::kAllToAll, {shift, (1 + shift) % 4, (2 + shift) % 4, (3 + shift) % 4}));
  }
  for (int round = 0; round < 2; ++round) {
    for (const int channel : channels) builder.Start(channel, 50);
    for (const int channel : channels) builder.Wait(channel);
  }
  const RankProgram program = std::move(builder).Build();
  for (const int gpus_per_node : {1, 4}) {
    Cluster cluster = SmallCluster();
    cluster.gpus_per_node = gpus_per_node;
    cluster.same_node.latency_seconds = 0.25;
    const double round = gpus_per_node == 1 ? 0.5 + 3 * 50.0 / 150 : 0.25 + 3 * 50.0 / 1000;
    EXPECT_NEAR(LockstepSeconds(program, RowFirst(4), cluster), 2 * round, 1e-8);
    EXPECT_NEAR(SecondsOf(program, RowFirst(4), cluster), 2 * round, 1e-8);
  }
}

TEST(ChannelSpeed, IsThatOfTheSlowestMessage) {
  Cluster cluster = SmallCluster();
  const auto seconds = [&](const std::vector<int>& from) {
    return SpeedOf(from, RowFirst(4), cluster).Seconds(cluster, 100);
  };
  EXPECT_DOUBLE_EQ(seconds({1, 2, 3, 0}), 0.5 + 1);           // one flow leaves a node
  EXPECT_DOUBLE_EQ(seconds({2, 3, 0, 1}), 0.5 + 100.0 / 75);  // two share its port
  EXPECT_DOUBLE_EQ(seconds({1, 0, 3, 2}), 0.1);               // none does
  EXPECT_DOUBLE_EQ(seconds({0, 1, 2, 3}), 0);                 // nor is there a message
  cluster.same_node = {.latency_seconds = 2, .bytes_per_second = 100};
  EXPECT_DOUBLE_EQ(seconds({1, 2, 3, 0}), 2 + 1);
}

// What a rank does in turn: "q!" starts a message, "q?" waits for it, "2" computes two blocks.
std::string TextOf(const RankProgram& program) {
  std::string text;
  for (const Action& action : program.actions) {
    const std::string traffic = TrafficName(program.channels[action.channel].traffic);
    text += action.kind == ActionKind::kStart  ? traffic + "!"
            : action.kind == ActionKind::kWait ? traffic + "?"
                                               : std::to_string(action.blocks);
    text += ' ';
  }
  return text;
}

// A Q chunk takes a block's time and KV two, or OdOQ one and the others less. Memory in Q chunks.
TEST(MeshLanes, BeginEachMessageAtTheFirstBlockWhereTheyCan) {
  const struct {
    Tile tile;
    Pass pass;
    const char* actions;
    double peak;
  } cases[] = {{{3, 2}, Pass::kForward, "q! kv! 1 q? q! 1 q? kv? 1 o! 2 o? o! 1 o? ", 13.5},
               {{2, 4}, Pass::kForward, "q! kv! 1 q? 1 kv? kv! 2 kv? kv! 2 kv? 1 o! 1 o? ", 10.25},
               {{1, 3}, Pass::kForward, "kv! 1 kv? kv! 1 kv? 1 ", 7.125},
               {{3, 1}, Pass::kForward, "q! 1 q? q! 1 q? o! 1 o? o! o? ", 10.5},
               {{3, 2}, Pass::kBackward, "q! kv! 1 q? q! kv? 1 q? 1 dq! 1 dq? 1 dkv! 1 dq! dkv? dq? ", 26.25},
               {{2, 4},
                Pass::kBackward,
                "q! kv! 1 q? kv? kv! 1 kv? kv! 1 kv? dkv! 2 dkv? dkv! 2 dkv? dkv! 1 dq! dkv? dq? ",
                32.25},
               {{1, 3}, Pass::kBackward, "kv! 1 kv? kv! 1 kv? dkv! 1 dkv? dkv! dkv? ", 23.125},
               {{3, 1}, Pass::kBackward, "q! 1 q? q! 1 q? dq! 1 dq? dq! dq? ", 17.125}};
  const AttentionJob job{.tokens = 768, .q_heads = 4, .kv_heads = 4, .head_dim = 16};
  for (const auto& [tile, pass, actions, peak] : cases) {
    const HeadGroups groups(job, 1, tile.ranks());
    const ChunkBytes& chunk = groups.chunk();
    const auto row_bytes = static_cast<double>(pass == Pass::kForward ? chunk.q : chunk.odoq);
    const Cluster cluster{.gpus_per_node = 1,
                          .same_node = {.bytes_per_second = 1},
                          .between_nodes = {.bytes_per_second = 1},
                          .attention_flops_per_second = groups.BlockFlops(pass) / row_bytes};
    const RankProgram program =
        MeshLanesProgram(job, pass, {.tile = tile, .placement = RowFirst(tile.ranks())}, cluster);
    EXPECT_EQ(TextOf(program), actions) << tile.DebugString();
    EXPECT_EQ(static_cast<double>(program.peak_bytes) / static_cast<double>(chunk.q), peak);
  }
}

TEST(MeshLanes, GainWhereRingsHaveLinksOfTheirOwn) {
  std::mt19937_64 random(TestSeed());
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    int faster = 0, slower = 0;
    double sum = 0;
    constexpr int kDraws = 200;
    for (int draw = 0; draw < kDraws; ++draw) {
      const Tile tile{.a = Draw(random, 2, 8), .b = Draw(random, 2, 8)};
      const AttentionJob job{
          .tokens = 64 * tile.ranks(), .q_heads = 4, .kv_heads = 1 << Draw(random, 0, 2), .head_dim = 16};
      const PlacedMesh mesh{.tile = tile, .placement = RowFirst(tile.ranks())};
      const HeadGroups groups(job, 1, tile.ranks());
      Cluster cluster{.gpus_per_node = 1,
                      .same_node = {.bytes_per_second = 1},
                      .between_nodes = {.bytes_per_second = 1},
                      .attention_flops_per_second =
                          groups.BlockFlops(pass) / (0.01 * Draw(random, 5, 300) * groups.chunk().q)};
      const double one = LockstepSeconds(MeshProgram(job, pass, mesh, cluster), mesh.placement, cluster);
      const double two = LockstepSeconds(MeshLanesProgram(job, pass, mesh, cluster), mesh.placement, cluster);
      faster += two < 0.99 * one;
      slower += two > 1.01 * one;
      sum += two / one;
    }
    EXPECT_GT(faster, kDraws / 4);
    EXPECT_LT(slower, kDraws / 20);
    EXPECT_LT(sum / kDraws, pass == Pass::kForward ? 0.97 : 0.9);
  }
}

TEST(Simulator, NamesARankThatWaitsForEver) {
  ProgramBuilder builder(2);
  builder.Wait(builder.AddChannel(Traffic::kO, {1, 0}));
  const auto simulation = Simulate(std::move(builder).Build(), RowFirst(2), SmallCluster());
  EXPECT_EQ(simulation.status().code(), absl::StatusCode::kInternal);
  EXPECT_NE(simulation.status().message().find("send_o"), std::string::npos) << simulation.status();
}

TEST(Simulator, RefusesImpossibleClusters) {
  const RankProgram program = OneStep(2, 1, 1, 1);
  const auto refuses = [&](auto change) {
    Cluster cluster = SmallCluster();
    change(cluster);
    EXPECT_EQ(Simulate(program, RowFirst(2), cluster).status().code(), absl::StatusCode::kInvalidArgument);
  };
  refuses([](Cluster& cluster) { cluster.gpus_per_node = 0; });
  refuses([](Cluster& cluster) { cluster.same_node.bytes_per_second = 0; });
  refuses([](Cluster& cluster) { cluster.between_nodes.bytes_per_second = -1; });
  refuses([](Cluster& cluster) { cluster.node_bytes_per_second = 0; });
  refuses([](Cluster& cluster) { cluster.attention_flops_per_second = 0; });
  refuses([](Cluster& cluster) { cluster.attention_flops_per_second = Cluster::kUnshared; });
  refuses([](Cluster& cluster) { cluster.same_node.latency_seconds = -1; });
  refuses([](Cluster& cluster) { cluster.between_nodes.latency_seconds = -1; });
  refuses([](Cluster& cluster) { cluster.between_nodes.latency_seconds = Cluster::kUnshared; });
  refuses(
      [](Cluster& cluster) { cluster.block_overhead_seconds = std::numeric_limits<double>::quiet_NaN(); });
  refuses([](Cluster& cluster) { cluster.variation.straggler_share = 2; });
  refuses([](Cluster& cluster) { cluster.variation.straggler_share = -0.1; });
  refuses([](Cluster& cluster) { cluster.variation.straggler_slowdown = 0.5; });
  refuses([](Cluster& cluster) { cluster.variation.straggler_slowdown = Cluster::kUnshared; });
  refuses([](Cluster& cluster) { cluster.variation.jitter = -1; });
  EXPECT_EQ(Simulate(program, RowFirst(3), SmallCluster()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// A network in small steps of time: at each, every flow moves at its share.
class SteppedNetwork {
 public:
  struct Flow {
    int from, to;
    double begin, bytes_left;
    double end = -1;
  };

  static std::vector<Flow> Run(const Cluster& cluster, std::vector<Flow> flows, double step) {
    for (double now = 0; std::any_of(flows.begin(), flows.end(), [](const Flow& f) { return f.end < 0; });
         now += step) {
      std::map<int, int> out, in;
      const auto crosses = [&](const Flow& flow) {
        return flow.from / cluster.gpus_per_node != flow.to / cluster.gpus_per_node;
      };
      // A node's link, or a GPU's port.
      const auto link = [&](const Flow& flow, int gpu) {
        return crosses(flow) ? gpu / cluster.gpus_per_node : 1000 + gpu;
      };
      const auto runs = [&](const Flow& flow) { return flow.end < 0 && flow.begin <= now; };
      for (const Flow& flow : flows) {
        if (!runs(flow)) continue;
        ++out[link(flow, flow.from)];
        ++in[link(flow, flow.to)];
      }
      for (Flow& flow : flows) {
        if (!runs(flow)) continue;
        const int most = std::max(out[link(flow, flow.from)], in[link(flow, flow.to)]);
        const double rate = crosses(flow) ? std::min(cluster.between_nodes.bytes_per_second,
                                                     cluster.node_bytes_per_second / most)
                                          : cluster.same_node.bytes_per_second / most;
        flow.bytes_left -= rate * step;
        if (flow.bytes_left <= 0) flow.end = now + step;
      }
    }
    return flows;
  }
};

TEST(Network, SharesAsSmallStepsOfTimeDo) {
  std::mt19937_64 random(TestSeed());
  const Cluster cluster = SmallCluster();
  for (int draw = 0; draw < 20; ++draw) {
    std::vector<SteppedNetwork::Flow> flows(Draw(random, 1, 20));
    for (auto& flow : flows) {
      flow = {.from = Draw(random, 0, 7),
              .to = Draw(random, 0, 7),
              .begin = 0.01 * Draw(random, 0, 300),
              .bytes_left = static_cast<double>(Draw(random, 1, 400))};
    }
    constexpr double kStep = 1e-3;
    const auto expected = SteppedNetwork::Run(cluster, flows, kStep);

    Network network(cluster, 8);
    std::vector<int> by_begin(flows.size());
    std::iota(by_begin.begin(), by_begin.end(), 0);
    std::sort(by_begin.begin(), by_begin.end(),
              [&](int x, int y) { return flows[x].begin < flows[y].begin; });
    size_t begun = 0;
    std::vector<double> ends(flows.size());
    for (size_t ended = 0; ended < flows.size();) {
      const auto [flow, at] = network.Next();
      const Nanos next_begin = begun < flows.size()
                                   ? static_cast<Nanos>(flows[by_begin[begun]].begin * kNanosPerSecond)
                                   : std::numeric_limits<Nanos>::max();
      if (flow >= 0 && at <= next_begin) {
        network.End(flow);
        ends[flow] = static_cast<double>(at) / kNanosPerSecond;
        ++ended;
        network.Settle(at);
        continue;
      }
      const auto& next = flows[by_begin[begun]];
      network.Begin(by_begin[begun], next.from, next.to, next.bytes_left, next_begin);
      network.Settle(next_begin);
      ++begun;
    }
    for (size_t f = 0; f < flows.size(); ++f) {
      EXPECT_NEAR(ends[f], expected[f].end, 3 * kStep * static_cast<double>(flows.size())) << "flow " << f;
    }
  }
}

// A random program of a strategy, and a cluster to run it on.
struct RandomRun {
  RankProgram program;
  Placement placement;
  Cluster cluster;
  bool one_message_at_a_time;
};
RandomRun DrawRun(std::mt19937_64& random) {
  const int heads = 1 << Draw(random, 0, 3);
  const Tile tile{.a = Draw(random, 1, 6), .b = Draw(random, 1, 6)};
  Cluster cluster{.gpus_per_node = 1 << Draw(random, 0, 3),
                  .same_node = {.latency_seconds = 1e-6 * Draw(random, 0, 100),
                                .bytes_per_second = 1e9 * Draw(random, 1, 100)},
                  .between_nodes = {.latency_seconds = 1e-5 * Draw(random, 0, 100),
                                    .bytes_per_second = 1e9 * Draw(random, 1, 20)},
                  .node_bytes_per_second = 1e9 * Draw(random, 1, 50),
                  .attention_flops_per_second = 1e12 * Draw(random, 1, 500)};
  const AttentionJob job{.tokens = 1024 * Draw(random, 1, 200), .q_heads = 16, .kv_heads = 8, .head_dim = 64};
  const auto placements = PlacementsOf(MeshGrid(heads, tile), cluster.gpus_per_node);
  const PlacedMesh plan{
      .heads = heads, .tile = tile, .placement = placements[Draw<size_t>(random, 0, placements.size() - 1)]};
  const Pass pass = Draw(random, 0, 1) == 0 ? Pass::kForward : Pass::kBackward;
  RandomRun run{.placement = plan.placement, .cluster = cluster, .one_message_at_a_time = false};
  switch (Draw(random, 0, 2)) {
    case 0:
      run.program = DoubleRingProgram(job, {.heads = heads, .windows = tile.b, .window = tile.a}, pass);
      break;
    case 1:
      run.program = MeshLanesProgram(job, pass, plan, cluster);
      break;
    default:
      run.program = MeshProgram(job, pass, plan, cluster);
      run.one_message_at_a_time = heads == 1;
  }
  return run;
}

TEST(Simulator, AccountsForEverySecondOfEveryRank) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 60; ++draw) {
    RandomRun run = DrawRun(random);
    run.cluster.variation = {
        .straggler_share = 0.2, .straggler_slowdown = 1.5, .jitter = 0.1, .seed = random()};
    const auto simulation = Simulate(run.program, run.placement, run.cluster, Recording::kTimeline);
    ASSERT_TRUE(simulation.ok()) << simulation.status();
    for (const RankTimes& rank : simulation->ranks) {
      EXPECT_NEAR(rank.compute_seconds + rank.wait_seconds.total(), rank.total_seconds,
                  1e-6 * rank.total_seconds);
      EXPECT_LE(rank.total_seconds, simulation->seconds);
    }
    std::vector<double> busy(run.program.ranks, 0);
    for (const Span& span : simulation->timeline.spans) {
      EXPECT_LT(span.start_seconds, span.end_seconds);
      if (span.lane() == Lane::kCompute) busy[span.rank] += span.seconds();
    }
    for (int rank = 0; rank < run.program.ranks; ++rank) {
      EXPECT_NEAR(busy[rank], simulation->ranks[rank].total_seconds, 1e-6 * busy[rank]);
    }
    const auto again = Simulate(run.program, run.placement, run.cluster);
    EXPECT_EQ(again->seconds, simulation->seconds) << "one seed, one result";
  }
}

TEST(Simulator, AgreesWithLockstepWhereRanksDoNotDriftApart) {
  std::mt19937_64 random(TestSeed());
  int compared = 0;
  for (int draw = 0; draw < 100; ++draw) {
    RandomRun run = DrawRun(random);
    if (!run.one_message_at_a_time) continue;
    run.cluster.node_bytes_per_second = Cluster::kUnshared;
    run.cluster.same_node = run.cluster.between_nodes;
    const double simulated = SecondsOf(run.program, run.placement, run.cluster);
    const double lockstep = LockstepSeconds(run.program, run.placement, run.cluster);
    EXPECT_NEAR(simulated / lockstep, 1, 1e-4);  // virtual time is in whole nanoseconds
    ++compared;
  }
  EXPECT_GT(compared, 0);
}

// Blocks that are computed without a message between them are no single draw.
TEST(Simulator, EachBlockHasItsOwnJitter) {
  constexpr int kBlocks = 10'000;
  ProgramBuilder builder(1);
  builder.Compute(1e12, kBlocks);
  const RankProgram program = std::move(builder).Build();
  Cluster cluster{.same_node = {.bytes_per_second = 1},
                  .between_nodes = {.bytes_per_second = 1},
                  .attention_flops_per_second = 1e12};
  cluster.variation = {.jitter = 0.5, .seed = 5};
  const double mean = std::sqrt(2 / M_PI);  // of |N(0, 1)|
  EXPECT_NEAR(SecondsOf(program, RowFirst(1), cluster), 1 + 0.5 * mean, 0.02);
}

TEST(Simulator, StragglersSlowTheWholeMesh) {
  const AttentionJob job{.tokens = 1 << 18, .q_heads = 8, .kv_heads = 8, .head_dim = 128};
  Cluster cluster{.same_node = {.latency_seconds = 1e-6, .bytes_per_second = 1e12},
                  .between_nodes = {.latency_seconds = 1e-6, .bytes_per_second = 1e12},
                  .attention_flops_per_second = 1e14};
  const PlacedMesh plan{.tile = {.a = 4, .b = 4}, .placement = RowFirst(16)};
  const RankProgram program = MeshProgram(job, Pass::kForward, plan, cluster);
  const double alike = SecondsOf(program, plan.placement, cluster);
  cluster.variation = {.straggler_share = 0.5, .straggler_slowdown = 2, .seed = 3};
  EXPECT_NEAR(SecondsOf(program, plan.placement, cluster) / alike, 2, 0.05);
}

}  // namespace
}  // namespace meshfill::sim
