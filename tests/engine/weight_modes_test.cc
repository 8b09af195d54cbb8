// Weights that stream: in pieces, behind a cached prefix, paused and beside each other they give the bits of
// weights that stay. Their plans say what they take. (For every family and on every device:
// streamed_bits_test.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "absl/strings/str_cat.h"
#include "engine/embedded_engine.h"
#include "engine/embedded_pool.h"
#include "engine/model/family.h"
#include "engine/model/make_model.h"
#include "engine/prefill_engine.h"
#include "engine/weight_choice.h"
#include "tests/engine/devices/far_platform.h"
#include "tests/engine/kept_kv.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/stop_after_a_layer.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

using testing::HasSubstr;
using testing::MatchesRegex;

std::unique_ptr<PrefillEngine> Load(const std::string& folder, int ranks, std::optional<WeightMode> weights,
                                    int64_t memory_bytes = 0, int64_t kv_memory_bytes = 1 << 26) {
  auto engine = LoadEmbeddedEngine({.model_path = folder,
                                    .ranks = ranks,
                                    .device = "cpu",
                                    .weights = weights,
                                    .stripe = 16,
                                    .peak_flops = 1e12,
                                    .memory_budget_bytes = memory_bytes,
                                    .kv_memory_bytes = kv_memory_bytes,
                                    .threads = 2,
                                    .speed = PoolSpeed()});  // alike: the same plans
  EXPECT_TRUE(engine.ok()) << engine.status();
  return engine.ok() ? *std::move(engine) : nullptr;
}

std::vector<uint32_t> RandomPrompt(int64_t tokens, int64_t vocab, std::mt19937_64& random) {
  std::vector<uint32_t> prompt(static_cast<size_t>(tokens));
  for (uint32_t& id : prompt) id = static_cast<uint32_t>(random() % vocab);
  return prompt;
}

void ExpectSameBits(const KeptPrefill& actual, const KeptPrefill& expected) {
  EXPECT_EQ(actual.logits, expected.logits);
  ASSERT_EQ(actual.kv.layers.size(), expected.kv.layers.size());
  for (size_t layer = 0; layer < expected.kv.layers.size(); ++layer) {
    EXPECT_EQ(actual.kv.layers[layer].k, expected.kv.layers[layer].k) << layer;
    EXPECT_EQ(actual.kv.layers[layer].v, expected.kv.layers[layer].v) << layer;
  }
}

class StreamedEngineTest : public testing::Test {
 protected:
  static constexpr int64_t kVocab = 700;
  static constexpr int kLayers = 5;

  void SetUp() override {
    ASSERT_TRUE(MakeModel({.layers = kLayers,
                           .hidden = 64,
                           .intermediate = 160,
                           .q_heads = 4,
                           .kv_heads = 2,
                           .head_dim = 16,
                           .vocab = kVocab,
                           .context_tokens = 8192},
                          path_)
                    .ok());
  }

  const TempFolder folder_;
  const std::string path_ = folder_ / "model";
  std::mt19937_64 random_{TestSeed()};
};

// Two layers for a run, nothing beside it; resident ones beside all runs.
TEST_F(StreamedEngineTest, PlansCountTheirBytesAndSeconds) {
  const auto resident = Load(path_, 2, WeightMode::kResident, 1 << 28)->MakePlan(2000, {});
  const auto streamed = Load(path_, 2, WeightMode::kStreamed, 1 << 28)->MakePlan(2000, {});
  ASSERT_TRUE(resident.ok() && streamed.ok());
  const Prediction &stays = resident->plan.predicted, &passes = streamed->plan.predicted;
  const int64_t layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 160;
  EXPECT_EQ(resident->weights.mode, WeightMode::kResident);
  EXPECT_EQ(streamed->weights.mode, WeightMode::kStreamed);
  const int64_t element = stays.weight_bytes / (kLayers * layer + kVocab * 64);  // f32 without AVX-512
  EXPECT_TRUE(element == 2 || element == 4);
  EXPECT_EQ(stays.weight_bytes, element * (kLayers * layer + kVocab * 64));
  EXPECT_EQ(stays.weight_seconds, 0);
  EXPECT_EQ(stays.peak_bytes, stays.run_bytes + stays.weight_bytes);
  EXPECT_EQ(passes.weight_bytes, element * 2 * layer);
  EXPECT_EQ(passes.run_bytes, stays.run_bytes + passes.weight_bytes);
  EXPECT_EQ(passes.peak_bytes, passes.run_bytes);
  EXPECT_GT(passes.weight_seconds, 0);
  EXPECT_NEAR(passes.seconds, passes.compute_seconds + passes.comm_wait_seconds + passes.weight_seconds,
              1e-9 * passes.seconds);
}

// What FP8 is widened into is of each run and rank, whether the weights stay or stream.
TEST_F(StreamedEngineTest, PlansCountWhatFp8IsWidenedInto) {
  constexpr int64_t kLayer = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256;
  const TempFolder folder;
  const auto plan_of = [&](DType dtype, WeightMode mode, int submeshes = 1) {
    const std::string path = folder / DTypeName(dtype);
    const absl::Status made = MakeModel({.layers = 2,
                                         .hidden = 128,
                                         .intermediate = 256,
                                         .q_heads = 4,
                                         .kv_heads = 2,
                                         .head_dim = 32,
                                         .vocab = 500,
                                         .dtype = dtype},
                                        path);
    EXPECT_TRUE(made.ok() || absl::IsAlreadyExists(made)) << made;
    return Load(path, 2, mode)->MakePlan(1000, {.submeshes = submeshes})->weights;
  };
  const PlanWeights wide = plan_of(DType::kBf16, WeightMode::kResident);
  const int64_t element = wide.loaded_bytes / (2 * kLayer) < 4 ? 2 : 4;  // f32 without AVX-512
  const PlanWeights narrow = plan_of(DType::kF8E4M3, WeightMode::kResident);
  EXPECT_EQ(wide.run_bytes, 0);
  EXPECT_EQ(narrow.run_bytes, 2 * element * kLayer);
  EXPECT_LT(narrow.loaded_bytes, wide.loaded_bytes);
  const PlanWeights of_one_rank = plan_of(DType::kF8E4M3, WeightMode::kResident, /*submeshes=*/2);
  EXPECT_EQ(of_one_rank.run_bytes, narrow.run_bytes / 2);
  EXPECT_EQ(of_one_rank.loaded_bytes, narrow.loaded_bytes) << "there is one copy";
  const PlanWeights streamed = plan_of(DType::kF8E4M3, WeightMode::kStreamed);
  const int64_t scales = (2 * 128 + 128 + 2 * 256) * 4 + 128 * 2 * 4;  // f32, one of each row and 128 columns
  EXPECT_EQ(streamed.run_bytes, 2 * kLayer + 2 * scales + narrow.run_bytes);
}

// Sub-meshes would read the layers once each.
TEST_F(StreamedEngineTest, PoolsWithStreamedWeightsHaveNoSubmeshes) {
  EXPECT_EQ(Load(path_, 2, WeightMode::kResident)->Submeshes(1000, {}).size(), 1u);
  EXPECT_TRUE(Load(path_, 2, WeightMode::kStreamed)->Submeshes(1000, {}).empty());
}

// Workers share FP8 and MXFP4 as they lie: a plan counts those bytes, and what they are widened into.
TEST_F(StreamedEngineTest, SharedWeightsStayNarrow) {
  const TempFolder folder;
  const auto plan_of = [&](ModelFamily family, DType dtype, WeightMode mode) {
    const std::string path = folder / (std::string(FamilyOf(family).name) + DTypeName(dtype));
    const absl::Status made = MakeModel({.family = family, .dtype = dtype}, path);
    EXPECT_TRUE(made.ok() || absl::IsAlreadyExists(made)) << made;
    const auto pool = LoadEmbeddedPool({.model_path = path,
                                        .ranks = 1,
                                        .device = "cpu",
                                        .weights = mode,
                                        .of_worker = true,
                                        .peak_flops = 1e12});
    EXPECT_TRUE(pool.ok()) << pool.status();
    return pool.ok() ? pool->capacity.weights : PlanWeights();
  };
  for (const auto& [family, narrow] :
       {std::pair(ModelFamily::kLlama, DType::kF8E4M3), std::pair(ModelFamily::kGptOss, DType::kF4E2M1)}) {
    const PlanWeights shared = plan_of(family, narrow, WeightMode::kSharded);
    EXPECT_EQ(shared.mode, WeightMode::kSharded);
    EXPECT_EQ(shared.loaded_bytes, plan_of(family, narrow, WeightMode::kResident).loaded_bytes);
    EXPECT_EQ(shared.run_bytes, plan_of(family, narrow, WeightMode::kStreamed).run_bytes);
    EXPECT_GT(shared.layer_seconds, 0);
    const PlanWeights wide = plan_of(family, DType::kBf16, WeightMode::kSharded);
    EXPECT_LT(shared.layer_bytes, wide.layer_bytes * 6 / 10);
    EXPECT_EQ(shared.head_bytes, wide.head_bytes);
  }
}

// The ranks of a process have one copy together: there is nobody to share it with.
TEST_F(StreamedEngineTest, AnEmbeddedPoolSharesNoWeights) {
  const auto engine = LoadEmbeddedEngine({.model_path = path_,
                                          .ranks = 2,
                                          .device = "cpu",
                                          .weights = WeightMode::kSharded,
                                          .peak_flops = 1e12});
  EXPECT_TRUE(absl::IsInvalidArgument(engine.status())) << engine.status();
  EXPECT_NE(engine.status().message().find("set resident, streamed or auto"), std::string::npos);
}

// Devices with memory of their own keep a half of the weights each, and copy the other's. (On GPUs:
// cuda_engine_test.)
TEST_F(StreamedEngineTest, DevicesThatAreApartShareTheWeights) {
  RegisterFarPlatform();
  EngineOptions options = {.model_path = path_,
                           .ranks = 3,
                           .device = "far_pair",
                           .weights = WeightMode::kResident,
                           .stripe = 16,
                           .peak_flops = 1e12,
                           .kv_host_memory_bytes = 1 << 26,
                           .threads = 2,
                           .speed = PoolSpeed()};
  const auto resident = LoadEmbeddedEngine(options);
  options.weights = WeightMode::kSharded;
  const auto shared = LoadEmbeddedEngine(options);
  ASSERT_TRUE(resident.ok() && shared.ok()) << resident.status() << shared.status();
  std::mt19937_64 random(TestSeed());
  for (int prompts = 0; prompts < 2; ++prompts) {
    const std::vector<uint32_t> prompt = RandomPrompt(Draw(random, 1, 400), kVocab, random);
    const auto expected = PrefillKeepingKv(**resident, prompt), actual = PrefillKeepingKv(**shared, prompt);
    ASSERT_TRUE(expected.ok() && actual.ok()) << expected.status() << actual.status();
    ExpectSameBits(*actual, *expected);
  }
  const auto plan = (*shared)->MakePlan(500, {}), of_resident = (*resident)->MakePlan(500, {});
  ASSERT_TRUE(plan.ok() && of_resident.ok()) << plan.status() << of_resident.status();
  EXPECT_EQ(plan->weights.mode, WeightMode::kSharded);
  EXPECT_GT(plan->weights.loaded_bytes, of_resident->weights.loaded_bytes / 2);  // beside two tables
  EXPECT_LT(plan->weights.loaded_bytes, of_resident->weights.loaded_bytes);
  EXPECT_GT(plan->weights.layer_seconds, 0);
  EXPECT_EQ(plan->weights.layer_busy_seconds, 0) << "the ranks' cores are not the host's";
  EXPECT_EQ(plan->plan.predicted.comm_bytes[Traffic::kGather], 0) << "none leave the process";
  const auto capacity = CapacityWithoutWeights(options, (*shared)->model());
  ASSERT_TRUE(capacity.ok()) << capacity.status();
  EXPECT_EQ(capacity->weights.mode, WeightMode::kSharded);
  EXPECT_EQ(capacity->weights.loaded_bytes, plan->weights.loaded_bytes);
  EXPECT_GT(capacity->weights.layer_seconds, 0);
  ASSERT_EQ(capacity->weight_modes.size(), 3u);
  options.device = "far";
  const absl::Status alone = LoadEmbeddedEngine(options).status();
  EXPECT_TRUE(absl::IsInvalidArgument(alone)) << alone;
  EXPECT_THAT(std::string(alone.message()), HasSubstr("one far 0, which has nobody to share with"));
}

// Whoever runs the pool hears what became of auto.
TEST_F(StreamedEngineTest, SaysHowTheWeightsAreHeld) {
  const auto note_of = [&](std::optional<WeightMode> weights) {
    std::vector<std::string> notes;
    const auto pool = LoadEmbeddedPool(
        {.model_path = path_, .device = "cpu", .weights = weights, .of_worker = true, .peak_flops = 1e12},
        [&](const std::string& note, bool warning) {
          if (!warning && note.starts_with("the weights are ")) notes.push_back(note);
        });
    EXPECT_TRUE(pool.ok()) << pool.status();
    return notes.size() == 1 ? notes.front() : absl::StrCat(notes.size(), " notes");
  };
  EXPECT_THAT(note_of(std::nullopt), MatchesRegex("the weights are resident: [0-9.]+ GiB of memory"));
  EXPECT_THAT(note_of(WeightMode::kStreamed),
              MatchesRegex("the weights are streamed: [0-9.]+ GiB of memory for each prefill"));
  EXPECT_THAT(note_of(WeightMode::kSharded),
              MatchesRegex("the weights are sharded, among the pool's workers: a part of [0-9.]+ GiB of "
                           "memory, and [0-9.]+ GiB for each prefill"));
}

TEST(WeightModesTest, AutoStreamsWhatLeavesNoRoom) {
  const auto resident = [](int64_t bytes, int64_t free, int64_t budget) {
    return LeaveRoom(bytes, free, budget);
  };
  EXPECT_TRUE(resident(80, 100, 0));
  EXPECT_FALSE(resident(81, 100, 0));
  EXPECT_TRUE(resident(60, 100, 40));
  EXPECT_FALSE(resident(61, 100, 40));
  EXPECT_TRUE(resident(10, 100, 95));  // small: a budget beyond what is free changes nothing
  EXPECT_FALSE(resident(11, 100, 95));
  EXPECT_FALSE(resident(11, 100, 1000));
  EXPECT_TRUE(resident(1 << 30, 0, 0));  // the system does not say
}

// A prompt has to fit beside two layers. Without room for K and V it cannot run in pieces.
TEST_F(StreamedEngineTest, LayersThatPassTakeOfTheMemory) {
  EXPECT_EQ(Load(path_, 1, std::nullopt)->MakePlan(100, {})->weights.mode, WeightMode::kResident);
  const int64_t needed = Load(path_, 1, WeightMode::kStreamed)->MakePlan(8192, {})->plan.predicted.run_bytes;
  const auto fits = [&](int64_t memory_bytes) {
    const auto engine = Load(path_, 1, WeightMode::kStreamed, memory_bytes, /*kv_memory_bytes=*/0);
    return engine->MakePlan(8192, {}).ok();
  };
  EXPECT_TRUE(fits(needed));
  EXPECT_FALSE(fits(needed - 1)) << "a byte less was enough";
}

TEST_F(StreamedEngineTest, PiecesAndPrefixesReadTheLayersAgain) {
  const auto whole = Load(path_, 2, WeightMode::kResident);
  const int64_t budget = Load(path_, 2, WeightMode::kStreamed)->MakePlan(3000, {})->plan.predicted.run_bytes;
  const auto streamed = Load(path_, 2, WeightMode::kStreamed, budget * 7 / 10);
  const auto plan = streamed->MakePlan(3000, {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_GT(plan->pieces.size(), 1u);
  double seconds = 0;
  for (const Plan& piece : plan->pieces) seconds += piece.predicted.weight_seconds;
  EXPECT_NEAR(plan->plan.predicted.weight_seconds, seconds, 1e-9 * seconds);
  const auto resident =
      Load(path_, 2, WeightMode::kResident, budget * 7 / 10 - plan->plan.predicted.weight_bytes);
  const auto prompt = RandomPrompt(3000, kVocab, random_);
  const auto expected = PrefillKeepingKv(*resident, prompt);
  const auto actual = PrefillKeepingKv(*streamed, prompt);
  ASSERT_TRUE(expected.ok() && actual.ok()) << expected.status() << actual.status();
  EXPECT_EQ(actual->pieces, expected->pieces);
  ExpectSameBits(*actual, *expected);
}

// Runs that live at once, are paused at random and are stopped: those that go on have their bits.
TEST_F(StreamedEngineTest, RunsBesideEachOtherChangeNoBit) {
  const auto resident = Load(path_, 3, WeightMode::kResident);
  const auto streamed = Load(path_, 3, WeightMode::kStreamed);
  for (int draw = 0; draw < 5; ++draw) {
    std::vector<std::vector<uint32_t>> prompts;
    std::vector<std::unique_ptr<Prefill>> live;
    for (int run = 0; run < 4; ++run) {
      prompts.push_back(RandomPrompt(Draw(random_, 1, 600), kVocab, random_));
      auto prefill = streamed->Start({prompts.back(), {}}, nullptr);
      ASSERT_TRUE(prefill.ok()) << prefill.status();
      if (Draw(random_, 0, 1) == 1) (*prefill)->Pause();
      live.push_back(*std::move(prefill));
    }
    const size_t stopped = Draw<size_t>(random_, 0, live.size() - 1);
    live[stopped]->Stop();
    for (size_t run = 0; run < live.size(); ++run) {
      live[run]->Resume();
      const auto actual = live[run]->Wait();
      if (run == stopped && !actual.ok()) {
        EXPECT_TRUE(absl::IsCancelled(actual.status())) << actual.status();
        continue;
      }
      ASSERT_TRUE(actual.ok()) << actual.status();
      EXPECT_EQ(actual->logits, RunPrefill(*resident, {prompts[run], {}})->logits);
    }
  }
  StopAfterALayer observer;
  const auto prompt = RandomPrompt(600, kVocab, random_);
  EXPECT_TRUE(absl::IsCancelled(observer.Run(*streamed, {prompt, {}}).status()));
}

// The run fails with the file's name, and the next one goes well once the file is whole again.
TEST_F(StreamedEngineTest, AFileThatShrinksFailsTheRunAlone) {
  const auto engine = Load(path_, 2, WeightMode::kStreamed);
  const auto prompt = RandomPrompt(200, kVocab, random_);
  const auto before = RunPrefill(*engine, {prompt, {}});
  ASSERT_TRUE(before.ok()) << before.status();
  const std::string file = path_ + "/model.safetensors";
  const std::string content = ReadWholeFile(file);
  for (const double part : {0.9, 0.5, 0.0}) {
    std::filesystem::resize_file(file, static_cast<size_t>(part * static_cast<double>(content.size())));
    const auto failed = RunPrefill(*engine, {prompt, {}});
    EXPECT_TRUE(absl::IsDataLoss(failed.status())) << failed.status();
    EXPECT_THAT(std::string(failed.status().message()), HasSubstr(file));
  }
  std::fstream(file, std::ios::in | std::ios::out | std::ios::binary)
      .write(content.data(), static_cast<std::streamsize>(content.size()));
  const auto after = RunPrefill(*engine, {prompt, {}});
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(after->logits, before->logits);
}

// Resident weights read the rows of the prompt's tokens, and nothing else.
TEST_F(StreamedEngineTest, AFileThatShrinksFailsTheRunOfResidentWeightsAlone) {
  const auto engine = Load(path_, 2, WeightMode::kResident);
  const auto prompt = RandomPrompt(200, kVocab, random_);
  const auto before = RunPrefill(*engine, {prompt, {}});
  ASSERT_TRUE(before.ok()) << before.status();
  const std::string file = path_ + "/model.safetensors";
  const std::string content = ReadWholeFile(file);
  std::filesystem::resize_file(file, 0);
  const auto failed = RunPrefill(*engine, {prompt, {}});
  EXPECT_TRUE(absl::IsDataLoss(failed.status())) << failed.status();
  EXPECT_THAT(std::string(failed.status().message()), HasSubstr(file));
  std::ofstream(file, std::ios::binary).write(content.data(), static_cast<std::streamsize>(content.size()));
  const auto after = RunPrefill(*engine, {prompt, {}});
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(after->logits, before->logits);
}

}  // namespace
}  // namespace meshfill
