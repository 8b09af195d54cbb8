// A backend is a folder and a line: what this process computes with a platform that is registered here is
// what the CPU computes.
#include "tests/engine/devices/toy/toy_platform.h"

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "engine/embedded_engine.h"
#include "engine/embedded_pool.h"
#include "engine/model/make_model.h"
#include "engine/platforms.h"
#include "gtest/gtest.h"
#include "tests/engine/kept_kv.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

class ToyPlatformTest : public testing::Test {
 protected:
  static void SetUpTestSuite() { RegisterPlatform(MakeToyPlatform()); }

  void SetUp() override {
    const absl::Status made = MakeModel({.layers = 2,
                                         .hidden = 48,
                                         .intermediate = 64,
                                         .q_heads = 4,
                                         .kv_heads = 2,
                                         .head_dim = 12,
                                         .vocab = 100,
                                         .context_tokens = 4096,
                                         .dtype = DType::kF32},
                                        folder_ / "model");
    ASSERT_TRUE(made.ok()) << made;
  }
  EngineOptions Options(const std::string& device, int ranks) const {
    return {.model_path = folder_ / "model", .ranks = ranks, .device = device, .peak_flops = 1e12};
  }

  const TempFolder folder_;
};

TEST_F(ToyPlatformTest, IsKnownByItsName) {
  EXPECT_EQ(DeviceNames(), (std::vector<std::string>{"auto", "cpu", "cuda", "toy"}));
  EXPECT_EQ(*ParseDevice("toy"), "toy");
  EXPECT_EQ(ParseDevice("gpu").status().message(), "'gpu' is no device; choose one of auto, cpu, cuda, toy");
}

TEST_F(ToyPlatformTest, AutoTakesThoseBeforeIt) {
  const auto found = FindDevices("auto", {.ranks = 2});
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_NE((*found)->DeviceName(0), "toy 0");
}

TEST_F(ToyPlatformTest, SpreadsRanksOverItsDevices) {
  const auto pool = LoadEmbeddedPool(Options("toy", 3));
  ASSERT_TRUE(pool.ok()) << pool.status();
  EXPECT_EQ(pool->device_names, (std::vector<std::string>{"toy 0", "toy 0", "toy 1"}));
  EXPECT_EQ(pool->devices[0], pool->devices[1]);
  EXPECT_NE(pool->devices[1], pool->devices[2]);
  EXPECT_EQ(pool->models[0], pool->models[1]);
  EXPECT_NE(pool->models[1], pool->models[2]);
  EXPECT_FALSE(pool->capacity.one_memory);
  EXPECT_EQ(pool->capacity.memory_budget_bytes, int64_t{2} << 28);
  EXPECT_EQ(pool->capacity.speed.slice_tokens, 64);
}

TEST_F(ToyPlatformTest, AnswersAsTheCpuDoes) {
  std::mt19937_64 random(TestSeed());
  for (const int ranks : {1, 2, 4}) {
    const auto toy = LoadEmbeddedEngine(Options("toy", ranks));
    ASSERT_TRUE(toy.ok()) << toy.status();
    EXPECT_EQ((*toy)->backend_name(), "toy/loops");
    const auto cpu = LoadEmbeddedEngine(Options("cpu", ranks));
    ASSERT_TRUE(cpu.ok()) << cpu.status();
    std::vector<uint32_t> prompt(100 + random() % 200);
    for (uint32_t& token : prompt) token = static_cast<uint32_t>(random() % 100);
    const PrefillOptions options = {.layout = LayoutKind::kStriped, .stripe = 8};
    const auto got = PrefillKeepingKv(**toy, prompt, options);
    ASSERT_TRUE(got.ok()) << got.status();
    const auto expected = PrefillKeepingKv(**cpu, prompt, options);
    ASSERT_TRUE(expected.ok()) << expected.status();
    ASSERT_EQ(got->logits.size(), expected->logits.size());
    for (size_t i = 0; i < got->logits.size(); ++i) {
      EXPECT_NEAR(got->logits[i], expected->logits[i], 1e-4) << ranks << " ranks, logit " << i;
    }
    ASSERT_EQ(got->kv.layers.size(), expected->kv.layers.size());
    for (size_t layer = 0; layer < got->kv.layers.size(); ++layer) {
      const auto& ours = got->kv.layers[layer].k;
      const auto& theirs = expected->kv.layers[layer].k;
      ASSERT_EQ(ours.size(), theirs.size());
      for (size_t at = 0; at < ours.size(); at += sizeof(float)) {
        float a, b;
        std::memcpy(&a, &ours[at], sizeof(float));
        std::memcpy(&b, &theirs[at], sizeof(float));
        ASSERT_NEAR(a, b, 1e-4) << ranks << " ranks, layer " << layer << ", byte " << at;
      }
    }
  }
}

}  // namespace
}  // namespace meshfill
