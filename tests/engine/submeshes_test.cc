// Prompts side by side on sub-meshes of an embedded pool: what they are predicted to take, that each has the
// answer of a pool of as many ranks, whatever runs beside it, and where they take their memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/embedded_engine.h"
#include "engine/model/make_model.h"
#include "engine/prefill_engine.h"
#include "tests/engine/kept_kv.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/test_device.h"

namespace meshfill {
namespace {

constexpr uint32_t kVocab = 100;

// A GPU that the host plays takes some 20 times as long.
int64_t Tokens(int64_t on_cpu) { return TestsOnCuda() ? on_cpu / 10 : on_cpu; }

const std::string& ModelFolder() {
  static const TempFolder of_process;  // this test and that of GPUs run at once
  static const std::string folder = [] {
    std::string made = of_process / "model";
    const absl::Status status = MakeModel({.layers = 3,
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

std::unique_ptr<PrefillEngine> Load(int ranks, int64_t memory_budget_bytes = 0) {
  PoolSpeed speed;
  speed.lone_rank_speedup = ranks;  // as where they share one core
  auto engine = LoadEmbeddedEngine({.model_path = ModelFolder(),
                                    .ranks = ranks,
                                    .device = TestDevice(),
                                    .peak_flops = 1e12,
                                    .memory_budget_bytes = memory_budget_bytes,
                                    .threads = ranks,  // one each: without AVX-512 they change the bits
                                    .speed = speed});
  EXPECT_TRUE(engine.ok()) << engine.status();
  return engine.ok() ? *std::move(engine) : nullptr;
}

std::vector<uint32_t> RandomPrompt(int64_t tokens, std::mt19937_64& random) {
  std::vector<uint32_t> prompt(static_cast<size_t>(tokens));
  for (uint32_t& id : prompt) id = Draw<uint32_t>(random, 0, kVocab - 1);
  return prompt;
}

// With a plan that what ran before does not change: a pool's speeds are corrected as it runs.
PrefillOptions FixedPlan(int submeshes, std::mt19937_64& random) {
  const std::vector<Tile> tiles = TilesOf(4 / submeshes);
  return {.tile = tiles[Draw<size_t>(random, 0, tiles.size() - 1)], .submeshes = submeshes};
}

// So many that stand still, each on a half of the pool.
std::vector<std::unique_ptr<Prefill>> OnHalves(PrefillEngine& engine, const std::vector<uint32_t>& prompt,
                                               int count) {
  std::vector<std::unique_ptr<Prefill>> live;
  for (int i = 0; i < count; ++i) {
    auto prefill = engine.Start({prompt, {.submeshes = 2}}, nullptr);
    EXPECT_TRUE(prefill.ok()) << prefill.status();
    if (!prefill.ok()) break;
    (*prefill)->Pause();
    live.push_back(*std::move(prefill));
  }
  return live;
}

std::vector<int> CountsOf(const std::vector<SubmeshSeconds>& submeshes) {
  std::vector<int> counts;
  for (const SubmeshSeconds& each : submeshes) counts.push_back(each.submeshes);
  return counts;
}

TEST(Submeshes, AreListedWithWhatAPlanThereTakes) {
  const auto engine = Load(4);
  ASSERT_NE(engine, nullptr);
  bool faster = false;
  for (const int64_t tokens : {1, 10, 1000, 50000}) {
    const auto whole = engine->MakePlan(tokens, {});
    ASSERT_TRUE(whole.ok()) << whole.status();
    const auto listed = engine->Submeshes(tokens, {});
    EXPECT_EQ(CountsOf(listed), (std::vector<int>{2, 4}));
    for (const SubmeshSeconds& each : listed) {
      const auto choice = engine->MakePlan(tokens, {.submeshes = each.submeshes});
      ASSERT_TRUE(choice.ok()) << choice.status();
      EXPECT_EQ(choice->plan.ranks(), 4 / each.submeshes);
      const double there = choice->plan.predicted.seconds, on_all = whole->plan.predicted.seconds;
      EXPECT_EQ(each.seconds, std::max(there, on_all)) << "who is alone takes all ranks";
      faster = faster || there < on_all;
    }
  }
  EXPECT_TRUE(faster);
  EXPECT_EQ(CountsOf(Load(3)->Submeshes(1000, {})), (std::vector<int>{2, 3}));
  EXPECT_EQ(CountsOf(Load(1)->Submeshes(1000, {})), std::vector<int>());
  EXPECT_EQ(CountsOf(engine->Submeshes(1000, {.tile = Tile{2, 2}})), std::vector<int>());
  EXPECT_EQ(CountsOf(engine->Submeshes(1000, {.heads = 2})), std::vector<int>());
  EXPECT_EQ(CountsOf(engine->Submeshes(0, {})), std::vector<int>());
}

// Alone one rank would have all cores. Beside others it has its own.
TEST(Submeshes, CountOnNoCoresOfOthers) {
  const auto engine = Load(4);
  ASSERT_NE(engine, nullptr);
  const auto listed = engine->Submeshes(20000, {});
  ASSERT_EQ(listed.size(), 2u);
  const auto alone = Load(1)->MakePlan(20000, {});  // its one rank has a core
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_DOUBLE_EQ(listed.back().seconds, alone->plan.predicted.seconds);
}

TEST(Submeshes, HaveTheirPartOfTheMemory) {
  const auto whole = Load(4)->MakePlan(20000, {});
  ASSERT_TRUE(whole.ok()) << whole.status();
  const auto engine = Load(4, whole->plan.predicted.run_bytes);
  ASSERT_NE(engine, nullptr);
  EXPECT_TRUE(engine->MakePlan(20000, {}).ok());
  EXPECT_EQ(CountsOf(engine->Submeshes(20000, {})), std::vector<int>());
  EXPECT_EQ(CountsOf(engine->Submeshes(200, {})), (std::vector<int>{2, 4}));
}

// Of ranks that share cores, how long a prompt takes depends on what runs beside it.
TEST(Submeshes, TeachPredictionsNothingWhereRanksShareCores) {
  const auto engine = Load(4);
  ASSERT_NE(engine, nullptr);
  const std::vector<uint32_t> prompt(Tokens(1000), 1);
  const auto seconds = [&] { return engine->MakePlan(20000, {})->plan.predicted.seconds; };
  const double before = seconds();
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(RunPrefill(*engine, {prompt, {.submeshes = 2}}).ok());
  EXPECT_EQ(seconds(), before);
  ASSERT_TRUE(RunPrefill(*engine, {prompt, {}}).ok());
  EXPECT_NE(seconds(), before);
}

TEST(Submeshes, AnswerAsAPoolOfAsManyRanks) {
  std::mt19937_64 random(TestSeed());
  const auto engine = Load(4);
  for (const int submeshes : {2, 4}) {
    const auto smaller = Load(4 / submeshes);
    ASSERT_TRUE(engine != nullptr && smaller != nullptr);
    for (int i = 0; i < 5; ++i) {
      const auto prompt = RandomPrompt(Draw<int64_t>(random, 1, Tokens(700)), random);
      const PrefillOptions options = FixedPlan(submeshes, random);
      const auto actual = PrefillKeepingKv(*engine, prompt, options);
      const auto expected = PrefillKeepingKv(*smaller, prompt, {.tile = options.tile});
      ASSERT_TRUE(actual.ok() && expected.ok()) << actual.status() << expected.status();
      EXPECT_EQ(actual->plan.ranks(), 4 / submeshes);
      EXPECT_EQ(std::ssize(actual->ranks), 4 / submeshes);
      EXPECT_EQ(std::ssize(actual->pool_ranks), 4 / submeshes);
      EXPECT_EQ(actual->logits, expected->logits) << prompt.size() << " tokens";
      for (size_t layer = 0; layer < expected->kv.layers.size(); ++layer) {
        EXPECT_TRUE(actual->kv.layers[layer].k == expected->kv.layers[layer].k);
        EXPECT_TRUE(actual->kv.layers[layer].v == expected->kv.layers[layer].v);
      }
    }
  }
}

// On all ranks and on sub-meshes of two sizes at once, paused at random.
TEST(Submeshes, WhatRunsBesideThemChangesNoBit) {
  std::mt19937_64 random(TestSeed());
  const auto engine = Load(4);
  ASSERT_NE(engine, nullptr);
  struct Lived {
    std::vector<uint32_t> prompt;
    PrefillOptions options;
    std::vector<float> alone;
    std::unique_ptr<Prefill> prefill = nullptr;
  };
  for (int round = 0; round < 4; ++round) {
    std::vector<Lived> all;
    for (int i = 0; i < engine->capacity(); ++i) {
      Lived lived = {.prompt = RandomPrompt(Draw<int64_t>(random, 1, Tokens(3000)), random),
                     .options = FixedPlan(1 << Draw(random, 0, 2), random),
                     .alone = {}};
      const auto alone = RunPrefill(*engine, {lived.prompt, lived.options});
      ASSERT_TRUE(alone.ok()) << alone.status();
      lived.alone = alone->logits;
      all.push_back(std::move(lived));
    }
    for (Lived& lived : all) {
      auto prefill = engine->Start({lived.prompt, lived.options}, nullptr);
      ASSERT_TRUE(prefill.ok()) << prefill.status();
      lived.prefill = *std::move(prefill);
    }
    for (int pause = 0; pause < 12; ++pause) {
      Lived& lived = all[Draw<size_t>(random, 0, all.size() - 1)];
      lived.prefill->Pause();
      std::this_thread::sleep_for(std::chrono::microseconds(Draw(random, 0, 2000)));
      if (Draw(random, 0, 2) == 0) lived.prefill->Pause();  // twice is once
      lived.prefill->Resume();
    }
    for (const Lived& lived : all) {
      const auto result = lived.prefill->Wait();
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->logits, lived.alone) << lived.prompt.size() << " tokens, " << lived.options.submeshes;
    }
  }
}

// Two on halves leave each rank room for one more of half their bytes, and not for one of more.
TEST(Submeshes, TakeTheMemoryOfTheirRanksAlone) {
  const std::vector<uint32_t> prompt(Tokens(4000), 1);
  const auto choice = Load(4)->MakePlan(std::ssize(prompt), {.submeshes = 2});
  ASSERT_TRUE(choice.ok()) << choice.status();
  const auto engine = Load(4, 3 * choice->plan.predicted.run_bytes);  // of each half, half as much again
  ASSERT_NE(engine, nullptr);
  std::vector<std::unique_ptr<Prefill>> live = OnHalves(*engine, prompt, 2);
  ASSERT_EQ(live.size(), 2u);
  const auto third = RunPrefill(*engine, {prompt, {.submeshes = 2}});
  EXPECT_EQ(third.status().code(), absl::StatusCode::kResourceExhausted) << third.status();
  EXPECT_TRUE(RunPrefill(*engine, {std::vector<uint32_t>(Tokens(200), 1), {.submeshes = 2}}).ok());
  live.pop_back();
  const auto after = RunPrefill(*engine, {prompt, {.submeshes = 2}});
  EXPECT_TRUE(after.ok()) << after.status();
}

TEST(Submeshes, SayWhoSharesTheirRanks) {
  const auto engine = Load(4);
  ASSERT_NE(engine, nullptr);
  const std::vector<uint32_t> prompt(Tokens(2000), 1);
  const std::vector<std::unique_ptr<Prefill>> live = OnHalves(*engine, prompt, 4);
  ASSERT_EQ(live.size(), 4u);
  EXPECT_NE(live[0]->place(), 0u);
  EXPECT_NE(live[0]->place(), live[1]->place());
  EXPECT_EQ(live[0]->place(), live[2]->place());
  EXPECT_EQ(live[1]->place(), live[3]->place());
  for (const auto& each : live) {
    each->Resume();
    const auto result = each->Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    const int first = static_cast<int>(each->place()) - 1;
    EXPECT_EQ(result->pool_ranks, (std::vector<int>{first, first + 1}));
  }
}

// The model FLOPs utilisation is of what the ranks that ran it can do.
TEST(Submeshes, MfuIsOfTheirPartOfThePool) {
  PoolSpeed speed;  // a rank gains nothing where the others wait
  const auto engine = LoadEmbeddedEngine(
      {.model_path = ModelFolder(), .ranks = 4, .device = TestDevice(), .peak_flops = 1e12, .speed = speed});
  ASSERT_TRUE(engine.ok()) << engine.status();
  const std::vector<uint32_t> prompt(500, 1);
  for (const int submeshes : {1, 2, 4}) {
    const auto result = RunPrefill(**engine, {prompt, {.submeshes = submeshes}});
    ASSERT_TRUE(result.ok()) << result.status();
    const double flops = ModelFlops((*engine)->model(), 500);
    EXPECT_NEAR(result->mfu, flops / result->prefill_seconds / (1e12 / submeshes), 1e-3 * result->mfu);
  }
}

}  // namespace
}  // namespace meshfill
