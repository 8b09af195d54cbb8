// Prompts that share a pass of an embedded pool: what they are predicted to take, that each has the answer,
// and the K and V, of a run of its own on one rank, and that they live and stop as single ones do.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/embedded_engine.h"
#include "engine/kv/block_hash.h"
#include "engine/model/make_model.h"
#include "engine/platforms.h"
#include "engine/prefill_engine.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "tests/engine/devices/toy/toy_platform.h"
#include "tests/engine/kept_kv.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

constexpr uint32_t kVocab = 100;
constexpr int kLayers = 3;

const std::string& ModelFolder() {
  static const TempFolder of_process;
  static const std::string folder = [] {
    std::string made = of_process / "model";
    const absl::Status status = MakeModel({.layers = kLayers,
                                           .hidden = 64,
                                           .intermediate = 64,
                                           .q_heads = 4,
                                           .kv_heads = 2,
                                           .head_dim = 16,
                                           .vocab = kVocab,
                                           .context_tokens = 65536},
                                          made);
    EXPECT_TRUE(status.ok()) << status;
    return made;
  }();
  return folder;
}

// Reading the weights takes a millisecond a layer.
PoolSpeed SlowWeights() { return {.slice_seconds = 1e-3, .start_seconds = 1e-4}; }

std::unique_ptr<PrefillEngine> Load(int ranks, WeightMode weights = WeightMode::kResident,
                                    int64_t memory_budget_bytes = 0,
                                    std::optional<int64_t> kv_memory_bytes = std::nullopt) {
  auto engine = LoadEmbeddedEngine({.model_path = ModelFolder(),
                                    .ranks = ranks,
                                    .device = "cpu",
                                    .weights = weights,
                                    .peak_flops = 1e12,
                                    .memory_budget_bytes = memory_budget_bytes,
                                    .kv_memory_bytes = kv_memory_bytes,
                                    .speed = SlowWeights()});
  EXPECT_TRUE(engine.ok()) << engine.status();
  return engine.ok() ? *std::move(engine) : nullptr;
}

bool RowsAreIndependent() { return MakeCpuDevice(DType::kBf16, 1)->rows_are_independent(); }

std::vector<uint32_t> RandomPrompt(int64_t tokens, std::mt19937_64& random) {
  std::vector<uint32_t> prompt(static_cast<size_t>(tokens));
  for (uint32_t& id : prompt) id = Draw<uint32_t>(random, 0, kVocab - 1);
  return prompt;
}

// Counts the layers that it hears of.
class Watcher : public PrefillObserver {
 public:
  void OnLayerDone(int layers_done, int layers) override {
    const MutexLock lock(mu_);
    EXPECT_EQ(layers, kLayers);
    EXPECT_EQ(layers_done, ++layers_);
  }
  int layers() const {
    const MutexLock lock(mu_);
    return layers_;
  }

 private:
  mutable Mutex mu_;
  int layers_ = 0;
};

// Holds a pass in its first layer until it is let go, for 20 s at most.
class HoldingObserver final : public PrefillObserver {
 public:
  void OnLayerDone(int, int) override {
    MutexLock lock(mu_);
    const absl::Time deadline = MonotonicNow() + absl::Seconds(20);
    while (!let_go_ && MonotonicNow() < deadline) changed_.WaitUntil(mu_, deadline);
  }
  void LetGo() {
    const MutexLock lock(mu_);
    let_go_ = true;
    changed_.NotifyAll();
  }

 private:
  Mutex mu_;
  CondVar changed_;
  bool let_go_ ABSL_GUARDED_BY(mu_) = false;
};

// Prompts with all that a pass of them needs.
struct Backlog {
  std::vector<std::vector<uint32_t>> prompts;
  std::vector<PrefillRequest> requests;
  std::vector<std::unique_ptr<Watcher>> watchers;
  std::vector<PrefillObserver*> observers;

  Backlog(std::vector<std::vector<uint32_t>> all, PrefillEngine& engine, bool keeps_kv = false)
      : prompts(std::move(all)) {
    for (const auto& prompt : prompts) {
      PrefillOptions options = {.top_k = 3};
      if (keeps_kv) options.kv = std::make_shared<KvPrompt>(KvShapeOf(engine.model()), std::ssize(prompt));
      requests.push_back({prompt, options});
      observers.push_back(watchers.emplace_back(std::make_unique<Watcher>()).get());
    }
  }
};

class EmbeddedPackTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!RowsAreIndependent()) GTEST_SKIP() << "rows of products have other bits beside others here";
  }
  const uint64_t seed_ = TestSeed();
  std::mt19937_64 random_{seed_};
};

// On toys, which share passes on any machine. Speeds that say far longer than a pass takes on any machine.
// Of ranks with cores of their own, the longest tells; ranks that share cores tell where all compute as long.
TEST(EmbeddedPack, LearnsWhatPassesTake) {
  static const bool registered = [] {
    RegisterPlatform(MakeToyPlatform());
    return true;
  }();
  ASSERT_TRUE(registered);
  std::mt19937_64 random(TestSeed());
  const auto learns = [&](double lone_rank_speedup, WeightMode weights, int64_t other_tokens) {
    const auto engine = LoadEmbeddedEngine(
        {.model_path = ModelFolder(),
         .ranks = 2,
         .device = "toy",
         .dtype = DType::kF32,
         .weights = weights,
         .peak_flops = 1e12,
         .speed = PoolSpeed{
             .gemm_flops_per_second = 1e5, .slice_seconds = 10, .lone_rank_speedup = lone_rank_speedup}});
    EXPECT_TRUE(engine.ok()) << engine.status();
    if (!engine.ok()) return false;
    const auto predicted = [&] { return (*engine)->ShareOfPack(30, {}).pass_seconds; };
    const double before = predicted();
    EXPECT_GT(before, 1);
    for (int pass = 0; pass < 3; ++pass) {
      Backlog backlog({RandomPrompt(60, random), RandomPrompt(other_tokens, random)}, **engine);
      auto prefills = (*engine)->StartPack(backlog.requests, backlog.observers);
      EXPECT_TRUE(prefills.ok()) << prefills.status();
      if (!prefills.ok()) return false;
      for (const auto& prefill : *prefills) EXPECT_TRUE(prefill->Wait().ok());
    }
    EXPECT_LE(predicted(), before);
    return predicted() < 0.9 * before;
  };
  EXPECT_TRUE(learns(1, WeightMode::kResident, 60));
  EXPECT_TRUE(learns(1, WeightMode::kResident, 2));
  EXPECT_TRUE(learns(2, WeightMode::kResident, 60));
  EXPECT_FALSE(learns(2, WeightMode::kResident, 2));
  EXPECT_FALSE(learns(1, WeightMode::kStreamed, 60)) << "their file decides";
}

TEST(EmbeddedPack, IsOfDevicesWhoseProductsAllowIt) {
  const auto engine = Load(2);
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->pack_room().ranks, RowsAreIndependent() ? 2 : 0);
  if (RowsAreIndependent()) return;
  EXPECT_EQ(engine->ShareOfPack(10, {}), PackShare());
  EXPECT_FALSE(engine->StartPack({}, {}).ok());
}

TEST_F(EmbeddedPackTest, HoldsASliceOnEachRankOrWhatFits) {
  for (const int ranks : {1, 3}) {
    EXPECT_EQ(Load(ranks)->pack_room().ranks, ranks);
    EXPECT_EQ(Load(ranks)->pack_room().rank_tokens, SlowWeights().slice_tokens);
  }
  const auto choice = Load(1)->MakePlan(200, {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  // Longer ones would run in pieces.
  const auto little = Load(2, WeightMode::kResident, 2 * choice->plan.predicted.run_bytes, /*kv=*/1 << 30);
  ASSERT_NE(little, nullptr);
  ASSERT_TRUE(little->MakePlan(500, {.submeshes = 2}).ok());
  EXPECT_EQ(little->pack_room().ranks, 2);
  EXPECT_EQ(little->pack_room().rank_tokens, 128);
}

// What one adds to a pass and what that takes once are what it takes alone on a rank; weights that stream are
// read once.
TEST_F(EmbeddedPackTest, SharesAreOfAPlanForOneRank) {
  for (const WeightMode weights : {WeightMode::kResident, WeightMode::kStreamed}) {
    const auto engine = Load(2, weights);
    ASSERT_NE(engine, nullptr);
    for (const int64_t tokens : {1, 17, 300, 1024}) {
      const auto alone = engine->MakePlan(tokens, {.submeshes = 2});
      ASSERT_TRUE(alone.ok()) << alone.status();
      const PackShare share = engine->ShareOfPack(tokens, {});
      EXPECT_EQ(share.tokens, tokens);
      EXPECT_NEAR(share.pass_seconds, 1e-4 + kLayers * 1e-3, 1e-12);
      const Prediction& predicted = alone->plan.predicted;
      EXPECT_NEAR(share.pass_seconds + share.added_seconds, predicted.seconds - predicted.weight_seconds,
                  1e-9);
      EXPECT_EQ(share.least_seconds, weights == WeightMode::kStreamed ? predicted.seconds : 0);
      Pack pack(engine->pack_room());
      ASSERT_TRUE(pack.Add(share).has_value());
      EXPECT_NEAR(pack.seconds(), predicted.seconds, 1e-9);
    }
    EXPECT_EQ(engine->ShareOfPack(1025, {}), PackShare()) << "beyond the room of a rank";
    EXPECT_EQ(engine->ShareOfPack(0, {}), PackShare());
  }
  const auto engine = Load(2);
  EXPECT_EQ(engine->ShareOfPack(10, {.tile = Tile{1, 1}}), PackShare());
  EXPECT_EQ(engine->ShareOfPack(10, {.heads = 1}), PackShare());
  EXPECT_EQ(engine->ShareOfPack(10, {.layout = LayoutKind::kZigzag}), PackShare());
  EXPECT_EQ(engine->ShareOfPack(10, {.stripe = 4}), PackShare());
}

TEST_F(EmbeddedPackTest, EachHasTheAnswerOfARunOfItsOwn) {
  SCOPED_TRACE(testing::Message() << "seed " << seed_);
  for (const int ranks : {1, 2, 3}) {
    for (const WeightMode weights : {WeightMode::kResident, WeightMode::kStreamed}) {
      const auto engine = Load(ranks, weights);
      ASSERT_NE(engine, nullptr);
      std::vector<std::vector<uint32_t>> prompts;
      // Also fewer than ranks, of which some compute nothing.
      const int count = Draw(random_, 1, weights == WeightMode::kStreamed ? ranks : 9);
      for (int i = 0; i < count; ++i)
        prompts.push_back(RandomPrompt(Draw<int64_t>(random_, 1, 120), random_));
      Backlog backlog(std::move(prompts), *engine, Draw(random_, 0, 1) == 1);
      auto prefills = engine->StartPack(backlog.requests, backlog.observers);
      ASSERT_TRUE(prefills.ok()) << prefills.status();
      ASSERT_EQ(std::ssize(*prefills), count);
      double first_seconds = 0, all_tokens = 0;
      for (const auto& prompt : backlog.prompts) all_tokens += static_cast<double>(prompt.size());
      std::vector<double> busy(static_cast<size_t>(ranks));
      for (int i = 0; i < count; ++i) {
        const auto result = (*prefills)[i]->Wait();
        ASSERT_TRUE(result.ok()) << result.status();
        const auto alone = PrefillKeepingKv(*engine, backlog.prompts[i], {.top_k = 3, .submeshes = ranks});
        ASSERT_TRUE(alone.ok()) << alone.status();
        EXPECT_EQ(result->logits, alone->logits) << i;
        EXPECT_EQ(result->top.size(), 3u);
        EXPECT_EQ(result->top.front().token, alone->top.front().token);
        EXPECT_EQ(result->tokens(), std::ssize(backlog.prompts[i]));
        EXPECT_EQ(result->plan.ranks(), 1);
        EXPECT_EQ(result->pack_prompts, count);
        EXPECT_EQ(std::ssize(result->ranks), ranks);
        EXPECT_EQ(backlog.watchers[i]->layers(), kLayers);
        if (backlog.requests[i].options.kv != nullptr) {
          const KeptKv kept = InTokenOrder(*backlog.requests[i].options.kv);
          for (int layer = 0; layer < kLayers; ++layer) {
            EXPECT_TRUE(kept.layers[layer].k == alone->kv.layers[layer].k);
            EXPECT_TRUE(kept.layers[layer].v == alone->kv.layers[layer].v);
          }
        }
        const double share = static_cast<double>(backlog.prompts[i].size()) / all_tokens;
        const double flops = ModelFlops(engine->model(), std::ssize(backlog.prompts[i]));
        EXPECT_NEAR(result->mfu, flops / share / result->prefill_seconds / 1e12, 1e-3 * result->mfu)
            << "of the ranks, as if all of the pass were such prompts";
        if (i == 0) first_seconds = result->prefill_seconds;
        EXPECT_EQ(result->prefill_seconds, first_seconds) << "all end with the pass";
        for (int rank = 0; rank < ranks; ++rank) busy[rank] += result->ranks[rank].total_seconds;
      }
      for (const double seconds : busy) {
        EXPECT_LE(seconds, first_seconds * 1.001) << "each prompt has its share of a rank's seconds";
      }
      EXPECT_EQ(std::count_if(busy.begin(), busy.end(), [](double seconds) { return seconds > 0; }),
                std::min(count, ranks));
    }
  }
}

// Whoever waits for all of them hears first of the one that ends first.
TEST_F(EmbeddedPackTest, WaitsForWhicheverIsDoneFirst) {
  const auto engine = Load(2);
  ASSERT_NE(engine, nullptr);
  Backlog backlog({RandomPrompt(300, random_), RandomPrompt(200, random_), RandomPrompt(300, random_),
                   RandomPrompt(1, random_)},
                  *engine);
  HoldingObserver holding;
  backlog.observers[0] = &holding;
  auto prefills = engine->StartPack(backlog.requests, backlog.observers);
  ASSERT_TRUE(prefills.ok()) << prefills.status();
  for (const auto& prefill : *prefills) {
    prefill->Pause();
    EXPECT_FALSE(prefill->done());
  }
  holding.LetGo();
  const auto stopped = prefills->begin() + Draw(random_, 1, 3);  // not the one that is asked
  (*stopped)->Stop();
  prefills->front()->WaitForAny();
  for (auto prefill = prefills->begin(); prefill != prefills->end(); ++prefill) {
    EXPECT_EQ((*prefill)->done(), prefill == stopped);
  }
  EXPECT_TRUE(absl::IsCancelled((*stopped)->Wait().status()));
  prefills->erase(stopped);
  auto any = std::async(std::launch::async, [&] { prefills->back()->WaitForAny(); });
  EXPECT_EQ(any.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout)
      << "what is gone is not waited for";
  for (const auto& prefill : *prefills) prefill->Resume();
  any.get();
  while (!prefills->empty()) {
    prefills->front()->WaitForAny();
    const auto first =
        std::find_if(prefills->begin(), prefills->end(), [](const auto& each) { return each->done(); });
    ASSERT_NE(first, prefills->end());
    EXPECT_TRUE((*first)->Wait().ok());
    prefills->erase(first);
  }
}

// One that begins as another did before computes the rest alone.
TEST_F(EmbeddedPackTest, BeginsBehindCachedPrefixes) {
  const auto engine = Load(2);
  ASSERT_NE(engine, nullptr);
  const auto first = RandomPrompt(400, random_);
  const auto names_of = [&](const std::vector<uint32_t>& prompt) {
    BlockHasher hasher(16, "");
    hasher.Append(prompt);
    return std::make_shared<const KvBlockNames>(KvBlockNames{.block_tokens = 16, .hashes = hasher.hashes()});
  };
  ASSERT_TRUE(RunPrefill(*engine, {first, {.block_names = names_of(first)}}).ok());
  std::vector<uint32_t> longer = first;
  for (const uint32_t id : RandomPrompt(130, random_)) longer.push_back(id);
  const PackShare share = engine->ShareOfPack(530, {.block_names = names_of(longer)});
  EXPECT_LT(share.tokens, 530 - 256);
  EXPECT_GE(share.tokens, 130);
  Backlog backlog({longer, RandomPrompt(50, random_)}, *engine);
  for (size_t i = 0; i < 2; ++i) backlog.requests[i].options.block_names = names_of(backlog.prompts[i]);
  auto prefills = engine->StartPack(backlog.requests, backlog.observers);
  ASSERT_TRUE(prefills.ok()) << prefills.status();
  const auto behind = (*prefills)[0]->Wait();
  const auto beside = (*prefills)[1]->Wait();
  ASSERT_TRUE(behind.ok() && beside.ok()) << behind.status() << beside.status();
  EXPECT_EQ(behind->cached_tokens, 530 - share.tokens);
  EXPECT_EQ(beside->cached_tokens, 0);
  // What the pass computed is cached in turn.
  std::vector<uint32_t> further = longer;
  for (const uint32_t id : RandomPrompt(200, random_)) further.push_back(id);
  EXPECT_EQ(engine->CachedTokens(730, {.block_names = names_of(further)}), 512);
  const auto again = RunPrefill(*engine, {longer, {.block_names = names_of(longer), .ignore_cache = true}});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->top.front().token, behind->top.front().token);
}

// What was a short rest when it was chosen is a long prompt once its prefix has made room for others.
TEST_F(EmbeddedPackTest, RefusesWhatHasGrownTooLong) {
  const KvShape shape = KvShapeOf(Load(1)->model());
  const auto engine = Load(2, WeightMode::kResident, 0, shape.layers * shape.LayerBytes(3000));
  ASSERT_NE(engine, nullptr);
  const auto names_of = [&](const std::vector<uint32_t>& prompt) {
    BlockHasher hasher(16, "");
    hasher.Append(prompt);
    return std::make_shared<const KvBlockNames>(KvBlockNames{.block_tokens = 16, .hashes = hasher.hashes()});
  };
  std::vector<uint32_t> document = RandomPrompt(2000, random_);
  ASSERT_TRUE(RunPrefill(*engine, {document, {.block_names = names_of(document)}}).ok());
  for (const uint32_t id : RandomPrompt(50, random_)) document.push_back(id);
  Backlog backlog({document, RandomPrompt(20, random_)}, *engine);
  backlog.requests[0].options.block_names = names_of(backlog.prompts[0]);
  const PackShare share = engine->ShareOfPack(2050, backlog.requests[0].options);
  EXPECT_GT(share.tokens, 0);
  EXPECT_LE(share.tokens, engine->pack_room().rank_tokens);
  const auto other = RandomPrompt(2500, random_);
  ASSERT_TRUE(RunPrefill(*engine, {other, {.block_names = names_of(other)}}).ok());
  const auto refused = engine->StartPack(backlog.requests, backlog.observers);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition) << refused.status();
  EXPECT_TRUE(RunPrefill(*engine, {backlog.prompts[0], {}}).ok());
}

// Each of them alone has room: a plan is made for all the memory of a rank.
TEST_F(EmbeddedPackTest, HoldsNoMoreThanTheMemoryOfARank) {
  const auto choice = Load(1)->MakePlan(500, {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  const int64_t one = choice->plan.predicted.run_bytes;
  const auto engine = Load(1, WeightMode::kResident, one + one / 2, /*kv=*/1 << 30);
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->pack_room().rank_bytes, one + one / 2);
  EXPECT_EQ(engine->ShareOfPack(500, {}).bytes, one);
  Backlog backlog({RandomPrompt(500, random_), RandomPrompt(10, random_)}, *engine);
  {
    const auto fits = engine->StartPack(backlog.requests, backlog.observers);
    EXPECT_TRUE(fits.ok()) << fits.status();
  }
  backlog.prompts[1] = RandomPrompt(400, random_);
  backlog.requests[1].tokens = backlog.prompts[1];
  const auto refused = engine->StartPack(backlog.requests, backlog.observers);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition) << refused.status();
}

TEST_F(EmbeddedPackTest, StopEndsOneAndTheOthersComputeOn) {
  const auto engine = Load(2);
  ASSERT_NE(engine, nullptr);
  Backlog backlog({RandomPrompt(700, random_), RandomPrompt(700, random_), RandomPrompt(100, random_)},
                  *engine);
  HoldingObserver holding;
  backlog.observers[0] = &holding;  // else the pass may be over before it is paused
  auto prefills = engine->StartPack(backlog.requests, backlog.observers);
  ASSERT_TRUE(prefills.ok()) << prefills.status();
  (*prefills)[0]->Pause();  // all of them
  (*prefills)[1]->Stop();
  EXPECT_EQ((*prefills)[1]->Wait().status().code(), absl::StatusCode::kCancelled)
      << "while the pass stands still";
  holding.LetGo();  // the end of a prefill waits for its pass's observers
  (*prefills)[1].reset();
  backlog.watchers[1].reset();  // nobody calls it any more
  const absl::Time paused_at = MonotonicNow();
  while (MonotonicNow() < paused_at + absl::Milliseconds(30)) std::this_thread::yield();
  (*prefills)[2]->Resume();
  for (const int i : {0, 2}) {
    const auto result = (*prefills)[i]->Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_GE(result->paused_seconds, 0.03);
    for (const RankStats& stats : result->ranks) {
      const double share = static_cast<double>(backlog.prompts[i].size()) / 1500;
      EXPECT_LE(stats.total_seconds, share * result->prefill_seconds * 1.001) << "pauses are in neither";
      EXPECT_GT(stats.total_seconds, 0);
    }
    const auto alone = RunPrefill(*engine, {backlog.prompts[i], {.submeshes = 2}});
    ASSERT_TRUE(alone.ok()) << alone.status();
    EXPECT_EQ(result->logits, alone->logits);
  }
  prefills->clear();
  // All of them: at once, though nobody waits.
  prefills = engine->StartPack(std::span(backlog.requests).first(1), std::vector<PrefillObserver*>{nullptr});
  ASSERT_TRUE(prefills.ok()) << prefills.status();
  (*prefills)[0]->Pause();
  prefills->clear();
  EXPECT_TRUE(RunPrefill(*engine, {backlog.prompts[2], {}}).ok());
}

TEST_F(EmbeddedPackTest, TakesTheMemoryOfItsBusiestRankOnAll) {
  const auto roomy = Load(2);
  const auto choice = roomy->MakePlan(500, {.submeshes = 2});
  ASSERT_TRUE(choice.ok()) << choice.status();
  const int64_t one = choice->plan.predicted.run_bytes;
  const auto engine = Load(2, WeightMode::kResident, 2 * (one + one / 2));
  ASSERT_NE(engine, nullptr);
  const auto long_one = RandomPrompt(500, random_);
  Backlog backlog({long_one, RandomPrompt(10, random_)}, *engine);
  auto first = engine->StartPack(backlog.requests, backlog.observers);
  ASSERT_TRUE(first.ok()) << first.status();
  (*first)[0]->Pause();
  const auto second = engine->StartPack(backlog.requests, backlog.observers);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted) << second.status();
  Backlog small({RandomPrompt(10, random_), RandomPrompt(10, random_)}, *engine);
  EXPECT_TRUE(engine->StartPack(small.requests, small.observers).ok());
  first->clear();
  EXPECT_TRUE(engine->StartPack(backlog.requests, backlog.observers).ok());
}

// Two layers that stream past are there once for a pass.
TEST_F(EmbeddedPackTest, TakesTheMemoryOfStreamedLayersOnce) {
  const auto choice = Load(1, WeightMode::kStreamed)->MakePlan(20, {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  const int64_t layers = choice->weights.run_bytes;
  const int64_t pass = layers + 5 * (choice->plan.predicted.run_bytes - layers);
  ASSERT_GT(layers, 0);
  const auto engine = Load(1, WeightMode::kStreamed, 2 * pass * 8 / 7 + 8);  // an eighth is for short ones
  ASSERT_NE(engine, nullptr);
  std::vector<std::vector<uint32_t>> prompts(5);
  for (auto& prompt : prompts) prompt = RandomPrompt(20, random_);
  Backlog backlog(prompts, *engine);
  const auto first = engine->StartPack(backlog.requests, backlog.observers);
  ASSERT_TRUE(first.ok()) << first.status();
  first->front()->Pause();
  const auto second = engine->StartPack(backlog.requests, std::vector<PrefillObserver*>(5, nullptr));
  EXPECT_TRUE(second.ok()) << second.status();
}

TEST_F(EmbeddedPackTest, NamesTheFirstErrorAndServesTheNextPass) {
  const auto engine = Load(1);
  ASSERT_NE(engine, nullptr);
  Backlog backlog({RandomPrompt(10, random_), RandomPrompt(10, random_)}, *engine);
  backlog.prompts[1][3] = kVocab;
  const auto refused = engine->StartPack(backlog.requests, backlog.observers);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << refused.status();
  backlog.prompts[1][3] = 0;
  EXPECT_TRUE(engine->StartPack(backlog.requests, backlog.observers).ok());
}

// Where a rank fails, all prompts of the pass hear why, also those of others, and the next pass goes well.
TEST_F(EmbeddedPackTest, ARankThatFailsEndsThePass) {
  const TempFolder folder;
  std::filesystem::copy(ModelFolder(), folder / "model");
  const std::string file = folder / "model/model.safetensors";
  const auto engine = LoadEmbeddedEngine({.model_path = folder / "model",
                                          .ranks = 2,
                                          .device = "cpu",
                                          .weights = WeightMode::kStreamed,
                                          .peak_flops = 1e12,
                                          .speed = SlowWeights()});
  ASSERT_TRUE(engine.ok()) << engine.status();
  Backlog backlog({RandomPrompt(10, random_), RandomPrompt(20, random_), RandomPrompt(30, random_)},
                  **engine);
  const auto size = std::filesystem::file_size(file);
  std::filesystem::resize_file(file, size / 2);  // as a copy that is under way
  auto failed = (*engine)->StartPack(backlog.requests, backlog.observers);
  ASSERT_TRUE(failed.ok()) << failed.status();
  for (const auto& prefill : *failed) {
    const absl::Status status = prefill->Wait().status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_NE(status.message().find(file), std::string::npos) << status;
  }
  failed->clear();
  std::ifstream again(ModelFolder() + "/model.safetensors", std::ios::binary);
  std::fstream(file, std::ios::in | std::ios::out | std::ios::binary) << again.rdbuf();
  auto prefills = (*engine)->StartPack(backlog.requests, std::vector<PrefillObserver*>(3, nullptr));
  ASSERT_TRUE(prefills.ok()) << prefills.status();
  for (const auto& prefill : *prefills) EXPECT_TRUE(prefill->Wait().ok());
}

// A pass of many short prompts takes less than these one after the other.
TEST_F(EmbeddedPackTest, PredictsTheWholePass) {
  const auto engine = Load(1);
  ASSERT_NE(engine, nullptr);
  std::vector<std::vector<uint32_t>> prompts;
  Pack pack(engine->pack_room());
  double alone = 0;
  for (int i = 0; i < 20; ++i) {
    prompts.push_back(RandomPrompt(40, random_));
    ASSERT_TRUE(pack.Add(engine->ShareOfPack(40, {})).has_value());
    alone += engine->MakePlan(40, {})->plan.predicted.seconds;
  }
  EXPECT_LT(pack.seconds(), 0.3 * alone);
  Backlog backlog(std::move(prompts), *engine);
  auto prefills = engine->StartPack(backlog.requests, backlog.observers);
  ASSERT_TRUE(prefills.ok()) << prefills.status();
  for (const auto& prefill : *prefills) {
    const auto result = prefill->Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_DOUBLE_EQ(result->plan.predicted.seconds, pack.seconds());
  }
}

}  // namespace
}  // namespace meshfill
