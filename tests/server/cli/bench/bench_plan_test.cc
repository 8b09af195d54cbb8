// The benchmark of predictions and of the plans that are chosen by them.
#include "server/cli/bench/bench_plan.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/server/cli/bench/benches.h"

namespace meshfill {
namespace {

using nlohmann::json;
using testing::MatchesRegex;

TEST_F(Benches, PlanJudgesPredictionsAndChoices) {
  const std::vector<std::string> words = {"plan",      "--model",   Model(),     "--shapes", "4",
                                          "--choices", "2",         "--repeats", "1",        "--max-seconds",
                                          "0.01",      "--threads", "1",         "--seed",   "7"};
  const json said = PrintJson(AddBenchPlanCommand, words);
  EXPECT_EQ(said["seed"], 7);
  EXPECT_EQ(said["repeats"], 1);
  EXPECT_EQ(said["threads"], 1);
  ASSERT_EQ(said["shapes"].size(), 4u);
  ASSERT_LE(said["choices"].size(), 2u);
  std::vector<double> ratios;
  int good = 0;
  for (const json& shape : said["shapes"]) {
    EXPECT_EQ(shape["model"], "model");
    EXPECT_GE(shape["tokens"], 1);
    EXPECT_LE(shape["tokens"], 1 << 14);
    EXPECT_EQ(shape["heads"].get<int>() * shape["a"].get<int>() * shape["b"].get<int>(), shape["ranks"]);
    EXPECT_GE(shape["ranks"], 1);
    EXPECT_LE(shape["ranks"], 8);
    ExpectRatio(shape["ratio"], shape["predicted_seconds"], shape["measured_seconds"]);
    ratios.push_back(shape["ratio"]);
    good += std::abs(ratios.back() - 1) <= 0.15 ? 1 : 0;
  }
  std::sort(ratios.begin(), ratios.end());
  EXPECT_EQ(said["ratio"]["min"], ratios.front());
  EXPECT_EQ(said["ratio"]["median"], ratios[2]);
  EXPECT_EQ(said["ratio"]["max"], ratios.back());
  EXPECT_EQ(said["within_15_percent"], good);
  int good_choices = 0;
  for (const json& choice : said["choices"]) {
    EXPECT_LT(choice["shape"], 4);
    EXPECT_GE(choice["plans"], 2);
    EXPECT_GE(choice["excess"], 0);
    EXPECT_LE(choice["excess"], choice["spread"]);
    EXPECT_EQ(choice["excess"] == 0, choice["chosen"] == choice["best"]);
    good_choices += choice["excess"] <= 0.03 ? 1 : 0;
  }
  EXPECT_EQ(said["choices_within_3_percent"], good_choices);
}

TEST_F(Benches, PlanPrintsALineForEachShape) {
  const std::string text =
      Print(AddBenchPlanCommand, {"plan", "--model", Model(), "--shapes", "2", "--choices", "1", "--repeats",
                                  "1", "--max-seconds", "0.01", "--threads", "1", "--seed", "7"});
  EXPECT_THAT(
      text,
      MatchesRegex("(model +[0-9]+ tokens  [1-8] ranks  [a-z]+ +[0-9]+  [0-9]+·[0-9]+x[0-9]+ "
                   "+(chosen|random)  predicted +.* "
                   "m?s  measured +.* m?s +[0-9.]+\n)+"
                   "\npredicted over measured: [0-9.]+ to [0-9.]+, median [0-9.]+; within 15 %: [0-2] of 2\n"
                   "(model +[0-9]+ tokens  [1-8] ranks  [a-z]+ +of +[0-9]+ plans chose .* best .* \\+[0-9.]+ "
                   "% \\(worst "
                   "\\+[0-9]+ %\\)\n)?"
                   "the chosen plan within 3 % of the best measured: [01] of [01]\n"));
}

// A rank alone has one plan, and nothing to choose.
TEST_F(Benches, PlanComparesPlansWhereThereAreSeveral) {
  const json said = PrintJson(
      AddBenchPlanCommand, {"plan", "--model", Model(), "--shapes", "3", "--choices", "3", "--repeats", "1",
                            "--max-seconds", "1e-9", "--threads", "1", "--seed", "1"});
  std::vector<size_t> several, compared;
  for (size_t shape = 0; shape < said["shapes"].size(); ++shape) {
    EXPECT_EQ(said["shapes"][shape]["tokens"], 1) << "halved until no prompt is shorter";
    if (said["shapes"][shape]["ranks"] > 1) several.push_back(shape);
  }
  for (const json& choice : said["choices"]) compared.push_back(choice["shape"]);
  EXPECT_EQ(compared, several);
  EXPECT_FALSE(several.empty());
  EXPECT_LT(several.size(), said["shapes"].size()) << "another seed has a rank alone";
}

TEST_F(Benches, PlanWithoutAModelMakesOneOfItsOwn) {
  const TempFolder folder;
  const Tmpdir tmpdir(folder.path());
  const json said = PrintJson(AddBenchPlanCommand, {"plan", "--shapes", "1", "--choices", "1", "--repeats",
                                                    "1", "--max-seconds", "1e-9", "--threads", "1"});
  ASSERT_EQ(said["shapes"].size(), 1u);
  EXPECT_THAT(said["shapes"][0]["model"].get<std::string>(),
              MatchesRegex("[0-9]+-[0-9]+q[0-9]+kv-[0-9]+(-window)?"));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace meshfill
