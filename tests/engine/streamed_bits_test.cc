// Weights that stream, or that devices share, give the bits of weights that stay: for every family, at random
// shapes and dtypes, on any ranks of any device.
#include <gtest/gtest.h>

#include <random>

#include "engine/embedded_engine.h"
#include "engine/model/family.h"
#include "engine/model/make_model.h"
#include "engine/prefill_engine.h"
#include "tests/engine/kept_kv.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/test_device.h"

namespace meshfill {
namespace {

// A few layers of odd widths, with an LM head of more than one part. GPUs' products want multiples of eight.
MakeModelOptions RandomModel(const Family& family, std::mt19937_64& random) {
  const int kv_heads = Draw(random, 1, 2), group = Draw(random, 1, 3);
  const DType dtypes[] = {DType::kF32, DType::kBf16, DType::kF16, DType::kF8E4M3};
  MakeModelOptions options = {.family = family.family,
                              .layers = Draw(random, 1, 4),
                              .hidden = 16 * Draw(random, 1, 4),
                              .intermediate = 8 * Draw(random, 1, 12),
                              .q_heads = kv_heads * group,
                              .kv_heads = kv_heads,
                              .head_dim = 16,
                              .vocab = 8 * Draw(random, 62, 175),
                              .context_tokens = 4096,
                              .tied_embeddings = Draw(random, 0, 1) == 1,
                              .dtype = dtypes[Draw(random, 0, 3)],
                              .seed = random()};
  if (family.has_window) options.sliding_window = Draw(random, 0, 100);
  if (family.long_rope && Draw(random, 0, 3) > 0) options.original_context_tokens = Draw(random, 2, 300);
  if (family.has_experts) {
    options.experts = Draw(random, 2, 5);
    options.experts_used = Draw(random, 1, options.experts);
  }
  if (family.family == ModelFamily::kGptOss && Draw(random, 0, 1) == 1) {
    options.dtype = DType::kF4E2M1;
    options.hidden = 32 * Draw(random, 1, 2);
    options.intermediate = 32 * Draw(random, 1, 3);
  }
  if (Draw(random, 0, 2) == 0) options.shard_bytes = 4096;  // a tensor or so in each file
  return options;
}

std::unique_ptr<PrefillEngine> Load(const std::string& folder, int ranks, WeightMode weights) {
  auto engine = LoadEmbeddedEngine({.model_path = folder,
                                    .ranks = ranks,
                                    .device = TestDevice(),
                                    .weights = weights,
                                    .stripe = 16,
                                    .peak_flops = 1e12,
                                    .kv_memory_bytes = 1 << 26,
                                    .threads = 2,
                                    .speed = PoolSpeed()});  // alike: the same plans
  EXPECT_TRUE(engine.ok()) << engine.status();
  return engine.ok() ? *std::move(engine) : nullptr;
}

// Devices share where there are several: GPUs alone.
bool CanShare(int ranks) {
  const auto devices = FindDevices(TestDevice(), {.ranks = ranks});
  return TestsOnCuda() && devices.ok() && (*devices)->count() > 1;
}

TEST(StreamedBitsTest, WeightsThatDoNotStayGiveTheBitsOfThoseThatDo) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (const Family* family : Families()) {
    SCOPED_TRACE(testing::Message() << family->name << ", MESHFILL_SEED=" << seed);
    for (int draw = 0; draw < 2; ++draw) {
      const TempFolder folder;
      const MakeModelOptions options = RandomModel(*family, random);
      const absl::Status made = MakeModel(options, folder.path());
      ASSERT_TRUE(made.ok()) << made;
      const int ranks = Draw(random, 1, 4);
      const auto resident = Load(folder.path(), ranks, WeightMode::kResident);
      ASSERT_NE(resident, nullptr);
      std::vector<std::unique_ptr<PrefillEngine>> others;
      others.push_back(Load(folder.path(), ranks, WeightMode::kStreamed));
      if (CanShare(ranks)) others.push_back(Load(folder.path(), ranks, WeightMode::kSharded));
      for (int prompts = 0; prompts < 2; ++prompts) {
        std::vector<uint32_t> prompt(Draw<size_t>(random, 1, 300));
        for (uint32_t& id : prompt) id = static_cast<uint32_t>(random() % options.vocab);
        const auto expected = PrefillKeepingKv(*resident, prompt);
        ASSERT_TRUE(expected.ok()) << expected.status();
        for (const auto& other : others) {
          ASSERT_NE(other, nullptr);
          const auto actual = PrefillKeepingKv(*other, prompt);
          ASSERT_TRUE(actual.ok()) << actual.status();
          SCOPED_TRACE(WeightModeName(other->MakePlan(std::ssize(prompt), {})->weights.mode));
          EXPECT_EQ(actual->plan.DebugString(), expected->plan.DebugString());
          EXPECT_EQ(actual->logits, expected->logits);
          ASSERT_EQ(actual->kv.layers.size(), expected->kv.layers.size());
          for (size_t layer = 0; layer < expected->kv.layers.size(); ++layer) {
            EXPECT_EQ(actual->kv.layers[layer].k, expected->kv.layers[layer].k) << layer;
            EXPECT_EQ(actual->kv.layers[layer].v, expected->kv.layers[layer].v) << layer;
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

}  // namespace
}  // namespace meshfill
