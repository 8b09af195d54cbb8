#include "engine/speed/pool_profile.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

constexpr ModelShape kModel{.layers = 2,
                            .hidden = 64,
                            .intermediate = 128,
                            .q_heads = 4,
                            .kv_heads = 2,
                            .head_dim = 16,
                            .vocab = 100,
                            .context_tokens = 4096,
                            .dtype = DType::kF32};

PoolSpeed SpeedOf(double gemm_flops_per_second) {
  PoolSpeed speed;
  speed.gemm_flops_per_second = gemm_flops_per_second;
  speed.slice_seconds = 1e-4;
  speed.slice_tokens = 4096;
  speed.lm_head_bytes_per_second = 5e9;
  return speed;
}

std::string Contents(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

TEST(PoolProfile, KeepsTheSpeedOfEachPool) {
  const TempFolder folder;
  const std::string path = folder / "new/folder/speed.json";
  EXPECT_EQ(ReadPoolProfile(path, "a").value(), std::nullopt);
  ASSERT_TRUE(StorePoolProfile(path, "a", SpeedOf(1e9)).ok());
  ASSERT_TRUE(StorePoolProfile(path, "b", SpeedOf(2e9)).ok());
  ASSERT_TRUE(StorePoolProfile(path, "a", SpeedOf(3e9)).ok());
  EXPECT_EQ(ReadPoolProfile(path, "a").value(), SpeedOf(3e9));
  EXPECT_EQ(ReadPoolProfile(path, "b").value(), SpeedOf(2e9));
  EXPECT_EQ(ReadPoolProfile(path, "c").value(), std::nullopt);
}

TEST(PoolProfile, ForgetsThePoolsThatWereStoredFirst) {
  const TempFolder folder;
  const std::string path = folder / "speed.json";
  for (int pool = 0; pool <= kMaxKeptPools; ++pool) {
    ASSERT_TRUE(StorePoolProfile(path, std::to_string(pool), SpeedOf(1e9 + pool)).ok());
  }
  EXPECT_EQ(ReadPoolProfile(path, "0").value(), std::nullopt);
  EXPECT_EQ(ReadPoolProfile(path, "1").value(), SpeedOf(1e9 + 1));
  EXPECT_LT(Contents(path).size(), static_cast<size_t>(kMaxPoolProfileBytes));
}

TEST(PoolProfile, SaysWhatIsWrongWithAFileAndReplacesIt) {
  const TempFolder folder;
  const std::string path = folder / "speed.json";
  ASSERT_TRUE(StorePoolProfile(path, "a", SpeedOf(1e9)).ok());
  const std::string good = Contents(path);
  const auto changed = [&good](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  const std::pair<std::string, std::string> cases[] = {
      {"", "no JSON object"},
      {good.substr(0, good.size() / 2), "no JSON object"},
      {"[]", "no JSON object"},
      {changed("\"version\": 1", "\"version\": 99"), "version"},
      {changed("\"slice_seconds\"", "\"slices\""), "slice_seconds"},
      {changed("1000000000.0", "-1.0"), "gemm_flops_per_second"},
      {changed("1000000000.0", "0.0"), "gemm_flops_per_second"},
      {changed("\"slice_tokens\": 4096", "\"slice_tokens\": -1"), "slice_tokens is -1"},
      {changed("\"lone_rank_speedup\": 1.0", "\"lone_rank_speedup\": 0.5"), "lone_rank_speedup is 0.5"},
      {changed("1000000000.0", "\"fast\""), "gemm_flops_per_second"},
      {changed("\"slice_tokens\": 4096", "\"slice_tokens\": 4096.5"), "no whole number slice_tokens"},
      {changed("\"slice_tokens\"", "\"slices\""), "no whole number slice_tokens"},
      {changed("\"version\"", "\"edition\""), "version"},
      {changed("\"pools\"", "\"pool\""), "no list of pools"},
      {R"({"version": 1, "pools": {}})", "no list of pools"},
      {R"({"version": 1, "pools": [3]})", "a pool without its key or its speed"},
      {R"({"version": 1, "pools": [{"speed": {}}]})", "a pool without its key or its speed"},
      {R"({"version": 1, "pools": [{"pool": 1, "speed": {}}]})", "a pool without its key or its speed"},
      {R"({"version": 1, "pools": [{"pool": "a"}]})", "a pool without its key or its speed"},
      {R"({"version": 1, "pools": [{"pool": "a", "speed": 1}]})", "a pool without its key or its speed"},
      {std::string(static_cast<size_t>(kMaxPoolProfileBytes) + 1, ' '), "bytes"},
  };
  for (const auto& [text, message] : cases) {
    std::ofstream(path) << text;
    const absl::Status status = ReadPoolProfile(path, "a").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << message;
    EXPECT_NE(status.message().find(message), std::string::npos) << status;
    EXPECT_NE(status.message().find(path), std::string::npos) << status;
    ASSERT_TRUE(StorePoolProfile(path, "a", SpeedOf(2e9)).ok());
    EXPECT_EQ(ReadPoolProfile(path, "a").value(), SpeedOf(2e9));
  }
}

LayerForm FormWithWide(LayerPart part) {
  LayerForm form;
  form.wide.Add(part);
  return form;
}

TEST(PoolProfile, AnotherPoolHasAnotherKey) {
  const std::string key = PoolKey("cpu/x", kModel, "4 ranks");
  EXPECT_EQ(PoolKey("cpu/x", kModel, "4 ranks"), key);
  using M = ModelShape;
  void (*const changes[])(ModelShape&) = {
      [](M& m) { ++m.layers; },
      [](M& m) { m.hidden *= 2; },
      [](M& m) { m.intermediate *= 2; },
      [](M& m) { m.q_heads *= 2; },
      [](M& m) { m.kv_heads *= 2; },
      [](M& m) { m.head_dim *= 2; },
      [](M& m) { m.vocab *= 2; },
      [](M& m) { m.dtype = DType::kBf16; },
      [](M& m) { m.post_norms = true; },
      [](M& m) { m.activation = Activation::kGelu; },
      [](M& m) { m.fp8 = {.rows = 128, .columns = 128}; },
      [](M& m) { m.fp8.columns = 64; },
      [](M& m) { m.kinds = {{.form = FormWithWide(LayerPart::kO), .layers = m.layers}}; },
      [](M& m) { m.kinds = {{.form = FormWithWide(LayerPart::kQkv), .layers = m.layers}}; },
      [](M& m) { m.fp4_experts = true; },
      [](M& m) { m.experts = {.count = 8, .used = 2, .width = 64, .shared_width = 32}; },
      [](M& m) { m.experts.count = 16; },
      [](M& m) { m.experts.used = 4; },
      [](M& m) { m.experts.width = 128; },
      [](M& m) { m.experts.shared_width = 64; }};
  ModelShape model = kModel;
  std::set<std::string> keys = {key};
  for (const auto change : changes) {
    change(model);
    EXPECT_TRUE(keys.insert(PoolKey("cpu/x", model, "4 ranks")).second) << "change " << keys.size();
  }
  EXPECT_NE(PoolKey("cpu/y", kModel, "4 ranks"), key);
  EXPECT_NE(PoolKey("cpu/x", kModel, "2 ranks"), key);
}

TEST(PoolProfile, APoolIsMeasuredOnce) {
  const TempFolder folder;
  const std::string path = folder / "speed.json";
  int measurements = 0;
  const auto measure = [&]() -> absl::StatusOr<PoolSpeed> { return SpeedOf(1e9 * ++measurements); };
  const auto first = KeptPoolSpeed(path, "a", false, measure);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = KeptPoolSpeed(path, "a", false, measure);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(*second, *first);
  EXPECT_EQ(measurements, 1);
  EXPECT_TRUE(KeptPoolSpeed(path, "b", false, measure).ok());
  EXPECT_EQ(measurements, 2);
  EXPECT_TRUE(KeptPoolSpeed("", "a", false, measure).ok());  // nothing is kept
  EXPECT_EQ(measurements, 3);
}

TEST(PoolProfile, APoolIsMeasuredAnewWhereThatIsWanted) {
  const TempFolder folder;
  const std::string path = folder / "speed.json";
  ASSERT_TRUE(StorePoolProfile(path, "a", SpeedOf(1e9)).ok());
  ASSERT_TRUE(StorePoolProfile(path, "b", SpeedOf(2e9)).ok());
  const auto measure = []() -> absl::StatusOr<PoolSpeed> { return SpeedOf(3e9); };
  EXPECT_EQ(*KeptPoolSpeed(path, "a", /*anew=*/true, measure), SpeedOf(3e9));
  EXPECT_EQ(ReadPoolProfile(path, "a").value(), SpeedOf(3e9));
  EXPECT_EQ(ReadPoolProfile(path, "b").value(), SpeedOf(2e9));
}

TEST(PoolProfile, AForgottenSpeedIsMeasuredAtTheNextStart) {
  const TempFolder folder;
  const std::string path = folder / "speed.json";
  EXPECT_TRUE(ForgetPoolSpeed(path, "a").ok()) << "there is no file";
  EXPECT_FALSE(std::filesystem::exists(path));
  ASSERT_TRUE(StorePoolProfile(path, "a", SpeedOf(1e9)).ok());
  ASSERT_TRUE(StorePoolProfile(path, "b", SpeedOf(2e9)).ok());
  ASSERT_TRUE(ForgetPoolSpeed(path, "a").ok());
  EXPECT_EQ(ReadPoolProfile(path, "a").value(), std::nullopt);
  EXPECT_EQ(ReadPoolProfile(path, "b").value(), SpeedOf(2e9));
}

TEST(PoolProfile, LeavesNothingBesideTheFile) {
  const TempFolder folder;
  const auto files = [&] {
    return std::distance(std::filesystem::directory_iterator(folder.path()),
                         std::filesystem::directory_iterator());
  };
  ASSERT_TRUE(StorePoolProfile(folder / "speed.json", "a", SpeedOf(1e9)).ok());
  EXPECT_EQ(files(), 1);
  std::filesystem::create_directories(std::filesystem::path(folder / "taken.json") / "x");
  EXPECT_EQ(StorePoolProfile(folder / "taken.json", "a", SpeedOf(1e9)).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(files(), 2) << "no draft of what cannot be replaced";
}

TEST(PoolProfile, WhatCannotBeMeasuredIsNotKept) {
  const TempFolder folder;
  const std::string path = folder / "speed.json";
  for (const std::string& file : {path, std::string()}) {
    const auto speed = KeptPoolSpeed(file, "a", false, []() -> absl::StatusOr<PoolSpeed> {
      return absl::InternalError("the device is lost");
    });
    EXPECT_EQ(speed.status().code(), absl::StatusCode::kInternal);
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(PoolProfile, ASpeedHasTheDateOfItsMeasurement) {
  const TempFolder folder;
  const std::string path = folder / "speed.json";
  const absl::Time before = absl::Now() - absl::Seconds(1);  // dates have whole seconds
  ASSERT_TRUE(StorePoolProfile(path, "a", SpeedOf(1e9)).ok());
  const auto pools = nlohmann::json::parse(Contents(path)).at("pools");
  absl::Time measured;
  ASSERT_TRUE(
      absl::ParseTime(absl::RFC3339_full, pools.at(0).at("measured").get<std::string>(), &measured, nullptr));
  EXPECT_GE(measured, before);
  EXPECT_LE(measured, absl::Now());
}

TEST(PoolProfile, TheLargestPeakIsKept) {
  const TempFolder folder;
  const std::string path = folder / "speed.json";
  EXPECT_EQ(KeptPeakFlops(path, "a", false, 5e11), 5e11) << "there is no file";
  EXPECT_FALSE(std::filesystem::exists(path));
  ASSERT_TRUE(StorePoolProfile(path, "a", SpeedOf(1e9)).ok());
  ASSERT_TRUE(StorePoolProfile(path, "b", SpeedOf(2e9)).ok());
  EXPECT_EQ(KeptPeakFlops(path, "a", false, 4e11), 4e11);
  EXPECT_EQ(KeptPeakFlops(path, "a", false, 2e11), 4e11) << "the machine was busy";
  EXPECT_EQ(KeptPeakFlops(path, "a", false, 6e11), 6e11);
  EXPECT_EQ(KeptPeakFlops(path, "b", false, 1e11), 1e11) << "another pool's";
  EXPECT_EQ(KeptPeakFlops("", "a", false, 1e11), 1e11);
  EXPECT_EQ(ReadPoolProfile(path, "a").value(), SpeedOf(1e9));
  EXPECT_EQ(KeptPeakFlops(path, "a", /*anew=*/true, 3e11), 3e11);
  EXPECT_EQ(KeptPeakFlops(path, "a", false, 2e11), 3e11);
  ASSERT_TRUE(StorePoolProfile(path, "a", SpeedOf(1e9)).ok());
  EXPECT_EQ(KeptPeakFlops(path, "a", false, 2e11), 2e11) << "measured anew, with the speed";
  std::ofstream(path) << "{";
  EXPECT_EQ(KeptPeakFlops(path, "a", false, 1e11), 1e11);
}

TEST(PoolProfile, SaysWhereASpeedComesFrom) {
  const TempFolder folder;
  const std::string path = folder / "speed.json";
  const auto note_of = [](const std::string& file, bool anew) {
    std::string notes;
    const auto measure = []() -> absl::StatusOr<PoolSpeed> { return SpeedOf(1e9); };
    const auto hear = [&](const std::string& note, bool warning) {
      notes += (warning ? "WARNING " : "") + note + "\n";
    };
    EXPECT_TRUE(KeptPoolSpeed(file, "a", anew, measure, hear).ok());
    return notes;
  };
  const std::string begin = "the pool's speed: ";
  EXPECT_EQ(note_of("", false), begin + "measured now, and not kept\n");
  EXPECT_EQ(note_of(path, false), begin + "measured now, and kept in " + path + "\n");
  nlohmann::json object = nlohmann::json::parse(Contents(path));
  object["pools"][0]["measured"] = "2026-01-31T12:00:00Z";
  std::ofstream(path) << object;
  EXPECT_EQ(note_of(path, false), begin + "kept in " + path + ", measured 2026-01-31T12:00:00Z\n");
  object["pools"][0]["measured"] = "a lie\nof two lines";
  std::ofstream(path) << object;
  EXPECT_EQ(note_of(path, false), begin + "kept in " + path + ", measured at a time that it does not say\n");
  object["pools"][0]["measured"] = 3;
  std::ofstream(path) << object;
  EXPECT_EQ(note_of(path, false), begin + "kept in " + path + ", measured at a time that it does not say\n");
  object["pools"][0].erase("measured");
  std::ofstream(path) << object;
  EXPECT_EQ(note_of(path, false), begin + "kept in " + path + ", measured at a time that it does not say\n");
  EXPECT_EQ(note_of(path, true), begin + "measured now, and kept in " + path + "\n");
  std::ofstream(path) << "{";
  EXPECT_EQ(note_of(path, false), "WARNING " + path + ": no JSON object; delete the file, or let the next " +
                                      "measurement replace it\n" + begin + "measured now, and kept in " +
                                      path + "\n");
}

TEST(PoolProfile, AFolderThatCannotBeWrittenIsNoFailure) {
  std::string notes;
  const auto speed = KeptPoolSpeed(
      "/proc/no/such/speed.json", "a", false, []() -> absl::StatusOr<PoolSpeed> { return SpeedOf(1e9); },
      [&](const std::string& note, bool warning) { notes += (warning ? "WARNING " : "") + note; });
  ASSERT_TRUE(speed.ok()) << speed.status();
  EXPECT_EQ(notes.find("WARNING /proc/no/such/speed.json: the pool's speed cannot be kept: "), 0) << notes;
}

TEST(PoolProfile, LiesInTheUsersCache) {
  setenv("XDG_CACHE_HOME", "/somewhere", 1);
  EXPECT_EQ(DefaultPoolProfilePath(), "/somewhere/meshfill/pool_speed.json");
  setenv("HOME", "/home/user", 1);
  setenv("XDG_CACHE_HOME", "relative/cache", 1);  // counts for nothing: it would depend on the working folder
  EXPECT_EQ(DefaultPoolProfilePath(), "/home/user/.cache/meshfill/pool_speed.json");
  unsetenv("XDG_CACHE_HOME");
  EXPECT_EQ(DefaultPoolProfilePath(), "/home/user/.cache/meshfill/pool_speed.json");
  setenv("HOME", "home", 1);
  EXPECT_EQ(DefaultPoolProfilePath(), "");
  unsetenv("HOME");
  EXPECT_EQ(DefaultPoolProfilePath(), "");
}

}  // namespace
}  // namespace meshfill
