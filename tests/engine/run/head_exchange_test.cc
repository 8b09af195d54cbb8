#include "engine/run/head_exchange.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/comm/in_process.h"
#include "engine/plan/comm_bytes.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "tests/engine/random_seed.h"
#include "tests/kernels/lone_stream.h"

namespace meshfill {
namespace {

struct Case {
  Plan plan;
  ModelShape model;

  int h() const { return plan.heads; }
  std::string DebugString() const {
    return plan.DebugString() + ", " + std::to_string(model.q_heads) + "/" + std::to_string(model.kv_heads) +
           " heads, " + DTypeName(model.dtype);
  }
};

// One ring in each mesh: the exchange knows no tile.
Case MakeCase(const TokenLayout& layout, int heads, int q_heads, int kv_heads, DType dtype,
              int64_t cached_tokens = 0) {
  const Tile tile = {.a = 1, .b = layout.ranks() / heads};
  return {.plan = {{.layout = layout, .heads = heads, .tile = tile, .cached_tokens = cached_tokens}},
          .model = {.layers = 1, .q_heads = q_heads, .kv_heads = kv_heads, .head_dim = 4, .dtype = dtype}};
}

Case DrawCase(std::mt19937_64& random) {
  const int heads = Draw(random, 2, 6);
  const int n = heads * Draw(random, 1, 3);
  const int64_t most_tokens = Draw(random, 0, 2) == 0 ? n : 200;  // fewer tokens than ranks, too
  const auto layout = TokenLayout::Make(static_cast<LayoutKind>(Draw(random, 0, 2)), n,
                                        Draw<int64_t>(random, 1, most_tokens), Draw<int64_t>(random, 1, 20));
  int kv_heads = heads * Draw(random, 1, 2);                               // a multiple of h
  if (Draw(random, 0, 1)) kv_heads = std::gcd(heads, Draw(random, 1, 6));  // or a divisor
  return MakeCase(*layout, heads, std::lcm(kv_heads, heads) * Draw(random, 1, 2), kv_heads,
                  Draw(random, 0, 1) ? DType::kBf16 : DType::kF32,
                  Draw(random, 0, 1) ? Draw<int64_t>(random, 1, 200) : 0);
}

// The same in slices of any length, behind cached tokens that the ranks have whole stripes of, or behind
// none.
Case DrawSlicedCase(std::mt19937_64& random) {
  Case c = DrawCase(random);
  const TokenLayout& layout = c.plan.layout;
  const int64_t round = layout.ranks() * layout.stripe();
  const bool follows = c.plan.cached_tokens > 0 && layout.kind() == LayoutKind::kStriped;
  c.plan.cached_tokens = follows ? round * Draw(random, 1, 3) : 0;
  const int64_t largest = layout.LargestChunkTokens();
  c.plan.exchange_tokens =
      Draw<int64_t>(random, (largest + kMostExchanges - 1) / kMostExchanges, largest + 1);
  return c;
}

// Values of its own for each row, exact in bf16: the bits of the row's number, six in each.
float Value(int tensor, int head, int64_t token, int x) {
  const int64_t row = (head * 512 + token) * 4 + tensor;
  return static_cast<float>((row >> (6 * x)) & 63);
}

enum Tensor { kQ, kK, kV, kO };

float Load(const void* data, DType dtype, int64_t index) {
  return dtype == DType::kF32 ? static_cast<const float*>(data)[index]
                              : static_cast<const BFloat16*>(data)[index].ToFloat();
}

void Store(void* data, DType dtype, int64_t index, float value) {
  if (dtype == DType::kF32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<BFloat16*>(data)[index] = BFloat16::FromFloat(value);
  }
}

// Rows of `heads`, then of `tokens`, as [heads, tokens, head_dim].
void Fill(Tensor tensor, const std::vector<int>& heads, const std::vector<int64_t>& tokens, DType dtype,
          void* data) {
  int64_t index = 0;
  for (int head : heads) {
    for (int64_t token : tokens) {
      for (int x = 0; x < 4; ++x) Store(data, dtype, index++, Value(tensor, head, token, x));
    }
  }
}

void ExpectFilled(Tensor tensor, const std::vector<int>& heads, const std::vector<int64_t>& tokens,
                  DType dtype, const void* data) {
  int64_t index = 0;
  for (int head : heads) {
    for (int64_t token : tokens) {
      for (int x = 0; x < 4; ++x, ++index) {
        ASSERT_EQ(Load(data, dtype, index), Value(tensor, head, token, x))
            << "tensor " << tensor << ", head " << head << ", token " << token;
      }
    }
  }
}

std::vector<int> Heads(int count) {
  std::vector<int> heads(count);
  std::iota(heads.begin(), heads.end(), 0);
  return heads;
}

// From attention's definition: query head q attends KV head q / (q_heads / kv_heads).
std::vector<int> QueryHeads(const Case& c, int member) {
  std::vector<int> heads(c.model.q_heads / c.h());
  std::iota(heads.begin(), heads.end(), member * static_cast<int>(heads.size()));
  return heads;
}

std::vector<int> KvHeads(const Case& c, int member) {
  std::vector<int> heads;
  for (int head : QueryHeads(c, member)) heads.push_back(head / (c.model.q_heads / c.model.kv_heads));
  heads.erase(std::unique(heads.begin(), heads.end()), heads.end());
  return heads;
}

std::vector<int64_t> Tokens(const TokenLayout& layout, int rank) {
  std::vector<int64_t> tokens;
  for (int64_t slot = 0; slot < layout.ChunkTokens(rank); ++slot)
    tokens.push_back(layout.TokenAt(rank, slot));
  return tokens;
}

std::vector<int64_t> GroupTokens(const Case& c, const TokenLayout& layout, int rank) {
  std::vector<int64_t> tokens;
  for (int member = 0; member < c.h(); ++member) {
    const std::vector<int64_t> own = Tokens(layout, rank / c.h() * c.h() + member);
    tokens.insert(tokens.end(), own.begin(), own.end());
  }
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

// K, then V, of all heads of these tokens.
BufferRef KvOf(const Case& c, const std::vector<int64_t>& keys, Stream& stream) {
  BufferRef kv = stream.Allocate(c.model.kv_bytes(std::ssize(keys))).value();
  auto* const k = kv->data<std::byte>();
  Fill(kK, Heads(c.model.kv_heads), keys, c.model.dtype, k);
  Fill(kV, Heads(c.model.kv_heads), keys, c.model.dtype, k + kv->size_bytes() / 2);
  return kv;
}

BufferRef QOf(const Case& c, const std::vector<int64_t>& tokens, Stream& stream) {
  BufferRef q = stream.Allocate(c.model.q_bytes(std::ssize(tokens))).value();
  Fill(kQ, Heads(c.model.q_heads), tokens, c.model.dtype, q->data());
  return q;
}

// Of all a rank's tokens.
LayerChunks ChunksOf(const Case& c, int rank, Stream& stream) {
  return {.q = QOf(c, Tokens(c.plan.layout, rank), stream),
          .kv = KvOf(c, Tokens(c.plan.kv_layout(), rank), stream)};
}

std::vector<int64_t> Part(const std::vector<int64_t>& tokens, int64_t begin, int64_t end) {
  return {tokens.begin() + begin, tokens.begin() + end};
}

// Starts one slice of this rank's.
absl::Status StartSlice(const Case& c, int rank, Stream& stream, HeadExchange& exchange, int slice) {
  if (exchange.slices() == 1) return exchange.StartToHeads(0, ChunksOf(c, rank, stream));
  const std::vector<int64_t> tokens = Tokens(c.plan.layout, rank), keys = Tokens(c.plan.kv_layout(), rank);
  const int64_t cached = std::ssize(keys) - std::ssize(tokens);
  const int64_t begin = std::min<int64_t>(slice * c.plan.exchange_tokens, std::ssize(tokens));
  const int64_t end = std::min<int64_t>(begin + c.plan.exchange_tokens, std::ssize(tokens));
  EXPECT_EQ(exchange.OwnSlots(slice), (SlotRange{begin, end}));
  if (slice == 0 && cached > 0) {
    const absl::Status prefix = exchange.StartPrefix(KvOf(c, Part(keys, 0, cached), stream));
    if (!prefix.ok()) return prefix;
  }
  return exchange.StartToHeads(slice, {.q = QOf(c, Part(tokens, begin, end), stream),
                                       .kv = KvOf(c, Part(keys, cached + begin, cached + end), stream)});
}

absl::StatusOr<LayerChunks> ToHeads(const Case& c, int rank, Stream& stream, HeadExchange& exchange) {
  for (int slice = 0; slice < exchange.slices(); ++slice) {
    const absl::Status started = StartSlice(c, rank, stream, exchange, slice);
    if (!started.ok()) return started;
  }
  return exchange.FinishToHeads();
}

// Of a whole chunk.
absl::StatusOr<LayerOutput> ToTokens(HeadExchange& exchange, BufferRef output) {
  const absl::Status started = exchange.StartToTokens(std::move(output));
  if (!started.ok()) return started;
  return exchange.FinishToTokens(0);
}

// Every rank on its thread, as its caller would; whoever fails aborts the others.
std::vector<absl::Status> RunRanks(
    const Case& c, const std::function<absl::Status(int rank, Stream&, HeadExchange&, RankStats&)>& run) {
  const int n = c.plan.ranks();
  auto communicators = MakeInProcessCommunicators(n);
  std::vector<absl::Status> ends(n);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      const LoneStream stream = ReferenceStream(c.model.dtype);
      RankStats stats;
      HeadExchange exchange(c.plan, c.model, rank, *stream, *communicators[rank], absl::Seconds(60), stats);
      ends[rank] = run(rank, *stream, exchange, stats);
      if (!ends[rank].ok()) communicators[rank]->Abort(ends[rank]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ends;
}

void ExpectGroup(const Case& c, int rank, const LayerChunks& chunks) {
  const std::vector<int> kv_heads = KvHeads(c, rank % c.h());
  const std::vector<int64_t> keys = GroupTokens(c, c.plan.kv_layout(), rank);
  const DType dtype = c.model.dtype;
  const auto* const kv = chunks.kv->data<std::byte>();
  EXPECT_EQ(chunks.kv->size_bytes(), 2 * kv_heads.size() * keys.size() * 4 * DTypeBytes(dtype));
  ExpectFilled(kQ, QueryHeads(c, rank % c.h()), GroupTokens(c, c.plan.layout, rank), dtype, chunks.q->data());
  ExpectFilled(kK, kv_heads, keys, dtype, kv);
  ExpectFilled(kV, kv_heads, keys, dtype, kv + chunks.kv->size_bytes() / 2);
}

// The mesh's output of a rank, as its value says.
BufferRef GroupOutput(const Case& c, int rank, Stream& stream) {
  const std::vector<int64_t> tokens = GroupTokens(c, c.plan.layout, rank);
  const ModelShape slice = c.model.HeadSlice(c.h());
  BufferRef o = stream.Allocate(slice.partial_bytes(std::ssize(tokens), DType::kF32)).value();
  Fill(kO, QueryHeads(c, rank % c.h()), tokens, DType::kF32, o->data());
  return o;
}

void ExpectOutput(const Case& c, const LayerOutput& output, const std::vector<int64_t>& tokens) {
  EXPECT_EQ(output.dtype, c.model.dtype);
  ASSERT_EQ(std::ssize(output.parts), c.h());
  for (int part = 0; part < c.h(); ++part) {
    const std::vector<int> heads = QueryHeads(c, part);
    EXPECT_EQ(output.parts[part]->size_bytes(), heads.size() * tokens.size() * 4 * DTypeBytes(c.model.dtype));
    ExpectFilled(kO, heads, tokens, c.model.dtype, output.parts[part]->data());
  }
}

TEST(HeadExchange, TradesTokensForHeadsAndBack) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 100; ++i) {
    const Case c = DrawCase(random);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << i << ": " << c.DebugString());
    const auto ends = RunRanks(c, [&](int rank, Stream& stream, HeadExchange& exchange, RankStats& stats) {
      absl::StatusOr<LayerChunks> chunks = ToHeads(c, rank, stream, exchange);
      if (!chunks.ok()) return chunks.status();
      ExpectGroup(c, rank, *chunks);
      absl::StatusOr<LayerOutput> output = ToTokens(exchange, GroupOutput(c, rank, stream));
      if (!output.ok()) return output.status();
      ExpectOutput(c, *output, Tokens(c.plan.layout, rank));

      const CommBytes expected = LayerCommBytes(c.model, c.plan, 0, rank);
      EXPECT_EQ(stats.sent, (CommBytes{{Traffic::kAllToAll, expected[Traffic::kAllToAll]}}));
      EXPECT_LE(stats.merge_seconds + stats.comm_wait_seconds(), stats.attention_seconds);
      EXPECT_EQ(stats.comm_wait_seconds(), stats.wait_seconds[Traffic::kAllToAll]);
      return absl::OkStatus();
    });
    for (const absl::Status& end : ends) ASSERT_TRUE(end.ok()) << end;
    if (HasFailure()) return;
  }
}

// Three layers: while a slice's heads come back, those of others leave for the next layer.
TEST(HeadExchange, TradesSlicesWhileOthersAreUnderWay) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  int several = 0;
  for (int i = 0; i < 100; ++i) {
    const Case c = DrawSlicedCase(random);
    several += c.plan.exchanges() > 2;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << i << ": " << c.DebugString() << ", "
                                    << c.plan.exchanges() << " exchanges of " << c.plan.exchange_tokens);
    const auto ends = RunRanks(c, [&](int rank, Stream& stream, HeadExchange& exchange, RankStats& stats) {
      EXPECT_EQ(exchange.slices(), c.plan.exchanges());
      const std::vector<int64_t> tokens = Tokens(c.plan.layout, rank);
      for (int layer = 0; layer <= 3; ++layer) {
        for (int slice = 0; slice < exchange.slices(); ++slice) {
          if (layer > 0) {
            absl::StatusOr<LayerOutput> output = exchange.FinishToTokens(slice);
            if (!output.ok()) return output.status();
            const auto [begin, end] = exchange.OwnSlots(slice);
            ExpectOutput(c, *output, Part(tokens, begin, end));
          }
          if (layer == 3) continue;
          const absl::Status started = StartSlice(c, rank, stream, exchange, slice);
          if (!started.ok()) return started;
        }
        if (layer == 3) break;
        absl::StatusOr<LayerChunks> chunks = exchange.FinishToHeads();
        if (!chunks.ok()) return chunks.status();
        ExpectGroup(c, rank, *chunks);
        const absl::Status started = exchange.StartToTokens(GroupOutput(c, rank, stream));
        if (!started.ok()) return started;
      }
      const CommBytes layer = LayerCommBytes(c.model, c.plan, 0, rank);
      EXPECT_EQ(stats.sent, (CommBytes{{Traffic::kAllToAll, 3 * layer[Traffic::kAllToAll]}}));
      EXPECT_LE(stats.merge_seconds + stats.comm_wait_seconds(), stats.attention_seconds);
      EXPECT_EQ(stats.comm_wait_seconds(), stats.wait_seconds[Traffic::kAllToAll]);
      return absl::OkStatus();
    });
    for (const absl::Status& end : ends) ASSERT_TRUE(end.ok()) << end;
    if (HasFailure()) return;
  }
  EXPECT_GT(several, 5);
}

TEST(HeadExchange, RoundsOutputsOnceToTheComputeDtype) {
  const auto layout = TokenLayout::Make(LayoutKind::kStriped, 2, 2, 1);
  const Case c = MakeCase(*layout, 2, 2, 2, DType::kBf16);
  const auto ends = RunRanks(c, [&](int, Stream& stream, HeadExchange& exchange, RankStats&) {
    absl::StatusOr<BufferRef> o = stream.Allocate(c.model.HeadSlice(2).partial_bytes(2, DType::kF32));
    if (!o.ok()) return o.status();
    std::fill_n((*o)->data<float>(), 2 * 4 + 2, 1 + 0x1p-8f + 0x1p-20f);  // just above the middle of two bf16
    absl::StatusOr<LayerOutput> output = ToTokens(exchange, *std::move(o));
    if (!output.ok()) return output.status();
    for (const BufferRef& part : output->parts) {
      for (int x = 0; x < 4; ++x) EXPECT_EQ(part->data<BFloat16>()[x].ToFloat(), 1 + 0x1p-7f);
    }
    return absl::OkStatus();
  });
  for (const absl::Status& end : ends) EXPECT_TRUE(end.ok()) << end;
}

TEST(HeadExchange, WithoutHeadGroupsPassesBuffersOn) {
  const auto layout = TokenLayout::Make(LayoutKind::kStriped, 3, 30, 2);
  const Case c = MakeCase(*layout, 1, 4, 2, DType::kBf16);
  auto communicators = MakeInProcessCommunicators(3);
  const LoneStream stream = ReferenceStream(DType::kBf16);
  RankStats stats;
  HeadExchange exchange(c.plan, c.model, 1, *stream, *communicators[1], absl::Seconds(1), stats);
  const LayerChunks own = ChunksOf(c, 1, *stream);
  ASSERT_TRUE(exchange.StartToHeads(0, own).ok());
  const auto chunks = exchange.FinishToHeads();
  ASSERT_TRUE(chunks.ok()) << chunks.status();
  EXPECT_EQ(chunks->q, own.q);
  EXPECT_EQ(chunks->kv, own.kv);
  const auto output = ToTokens(exchange, own.q);
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_EQ(output->parts, std::vector<BufferRef>{own.q});
  EXPECT_EQ(output->dtype, DType::kF32);
  EXPECT_EQ(stats.sent, CommBytes{});
}

// Peers of this rank that answer at once, drop what they get, and look at each message.
class EchoCommunicator : public Communicator {
 public:
  EchoCommunicator(int size, Stream& stream) : size_(size), stream_(stream) {}
  std::function<void(int message)> on_send;
  int messages = 0;

  int rank() const override { return 0; }
  int size() const override { return size_; }
  absl::StatusOr<std::unique_ptr<PendingReceive>> SendReceive(Traffic, int, BufferRef message, int,
                                                              size_t receive_bytes) override {
    message.reset();
    if (on_send != nullptr) on_send(messages);
    ++messages;
    absl::StatusOr<BufferRef> answer = stream_.Allocate(receive_bytes);
    if (!answer.ok()) return answer.status();
    return std::make_unique<Answer>(*std::move(answer));
  }
  void Abort(absl::Status) override {}

 private:
  struct Answer : PendingReceive {
    explicit Answer(BufferRef message) : message(std::move(message)) {}
    absl::StatusOr<BufferRef> Wait(absl::Time) override { return std::move(message); }
    BufferRef message;
  };
  const int size_;
  Stream& stream_;
};

// The planner's peak counts on it: Q of all heads has gone when KV moves.
TEST(HeadExchange, ReleasesChunksOnceTheyHaveMoved) {
  const auto layout = TokenLayout::Make(LayoutKind::kStriped, 3, 30, 2);
  const Case c = MakeCase(*layout, 3, 6, 3, DType::kF32);
  const LoneStream stream = ReferenceStream(DType::kF32);
  EchoCommunicator communicator(3, *stream);
  RankStats stats;
  HeadExchange exchange(c.plan, c.model, 0, *stream, communicator, absl::Seconds(1), stats);
  LayerChunks own = ChunksOf(c, 0, *stream);
  const std::weak_ptr<Buffer> q = own.q, kv = own.kv;
  communicator.on_send = [&](int message) {  // two of Q, two of K, two of V
    EXPECT_EQ(q.expired(), message >= 2) << message;
    EXPECT_FALSE(kv.expired()) << message;
  };
  ASSERT_TRUE(exchange.StartToHeads(0, std::move(own)).ok());
  EXPECT_EQ(communicator.messages, 0);
  ASSERT_TRUE(exchange.FinishToHeads().ok());
  EXPECT_EQ(communicator.messages, 6);
  EXPECT_TRUE(kv.expired());
}

TEST(HeadExchange, AWaitForASilentMemberHasADeadline) {
  const auto layout = TokenLayout::Make(LayoutKind::kStriped, 4, 40, 2);
  const Case c = MakeCase(*layout, 2, 2, 2, DType::kF32);
  auto communicators = MakeInProcessCommunicators(4);  // rank 3 never runs
  const LoneStream stream = ReferenceStream(DType::kF32);
  RankStats stats;
  HeadExchange exchange(c.plan, c.model, 2, *stream, *communicators[2], absl::Milliseconds(40), stats);
  const absl::Status status = ToHeads(c, 2, *stream, exchange).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message().find("rank 2: all_to_all from rank 3"), std::string::npos) << status;
  EXPECT_GE(stats.wait_seconds[Traffic::kAllToAll], 0.04);
}

TEST(HeadExchange, AFailedMemberEndsItsGroup) {
  const auto layout = TokenLayout::Make(LayoutKind::kStriped, 3, 30, 2);
  const Case c = MakeCase(*layout, 3, 3, 3, DType::kF32);
  const absl::Time start = MonotonicNow();
  const auto ends = RunRanks(c, [&](int rank, Stream& stream, HeadExchange& exchange, RankStats&) {
    if (rank == 1) return absl::DataLossError("this rank's memory broke");
    return ToHeads(c, rank, stream, exchange).status();
  });
  EXPECT_LT(MonotonicNow() - start, absl::Seconds(20));
  for (const absl::Status& end : ends) {
    EXPECT_EQ(end.code(), absl::StatusCode::kDataLoss) << end;
    EXPECT_NE(end.message().find("this rank's memory broke"), std::string::npos) << end;
  }
}

// A member that goes silent, or fails, with slices of both directions under way.
TEST(HeadExchange, AMemberThatIsLostBetweenSlicesIsNamed) {
  const auto layout = TokenLayout::Make(LayoutKind::kStriped, 4, 80, 4);
  for (const bool fails : {false, true}) {
    const absl::Duration wait_timeout = fails ? absl::Seconds(20) : absl::Milliseconds(200);
    Case c = MakeCase(*layout, 2, 2, 2, DType::kF32);
    c.plan.exchange_tokens = 4;  // five slices
    auto communicators = MakeInProcessCommunicators(4);
    std::vector<absl::Status> ends(2);
    std::vector<RankStats> stats(2);
    std::vector<std::thread> threads;
    for (const int member : {0, 1}) {
      threads.emplace_back([&, member] {
        const int rank = 2 + member;
        const LoneStream stream = ReferenceStream(DType::kF32);
        HeadExchange exchange(c.plan, c.model, rank, *stream, *communicators[rank], wait_timeout,
                              stats[member]);
        const auto run = [&]() -> absl::Status {
          absl::StatusOr<LayerChunks> chunks = ToHeads(c, rank, *stream, exchange);
          if (!chunks.ok()) return chunks.status();
          absl::Status status = exchange.StartToTokens(GroupOutput(c, rank, *stream));
          for (int slice = 0; slice < 5 && status.ok(); ++slice) {
            if (member == 1 && slice == 2) {
              return fails ? absl::DataLossError("this rank's memory broke") : absl::OkStatus();
            }
            status = exchange.FinishToTokens(slice).status();
            if (status.ok()) status = StartSlice(c, rank, *stream, exchange, slice);
          }
          return status.ok() ? exchange.FinishToHeads().status() : status;
        };
        ends[member] = run();
        if (fails && member == 1) communicators[rank]->Abort(ends[member]);
      });
    }
    for (std::thread& thread : threads) thread.join();
    const std::string message(ends[0].message());
    if (fails) {  // met by a wait, or by the next message
      EXPECT_EQ(ends[0].code(), absl::StatusCode::kDataLoss) << ends[0];
      EXPECT_NE(message.find("all_to_all from rank"), std::string::npos) << message;
      EXPECT_NE(message.find("this rank's memory broke"), std::string::npos) << message;
      continue;
    }
    EXPECT_EQ(ends[0].code(), absl::StatusCode::kDeadlineExceeded) << ends[0];
    EXPECT_NE(message.find("rank 2: all_to_all from rank 3"), std::string::npos) << message;
    EXPECT_GE(stats[0].wait_seconds[Traffic::kAllToAll], 0.15);
  }
}

}  // namespace
}  // namespace meshfill
