// Prompts side by side on sub-meshes of a pool of workers: each has the bits that it has alone, its K and V
// can be read, and what it leaves is found again where it is.
#include <atomic>
#include <random>
#include <set>
#include <thread>

#include "tests/engine/random_seed.h"
#include "tests/server/pool/pool_cache_fixture.h"

namespace meshfill {
namespace {

class PoolSubmeshesTest : public PoolCacheTest {
 protected:
  // What moves takes long, so that a worker alone is predicted to be faster than all.
  void SetUp() override {
    PoolCacheTest::SetUp();
    of_leader_.insert(of_leader_.end(), {"pool.link_latency=50ms", "pool.host_link_latency=50ms"});
  }

  std::unique_ptr<meshfill::Prefill> Start(const std::vector<uint32_t>& prompt, int submeshes) {
    PrefillOptions options;
    options.submeshes = submeshes;
    auto started = engine_->Start({prompt, options}, nullptr);
    EXPECT_TRUE(started.ok()) << started.status();
    return started.ok() ? *std::move(started) : nullptr;
  }
};

TEST_F(PoolSubmeshesTest, HasTheBitsThatItHasAlone) {
  std::mt19937_64 random(TestSeed());
  StartPool({1, 2, 1, 1});
  const bool paused = Draw(random, 0, 1) == 1;
  std::vector<std::vector<uint32_t>> prompts;
  std::vector<PrefillResult> alone;
  for (int i = 0; i < 4; ++i) {
    prompts.push_back(RandomTokens(random, Draw<int64_t>(random, 1, 700)));
    auto result = Start(prompts.back(), 4)->Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_LE(result->plan.ranks(), 2);
    alone.push_back(*std::move(result));
  }
  for (int round = 0; round < 5; ++round) {
    std::vector<std::unique_ptr<meshfill::Prefill>> started;
    for (const auto& prompt : prompts) {
      started.push_back(Start(prompt, 4));
      if (paused) started.back()->Pause();  // before it ends: the next finds its worker taken
    }
    auto on_all = Start(prompts[0], 1);
    ASSERT_TRUE(on_all->Wait().ok());
    for (auto& each : started) each->Resume();
    std::set<int> first_ranks;
    for (size_t i = 0; i < prompts.size(); ++i) {
      const auto result = started[i]->Wait();
      ASSERT_TRUE(result.ok()) << result.status();
      ASSERT_EQ(std::ssize(result->pool_ranks), result->plan.ranks());
      EXPECT_LT(result->pool_ranks.back(), 5);
      first_ranks.insert(result->pool_ranks.front());
      if (result->plan.ranks() != alone[i].plan.ranks()) continue;  // on the worker of two ranks, or not
      EXPECT_EQ(result->logits, alone[i].logits) << i;
    }
    if (paused) {
      EXPECT_GT(first_ranks.size(), 1u) << "they are on several workers";
    }
  }
}

TEST_F(PoolSubmeshesTest, SaysWhoSharesWorkers) {
  StartPool({1, 1});
  const std::vector<uint32_t> prompt(3000, 1);
  std::vector<std::unique_ptr<meshfill::Prefill>> started;
  for (int i = 0; i < 4; ++i) {
    started.push_back(Start(prompt, 2));
    ASSERT_NE(started.back(), nullptr);
    started.back()->Pause();
  }
  EXPECT_NE(started[0]->place(), 0u);
  EXPECT_NE(started[0]->place(), started[1]->place());
  EXPECT_EQ(started[0]->place(), started[2]->place());
  EXPECT_EQ(started[1]->place(), started[3]->place());
}

TEST_F(PoolSubmeshesTest, ManyShortOnesShareThePool) {
  std::mt19937_64 random(TestSeed());
  StartPool({1, 1, 1});
  std::vector<std::vector<uint32_t>> prompts;
  for (int i = 0; i < 24; ++i) prompts.push_back(RandomTokens(random, Draw<int64_t>(random, 20, 400)));
  std::atomic<size_t> next{0};
  std::atomic<int> on_one{0}, failed{0};
  std::vector<std::thread> clients;
  for (int i = 0; i < 8; ++i) {
    clients.emplace_back([&] {
      KvClient client(Channel(front_end_->address()));
      for (size_t at = next++; at < prompts.size(); at = next++) {
        v1::PrefillHeader header = Header(/*keep=*/at % 2 == 0);
        header.set_return_logits(true);
        const auto result = client.Prefill(header, prompts[at]);
        if (!result.ok()) {
          ADD_FAILURE() << result.status();
          ++failed;
          continue;
        }
        if (result->plan().ranks() == 1) ++on_one;
        if (header.kv().keep()) {
          EXPECT_TRUE(client.Fetch(Request(result->kv().lease())).status.ok());
        }
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(failed, 0);
  EXPECT_GT(on_one, 12) << "of " << prompts.size();
  // Each is found again, wherever it ran.
  int64_t cached = 0;
  for (const auto& prompt : prompts) cached += PrefillAndCompare(*client_, prompt, Header(), "again");
  EXPECT_GT(cached, 0);
}

// Those on other workers go on, and keep what they have.
TEST_F(PoolSubmeshesTest, ALossEndsTheRunsOfItsWorkerAlone) {
  std::mt19937_64 random(TestSeed());
  StartPool({1, 1, 1});
  std::vector<std::vector<uint32_t>> prompts;
  std::vector<std::unique_ptr<meshfill::Prefill>> started;
  for (int i = 0; i < 3; ++i) prompts.push_back(RandomTokens(random, 2500));
  for (const auto& prompt : prompts) started.push_back(Start(prompt, 3));
  workers_[static_cast<size_t>(Draw(random, 0, 2))].reset();
  int again = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto result = started[i]->Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    const auto expected = PrefillKeepingKv(*fresh_, prompts[i]);
    ASSERT_TRUE(expected.ok());
    ExpectClose(result->logits, expected->logits, kTolerance, "beside a loss");
    again += result->attempts - 1;
  }
  EXPECT_LE(again, 1);
}

}  // namespace
}  // namespace meshfill
