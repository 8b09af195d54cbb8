// What a rank holds of what peers send it, and for how long: a rank alone, whose peers answer at once and
// drop what they get.
#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "engine/plan/cost_model.h"
#include "engine/run/executor.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/run/attention_case.h"
#include "tests/engine/run/watched_stream.h"
#include "tests/engine/schedule/random_schedule.h"

namespace meshfill {
namespace {

class EchoCommunicator : public Communicator {
 public:
  EchoCommunicator(int size, CountedMemory partials) : size_(size), partials_(std::move(partials)) {}
  std::vector<std::weak_ptr<Buffer>> received_q;  // what peers sent, in order
  std::vector<std::weak_ptr<Buffer>> received_kv;

  int rank() const override { return 0; }
  int size() const override { return size_; }
  absl::StatusOr<std::unique_ptr<PendingReceive>> SendReceive(Traffic traffic, int, BufferRef message, int,
                                                              size_t receive_bytes) override {
    message.reset();  // the peer has it now, and gives one of its own
    BufferRef answer = (traffic == Traffic::kO ? partials_ : chunks_).Allocate(receive_bytes);
    if (traffic == Traffic::kQ) received_q.push_back(answer);
    if (traffic == Traffic::kKv) received_kv.push_back(answer);
    return std::make_unique<Answer>(std::move(answer));
  }
  void Abort(absl::Status) override {}

 private:
  struct Answer : PendingReceive {
    explicit Answer(BufferRef message) : message(std::move(message)) {}
    absl::StatusOr<BufferRef> Wait(absl::Time) override { return std::move(message); }
    BufferRef message;
  };
  const int size_;
  CountedMemory partials_;  // where the partial outputs of peers lie
  CountedMemory chunks_;
};

// When each block begins, exactly the chunks are alive that have arrived and that a later block or send still
// needs.
TEST(AttentionExecutor, ReleasesChunksAfterTheirLastUse) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 40; ++i) {
    const Tile tile = {.a = Draw(random, 1, 5), .b = Draw(random, 1, 5)};
    const auto layout = TokenLayout::Make(LayoutKind::kStriped, tile.ranks(), 2 * tile.ranks(), 1);
    const Case c = MakeCase(random, *layout, tile, DType::kF32, 0);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << c.DebugString());
    EchoCommunicator communicator(tile.ranks(), CountedMemory());
    WatchedStream stream(DType::kF32);
    LayerChunks chunks = ChunksOf(c, 0, stream);
    communicator.received_q.push_back(chunks.q);  // #0 is the rank's own
    communicator.received_kv.push_back(chunks.kv);

    struct Use {
      BlockIndex block;
      int q_sends;  // begun when the block begins
      int kv_sends;
    };
    std::vector<Use> uses;
    int q_sends = 0;
    int kv_sends = 0;
    for (const Step& step : c.plan.schedule.steps) {
      q_sends += step.comm == Traffic::kQ;
      kv_sends += step.comm == Traffic::kKv;
      for (BlockIndex block : step.blocks) uses.push_back({block, q_sends, kv_sends});
    }
    stream.before_block = [&](int now) {
      const auto needed = [&](auto&& uses_chunk) {
        return std::any_of(uses.begin() + now, uses.end(), uses_chunk);
      };
      for (int u = 0; u < static_cast<int>(communicator.received_q.size()); ++u) {
        const bool to_send = u < tile.a - 1 && u >= uses[now].q_sends;
        EXPECT_EQ(!communicator.received_q[u].expired(),
                  to_send || needed([u](const Use& use) { return use.block.u == u; }))
            << "Q#" << u << " at block " << now;
      }
      for (int v = 0; v < static_cast<int>(communicator.received_kv.size()); ++v) {
        const bool to_send = v < tile.b - 1 && v >= uses[now].kv_sends;
        EXPECT_EQ(!communicator.received_kv[v].expired(),
                  to_send || needed([v](const Use& use) { return use.block.v == v; }))
            << "KV#" << v << " at block " << now;
      }
      return absl::OkStatus();
    };
    RankStats stats;
    AttentionExecutor executor(c.plan, c.model, 0, stream, communicator, absl::Seconds(1), stats);
    ASSERT_TRUE(executor.Run(std::move(chunks), 0).ok());
    EXPECT_EQ(stream.blocks, tile.ranks());
  }
}

// The planner's peak counts as many partial outputs as the executor holds. Chunks are equal here, so that one
// rank holds its share; a ring holds one O and nothing else beyond what all plans hold.
TEST(AttentionExecutor, HoldsAsManyPartialsAsPredicted) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 100; ++i) {
    const Tile tile = {.a = Draw(random, 1, 6), .b = Draw(random, 1, 4)};
    const auto layout = TokenLayout::Make(LayoutKind::kStriped, tile.ranks(), 2 * tile.ranks(), 1);
    const DType wire = Draw(random, 0, 1) ? DType::kF32 : DType::kBf16;
    const Case c =
        MakeCase(random, *layout, tile, wire, 0, /*heads=*/1, /*cached_tokens=*/0, DrawKvInner(random, tile));
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << c.DebugString());
    WatchedStream chunk_stream(DType::kF32);
    WatchedStream stream(DType::kF32);
    EchoCommunicator communicator(tile.ranks(), stream.memory);
    RankStats stats;
    AttentionExecutor executor(c.plan, c.model, 0, stream, communicator, absl::Seconds(1), stats);
    {
      const auto o = executor.Run(ChunksOf(c, 0, chunk_stream), 0);
      ASSERT_TRUE(o.ok()) << o.status();
      EXPECT_EQ(stream.memory.live_bytes(), c.model.partial_bytes(2, DType::kF32)) << "O#0 alone is left";
    }
    const auto predicted = [&](const Schedule& schedule) {
      return Predict(c.model, PoolSpeed(), {.layout = *layout, .tile = schedule.tile, .partial_dtype = wire},
                     schedule)
          .peak_bytes;
    };
    const int64_t ring_peak = predicted(GreedySchedule({.a = 1, .b = tile.ranks()}, {}));
    const int64_t one_o = c.model.partial_bytes(layout->tokens(), DType::kF32);
    EXPECT_EQ(stream.memory.peak_bytes() * tile.ranks(), predicted(c.plan.schedule) - ring_peak + one_o);
  }
}

// A window's layer of a ring: one message to the next rank, and none where it would bring nothing.
TEST(AttentionExecutor, AsksForNothingThatNobodySees) {
  std::mt19937_64 random(1);
  const auto layout = TokenLayout::Make(LayoutKind::kContiguous, 8, 8 * 16, 1);
  const Case c = MakeCase(random, *layout, {.a = 1, .b = 8}, DType::kF32, 10);
  EchoCommunicator communicator(8, CountedMemory());
  WatchedStream stream(DType::kF32);
  RankStats stats;
  AttentionExecutor executor(c.plan, c.model, 3, stream, communicator, absl::Seconds(1), stats);
  ASSERT_TRUE(executor.Run(ChunksOf(c, 3, stream), c.window).ok());
  EXPECT_EQ(std::ssize(communicator.received_kv), 1);
  EXPECT_EQ(stats.sent[Traffic::kKv], c.model.kv_bytes(9));
  EXPECT_EQ(stats.blocks, 2);
}

// A partial that arrives for a row not yet begun is that row's state: no allocation for the row, no merge.
TEST(AttentionExecutor, AdoptsPartialsOfRowsNotYetBegun) {
  std::mt19937_64 random(1);
  const auto layout = TokenLayout::Make(LayoutKind::kStriped, 3, 6, 1);
  Case c = MakeCase(random, *layout, {.a = 3, .b = 1}, DType::kF32, 0);
  c.plan.schedule = {.tile = {.a = 3, .b = 1},
                     .steps = {{.comm = Traffic::kQ, .blocks = {}},
                               {.comm = Traffic::kQ, .blocks = {{1, 0}}},
                               {.comm = Traffic::kO, .blocks = {}},  // O#2 arrives, not begun
                               {.comm = std::nullopt, .blocks = {{2, 0}}},
                               {.comm = Traffic::kO, .blocks = {}},  // O#0 arrives, not begun
                               {.comm = std::nullopt, .blocks = {{0, 0}}}}};
  ASSERT_TRUE(CheckSchedule(c.plan.schedule).ok());
  EchoCommunicator communicator(3, CountedMemory());
  WatchedStream stream(DType::kF32);
  LayerChunks chunks = ChunksOf(c, 0, stream);
  stream.allocations = 0;
  RankStats stats;
  AttentionExecutor executor(c.plan, c.model, 0, stream, communicator, absl::Seconds(1), stats);
  ASSERT_TRUE(executor.Run(std::move(chunks), 0).ok());
  EXPECT_EQ(stream.merges, 0);
  EXPECT_EQ(stream.allocations, 1) << "of row 1 alone";
  EXPECT_LT(LargestError(c, RunMesh(c)), 1e-5);

  c.plan.partial_dtype = DType::kBf16;  // cannot be adopted, must still be counted
  EXPECT_LT(LargestError(c, RunMesh(c)), 0.1);
}

}  // namespace
}  // namespace meshfill
