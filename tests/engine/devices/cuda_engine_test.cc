// The engine on GPUs that the host plays: what it refuses and why, cancel, waits by the device's clock, a
// device that fails. That its answers are right: parity_test and independence_test, linked with the same
// fake.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/time/clock.h"
#include "engine/embedded_engine.h"
#include "engine/kv/block_hash.h"
#include "engine/model/family.h"
#include "engine/model/make_model.h"
#include "engine/platforms.h"
#include "engine/prefill_engine.h"
#include "kernels/cuda/cuda_device.h"
#include "tests/engine/close.h"
#include "tests/engine/kept_kv.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/stop_after_a_layer.h"
#include "tests/fake_cuda/fake_cuda.h"

namespace meshfill {
namespace {

constexpr size_t kMemoryBytes = size_t{1} << 30;

class CudaEngineTest : public testing::Test {
 protected:
  static void SetUpTestSuite() { folder_ = MakeTestModel("plain", 16); }
  void SetUp() override { FakeCuda::set_memory_bytes(kMemoryBytes); }
  void TearDown() override {
    FakeCuda::RepairDevice();
    FakeCuda::set_devices(1);
    FakeCuda::set_driver_version(CUDART_VERSION);
    FakeCuda::set_compute_capability(9);
  }

  static std::string MakeTestModel(const std::string& name, int head_dim,
                                   ModelFamily family = ModelFamily::kLlama, DType dtype = DType::kBf16) {
    const std::string folder = testing::TempDir() + "/cuda_engine_" + name;
    std::filesystem::remove_all(folder);
    const int experts = FamilyOf(family).has_experts ? 4 : 0;  // each token goes to all of them
    const absl::Status status = MakeModel({.family = family,
                                           .layers = 3,
                                           .hidden = 64,
                                           .intermediate = 64,
                                           .q_heads = 4,
                                           .kv_heads = 2,
                                           .head_dim = head_dim,
                                           .vocab = 100,
                                           .context_tokens = 1 << 20,
                                           .experts = experts,
                                           .experts_used = experts,
                                           .dtype = dtype},
                                          folder);
    EXPECT_TRUE(status.ok()) << status;
    return folder;
  }

  // A model whose weights are in its layers, and what a layer and the table take.
  static std::string MakeDeepModel(int layers) {
    const std::string folder = testing::TempDir() + "/cuda_engine_deep_" + std::to_string(layers);
    std::filesystem::remove_all(folder);
    const absl::Status status = MakeModel({.layers = layers,
                                           .hidden = 256,
                                           .intermediate = 1024,
                                           .q_heads = 4,
                                           .kv_heads = 2,
                                           .head_dim = 64,
                                           .vocab = 1000,
                                           .context_tokens = 1 << 16,
                                           .dtype = DType::kBf16},
                                          folder);
    EXPECT_TRUE(status.ok()) << status;
    return folder;
  }
  static constexpr int64_t kDeepLayerBytes = 2 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 1024);
  static constexpr int64_t kDeepTableBytes = 2 * 1000 * 256;

  static EngineOptions Options(int ranks) {
    return {.model_path = folder_, .ranks = ranks, .device = "cuda", .peak_flops = 1e12};
  }
  static std::unique_ptr<PrefillEngine> Load(int ranks) {
    auto engine = LoadEmbeddedEngine(Options(ranks));
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? *std::move(engine) : nullptr;
  }
  static absl::Status LoadStatus(const EngineOptions& options) {
    return LoadEmbeddedEngine(options).status();
  }

  static std::string folder_;
};
std::string CudaEngineTest::folder_;

bool Says(const absl::Status& status, const std::string& text) {
  return std::string(status.message()).find(text) != std::string::npos;
}

TEST_F(CudaEngineTest, SaysWhyThereIsNoDevice) {
  FakeCuda::set_driver_version(0);
  absl::Status status = LoadStatus(Options(1));
  EXPECT_TRUE(absl::IsInvalidArgument(status) && Says(status, "no NVIDIA driver")) << status;
  FakeCuda::set_driver_version(12040);
  status = LoadStatus(Options(1));
  EXPECT_TRUE(absl::IsInvalidArgument(status) && Says(status, "CUDA 12.4") && Says(status, "needs CUDA 13."))
      << status;
  FakeCuda::set_driver_version(CUDART_VERSION);
  FakeCuda::set_devices(0);
  status = LoadStatus(Options(1));
  EXPECT_TRUE(absl::IsInvalidArgument(status) && Says(status, "no NVIDIA GPU is visible")) << status;
  FakeCuda::set_devices(1);
  FakeCuda::set_compute_capability(7);
  status = LoadStatus(Options(1));
  EXPECT_TRUE(absl::IsInvalidArgument(status) && Says(status, "Fake GPU (7.0)")) << status;
}

TEST_F(CudaEngineTest, AutoTakesTheGpuAndLeavesF32ToTheCpu) {
  EngineOptions options = Options(2);
  options.device = "auto";
  const auto on_gpu = LoadEmbeddedEngine(options);
  ASSERT_TRUE(on_gpu.ok()) << on_gpu.status();
  EXPECT_EQ((*on_gpu)->backend_name(), "cuda/sm90");
  EXPECT_EQ((*on_gpu)->model().dtype, DType::kBf16);
  options.dtype = DType::kF32;
  const auto on_cpu = LoadEmbeddedEngine(options);
  ASSERT_TRUE(on_cpu.ok()) << on_cpu.status();
  EXPECT_EQ((*on_cpu)->backend_name().rfind("cpu/", 0), 0u);
}

// cuBLASLt's algorithm depends on how many rows there are, so that others would change a prompt's bits.
TEST_F(CudaEngineTest, NoPromptsShareAPass) {
  const auto engine = Load(2);
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->pack_room(), PackRoom());
  EXPECT_EQ(engine->ShareOfPack(10, {}), PackShare());
}

TEST_F(CudaEngineTest, RefusesWhatItsKernelsDoNotCompute) {
  EngineOptions options = Options(1);
  options.dtype = DType::kF32;
  absl::Status status = LoadStatus(options);
  EXPECT_TRUE(absl::IsInvalidArgument(status) && Says(status, "bf16")) << status;
  options = Options(1);
  options.model_path = MakeTestModel("odd", 20);
  status = LoadStatus(options);
  EXPECT_TRUE(absl::IsInvalidArgument(status) && Says(status, "head_dim is 20")) << status;
  options = Options(1);
  options.weights = WeightMode::kSharded;
  status = LoadStatus(options);
  EXPECT_TRUE(absl::IsInvalidArgument(status) && Says(status, "nobody to share with") &&
              Says(status, "streamed"))
      << status;
}

// What the CPU answers in bf16, too, from experts, norms behind sublayers, GELU, sinks, and weights in FP8
// and MXFP4, on one rank and on several.
TEST_F(CudaEngineTest, ComputesEveryFamilyAsTheCpuDoes) {
  std::vector<uint32_t> prompt(150);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<uint32_t>(i * 31 % 100);
  for (const auto& [family, dtype] : {std::pair(ModelFamily::kQwen3Moe, DType::kBf16),
                                      {ModelFamily::kMixtral, DType::kBf16},
                                      {ModelFamily::kGlm4Moe, DType::kBf16},
                                      {ModelFamily::kMiniMaxM2, DType::kBf16},
                                      {ModelFamily::kGptOss, DType::kBf16},
                                      {ModelFamily::kGemma3, DType::kBf16},
                                      {ModelFamily::kQwen3Moe, DType::kF8E4M3},
                                      {ModelFamily::kGptOss, DType::kF4E2M1}}) {
    SCOPED_TRACE(testing::Message() << "family " << static_cast<int>(family) << ", " << DTypeName(dtype));
    EngineOptions options = Options(1);
    options.model_path = MakeTestModel("family", 16, family, dtype);
    options.device = "cpu";
    options.dtype = DType::kBf16;
    const auto on_cpu = LoadEmbeddedEngine(options);
    ASSERT_TRUE(on_cpu.ok()) << on_cpu.status();
    const auto expected = RunPrefill(**on_cpu, {prompt, {}});
    ASSERT_TRUE(expected.ok()) << expected.status();
    options.device = "cuda";
    for (const int ranks : {1, 4}) {
      options.ranks = ranks;
      const auto engine = LoadEmbeddedEngine(options);
      ASSERT_TRUE(engine.ok()) << engine.status();
      const int64_t before = FakeCuda::bytes_in_use();
      const auto result = RunPrefill(**engine, {prompt, {}});
      ASSERT_TRUE(result.ok()) << result.status();
      ExpectClose(result->logits, expected->logits, 4e-2, std::to_string(ranks) + " ranks");
      EXPECT_EQ(FakeCuda::bytes_in_use(), before);
    }
  }
}

TEST_F(CudaEngineTest, RefusesWeightsAndPromptsThatDoNotFit) {
  FakeCuda::set_memory_bytes(100'000);
  EngineOptions options = Options(1);
  options.weights = WeightMode::kResident;
  // Resident 3 · (64·128 + 64·64 + 3·64·64) + 2 · 100·64 weights of two bytes, which are 173,056; streamed
  // two layers and the table, which are 111,104.
  absl::Status status = LoadStatus(options);
  EXPECT_TRUE(absl::IsResourceExhausted(status) && Says(status, "Fake GPU: the weights need ") &&
              Says(status, "of memory resident") && Says(status, "use a GPU with more"))
      << status;
  FakeCuda::set_memory_bytes(173'055);
  status = LoadStatus(options);
  EXPECT_TRUE(absl::IsResourceExhausted(status) && Says(status, "set model.weights to streamed")) << status;
  FakeCuda::set_memory_bytes(111'103);
  options.weights.reset();
  status = LoadStatus(options);
  EXPECT_TRUE(absl::IsResourceExhausted(status) && Says(status, "of memory streamed")) << status;
  FakeCuda::set_memory_bytes(kMemoryBytes);
  options = Options(2);
  options.kv_host_memory_bytes = 0;  // nor in pieces, for their K and V have no room
  const auto engine = LoadEmbeddedEngine(options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const std::vector<uint32_t> prompt(1 << 20, 1);
  status = RunPrefill(**engine, {prompt, {}}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
}

TEST_F(CudaEngineTest, PinnedMemoryThatIsRefusedIsSaid) {
  FakeCuda::refuses_pinned_memory = true;
  const absl::Status status = LoadStatus(Options(1));
  FakeCuda::refuses_pinned_memory = false;
  EXPECT_TRUE(absl::IsResourceExhausted(status) && Says(status, "bytes of pinned host memory were refused") &&
              Says(status, "free memory of the host"))
      << status;
  EXPECT_TRUE(LoadStatus(Options(1)).ok()) << "the next one is served";
}

// Of a model that leaves no room resident, a run has two layers on the device beside the embedding, and what
// its plan says, whatever the layers; then nothing of it.
TEST_F(CudaEngineTest, StreamsWeightsWithinWhatThePlanSays) {
  const std::string folder = MakeDeepModel(12);
  constexpr int64_t layer = kDeepLayerBytes, table = kDeepTableBytes;
  for (const int ranks : {1, 3}) {
    EngineOptions options = Options(ranks);
    options.model_path = folder;
    options.weights = WeightMode::kStreamed;
    const auto engine = LoadEmbeddedEngine(options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    const int64_t before = FakeCuda::bytes_in_use();
    EXPECT_GE(before, table);
    FakeCuda::TakeMostBytes();
    const std::vector<uint32_t> prompt(500, 7);
    const auto result = RunPrefill(**engine, {prompt, {}});
    ASSERT_TRUE(result.ok()) << result.status();
    const auto choice = (*engine)->MakePlan(500, {});
    ASSERT_TRUE(choice.ok());
    EXPECT_EQ(choice->weights.mode, WeightMode::kStreamed);
    EXPECT_EQ(choice->weights.loaded_bytes, table);
    EXPECT_EQ(choice->weights.run_bytes, 2 * layer);
    EXPECT_EQ(choice->weights.layer_busy_seconds, 0) << "no rank computes on the cores that read";
    EXPECT_GT(choice->plan.predicted.weight_seconds, 0);
    const int64_t most = FakeCuda::TakeMostBytes() - before;
    EXPECT_LE(most, choice->plan.predicted.run_bytes * 11 / 10);
    EXPECT_GE(most, 2 * layer);
    EXPECT_EQ(FakeCuda::bytes_in_use(), before);
  }
}

// Of a model that leaves no room resident, two devices keep a half each, and a run has two layers on each.
// With less room they stream; with more nobody shares.
TEST_F(CudaEngineTest, DevicesShareWeightsWithinWhatThePlanSays) {
  FakeCuda::set_devices(2);
  const std::string folder = MakeDeepModel(48);
  constexpr int64_t layer = kDeepLayerBytes, table = kDeepTableBytes;
  const int64_t all = 48 * layer + table;  // with the LM head
  constexpr int64_t kFree = 2 * (int64_t{300} << 20);
  FakeCuda::set_memory_bytes(kFree / 2);
  std::string note;
  const auto load = [&](int ranks, int64_t room) {  // for weights
    EngineOptions options = Options(ranks);
    options.model_path = folder;
    options.stripe = 16;
    options.memory_budget_bytes = kFree - room;
    note.clear();
    auto engine = LoadEmbeddedEngine(options, [&](const std::string& text, bool) {
      if (text.starts_with("the weights are ")) note = text;
    });
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? *std::move(engine) : nullptr;
  };
  for (const int ranks : {2, 4}) {
    const int64_t empty = FakeCuda::bytes_in_use();
    const auto engine = load(ranks, all + 2 * table);
    ASSERT_NE(engine, nullptr);
    const auto choice = engine->MakePlan(64, {});
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(choice->weights.mode, WeightMode::kSharded);
    EXPECT_EQ(note, "the weights are sharded, among 2 GPUs: 0.1 GiB of memory, and 0.0 GiB for each prefill");
    EXPECT_EQ(choice->weights.loaded_bytes, all + 2 * table);
    EXPECT_EQ(choice->weights.run_bytes, 2 * 2 * layer);
    EXPECT_EQ(choice->weights.layer_busy_seconds, 0);
    EXPECT_GT(choice->plan.predicted.weight_seconds, 0);
    const std::vector<uint32_t> prompt(64, 7);
    ASSERT_TRUE(RunPrefill(*engine, {prompt, {}}).ok());  // takes what runs keep for the next
    const int64_t before = FakeCuda::bytes_in_use();
    EXPECT_GE(before - empty, all + 2 * table);
    FakeCuda::TakeMostBytes();
    const auto result = RunPrefill(*engine, {prompt, {}});
    ASSERT_TRUE(result.ok()) << result.status();
    const int64_t most = FakeCuda::TakeMostBytes() - before;
    EXPECT_LE(most, choice->plan.predicted.run_bytes * 11 / 10);
    EXPECT_GE(most, 2 * 2 * layer);
    EXPECT_EQ(FakeCuda::bytes_in_use(), before);
    EXPECT_GT(result->ranks[1].wait_seconds[Traffic::kGather], 0);
  }
  const auto mode_with = [&](int64_t room) {
    const auto engine = load(2, room);
    return engine == nullptr ? WeightMode::kSharded : engine->MakePlan(10, {})->weights.mode;
  };
  EXPECT_EQ(mode_with(all + 2 * table - 1), WeightMode::kStreamed);
  EXPECT_EQ(mode_with(2 * (all + table)), WeightMode::kResident);
}

// What a device lacks for its share is said at the load; that the other's loads meanwhile hurts nobody.
TEST_F(CudaEngineTest, AShareThatDoesNotLoadIsSaid) {
  FakeCuda::set_devices(2);
  const std::string folder = MakeTestModel("lost_share", 16);
  EngineOptions options = Options(2);
  options.model_path = folder;
  options.weights = WeightMode::kSharded;
  ASSERT_TRUE(LoadStatus(options).ok());
  FakeCuda::set_memory_bytes(100'000);
  const absl::Status status = LoadStatus(options);
  EXPECT_TRUE(absl::IsResourceExhausted(status) && Says(status, "of memory sharded")) << status;
  FakeCuda::set_memory_bytes(kMemoryBytes);
  EXPECT_TRUE(LoadStatus(options).ok()) << "the next one is served";
}

// A rank that ends early may have left operations behind that read a layer: the layer stays until they have
// run (the fake ends the test where one reads freed memory).
class CancelledCudaEngineTest : public CudaEngineTest, public testing::WithParamInterface<WeightMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, CancelledCudaEngineTest,
                         testing::Values(WeightMode::kStreamed, WeightMode::kSharded),
                         [](const auto& param) { return std::string(WeightModeName(param.param)); });

TEST_P(CancelledCudaEngineTest, APrefillWhoseWeightsComeLeavesNothingBehind) {
  FakeCuda::set_devices(GetParam() == WeightMode::kSharded ? 2 : 1);
  EngineOptions options = Options(4);
  options.weights = GetParam();
  const auto engine = LoadEmbeddedEngine(options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const std::vector<uint32_t> prompt(500, 3);
  const auto expected = RunPrefill(**engine, {prompt, {}});
  ASSERT_TRUE(expected.ok()) << expected.status();
  const int64_t before = FakeCuda::bytes_in_use();
  std::mt19937_64 random(TestSeed());
  FakeCuda::kernel_microseconds = 2000;  // longer than a layer takes to come: the host is ahead
  for (int round = 0; round < 25; ++round) {
    auto prefill = (*engine)->Start({prompt, {}}, nullptr);
    ASSERT_TRUE(prefill.ok()) << prefill.status();
    absl::SleepFor(absl::Milliseconds(random() % 150));  // somewhere in it
    (*prefill)->Stop();
    const absl::Status stopped = (*prefill)->Wait().status();
    EXPECT_TRUE(absl::IsCancelled(stopped) || stopped.ok()) << stopped;
    prefill->reset();
    EXPECT_EQ(FakeCuda::bytes_in_use(), before);
  }
  const auto result = RunPrefill(**engine, {prompt, {}});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->logits, expected->logits);
  FakeCuda::kernel_microseconds = 0;
}

// FP8 takes a byte an element, and for each rank what the largest product is widened into.
TEST_F(CudaEngineTest, PlansCountWhatFp8IsWidenedInto) {
  EngineOptions options = Options(2);
  options.model_path = MakeTestModel("fp8", 16, ModelFamily::kLlama, DType::kF8E4M3);
  const auto engine = LoadEmbeddedEngine(options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const auto choice = (*engine)->MakePlan(500, {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->weights.run_bytes, 2 * 2 * (2 * 64 * 64));  // of gate and up, or of q, k and v
}

TEST_F(CudaEngineTest, PlansInSlicesOfTheDevices) {
  const auto engine = Load(1);
  ASSERT_NE(engine, nullptr);
  const auto choice = engine->MakePlan(10'000, {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->plan.slice_tokens, 4096);
}

TEST_F(CudaEngineTest, KeepsTheSpeedOfAPoolByItsDevicesAndModel) {
  EngineOptions options = Options(2);
  options.speed_profile_path = testing::TempDir() + "/cuda_engine_speed.json";
  std::filesystem::remove(options.speed_profile_path);
  FakeCuda::speed_measurements = 0;
  ASSERT_TRUE(LoadStatus(options).ok());
  ASSERT_TRUE(LoadStatus(options).ok());
  EXPECT_EQ(FakeCuda::speed_measurements, 1);
  FakeCuda::set_devices(2);  // a device for each rank
  ASSERT_TRUE(LoadStatus(options).ok());
  EXPECT_EQ(FakeCuda::speed_measurements, 2);
  options.communication_multiprocessors = 1;
  const auto engine = LoadEmbeddedEngine(options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  EXPECT_EQ(FakeCuda::speed_measurements, 3);
  EXPECT_EQ((*engine)->MakePlan(10'000, {})->plan.slice_tokens, 4096);
}

TEST_F(CudaEngineTest, RanksWaitByTheDevicesClockAndGiveTheirMemoryBack) {
  FakeCuda::set_devices(2);
  const auto engine = Load(4);
  ASSERT_NE(engine, nullptr);
  std::vector<uint32_t> prompt(700);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<uint32_t>(i * 31 % 100);
  const int64_t before = FakeCuda::bytes_in_use();
  const auto result =
      PrefillKeepingKv(*engine, prompt, {.tile = Tile{2, 2}, .stripe = 64, .keep_timeline = true});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(FakeCuda::bytes_in_use(), before);
  EXPECT_GT(result->comm_wait_seconds, 0);
  for (const RankStats& rank : result->ranks) {
    EXPECT_GT(rank.block_seconds, 0);
    EXPECT_LE(rank.block_seconds + rank.merge_seconds + rank.comm_wait_seconds(),
              rank.attention_seconds * 1.001);
    EXPECT_LE(rank.attention_seconds, rank.total_seconds);
  }
  // What one rank does is one after the other, by its device's clock.
  ASSERT_TRUE(result->timeline.has_value());
  for (int rank = 0; rank < 4; ++rank) {
    double end = 0;
    int blocks = 0;
    for (const Span& span : result->timeline->spans) {
      if (span.rank != rank || span.lane() != Lane::kCompute) continue;
      EXPECT_GE(span.start_seconds, end - 1e-4) << span.Name();
      end = span.end_seconds;
      blocks += span.block.has_value() ? 1 : 0;
    }
    EXPECT_EQ(blocks, 3 * 4);
    EXPECT_LE(end, result->prefill_seconds + 1e-3);
  }
}

TEST_F(CudaEngineTest, ACancelledPrefillLeavesNothingBehind) {
  const auto engine = Load(4);
  ASSERT_NE(engine, nullptr);
  const std::vector<uint32_t> prompt(500, 3);
  const int64_t before = FakeCuda::bytes_in_use();
  for (int round = 0; round < 3; ++round) {
    StopAfterALayer observer;
    const auto kv = std::make_shared<KvPrompt>(KvShapeOf(engine->model()), 500);
    const auto stopped = observer.Run(*engine, {prompt, {.kv = kv}});
    EXPECT_TRUE(absl::IsCancelled(stopped.status())) << stopped.status();
    EXPECT_EQ(FakeCuda::bytes_in_use(), before);
    EXPECT_TRUE(RunPrefill(*engine, {prompt, {}}).ok());
  }
}

// What is kept stays with the devices while there is room, and leaves them in time: prompts that go on from
// it are answered as those that compute all, what is fetched is what they computed, and no other memory is
// taken.
TEST_F(CudaEngineTest, KeepsKvOnTheDevices) {
  FakeCuda::set_devices(2);
  constexpr int64_t kTokenBytes = 3 * 2 * 2 * 16 * 2;
  EngineOptions options = Options(4);
  options.stripe = 16;
  options.kv_memory_bytes = 600 * kTokenBytes;
  options.kv_host_memory_bytes = 5000 * kTokenBytes;
  options.kv_cache = true;
  const auto engine = LoadEmbeddedEngine(options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  KvStore& store = *(*engine)->kv_store();
  std::vector<uint32_t> prompt(400);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<uint32_t>(i * 31 % 100);
  ASSERT_TRUE(RunPrefill(**engine, {prompt, {}}).ok());  // takes what runs keep for the next
  const int64_t before = FakeCuda::bytes_in_use();
  int64_t most_on_devices = 0;
  for (int step = 0; step < 6; ++step) {
    BlockHasher hasher(16, "");
    hasher.Append(prompt);
    const auto names = std::make_shared<const KvBlockNames>(
        KvBlockNames{.tenant = "", .block_tokens = 16, .hashes = hasher.hashes()});
    const auto cold = PrefillKeepingKv(**engine, prompt);
    ASSERT_TRUE(cold.ok()) << cold.status();
    auto kv = std::make_shared<KvPrompt>(KvShapeOf((*engine)->model()), std::ssize(prompt));
    auto lease = store.Admit(kv, "", absl::Minutes(1));
    ASSERT_TRUE(lease.ok()) << lease.status();
    const auto result = RunPrefill(**engine, {prompt, {.kv = kv, .block_names = names}});
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->cached_tokens > 0, step > 0);
    ExpectClose(result->logits, cold->logits, 4e-2, "step " + std::to_string(step));
    const int64_t on_devices = store.counts().device_bytes;
    EXPECT_LE(on_devices, *options.kv_memory_bytes);
    EXPECT_EQ(FakeCuda::bytes_in_use() - before, on_devices);
    most_on_devices = std::max(most_on_devices, on_devices);
    if (step % 2 == 0) {  // a reader
      const KeptKv read = InTokenOrder(*kv);
      for (size_t layer = 0; layer < read.layers.size(); ++layer) {
        ExpectClose(AsFloats(read.layers[layer].k, DType::kBf16),
                    AsFloats(cold->kv.layers[layer].k, DType::kBf16), 4e-2, "k");
        ExpectClose(AsFloats(read.layers[layer].v, DType::kBf16),
                    AsFloats(cold->kv.layers[layer].v, DType::kBf16), 4e-2, "v");
      }
      EXPECT_EQ(store.counts().device_bytes, on_devices);  // the host has a copy
    }
    for (int more = 0; more < 200; ++more) prompt.push_back(static_cast<uint32_t>(more * 17 % 100));
  }
  EXPECT_GT(most_on_devices, 300 * kTokenBytes);
  EXPECT_GT(store.counts().bytes, 1000 * kTokenBytes);
}

// Each half of the pool has a device. A prompt that goes on from another takes the half whose device has that
// one's K and V, and adds its own there, beside what the other device is full of.
TEST_F(CudaEngineTest, SubmeshesAreOnTheirOwnDevicesAndFollowAPrefix) {
  FakeCuda::set_devices(2);
  constexpr int64_t kTokenBytes = 3 * 2 * 2 * 16 * 2;
  EngineOptions options = Options(2);
  options.stripe = 16;
  options.speed = PoolSpeed();
  options.kv_memory_bytes = 2 * 320 * kTokenBytes;
  options.kv_host_memory_bytes = 5000 * kTokenBytes;
  options.kv_cache = true;
  const auto engine = LoadEmbeddedEngine(options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const auto whole = (*engine)->MakePlan(320, {}), half = (*engine)->MakePlan(320, {.submeshes = 2});
  ASSERT_TRUE(whole.ok() && half.ok()) << whole.status() << half.status();
  EXPECT_EQ(whole->weights.loaded_bytes, 2 * half->weights.loaded_bytes);  // those of its device
  const KvStore& store = *(*engine)->kv_store();
  const auto options_of = [](const std::vector<uint32_t>& prompt) {
    BlockHasher hasher(16, "");
    hasher.Append(prompt);
    const KvBlockNames names = {.tenant = "", .block_tokens = 16, .hashes = hasher.hashes()};
    return PrefillOptions{.block_names = std::make_shared<const KvBlockNames>(names), .submeshes = 2};
  };
  const std::vector<uint32_t> fills(320, 1);
  std::vector<uint32_t> grows(160, 2);
  auto on_first = (*engine)->Start({fills, options_of(fills)}, nullptr);
  ASSERT_TRUE(on_first.ok()) << on_first.status();
  (*on_first)->Pause();
  const auto on_second = RunPrefill(**engine, {grows, options_of(grows)});
  ASSERT_TRUE(on_second.ok()) << on_second.status();
  (*on_first)->Resume();
  ASSERT_TRUE((*on_first)->Wait().ok());
  on_first->reset();
  EXPECT_EQ(store.counts().device_bytes, (320 + 160) * kTokenBytes);
  grows.resize(320, 3);
  const auto follows = RunPrefill(**engine, {grows, options_of(grows)});
  ASSERT_TRUE(follows.ok()) << follows.status();
  EXPECT_EQ(follows->cached_tokens, 160);
  EXPECT_EQ(store.counts().device_bytes, (320 + 320) * kTokenBytes);
}

// A plan gives each rank an equal part of the budget: the GPU with the least for a rank bounds them all.
TEST_F(CudaEngineTest, TheBudgetOfARankIsThatOfTheTightestGpu) {
  constexpr auto kUsable = static_cast<int64_t>(kMemoryBytes / 100 * 85);
  const int64_t in_use = FakeCuda::bytes_in_use();
  ASSERT_EQ(in_use, 0);
  FakeCuda::set_devices(2);
  const auto budget = [](int ranks, int64_t weights_to_come = 0) {
    const auto gpus = FindDevices("cuda", {.ranks = ranks});
    EXPECT_TRUE(gpus.ok()) << gpus.status();
    return gpus.ok() ? (*gpus)->BudgetBytes(weights_to_come).value() : 0;
  };
  EXPECT_EQ(budget(1), kUsable);
  EXPECT_EQ(budget(2), 2 * kUsable);
  EXPECT_EQ(budget(3), 3 * (kUsable / 2)) << "two of them share a GPU";
  EXPECT_EQ(budget(4), 4 * (kUsable / 2));
  EXPECT_EQ(budget(5), 5 * (kUsable / 3));
  FakeCuda::set_foreign_bytes(1, kMemoryBytes / 2);
  EXPECT_EQ(budget(1), kUsable) << "it has no rank there";
  EXPECT_EQ(budget(2), 2 * static_cast<int64_t>(kMemoryBytes / 2 / 100 * 85));
  EXPECT_EQ(budget(2, kMemoryBytes), 2) << "nothing is left beside the weights";
  FakeCuda::set_foreign_bytes(1, 0);
}

TEST_F(CudaEngineTest, RefusesMoreKvOnTheDevicesThanTheyHaveMemory) {
  EngineOptions options = Options(1);
  options.kv_memory_bytes = kMemoryBytes;
  const absl::Status status = LoadStatus(options);
  EXPECT_TRUE(absl::IsInvalidArgument(status) && Says(status, "kv.memory_bytes is 1073741824")) << status;
}

// A rank that sends to another fails by its own device's name, before the other hears of it.
TEST_F(CudaEngineTest, HandingOverNamesTheDeviceThatIsLost) {
  FakeCuda::set_devices(2);
  const auto infos = FindCudaDevices();
  ASSERT_TRUE(infos.ok() && infos->size() == 2) << infos.status();
  auto first = MakeCudaDevice((*infos)[0]), second = MakeCudaDevice((*infos)[1]);
  ASSERT_TRUE(first.ok() && second.ok());
  auto sender = (*first)->NewStream(nullptr), receiver = (*second)->NewStream(nullptr);
  ASSERT_TRUE(sender.ok() && receiver.ok());
  auto message = (*sender)->Allocate(1000);
  auto ready = (*sender)->Mark();
  ASSERT_TRUE(message.ok() && ready.ok());
  FakeCuda::BreakDevice();
  const auto is_said = [](const absl::Status& status) {
    return absl::IsUnavailable(status) && Says(status, "Fake GPU") && Says(status, "has failed");
  };
  const absl::Status mark = (*sender)->Mark().status();
  EXPECT_TRUE(is_said(mark)) << mark;
  EXPECT_TRUE((*first)->lost());
  const absl::Status fetch = (*receiver)->Fetch({*message, *ready}).status();
  EXPECT_TRUE(is_said(fetch)) << fetch;
  const absl::Status taken = (*receiver)->TakeOver({*message, *ready}).status();
  EXPECT_TRUE(is_said(taken)) << taken;
}

TEST_F(CudaEngineTest, ALostDeviceIsSaidAndTheEngineNoLongerReady) {
  const auto engine = Load(2);
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->ranks(), 2);
  class BreakAfterALayer : public PrefillObserver {
    void OnLayerDone(int, int) override { FakeCuda::BreakDevice(); }
  } observer;
  const std::vector<uint32_t> prompt(300, 3);
  const absl::Status status = RunPrefill(*engine, {prompt, {}}, &observer).status();
  EXPECT_TRUE(absl::IsUnavailable(status) && Says(status, "Fake GPU") && Says(status, "has failed"))
      << status;
  EXPECT_EQ(engine->ranks(), 0);
  EXPECT_TRUE(absl::IsUnavailable(RunPrefill(*engine, {prompt, {}}).status()));
}

}  // namespace
}  // namespace meshfill
