// The room that the programs of meshes take.
#include "engine/sim/mesh_program.h"

#include "engine/schedule/schedule_cost.h"
#include "engine/schedule/schedule_walk.h"
#include "engine/sim/head_groups.h"
#include "engine/sim/placed_mesh.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/sim/table_job.h"

namespace meshfill::sim {
namespace {

// Whether a partial output arrives for a row that has nothing: it is copied there, and takes a row's room
// more.
struct ArrivesFirst : ScheduleVisitor {
  bool does = false;
  void End(const Transfer& transfer, RowState row) {
    does |= transfer.traffic == Traffic::kO && row == RowState::kEmpty;
  }
};

TEST(MeshProgram, TakesTheRoomOfItsSchedulesChunks) {
  std::mt19937_64 random(TestSeed());
  int compared = 0;
  for (int draw = 0; draw < 200; ++draw) {
    const Tile tile{.a = Draw(random, 1, 8), .b = Draw(random, 1, 8)};
    AttentionJob job = TableJob(tile.ranks());
    job.wire = {.element = Draw(random, 1, 4), .partial = 4, .gradient = 4, .lse = 4};
    const HeadGroups groups(job, 1, tile.ranks());
    const OverlapCosts bytes = {.c_q = static_cast<int>(groups.chunk().q),
                                .c_kv = static_cast<int>(groups.chunk().kv),
                                .c_o = static_cast<int>(groups.chunk().o)};
    const Schedule schedule = GreedySchedule(
        tile, {.c_q = Draw(random, 1, 9), .c_kv = Draw(random, 1, 9), .c_o = Draw(random, 1, 9)});
    ArrivesFirst arrives_first;
    Walk(schedule, arrives_first);
    if (arrives_first.does) continue;
    EXPECT_EQ(MeshForwardProgram(job, 1, schedule).peak_bytes, PeakChunkCost(schedule, bytes))
        << schedule.DebugString();
    ++compared;
  }
  EXPECT_GT(compared, 100);
}

TEST(MeshProgram, TakesTheRoomOfItsExchange) {
  AttentionJob job = TableJob(8);
  job.wire.element = 4;
  const PlacedMesh alone{.heads = 8, .tile = {}, .placement = RowFirst(8)};
  const int64_t q = 4 * Nd(job) / 8;
  // Q and KV of a rank's tokens, and those of its heads.
  EXPECT_EQ(MeshProgram(job, Pass::kForward, alone, kCluster).peak_bytes, 2 * (q + 2 * q));
  EXPECT_EQ(MeshProgram(job, Pass::kBackward, alone, kCluster).peak_bytes, 2 * (3 * q + 2 * q));
}

// Every gradient accumulates from the first block on. In a ring the first one leaves beside the last block.
TEST(MeshProgram, OfABackwardRingTakesTheRoomOfAllItsGradients) {
  for (const int n : {3, 8}) {
    AttentionJob job = TableJob(n);
    job.wire.gradient = 4;
    const int64_t q = Nd(job) / n, kv = 2 * q, dq = 4 * q, dkv = 8 * q;
    for (const Tile tile : {Tile{1, n}, Tile{n, 1}}) {
      const PlacedMesh ring{.tile = tile, .placement = RowFirst(n)};
      const int64_t expected =
          tile.a == 1 ? 3 * q + kv + dq + (n + 1) * dkv : 3 * q + kv + (n + 1) * dq + dkv;
      EXPECT_EQ(MeshProgram(job, Pass::kBackward, ring, kCluster).peak_bytes, expected) << tile.DebugString();
    }
  }
}

}  // namespace
}  // namespace meshfill::sim
