#include "engine/schedule/schedule.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/run/lockstep_mesh.h"
#include "tests/engine/schedule/random_schedule.h"

namespace meshfill {
namespace {

using enum Traffic;

constexpr std::optional<Traffic> kComms[] = {std::nullopt, kQ, kKv, kO};

// Algorithm 2 line by line, over a matrix of blocks.
class PlainAlgorithm2 {
 public:
  PlainAlgorithm2(Tile tile, OverlapCosts costs)
      : tile_(tile), costs_(costs), done_(tile.a, std::vector<bool>(tile.b, false)) {}

  Schedule Run() {
    while (q_ < tile_.a || kv_ < tile_.b) {
      const double n_q = q_ < tile_.a ? Reachable(q_ + 1, kv_) - Reachable(q_, kv_) : 0;
      const double n_kv = kv_ < tile_.b ? Reachable(q_, kv_ + 1) - Reachable(q_, kv_) : 0;
      if (n_q / costs_.c_q > n_kv / costs_.c_kv) {
        Emit(kQ, costs_.c_q);
        ++q_;
      } else {
        Emit(kKv, costs_.c_kv);
        ++kv_;
      }
    }
    for (int sent = 0; sent < tile_.a - 1; ++sent) {
      while (!RowDone(sent + 1)) Emit(std::nullopt, 1);
      Emit(kO, costs_.c_o);
    }
    while (Remaining() > 0) Emit(std::nullopt, 1);
    return schedule_;
  }

 private:
  static int Reachable(int q, int kv) { return q * kv; }
  bool RowDone(int u) const { return std::count(done_[u].begin(), done_[u].end(), true) == tile_.b; }
  int Remaining() const {
    int remaining = 0;
    for (const auto& row : done_) remaining += static_cast<int>(std::count(row.begin(), row.end(), false));
    return remaining;
  }
  void Emit(std::optional<Traffic> comm, int blocks) {
    schedule_.tile = tile_;
    Step step{.comm = comm, .blocks = {}};
    for (int i = 0; i < blocks; ++i) {
      bool found = false;
      for (int order = 1; order <= tile_.a && !found; ++order) {  // rows 1, 2, … a−1, then 0
        const int u = order % tile_.a;
        for (int v = 0; v < kv_ && u < q_ && !found; ++v) {
          if (done_[u][v]) continue;
          done_[u][v] = found = true;
          step.blocks.push_back({.u = u, .v = v});
        }
      }
    }
    schedule_.steps.push_back(step);
  }

  const Tile tile_;
  const OverlapCosts costs_;
  std::vector<std::vector<bool>> done_;
  int q_ = 1;
  int kv_ = 1;
  Schedule schedule_;
};

OverlapCosts DrawCosts(std::mt19937_64& random) {
  const int limit = Draw(random, 1, 12);
  return {.c_q = Draw(random, 1, limit), .c_kv = Draw(random, 1, limit), .c_o = Draw(random, 1, limit)};
}

Schedule DrawSchedule(std::mt19937_64& random, int max_ranks) {
  const std::vector<Tile> tiles = TilesOf(Draw(random, 1, max_ranks));
  const Tile tile = tiles[Draw<size_t>(random, 0, tiles.size() - 1)];
  return Draw(random, 0, 1) ? RandomSchedule(random, tile, DrawKvInner(random, tile))
                            : GreedySchedule(tile, DrawCosts(random));
}

TEST(GreedySchedule, IsAlgorithm2) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 400; ++i) {
    const Tile tile = {.a = Draw(random, 1, 9), .b = Draw(random, 1, 9)};
    const OverlapCosts costs = DrawCosts(random);
    ASSERT_EQ(GreedySchedule(tile, costs), PlainAlgorithm2(tile, costs).Run())
        << "seed " << seed << ", tile " << tile.DebugString() << ", costs " << costs.c_q << " " << costs.c_kv
        << " " << costs.c_o;
  }
}

TEST(GreedySchedule, IsAsTheHeaderDrawsIt) {
  const Schedule schedule = GreedySchedule({.a = 3, .b = 3}, {.c_q = 1, .c_kv = 2, .c_o = 1});
  EXPECT_EQ(schedule.DebugString(),
            "3x3 | q: (0,0) | kv: (1,0) | q: (1,1) | kv: (2,0) (2,1) | none: (1,2) | o: (2,2) | o: (0,1) | "
            "none: (0,2)");
}

TEST(GreedySchedule, OfARingReceivesWhileItComputes) {
  const Schedule schedule = GreedySchedule({.a = 1, .b = 4}, {});
  EXPECT_EQ(schedule.DebugString(), "1x4 | kv: (0,0) | kv: (0,1) | kv: (0,2) | none: (0,3)");
}

TEST(GreedySchedule, OfOneRankIsOneBlock) {
  EXPECT_EQ(GreedySchedule({.a = 1, .b = 1}, {}).DebugString(), "1x1 | none: (0,0)");
}

// For all n ≤ 64 and every tile: chunks arrive where the local indices say, every block is computed once by
// Owner(i, j), and every output is reduced from each of its blocks once.
TEST(GreedySchedule, RunsOnEveryMesh) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int n = 1; n <= 64; ++n) {
    for (Tile tile : TilesOf(n)) {
      const Schedule schedule = GreedySchedule(tile, DrawCosts(random));
      ASSERT_TRUE(CheckSchedule(schedule).ok()) << "seed " << seed << ": " << CheckSchedule(schedule);
      ASSERT_EQ(LockstepMesh(tile).Run(schedule), "") << "seed " << seed << ": " << schedule.DebugString();
    }
  }
}

void ExpectRefused(const Schedule& schedule, const std::string& what) {
  const absl::Status status = CheckSchedule(schedule);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << schedule.DebugString();
  EXPECT_NE(status.message().find(what), std::string::npos) << status << "\n" << schedule.DebugString();
}

// 2x2 with every dependency tight.
Schedule Tight() {
  return {.tile = {.a = 2, .b = 2},
          .steps = {{.comm = kQ, .blocks = {{0, 0}}},
                    {.comm = kKv, .blocks = {{1, 0}}},
                    {.comm = std::nullopt, .blocks = {{1, 1}}},
                    {.comm = kO, .blocks = {{0, 1}}}}};
}

TEST(CheckSchedule, AcceptsTheTightSchedule) { EXPECT_TRUE(CheckSchedule(Tight()).ok()); }

TEST(CheckSchedule, NamesWhatIsWrong) {
  Schedule broken = Tight();
  broken.steps[1].blocks.clear();
  ExpectRefused(broken, "step 3: sends O#1 with 1 of 2 blocks computed");

  broken = Tight();
  broken.steps[3].blocks.clear();
  ExpectRefused(broken, "block (0,1) never computed");

  broken = Tight();
  broken.steps[3].blocks.push_back({0, 0});
  ExpectRefused(broken, "step 3: block (0,0) is computed twice");

  broken = Tight();
  std::swap(broken.steps[0].comm, broken.steps[1].comm);
  ExpectRefused(broken, "step 1: block (1,0) needs a Q chunk that has not arrived");

  broken = Tight();
  broken.steps[2].blocks = {};
  broken.steps[1].blocks.push_back({1, 1});
  ExpectRefused(broken, "step 1: block (1,1) needs a KV chunk that has not arrived");

  broken = Tight();
  std::swap(broken.steps[2].comm, broken.steps[3].comm);
  ExpectRefused(broken, "step 2: sends O#1 with 1 of 2 blocks computed");

  broken = Tight();
  broken.steps.push_back({.comm = kQ, .blocks = {}});
  ExpectRefused(broken, "step 4: receives a Q chunk beyond");

  broken = Tight();
  broken.steps.push_back({.comm = kKv, .blocks = {}});
  ExpectRefused(broken, "step 4: receives a KV chunk beyond");

  broken = Tight();
  broken.steps.push_back({.comm = kO, .blocks = {}});
  ExpectRefused(broken, "step 4: sends an O chunk beyond");

  broken = Tight();
  broken.steps[3].comm = std::nullopt;
  ExpectRefused(broken, "0 Send O, not 1");

  broken = Tight();
  broken.steps.push_back({});
  ExpectRefused(broken, "step 4: is idle");

  broken = Tight();
  broken.steps[3].blocks.push_back({2, 0});
  ExpectRefused(broken, "block (2,0) is outside the tile");

  broken = Tight();
  broken.steps[3].blocks.push_back({0, -1});
  ExpectRefused(broken, "block (0,-1) is outside the tile");

  broken = {.tile = {.a = 2, .b = 1},
            .steps = {{.comm = kO, .blocks = {{0, 0}}}, {.comm = kQ, .blocks = {}}}};
  ExpectRefused(broken, "step 0: sends O#1");

  broken = {.tile = {.a = 1, .b = 2}, .steps = {{.comm = std::nullopt, .blocks = {{0, 0}}}}};
  ExpectRefused(broken, "0 Recv KV, not 1");

  broken = {.tile = {.a = 2, .b = 1}, .steps = {{.comm = std::nullopt, .blocks = {{0, 0}}}}};
  ExpectRefused(broken, "0 Recv Q, not 1");

  ExpectRefused({.tile = {.a = 0, .b = 1}, .steps = {}}, "0x1");

  for (const Traffic traffic : {kDq, kDkv, kAllToAll, kGather}) {
    broken = Tight();
    broken.steps.push_back({.comm = traffic, .blocks = {}});
    ExpectRefused(broken, "step 4: has an unknown communication");
  }

  broken = Tight();
  broken.steps[0].spans = 0;
  ExpectRefused(broken, "step 0: has a communication of 0 steps");

  broken = Tight();
  broken.steps[3].spans = 2;
  ExpectRefused(broken, "step 3: has a communication that ends behind the last step");

  broken = Tight();
  broken.steps[2].spans = 2;
  ExpectRefused(broken, "step 2: has no communication, of 2 steps");

  broken = Tight();
  broken.steps[0].spans = 2;
  ExpectRefused(broken, "step 1: block (1,0) needs a Q chunk that has not arrived");

  broken = Tight();
  broken.steps[0] = {.comm = kQ, .blocks = {{0, 0}}, .spans = 4};
  broken.steps[1] = {.comm = kKv, .blocks = {}};
  broken.steps[2] = {.comm = std::nullopt, .blocks = {{0, 1}}};
  ExpectRefused(broken, "step 3: sends O#1 with 0 of 2 blocks computed");

  broken.tile = {.a = 3, .b = 1};
  broken.steps = {{.comm = kQ, .blocks = {{0, 0}}, .spans = 2}, {.comm = kQ, .blocks = {}}};
  ExpectRefused(broken, "step 1: starts q before the q before it along its ring has ended");
}

// 1x4 in inner rings of 2: the outer ring brings KV#2 meanwhile.
Schedule TightDoubleRing() {
  return {.tile = {.a = 1, .b = 4},
          .steps = {{.comm = kKv, .blocks = {}, .spans = 3},
                    {.comm = kKv, .blocks = {{0, 0}}},
                    {.comm = std::nullopt, .blocks = {{0, 1}}},
                    {.comm = kKv, .blocks = {{0, 2}}},
                    {.comm = std::nullopt, .blocks = {{0, 3}}}},
          .kv_inner = 2};
}

TEST(CheckSchedule, NamesWhatIsWrongInADoubleRing) {
  EXPECT_TRUE(CheckSchedule(TightDoubleRing()).ok()) << CheckSchedule(TightDoubleRing());
  Schedule broken = TightDoubleRing();
  broken.steps[0].spans = 4;
  ExpectRefused(broken, "step 3: sends a KV chunk that has not arrived");

  broken = TightDoubleRing();
  broken.steps[1].spans = 3;
  ExpectRefused(broken, "step 2: block (0,1) needs a KV chunk that has not arrived");

  broken = TightDoubleRing();
  broken.steps[2].blocks = {{0, 2}};
  ExpectRefused(broken, "step 2: block (0,2) needs a KV chunk that has not arrived");

  broken = TightDoubleRing();
  broken.kv_inner = 0;
  ExpectRefused(broken, "step 1: starts kv before the kv before it along its ring has ended");

  for (const int kv_inner : {-1, 1, 3, 4, 5}) {
    broken = TightDoubleRing();
    broken.kv_inner = kv_inner;
    ExpectRefused(broken, "4 ranks of a KV group in rings of " + std::to_string(kv_inner));
  }
}

// One random change: swaps two steps or their communications, or drops, doubles or moves a block or a
// communication.
void Mutate(std::mt19937_64& random, Schedule& schedule) {
  const auto draw_step = [&]() -> Step& {
    return schedule.steps[Draw<size_t>(random, 0, schedule.steps.size() - 1)];
  };
  Step& from = draw_step();
  Step& to = draw_step();
  switch (Draw(random, 0, 8)) {
    case 7:
      from.spans += Draw(random, -1, 1);
      return;
    case 8:
      std::swap(from.spans, to.spans);
      return;
    case 0:
      std::swap(from, to);
      return;
    case 1:
      std::swap(from.comm, to.comm);
      return;
    case 2:
      from.comm = kComms[Draw(random, 0, 3)];
      return;
    case 3:
      schedule.steps.push_back({.comm = kComms[Draw(random, 1, 3)], .blocks = {}});
      return;
    default:
      break;
  }
  if (from.blocks.empty()) return;
  const size_t i = Draw<size_t>(random, 0, from.blocks.size() - 1);
  const BlockIndex block = from.blocks[i];
  if (Draw(random, 0, 2) != 0) from.blocks.erase(from.blocks.begin() + static_cast<std::ptrdiff_t>(i));
  if (Draw(random, 0, 2) != 0) to.blocks.push_back(block);
}

TEST(CheckSchedule, AcceptsWhatRunsOnAMeshAndNothingElse) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  int accepted = 0;
  int refused = 0;
  for (int i = 0; i < 4000; ++i) {
    Schedule schedule = DrawSchedule(random, 16);
    if (i % 8 != 0) Mutate(random, schedule);
    const bool idle = std::any_of(schedule.steps.begin(), schedule.steps.end(),
                                  [](const Step& step) { return step == Step{}; });
    const std::string error = LockstepMesh(schedule.tile, schedule.kv_inner).Run(schedule);
    const absl::Status status = CheckSchedule(schedule);
    ASSERT_EQ(status.ok(), error.empty() && !idle)
        << "seed " << seed << ", draw " << i << ": " << status << "; on a mesh: " << error << "\n"
        << schedule.DebugString();
    ++(status.ok() ? accepted : refused);
  }
  EXPECT_GT(accepted, 100);
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace meshfill
