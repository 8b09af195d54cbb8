// A rank's memory between processes, behind a window, and beside one that lags, against what is predicted.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "engine/comm/in_process.h"
#include "engine/plan/cost_model.h"
#include "engine/run/executor.h"
#include "engine/run/head_exchange.h"
#include "gtest/gtest.h"
#include "tests/engine/layer_kinds.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/run/attention_case.h"
#include "tests/engine/run/watched_stream.h"
#include "tests/engine/schedule/random_schedule.h"

namespace meshfill {
namespace {

// A peer elsewhere: what leaves stays in memory to the end of its step, what arrives has a buffer from the
// step's start.
class CopyingCommunicator : public Communicator {
 public:
  CopyingCommunicator(int size, CountedMemory memory) : size_(size), memory_(std::move(memory)) {}

  int rank() const override { return 0; }
  int size() const override { return size_; }
  absl::StatusOr<std::unique_ptr<PendingReceive>> SendReceive(Traffic, int, BufferRef message, int,
                                                              size_t receive_bytes) override {
    return std::make_unique<Transfer>(std::move(message), memory_.Allocate(receive_bytes));
  }
  void Abort(absl::Status) override {}

 private:
  struct Transfer : PendingReceive {
    Transfer(BufferRef leaves, BufferRef arrives) : leaves(std::move(leaves)), arrives(std::move(arrives)) {}
    absl::StatusOr<BufferRef> Wait(absl::Time) override {
      leaves.reset();
      return std::move(arrives);
    }
    BufferRef leaves;
    BufferRef arrives;
  };
  const int size_;
  CountedMemory memory_;
};

// Of what the model has no width for, RoPE tables and slices are left.
int64_t BytesBesideAttention(const ModelShape& model, int64_t tokens) {
  return tokens * (model.head_dim + 2 * model.q_elements(1) + model.kv_elements(1)) * 4;
}

// Between processes the planner counts chunks too, and what is on its way. Of equal chunks, one rank holds
// its share.
TEST(AttentionExecutor, HoldsAsMuchAsPredictedBetweenProcesses) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 300; ++i) {
    const Tile tile = {.a = Draw(random, 1, 6), .b = Draw(random, 1, 6)};
    const int heads = Draw(random, 1, 3);
    const int ranks = heads * tile.ranks();
    const auto layout = TokenLayout::Make(LayoutKind::kStriped, ranks, 2 * ranks, 1);
    const DType wire = Draw(random, 0, 1) ? DType::kF32 : DType::kBf16;
    const Case c =
        MakeCase(random, *layout, tile, wire, 0, heads, /*cached_tokens=*/0, DrawKvInner(random, tile));
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << c.DebugString());
    WatchedStream stream(DType::kF32);
    CopyingCommunicator communicator(ranks, stream.memory);
    RankStats stats;
    AttentionExecutor executor(c.plan, c.model, 0, stream, communicator, absl::Seconds(1), stats);
    const bool leaves = Draw(random, 0, 1) == 1;  // the projected K and V, for the host
    LayerChunks chunks = ChunksOf(c, 0, stream);
    BufferRef leaving;
    if (leaves) leaving = heads == 1 ? chunks.kv : stream.memory.Allocate(c.model.kv_bytes(2));
    ASSERT_TRUE(executor.Run(std::move(chunks), 0).ok());
    const int64_t predicted = Predict(c.model, PoolSpeed(),
                                      {.layout = *layout,
                                       .heads = heads,
                                       .tile = tile,
                                       .kv_inner = c.plan.kv_inner,
                                       .partial_dtype = wire,
                                       .keeps_kv = leaves,
                                       .kv_on_host = true,
                                       .one_memory = false},
                                      c.plan.schedule)
                                  .peak_bytes -
                              BytesBesideAttention(c.model, layout->tokens());
    if (heads == 1) {
      EXPECT_EQ(stream.memory.peak_bytes() * ranks, predicted);
      continue;
    }
    EXPECT_LE(stream.memory.peak_bytes() * ranks, predicted);
    WatchedStream around(DType::kF32);
    CopyingCommunicator exchanging(ranks, around.memory);
    HeadExchange exchange(c.plan, c.model, 0, around, exchanging, absl::Seconds(1), stats);
    const auto own = [&](int64_t bytes) { return around.memory.Allocate(static_cast<size_t>(bytes)); };
    LayerChunks projected{.q = own(c.model.q_bytes(2)), .kv = own(c.model.kv_bytes(2))};
    if (leaves) leaving = projected.kv;
    ASSERT_TRUE(exchange.StartToHeads(0, std::move(projected)).ok());
    ASSERT_TRUE(exchange.FinishToHeads().ok());
    ASSERT_TRUE(exchange.StartToTokens(own(c.slice().partial_bytes(2 * heads, DType::kF32))).ok());
    ASSERT_TRUE(exchange.FinishToTokens(0).ok());
    EXPECT_LE(around.memory.peak_bytes() * ranks, predicted);
  }
}

// Where a part of what the walk counts does not travel, a rank has no more than is predicted: what of a chunk
// goes on in part is a copy.
TEST(AttentionExecutor, HoldsNoMoreThanPredictedWhereAWindowCuts) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200; ++i) {
    const Tile tile = {.a = Draw(random, 1, 4), .b = Draw(random, 1, 6)};
    const int64_t chunk = Draw<int64_t>(random, 1, 12);
    const auto layout = TokenLayout::Make(LayoutKind::kContiguous, tile.ranks(), chunk * tile.ranks(), 1);
    const DType wire = Draw(random, 0, 1) ? DType::kF32 : DType::kBf16;
    Case c = MakeCase(random, *layout, tile, wire, Draw<int64_t>(random, 1, 3 * chunk));
    SetWindow(c.model, c.window, 1);
    const int rank = Draw(random, 0, tile.ranks() - 1);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", rank " << rank << ": " << c.DebugString());
    WatchedStream stream(DType::kF32);
    CopyingCommunicator communicator(tile.ranks(), stream.memory);
    RankStats stats;
    AttentionExecutor executor(c.plan, c.model, rank, stream, communicator, absl::Seconds(1), stats);
    ASSERT_TRUE(executor.Run(ChunksOf(c, rank, stream), c.window).ok());
    EXPECT_LE(stream.memory.peak_bytes() * tile.ranks(),
              Predict(c.model, PoolSpeed(),
                      {.layout = *layout, .tile = tile, .partial_dtype = wire, .one_memory = false},
                      c.plan.schedule)
                      .peak_bytes -
                  BytesBesideAttention(c.model, layout->tokens()));
  }
}

// Forwards, and counts the messages that were started.
class CountingCommunicator : public Communicator {
 public:
  struct Started {
    std::mutex mu;
    std::condition_variable changed;
    std::vector<int> messages;  // by rank
  };

  CountingCommunicator(std::unique_ptr<Communicator> inner, Started& started)
      : inner_(std::move(inner)), started_(started) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  absl::StatusOr<std::unique_ptr<PendingReceive>> SendReceive(Traffic traffic, int to, BufferRef message,
                                                              int from, size_t receive_bytes) override {
    auto receive = inner_->SendReceive(traffic, to, std::move(message), from, receive_bytes);
    const std::lock_guard lock(started_.mu);
    ++started_.messages[rank()];
    started_.changed.notify_all();
    return receive;
  }
  void Abort(absl::Status reason) override { inner_->Abort(std::move(reason)); }

 private:
  const std::unique_ptr<Communicator> inner_;
  Started& started_;
};

// One message a layer: while a rank computes its first block, the one before it comes n − 1 layers further,
// and stops there. In one memory no more is held than is predicted, though all those chunks wait.
TEST(AttentionExecutor, HoldsNoMoreThanPredictedWhereARankLags) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 20; ++i) {
    const int n = Draw(random, 2, 6), lagging = Draw(random, 1, n - 1);  // rank 0 is sent nothing
    const int64_t chunk = Draw<int64_t>(random, 2, 8);
    const int64_t window =
        Draw(random, 0, 1) ? chunk + 1 : Draw<int64_t>(random, 2, chunk);  // whole, or a part
    const auto layout = TokenLayout::Make(LayoutKind::kContiguous, n, chunk * n, 1);
    Case c = MakeCase(random, *layout, {.a = 1, .b = n}, DType::kF32, window);
    c.model.layers = n;
    SetWindow(c.model, window, n);
    // All messages first, and the rank's own block last: chunks are held for as long as can be.
    c.plan.schedule = {.tile = c.plan.tile, .steps = {}};
    for (int v = 1; v < n; ++v) c.plan.schedule.steps.push_back({.comm = Traffic::kKv, .blocks = {}});
    for (int v = 1; v <= n; ++v) {
      c.plan.schedule.steps.push_back({.comm = std::nullopt, .blocks = {{0, v % n}}});
    }
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", rank " << lagging
                                    << " lags: " << c.DebugString());
    CountingCommunicator::Started started;
    started.messages.resize(n);
    auto communicators = MakeInProcessCommunicators(n);
    const CountedMemory memory;
    int64_t held_then = 0;
    std::vector<absl::Status> ends(n);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < n; ++rank) {
      threads.emplace_back([&, rank] {
        CountingCommunicator communicator(std::move(communicators[rank]), started);
        WatchedStream stream(DType::kF32);
        stream.memory = memory;
        stream.before_block = [&](int block) {
          if (rank != lagging || block > 0) return absl::OkStatus();
          std::unique_lock lock(started.mu);
          const bool came = started.changed.wait_for(lock, std::chrono::minutes(1), [&] {
            for (int ahead = 1; ahead < n; ++ahead) {
              if (started.messages[(lagging + ahead) % n] < ahead + 1) return false;
            }
            return true;
          });
          held_then = memory.live_bytes();
          return came ? absl::OkStatus() : absl::DeadlineExceededError("the others stopped before");
        };
        RankStats stats;
        AttentionExecutor executor(c.plan, c.model, rank, stream, communicator, absl::Minutes(2), stats);
        for (int layer = 0; layer < n && ends[rank].ok(); ++layer) {
          ends[rank] = executor.Run(ChunksOf(c, rank, stream), window).status();
        }
        if (!ends[rank].ok()) communicator.Abort(ends[rank]);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& end : ends) ASSERT_TRUE(end.ok()) << end;
    const int64_t predicted = Predict(c.model, PoolSpeed(), c.plan, c.plan.schedule).peak_bytes -
                              BytesBesideAttention(c.model, layout->tokens());
    EXPECT_LE(held_then, predicted);
    // All messages of the lagging rank's mailbox wait, but the one that it computes with.
    EXPECT_GE(held_then, c.model.q_bytes(layout->tokens()) + c.model.kv_bytes(layout->tokens()) +
                             (n - 1) * c.model.kv_bytes(std::min(window, chunk + 1) - 1));
  }
}

}  // namespace
}  // namespace meshfill
