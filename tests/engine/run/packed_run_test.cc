// Prompts that share a pass: each has the logits, and the K and V, of a run of its own, to the bit, whatever
// is beside it, on devices whose products allow that.
#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/comm/in_process.h"
#include "engine/kv/kv_prompt.h"
#include "engine/model/make_model.h"
#include "engine/plan/planner.h"
#include "engine/run/rank_runner.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/reference/reference_device.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

constexpr int kVocab = 97;
constexpr int64_t kStripe = 4;

struct Prompt {
  std::vector<uint32_t> ids;  // cached ones first
  Plan plan;
  std::shared_ptr<KvPrompt> before = nullptr;  // has the cached tokens
  KvSlabs prefix = {};
};

// A model on a device, whose one rank computes here.
class OneRank {
 public:
  OneRank(std::unique_ptr<Device> device, const MakeModelOptions& options)
      : device_(std::move(device)), stream_(device_->NewStream(nullptr).value()) {
    EXPECT_TRUE(MakeModel(options, folder_ / "model").ok());
    auto model =
        Model::Load(folder_ / "model", device_->dtype(), [&](const ModelShape&) { return device_.get(); });
    EXPECT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
  }

  const ModelShape& shape() const { return model_->shape(); }
  Device& device() const { return *device_; }

  Prompt Draw(std::mt19937_64& random) const {
    const bool behind = meshfill::Draw(random, 0, 2) == 0;
    const int64_t cached_tokens = behind ? kStripe * meshfill::Draw(random, 1, 9) : 0;
    const int64_t tokens = meshfill::Draw<int64_t>(random, behind ? kStripe : 1, 70);
    Prompt prompt = {.ids = {}, .plan = PlanOf(tokens, cached_tokens)};
    for (int64_t i = 0; i < cached_tokens + tokens; ++i) {
      prompt.ids.push_back(meshfill::Draw<uint32_t>(random, 0, kVocab - 1));
    }
    if (cached_tokens == 0) return prompt;
    const Prompt before = {.ids = {prompt.ids.begin(), prompt.ids.begin() + cached_tokens},
                           .plan = PlanOf(cached_tokens, 0)};
    prompt.before = std::make_shared<KvPrompt>(KvShapeOf(shape()), cached_tokens);
    EXPECT_TRUE(Run({&before, 1}, {prompt.before.get()}).ok());
    prompt.prefix = FirstTokens(*prompt.before->Layer(shape().layers - 1), cached_tokens);
    return prompt;
  }

  absl::StatusOr<RankOutput> Run(std::span<const Prompt> prompts, const std::vector<KvPrompt*>& kv) const {
    std::vector<RankPrompt> parts;
    for (size_t i = 0; i < prompts.size(); ++i) {
      const Prompt& prompt = prompts[i];
      if (kv[i] != nullptr) kv[i]->Begin(prompt.plan.layout);
      parts.push_back({.plan = prompt.plan,
                       .ids = std::span(prompt.ids).subspan(static_cast<size_t>(prompt.plan.cached_tokens)),
                       .kv = kv[i],
                       .prefix = prompt.before == nullptr ? nullptr : &prompt.prefix});
    }
    const std::unique_ptr<WeightFeed> weights = model_->OpenFeed(1, true, nullptr);
    auto communicators = MakeInProcessCommunicators(1);
    return RunRank({.prompts = parts,
                    .model = *model_,
                    .weights = *weights,
                    .reader = 0,
                    .rank = 0,
                    .stream = *stream_,
                    .communicator = *communicators.front(),
                    .wait_timeout = absl::Seconds(60),
                    .on_layer_done = [](int) {}});
  }

 private:
  Plan PlanOf(int64_t tokens, int64_t cached_tokens) const {
    auto choice = MakePlan(shape(), {.slice_tokens = device_->grain().slice_tokens},
                           {.tokens = tokens, .cached_tokens = cached_tokens, .ranks = 1, .stripe = kStripe});
    EXPECT_TRUE(choice.ok()) << choice.status();
    return choice->plan;
  }

  const TempFolder folder_;
  const std::unique_ptr<Device> device_;
  const std::unique_ptr<Stream> stream_;
  std::unique_ptr<Model> model_;
};

std::vector<std::byte> KvOf(const KvPrompt& kept) {
  std::vector<std::byte> all;
  for (int layer = 0; layer < kept.shape().layers; ++layer) {
    const std::shared_ptr<const KvSlabs> slabs = kept.Layer(layer);
    EXPECT_NE(slabs, nullptr);
    if (slabs == nullptr) return {};
    std::vector<std::byte> of_layer(kept.shape().LayerBytes(kept.tokens()));
    EXPECT_TRUE(CopyKv(*slabs, layer,
                       {.first_token = 0, .tokens = kept.tokens(), .heads = kept.shape().kv_heads},
                       KvFormat::kTokens, 0, of_layer.data())
                    .ok());
    all.insert(all.end(), of_layer.begin(), of_layer.end());
  }
  return all;
}

// Of any lengths, some behind prefixes, some with K and V kept, in slices of any length.
void ExpectBitsOfLoneRuns(const OneRank& rank, std::mt19937_64& random, int draws) {
  for (int draw = 0; draw < draws; ++draw) {
    std::vector<Prompt> prompts;
    const int count = Draw(random, 2, 7);
    for (int i = 0; i < count; ++i) prompts.push_back(rank.Draw(random));
    std::deque<KvPrompt> alone, together;
    std::vector<KvPrompt*> none(1, nullptr), kept;
    std::vector<float> expected;
    for (const Prompt& prompt : prompts) {
      KvPrompt* lone = nullptr;
      KvPrompt* packed = nullptr;
      if (Draw(random, 0, 1) == 1 && prompt.before == nullptr) {
        lone = &alone.emplace_back(KvShapeOf(rank.shape()), prompt.plan.layout.tokens());
        packed = &together.emplace_back(KvShapeOf(rank.shape()), prompt.plan.layout.tokens());
      }
      const auto output = rank.Run({&prompt, 1}, {lone});
      ASSERT_TRUE(output.ok()) << output.status();
      expected.insert(expected.end(), output->logits.begin(), output->logits.end());
      kept.push_back(packed);
    }
    const auto output = rank.Run(prompts, kept);
    ASSERT_TRUE(output.ok()) << output.status();
    ASSERT_EQ(expected.size(), prompts.size() * kVocab);
    EXPECT_EQ(output->logits, expected) << "draw " << draw;
    for (size_t i = 0; i < alone.size(); ++i) EXPECT_EQ(KvOf(together[i]), KvOf(alone[i])) << i;
    if (testing::Test::HasFailure()) return;
  }
}

MakeModelOptions OptionsOf(ModelFamily family) {
  return {.family = family,
          .layers = 3,
          .hidden = 32,
          .intermediate = 64,
          .q_heads = 4,
          .kv_heads = 2,
          .head_dim = 8,
          .vocab = kVocab,
          .dtype = DType::kF32};
}

TEST(PackedRunTest, EachPromptHasTheBitsOfALoneRun) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (const ModelFamily family : {ModelFamily::kLlama, ModelFamily::kQwen3, ModelFamily::kMixtral,
                                   ModelFamily::kGlm4Moe, ModelFamily::kGemma3, ModelFamily::kGptOss}) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", family " << static_cast<int>(family));
    const OneRank reference(MakeReferenceDevice(DType::kF32, {.slice_tokens = Draw(random, 16, 200)}),
                            OptionsOf(family));
    ExpectBitsOfLoneRuns(reference, random, 3);
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      const OneRank rank(MakeCpuDevice(dtype, 2), OptionsOf(family));
      if (rank.device().rows_are_independent()) ExpectBitsOfLoneRuns(rank, random, 3);
    }
  }
}

// Of widths that the products of real models have, in bf16: strips, several tiles, experts' own products.
TEST(PackedRunTest, WideModelsToo) {
  const uint64_t seed = TestSeed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (const ModelFamily family : {ModelFamily::kQwen3, ModelFamily::kQwen3Moe}) {
    MakeModelOptions options = OptionsOf(family);
    options.layers = 1;
    options.hidden = 448;
    options.intermediate = 1216;
    options.q_heads = 7;
    options.kv_heads = 1;
    options.head_dim = 64;
    const OneRank rank(MakeCpuDevice(DType::kBf16, 2), options);
    if (rank.device().rows_are_independent()) ExpectBitsOfLoneRuns(rank, random, 4);
  }
}

TEST(PackedRunTest, RefusesAPromptThatIsNotWhole) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  const OneRank rank(MakeReferenceDevice(DType::kF32), OptionsOf(ModelFamily::kLlama));
  std::vector<Prompt> prompts = {rank.Draw(random), rank.Draw(random)};
  prompts[1].ids.pop_back();
  const auto output = rank.Run(prompts, {nullptr, nullptr});
  EXPECT_EQ(output.status().code(), absl::StatusCode::kInternal) << output.status();
  EXPECT_NE(output.status().message().find("token ids for a chunk of"), std::string::npos);
}

}  // namespace
}  // namespace meshfill
