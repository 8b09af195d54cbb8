#include "engine/kv/kv_prompt.h"

#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/kv/kv_values.h"
#include "tests/engine/run/watched_stream.h"

namespace meshfill {
namespace {

const KvShape kShape = {.layers = 3, .kv_heads = 2, .head_dim = 4, .dtype = DType::kF32};

TokenLayout Striped(int ranks, int64_t tokens) {
  return TokenLayout::Make(LayoutKind::kStriped, ranks, tokens, 4).value();
}

// `class`: kv_values.h has a function of this name.
TEST(KvChargeTest, GivesBackNoMoreThanItHas) {
  const auto sum = std::make_shared<class KvBytes>();
  sum->Add(10);
  KvCharge charge(sum, 10);
  const std::unique_ptr<KvCharge> part = charge.Split(4);
  part->Drop(5);
  EXPECT_EQ(part->bytes(), 0);
  EXPECT_EQ(sum->charged(), 6);
  EXPECT_EQ(charge.Split(7)->bytes(), 6);  // gone at once
  EXPECT_EQ(charge.bytes(), 0);
  EXPECT_EQ(sum->charged(), 0);
}

TEST(KvPromptTest, ALayerIsThereOnceAllRanksHaveWrittenIt) {
  KvPrompt prompt(kShape, 50);
  EXPECT_EQ(prompt.bytes(), 3 * 2 * 50 * 2 * 4 * 4);
  EXPECT_EQ(prompt.Layer(0), nullptr);
  int layers_seen = 0;
  prompt.Watch([&] { ++layers_seen; }, nullptr, nullptr);
  const TokenLayout layout = Striped(2, 50);
  prompt.Begin(layout);
  EXPECT_TRUE(KeepValues(prompt, layout, 1, 0));
  EXPECT_TRUE(KeepValues(prompt, layout, 1, 1));  // a rank may run ahead
  EXPECT_EQ(prompt.Layer(0), nullptr);
  EXPECT_EQ(layers_seen, 0);
  EXPECT_TRUE(KeepValues(prompt, layout, 0, 0));
  EXPECT_NE(prompt.Layer(0), nullptr);
  EXPECT_EQ(prompt.Layer(1), nullptr);
  EXPECT_EQ(layers_seen, 1);
}

TEST(KvPromptTest, ARunThatBeginsAgainBringsAllLayersAgainAndLeavesReadersTheirs) {
  KvPrompt prompt(kShape, 50);
  KeepAllValues(prompt, Striped(2, 50));
  const std::shared_ptr<const KvSlabs> before = prompt.Layer(0);
  const TokenLayout other = Striped(5, 50);
  prompt.Begin(other);
  for (int layer = 0; layer < 3; ++layer) EXPECT_EQ(prompt.Layer(layer), nullptr);
  for (int rank = 0; rank < 5; ++rank) KeepValues(prompt, other, rank, 0);
  const std::shared_ptr<const KvSlabs> after = prompt.Layer(0);
  ASSERT_NE(after, nullptr);
  EXPECT_EQ(before->pieces.front().run->layout.ranks(), 2);
  std::vector<std::byte> old_kv(kShape.LayerBytes(50)), new_kv(kShape.LayerBytes(50));
  const KvRange all = {.tokens = 50, .heads = 2};
  ASSERT_TRUE(CopyKv(*before, 0, all, KvFormat::kTokens, 0, old_kv.data()).ok());
  ASSERT_TRUE(CopyKv(*after, 0, all, KvFormat::kTokens, 0, new_kv.data()).ok());
  EXPECT_EQ(old_kv, new_kv);
}

TEST(KvPromptTest, RunsBehindAPrefixShareItsSlabs) {
  KvPrompt first(kShape, 50);
  KeepAllValues(first, Striped(2, 50));
  const auto prefix = std::make_shared<const KvSlabs>(FirstTokens(*first.Layer(0), 24));
  KvPrompt second(kShape, 60);
  const TokenLayout piece = Striped(3, 18);
  second.Begin(piece, prefix);
  EXPECT_EQ(second.slabs()->tokens(), 42);
  for (int rank = 0; rank < 3; ++rank) {
    for (int layer = 0; layer < 3; ++layer) KeepValues(second, piece, rank, layer, 24);
  }
  EXPECT_EQ(second.Layer(0), nullptr);  // the other tokens are to come
  const std::shared_ptr<const KvSlabs> first_pieces = second.slabs();
  second.Begin(piece, first_pieces);
  EXPECT_EQ(second.Layer(0), nullptr);  // all have begun, and the last one has written nothing
  KeepAllValues(second, piece, first_pieces);
  const std::shared_ptr<const KvSlabs> slabs = second.Layer(2);
  ASSERT_NE(slabs, nullptr);
  ASSERT_EQ(slabs->pieces.size(), 3u);
  EXPECT_EQ(slabs->pieces[0].run, first.Layer(0)->pieces[0].run);
  std::vector<std::byte> all(kShape.LayerBytes(60));
  const KvRange range = {.tokens = 60, .heads = 2};
  ASSERT_TRUE(CopyKv(*slabs, 2, range, KvFormat::kTokens, 0, all.data()).ok());
  EXPECT_EQ(all, KvBytes(kShape, 2, range, KvFormat::kTokens, 1));

  // What a run brings anew takes the place of what came before it.
  KeepAllValues(second, Striped(1, 36), prefix);
  EXPECT_EQ(second.Layer(0)->pieces.size(), 2u);
}

TEST(KvPromptTest, APieceIsChargedForItsTokensHoweverOftenItBegins) {
  const auto bytes = [](int64_t tokens) { return kShape.layers * kShape.LayerBytes(tokens); };
  const auto sum = std::make_shared<class KvBytes>();
  sum->Add(bytes(60));
  KvPrompt prompt(kShape, 60);
  prompt.Watch(nullptr, std::make_unique<KvCharge>(sum, bytes(60)), nullptr);
  std::shared_ptr<const KvSlabs> before;
  for (const int64_t tokens : {24, 18, 18}) {
    for (const int ranks : {2, 3, 1}) prompt.Begin(Striped(ranks, tokens), before);
    before = prompt.slabs();
    int64_t charged = 0;
    for (const auto& charge : before->pieces.back().run->charges) charged += charge->bytes();
    EXPECT_EQ(charged, bytes(tokens));
    EXPECT_EQ(sum->charged(), bytes(60));
  }
}

// Ranks of other processes keep theirs elsewhere: they are neither charged nor waited for.
TEST(KvPromptTest, KeepsWhatTheRanksHereCompute) {
  KvPrompt before(kShape, 16);
  KeepAllValues(before, Striped(1, 16));
  const TokenLayout layout = Striped(3, 30);
  KvPrompt prompt(kShape, layout, {true, false, true}, 16);
  const int64_t bytes = kShape.layers * kShape.LayerBytes(layout.ChunkTokens(0) + layout.ChunkTokens(2));
  EXPECT_EQ(prompt.tokens(), 46);
  EXPECT_EQ(prompt.bytes(), bytes);
  EXPECT_FALSE(prompt.charged());
  const auto sum = std::make_shared<class KvBytes>();
  sum->Add(bytes);
  prompt.Watch(nullptr, std::make_unique<KvCharge>(sum, bytes), nullptr);
  EXPECT_TRUE(prompt.charged());
  prompt.Begin(layout, before.Layer(0));
  EXPECT_EQ(sum->charged(), bytes);
  EXPECT_TRUE(KeepValues(prompt, layout, 0, 0, 16));
  EXPECT_EQ(prompt.Layer(0), nullptr);
  EXPECT_TRUE(KeepValues(prompt, layout, 2, 0, 16));
  EXPECT_NE(prompt.Layer(0), nullptr);
}

// K and V of a layer as the projections leave it, heads outermost.
BufferRef LayerOnDevice(Stream& stream, int layer, int64_t tokens) {
  BufferRef kv = stream.Allocate(static_cast<size_t>(kShape.LayerBytes(tokens))).value();
  auto* value = kv->data<uint32_t>();
  for (int half = 0; half < 2; ++half) {
    for (int head = 0; head < kShape.kv_heads; ++head) {
      for (int64_t token = 0; token < tokens; ++token) {
        for (int element = 0; element < kShape.head_dim; ++element) {
          *value++ = KvValue(layer, half, token, head, element);
        }
      }
    }
  }
  return kv;
}

TEST(KvPromptTest, ALayerIsThereOnceItIsCopiedOrStaysOnItsDevice) {
  constexpr int64_t kTokens = 12;
  WatchedStream stream(DType::kF32);
  stream.copies_late = true;
  const std::shared_ptr<Device> device(&stream.device(), [](Device*) {});
  const KvRange all = {.tokens = kTokens, .heads = kShape.kv_heads};
  for (const bool on_device : {false, true}) {
    SCOPED_TRACE(on_device);
    KvPrompt prompt(kShape, kTokens);
    int layers_seen = 0;
    prompt.Watch([&] { ++layers_seen; }, nullptr,
                 on_device ? std::make_shared<KvDeviceMemory>(std::vector<std::shared_ptr<Device>>{device},
                                                              kShape.LayerBytes(kTokens))
                           : nullptr);
    prompt.Begin(Striped(1, kTokens));
    const auto keeping = prompt.Keep(0, 0, LayerOnDevice(stream, 0, kTokens), stream);
    ASSERT_TRUE(keeping.ok()) << keeping.status();
    EXPECT_EQ(*keeping == nullptr, on_device);
    EXPECT_EQ(prompt.Layer(0) != nullptr, on_device);
    if (!on_device) {
      ASSERT_TRUE((*keeping)->Finish().ok());
    }
    EXPECT_EQ(layers_seen, 1);
    const std::shared_ptr<const KvSlabs> slabs = prompt.Layer(0);
    ASSERT_NE(slabs, nullptr);
    EXPECT_EQ(slabs->pieces[0].run->slabs[0][0]->on_host(), !on_device);
    std::vector<std::byte> copied(kShape.LayerBytes(kTokens));
    ASSERT_TRUE(CopyKv(*slabs, 0, all, KvFormat::kTokens, 0, copied.data()).ok());
    EXPECT_EQ(copied, KvBytes(kShape, 0, all, KvFormat::kTokens, 1));
  }
}

TEST(KvPromptTest, ItsOwnLaterRunsGetWhatNobodyElseReads) {
  KvPrompt prompt(kShape, 20);
  prompt.KeepWithoutLease();
  prompt.Begin(Striped(1, 20));
  prompt.Drop();
  EXPECT_TRUE(KeepValues(prompt, Striped(1, 20), 0, 0));
}

TEST(KvPromptTest, KeepsNothingMoreOnceItIsDropped) {
  KvPrompt prompt(kShape, 50);
  const TokenLayout layout = Striped(1, 50);
  prompt.Begin(layout);
  EXPECT_TRUE(KeepValues(prompt, layout, 0, 0));
  prompt.Drop();
  EXPECT_FALSE(KeepValues(prompt, layout, 0, 1));
}

// For ThreadSanitizer: ranks write while others read.
TEST(KvPromptTest, IsReadWhileItsRanksWrite) {
  constexpr int kRanks = 4;
  const KvShape shape = {.layers = 20, .kv_heads = 1, .head_dim = 4, .dtype = DType::kF32};
  KvPrompt prompt(shape, 64);
  const TokenLayout layout = Striped(kRanks, 64);
  prompt.Begin(layout);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      for (int layer = 0; layer < shape.layers; ++layer) KeepValues(prompt, layout, rank, layer);
    });
  }
  for (int layer = 0; layer < shape.layers;) {
    const std::shared_ptr<const KvSlabs> slabs = prompt.Layer(layer);
    if (slabs == nullptr) {
      std::this_thread::yield();
      continue;
    }
    uint32_t value = 0;
    std::byte kv[2 * 4 * 4];
    const KvRange last = {.first_token = 63, .tokens = 1, .heads = 1};
    EXPECT_TRUE(CopyKv(*slabs, layer, last, KvFormat::kTokens, 0, kv).ok());
    std::memcpy(&value, kv, sizeof value);
    EXPECT_EQ(value, KvValue(layer, 0, 63, 0, 0));
    ++layer;
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace meshfill
