// Plans for GPUs that are not here: MakePlan's own where the weights are resident, and the fastest of what
// fits.
#include "server/cli/gpu_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "absl/strings/str_format.h"
#include "engine/model/layer_shape.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

constexpr int64_t kGranule = 64 * 16;

ModelShape Model(std::mt19937_64& random) {
  ModelShape model = {.layers = Draw(random, 20, 40),
                      .hidden = 128 * Draw<int64_t>(random, 32, 64),
                      .intermediate = 128 * Draw<int64_t>(random, 64, 200),
                      .q_heads = 32,
                      .kv_heads = 8,
                      .head_dim = 128,
                      .vocab = 128'000,
                      .dtype = DType::kBf16};
  model.context_tokens = 1 << 24;
  return model;
}

GpuCluster Cluster(int64_t memory_bytes) {
  GpuCluster gpus = {.gemm_flops_per_second = 650e12,
                     .memory_bytes_per_second = 2.7e12,
                     .host_bytes_per_second = 50e9,
                     .memory_bytes = memory_bytes};
  gpus.cluster = {.gpus_per_node = 8,
                  .same_node = {.latency_seconds = 5e-6, .bytes_per_second = 360e9},
                  .between_nodes = {.latency_seconds = 10e-6, .bytes_per_second = 45e9},
                  .node_bytes_per_second = 360e9,
                  .attention_flops_per_second = 600e12};
  return gpus;
}

const WeightModeBytes* Find(const GpuPlan& plan, WeightMode mode) {
  const auto found = std::find_if(plan.modes.begin(), plan.modes.end(),
                                  [mode](const WeightModeBytes& each) { return each.mode == mode; });
  return found == plan.modes.end() ? nullptr : &*found;
}

TEST(GpuPlan, TakesTheFastestOfWhatFitsAndSaysWhatEachWouldTake) {
  std::mt19937_64 random(TestSeed());
  int resident = 0, others = 0;
  for (int draw = 0; draw < 30; ++draw) {
    const ModelShape model = Model(random);
    const WeightBytes bytes = WeightBytesOf(model, DType::kBf16);
    const int64_t all = bytes.layers + bytes.head + bytes.embedding;
    const GpuCluster gpus =
        Cluster(all / 100 * (draw % 2 == 0 ? Draw(random, 70, 99) : Draw(random, 200, 400)));
    const PlanRequest request = {.tokens = Draw<int64_t>(random, 1'000, 20'000),
                                 .ranks = 8 * Draw(random, 1, 4)};
    const auto plan = PlanOnGpus(model, gpus, request, kGranule);
    ASSERT_TRUE(plan.ok()) << plan.status();
    ASSERT_EQ(plan->modes.size(), 3u);
    EXPECT_EQ(Find(*plan, WeightMode::kResident)->bytes, all);
    // Among the GPUs of a node where there is room, else among all.
    const int64_t by_node =
        (bytes.layers + bytes.head + 7) / 8 + bytes.embedding + kPartsAhead * bytes.most_layer;
    const bool has_room = request.ranks == 8 || by_node < gpus.memory_bytes;
    const int64_t share = (bytes.layers + bytes.head + request.ranks - 1) / request.ranks;
    EXPECT_EQ(Find(*plan, WeightMode::kSharded)->bytes,
              has_room ? by_node : share + bytes.embedding + kPartsAhead * bytes.most_layer);
    EXPECT_EQ(Find(*plan, WeightMode::kStreamed)->bytes, bytes.embedding + kPartsAhead * bytes.most_layer);
    for (const WeightModeBytes& mode : plan->modes) {
      if (mode.seconds == 0) continue;
      EXPECT_TRUE(mode.fits);
      EXPECT_LE(plan->choice.plan.predicted.seconds, mode.seconds);
    }
    EXPECT_EQ(Find(*plan, plan->choice.weights.mode)->seconds, plan->choice.plan.predicted.seconds);
    EXPECT_LE(plan->choice.plan.predicted.peak_bytes, request.ranks * gpus.memory_bytes);
    const WeightMode mode = plan->choice.weights.mode;
    ++(mode == WeightMode::kResident ? resident : others);
    EXPECT_EQ(plan->not_yet.size(), mode == WeightMode::kSharded && !has_room ? 1u : 0u);
    if (mode == WeightMode::kSharded) {
      EXPECT_EQ(plan->choice.plan.predicted.comm_bytes[Traffic::kGather] > 0, !has_room);
      EXPECT_EQ(
          plan->choice.weights.loaded_bytes,
          request.ranks * (has_room ? by_node - kPartsAhead * bytes.most_layer : share + bytes.embedding));
    }
    EXPECT_EQ(plan->choice.plan.predicted.weight_seconds > 0, mode != WeightMode::kResident);
  }
  EXPECT_GT(resident, 0);
  EXPECT_GT(others, 0);
}

// A node's GPUs share for themselves if a run's two layers fit beside their parts.
TEST(GpuPlan, NodesShareEachForItselfWhereThereIsRoom) {
  std::mt19937_64 random(TestSeed());
  const ModelShape model = Model(random);
  const WeightBytes bytes = WeightBytesOf(model, DType::kBf16);
  const int64_t by_node =
      (bytes.layers + bytes.head + 7) / 8 + bytes.embedding + kPartsAhead * bytes.most_layer;
  for (const int64_t spare : {0, 1}) {
    const auto plan = PlanOnGpus(model, Cluster(by_node + spare), {.tokens = 1000, .ranks = 16}, kGranule);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(Find(*plan, WeightMode::kSharded)->bytes == by_node, spare == 1);
  }
}

// Of one layer all has room where two that stream do not.
TEST(GpuPlan, WhatStreamsNeedsRoomForTwoLayers) {
  std::mt19937_64 random(TestSeed());
  ModelShape model = Model(random);
  model.layers = 1;
  model.vocab = 1024;
  const WeightBytes bytes = WeightBytesOf(model, DType::kBf16);
  const int64_t percents =
      kPartsAhead * bytes.most_layer / 85;  // of what the embedding leaves, 85 are usable
  for (const int64_t spare : {0, 1}) {
    const auto plan = PlanOnGpus(model, Cluster(bytes.embedding + 100 * (percents + spare)),
                                 {.tokens = 1000, .ranks = 1}, kGranule);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->choice.weights.mode, WeightMode::kResident);
    EXPECT_EQ(Find(*plan, WeightMode::kStreamed)->fits, spare == 1);
  }
}

// FP8 is counted as it lies, and with what one product is widened into.
TEST(GpuPlan, CountsWhatFp8IsWidenedInto) {
  std::mt19937_64 random(TestSeed());
  ModelShape model = Model(random);
  const PlanRequest request = {.tokens = 5000, .ranks = 4};
  const GpuCluster gpus = Cluster(int64_t{1} << 42);
  const auto wide = PlanOnGpus(model, gpus, request, kGranule);
  model.fp8 = {.rows = 128, .columns = 128};
  const auto narrow = PlanOnGpus(model, gpus, request, kGranule);
  ASSERT_TRUE(wide.ok() && narrow.ok()) << wide.status() << narrow.status();
  const WeightBytes bytes = WeightBytesOf(model, DType::kBf16);
  const int64_t widened = 2 * 2 * model.intermediate * model.hidden;  // gate and up, in bf16
  EXPECT_EQ(Find(*narrow, WeightMode::kResident)->bytes,
            bytes.layers + bytes.head + bytes.embedding + widened);
  EXPECT_EQ(Find(*narrow, WeightMode::kStreamed)->bytes, bytes.embedding + 2 * bytes.most_layer + widened);
  EXPECT_LT(Find(*narrow, WeightMode::kResident)->bytes, Find(*wide, WeightMode::kResident)->bytes);
  EXPECT_THAT(narrow->not_yet, IsEmpty());
}

TEST(GpuPlan, ResidentWeightsCostNoTime) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 10; ++draw) {
    const ModelShape model = Model(random);
    GpuCluster gpus = Cluster(int64_t{1} << 42);
    gpus.host_bytes_per_second = 0;  // cannot stream
    PlanRequest request = {.tokens = Draw<int64_t>(random, 5'000, 200'000), .ranks = Draw(random, 2, 16)};
    const auto plan = PlanOnGpus(model, gpus, request, kGranule);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->modes.size(), 2u);
    EXPECT_EQ(plan->choice.weights.mode, WeightMode::kResident);
    request.one_memory = false;
    request.kv_on_host = true;
    request.topology = sim::TopologyOf(gpus.cluster, request.ranks);
    const auto expected = MakePlan(model, plan->speed, request);
    ASSERT_TRUE(expected.ok()) << expected.status();
    EXPECT_EQ(plan->choice.plan.predicted.seconds, expected->plan.predicted.seconds);
    EXPECT_EQ(plan->choice.plan.tile, expected->plan.tile);
    EXPECT_EQ(plan->choice.plan.heads, expected->plan.heads);
  }
}

// They come from the host of a node, whose GPUs have one copy together: all but the embedding.
TEST(GpuPlan, StreamsWhatTheHostHasRoomFor) {
  std::mt19937_64 random(TestSeed());
  const ModelShape model = Model(random);
  const WeightBytes bytes = WeightBytesOf(model, DType::kBf16);
  const int64_t on_host = bytes.layers + bytes.head;
  for (const int ranks : {1, 8, 16}) {
    for (const int64_t room : {int64_t{0}, on_host, on_host - 1, int64_t{1}}) {  // 0: not bounded
      SCOPED_TRACE(testing::Message() << ranks << " GPUs, " << room << " of " << on_host);
      GpuCluster gpus = Cluster(int64_t{1} << 42);
      gpus.host_memory_bytes = room;
      const auto plan = PlanOnGpus(model, gpus, {.tokens = 4000, .ranks = ranks}, kGranule);
      ASSERT_TRUE(plan.ok()) << plan.status();
      const WeightModeBytes* streamed = Find(*plan, WeightMode::kStreamed);
      const bool fits = room == 0 || room >= on_host;
      EXPECT_EQ(streamed->fits, fits);
      EXPECT_EQ(streamed->seconds > 0, fits);
      EXPECT_EQ(streamed->host_bytes, on_host);
      EXPECT_EQ(streamed->host_memory_bytes, room);
      EXPECT_TRUE(Find(*plan, WeightMode::kResident)->fits);
      EXPECT_EQ(Find(*plan, WeightMode::kResident)->host_bytes, 0);
    }
  }
}

// What streams where nothing else fits is planned, and where the host has no room, the error says what it
// would need.
TEST(GpuPlan, SaysWhatTheHostWouldNeed) {
  std::mt19937_64 random(TestSeed());
  const ModelShape model = Model(random);
  const WeightBytes bytes = WeightBytesOf(model, DType::kBf16);
  GpuCluster gpus = Cluster((bytes.layers + bytes.head) / 2);
  gpus.host_memory_bytes = bytes.layers + bytes.head;
  const PlanRequest request = {.tokens = 4000, .ranks = 1};
  const auto plan = PlanOnGpus(model, gpus, request, kGranule);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->choice.weights.mode, WeightMode::kStreamed);
  gpus.host_memory_bytes = 1'000'000'000;
  const auto refused = PlanOnGpus(model, gpus, request, kGranule);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("the weights do not fit 1 GPU of"));
  EXPECT_THAT(
      std::string(refused.status().message()),
      HasSubstr(absl::StrFormat("%.1f GB of a node's host, which has 1.0 GB: give --ranks more, or GPUs "
                                "and hosts with more memory",
                                static_cast<double>(bytes.layers + bytes.head) / 1e9)));
}

// K and V of a prefix are on the hosts, and of a prompt in pieces all are: of a full node what its GPUs have.
TEST(GpuPlan, KeepsKAndVOnTheHosts) {
  std::mt19937_64 random(TestSeed());
  const ModelShape model = Model(random);
  const WeightBytes bytes = WeightBytesOf(model, DType::kBf16);
  const int64_t all = bytes.layers + bytes.head + bytes.embedding;
  for (const int ranks : {1, 8, 16}) {
    for (const bool pieces : {false, true}) {
      SCOPED_TRACE(testing::Message() << ranks << (pieces ? " GPUs, in pieces" : " GPUs, behind a prefix"));
      GpuCluster gpus = Cluster(all + (pieces ? int64_t{6} << 30 : int64_t{1} << 42));
      gpus.host_bytes_per_second = 0;  // nothing streams
      const PlanRequest request = {.tokens = pieces ? int64_t{ranks} << 18 : 1 << 14,
                                   .cached_tokens = pieces ? 0 : 1 << 15,
                                   .ranks = ranks};
      const int64_t kept_tokens = pieces ? request.tokens : request.cached_tokens;
      const int64_t kept = model.layers * model.kv_bytes(kept_tokens) / std::max(1, ranks / 8);
      for (const int64_t room : {int64_t{0}, kept, kept - 1}) {  // 0: not bounded
        gpus.host_memory_bytes = room;
        const auto plan = PlanOnGpus(model, gpus, request, kGranule);
        const bool enough = room != kept - 1;
        if (!plan.ok()) {
          EXPECT_FALSE(enough);
          EXPECT_TRUE(absl::IsFailedPrecondition(plan.status())) << plan.status();
          EXPECT_THAT(std::string(plan.status().message()), HasSubstr("do not fit the nodes' hosts"));
          continue;
        }
        // GPUs that share the weights may have room for the whole prompt.
        EXPECT_TRUE(enough || (pieces && ranks > 1));
        const WeightModeBytes* resident = Find(*plan, WeightMode::kResident);
        EXPECT_EQ(resident->host_bytes, kept);
        EXPECT_EQ(resident->fits, enough);
        EXPECT_EQ(resident->seconds > 0, enough);
      }
    }
  }
}

// Their share is of what tokens do in experts alone; a dense model's products are as fast as they are.
TEST(GpuPlan, ProductsOfExpertsHaveARateOfTheirOwn) {
  std::mt19937_64 random(TestSeed());
  ModelShape model = Model(random);
  const PlanRequest request = {.tokens = 20'000, .ranks = 4};
  GpuCluster gpus = Cluster(int64_t{1} << 42);
  gpus.experts_gemm_share = 0.25;
  const auto dense = PlanOnGpus(model, gpus, request, kGranule);
  ASSERT_TRUE(dense.ok()) << dense.status();
  EXPECT_EQ(dense->speed.gemm_flops_per_second, 650e12);

  model.experts = {.count = 16, .used = 3, .width = 512, .shared_width = 256};
  model.kinds = {{{}, 5}, {{.mlp = MlpKind::kExperts}, model.layers - 5}};
  const auto hidden = static_cast<double>(model.hidden);
  const double attention = 2 * hidden * (2 * 4096 + 2 * 1024);  // of q, o, k and v
  const double expert_layers = model.layers - 5;
  const double others = model.layers * attention + 5 * 6 * hidden * static_cast<double>(model.intermediate) +
                        expert_layers * (2 * hidden * 16 + 6 * hidden * 256);
  const double experts = expert_layers * 3 * 6 * hidden * 512;
  double before = 0;
  for (const double share : {1.0, 0.5, 0.25}) {
    gpus.experts_gemm_share = share;
    const auto plan = PlanOnGpus(model, gpus, request, kGranule);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_NEAR((others + experts) / plan->speed.gemm_flops_per_second, (others + experts / share) / 650e12,
                1e-9 * others / 650e12);
    EXPECT_GT(plan->choice.plan.predicted.compute_seconds, before);
    before = plan->choice.plan.predicted.compute_seconds;
  }
}

TEST(GpuPlan, SaysWhatTheWeightsWouldTakeWhereNothingFits) {
  std::mt19937_64 random(TestSeed());
  ModelShape model = Model(random);
  const auto plan = PlanOnGpus(model, Cluster(1 << 20), {.tokens = 1000, .ranks = 8}, kGranule);
  EXPECT_TRUE(absl::IsFailedPrecondition(plan.status())) << plan.status();
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("do not fit 8 GPUs of 0.0 GB"));
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("resident"));
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("--ranks more, or GPUs with more memory"));
  const auto bad = PlanOnGpus(model, Cluster(int64_t{1} << 42), {.tokens = 0, .ranks = 8}, kGranule);
  EXPECT_TRUE(absl::IsInvalidArgument(bad.status())) << bad.status();
}

}  // namespace
}  // namespace meshfill
