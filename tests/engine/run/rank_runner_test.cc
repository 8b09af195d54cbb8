#include "engine/run/rank_runner.h"

#include <string>
#include <vector>

#include "engine/comm/in_process.h"
#include "engine/kv/kv_prompt.h"
#include "engine/model/make_model.h"
#include "engine/plan/planner.h"
#include "gtest/gtest.h"
#include "tests/engine/run/watched_stream.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

// The slices are the plan's, whatever device gave it its figure, and the memory is what the plan states for
// them.
TEST(RunRank, TakesTheSlicesAndTheMemoryOfItsPlan) {
  const TempFolder folder;
  const std::string path = folder / "model";
  ASSERT_TRUE(MakeModel({.layers = 2,
                         .hidden = 32,
                         .intermediate = 96,
                         .q_heads = 2,
                         .kv_heads = 1,
                         .head_dim = 16,
                         .vocab = 40,
                         .dtype = DType::kF32},
                        path)
                  .ok());
  const std::unique_ptr<Device> device = MakeReferenceDevice(DType::kF32);
  const auto model = Model::Load(path, DType::kF32, [&](const ModelShape&) { return device.get(); });
  ASSERT_TRUE(model.ok()) << model.status();
  const std::vector<uint32_t> prompt(300, 7);
  std::vector<float> logits;
  for (const int64_t slice_tokens : {1024, 100, 7, 1}) {
    const PoolSpeed speed = {.slice_tokens = slice_tokens};
    const auto choice = MakePlan((*model)->shape(), speed, {.tokens = 300});
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(choice->plan.slice_tokens, slice_tokens);
    WatchedStream stream(DType::kF32);
    Stream* const only = &stream;
    const auto communicators = MakeInProcessCommunicators({&only, 1});
    const auto output = RunRank({.plan = choice->plan,
                                 .model = **model,
                                 .rank = 0,
                                 .ids = prompt,
                                 .stream = stream,
                                 .communicator = *communicators.front(),
                                 .wait_timeout = absl::Seconds(10),
                                 .on_layer_done = [](int) {},
                                 .kv = nullptr});
    ASSERT_TRUE(output.ok()) << output.status();
    EXPECT_EQ(stream.most_product_tokens, std::min<int64_t>(slice_tokens, 300));
    const int64_t rope_tables = 300 * 16 * 4;  // in the rank's own memory, where a device reads the host's
    EXPECT_EQ(stream.memory.peak_bytes() + rope_tables, choice->plan.predicted.peak_bytes);
    if (logits.empty()) logits = output->logits;
    EXPECT_EQ(output->logits, logits);  // the reference's: a product's rows do not know of each other
  }
}

// One rank that computes the whole prompt, keeps K and V, and computes its end again behind them: in the
// memory of its plan, with the same logits.
TEST(RunRank, ContinuesBehindAPrefix) {
  const TempFolder folder;
  const std::string path = folder / "model";
  ASSERT_TRUE(MakeModel({.layers = 2,
                         .hidden = 32,
                         .intermediate = 96,
                         .q_heads = 2,
                         .kv_heads = 2,
                         .head_dim = 16,
                         .vocab = 40,
                         .dtype = DType::kF32},
                        path)
                  .ok());
  const std::unique_ptr<Device> device = MakeReferenceDevice(DType::kF32);
  const auto model = Model::Load(path, DType::kF32, [&](const ModelShape&) { return device.get(); });
  ASSERT_TRUE(model.ok()) << model.status();
  std::vector<uint32_t> prompt(300);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<uint32_t>(i * i % 40);
  KvPrompt kept(KvShapeOf((*model)->shape()), 300);
  const auto run = [&](int64_t cached_tokens, const KvSlabs* prefix, KvSink* sink, int64_t& spare_bytes,
                       bool wants_logits = true) {
    const auto choice = MakePlan((*model)->shape(), {.slice_tokens = 32},
                                 {.tokens = 300 - cached_tokens, .cached_tokens = cached_tokens});
    WatchedStream stream(DType::kF32);
    Stream* const only = &stream;
    const auto communicators = MakeInProcessCommunicators({&only, 1});
    auto output = RunRank({.plan = choice->plan,
                           .model = **model,
                           .rank = 0,
                           .ids = std::span<const uint32_t>(prompt).subspan(cached_tokens),
                           .stream = stream,
                           .communicator = *communicators.front(),
                           .wait_timeout = absl::Seconds(10),
                           .on_layer_done = [](int) {},
                           .kv = sink,
                           .prefix = prefix,
                           .wants_logits = wants_logits});
    const int64_t rope_tables = (300 - cached_tokens) * 16 * 4;
    spare_bytes = choice->plan.predicted.peak_bytes - stream.memory.peak_bytes() - rope_tables;
    return output;
  };
  int64_t spare_bytes = 0;
  kept.Begin(TokenLayout::Make(LayoutKind::kStriped, 1, 300, 64).value());
  const auto whole = run(0, nullptr, &kept, spare_bytes);
  ASSERT_TRUE(whole.ok()) << whole.status();
  for (const int64_t cached : {64, 128, 192}) {
    const KvSlabs prefix = FirstTokens(*kept.Layer(1), cached);
    const auto behind = run(cached, &prefix, nullptr, spare_bytes);
    ASSERT_TRUE(behind.ok()) << behind.status();
    EXPECT_EQ(spare_bytes, 0) << cached;
    for (int token = 0; token < 40; ++token) {
      EXPECT_NEAR(behind->logits[token], whole->logits[token], 1e-4) << cached;
    }
  }
  const KvSlabs prefix = FirstTokens(*kept.Layer(1), 128);
  EXPECT_TRUE(run(128, &prefix, nullptr, spare_bytes, /*wants_logits=*/false)->logits.empty());
  EXPECT_TRUE(absl::IsInternal(run(64, &prefix, nullptr, spare_bytes).status()));  // other tokens
  EXPECT_TRUE(absl::IsInternal(run(64, nullptr, nullptr, spare_bytes).status()));
  const KvSlabs odd = FirstTokens(*kept.Layer(1), 100);
  EXPECT_TRUE(absl::IsInternal(run(100, &odd, nullptr, spare_bytes).status()));  // no whole stripes
}

}  // namespace
}  // namespace meshfill
