#include "engine/run/rank_runner.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "engine/comm/in_process.h"
#include "engine/kv/kv_prompt.h"
#include "engine/model/family.h"
#include "engine/model/make_model.h"
#include "engine/plan/planner.h"
#include "gtest/gtest.h"
#include "tests/engine/run/watched_stream.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

constexpr int64_t kTokens = 300;
constexpr int kHeadDim = 16;

// A model of two layers, and one rank that computes the prompt or its end.
class RunRankTest : public testing::Test {
 protected:
  void SetUp() override {
    for (size_t i = 0; i < prompt_.size(); ++i) prompt_[i] = static_cast<uint32_t>(i * i % 40);
    LoadModel(ModelFamily::kLlama, /*layers=*/2);
  }

  void LoadModel(ModelFamily family, int layers, int head_dim = kHeadDim) {
    const std::string path = folder_ / FamilyOf(family).name;
    ASSERT_TRUE(MakeModel({.family = family,
                           .layers = layers,
                           .hidden = 32,
                           .intermediate = 96,
                           .q_heads = 4,
                           .kv_heads = 2,
                           .head_dim = head_dim,
                           .vocab = 40,
                           .dtype = DType::kF32},
                          path)
                    .ok());
    auto model = Model::Load(path, DType::kF32, [&](const ModelShape&) { return device_.get(); });
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
  }

  Plan PlanFor(const PlanRequest& request, int64_t slice_tokens = 32) const {
    return MakePlan(model_->shape(), {.slice_tokens = slice_tokens}, request).value().plan;
  }

  // The prompt's last tokens, as many as the plan has.
  absl::StatusOr<RankOutput> Run(const Plan& plan, WatchedStream& stream, const KvSlabs* prefix = nullptr,
                                 KvSink* kv = nullptr, int64_t tokens_ahead = 0) {
    return RunIds(plan, std::span<const uint32_t>(prompt_).last(plan.layout.tokens()), stream, prefix, kv,
                  tokens_ahead);
  }

  absl::StatusOr<RankOutput> RunIds(const Plan& plan, std::span<const uint32_t> ids, WatchedStream& stream,
                                    const KvSlabs* prefix = nullptr, KvSink* kv = nullptr,
                                    int64_t tokens_ahead = 0) {
    const RankPrompt prompt = {
        .plan = plan, .ids = ids, .kv = kv, .prefix = prefix, .tokens_ahead = tokens_ahead};
    return RunPrompts({&prompt, 1}, stream);
  }

  absl::StatusOr<RankOutput> RunPrompts(std::span<const RankPrompt> prompts, WatchedStream& stream) {
    Stream* const only = &stream;
    const auto communicators = MakeInProcessCommunicators({&only, 1});
    const bool with_head = prompts.front().tokens_ahead == 0;
    const std::unique_ptr<WeightFeed> weights = model_->OpenFeed(1, with_head, nullptr);
    return RunRank({.prompts = prompts,
                    .model = *model_,
                    .weights = *weights,
                    .reader = 0,
                    .rank = 0,
                    .stream = stream,
                    .communicator = *communicators.front(),
                    .wait_timeout = absl::Seconds(10),
                    .on_layer_done = [](int) {}});
  }

  // What the plan states and the run did not have. RoPE tables are in the rank's own memory, where a device
  // reads the host's.
  int64_t SpareBytes(const Plan& plan, const WatchedStream& stream) const {
    const int64_t rope_tables = plan.layout.tokens() * model_->shape().rotated_dim() * 4;
    return plan.predicted.peak_bytes - stream.memory.peak_bytes() - rope_tables;
  }

  // The whole prompt's K and V.
  KvSlabs Keep(KvPrompt& kept) {
    const Plan plan = PlanFor({.tokens = kTokens});
    kept.Begin(plan.layout);
    WatchedStream stream(DType::kF32);
    EXPECT_TRUE(Run(plan, stream, nullptr, &kept).ok());
    return *kept.Layer(1);
  }

  const TempFolder folder_;
  const std::unique_ptr<Device> device_ = MakeReferenceDevice(DType::kF32);
  std::shared_ptr<const Model> model_;
  std::vector<uint32_t> prompt_ = std::vector<uint32_t>(kTokens);
};

// The slices are the plan's, whatever device gave it its figure, and the memory is what the plan states for
// them.
TEST_F(RunRankTest, TakesTheSlicesAndTheMemoryOfItsPlan) {
  std::vector<float> logits;
  for (const int64_t slice_tokens : {1024, 100, 7, 1}) {
    const Plan plan = PlanFor({.tokens = kTokens}, slice_tokens);
    EXPECT_EQ(plan.slice_tokens, slice_tokens);
    WatchedStream stream(DType::kF32);
    const auto output = Run(plan, stream);
    ASSERT_TRUE(output.ok()) << output.status();
    EXPECT_EQ(stream.most_product_tokens, std::min<int64_t>(slice_tokens, kTokens));
    EXPECT_EQ(SpareBytes(plan, stream), 0);
    EXPECT_EQ(output->probe_seconds, 0) << "no link was probed";
    if (logits.empty()) logits = output->logits;
    EXPECT_EQ(output->logits, logits);  // the reference's: a product's rows do not know of each other
  }
}

// The residual stream of such a prompt fits, and the tables beside it do not.
TEST_F(RunRankTest, SaysThatThereIsNoMemoryForRotaryTables) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "not run: a sanitizer takes more address space than a limit leaves";
#endif
  LoadModel(ModelFamily::kQwen3, /*layers=*/1, /*head_dim=*/256);
  const Plan plan = PlanFor({.tokens = 100'000});
  const std::vector<uint32_t> ids(100'000, 7);
  WatchedStream stream(DType::kF32);
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  rlimit tight = before;
  tight.rlim_cur = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE) + (64 << 20));
  ASSERT_EQ(setrlimit(RLIMIT_AS, &tight), 0);
  const absl::Status status = RunIds(plan, ids, stream).status();
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_NE(status.message().find("102400000 bytes of its rotary tables"), std::string::npos) << status;
}

// The sum of the plans' bytes is what a pass may take. Most of it is taken: they attend one after the other.
TEST_F(RunRankTest, PromptsThatShareAPassTakeTheMemoryOfTheirPlans) {
  std::vector<Plan> plans;
  for (const int64_t tokens : {1, 30, 200, 7}) plans.push_back(PlanFor({.tokens = tokens}));
  std::vector<RankPrompt> prompts;
  int64_t bytes = 0;
  for (const Plan& plan : plans) {
    prompts.push_back({.plan = plan, .ids = std::span<const uint32_t>(prompt_).first(plan.layout.tokens())});
    bytes += SpareBytes(plan, WatchedStream(DType::kF32));
  }
  WatchedStream stream(DType::kF32);
  const auto output = RunPrompts(prompts, stream);
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_LE(stream.memory.peak_bytes(), bytes);
  EXPECT_GE(static_cast<double>(stream.memory.peak_bytes()), 0.7 * static_cast<double>(bytes));
}

// A part of a prompt would wait for its peers.
TEST_F(RunRankTest, RefusesPartsOfPromptsInOnePass) {
  const Plan whole = PlanFor({.tokens = 10}), part = PlanFor({.tokens = 20, .ranks = 2});
  const std::span<const uint32_t> ids(prompt_);
  WatchedStream stream(DType::kF32);
  const RankPrompt parts[] = {
      {.plan = whole, .ids = ids.first(10)},
      {.plan = part, .ids = ids.first(static_cast<size_t>(part.layout.ChunkTokens(0)))}};
  EXPECT_TRUE(absl::IsInternal(RunPrompts(parts, stream).status()));
  const RankPrompt pieces[] = {{.plan = whole, .ids = ids.first(10)},
                               {.plan = whole, .ids = ids.first(10), .tokens_ahead = 5}};
  EXPECT_TRUE(absl::IsInternal(RunPrompts(pieces, stream).status()));
}

TEST_F(RunRankTest, RefusesAnotherNumberOfTokensThanItsChunkHas) {
  const Plan plan = PlanFor({.tokens = kTokens});
  for (const int64_t tokens : {int64_t{0}, kTokens - 1}) {
    WatchedStream stream(DType::kF32);
    const auto output = RunIds(plan, std::span<const uint32_t>(prompt_).first(tokens), stream);
    EXPECT_TRUE(absl::IsInternal(output.status())) << output.status();
  }
}

TEST_F(RunRankTest, TheRankOfTheLastTokenReadsTheHead) {
  constexpr int kRanks = 4;
  for (const int64_t tokens : {1, 64, 65, 300}) {
    const Plan plan = PlanFor({.tokens = tokens, .ranks = kRanks});
    for (int rank = 0; rank < kRanks; ++rank) {
      const int64_t own = plan.layout.ChunkTokens(rank);
      const bool has_last = own > 0 && plan.layout.TokenAt(rank, own - 1) == tokens - 1;
      EXPECT_EQ(ReadsHead(plan, rank), has_last) << rank << " of " << tokens;
      EXPECT_FALSE(ReadsHead(plan, rank, /*wants_logits=*/false));
    }
  }
}

// One rank that computes the whole prompt, keeps K and V, and computes its end again behind them: in the
// memory of its plan, with the same logits.
TEST_F(RunRankTest, ContinuesBehindAPrefix) {
  KvPrompt prompt(KvShapeOf(model_->shape()), kTokens);
  const KvSlabs kept = Keep(prompt);
  WatchedStream whole_stream(DType::kF32);
  const auto whole = Run(PlanFor({.tokens = kTokens}), whole_stream);
  ASSERT_TRUE(whole.ok()) << whole.status();
  const auto behind = [&](int64_t cached) {
    return PlanFor({.tokens = kTokens - cached, .cached_tokens = cached});
  };
  for (const int64_t cached : {64, 128, 192}) {
    const KvSlabs prefix = FirstTokens(kept, cached);
    WatchedStream stream(DType::kF32);
    const auto end = Run(behind(cached), stream, &prefix);
    ASSERT_TRUE(end.ok()) << end.status();
    EXPECT_EQ(SpareBytes(behind(cached), stream), 0) << cached;
    for (int token = 0; token < 40; ++token) {
      EXPECT_NEAR(end->logits[token], whole->logits[token], 1e-4) << cached;
    }
  }
  WatchedStream stream(DType::kF32);
  const KvSlabs prefix = FirstTokens(kept, 128);
  EXPECT_TRUE(Run(behind(128), stream, &prefix, nullptr, /*tokens_ahead=*/1)->logits.empty());
  EXPECT_TRUE(absl::IsInternal(Run(behind(64), stream, &prefix).status()));  // other tokens
  EXPECT_TRUE(absl::IsInternal(Run(behind(64), stream).status()));
  const KvSlabs odd = FirstTokens(kept, 100);
  EXPECT_TRUE(absl::IsInternal(Run(behind(100), stream, &odd).status()));  // no whole stripes
}

// Adds 1 for each token to the experts whose score, with its correction, only few others exceed.
void CountBest(const RouteArgs& args, int64_t* tokens_per_expert) {
  const RouterRule& rule = args.rule;
  ASSERT_EQ(rule.groups, 1);
  for (int64_t token = 0; token < args.tokens; ++token) {
    std::vector<double> values(args.logits + token * rule.experts, args.logits + (token + 1) * rule.experts);
    for (int expert = 0; expert < rule.experts; ++expert) {
      double& value = values[expert];
      if (rule.score == RouterScore::kSigmoid) value = 1 / (1 + std::exp(-value));
      if (args.correction != nullptr) value += args.correction[expert];
    }
    for (const double& value : values) {
      const auto better =
          std::count_if(values.begin(), values.end(), [&](double other) { return other > value; });
      tokens_per_expert[&value - values.data()] += better < rule.used ? 1 : 0;
    }
  }
}

// Of each layer with experts and of all slices, by a count of its own; the counters are in the plan's memory.
TEST_F(RunRankTest, CountsTheTokensOfEachExpert) {
  for (const auto [family, dense_layers] :
       {std::pair(ModelFamily::kQwen3Moe, 0), {ModelFamily::kGlm4Moe, 1}}) {
    constexpr int kLayers = 3, kExperts = 8;
    LoadModel(family, kLayers);
    ASSERT_EQ(model_->shape().experts.count, kExperts);
    const Plan plan = PlanFor({.tokens = kTokens}, /*slice_tokens=*/70);
    constexpr int kSlices = 5;
    std::vector<int64_t> expected(kLayers * kExperts);
    int routed = 0;
    WatchedStream stream(DType::kF32);
    stream.before_route = [&, dense_layers = dense_layers](const RouteArgs& args) {
      CountBest(args, expected.data() + (dense_layers + routed++ / kSlices) * kExperts);
    };
    const auto output = Run(plan, stream);
    ASSERT_TRUE(output.ok()) << output.status();
    EXPECT_EQ(routed, (kLayers - dense_layers) * kSlices);
    EXPECT_EQ(output->stats.tokens_per_expert, expected);
    EXPECT_EQ(std::accumulate(expected.begin(), expected.end(), int64_t{0}),
              (kLayers - dense_layers) * kTokens * model_->shape().experts.used);
    EXPECT_EQ(SpareBytes(plan, stream), 0);
  }
}

// Compares what it is given with the end of what another run kept.
class ComparingSink : public KvSink {
 public:
  ComparingSink(const KvSlabs& expected, int64_t tokens)
      : expected_(expected),
        range_{.first_token = kTokens - tokens, .tokens = tokens, .heads = expected.shape.kv_heads},
        slab_(expected.shape.LayerBytes(tokens)) {}

  void Begin(const TokenLayout&, std::shared_ptr<const KvSlabs>) override {}
  absl::StatusOr<std::unique_ptr<KvKeeping>> Keep(int, int layer, const BufferRef& kv,
                                                  Stream& stream) override {
    EXPECT_EQ(layer, layers_);
    std::memset(slab_.data(), 0xff, slab_.size());
    auto copies =
        StartSlabCopy({.model = expected_.shape, .tokens = range_.tokens}, kv, slab_.data(), stream);
    if (!copies.ok()) return copies.status();
    return std::make_unique<Copying>(*this, *std::move(copies));
  }
  int layers() const { return layers_; }

 private:
  class Copying : public KvKeeping {
   public:
    Copying(ComparingSink& sink, HostCopies copies) : sink_(sink), copies_(std::move(copies)) {}
    absl::Status Finish() override {
      for (const auto& copy : copies_) EXPECT_TRUE(copy->Wait().ok());
      sink_.Compare();
      return absl::OkStatus();
    }

   private:
    ComparingSink& sink_;
    const HostCopies copies_;
  };

  void Compare() {
    std::vector<float> kept(slab_.size() / 4), expected(kept.size());
    std::memcpy(kept.data(), slab_.data(), slab_.size());
    auto* const to = reinterpret_cast<std::byte*>(expected.data());
    ASSERT_TRUE(CopyKv(expected_, layers_++, range_, KvFormat::kTokens, 0, to).ok());
    for (size_t i = 0; i < kept.size(); ++i) ASSERT_NEAR(kept[i], expected[i], 1e-4) << i;
  }

  const KvSlabs& expected_;
  const KvRange range_;
  std::vector<std::byte> slab_;
  int layers_ = 0;
};

// K and V that leave for the host beside compute are all there when the sink hears of them, a layer at a
// time, and the plan counts the chunk that they leave.
TEST_F(RunRankTest, KeepsKvThatIsCopiedBesideCompute) {
  KvPrompt prompt(KvShapeOf(model_->shape()), kTokens);
  const KvSlabs kept = Keep(prompt);
  for (const int64_t cached : {0, 64, 192}) {
    const Plan plan =
        PlanFor({.tokens = kTokens - cached, .cached_tokens = cached, .keeps_kv = true, .kv_on_host = true});
    const KvSlabs prefix = FirstTokens(kept, cached);
    ComparingSink sink(kept, kTokens - cached);
    WatchedStream stream(DType::kF32);
    stream.copies_late = true;
    const auto output = Run(plan, stream, cached == 0 ? nullptr : &prefix, &sink);
    ASSERT_TRUE(output.ok()) << output.status();
    EXPECT_EQ(sink.layers(), 2);
    EXPECT_EQ(SpareBytes(plan, stream), 0) << cached;
  }
}

// Each prompt's, where several share the pass, behind prefixes of their own.
TEST_F(RunRankTest, KeepsKvOfAllPromptsThatShareAPass) {
  KvPrompt prompt(KvShapeOf(model_->shape()), kTokens);
  const KvSlabs kept = Keep(prompt);
  const std::vector<int64_t> cached = {0, 192, 64};
  std::vector<Plan> plans;
  std::vector<KvSlabs> prefixes;
  std::vector<std::unique_ptr<ComparingSink>> sinks;
  for (const int64_t tokens : cached) {
    plans.push_back(
        PlanFor({.tokens = kTokens - tokens, .cached_tokens = tokens, .keeps_kv = true, .kv_on_host = true}));
    prefixes.push_back(FirstTokens(kept, tokens));
    sinks.push_back(std::make_unique<ComparingSink>(kept, kTokens - tokens));
  }
  std::vector<RankPrompt> prompts;
  for (size_t i = 0; i < cached.size(); ++i) {
    prompts.push_back({.plan = plans[i],
                       .ids = std::span<const uint32_t>(prompt_).subspan(static_cast<size_t>(cached[i])),
                       .kv = sinks[i].get(),
                       .prefix = cached[i] == 0 ? nullptr : &prefixes[i]});
  }
  WatchedStream stream(DType::kF32);
  stream.copies_late = true;
  const auto output = RunPrompts(prompts, stream);
  ASSERT_TRUE(output.ok()) << output.status();
  for (const auto& sink : sinks) EXPECT_EQ(sink->layers(), 2);
}

}  // namespace
}  // namespace meshfill
