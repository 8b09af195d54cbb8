// What tests of the benchmarks share: a tiny model, a config of it, and looks at what a benchmark prints.
#ifndef MESHFILL_TESTS_SERVER_CLI_BENCH_BENCHES_H_
#define MESHFILL_TESTS_SERVER_CLI_BENCH_BENCHES_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "engine/model/make_model.h"
#include "nlohmann/json.hpp"
#include "tests/engine/temp_folder.h"
#include "tests/server/cli/command_line.h"

namespace meshfill {

// The environment's TMPDIR while the object lives.
class Tmpdir {
 public:
  explicit Tmpdir(const std::string& folder) {
    if (const char* was = std::getenv("TMPDIR"); was != nullptr) was_ = was;
    setenv("TMPDIR", folder.c_str(), /*overwrite=*/1);
  }
  ~Tmpdir() { was_.empty() ? unsetenv("TMPDIR") : setenv("TMPDIR", was_.c_str(), /*overwrite=*/1); }
  Tmpdir(const Tmpdir&) = delete;
  Tmpdir& operator=(const Tmpdir&) = delete;

 private:
  std::string was_;
};

class Benches : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TempFolder;
    setenv("XDG_CACHE_HOME", folder_->path().c_str(), /*overwrite=*/1);  // not the user's
    ASSERT_TRUE(MakeModel({.layers = 2, .hidden = 64, .shard_bytes = 50'000}, Model()).ok());
    folder_->Write("config.yaml", "model: {path: " + Model() +
                                      "}\npool: {embedded: {ranks: 2, threads: 1, peak_flops: 1e11}}\n"
                                      "plan: {profile_path: " +
                                      *folder_ / "speed.json" + "}\n");
  }
  static void TearDownTestSuite() { delete folder_; }
  static std::string Model() { return *folder_ / "model"; }
  static std::string Config() { return *folder_ / "config.yaml"; }

  static std::string Print(AddCommand add, const std::vector<std::string>& words) {
    Ran ran = RunCommand(add, words);
    EXPECT_TRUE(ran.status.ok()) << ran.status;
    return std::move(ran.out);
  }
  static nlohmann::json PrintJson(AddCommand add, std::vector<std::string> words) {
    words.emplace_back("--json");
    const std::string out = Print(add, words);
    EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 1);
    return nlohmann::json::parse(out, nullptr, /*allow_exceptions=*/false);
  }
  // Two runs differ, but not by a unit.
  static void ExpectSameSize(double left, double right) {
    EXPECT_GT(left, right / 100);
    EXPECT_LT(left, right * 100);
  }
  static void ExpectRatio(const nlohmann::json& ratio, const nlohmann::json& over,
                          const nlohmann::json& under) {
    EXPECT_NEAR(ratio.get<double>() * under.get<double>() / over.get<double>(), 1, 1e-9);
  }
  // The number behind `label` in the text.
  static double Number(const std::string& text, const std::string& label) {
    const size_t at = text.find(label);
    EXPECT_NE(at, std::string::npos) << label << " in\n" << text;
    return at == std::string::npos ? 0 : std::strtod(text.c_str() + at + label.size(), nullptr);
  }

  static inline TempFolder* folder_ = nullptr;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_CLI_BENCH_BENCHES_H_
