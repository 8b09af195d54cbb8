#include "engine/run/executor.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/comm/in_process.h"
#include "engine/plan/comm_bytes.h"
#include "engine/plan/cost_model.h"
#include "engine/plan/layer_reach.h"
#include "engine/run/head_exchange.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "kernels/reference/reference_device.h"
#include "tests/engine/layer_kinds.h"
#include "tests/engine/plan/visible_blocks.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/run/watched_stream.h"
#include "tests/engine/schedule/random_schedule.h"

namespace meshfill {
namespace {

// A prompt's Q, K and V of one layer, by token; K and V have its cached prefix, too.
struct Prompt {
  std::vector<float> q;      // [q_heads, tokens, head_dim]
  std::vector<float> k;      // [kv_heads, cached tokens + tokens, head_dim]
  std::vector<float> v;      // [kv_heads, cached tokens + tokens, head_dim]
  std::vector<float> sinks;  // [q_heads], or empty
};

struct Case {
  Plan plan;
  ModelShape model;
  int64_t window;
  Prompt prompt;

  int64_t tokens() const { return plan.layout.tokens(); }
  int64_t cached() const { return plan.cached_tokens; }
  int64_t keys() const { return cached() + tokens(); }

  // What a rank attends with: all of the prompt's heads and its own tokens, unless there are head groups.
  ModelShape slice() const { return model.HeadSlice(plan.heads); }
  TokenLayout groups() const { return plan.layout.Groups(plan.heads); }
  TokenLayout kv_groups() const { return plan.kv_layout().Groups(plan.heads); }
  int64_t chunk_tokens(int rank) const { return groups().ChunkTokens(rank / plan.heads); }
  int64_t token_at(int rank, int64_t slot) const { return groups().TokenAt(rank / plan.heads, slot); }
  int first_head(int rank, int heads) const { return rank % plan.heads * heads / plan.heads; }  // of so many

  std::string DebugString() const {
    return plan.DebugString() + ", " + plan.schedule.DebugString() + ", " + std::to_string(model.q_heads) +
           "/" + std::to_string(model.kv_heads) + " heads of " + std::to_string(model.head_dim) +
           ", window " + std::to_string(window) + (prompt.sinks.empty() ? "" : ", sinks");
  }
};

Case MakeCase(std::mt19937_64& random, const TokenLayout& layout, Tile tile, DType partial_dtype,
              int64_t window, int heads = 1, int64_t cached_tokens = 0, int kv_inner = 0) {
  const auto cost = [&random] { return Draw(random, 1, 4); };
  Schedule schedule = kv_inner != 0 || Draw(random, 0, 1)
                          ? RandomSchedule(random, tile, kv_inner)
                          : GreedySchedule(tile, {.c_q = cost(), .c_kv = cost(), .c_o = cost()});
  const int kv_heads = heads == 3 ? 1 : Draw(random, 1, 2);  // splits or replicates
  const PlanShape shape = {.layout = layout,
                           .heads = heads,
                           .tile = tile,
                           .kv_inner = kv_inner,
                           .partial_dtype = partial_dtype,
                           .cached_tokens = cached_tokens};
  Case c = {.plan = {shape, Grain().slice_tokens, {}, std::move(schedule), {}},
            .model = {.layers = 1,
                      .q_heads = kv_heads * heads * Draw(random, 1, 3),
                      .kv_heads = kv_heads,
                      .head_dim = 2 * Draw(random, 1, 6),
                      .dtype = DType::kF32},
            .window = window,
            .prompt = {}};
  std::normal_distribution<float> normal;
  for (auto [values, rows] : {std::pair(&c.prompt.q, c.model.q_heads * c.tokens()),
                              std::pair(&c.prompt.k, c.model.kv_heads * c.keys()),
                              std::pair(&c.prompt.v, c.model.kv_heads * c.keys())}) {
    values->resize(rows * c.model.head_dim);
    std::generate(values->begin(), values->end(), [&] { return 2 * normal(random); });
  }
  if (Draw(random, 0, 1) == 1) {
    c.prompt.sinks.resize(c.model.q_heads);
    for (float& sink : c.prompt.sinks) sink = 2 * normal(random);
  }
  return c;
}

Case DrawCase(std::mt19937_64& random, int64_t cached_tokens = 0) {
  const int heads = Draw(random, 0, 1) ? 1 : Draw(random, 2, 3);
  const std::vector<Tile> tiles = TilesOf(Draw(random, 1, 16 / heads));
  const int n = heads * tiles.front().ranks();
  const int64_t most_tokens = Draw(random, 0, 3) == 0 ? n : 90;  // fewer tokens than ranks, too
  const auto layout = TokenLayout::Make(static_cast<LayoutKind>(Draw(random, 0, 2)), n,
                                        Draw<int64_t>(random, 1, most_tokens), Draw<int64_t>(random, 1, 9));
  const Tile tile = tiles[Draw<size_t>(random, 0, tiles.size() - 1)];
  return MakeCase(random, *layout, tile, DType::kF32, Draw(random, 0, 1) ? Draw<int64_t>(random, 1, 40) : 0,
                  heads, cached_tokens, DrawKvInner(random, tile));
}

// Attention by its definition, in double: [q_heads, tokens, head_dim].
std::vector<double> DirectAttention(const Case& c) {
  const auto& [q, k, v, sinks] = c.prompt;
  const int64_t tokens = c.tokens();
  const int d = c.model.head_dim;
  std::vector<double> o(q.size());
  for (int head = 0; head < c.model.q_heads; ++head) {
    const int64_t kv_head = head / (c.model.q_heads / c.model.kv_heads);
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t position = c.cached() + i;
      const int64_t first = c.window == 0 ? 0 : std::max<int64_t>(0, position - c.window + 1);
      std::vector<double> scores;
      for (int64_t j = first; j <= position; ++j) {
        double dot = 0;
        for (int x = 0; x < d; ++x)
          dot += double{q[(head * tokens + i) * d + x]} * k[(kv_head * c.keys() + j) * d + x];
        scores.push_back(dot / std::sqrt(d));
      }
      const double max = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (double score : scores) sum += std::exp(score - max);
      if (!sinks.empty()) sum += std::exp(sinks[head] - max);
      for (int64_t j = first; j <= position; ++j) {
        const double weight = std::exp(scores[j - first] - max) / sum;
        for (int x = 0; x < d; ++x)
          o[(head * tokens + i) * d + x] += weight * v[(kv_head * c.keys() + j) * d + x];
      }
    }
  }
  return o;
}

// This rank's rows of one tensor that `groups` deals, by slot: `heads` of them from `first_head` on.
void Deal(const Case& c, const TokenLayout& groups, int rank, const std::vector<float>& from, int first_head,
          int heads, float* to) {
  const int d = c.model.head_dim;
  const int group = rank / c.plan.heads;
  const int64_t chunk_tokens = groups.ChunkTokens(group);
  for (int head = 0; head < heads; ++head) {
    for (int64_t slot = 0; slot < chunk_tokens; ++slot) {
      const int64_t row = (first_head + head) * groups.tokens() + groups.TokenAt(group, slot);
      std::copy_n(&from[row * d], d, to + (head * chunk_tokens + slot) * d);
    }
  }
}

LayerChunks ChunksOf(const Case& c, int rank, Stream& stream) {
  const int64_t chunk_tokens = c.chunk_tokens(rank);
  const ModelShape slice = c.slice();
  LayerChunks chunks = {
      .q = stream.Allocate(slice.q_bytes(chunk_tokens)).value(),
      .kv = stream.Allocate(slice.kv_bytes(c.kv_groups().ChunkTokens(rank / c.plan.heads))).value()};
  const int q_head = c.first_head(rank, c.model.q_heads), kv_head = c.first_head(rank, c.model.kv_heads);
  auto* const kv = chunks.kv->data<float>();
  Deal(c, c.groups(), rank, c.prompt.q, q_head, slice.q_heads, chunks.q->data<float>());
  Deal(c, c.kv_groups(), rank, c.prompt.k, kv_head, slice.kv_heads, kv);
  Deal(c, c.kv_groups(), rank, c.prompt.v, kv_head, slice.kv_heads, kv + chunks.kv->size_bytes() / 8);
  return chunks;
}

struct RankEnd {
  absl::Status status;
  std::vector<float> o;  // [q_heads, chunk_tokens, head_dim]
  RankStats stats;
};

// Runs each rank on its thread as its caller would: whoever fails aborts the others. `prepare` may set up a
// stream.
std::vector<RankEnd> RunMesh(const Case& c, absl::Duration wait_timeout, int layers,
                             const std::function<void(int rank, WatchedStream&)>& prepare,
                             const StopToken* stop = nullptr) {
  const int n = c.plan.ranks();
  auto communicators = MakeInProcessCommunicators(n);
  std::vector<RankEnd> ends(n);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      RankEnd& end = ends[rank];
      WatchedStream stream(DType::kF32, stop);
      if (prepare != nullptr) prepare(rank, stream);
      AttentionExecutor executor(c.plan, c.model, rank, stream, *communicators[rank], wait_timeout,
                                 end.stats);
      for (int layer = 0; layer < layers && end.status.ok(); ++layer) {
        absl::StatusOr<BufferRef> o = executor.Run(ChunksOf(c, rank, stream), c.window,
                                                   c.prompt.sinks.empty() ? nullptr : c.prompt.sinks.data());
        end.status = o.status();
        if (!o.ok()) continue;
        const float* data = (*o)->data<float>();
        end.o.assign(data, data + c.slice().q_elements(c.chunk_tokens(rank)));
      }
      if (!end.status.ok()) communicators[rank]->Abort(end.status);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ends;
}

std::vector<RankEnd> RunMesh(const Case& c) { return RunMesh(c, absl::Seconds(60), 1, nullptr); }

double LargestError(const Case& c, const std::vector<RankEnd>& ends) {
  const std::vector<double> expected = DirectAttention(c);
  const int d = c.model.head_dim;
  double largest = 0;
  for (int rank = 0; rank < c.plan.ranks(); ++rank) {
    if (!ends[rank].status.ok()) return std::numeric_limits<double>::infinity();
    const int64_t chunk_tokens = c.chunk_tokens(rank);
    for (int64_t i = 0; i < c.slice().q_elements(chunk_tokens); ++i) {
      const int64_t head = c.first_head(rank, c.model.q_heads) + i / (chunk_tokens * d);
      const int64_t token = c.token_at(rank, i / d % chunk_tokens);
      const double error = std::abs(ends[rank].o[i] - expected[(head * c.tokens() + token) * d + i % d]);
      largest = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(largest, error);
    }
  }
  return largest;
}

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

// ---- Lifetimes, on one rank alone whose peers answer at once and drop what they get.

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
