// Prompts that share a pass of a pool of workers: each has the bits of a run of its own on one rank, its K
// and V can be read, who leaves ends alone, and a lost worker costs its own ranks' prompts another attempt.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <random>
#include <set>
#include <thread>

#include "engine/embedded_engine.h"
#include "engine/platforms.h"
#include "tests/engine/close.h"
#include "tests/engine/devices/toy/toy_platform.h"
#include "tests/engine/fixed_speeds.h"
#include "tests/engine/kept_kv.h"
#include "tests/engine/random_seed.h"
#include "tests/server/pool/pool_cache_fixture.h"

namespace meshfill {
namespace {

// Counts the layers that it hears of.
class LayerCounter final : public PrefillObserver {
 public:
  void OnLayerDone(int layers_done, int layers) override {
    EXPECT_EQ(layers, kLayers);
    layers_ = layers_done;
  }
  int layers() const { return layers_; }

 private:
  std::atomic<int> layers_{0};
};

class PoolPacksTest : public PoolKvTest {
 protected:
  // A pass takes long beside what a prompt adds to it.
  void SetUp() override {
    static const bool registered = [] {
      RegisterPlatform(MakeToyPlatform());
      return true;
    }();
    ASSERT_TRUE(registered);
    of_leader_ = {"plan.layout=striped", "kv.cache=false"};
    std::filesystem::remove(SpeedProfile());
    for (const int ranks : {1, 2}) ASSERT_NE(Load(ranks), nullptr);  // keeps its speed
    FixSpeeds(SpeedProfile(), {.gemm_flops_per_second = 1e9, .slice_seconds = 10e-3});
    lone_ = Load(1);
  }
  static std::unique_ptr<PrefillEngine> Load(int ranks) {
    EngineOptions options = {.model_path = Folder(),
                             .ranks = ranks,
                             .device = "toy",
                             .dtype = DType::kF32,
                             .peak_flops = 1e12,
                             .kv_cache = false};
    options.speed_profile_path = SpeedProfile();
    auto engine = LoadEmbeddedEngine(options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? *std::move(engine) : nullptr;
  }
  void StartToys(const std::vector<int>& ranks) { StartPool(ranks, {"pool.worker.device=toy"}); }

  std::vector<std::vector<uint32_t>> RandomPrompts(int count, int64_t most_tokens) {
    std::vector<std::vector<uint32_t>> prompts;
    for (int i = 0; i < count; ++i) {
      prompts.push_back(RandomTokens(random_, Draw<int64_t>(random_, 1, most_tokens)));
    }
    return prompts;
  }
  absl::StatusOr<std::vector<std::unique_ptr<meshfill::Prefill>>> StartPack(
      const std::vector<std::vector<uint32_t>>& prompts, PrefillObserver* first_observer = nullptr) {
    std::vector<PrefillRequest> requests;
    std::vector<PrefillObserver*> observers(prompts.size(), nullptr);
    observers[0] = first_observer;
    for (const auto& prompt : prompts) requests.push_back({prompt, PrefillOptions()});
    return engine_->StartPack(requests, observers);
  }
  std::vector<float> LogitsAlone(const std::vector<uint32_t>& prompt) {
    const auto result = RunPrefill(*lone_, {prompt, PrefillOptions()});
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? result->logits : std::vector<float>();
  }

  std::mt19937_64 random_{TestSeed()};
  std::unique_ptr<PrefillEngine> lone_;  // one rank
};

TEST_F(PoolPacksTest, HasTheBitsOfARunOfItsOwn) {
  StartToys({1, 2, 1});
  EXPECT_EQ(engine_->pack_room().ranks, 4);
  ASSERT_EQ(engine_->pack_room().rank_tokens, 64) << "a slice of a toy";
  for (int round = 0; round < 3; ++round) {
    const auto prompts = RandomPrompts(Draw(random_, 2, 12), 15);
    LayerCounter counter;
    auto started = StartPack(prompts, &counter);
    ASSERT_TRUE(started.ok()) << started.status();
    ASSERT_EQ(started->size(), prompts.size());
    std::set<int> ranks;
    for (size_t i = 0; i < prompts.size(); ++i) {
      const auto result = (*started)[i]->Wait();
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->logits, LogitsAlone(prompts[i])) << i;
      EXPECT_EQ(result->pack_prompts, std::ssize(prompts));
      EXPECT_EQ(result->plan.ranks(), 1);
      EXPECT_EQ(result->tokens(), std::ssize(prompts[i]));
      ASSERT_EQ(result->pool_ranks.size(), 1u);
      ranks.insert(result->pool_ranks[0]);
      EXPECT_GT(result->mfu, 0);
      EXPECT_EQ(result->attempts, 1);
    }
    EXPECT_EQ(ranks.size(), std::min<size_t>(prompts.size(), 4)) << "dealt to all ranks";
    EXPECT_EQ(counter.layers(), kLayers);
  }
}

// MFU is the rank's, while it computed all of them.
TEST_F(PoolPacksTest, CountsTheWholePass) {
  StartToys({1});
  const std::vector<std::vector<uint32_t>> prompts = {RandomTokens(random_, 45), RandomTokens(random_, 15)};
  auto started = StartPack(prompts);
  ASSERT_TRUE(started.ok()) << started.status();
  const auto longer = (*started)[0]->Wait(), shorter = (*started)[1]->Wait();
  ASSERT_TRUE(longer.ok() && shorter.ok());
  EXPECT_NEAR(longer->ranks[0].total_seconds / shorter->ranks[0].total_seconds, 3, 1e-6);
  EXPECT_NEAR(longer->mfu * longer->prefill_seconds / (shorter->mfu * shorter->prefill_seconds), 1, 0.2)
      << "what a token costs, attention apart";
}

// Speeds that say far longer than a pass takes on any machine.
TEST_F(PoolPacksTest, LearnsWhatPassesTake) {
  FixSpeeds(SpeedProfile(), {.gemm_flops_per_second = 1e5, .slice_seconds = 10});
  StartToys({1, 2});
  const double before = engine_->ShareOfPack(15, {}).pass_seconds;
  EXPECT_GT(before, 1);
  for (int pass = 0; pass < 3; ++pass) {
    auto started = StartPack(RandomPrompts(6, 15));
    ASSERT_TRUE(started.ok()) << started.status();
    for (const auto& prefill : *started) ASSERT_TRUE(prefill->Wait().ok());
  }
  EXPECT_LT(engine_->ShareOfPack(15, {}).pass_seconds, 0.9 * before);
}

// Who has the cores of an idle rank beside its own is faster than all are together.
TEST_F(PoolPacksTest, LearnsNothingWhereCoresAreFree) {
  FixSpeeds(SpeedProfile(), {.gemm_flops_per_second = 1e5, .slice_seconds = 10, .lone_rank_speedup = 2});
  StartToys({1, 2});
  const double before = engine_->ShareOfPack(15, {}).pass_seconds;
  for (const int prompts : {2, 3}) {
    for (int pass = 0; pass < 3; ++pass) {
      auto started = StartPack(std::vector(static_cast<size_t>(prompts), RandomTokens(random_, 15)));
      ASSERT_TRUE(started.ok()) << started.status();
      for (const auto& prefill : *started) ASSERT_TRUE(prefill->Wait().ok());
    }
    const double after = engine_->ShareOfPack(15, {}).pass_seconds;
    if (prompts == 2) {
      EXPECT_EQ(after, before);
    } else {
      EXPECT_LT(after, 0.9 * before) << "all of them have as much to do";
    }
  }
}

TEST_F(PoolPacksTest, SaysWhatSharesAPass) {
  StartToys({1, 1});
  const int64_t most = engine_->pack_room().rank_tokens;
  const PackShare share = engine_->ShareOfPack(50, {});
  EXPECT_EQ(share.tokens, 50);
  EXPECT_GT(share.bytes, 0);
  EXPECT_GT(share.pass_seconds, kLayers * 9e-3) << "reading the weights takes 10 ms a layer";
  EXPECT_GT(share.added_seconds, 0);
  EXPECT_LT(share.added_seconds, share.pass_seconds);
  EXPECT_EQ(share.least_seconds, 0);
  EXPECT_EQ(engine_->ShareOfPack(most, {}).tokens, most);
  EXPECT_EQ(engine_->ShareOfPack(most + 1, {}).tokens, 0);
  EXPECT_EQ(engine_->ShareOfPack(50, {.tile = Tile{1, 1}}).tokens, 0) << "the client chose it";
  EXPECT_EQ(engine_->ShareOfPack(50, {.layout = LayoutKind::kStriped}).tokens, 0);
  EXPECT_EQ(engine_->ShareOfPack(0, {}).tokens, 0);
}

TEST_F(PoolPacksTest, KnowsWhoIsThere) {
  StartToys({});
  EXPECT_EQ(engine_->pack_room(), PackRoom());
  EXPECT_TRUE(absl::IsFailedPrecondition(StartPack(RandomPrompts(2, 10)).status()));
  for (const int ranks : {1, 2}) AddWorker(ranks, {"pool.worker.device=toy"});
  ASSERT_TRUE(Eventually([&] { return engine_->ranks() == 3; }));
  EXPECT_EQ(engine_->pack_room().ranks, 3);
  EXPECT_TRUE(StartPack(RandomPrompts(2, 10)).ok());
  workers_.back()->Drain();
  ASSERT_TRUE(Eventually([&] { return engine_->pack_room().ranks == 1; }));
  workers_.front().reset();
  ASSERT_TRUE(Eventually([&] { return engine_->pack_room() == PackRoom(); }));
}

TEST_F(PoolPacksTest, KnowsWhatARunLeaves) {
  StartToys({2});
  const int64_t all = engine_->pack_room().rank_bytes;
  const auto tokens = RandomTokens(random_, 3000);
  auto live = engine_->Start({tokens, PrefillOptions()}, nullptr);
  ASSERT_TRUE(live.ok()) << live.status();
  (*live)->Pause();
  EXPECT_LT(engine_->pack_room().rank_bytes, all);
  (*live)->Resume();
  EXPECT_TRUE((*live)->Wait().ok());
  live->reset();
  EXPECT_TRUE(Eventually([&] { return engine_->pack_room().rank_bytes == all; }));
}

TEST_F(PoolPacksTest, RefusesWhatDoesNotFit) {
  StartToys({1});
  const int64_t most = engine_->pack_room().rank_tokens;
  const std::vector<uint32_t> longest = RandomTokens(random_, most);
  EXPECT_TRUE(absl::IsFailedPrecondition(StartPack({longest, {1}}).status())) << "too much for one rank";
  EXPECT_TRUE(absl::IsInvalidArgument(StartPack({{1}, {300}}).status())) << "not in the vocabulary";
  EXPECT_TRUE(absl::IsFailedPrecondition(StartPack({{1}, {}}).status())) << "no tokens";
  EXPECT_TRUE(StartPack({{1}, {2}}).ok());
}

// Packs count as one each; what stands still lives.
TEST_F(PoolPacksTest, LivesAsOne) {
  StartToys({1, 1});
  std::vector<std::vector<std::vector<uint32_t>>> prompts;
  std::vector<std::unique_ptr<meshfill::Prefill>> live;
  for (int i = 0; i < engine_->capacity(); ++i) {
    prompts.push_back(RandomPrompts(3, 20));
    auto started = StartPack(prompts.back());
    ASSERT_TRUE(started.ok()) << i << ": " << started.status();
    for (auto& each : *started) {
      each->Pause();
      live.push_back(std::move(each));
    }
  }
  EXPECT_TRUE(absl::IsResourceExhausted(StartPack({{1}, {2}}).status()));
  const std::vector<uint32_t> prompt = {1};
  EXPECT_TRUE(absl::IsResourceExhausted(engine_->Start({prompt, {}}, nullptr).status()));
  for (auto& each : live) each->Resume();
  for (size_t i = 0; i < live.size(); ++i) {
    const auto result = live[i]->Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->logits, LogitsAlone(prompts[i / 3][i % 3]));
  }
  live.clear();
  EXPECT_TRUE(StartPack({{1}, {2}}).ok());
}

TEST_F(PoolPacksTest, WhoLeavesEndsAlone) {
  StartToys({1, 1});
  const auto prompts = RandomPrompts(6, 15);
  auto started = StartPack(prompts);
  ASSERT_TRUE(started.ok()) << started.status();
  const auto leaves = static_cast<size_t>(Draw(random_, 0, 5));
  (*started)[leaves]->Stop();
  EXPECT_TRUE(absl::IsCancelled((*started)[leaves]->Wait().status()));
  (*started)[leaves].reset();
  for (size_t i = 0; i < prompts.size(); ++i) {
    if (i == leaves) continue;
    const auto result = (*started)[i]->Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->logits, LogitsAlone(prompts[i]));
    EXPECT_EQ(result->attempts, 1);
  }
}

// Whoever waits for all of them hears first of the one that ends first.
TEST_F(PoolPacksTest, WaitsForWhicheverIsDoneFirst) {
  StartToys({1, 1});
  const std::vector<std::vector<uint32_t>> prompts = RandomPrompts(4, 15);
  auto prefills = StartPack(prompts);
  ASSERT_TRUE(prefills.ok()) << prefills.status();
  for (const auto& prefill : *prefills) {
    prefill->Pause();
    EXPECT_FALSE(prefill->done());
  }
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

TEST_F(PoolPacksTest, ALossEndsThePassesOfItsWorkerAlone) {
  StartToys({1, 1, 1});
  std::vector<std::vector<uint32_t>> prompts;  // three on each rank
  for (int i = 0; i < 9; ++i) prompts.push_back(RandomTokens(random_, 12));
  auto started = StartPack(prompts);
  ASSERT_TRUE(started.ok()) << started.status();
  for (auto& each : *started) each->Pause();
  workers_[static_cast<size_t>(Draw(random_, 0, 2))].reset();
  for (auto& each : *started) each->Resume();
  int again = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto result = (*started)[i]->Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    if (result->attempts == 1) {
      EXPECT_EQ(result->logits, LogitsAlone(prompts[i]));
      EXPECT_EQ(result->pack_prompts, 9);
      continue;
    }
    ++again;
    EXPECT_EQ(result->pack_prompts, 1);
    ExpectClose(result->logits, LogitsAlone(prompts[i]), kTolerance, "after a loss");
  }
  EXPECT_LE(again, 3);
}

// Through the front-end, whose queue finds out that passes gain; with K and V.
TEST_F(PoolPacksTest, ManyShortOnesShareAPass) {
  StartToys({1, 2});
  const auto prompts = RandomPrompts(40, 20);
  std::atomic<size_t> next{0};
  std::atomic<int> packed{0};
  std::vector<std::thread> clients;
  for (int i = 0; i < 10; ++i) {
    clients.emplace_back([&] {
      KvClient client(Channel(front_end_->address()));
      for (size_t at = next++; at < prompts.size(); at = next++) {
        v1::PrefillHeader header = client.Header(0);
        header.set_return_logits(true);
        header.mutable_kv()->set_keep(at % 2 == 0);
        header.mutable_kv()->set_lease_seconds(60);
        const auto result = client.Prefill(header, prompts[at]);
        ASSERT_TRUE(result.ok()) << result.status();
        const auto alone = PrefillKeepingKv(*lone_, prompts[at]);
        ASSERT_TRUE(alone.ok()) << alone.status();
        const std::vector<float> logits(result->logits().begin(), result->logits().end());
        if (result->pack_prompts() > 1) {
          ++packed;
          EXPECT_EQ(logits, alone->logits);
        } else {
          ExpectClose(logits, alone->logits, kTolerance, "alone");
        }
        if (at % 2 != 0) continue;
        const Fetched fetched = client.Fetch(Request(result->kv().lease()));
        ASSERT_TRUE(fetched.status.ok()) << fetched.status;
        for (size_t layer = 0; layer < fetched.k.size(); ++layer) {
          const auto* k = reinterpret_cast<const char*>(alone->kv.layers[layer].k.data());
          if (result->pack_prompts() > 1) {
            EXPECT_EQ(fetched.k[layer], std::string(k, alone->kv.layers[layer].k.size()));
          }
        }
        EXPECT_TRUE(client.Release(result->kv().lease()).ok());
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_GT(packed, 1) << "of " << prompts.size();
  EXPECT_TRUE(Eventually([&] { return counts().bytes == 0; }));
  for (const auto& worker : workers_) EXPECT_TRUE(Eventually([&] { return worker->kv().bytes == 0; }));
}

}  // namespace
}  // namespace meshfill
