// A prompt that begins like earlier ones computes only what is new, and gets the answer of one that computes
// all: behind prefixes of any origin, on any mesh, whatever was evicted; and so does one in pieces.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "engine/embedded_engine.h"
#include "engine/kv/block_hash.h"
#include "engine/model/family.h"
#include "engine/model/make_model.h"
#include "tests/engine/close.h"
#include "tests/engine/devices/far_platform.h"
#include "tests/engine/kept_kv.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/test_device.h"

namespace meshfill {
namespace {

constexpr int kBlockTokens = 4;
constexpr int64_t kStripe = 8;
constexpr int64_t kVocab = 300;
constexpr int64_t kOriginalContext = 1000;  // of the Phi-3: longer prompts have longrope's long factors

// Also on a device that keeps what was used last in memory of its own.
class CachedPrefixTest : public testing::Test {
 protected:
  static void SetUpTestSuite() { RegisterFarPlatform(); }
};
const char kFar[] = "far";

// Relative to the largest logit, or element. A row of attention is summed in another order behind a prefix.
double Tolerance(DType dtype) { return dtype == DType::kF32 && !TestsOnCuda() ? 1e-4 : 4e-2; }

const std::string& ModelFolder(ModelFamily family) {
  static std::map<ModelFamily, std::string> folders;
  std::string& folder = folders[family];
  if (!folder.empty()) return folder;
  folder = testing::TempDir() + "/cached_prefix_" + std::to_string(static_cast<int>(family));
  std::filesystem::remove_all(folder);
  const int experts = family == ModelFamily::kGptOss ? 1 : 0;  // no rounding decides between two
  const absl::Status status =
      MakeModel({.family = family,
                 .layers = 2,
                 .hidden = 64,
                 .intermediate = 96,
                 .q_heads = 4,
                 .kv_heads = 2,
                 .head_dim = 16,
                 .vocab = kVocab,
                 .context_tokens = 4096,
                 .original_context_tokens = FamilyOf(family).long_rope ? kOriginalContext : 0,
                 .sliding_window = FamilyOf(family).has_window ? 100 : 0,
                 .experts = experts,
                 .experts_used = experts,
                 .rope_theta = 10000,
                 .dtype = DType::kF32,
                 .seed = 7},
                folder);
  EXPECT_TRUE(status.ok()) << status;
  return folder;
}

std::vector<ModelFamily> TestedFamilies() {
  std::vector<ModelFamily> families = {ModelFamily::kLlama, ModelFamily::kMistral, ModelFamily::kPhi3};
  if (!TestsOnCuda()) {  // a GPU does not compute these
    families.insert(families.end(), {ModelFamily::kGemma3, ModelFamily::kGptOss});
  }
  return families;
}

EngineOptions OptionsOf(ModelFamily family, int ranks, DType dtype = DType::kF32) {
  return {.model_path = ModelFolder(family),
          .ranks = ranks,
          .device = TestDevice(),
          .dtype = TestsOnCuda() ? DType::kBf16 : dtype,
          .stripe = kStripe,
          .peak_flops = 1e12,
          .kv_memory_bytes = 64 << 20,
          .kv_host_memory_bytes = 64 << 20,
          .kv_cache = true};
}

std::unique_ptr<PrefillEngine> Load(EngineOptions options) {
  options.speed = PoolSpeed();  // a busy machine may measure that a prefix gains nothing
  auto engine = LoadEmbeddedEngine(options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return *std::move(engine);
}

std::vector<uint32_t> RandomTokens(int64_t count, std::mt19937_64& random) {
  std::vector<uint32_t> tokens(count);
  for (uint32_t& token : tokens) token = Draw<uint32_t>(random, 0, kVocab - 1);
  return tokens;
}

std::vector<uint32_t> Joined(std::vector<uint32_t> first, int64_t kept, const std::vector<uint32_t>& second) {
  first.resize(static_cast<size_t>(kept));
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// With the cache on.
PrefillOptions Cached(std::span<const uint32_t> tokens, PrefillOptions options = {},
                      const std::string& tenant = "", const std::string& salt = "", bool long_rope = false) {
  BlockHasher hasher(kBlockTokens, salt);
  hasher.Append(tokens);
  options.block_names = std::make_shared<const KvBlockNames>(KvBlockNames{
      .tenant = tenant, .block_tokens = kBlockTokens, .hashes = hasher.hashes(), .long_rope = long_rope});
  return options;
}

void ExpectSameKv(const KeptKv& actual, const KeptKv& expected, double tolerance, const std::string& what) {
  for (size_t layer = 0; layer < expected.layers.size(); ++layer) {
    const DType dtype = expected.shape.dtype;
    ExpectClose(AsFloats(actual.layers[layer].k, dtype), AsFloats(expected.layers[layer].k, dtype), tolerance,
                what + ": k");
    ExpectClose(AsFloats(actual.layers[layer].v, dtype), AsFloats(expected.layers[layer].v, dtype), tolerance,
                what + ": v");
  }
}

std::vector<PrefillOptions> ShapesOf(int ranks) {
  std::vector<PrefillOptions> shapes = {{}};
  for (int heads : {1, 2, 4}) {
    if (ranks % heads != 0) continue;
    for (const Tile tile : TilesOf(ranks / heads)) shapes.push_back({.tile = tile, .heads = heads});
  }
  return shapes;
}

std::string NameOf(const PrefillOptions& options) {
  if (!options.tile.has_value()) return "auto";
  return options.tile->DebugString() + " of " + std::to_string(*options.heads) + " head groups";
}

void TestEveryShape(const std::string& device, const std::vector<DType>& dtypes) {
  std::mt19937_64 random(TestSeed());
  for (const DType dtype : dtypes) {
    for (const ModelFamily family : TestedFamilies()) {
      for (const int ranks : {1, 2, 4, 6, 9}) {
        // The second RoPE table of one, and the factors of the other, are those of any number of ranks.
        if ((family == ModelFamily::kGemma3 || family == ModelFamily::kPhi3) && ranks > 2) continue;
        EngineOptions options = OptionsOf(family, ranks, dtype);
        options.device = device;
        const auto engine = Load(options);
        const std::vector<uint32_t> earlier = RandomTokens(470, random);
        ASSERT_TRUE(RunPrefill(*engine, {earlier, Cached(earlier)}).ok());
        const int64_t round = ranks * kStripe;
        for (const PrefillOptions& shape : ShapesOf(ranks)) {
          const int64_t kept = Draw<int64_t>(random, round, 470);
          // A token that is new at the block's begin, so that no more than `kept` can be in common.
          const auto prompt = Joined(earlier, kept, RandomTokens(Draw<int64_t>(random, 1, 100), random));
          const std::string what = std::string(DTypeName(dtype)) + " " + std::to_string(ranks) + " ranks " +
                                   NameOf(shape) + ", " + std::to_string(kept) + " of " +
                                   std::to_string(prompt.size());
          const auto cold = PrefillKeepingKv(*engine, prompt, shape);
          ASSERT_TRUE(cold.ok()) << cold.status();
          EXPECT_EQ(cold->cached_tokens, 0);
          const auto cached = PrefillKeepingKv(*engine, prompt, Cached(prompt, shape));
          ASSERT_TRUE(cached.ok()) << cached.status();
          const auto tokens = std::ssize(prompt);
          EXPECT_GE(cached->cached_tokens, std::min(kept, tokens - kStripe) / round * round) << what;
          EXPECT_EQ(cached->cached_tokens % round, 0);
          EXPECT_EQ(cached->tokens(), tokens);
          ExpectClose(cached->logits, cold->logits, Tolerance(dtype), what);
          ExpectSameKv(cached->kv, cold->kv, Tolerance(dtype), what);
          const auto again = RunPrefill(*engine, {prompt, Cached(prompt, shape)});
          ASSERT_TRUE(again.ok()) << again.status();
          EXPECT_GE(again->cached_tokens, cached->cached_tokens);
          ExpectClose(again->logits, cold->logits, Tolerance(dtype), what + ", again");
        }
      }
    }
  }
}

TEST_F(CachedPrefixTest, EveryShapeContinuesBehindAPrefix) {
  TestEveryShape(TestDevice(), {DType::kF32, DType::kBf16});
}

TEST_F(CachedPrefixTest, EveryShapeContinuesBehindAPrefixThatIsOnTheDevice) {
  TestEveryShape(kFar, {DType::kF32});
}

TEST_F(CachedPrefixTest, TenantsSaltsAndWhoIgnoresTheCacheHaveNoneOfOthers) {
  std::mt19937_64 random(TestSeed());
  const auto engine = Load(OptionsOf(ModelFamily::kLlama, 2));
  const std::vector<uint32_t> prompt = RandomTokens(100, random);
  const auto cached = [&](const std::string& tenant, const std::string& salt, bool ignore = false,
                          PrefillOptions options = {}) {
    options.ignore_cache = ignore;
    const auto result = RunPrefill(*engine, {prompt, Cached(prompt, options, tenant, salt)});
    EXPECT_TRUE(result.ok()) << result.status();
    return result->cached_tokens;
  };
  EXPECT_EQ(cached("a", ""), 0);
  EXPECT_EQ(cached("a", ""), 80);
  EXPECT_EQ(cached("b", ""), 0);
  EXPECT_EQ(cached("a", "salt"), 0);
  EXPECT_EQ(cached("a", "salt"), 80);
  EXPECT_EQ(cached("a", "", true), 0);
  EXPECT_EQ(cached("a", "", false, {.layout = LayoutKind::kZigzag}), 0);  // its chunks cannot follow
  const KvStore::Counts counts = engine->kv_store()->counts();
  EXPECT_EQ(counts.hit_tokens, 2 * 80u);
  EXPECT_EQ(counts.miss_tokens, 4 * 100u + 2 * 20u);
}

// Its client has what it wants, or wants it no more: what the run leaves serves others.
TEST_F(CachedPrefixTest, ALeaseThatEndsWhileItsRunComputesLeavesAPrefix) {
  class Releasing final : public PrefillObserver {
   public:
    Releasing(KvStore& store, std::string lease) : store_(store), lease_(std::move(lease)) {}
    void OnLayerDone(int, int) override { store_.Release(lease_, ""); }

   private:
    KvStore& store_;
    const std::string lease_;
  };
  std::mt19937_64 random(TestSeed());
  const auto engine = Load(OptionsOf(ModelFamily::kLlama, 2));
  KvStore& store = *engine->kv_store();
  const std::vector<uint32_t> prompt = RandomTokens(100, random);
  {
    const auto kv = std::make_shared<KvPrompt>(KvShapeOf(engine->model()), std::ssize(prompt));
    const auto lease = store.Admit(kv, "", absl::Hours(1));
    ASSERT_TRUE(lease.ok()) << lease.status();
    Releasing releasing(store, (*lease)->id());
    const auto result = RunPrefill(*engine, {prompt, Cached(prompt, {.kv = kv})}, &releasing);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(store.counts().leases, 0);
  }
  EXPECT_EQ(store.counts().bytes, store.counts().cached_bytes);
  const auto behind = RunPrefill(*engine, {prompt, Cached(prompt)});
  ASSERT_TRUE(behind.ok()) << behind.status();
  EXPECT_EQ(behind->cached_tokens, 80);
}

// Prompts that grow, branch, are kept or not, of tenants, salts, layouts and stripes, on all ranks or on
// sub-meshes, in a store too small for all: beside an engine that keeps nothing.
void TestHistory(const std::string& device) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  EngineOptions options = OptionsOf(ModelFamily::kMistral, 4);
  options.device = device;
  const auto fresh = Load(options);
  const bool far = device != "cpu";
  const int64_t token_bytes = 2 * 2 * 2 * 16 * (TestsOnCuda() ? 2 : 4);
  options.kv_host_memory_bytes = 1200 * token_bytes;
  options.kv_memory_bytes = (far ? 400 : 1200) * token_bytes;
  const auto engine = Load(options);
  KvStore& store = *engine->kv_store();
  std::vector<std::vector<uint32_t>> prompts = {RandomTokens(200, random)};
  std::vector<std::string> leases;
  int64_t hits = 0;
  for (int step = 0; step < 120; ++step) {
    const auto& other = prompts[Draw<size_t>(random, 0, prompts.size() - 1)];
    const auto prompt = Joined(other, Draw<int64_t>(random, 0, std::ssize(other)),
                               RandomTokens(Draw<int64_t>(random, 1, 150), random));
    PrefillOptions asked;
    if (Draw<int>(random, 0, 3) == 0) asked.stripe = 16;
    if (Draw<int>(random, 0, 5) == 0) asked.layout = static_cast<LayoutKind>(Draw<int>(random, 0, 2));
    asked.submeshes = 1 << std::max(0, Draw<int>(random, -2, 2));
    const std::string tenant = Draw<int>(random, 0, 4) == 0 ? "other" : "";
    const std::string salt = Draw<int>(random, 0, 4) == 0 ? "salt" : "";
    asked = Cached(prompt, asked, tenant, salt);
    asked.ignore_cache = Draw<int>(random, 0, 9) == 0;
    std::unique_ptr<KvLease> lease;
    const bool keep = Draw<int>(random, 0, 2) == 0;
    if (keep) {
      asked.kv = std::make_shared<KvPrompt>(KvShapeOf(engine->model()), std::ssize(prompt));
      auto admitted = store.Admit(asked.kv, tenant, absl::Hours(1));
      if (!admitted.ok()) {
        ASSERT_TRUE(absl::IsResourceExhausted(admitted.status())) << admitted.status();
        for (const std::string& id : leases) store.Release(id, "");
        leases.clear();
        continue;
      }
      lease = *std::move(admitted);
    }
    const auto expected = RunPrefill(*fresh, {prompt, {}});
    const auto actual = RunPrefill(*engine, {prompt, asked});
    ASSERT_TRUE(actual.ok()) << actual.status() << " seed " << seed;
    ExpectClose(actual->logits, expected->logits, Tolerance(DType::kF32),
                "step " + std::to_string(step) + " seed " + std::to_string(seed));
    EXPECT_TRUE(!asked.ignore_cache || actual->cached_tokens == 0);
    hits += actual->cached_tokens > 0;
    if (lease != nullptr) {
      ASSERT_TRUE(lease->Keep().ok());
      if (tenant.empty()) leases.push_back(lease->id());
      if (!tenant.empty()) store.Release(lease->id(), tenant);
    }
    ASSERT_LE(store.counts().bytes, store.budget_bytes());
    ASSERT_LE(store.counts().device_bytes, far ? *options.kv_memory_bytes : 0);
    prompts.push_back(prompt);
    if (prompts.size() > 8) prompts.erase(prompts.begin() + Draw<int>(random, 0, 7));
  }
  EXPECT_GT(hits, 15);
  EXPECT_GT(store.counts().evictions, 10u);
  EXPECT_EQ(store.counts().device_bytes > 0, far);
  for (const std::string& id : leases) store.Release(id, "");
  // Whoever needs all of it gets all of it.
  auto all = std::make_shared<KvPrompt>(KvShapeOf(engine->model()), 1200);
  auto lease = store.Admit(all, "", absl::Hours(1));
  ASSERT_TRUE(lease.ok()) << lease.status();
  store.MakeRoom();
  EXPECT_EQ(store.counts().cached_bytes, 0);
  EXPECT_EQ(store.counts().bytes, store.budget_bytes());
  lease->reset();
  all.reset();
  EXPECT_EQ(store.counts().bytes, 0);
  EXPECT_EQ(store.counts().device_bytes, 0);
}

TEST_F(CachedPrefixTest, NoHistoryGivesAWrongLogit) { TestHistory(TestDevice()); }

// The device has room for a third of what is kept.
TEST_F(CachedPrefixTest, NoHistoryGivesAWrongLogitOnADeviceWithMemoryOfItsOwn) { TestHistory(kFar); }

TEST_F(CachedPrefixTest, CachesNothingWhereTheConfigSaysSo) {
  std::mt19937_64 random(TestSeed());
  for (const bool no_memory : {false, true}) {
    EngineOptions options = OptionsOf(ModelFamily::kLlama, 1);
    if (no_memory) options.kv_memory_bytes = options.kv_host_memory_bytes = 0;
    options.kv_cache = no_memory;
    const auto engine = Load(options);
    const std::vector<uint32_t> prompt = RandomTokens(100, random);
    for (int time = 0; time < 2; ++time) {
      const auto result = RunPrefill(*engine, {prompt, Cached(prompt)});
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->cached_tokens, 0);
    }
    EXPECT_EQ(engine->kv_store()->counts().bytes, 0);
  }
}

class CountLayers final : public PrefillObserver {
 public:
  void OnLayerDone(int layers_done, int layers) override {
    EXPECT_EQ(layers_done, ++done);
    of = layers;
  }
  int done = 0;
  int of = 0;
};

void TestPieces(ModelFamily family, int ranks, const std::string& device, DType dtype = DType::kF32) {
  const int64_t tokens = FamilyOf(family).long_rope ? 2 * kOriginalContext : 1000;
  std::mt19937_64 random(TestSeed());
  EngineOptions options = OptionsOf(family, ranks, dtype);
  options.device = device;
  const auto whole = Load(options);
  const std::vector<uint32_t> prompt = RandomTokens(tokens, random);
  const auto needed = whole->MakePlan(tokens, {})->plan.predicted.run_bytes;
  options.memory_budget_bytes = needed * 6 / 10;
  const auto engine = Load(options);
  for (const PrefillOptions& shape : ShapesOf(ranks)) {
    const auto plan = engine->MakePlan(tokens, shape);
    ASSERT_TRUE(plan.ok()) << plan.status() << " " << NameOf(shape);
    EXPECT_GT(plan->pieces.size(), 1u);
    EXPECT_LE(plan->plan.predicted.run_bytes, needed * 6 / 10);
    CountLayers layers;
    const auto actual = RunPrefill(*engine, {prompt, shape}, &layers);
    ASSERT_TRUE(actual.ok()) << actual.status() << " " << NameOf(shape);
    EXPECT_EQ(actual->pieces, std::ssize(plan->pieces));
    EXPECT_EQ(actual->piece_tokens % (ranks * kStripe), 0);
    EXPECT_EQ(actual->tokens(), tokens);
    EXPECT_EQ(actual->cached_tokens, 0);
    EXPECT_EQ(layers.done, actual->pieces * 2);
    EXPECT_EQ(layers.of, actual->pieces * 2);
    EXPECT_EQ(engine->kv_store()->counts().bytes, 0);
    const auto expected = RunPrefill(*whole, {prompt, shape});
    ExpectClose(actual->logits, expected->logits, Tolerance(dtype), NameOf(shape));
    if (ranks == 1) {
      EXPECT_NEAR(actual->mfu * actual->prefill_seconds, expected->mfu * expected->prefill_seconds,
                  1e-6 * expected->mfu * expected->prefill_seconds);
    }
  }
  // Kept, cached and continued like any other.
  const bool long_rope = FamilyOf(family).long_rope;
  const auto kept = PrefillKeepingKv(*engine, prompt, Cached(prompt, {}, "", "", long_rope));
  ASSERT_TRUE(kept.ok()) << kept.status();
  const auto expected = PrefillKeepingKv(*whole, prompt);
  ExpectSameKv(kept->kv, expected->kv, Tolerance(dtype), "kept");
  const auto longer = Joined(prompt, tokens, RandomTokens(300, random));
  const auto behind = RunPrefill(*engine, {longer, Cached(longer, {}, "", "", long_rope)});
  ASSERT_TRUE(behind.ok()) << behind.status();
  EXPECT_GT(behind->cached_tokens, tokens - 100);
  ExpectClose(behind->logits, RunPrefill(*whole, {longer, {}})->logits, Tolerance(dtype), "behind");
}

TEST_F(CachedPrefixTest, APromptThatDoesNotFitRunsInPieces) {
  for (const ModelFamily family :
       {ModelFamily::kLlama, ModelFamily::kMistral}) {  // without and with a window
    for (const int ranks : {1, 2, 4, 6, 9}) {
      for (const DType dtype : {DType::kF32, DType::kBf16}) TestPieces(family, ranks, TestDevice(), dtype);
    }
  }
  for (const ModelFamily family : TestedFamilies()) {
    if (family != ModelFamily::kLlama && family != ModelFamily::kMistral) TestPieces(family, 4, TestDevice());
  }
  TestPieces(ModelFamily::kMistral, 4, kFar);
}

// What begins alike shares K and V only where longrope has the same factors for both.
TEST_F(CachedPrefixTest, LongAndShortPromptsOfLongRopeShareNothing) {
  std::mt19937_64 random(TestSeed());
  for (const int ranks : {1, 4}) {
    const auto engine = Load(OptionsOf(ModelFamily::kPhi3, ranks));
    ASSERT_EQ(engine->model().long_rope_after, kOriginalContext);
    std::vector<uint32_t> tokens = RandomTokens(1600, random);
    const struct {
      int64_t tokens, least_cached, most_cached;
    } prompts[] = {{990, 0, 0},                   // short
                   {kOriginalContext + 1, 0, 0},  // the first long one
                   {kOriginalContext, 900, 990},  // behind the first
                   {1600, 900, kOriginalContext + 1},
                   {1300, 1200, 1300}};
    for (const auto& [count, least_cached, most_cached] : prompts) {
      const std::vector<uint32_t> prompt(tokens.begin(), tokens.begin() + count);
      const bool long_rope = count > kOriginalContext;
      const auto cold = PrefillKeepingKv(*engine, prompt);
      ASSERT_TRUE(cold.ok()) << cold.status();
      const auto cached = PrefillKeepingKv(*engine, prompt, Cached(prompt, {}, "", "", long_rope));
      ASSERT_TRUE(cached.ok()) << cached.status();
      EXPECT_GE(cached->cached_tokens, least_cached) << count;
      EXPECT_LE(cached->cached_tokens, most_cached) << count;
      ExpectClose(cached->logits, cold->logits, Tolerance(DType::kF32), std::to_string(count));
      ExpectSameKv(cached->kv, cold->kv, Tolerance(DType::kF32), std::to_string(count));
      const auto mistaken = RunPrefill(*engine, {prompt, Cached(prompt, {}, "", "", !long_rope)});
      EXPECT_TRUE(absl::IsInternal(mistaken.status())) << mistaken.status();
    }
  }
}

TEST_F(CachedPrefixTest, PiecesThatNobodyHasRoomForAreRefused) {
  std::mt19937_64 random(TestSeed());
  EngineOptions options = OptionsOf(ModelFamily::kLlama, 2);
  const auto needed = Load(options)->MakePlan(3000, {})->plan.predicted.run_bytes;
  options.memory_budget_bytes = needed * 6 / 10;
  constexpr int64_t kTokenBytes = 2 * 2 * 2 * 16 * 4;
  options.kv_memory_bytes = options.kv_host_memory_bytes = 2999 * kTokenBytes;
  EXPECT_TRUE(absl::IsFailedPrecondition(Load(options)->MakePlan(3000, {}).status()));
  options.kv_memory_bytes = options.kv_host_memory_bytes = 3500 * kTokenBytes;
  const auto engine = Load(options);
  const std::vector<uint32_t> prompt = RandomTokens(3000, random);
  {
    auto lease = engine->kv_store()->Admit(std::make_shared<KvPrompt>(KvShapeOf(engine->model()), 501), "",
                                           absl::Hours(1));
    ASSERT_TRUE(lease.ok()) << lease.status();
    EXPECT_TRUE(absl::IsResourceExhausted(RunPrefill(*engine, {prompt, {}}).status()));
  }
  EXPECT_TRUE(RunPrefill(*engine, {prompt, {}}).ok());
  options.memory_budget_bytes = needed / 1000;
  EXPECT_TRUE(absl::IsFailedPrecondition(Load(options)->MakePlan(3000, {}).status()));
  EXPECT_TRUE(RunPrefill(*engine, {std::span(prompt).first(100), {}}).ok());
}

}  // namespace
}  // namespace meshfill
