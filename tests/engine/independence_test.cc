// The answer does not depend on how a prompt is spread: every mesh, head group, layout and stripe gives one
// rank's logits and KV, moves exactly the bytes of the formula, computes every block once, and repeats itself
// to the bit.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <random>

#include "engine/embedded_engine.h"
#include "engine/model/family.h"
#include "engine/model/make_model.h"
#include "engine/plan/comm_bytes.h"
#include "engine/plan/layer_reach.h"
#include "engine/plan/planner.h"
#include "engine/prefill_engine.h"
#include "tests/engine/close.h"
#include "tests/engine/kept_kv.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/test_device.h"

namespace meshfill {
namespace {

// Relative to the largest magnitude: of f32, or of a GPU's bf16, whose probabilities are rounded block by
// block.
double Tolerance() { return TestsOnCuda() ? 3e-2 : 1e-4; }

std::string MakeTestModel(const char* name, const MakeModelOptions& options) {
  static const TempFolder of_process;  // this test and that of GPUs run at once
  const std::string folder = of_process / name;
  const absl::Status status = MakeModel(options, folder);
  EXPECT_TRUE(status.ok()) << status;
  return folder;
}

MakeModelOptions SmallModel(ModelFamily family) {
  return {.family = family,
          .layers = 2,
          .hidden = 64,
          .intermediate = 96,
          .q_heads = 4,
          .kv_heads = 2,
          .head_dim = 16,
          .vocab = 300,
          .context_tokens = 4096,
          .sliding_window = FamilyOf(family).has_window ? 100 : 0,
          .rope_theta = 10000,
          .dtype = DType::kF32,
          .seed = 7};
}

std::unique_ptr<PrefillEngine> LoadEngine(const std::string& folder, int ranks, DType dtype = DType::kF32) {
  absl::StatusOr<std::unique_ptr<PrefillEngine>> engine =
      LoadEmbeddedEngine({.model_path = folder,
                          .ranks = ranks,
                          .device = TestDevice(),
                          .dtype = TestsOnCuda() ? DType::kBf16 : dtype,
                          .peak_flops = 1e12,
                          .speed = PoolSpeed()});
  EXPECT_TRUE(engine.ok()) << engine.status();
  return engine.ok() ? *std::move(engine) : nullptr;
}

std::vector<uint32_t> RandomPrompt(int64_t tokens, int64_t vocab, std::mt19937_64& random) {
  std::vector<uint32_t> ids(tokens);
  for (uint32_t& id : ids) id = static_cast<uint32_t>(random() % vocab);
  return ids;
}

void ExpectSameAnswer(const KeptPrefill& actual, const KeptPrefill& expected, const std::string& what) {
  ExpectClose(actual.logits, expected.logits, Tolerance(), what + ": logits");
  for (size_t layer = 0; layer < expected.kv.layers.size(); ++layer) {
    for (auto [tensor, name] : {std::pair(&KeptKv::Layer::k, ": k"), {&KeptKv::Layer::v, ": v"}}) {
      ExpectClose(AsFloats(actual.kv.layers[layer].*tensor, actual.kv.shape.dtype),
                  AsFloats(expected.kv.layers[layer].*tensor, expected.kv.shape.dtype), Tolerance(),
                  what + name);
    }
  }
}

// Bytes and blocks of the run are exactly those of the plan.
void ExpectPlanWasRun(const PrefillResult& result, const ModelShape& model, const std::string& what) {
  const Plan& plan = result.plan;
  int64_t blocks = 0;
  ASSERT_EQ(static_cast<int>(result.ranks.size()), plan.ranks());
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    EXPECT_EQ(result.ranks[rank].sent, RankCommBytes(model, plan, rank)) << what << " rank " << rank;
    blocks += result.ranks[rank].blocks;
  }
  // Each of the h meshes of n/h ranks computes (n/h)² blocks, but for those that no query sees; a rank's own
  // counts, though it may have no tokens.
  int64_t expected = 0;
  const int mesh_ranks = plan.ranks() / plan.heads;
  model.ForEachWindow([&](int64_t window, int layers) {
    const LayerReach reach(plan, window);
    for (int q = 0; q < mesh_ranks; ++q) {
      for (int kv = 0; kv < mesh_ranks; ++kv) {
        expected += reach.Sees(q, kv) || q == kv ? int64_t{layers} * plan.heads : 0;
      }
    }
  });
  EXPECT_EQ(blocks, expected) << what;
}

// The experts' tokens of all ranks, by layer. A rounding may send one elsewhere.
void ExpectSameExperts(const PrefillResult& actual, const PrefillResult& expected, const ModelShape& model,
                       const std::string& what) {
  const auto counts_of = [](const PrefillResult& result) {
    RankStats all;
    for (const RankStats& rank : result.ranks) all += rank;
    return all.tokens_per_expert;
  };
  const std::vector<int64_t> got = counts_of(actual), wanted = counts_of(expected);
  ASSERT_EQ(std::ssize(got), model.layers * model.experts.count) << what;
  ASSERT_EQ(got.size(), wanted.size());
  int64_t elsewhere = 0, layers = 0;
  for (int layer = 0; layer < model.layers; ++layer) {
    int64_t tokens = 0;
    for (int expert = 0; expert < model.experts.count; ++expert) {
      const size_t i = layer * model.experts.count + expert;
      tokens += got[i];
      elsewhere += std::abs(got[i] - wanted[i]);
    }
    if (tokens == 0) continue;
    EXPECT_EQ(tokens, actual.tokens() * model.experts.used) << what << " layer " << layer;
    ++layers;
  }
  EXPECT_LE(elsewhere, 2) << what;
  EXPECT_EQ(std::ssize(actual.expert_loads), layers) << what;
  EXPECT_GT(layers, 0) << what;
}

struct Spread {
  LayoutKind layout;
  int64_t stripe;
};
constexpr Spread kSpreads[] = {{LayoutKind::kStriped, 1},
                               {LayoutKind::kStriped, 16},
                               {LayoutKind::kStriped, 64},
                               {LayoutKind::kZigzag, 64},
                               {LayoutKind::kContiguous, 64}};
// On a GPU up to 8, which share it.
std::vector<int> RankCounts() {
  return TestsOnCuda() ? std::vector{1, 2, 3, 4, 6, 8} : std::vector{1, 2, 3, 4, 6, 7, 8, 9, 12, 16};
}

std::string Describe(const Plan& plan) {
  return plan.layout.DebugString() + " " + std::to_string(plan.heads) + " · " + plan.tile.DebugString();
}

TEST(IndependenceTest, EveryMeshLayoutAndStripeGivesOneRanksAnswer) {
  std::mt19937_64 random(11);
  const std::string folder = MakeTestModel("llama", SmallModel(ModelFamily::kLlama));
  const std::vector<uint32_t> prompt = RandomPrompt(TestsOnCuda() ? 300 : 1037, 300, random);
  const std::unique_ptr<PrefillEngine> one = LoadEngine(folder, 1);
  ASSERT_NE(one, nullptr);
  const auto expected = PrefillKeepingKv(*one, prompt);
  ASSERT_TRUE(expected.ok()) << expected.status();
  for (const int ranks : RankCounts()) {
    const std::unique_ptr<PrefillEngine> engine = LoadEngine(folder, ranks);
    ASSERT_NE(engine, nullptr);
    for (const Tile tile : TilesOf(ranks)) {
      for (const Spread& spread : kSpreads) {
        const auto actual = PrefillKeepingKv(
            *engine, prompt, {.tile = tile, .layout = spread.layout, .stripe = spread.stripe});
        ASSERT_TRUE(actual.ok()) << actual.status();
        EXPECT_EQ(actual->plan.tile, tile);
        ExpectSameAnswer(*actual, *expected, Describe(actual->plan));
        ExpectPlanWasRun(*actual, engine->model(), Describe(actual->plan));
      }
    }
  }
}

// Every h · a × b of 8 and 6 ranks: Ulysses (h = n), head × ring (a = 1), head × mesh; with KV heads as many
// as query heads, shared by some, and by all, so that they are split or replicated. Prompts down to one
// token.
TEST(IndependenceTest, EveryHeadGroupGivesOneRanksAnswer) {
  std::mt19937_64 random(17);
  struct Heads {
    int q, kv, ranks;
  };
  for (const Heads& heads : {Heads{8, 8, 8}, Heads{8, 2, 8}, Heads{8, 1, 8}, Heads{12, 2, 6}}) {
    MakeModelOptions options = SmallModel(ModelFamily::kMistral);
    options.q_heads = heads.q;
    options.kv_heads = heads.kv;
    const std::string folder =
        MakeTestModel(("heads_" + std::to_string(heads.q) + "_" + std::to_string(heads.kv)).c_str(), options);
    const std::unique_ptr<PrefillEngine> one = LoadEngine(folder, 1);
    const std::unique_ptr<PrefillEngine> engine = LoadEngine(folder, heads.ranks);
    ASSERT_TRUE(one != nullptr && engine != nullptr);
    for (const int64_t tokens : {1, 5, 203}) {
      const std::vector<uint32_t> prompt = RandomPrompt(tokens, 300, random);
      const auto expected = PrefillKeepingKv(*one, prompt);
      ASSERT_TRUE(expected.ok()) << expected.status();
      for (const int h : {2, 3, 4, 6, 8}) {
        if (heads.ranks % h != 0 || !engine->model().CanSplitHeads(h)) continue;
        for (const Tile tile : TilesOf(heads.ranks / h)) {
          for (const Spread& spread : kSpreads) {
            const auto actual = PrefillKeepingKv(
                *engine, prompt,
                {.tile = tile, .heads = h, .layout = spread.layout, .stripe = spread.stripe});
            ASSERT_TRUE(actual.ok()) << actual.status();
            ASSERT_EQ(actual->plan.heads, h);
            const std::string what = Describe(actual->plan) + ", " + std::to_string(heads.kv) + " KV heads";
            ExpectSameAnswer(*actual, *expected, what);
            ExpectPlanWasRun(*actual, engine->model(), what);
          }
        }
      }
    }
  }
}

// Any h that the model and the ranks allow.
int DrawHeads(const ModelShape& model, int ranks, std::mt19937_64& random) {
  std::vector<int> possible;
  for (int h = 1; h <= ranks; ++h) {
    if (ranks % h == 0 && model.CanSplitHeads(h)) possible.push_back(h);
  }
  return possible[random() % possible.size()];
}

TEST(IndependenceTest, RandomDrawsOfModelPromptAndSpread) {
  const uint64_t seed = std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  for (const ModelFamily family : {ModelFamily::kLlama, ModelFamily::kMistral, ModelFamily::kQwen2,
                                   ModelFamily::kQwen3, ModelFamily::kGemma3}) {
    MakeModelOptions model = SmallModel(family);
    if (family == ModelFamily::kGemma3) model.layers = 7;  // the sixth sees all keys
    const std::string folder =
        MakeTestModel(("family" + std::to_string(static_cast<int>(family))).c_str(), model);
    const std::unique_ptr<PrefillEngine> one = LoadEngine(folder, 1);
    ASSERT_NE(one, nullptr);
    for (int draw = 0; draw < 5; ++draw) {
      const int ranks = 2 + static_cast<int>(random() % (TestsOnCuda() ? 7 : 15));
      const std::unique_ptr<PrefillEngine> engine = LoadEngine(folder, ranks);
      ASSERT_NE(engine, nullptr);
      // Short prompts too, down to fewer tokens than ranks.
      const int64_t tokens = 1 + static_cast<int64_t>(random() % (draw % 2 == 0   ? 24
                                                                  : TestsOnCuda() ? 400
                                                                                  : 1500));
      const std::vector<uint32_t> prompt = RandomPrompt(tokens, 300, random);
      const int heads = DrawHeads(engine->model(), ranks, random);
      const std::vector<Tile> tiles = TilesOf(ranks / heads);
      const PrefillOptions options{.tile = tiles[random() % tiles.size()],
                                   .heads = heads,
                                   .layout = static_cast<LayoutKind>(random() % 3),
                                   .stripe = 1 + static_cast<int64_t>(random() % 100)};
      const auto expected = PrefillKeepingKv(*one, prompt);
      ASSERT_TRUE(expected.ok()) << expected.status();
      const auto actual = PrefillKeepingKv(*engine, prompt, options);
      ASSERT_TRUE(actual.ok()) << actual.status();
      const std::string what = Describe(actual->plan) + ", seed " + std::to_string(seed);
      ExpectSameAnswer(*actual, *expected, what);
      ExpectPlanWasRun(*actual, engine->model(), what);
    }
  }
}

// Fixed draws: with others, a rounding may decide, once in some hundred thousand tokens, which expert a token
// goes to.
TEST(IndependenceTest, Experts) {
  std::mt19937_64 random(7);
  for (const ModelFamily family : {ModelFamily::kQwen3Moe, ModelFamily::kMixtral, ModelFamily::kGlm4Moe,
                                   ModelFamily::kMiniMaxM2, ModelFamily::kGptOss}) {
    MakeModelOptions model = SmallModel(family);
    model.experts = 5;
    model.experts_used = TestsOnCuda() ? 5 : 3;  // in bf16 a rounding decides more often
    const std::string folder =
        MakeTestModel(("experts" + std::to_string(static_cast<int>(family))).c_str(), model);
    const std::unique_ptr<PrefillEngine> one = LoadEngine(folder, 1);
    ASSERT_NE(one, nullptr);
    for (const int64_t tokens : {3, TestsOnCuda() ? 200 : 700}) {
      const std::vector<uint32_t> prompt = RandomPrompt(tokens, 300, random);
      const auto expected = PrefillKeepingKv(*one, prompt);
      ASSERT_TRUE(expected.ok()) << expected.status();
      const std::unique_ptr<PrefillEngine> engine = LoadEngine(folder, 6);
      ASSERT_NE(engine, nullptr);
      for (const LayoutKind layout : {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous}) {
        const int heads = DrawHeads(engine->model(), 6, random);
        const std::vector<Tile> tiles = TilesOf(6 / heads);
        const PrefillOptions options{
            .tile = tiles[random() % tiles.size()], .heads = heads, .layout = layout, .stripe = 16};
        const auto actual = PrefillKeepingKv(*engine, prompt, options);
        ASSERT_TRUE(actual.ok()) << actual.status();
        const std::string what = Describe(actual->plan);
        ExpectSameAnswer(*actual, *expected, what);
        ExpectPlanWasRun(*actual, engine->model(), what);
        ExpectSameExperts(*actual, *expected, engine->model(), what);
      }
    }
  }
}

// A row's sink joins its softmax once, wherever the row is finished, and on the right heads. One expert, so
// that no rounding decides between two.
TEST(IndependenceTest, SinksJoinOnceUnderEveryPlan) {
  std::mt19937_64 random(19);
  MakeModelOptions model = SmallModel(ModelFamily::kGptOss);
  model.q_heads = 12;
  model.experts = model.experts_used = 1;
  const std::string folder = MakeTestModel("sinks", model);
  const std::unique_ptr<PrefillEngine> one = LoadEngine(folder, 1);
  ASSERT_NE(one, nullptr);
  for (const int64_t tokens : {1, 5, TestsOnCuda() ? 100 : 333}) {
    const std::vector<uint32_t> prompt = RandomPrompt(tokens, 300, random);
    const auto expected = PrefillKeepingKv(*one, prompt);
    ASSERT_TRUE(expected.ok()) << expected.status();
    for (const int ranks : {4, 6}) {
      const std::unique_ptr<PrefillEngine> engine = LoadEngine(folder, ranks);
      ASSERT_NE(engine, nullptr);
      for (int h = 1; h <= ranks; ++h) {
        if (ranks % h != 0 || !engine->model().CanSplitHeads(h)) continue;
        for (const Tile tile : TilesOf(ranks / h)) {
          for (const Spread& spread : kSpreads) {
            const auto actual = PrefillKeepingKv(
                *engine, prompt,
                {.tile = tile, .heads = h, .layout = spread.layout, .stripe = spread.stripe});
            ASSERT_TRUE(actual.ok()) << actual.status();
            ExpectSameAnswer(*actual, *expected, Describe(actual->plan));
          }
        }
      }
    }
  }
}

TEST(IndependenceTest, TheSameRequestGivesTheSameBits) {
  std::mt19937_64 random(5);
  const std::string folder = MakeTestModel("bits", SmallModel(ModelFamily::kQwen3));
  const std::vector<uint32_t> prompt = RandomPrompt(700, 300, random);
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const std::unique_ptr<PrefillEngine> engine = LoadEngine(folder, 8, dtype);
    ASSERT_NE(engine, nullptr);
    std::vector<std::pair<int, Tile>> shapes;
    for (const int heads : {1, 2, 4}) {
      for (const Tile tile : TilesOf(8 / heads)) shapes.emplace_back(heads, tile);
    }
    for (const auto& [heads, tile] : shapes) {
      const PrefillOptions options{.tile = tile, .heads = heads, .stripe = 16};
      const auto first = PrefillKeepingKv(*engine, prompt, options);
      const auto second = PrefillKeepingKv(*engine, prompt, options);
      ASSERT_TRUE(first.ok() && second.ok());
      EXPECT_EQ(
          0, std::memcmp(first->logits.data(), second->logits.data(), first->logits.size() * sizeof(float)));
      for (size_t layer = 0; layer < first->kv.layers.size(); ++layer) {
        EXPECT_EQ(first->kv.layers[layer].k, second->kv.layers[layer].k);
        EXPECT_EQ(first->kv.layers[layer].v, second->kv.layers[layer].v);
      }
    }
  }
}

}  // namespace
}  // namespace meshfill
