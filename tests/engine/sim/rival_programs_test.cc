// What every strategy's ranks do in turn: which chunks they see, what overlaps, and how much room it takes.
#include "engine/sim/rival_programs.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <set>

#include "engine/sim/head_groups.h"
#include "engine/sim/lockstep.h"
#include "engine/sim/mesh_lanes.h"
#include "engine/sim/placed_mesh.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/sim/table_job.h"

namespace meshfill::sim {
namespace {

// Programs of every strategy that there are for these settings, with both passes where there are two.
std::vector<RankProgram> AllPrograms(const AttentionJob& job, int heads, Tile tile) {
  const PlacedMesh plan{.heads = heads, .tile = tile, .placement = RowFirst(heads * tile.ranks())};
  const ParallelRings rings{.heads = heads, .places = tile.ranks(), .span = tile.b, .rings = tile.b};
  std::vector<RankProgram> programs = {ParallelRingsProgram(job, rings),
                                       TwoWayRingProgram(job, tile.ranks())};
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    programs.push_back(MeshProgram(job, pass, plan, kCluster));
    programs.push_back(MeshLanesProgram(job, pass, plan, kCluster));
    programs.push_back(
        StarTrailProgram(job, {.heads = heads, .ranks = tile.ranks() * tile.a, .team = tile.a}, pass));
    for (const bool moves_queries : {false, true}) {
      programs.push_back(DoubleRingProgram(
          job, {.heads = heads, .windows = tile.a, .window = tile.b, .moves_queries = moves_queries}, pass));
    }
  }
  for (const bool option : {false, true}) {
    programs.push_back(Attention2dProgram(job, {.heads = heads, .tile = tile, .overlaps = option}));
    programs.push_back(TensorContextProgram(job, {.tensor = heads, .context = rings, .gathers = option}));
  }
  return programs;
}

TEST(Programs, WaitForEveryMessageOnceAndReceiveFromEveryRank) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 30; ++draw) {
    const int heads = 1 << Draw(random, 0, 2);
    const int a = Draw(random, 1, 4);
    const Tile tile{.a = a, .b = a * Draw(random, 1, 3)};  // for StarTrail's teams of a
    const AttentionJob job = TableJob(heads * tile.ranks() * a);
    for (const RankProgram& program : AllPrograms(job, heads, tile)) {
      std::vector<int> under_way(program.channels.size(), 0);
      PerTraffic<double> started;
      for (const Action& action : program.actions) {
        if (action.kind == ActionKind::kCompute) continue;
        const bool starts = action.kind == ActionKind::kStart;
        under_way[action.channel] += starts ? 1 : -1;
        ASSERT_GE(under_way[action.channel], 0) << "waits for what nobody sends";
        if (starts) started[program.channels[action.channel].traffic] += action.bytes;
      }
      EXPECT_EQ(under_way, std::vector<int>(under_way.size(), 0));
      for (const Traffic traffic : kAllTraffics) EXPECT_EQ(started[traffic], program.sent_bytes[traffic]);
      for (const Channel& channel : program.channels) {
        EXPECT_EQ(std::set<int>(channel.from.begin(), channel.from.end()).size(),
                  static_cast<size_t>(program.ranks));
      }
    }
  }
}

// Whose chunk each rank computes with, block by block. What arrives takes the place of what was there.
std::vector<std::vector<int>> OriginsSeen(const RankProgram& program, Traffic traffic) {
  std::vector<int> here(program.ranks);
  std::iota(here.begin(), here.end(), 0);
  std::vector<std::deque<std::vector<int>>> under_way(program.channels.size());
  std::vector<std::vector<int>> seen(program.ranks);
  for (const Action& action : program.actions) {
    if (action.kind == ActionKind::kCompute) {
      for (int rank = 0; rank < program.ranks; ++rank) seen[rank].push_back(here[rank]);
    } else if (program.channels[action.channel].traffic == traffic) {
      auto& messages = under_way[action.channel];
      if (action.kind == ActionKind::kStart) {
        messages.push_back(here);
      } else {
        for (int rank = 0; rank < program.ranks; ++rank) {
          here[rank] = messages.front()[program.channels[action.channel].from[rank]];
        }
        messages.pop_front();
      }
    }
  }
  return seen;
}

// Messages on each channel of a traffic, in the order of the channels.
std::vector<int> MessagesOf(const RankProgram& program, Traffic traffic) {
  std::vector<int> messages;
  for (size_t c = 0; c < program.channels.size(); ++c) {
    if (program.channels[c].traffic != traffic) continue;
    messages.push_back(static_cast<int>(
        std::count_if(program.actions.begin(), program.actions.end(), [&](const Action& action) {
          return action.kind == ActionKind::kStart && action.channel == static_cast<int>(c);
        })));
  }
  return messages;
}

// Each gradient leaves a rank that has just seen its chunk, by `seen`, and comes home with the last message.
void ExpectGradientsFollow(const RankProgram& program, Traffic gradient,
                           const std::vector<std::vector<int>>& seen) {
  std::vector<int> here(program.ranks);
  std::iota(here.begin(), here.end(), 0);
  size_t blocks = 0;
  for (const Action& action : program.actions) {
    const Channel& channel = program.channels[action.channel];
    if (action.kind != ActionKind::kStart || channel.traffic != gradient) continue;
    const std::vector<int> sent = here;
    for (int rank = 0; rank < program.ranks; ++rank) {
      EXPECT_EQ(sent[rank], seen[rank][blocks]);
      here[rank] = sent[channel.from[rank]];
    }
    ++blocks;
  }
  for (int rank = 0; rank < program.ranks; ++rank) EXPECT_EQ(here[rank], rank);
}

TEST(DoubleRing, ShowsEveryChunkToEveryRankOfItsHeadGroupAndBringsEachGradientHome) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 40; ++draw) {
    const int windows = Draw(random, 1, 5), window = Draw(random, 1, 5), places = windows * window;
    const DoubleRing ring{.heads = 1 << Draw(random, 0, 2),
                          .windows = windows,
                          .window = window,
                          .moves_queries = Draw(random, 0, 1) == 1};
    const AttentionJob job = TableJob(ring.ranks());
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      const bool queries = ring.moves_queries && pass == Pass::kBackward;
      const RankProgram program = DoubleRingProgram(job, ring, pass);
      const Traffic data = queries ? Traffic::kQ : Traffic::kKv;
      const auto seen = OriginsSeen(program, data);
      for (int rank = 0; rank < ring.ranks(); ++rank) {
        ASSERT_EQ(seen[rank].size(), static_cast<size_t>(places));
        EXPECT_EQ(std::set<int>(seen[rank].begin(), seen[rank].end()).size(), seen[rank].size());
        for (const int origin : seen[rank]) ASSERT_EQ(origin % ring.heads, rank % ring.heads);
      }
      EXPECT_EQ(MessagesOf(program, data), (std::vector<int>{windows * (window - 1), windows - 1}));
      // One behind its chunk, and one more home: between windows, or where there is one, inside it.
      std::vector<int> gradients = {windows * (window - 1), windows};
      if (windows == 1) gradients = {window == 1 ? 0 : window, 0};
      if (pass == Pass::kForward) gradients = {0, 0};
      const Traffic gradient = queries ? Traffic::kDq : Traffic::kDkv;
      EXPECT_EQ(MessagesOf(program, gradient), gradients);
      ExpectGradientsFollow(program, gradient, seen);
    }
  }
}

TEST(StarTrail, BringsEachGradientHome) {
  for (const int team : {1, 2, 3}) {
    const AttentionJob job = TableJob(36);
    const RankProgram program = StarTrailProgram(job, {.ranks = 36, .team = team}, Pass::kBackward);
    std::vector<int> origin(program.ranks);  // of the gradient that is here
    std::iota(origin.begin(), origin.end(), 0);
    for (const Action& action : program.actions) {
      const Channel& channel = program.channels[action.channel];
      if (action.kind != ActionKind::kStart || channel.traffic != Traffic::kDkv) continue;
      const std::vector<int> sent = origin;
      for (int rank = 0; rank < program.ranks; ++rank) origin[rank] = sent[channel.from[rank]];
    }
    for (int rank = 0; rank < program.ranks; ++rank) EXPECT_EQ(origin[rank], rank);
    const int64_t chunk = Nd(job) / 36;
    EXPECT_EQ(program.sent_bytes[Traffic::kDkv], 36 / team * 2 * chunk) << "round a ring of 36 / team²";
    // OdOQ and KV gathered, KV placed; dKV returned, and with dQ reduced.
    EXPECT_EQ(program.sent_bytes[Traffic::kGather],
              (team - 1) * 5 * chunk + 2 * team * chunk + 2 * team * chunk + (team - 1) * 3 * chunk);
  }
}

// What overlaps and what does not, where every message has a link for itself: a byte takes a second.
TEST(RivalPrograms, TakeWhatTheirStepsTake) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 200; ++draw) {
    const int heads = 1 << Draw(random, 0, 2);
    const int a = Draw(random, 1, 4), b = a * Draw(random, 1, 3), n = a * b;
    AttentionJob job = TableJob(heads * n * a);
    job.tokens /= 64;
    job.head_dim = 4;
    job.wire = {.element = 2, .partial = 4, .gradient = 4, .lse = 4};
    const HeadGroups groups(job, heads, n);
    const ChunkBytes& chunk = groups.chunk();
    const double block = 0.01 * Draw(random, 1, 400) * static_cast<double>(chunk.kv);
    const double start = 0.01 * Draw(random, 0, 100) * static_cast<double>(chunk.kv);  // of a launch
    const double launch = start + block;
    const auto seconds = [&](const RankProgram& program, const HeadGroups& of, Pass pass) {
      const Cluster cluster{.gpus_per_node = 1,
                            .same_node = {.bytes_per_second = 1},
                            .between_nodes = {.bytes_per_second = 1},
                            .attention_flops_per_second = of.BlockFlops(pass) / block,
                            .block_overhead_seconds = start};
      return LockstepSeconds(program, RowFirst(program.ranks), cluster);
    };
    const auto forward = [&](const RankProgram& program) { return seconds(program, groups, Pass::kForward); };
    const auto exchange = [&](std::initializer_list<int64_t> bytes) {
      return heads == 1
                 ? 0
                 : static_cast<double>(std::accumulate(bytes.begin(), bytes.end(), int64_t{0})) / heads;
    };
    const double q = chunk.q, kv = chunk.kv, o = chunk.o;
    const double around = exchange({chunk.q, chunk.kv, chunk.o_finished});

    const double window = (b - 1) * std::max(launch, kv) + launch;
    EXPECT_NEAR(forward(DoubleRingProgram(job, {.heads = heads, .windows = a, .window = b}, Pass::kForward)),
                around + (a - 1) * std::max(window, kv) + window, 1e-6);
    for (const int rings : {1, b}) {
      const double part = (chunk.kv + rings - 1) / rings;
      EXPECT_NEAR(
          forward(ParallelRingsProgram(job, {.heads = heads, .places = n, .span = b, .rings = rings})),
          around + (n - 1) * std::max(launch, part) + launch, 1e-6);
    }
    double gathered = 0;
    for (int hop = 1; hop < std::max(a, b); ++hop) {
      gathered += std::max(hop < a ? q : 0, hop < b ? kv : 0);
    }
    EXPECT_NEAR(forward(Attention2dProgram(job, {.heads = heads, .tile = {a, b}})),
                around + gathered + start + n * block + (a - 1) * o, 1e-6);
    EXPECT_NEAR(
        forward(Attention2dProgram(job, {.heads = heads, .tile = {a, b}, .overlaps = true})),
        around + (a - 1) * q + (b - 1) * std::max(start + a * block, kv) + start + a * block + (a - 1) * o,
        1e-6);

    const double share_q = groups.share().q, share_o = groups.share().o_finished;
    const ParallelRings ring{.heads = heads, .places = n, .span = b};
    EXPECT_NEAR(forward(TensorContextProgram(job, {.tensor = heads, .context = ring})),
                (heads - 1) * (share_q + share_o) + (n - 1) * kv + start + n * block, 1e-6);
    EXPECT_NEAR(forward(TensorContextProgram(job, {.tensor = heads, .context = ring, .gathers = false})),
                (heads - 1) * (share_q + share_o) + (n - 1) * std::max(launch, kv) + launch, 1e-6);

    const HeadGroups alone(job, 1, n);
    const double both = alone.chunk().kv;
    const int rounds = n / 2;  // two chunks each, the last one where n is even
    const double two_ways = n == 1 ? launch
                                   : std::max(launch, both) + (rounds - 1) * std::max(2 * launch, both) +
                                         (n % 2 == 0 ? 1 : 2) * launch;
    EXPECT_NEAR(seconds(TwoWayRingProgram(job, n), alone, Pass::kForward), two_ways, 1e-6);

    // Teams of a, in a star of a² · (b / a) · a ranks.
    const StarTrail star{.heads = heads, .ranks = n * a, .team = a};
    const HeadGroups teams(job, heads, star.ranks);
    const ChunkBytes& part = teams.chunk();
    const int placed = a == 1 ? 0 : a;  // what a team of one has is where its ring starts
    const double of_team = start + a * a * block;
    const double part_q = part.q, part_kv = part.kv, part_dkv = part.dkv;
    EXPECT_NEAR(seconds(StarTrailProgram(job, star, Pass::kForward), teams, Pass::kForward),
                exchange({part.q, part.kv, part.o_finished}) + (a - 1) * (part_q + part_kv) +
                    placed * part_kv + (b - 1) * std::max(of_team, a * part_kv) + of_team +
                    (a - 1) * static_cast<double>(part.o),
                1e-6);
    // Each dKV goes one block behind its KV, and waits for the one before it.
    double now = 0, left = 0;
    for (int hop = 0; hop < b; ++hop) {
      const double arrives = now + (hop + 1 < b ? a * part_kv : 0);
      left = hop == 0 ? of_team : std::max(now + of_team, left + a * part_dkv);
      now = std::max(left, arrives);
    }
    const double rings = left + (b == 1 ? 0 : a * part_dkv);
    EXPECT_NEAR(seconds(StarTrailProgram(job, star, Pass::kBackward), teams, Pass::kBackward),
                exchange({part.odoq, part.kv, part.dq, part.dkv}) +
                    (a - 1) * static_cast<double>(part.odoq + part.kv) + placed * part_kv + rings +
                    placed * part_dkv + (a - 1) * static_cast<double>(part.dkv + part.dq),
                1e-6);
  }
}

// In Q chunks of one byte a number: KV are 2, OdOQ 3, dKV 2, an accumulated output with its LSE 4.25.
TEST(RivalPrograms, TakeTheRoomOfTheirChunks) {
  constexpr double kState = 4.25;
  const auto chunks = [](const RankProgram& program) {
    return static_cast<double>(program.peak_bytes) / (64.0 * 64 * 16);
  };
  const AttentionJob job = TableJob(36);
  EXPECT_EQ(chunks(DoubleRingProgram(job, {.windows = 6, .window = 6}, Pass::kForward)), 1 + kState + 3 * 2);
  EXPECT_EQ(chunks(DoubleRingProgram(job, {.windows = 6, .window = 6}, Pass::kBackward)),
            3 + 1 + 3 * (2 + 2));
  EXPECT_EQ(
      chunks(DoubleRingProgram(job, {.windows = 6, .window = 6, .moves_queries = true}, Pass::kBackward)),
      2 + 2 + 3 * (3 + 1));
  EXPECT_EQ(chunks(StarTrailProgram(job, {.ranks = 36, .team = 3}, Pass::kForward)),
            3 * (1 + kState + 2 * 2));
  EXPECT_EQ(chunks(StarTrailProgram(job, {.ranks = 36, .team = 3}, Pass::kBackward)),
            3 * (3 + 1 + 2 * 2) + 2 * 3 * 2);
  EXPECT_EQ(chunks(ParallelRingsProgram(job, {.places = 36, .span = 6})), 1 + kState + 2 * 2);
  EXPECT_EQ(chunks(Attention2dProgram(job, {.tile = {4, 9}})), 4 * (1 + kState) + 9 * 2);
  EXPECT_EQ(chunks(Attention2dProgram(job, {.tile = {4, 9}, .overlaps = true})), 4 * (1 + kState) + 2 * 2);
  EXPECT_EQ(chunks(TwoWayRingProgram(job, 36)), 1 + kState + 4 * 2);
  EXPECT_EQ(chunks(TwoWayRingProgram(TableJob(3), 3)), 1 + kState + 3 * 2);
  // A rank's input, all heads of its team's tokens gathered, and what attention has.
  const ParallelRings rings{.heads = 4, .places = 9, .span = 3};
  EXPECT_EQ(chunks(TensorContextProgram(job, {.tensor = 4, .context = rings})), 4 + 1 + kState + 9 * 2);
  EXPECT_EQ(chunks(TensorContextProgram(job, {.tensor = 4, .context = rings, .gathers = false})),
            4 + 1 + kState + 2 * 2);
}

}  // namespace
}  // namespace meshfill::sim
