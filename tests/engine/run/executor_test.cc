// Attention over a mesh against attention without one; the blocks and bytes of each rank; and runs that end
// early.
#include "engine/run/executor.h"

#include <random>
#include <string>
#include <vector>

#include "engine/comm/in_process.h"
#include "engine/plan/comm_bytes.h"
#include "engine/plan/layer_reach.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "tests/engine/plan/visible_blocks.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/run/attention_case.h"
#include "tests/engine/run/watched_stream.h"

namespace meshfill {
namespace {

// Of the rank's tile: those with a visible pair, and its own. Where all see all, every one.
int BlocksOf(const Case& c, int rank) {
  const LayerReach reach(c.plan, c.window);
  if (reach.sees_all()) return c.plan.tile.ranks();
  const auto visible = VisibleBlocksOf(c.plan, c.window);
  int blocks = 0;
  for (int u = 0; u < c.plan.tile.a; ++u) {
    for (int v = 0; v < c.plan.tile.b; ++v) {
      const int mesh_rank = rank / c.plan.heads;
      const int q = reach.mesh().QChunk(mesh_rank, u), kv = reach.mesh().KvChunk(mesh_rank, v);
      blocks += visible[q][kv].pairs > 0 || (u == 0 && v == 0) ? 1 : 0;
    }
  }
  return blocks;
}

TEST(AttentionExecutor, EqualsAttentionWithoutAMesh) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200; ++i) {
    Case c = DrawCase(random);
    if (Draw(random, 0, 3) == 0) c.plan.partial_dtype = DType::kBf16;
    const double tolerance = c.plan.partial_dtype == DType::kF32 ? 1e-5 : 0.1;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << i << ": " << c.DebugString());
    const std::vector<RankEnd> ends = RunMesh(c);
    for (const RankEnd& end : ends) ASSERT_TRUE(end.status.ok()) << end.status;
    ASSERT_LT(LargestError(c, ends), tolerance);
    for (int rank = 0; rank < c.plan.ranks(); ++rank) {
      const RankStats& stats = ends[rank].stats;
      CommBytes expected = LayerCommBytes(c.model, c.plan, c.window, rank);
      expected[Traffic::kAllToAll] = 0;  // not the executor's
      ASSERT_EQ(stats.sent, expected);
      ASSERT_EQ(stats.blocks, BlocksOf(c, rank));
      ASSERT_LE(stats.block_seconds + stats.merge_seconds + stats.comm_wait_seconds(),
                stats.attention_seconds);
      const auto waits_for = [&](Traffic traffic) { return stats.wait_seconds[traffic] > 0; };
      ASSERT_FALSE(c.plan.tile.a == 1 && (waits_for(Traffic::kQ) || waits_for(Traffic::kO)));
      ASSERT_FALSE(c.plan.tile.b == 1 && waits_for(Traffic::kKv));
    }
  }
}

// T queries after a prefix of P tokens, whose keys and values are given, see P + T keys.
TEST(AttentionExecutor, AttendsToACachedPrefix) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 150; ++i) {
    const Case c = DrawCase(random, Draw<int64_t>(random, 1, Draw(random, 0, 1) ? 10 : 200));
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << i << ": " << c.DebugString());
    const std::vector<RankEnd> ends = RunMesh(c);
    for (const RankEnd& end : ends) ASSERT_TRUE(end.status.ok()) << end.status;
    ASSERT_LT(LargestError(c, ends), 1e-5);
    for (int rank = 0; rank < c.plan.ranks(); ++rank) {
      CommBytes expected = LayerCommBytes(c.model, c.plan, c.window, rank);
      expected[Traffic::kAllToAll] = 0;  // not the executor's
      ASSERT_EQ(ends[rank].stats.sent, expected);
    }
  }
}

TEST(AttentionExecutor, GivesTheSameBitsTwice) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 20; ++i) {
    const Case c = DrawCase(random);
    const std::vector<RankEnd> once = RunMesh(c);
    const std::vector<RankEnd> twice = RunMesh(c);
    for (int rank = 0; rank < c.plan.ranks(); ++rank) {
      ASSERT_EQ(once[rank].o, twice[rank].o) << "seed " << seed << ": " << c.DebugString();
    }
  }
}

TEST(AttentionExecutor, SendsPartialOutputsInBf16) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (Tile tile : {Tile{2, 2}, Tile{4, 1}, Tile{3, 2}, Tile{2, 4}, Tile{8, 2}}) {
    const auto layout =
        TokenLayout::Make(LayoutKind::kStriped, tile.ranks(), Draw<int64_t>(random, 1, 100), 4);
    const Case c = MakeCase(random, *layout, tile, DType::kBf16, 0);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << c.DebugString());
    const std::vector<RankEnd> ends = RunMesh(c);
    EXPECT_LT(LargestError(c, ends), 0.1);  // of values up to about 8, at 2^-9 a rounding and a − 1 of them
    for (int rank = 0; rank < tile.ranks(); ++rank) {
      EXPECT_EQ(ends[rank].stats.sent, LayerCommBytes(c.model, c.plan, 0, rank));
    }
  }
}

TEST(AttentionExecutor, RunsLayersOneAfterTheOther) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  const auto layout = TokenLayout::Make(LayoutKind::kStriped, 6, 50, 3);
  const Case c = MakeCase(random, *layout, {.a = 3, .b = 2}, DType::kF32, 0);
  const std::vector<RankEnd> ends = RunMesh(c, absl::Seconds(60), 5, nullptr);
  EXPECT_LT(LargestError(c, ends), 1e-5) << "seed " << seed;
  EXPECT_EQ(ends[4].stats.blocks, 5 * 6);
  EXPECT_EQ(ends[4].stats.sent[Traffic::kKv], 5 * LayerCommBytes(c.model, c.plan, 0, 4)[Traffic::kKv]);
}

// ---- Ends before the end. Waits could last a minute here; a test that ends within seconds was ended.

void ExpectPrompt(absl::Time start) { EXPECT_LT(MonotonicNow() - start, absl::Seconds(20)); }

TEST(AttentionExecutor, AFailedRankEndsAllRanks) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (Tile tile : {Tile{2, 2}, Tile{1, 6}, Tile{6, 1}, Tile{4, 4}}) {
    const auto layout = TokenLayout::Make(LayoutKind::kStriped, tile.ranks(), 200, 4);
    const Case c = MakeCase(random, *layout, tile, DType::kF32, 0);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << c.DebugString());
    const absl::Time start = MonotonicNow();
    const int failing_rank = Draw(random, 0, tile.ranks() - 1);
    // In the first of three layers: every output needs every rank's KV chunk, so that no rank can finish the
    // second.
    const int failing_block = Draw(random, 0, tile.ranks() - 1);
    const auto ends = RunMesh(c, absl::Minutes(1), 3, [&](int rank, WatchedStream& stream) {
      if (rank != failing_rank) return;
      stream.before_block = [=](int block) {
        return block == failing_block ? absl::DataLossError("this rank's memory broke") : absl::OkStatus();
      };
    });
    ExpectPrompt(start);
    for (const RankEnd& end : ends) {
      EXPECT_EQ(end.status.code(), absl::StatusCode::kDataLoss) << end.status;
      EXPECT_NE(end.status.message().find("this rank's memory broke"), std::string::npos) << end.status;
    }
  }
}

TEST(AttentionExecutor, AStopEndsAllRanks) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (Tile tile : {Tile{2, 2}, Tile{3, 4}}) {
    const auto layout = TokenLayout::Make(LayoutKind::kStriped, tile.ranks(), 200, 4);
    const Case c = MakeCase(random, *layout, tile, DType::kF32, 0);
    StopToken stop;
    const absl::Time start = MonotonicNow();
    const auto ends = RunMesh(
        c, absl::Minutes(1), 3,
        [&](int rank, WatchedStream& stream) {
          if (rank != 1) return;
          stream.before_block = [&stop](int block) {
            if (block == 2) stop.Stop();
            return absl::OkStatus();
          };
        },
        &stop);
    ExpectPrompt(start);
    for (const RankEnd& end : ends) {
      EXPECT_EQ(end.status.code(), absl::StatusCode::kCancelled) << "seed " << seed << ": " << end.status;
    }
  }
}

TEST(AttentionExecutor, AWaitForASilentRankHasADeadline) {
  std::mt19937_64 random(1);
  const auto layout = TokenLayout::Make(LayoutKind::kStriped, 2, 20, 4);
  const Case c = MakeCase(random, *layout, {.a = 1, .b = 2}, DType::kF32, 0);
  auto communicators = MakeInProcessCommunicators(2);  // rank 1 never runs
  WatchedStream stream(DType::kF32);
  RankStats stats;
  AttentionExecutor executor(c.plan, c.model, 0, stream, *communicators[0], absl::Milliseconds(40), stats);
  const absl::Status status = executor.Run(ChunksOf(c, 0, stream), 0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message().find("rank 0: recv_kv from rank 1"), std::string::npos) << status;
  EXPECT_GE(stats.wait_seconds[Traffic::kKv], 0.04);
  EXPECT_EQ(stats.wait_seconds[Traffic::kQ], 0);
}

}  // namespace
}  // namespace meshfill
