// Cached prefixes in a pool of workers: a prompt that begins like an earlier one gets the answer of a server
// that computes all, whatever was evicted, lost with a worker, or is another tenant's.
#include <fstream>
#include <memory>
#include <random>

#include "engine/kv/block_hash.h"
#include "nlohmann/json.hpp"
#include "tests/engine/random_seed.h"
#include "tests/server/pool/pool_cache_fixture.h"

namespace meshfill {
namespace {

TEST_F(PoolCacheTest, ComputesWhatIsNewAlone) {
  std::mt19937_64 random(TestSeed());
  for (const std::vector<int>& pool : std::vector<std::vector<int>>{{1}, {1, 1}, {2, 1}, {2, 2}}) {
    int ranks = 0;
    for (const int of_worker : pool) ranks += of_worker;
    StartPool(pool);
    const auto first = RandomTokens(random, 1100);
    EXPECT_EQ(PrefillAndCompare(*client_, first, Header(), "first"), 0);
    const int64_t round = ranks * 64;
    // Each behind all that the one before left.
    std::vector<uint32_t> prompt = first;
    for (const bool keep : {false, true, true}) {
      const int64_t before = std::ssize(prompt);
      prompt = Joined(prompt, before, RandomTokens(random, Draw<int64_t>(random, 64, 300)));
      const int64_t cached = PrefillAndCompare(*client_, prompt, Header(keep), absl::StrCat(ranks, " ranks"));
      EXPECT_GT(cached, before - round);
      EXPECT_EQ(cached % 64, 0);
    }
    EXPECT_GT(counts().hit_tokens, 2500u);
    // Tenants, salts, and who ignores the cache have none of others.
    KvClient other(Channel(front_end_->address()), "other");
    v1::PrefillHeader of_other = Header();
    of_other.set_tenant("other");
    EXPECT_EQ(PrefillAndCompare(other, prompt, of_other, "tenant"), 0);
    v1::PrefillHeader salted = Header();
    salted.set_cache_salt("salt");
    EXPECT_EQ(PrefillAndCompare(*client_, prompt, salted, "salt"), 0);
    v1::PrefillHeader ignoring = Header();
    ignoring.mutable_kv()->set_ignore_cache(true);
    EXPECT_EQ(PrefillAndCompare(*client_, prompt, ignoring, "ignore_cache"), 0);
    EXPECT_GT(PrefillAndCompare(*client_, prompt, Header(), "again"), 1000);
    v1::PrefillHeader striped_otherwise = Header();
    striped_otherwise.mutable_plan()->set_stripe(32);
    EXPECT_EQ(PrefillAndCompare(*client_, prompt, striped_otherwise, "other stripes"), 0);
    EXPECT_GT(PrefillAndCompare(*client_, prompt, striped_otherwise, "other stripes again"), 1000);
    ReleaseAll();
    EXPECT_EQ(counts().leases, 0);
    EXPECT_EQ(counts().bytes, counts().cached_bytes);
    StopPool();
  }
}

TEST_F(PoolCacheTest, WhatIsLostOrElsewhereIsComputed) {
  std::mt19937_64 random(TestSeed());
  StartPool({1, 1});
  const auto prompt = RandomTokens(random, 900);
  EXPECT_EQ(PrefillAndCompare(*client_, prompt, Header(), "first"), 0);
  EXPECT_EQ(PrefillAndCompare(*client_, prompt, Header(), "cached"), 768);
  workers_[1].reset();
  ASSERT_TRUE(Eventually([&] { return engine_->ranks() == 1; }));
  EXPECT_EQ(counts().cached_bytes, 0);  // half of it is of no use
  EXPECT_EQ(counts().bytes, 0);
  EXPECT_EQ(PrefillAndCompare(*client_, prompt, Header(), "after a loss"), 0);
  EXPECT_EQ(PrefillAndCompare(*client_, prompt, Header(), "on one rank"), 832);
  AddWorker(1);
  ASSERT_TRUE(Eventually([&] { return engine_->ranks() == 2; }));
  // What one rank has is behind it, or is computed anew on both, as is predicted to be faster.
  PrefillAndCompare(*client_, prompt, Header(), "on two ranks");
  EXPECT_GE(PrefillAndCompare(*client_, prompt, Header(), "and again"), 768);
  workers_[2]->Drain();
  ASSERT_TRUE(Eventually([&] { return workers_[2]->gone(); }));
  PrefillAndCompare(*client_, prompt, Header(), "after a drain");
  EXPECT_GE(PrefillAndCompare(*client_, prompt, Header(), "and again"), 768);
}

// The speeds that these workers keep are far too slow.
TEST_F(PoolCacheTest, WorkersDropSpeedsThatStayWrong) {
  std::mt19937_64 random(TestSeed());
  const auto kept = [] { return nlohmann::json::parse(std::ifstream(SpeedProfile()))["pools"].size(); };
  const size_t all = kept();
  StartPool({1});
  for (int i = 0; i < SpeedCorrection::kWrongPrefills - 1; ++i) {
    ASSERT_TRUE(RunPrefill(*engine_, {RandomTokens(random, 60), {}}).ok());
  }
  EXPECT_EQ(kept(), all);
  EXPECT_TRUE(Eventually([&] {  // the first ones said too little
    EXPECT_TRUE(RunPrefill(*engine_, {RandomTokens(random, 60), {}}).ok());
    return kept() == all - 1;
  }));
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(RunPrefill(*engine_, {RandomTokens(random, 60), {}}).ok());
}

// A faster worker comes to the one that has a prompt: it runs there on, and is predicted to.
TEST_F(PoolCacheTest, PredictsWhereItRuns) {
  std::mt19937_64 random(TestSeed());
  StartPool({1});
  const auto prompt = RandomTokens(random, 900);
  BlockHasher hasher(/*block_tokens=*/16, "");
  hasher.Append(prompt);
  const PrefillOptions options = {
      .block_names = std::make_shared<const KvBlockNames>(KvBlockNames{.hashes = hasher.hashes()})};
  ASSERT_TRUE(RunPrefill(*engine_, {prompt, options}).ok());
  FixSpeeds(SpeedProfile(), {.gemm_flops_per_second = 4e8});
  AddWorker(1);
  ASSERT_TRUE(Eventually([&] { return engine_->ranks() == 2; }));
  const auto choice = engine_->MakePlan(900, options);
  ASSERT_TRUE(choice.ok()) << choice.status();
  const auto result = RunPrefill(*engine_, {prompt, options});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GT(result->cached_tokens, 0);
  EXPECT_EQ(choice->plan.predicted, result->plan.predicted);
}

// Prompts that grow and branch, kept or not, by two tenants, on workers with too little room for all, one of
// which is lost now and then.
TEST_F(PoolCacheTest, NoHistoryGivesAWrongLogit) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  constexpr int64_t kTokenBytes = 2 * kLayers * kKvHeads * kHeadDim * 4;
  const std::vector<std::string> little = {absl::StrCat("kv.memory_bytes=", 1100 * kTokenBytes, "B")};
  StartPool({1, 1}, little);
  KvClient other(Channel(front_end_->address()), "other");
  std::vector<std::vector<uint32_t>> prompts = {RandomTokens(random, 400)};
  int hits = 0;
  for (int step = 0; step < 50; ++step) {
    const std::string what = absl::StrCat("step ", step, ", seed ", seed);
    const auto& earlier = prompts[random() % prompts.size()];
    // Most of the earlier prompt: a half of 400 tokens is seldom a whole round of stripes.
    const auto prompt = Joined(earlier, Draw<int64_t>(random, std::ssize(earlier) / 2, std::ssize(earlier)),
                               RandomTokens(random, Draw<int64_t>(random, 1, 200)));
    if (std::ssize(prompt) > 800) prompts = {RandomTokens(random, 400)};
    const bool of_other = random() % 4 == 0;
    v1::PrefillHeader header = Header(!of_other && random() % 4 == 0);
    if (of_other) header.set_tenant("other");
    hits += PrefillAndCompare(of_other ? other : *client_, prompt, header, what) > 0 ? 1 : 0;
    ASSERT_LE(counts().bytes, 2 * 1100 * kTokenBytes) << what;
    if (leases_.size() > 1) ReleaseAll();
    prompts.push_back(prompt);
    if (prompts.size() > 6) prompts.erase(prompts.begin());
    if (step % 20 != 10) continue;
    leases_.clear();  // lost, or lapsed by the end
    workers_.back().reset();
    ASSERT_TRUE(Eventually([&] { return engine_->ranks() == 1; }));
    AddWorker(1, little);
    ASSERT_TRUE(Eventually([&] { return engine_->ranks() == 2; }));
  }
  EXPECT_GT(hits, 15);
  EXPECT_GT(counts().evictions, 5u);
}

// Workers whose devices have memory of their own keep there what was used last, a third of all of it: what
// has left for the host, and what has not, is read by later prompts and by who fetches it.
TEST_F(PoolCacheTest, DevicesWithMemoryOfTheirOwnKeepWhatWasUsedLast) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  constexpr int64_t kTokenBytes = 2 * kLayers * kKvHeads * kHeadDim * 4;
  of_leader_.push_back("kv.cache=true");
  StartPool({2, 1}, {"pool.worker.device=far", absl::StrCat("kv.memory_bytes=", 400 * kTokenBytes, "B"),
                     absl::StrCat("kv.host_memory_bytes=", 4000 * kTokenBytes, "B")});
  const auto on_devices = [&](int worker) { return workers_[worker]->kv().device_bytes; };
  std::vector<uint32_t> prompt = RandomTokens(random, 700);
  EXPECT_EQ(PrefillAndCompare(*client_, prompt, Header(), "first"), 0);
  for (int step = 0; step < 6; ++step) {
    const int64_t before = std::ssize(prompt);
    prompt = Joined(prompt, before, RandomTokens(random, Draw<int64_t>(random, 100, 300)));
    const std::string what = absl::StrCat("step ", step, ", seed ", seed);
    EXPECT_GT(PrefillAndCompare(*client_, prompt, Header(/*keep=*/step % 2 == 0), what), before - 3 * 64);
    for (const int worker : {0, 1}) {
      EXPECT_GT(on_devices(worker), 0) << what;
      EXPECT_LE(on_devices(worker), 400 * kTokenBytes) << what;
      EXPECT_LE(on_devices(worker), workers_[worker]->kv().bytes) << what;
    }
  }
  // Most of it has left: there is more than the devices hold.
  EXPECT_GT(workers_[0]->kv().bytes, 2 * on_devices(0));
  ReleaseAll();
  workers_.clear();
}

}  // namespace
}  // namespace meshfill
