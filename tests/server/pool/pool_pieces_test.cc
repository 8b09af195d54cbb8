// Prompts in pieces in a pool of workers: the answer and the K and V of the whole prompt, the very bytes of
// an embedded pool that runs the same pieces, and nothing left of what was lost or cancelled on the way.
#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "engine/plan/plan_weights.h"
#include "server/queue/refusal.h"
#include "tests/engine/random_seed.h"
#include "tests/server/pool/pool_cache_fixture.h"

namespace meshfill {
namespace {

// Counts what is done of all pieces' layers, and how often that was begun anew.
class WatchLayers final : public PrefillObserver {
 public:
  void OnLayerDone(int layers_done, int layers) override {
    EXPECT_TRUE(layers_done != done_ || layers != of_) << "told twice";
    EXPECT_GT(layers_done, 0);
    if (layers_done * of_.load() <= done_.load() * layers) ++anew_;
    done_ = layers_done;
    of_ = layers;
  }
  void OnBegunAnew() override { ++told_anew_; }
  int anew() const { return anew_; }
  int told_anew() const { return told_anew_; }
  int done() const { return done_; }
  int of() const { return of_; }

 private:
  std::atomic<int> done_{0};
  std::atomic<int> of_{1};
  std::atomic<int> anew_{0};
  std::atomic<int> told_anew_{0};
};

class PoolPiecesTest : public PoolCacheTest {
 protected:
  // Workers whose memory takes `part` of what a prompt of `tokens` takes whole, beside the weights.
  void StartSmallPool(const std::vector<int>& ranks_of_workers, int64_t tokens, double part,
                      const PrefillOptions& options = {}) {
    StartPool(ranks_of_workers, weights_);
    const int ranks = engine_->ranks();
    const auto whole = engine_->MakePlan(tokens, options);
    ASSERT_TRUE(whole.ok()) << whole.status();
    ASSERT_TRUE(whole->pieces.empty());
    StopPool();
    const PlanWeights& weights = whole->weights;
    const auto activations = static_cast<double>(whole->plan.predicted.run_bytes - weights.run_bytes);
    const double of_rank = (activations * part + static_cast<double>(weights.run_bytes)) / ranks;
    const int most = *std::max_element(ranks_of_workers.begin(), ranks_of_workers.end());
    int64_t bytes = static_cast<int64_t>(of_rank * most);
    if (weights.mode == WeightMode::kSharded) {
      bytes += ShareBytes(weights, static_cast<int>(ranks_of_workers.size()));
    }
    of_workers_ = weights_;
    of_workers_.push_back(absl::StrCat("pool.worker.memory_bytes=", bytes, "B"));
    of_workers_.push_back("kv.memory_bytes=64MiB");
    StartPool(ranks_of_workers, of_workers_);
  }
  int64_t KeptBytes() {
    int64_t bytes = counts().bytes;
    for (const auto& worker : workers_) bytes += worker == nullptr ? 0 : worker->kv().bytes;
    return bytes;
  }
  // An embedded pool that runs the same pieces: one with as much memory as they take there. Null: none does.
  std::unique_ptr<PrefillEngine> EmbeddedWithPieces(const PlanChoice& choice, int64_t tokens,
                                                    const PrefillOptions& options) {
    EngineOptions embedded = {.model_path = Folder(),
                              .ranks = choice.plan.ranks(),
                              .dtype = DType::kF32,
                              .peak_flops = 1e12,
                              .threads = 1};
    embedded.kv_memory_bytes = embedded.kv_host_memory_bytes = 64 << 20;
    embedded.speed_profile_path = SpeedProfile();
    const auto lengths = [](const std::vector<Plan>& pieces) {
      std::vector<int64_t> tokens_of;
      for (const Plan& piece : pieces) tokens_of.push_back(piece.layout.tokens());
      return tokens_of;
    };
    int64_t too_little = 0, too_much = 2 * choice.plan.predicted.run_bytes;
    while (too_much - too_little > 1) {
      embedded.memory_budget_bytes = std::midpoint(too_little, too_much);
      auto engine = LoadEmbeddedEngine(embedded);
      EXPECT_TRUE(engine.ok()) << engine.status();
      if (!engine.ok()) return nullptr;
      const auto planned = (*engine)->MakePlan(tokens, options);
      if (planned.ok() && lengths(planned->pieces) == lengths(choice.pieces)) return *std::move(engine);
      const bool longer =
          planned.ok() && (planned->pieces.empty() || lengths(planned->pieces) > lengths(choice.pieces));
      (longer ? too_much : too_little) = embedded.memory_budget_bytes;
    }
    return nullptr;
  }

  std::vector<std::string> weights_;     // settings of the workers for them
  std::vector<std::string> of_workers_;  // all settings
};

// The queue hears of it before the prompt has begun, and lets it wait for an end, or says when to come again.
TEST_F(PoolPiecesTest, LeasesLeaveNoRoomForThePiecesKv) {
  std::mt19937_64 random(TestSeed());
  const auto prompt = RandomTokens(random, 2000);
  StartSmallPool({1}, std::ssize(prompt), 0.6);
  constexpr int64_t kLeased = 500;
  const auto plan = engine_->MakePlan(kLeased, {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::vector<std::unique_ptr<HeldKvLease>> leases;
  while (true) {
    const auto kept = std::make_shared<KvPrompt>(KvShapeOf(engine_->model()), kLeased);
    auto lease = engine_->kv_leases().Admit(kept, plan->plan, "t", absl::Hours(1));
    if (!lease.ok()) break;
    leases.push_back(*std::move(lease));
  }
  ASSERT_FALSE(leases.empty());
  const auto refused = engine_->Start({prompt, {}}, nullptr);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  const auto told = client_->Prefill(Header(/*keep=*/false), prompt);
  EXPECT_TRUE(absl::IsResourceExhausted(told.status())) << told.status();
  EXPECT_TRUE(RetryAfter(told.status()).has_value()) << told.status();
  leases.clear();
  const auto ran = RunPrefill(*engine_, {prompt, {}}, nullptr);
  EXPECT_TRUE(ran.ok()) << ran.status();
}

TEST_F(PoolPiecesTest, LogitsAreThoseOfTheWholePromptAndKvThatOfAnEmbeddedPoolInPieces) {
  std::mt19937_64 random(TestSeed());
  int to_the_byte = 0;
  for (const ModelFamily family : {ModelFamily::kQwen3, ModelFamily::kMistral}) {
    model_family = family;
    SetUp();
    for (const std::vector<int>& pool : std::vector<std::vector<int>>{{1}, {1, 1}, {2, 1}, {2, 2}}) {
      const int ranks = std::accumulate(pool.begin(), pool.end(), 0);
      const std::vector<Tile> tiles = TilesOf(ranks);
      const PrefillOptions options = {.tile = tiles[random() % tiles.size()]};
      const auto prompt = RandomTokens(random, Draw<int64_t>(random, 1500, 2200));
      const int64_t tokens = std::ssize(prompt);
      StartSmallPool(pool, tokens, 0.6, options);
      const auto choice = engine_->MakePlan(tokens, options);
      ASSERT_TRUE(choice.ok()) << choice.status();
      ASSERT_GT(choice->pieces.size(), 1u);

      WatchLayers layers;
      const auto ran = RunPrefill(*engine_, {prompt, options}, &layers);
      ASSERT_TRUE(ran.ok()) << ran.status();
      EXPECT_EQ(ran->pieces, std::ssize(choice->pieces));
      EXPECT_EQ(ran->piece_tokens, choice->pieces.front().layout.tokens());
      EXPECT_EQ(ran->tokens(), tokens);
      EXPECT_EQ(ran->cached_tokens, 0);
      EXPECT_EQ(layers.of(), ran->pieces * kLayers);
      EXPECT_EQ(layers.done(), layers.of());
      EXPECT_EQ(layers.anew(), 0);
      EXPECT_TRUE(Eventually([&] { return KeptBytes() == 0; }));

      v1::PrefillHeader header = Header(/*keep=*/true);
      header.mutable_kv()->set_ignore_cache(true);
      header.mutable_plan()->mutable_tile()->set_a(static_cast<uint32_t>(options.tile->a));
      header.mutable_plan()->mutable_tile()->set_b(static_cast<uint32_t>(options.tile->b));
      const std::string what =
          absl::StrCat(choice->plan.DebugString(), ", ", choice->pieces.size(), " pieces");
      EXPECT_EQ(PrefillAndCompare(*client_, prompt, header, what), 0);

      // What is kept under the lease takes of the memory, too: the pieces are shorter.
      PrefillOptions keeping = options;
      keeping.kv = std::make_shared<KvPrompt>(KvShapeOf(engine_->model()), tokens);
      const auto kept = engine_->MakePlan(tokens, keeping);
      ASSERT_TRUE(kept.ok()) << kept.status();
      const auto embedded = EmbeddedWithPieces(*kept, tokens, keeping);
      ASSERT_NE(embedded, nullptr) << what;
      const auto expected = PrefillKeepingKv(*embedded, prompt, options);
      ASSERT_TRUE(expected.ok()) << expected.status();
      EXPECT_EQ(expected->pieces, std::ssize(kept->pieces));
      const auto there = embedded->MakePlan(tokens, keeping);
      bool same = true;  // where the links' seconds differ, so may the order of blocks
      for (size_t i = 0; i < kept->pieces.size(); ++i) {
        same = same && there->pieces[i].schedule == kept->pieces[i].schedule;
      }
      EXPECT_TRUE(same || ranks > 1);
      const Fetched fetched = client_->Fetch(Request(leases_.back()));
      for (int layer = 0; layer < kLayers; ++layer) {
        const auto& [k, v] = expected->kv.layers[layer];
        if (!same) continue;
        ++to_the_byte;
        EXPECT_EQ(fetched.k.at(layer).compare(0, std::string::npos, reinterpret_cast<const char*>(k.data()),
                                              k.size()),
                  0)
            << what;
        EXPECT_EQ(fetched.v.at(layer).compare(0, std::string::npos, reinterpret_cast<const char*>(v.data()),
                                              v.size()),
                  0)
            << what;
      }
      ReleaseAll();
      EXPECT_TRUE(Eventually([&] { return counts().bytes == counts().cached_bytes; }));
      StopPool();
    }
  }
  model_family = ModelFamily::kQwen3;
  EXPECT_GE(to_the_byte, 2 * kLayers);
}

TEST_F(PoolPiecesTest, WorkersThatShareTheWeightsGatherTheLayersForEachPiece) {
  std::mt19937_64 random(TestSeed());
  weights_ = {"model.weights=sharded"};
  of_leader_.push_back("kv.cache=false");
  for (const std::vector<int>& pool : std::vector<std::vector<int>>{{1, 1}, {2, 1, 1}}) {
    const auto prompt = RandomTokens(random, Draw<int64_t>(random, 1500, 2000));
    StartSmallPool(pool, std::ssize(prompt), 0.5);
    const auto choice = engine_->MakePlan(std::ssize(prompt), {});
    ASSERT_TRUE(choice.ok()) << choice.status();
    ASSERT_GT(choice->pieces.size(), 1u);
    const PlanWeights& weights = choice->weights;
    const int64_t of_layers = weights.sent_bytes - weights.sent_head_bytes;
    for (size_t piece = 0; piece < choice->pieces.size(); ++piece) {
      const bool last = piece + 1 == choice->pieces.size();
      EXPECT_EQ(choice->pieces[piece].predicted.comm_bytes[Traffic::kGather],
                last ? weights.sent_bytes : of_layers);
    }
    for (const bool joined : {false, true}) {  // who joins takes no part in the pieces that go on
      WatchLayers layers;
      std::thread joining([&] {
        Eventually([&] { return layers.done() > kLayers; });
        if (joined) AddWorker(1, of_workers_);
      });
      const auto result = RunPrefill(*engine_, {prompt, {}}, &layers);
      joining.join();
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_GT(result->pieces, 1);
      EXPECT_EQ(result->attempts, 1);
      EXPECT_EQ(layers.anew(), 0);
      ExpectClose(result->logits, RunPrefill(*fresh_, {prompt, {}})->logits, kTolerance,
                  absl::StrCat(pool.size(), " workers, ", result->pieces, " pieces"));
      int64_t gathered = 0;
      for (const RankStats& rank : result->ranks) gathered += rank.sent[Traffic::kGather];
      // The LM head goes once, to the worker that reads it, from those that have a panel of it: packed, 320
      // rows for 300.
      const int64_t of_head = gathered - result->pieces * of_layers * std::ssize(pool);
      EXPECT_GE(of_head, 0);
      EXPECT_LE(300 * of_head, 320 * weights.sent_head_bytes * std::ssize(pool));
      EXPECT_TRUE(Eventually([&] { return KeptBytes() == 0; })) << KeptBytes();
    }
    StopPool();
  }
}

// Of all workers and pieces together; a rounding may send a token elsewhere.
TEST_F(PoolPiecesTest, ExpertsCountTheTokensOfAllPieces) {
  std::mt19937_64 random(TestSeed());
  model_family = ModelFamily::kQwen3Moe;
  SetUp();
  for (const std::vector<int>& pool : std::vector<std::vector<int>>{{1, 1}, {2, 1}}) {
    const auto prompt = RandomTokens(random, Draw<int64_t>(random, 1500, 2000));
    const auto whole = RunPrefill(*fresh_, {prompt, {}});
    ASSERT_TRUE(whole.ok()) << whole.status();
    ASSERT_EQ(std::ssize(whole->expert_loads), kLayers);
    for (const double part : {1.5, 0.5}) {
      StartSmallPool(pool, std::ssize(prompt), part);
      const auto result = RunPrefill(*engine_, {prompt, {}});
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->pieces > 1, part < 1);
      ASSERT_EQ(std::ssize(result->expert_loads), kLayers);
      for (int layer = 0; layer < kLayers; ++layer) {
        EXPECT_EQ(result->expert_loads[layer].layer, layer);
        EXPECT_NEAR(result->expert_loads[layer].imbalance, whole->expert_loads[layer].imbalance, 0.01);
        EXPECT_EQ(result->expert_loads[layer].idle, whole->expert_loads[layer].idle);
      }
      StopPool();
    }
  }
  model_family = ModelFamily::kQwen3;
}

TEST_F(PoolPiecesTest, PiecesFollowACachedPrefixAndAreOneForOthers) {
  std::mt19937_64 random(TestSeed());
  for (const std::vector<int>& pool : std::vector<std::vector<int>>{{1, 1}, {2, 1}}) {
    StartSmallPool(pool, 2000, 0.6);
    std::vector<uint32_t> prompt = RandomTokens(random, Draw<int64_t>(random, 500, 700));
    EXPECT_EQ(PrefillAndCompare(*client_, prompt, Header(), "first"), 0);
    const int64_t round = engine_->ranks() * 64;
    for (const bool keep : {false, true}) {
      const int64_t before = std::ssize(prompt);
      prompt = Joined(prompt, before, RandomTokens(random, 1800));
      v1::PrefillHeader header = Header(keep);
      const KvStore::Counts earlier = counts();
      const int64_t cached = PrefillAndCompare(*client_, prompt, header, keep ? "kept" : "behind");
      EXPECT_GT(cached, before - 2 * round);
      EXPECT_LE(cached, before);
      EXPECT_EQ(counts().hit_tokens, earlier.hit_tokens + cached) << "what pieces leave each other is no hit";
      EXPECT_EQ(counts().miss_tokens, earlier.miss_tokens + std::ssize(prompt) - cached);
    }
    // What the pieces left is one prefix.
    const int64_t before = std::ssize(prompt);
    prompt = Joined(prompt, before, RandomTokens(random, 100));
    EXPECT_GT(PrefillAndCompare(*client_, prompt, Header(true), "behind pieces"), before - 2 * round);
    ReleaseAll();
    EXPECT_EQ(counts().bytes, counts().cached_bytes);
    StopPool();
  }
}

TEST_F(PoolPiecesTest, AWorkerThatIsLostBetweenPiecesLeavesNothingBehind) {
  std::mt19937_64 random(TestSeed());
  of_leader_.push_back("kv.cache=false");
  StartSmallPool({1, 1}, 3000, 0.5);
  for (int round = 0; round < 3; ++round) {
    const auto prompt = RandomTokens(random, 3000);
    const int after = Draw(random, 1, 2 * kLayers);
    WatchLayers layers;
    std::thread killer([&] {
      Eventually([&] { return layers.done() >= after; });
      workers_.back().reset();
      AddWorker(1, of_workers_);
    });
    const auto result = RunPrefill(*engine_, {prompt, {}}, &layers);
    killer.join();
    ASSERT_TRUE(result.ok()) << result.status();
    ExpectClose(result->logits, RunPrefill(*fresh_, {prompt, {}})->logits, kTolerance,
                absl::StrCat("lost after ", after, " layers, ", result->attempts, " attempts"));
    EXPECT_GT(result->pieces, 1);
    EXPECT_LE(layers.anew(), layers.told_anew());
    EXPECT_LT(layers.told_anew(), result->attempts);
    EXPECT_EQ(layers.done(), layers.of());
    ASSERT_TRUE(Eventually([&] { return engine_->ranks() == 2; }));
    EXPECT_TRUE(Eventually([&] { return KeptBytes() == 0; })) << KeptBytes();
  }
}

TEST_F(PoolPiecesTest, WhoCancelsBetweenPiecesLeavesNothingBehind) {
  std::mt19937_64 random(TestSeed());
  of_leader_.push_back("kv.cache=false");
  StartSmallPool({1, 1}, 3000, 0.5);
  for (int round = 0; round < 3; ++round) {
    const auto prompt = RandomTokens(random, 3000);
    const int after = Draw(random, 1, 2 * kLayers);
    WatchLayers layers;
    auto run = engine_->Start({prompt, {}}, &layers);
    ASSERT_TRUE(run.ok()) << run.status();
    std::thread canceller([&] {
      Eventually([&] { return layers.done() >= after; });
      (*run)->Stop();
    });
    const auto result = (*run)->Wait();
    canceller.join();
    EXPECT_TRUE(result.ok() || absl::IsCancelled(result.status())) << result.status();
    run->reset();
    EXPECT_TRUE(Eventually([&] { return KeptBytes() == 0; })) << KeptBytes();
  }
}

}  // namespace
}  // namespace meshfill
