// The engine's contract besides its arithmetic: errors, cancel, progress, and that the next request is
// served.
#include "engine/prefill_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <thread>

#include "engine/embedded_engine.h"
#include "engine/kv/kv_prompt.h"
#include "engine/model/make_model.h"
#include "engine/plan/speed_correction.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/stop_after_a_layer.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

using ::testing::TempDir;

class PrefillEngineTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = TempDir() + "/prefill_engine_model/";  // with a slash: the name must survive it
    std::filesystem::remove_all(folder_);
    const absl::Status status = MakeModel({.layers = 3,
                                           .hidden = 64,
                                           .intermediate = 64,
                                           .q_heads = 4,
                                           .kv_heads = 2,
                                           .head_dim = 16,
                                           .vocab = 100,
                                           .context_tokens = 65536},
                                          folder_);
    ASSERT_TRUE(status.ok()) << status;
  }

  static std::unique_ptr<PrefillEngine> Load(int64_t memory_budget_bytes = 0,
                                             std::optional<int64_t> kv_memory_bytes = std::nullopt) {
    auto engine = LoadEmbeddedEngine({.model_path = folder_,
                                      .ranks = 4,
                                      .peak_flops = 1e12,
                                      .memory_budget_bytes = memory_budget_bytes,
                                      .kv_memory_bytes = kv_memory_bytes,
                                      .speed = PoolSpeed()});
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? *std::move(engine) : nullptr;
  }

  static void ExpectServes(PrefillEngine& engine) {
    const std::vector<uint32_t> prompt(50, 7);
    const auto result = RunPrefill(engine, {prompt, {}});
    EXPECT_TRUE(result.ok()) << result.status();
  }

  static std::string folder_;
};
std::string PrefillEngineTest::folder_;

constexpr std::chrono::milliseconds kSoon(500);

double Seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

class RecordingObserver : public PrefillObserver {
 public:
  void OnLayerDone(int layers_done, int layers) override {
    layers_done_.push_back(layers_done);
    EXPECT_EQ(layers, 3);
  }
  std::vector<int> layers_done_;
};

TEST_F(PrefillEngineTest, ReportsProgressAndResult) {
  const auto engine = Load();
  EXPECT_EQ(engine->model_name(), "prefill_engine_model");
  EXPECT_EQ(engine->ranks(), 4);
  RecordingObserver observer;
  const std::vector<uint32_t> prompt(777, 3);
  const auto result = RunPrefill(*engine, {prompt, {.tile = Tile{2, 2}, .top_k = 5}}, &observer);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(observer.layers_done_, (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(result->plan.tile, (Tile{2, 2}));
  EXPECT_EQ(result->logits.size(), 100u);
  ASSERT_EQ(result->top.size(), 5u);
  EXPECT_EQ(result->top[0].logit, *std::max_element(result->logits.begin(), result->logits.end()));
  EXPECT_TRUE(std::is_sorted(result->top.begin(), result->top.end(),
                             [](const TokenLogit& a, const TokenLogit& b) { return a.logit > b.logit; }));
  EXPECT_GT(result->prefill_seconds, 0);
  EXPECT_GE(result->prefill_seconds, result->attention_seconds);
  EXPECT_GE(result->attention_seconds, result->comm_wait_seconds);
  EXPECT_GT(result->mfu, 0);
}

TEST_F(PrefillEngineTest, RefusesBadRequestsByNameAndServesTheNext) {
  const auto engine = Load();
  const std::vector<uint32_t> good(50, 7);
  std::vector<uint32_t> outside = good;
  outside[17] = 100;
  const std::vector<uint32_t> too_long(65537, 1);
  const struct {
    std::vector<uint32_t> prompt;
    PrefillOptions options;
    absl::StatusCode code;
    const char* says;
  } cases[] = {
      {{}, {}, absl::StatusCode::kInvalidArgument, "token"},
      {outside, {}, absl::StatusCode::kInvalidArgument, "token 17 has id 100"},
      {too_long, {}, absl::StatusCode::kOutOfRange, "65536"},
      {good, {.tile = Tile{3, 2}}, absl::StatusCode::kInvalidArgument, "3x2"},
      {good, {.tile = Tile{0, 4}}, absl::StatusCode::kInvalidArgument, "0x4"},
      {good, {.stripe = 0}, absl::StatusCode::kInvalidArgument, "stripe"},
      {good, {.top_k = 0}, absl::StatusCode::kInvalidArgument, "top_k"},
      {good, {.top_k = 101}, absl::StatusCode::kInvalidArgument, "top_k"},
  };
  for (const auto& bad : cases) {
    const auto result = RunPrefill(*engine, {bad.prompt, bad.options});
    EXPECT_EQ(result.status().code(), bad.code) << result.status();
    EXPECT_NE(result.status().message().find(bad.says), std::string::npos) << result.status();
    ExpectServes(*engine);
  }
}

TEST_F(PrefillEngineTest, RefusesWhatDoesNotFitInMemory) {
  const auto engine = Load(/*memory_budget_bytes=*/2 << 20);
  const std::vector<uint32_t> prompt(60000, 1);
  const auto result = RunPrefill(*engine, {prompt, {}});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
  ExpectServes(*engine);
}

TEST_F(PrefillEngineTest, StopsSoonAfterAStopAndServesTheNext) {
  const auto engine = Load();
  const std::vector<uint32_t> prompt(30000, 1);
  StopAfterALayer observer;
  const auto result = observer.Run(*engine, {prompt, {}});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kCancelled) << result.status();
  EXPECT_EQ(observer.layers_done(), std::vector<int>{1});
  ExpectServes(*engine);
}

TEST_F(PrefillEngineTest, StopsInTheMiddleOfALayer) {
  const auto engine = Load();
  const std::vector<uint32_t> prompt(60000, 1);
  auto least = std::chrono::steady_clock::duration::max();  // the machine may stand still in any attempt
  for (int attempt = 0; attempt < 5 && least >= kSoon; ++attempt) {
    auto prefill = engine->Start({prompt, {}}, nullptr);
    ASSERT_TRUE(prefill.ok()) << prefill.status();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const auto stopped_at = std::chrono::steady_clock::now();
    (*prefill)->Stop();
    const auto result = (*prefill)->Wait();
    least = std::min(least, std::chrono::steady_clock::now() - stopped_at);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kCancelled) << result.status();
  }
  EXPECT_LT(least, kSoon);
  ExpectServes(*engine);
}

TEST_F(PrefillEngineTest, HoldsAsManyAtOnceAsItsCapacitySays) {
  const auto engine = Load();
  const std::vector<uint32_t> prompt(2000, 1);
  ASSERT_GT(engine->capacity(), 1);
  std::vector<std::unique_ptr<Prefill>> live;
  for (int i = 0; i < engine->capacity(); ++i) {
    auto prefill = engine->Start({prompt, {}}, nullptr);
    ASSERT_TRUE(prefill.ok()) << prefill.status();
    (*prefill)->Pause();
    live.push_back(*std::move(prefill));
  }
  const auto more = RunPrefill(*engine, {prompt, {}});
  EXPECT_EQ(more.status().code(), absl::StatusCode::kResourceExhausted) << more.status();
  live.pop_back();  // stops it
  ExpectServes(*engine);
}

TEST_F(PrefillEngineTest, AdmitsWhatFitsBesideThoseThatLive) {
  constexpr int64_t kBudget = 20 << 20;
  const std::vector<uint32_t> prompt(4000, 1);
  const auto engine = Load(kBudget);
  const auto choice = engine->MakePlan(4000, {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  const int64_t fit = kBudget * 7 / 8 / choice->plan.predicted.run_bytes;  // the rest is left to short ones
  ASSERT_TRUE(fit > 1 && fit < engine->capacity()) << fit << " fit";
  std::vector<std::unique_ptr<Prefill>> live;
  for (int i = 0; i < fit; ++i) {
    auto prefill = engine->Start({prompt, {}}, nullptr);
    ASSERT_TRUE(prefill.ok()) << prefill.status();
    (*prefill)->Pause();
    live.push_back(*std::move(prefill));
  }
  const auto more = RunPrefill(*engine, {prompt, {}});
  EXPECT_EQ(more.status().code(), absl::StatusCode::kResourceExhausted) << more.status();
  live.pop_back();
  const auto after = RunPrefill(*engine, {prompt, {}});
  EXPECT_TRUE(after.ok()) << after.status();
}

// Long ones together leave room for it, whether one of them takes all that it may, in pieces, or several do.
TEST_F(PrefillEngineTest, AShortPromptBeginsBesideLongOnesThatHaveAllTheyMay) {
  const std::vector<uint32_t> shorter(100, 3);
  for (const int64_t tokens : {60000, 3000}) {
    const std::vector<uint32_t> prompt(static_cast<size_t>(tokens), 1);
    const auto engine = Load(/*memory_budget_bytes=*/16 << 20, /*kv_memory_bytes=*/64 << 20);
    const auto choice = engine->MakePlan(tokens, {});
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(choice->pieces.size() > 1, tokens == 60000);
    const auto alone = RunPrefill(*engine, {shorter, {}});
    ASSERT_TRUE(alone.ok()) << alone.status();
    const int64_t room = engine->pack_room().rank_bytes;
    std::vector<std::unique_ptr<Prefill>> live;
    for (;;) {
      auto prefill = engine->Start({prompt, {}}, nullptr);
      if (!prefill.ok()) {
        EXPECT_EQ(prefill.status().code(), absl::StatusCode::kResourceExhausted) << prefill.status();
        break;
      }
      (*prefill)->Pause();
      live.push_back(*std::move(prefill));
    }
    EXPECT_LT(std::ssize(live), engine->capacity()) << "places, not memory, have run out";
    for (const int submeshes : {1, 2, 4}) {
      const auto beside = RunPrefill(*engine, {shorter, {.submeshes = submeshes}});
      ASSERT_TRUE(beside.ok()) << beside.status() << " on one of " << submeshes;
    }
    const auto beside = RunPrefill(*engine, {shorter, {}});
    EXPECT_EQ(beside->logits, alone->logits);
    if (engine->pack_room().ranks > 0) {
      EXPECT_LT(engine->pack_room().rank_bytes, room);
      EXPECT_GT(engine->pack_room().rank_bytes, 0) << "short ones may share a pass, too";
    }
    live.clear();
    EXPECT_EQ(engine->pack_room().rank_bytes, room);
  }
}

// What fits the memory only whole has all of it; what fits in pieces has them, unless others hold the room
// for the K and V between them.
TEST_F(PrefillEngineTest, LeavesNoRoomToShortOnesWhereThatWouldKeepAPromptOut) {
  constexpr int64_t kTokens = 20000;
  const PrefillOptions options = {.tile = Tile{1, 4}};
  const int64_t needed = Load()->MakePlan(kTokens, options)->plan.predicted.run_bytes;
  const std::vector<uint32_t> prompt(kTokens, 1);
  EXPECT_TRUE(Load(needed, /*kv_memory_bytes=*/1000)->MakePlan(kTokens, options)->pieces.empty());
  const auto engine = Load(needed, /*kv_memory_bytes=*/64 << 20);
  EXPECT_GT(engine->MakePlan(kTokens, options)->pieces.size(), 1u);
  const int64_t token_bytes = engine->model().layers * engine->model().kv_bytes(1);
  const auto lease = engine->kv_store()->Admit(
      std::make_shared<KvPrompt>(KvShapeOf(engine->model()), (64 << 20) / token_bytes - kTokens + 1), "",
      absl::Hours(1));
  ASSERT_TRUE(lease.ok()) << lease.status();
  const auto whole = RunPrefill(*engine, {prompt, options});
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->pieces, 1);
}

// Pauses it at moments that differ from run to run, and runs others meanwhile.
TEST_F(PrefillEngineTest, PausesChangeNoBitAndAreNoPartOfItsSeconds) {
  std::mt19937_64 random(TestSeed());
  const auto engine = Load();
  const std::vector<uint32_t> shorter(300, 5);
  for (const int64_t tokens : {10000, 777}) {
    std::vector<uint32_t> prompt(tokens);
    for (uint32_t& id : prompt) id = static_cast<uint32_t>(random() % 100);
    const auto alone = RunPrefill(*engine, {prompt, {}});
    const auto shorter_alone = RunPrefill(*engine, {shorter, {}});
    ASSERT_TRUE(alone.ok() && shorter_alone.ok()) << alone.status() << shorter_alone.status();
    const auto begin = std::chrono::steady_clock::now();
    auto prefill = engine->Start({prompt, {.keep_timeline = true}}, nullptr);
    ASSERT_TRUE(prefill.ok()) << prefill.status();
    double others_seconds = 0;
    for (int pause = 0; pause < 5; ++pause) {
      std::this_thread::sleep_for(std::chrono::microseconds(Draw(random, 0, 20000)));
      (*prefill)->Pause();
      const auto other_begin = std::chrono::steady_clock::now();
      const auto other = RunPrefill(*engine, {shorter, {}});
      ASSERT_TRUE(other.ok()) << other.status();
      EXPECT_EQ(other->logits, shorter_alone->logits);
      others_seconds += Seconds(std::chrono::steady_clock::now() - other_begin);
      (*prefill)->Resume();
    }
    const auto result = (*prefill)->Wait();
    const double wall_seconds = Seconds(std::chrono::steady_clock::now() - begin);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->logits, alone->logits) << tokens << " tokens";
    EXPECT_GE(result->paused_seconds, others_seconds);
    EXPECT_LE(result->prefill_seconds, wall_seconds - others_seconds);
    EXPECT_GE(result->prefill_seconds, result->attention_seconds);
    EXPECT_GE(result->attention_seconds, result->comm_wait_seconds);
    for (const RankStats& rank : result->ranks) EXPECT_LE(rank.total_seconds, result->prefill_seconds);
    for (const Span& span : result->timeline->spans) EXPECT_LE(span.end_seconds, result->prefill_seconds);
  }
}

TEST_F(PrefillEngineTest, StandsStillWhilePausedAndStopsAtOnce) {
  const auto engine = Load();
  const std::vector<uint32_t> prompt(60000, 1);
  auto least = std::chrono::steady_clock::duration::max();
  for (int attempt = 0; attempt < 5 && least >= kSoon; ++attempt) {
    RecordingObserver observer;
    auto prefill = engine->Start({prompt, {}}, &observer);
    ASSERT_TRUE(prefill.ok()) << prefill.status();
    (*prefill)->Pause();
    ExpectServes(*engine);
    ExpectServes(*engine);
    EXPECT_TRUE(observer.layers_done_.empty());
    const auto stopped_at = std::chrono::steady_clock::now();
    (*prefill)->Stop();
    EXPECT_EQ((*prefill)->Wait().status().code(), absl::StatusCode::kCancelled);
    least = std::min(least, std::chrono::steady_clock::now() - stopped_at);
  }
  EXPECT_LT(least, kSoon);
}

// The memory that is left holds no stack of a thread.
TEST_F(PrefillEngineTest, SaysWhichRankGotNoThreadAndServesTheNext) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "not run: a sanitizer takes more address space than a limit leaves";
#endif
  auto engine = LoadEmbeddedEngine({.model_path = folder_, .ranks = 16, .peak_flops = 1e12});
  ASSERT_TRUE(engine.ok()) << engine.status();
  const std::vector<uint32_t> prompt(50, 7);
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  rlimit tight = before;
  tight.rlim_cur = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE) + (4 << 20));
  ASSERT_EQ(setrlimit(RLIMIT_AS, &tight), 0);
  const auto result = RunPrefill(**engine, {prompt, {}});
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kResourceExhausted) << result.status();
  EXPECT_THAT(std::string(result.status().message()), testing::HasSubstr("no thread could be started"));
  ExpectServes(**engine);
}

// Kept speeds that are a thirtieth of the real ones: predictions are corrected at once, and the file loses
// the speeds once they have been wrong for long.
TEST_F(PrefillEngineTest, DropsAKeptSpeedThatStaysWrong) {
  const TempFolder folder;
  const std::string path = folder / "speed.json";
  std::vector<std::string> warnings;
  const auto hear = [&](const std::string& note, bool warning) {
    if (warning) warnings.push_back(note);
  };
  const auto load = [&] {
    return *LoadEmbeddedEngine(
        {.model_path = folder_, .ranks = 1, .peak_flops = 1e12, .speed_profile_path = path}, hear);
  };
  const auto kept = [&] { return nlohmann::json::parse(std::ifstream(path)); };
  load();
  nlohmann::json wrong = kept();
  ASSERT_EQ(wrong["pools"].size(), 1u);
  for (const auto& [name, value] : wrong["pools"][0]["speed"].items()) {
    if (name.find("per_second") != std::string::npos) value = value.get<double>() / 30;
  }
  std::ofstream(path) << wrong;
  const auto engine = load();
  const std::vector<uint32_t> prompt(1000, 7);
  for (int i = 0; i < SpeedCorrection::kWrongPrefills; ++i) {
    if (i % 64 == 0) {
      EXPECT_EQ(kept(), wrong) << "after " << i << " prefills";
    }
    ASSERT_TRUE(RunPrefill(*engine, {prompt, {}}).ok());
  }
  for (int i = 0; i < 64 && !kept()["pools"].empty(); ++i) {  // the first ones said too little
    EXPECT_TRUE(warnings.empty());
    ASSERT_TRUE(RunPrefill(*engine, {prompt, {}}).ok());
  }
  EXPECT_TRUE(kept()["pools"].empty());
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0], testing::MatchesRegex(
                               "the pool's speed is wrong: products take [0-9.]+ and attention [0-9.]+ times "
                               "as long as it says, for 256 prefills; it is dropped from " +
                               path + ", and the next start measures it"));
  // Prompts of one length do not tell the two apart.
  EXPECT_THAT(warnings[0], testing::ContainsRegex("take 0[.]|attention 0[.]"));
}

TEST_F(PrefillEngineTest, RefusesBadOptionsAndFolders) {
  EXPECT_EQ(LoadEmbeddedEngine({.model_path = folder_, .ranks = 0}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LoadEmbeddedEngine({.model_path = folder_, .ranks = 65}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LoadEmbeddedEngine({.model_path = TempDir() + "/no_such_model"}).status().code(),
            absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace meshfill
