// The models of random weights that benchmarks make.
#include "server/cli/bench/bench_models.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/engine/temp_folder.h"
#include "tests/server/cli/bench/benches.h"

namespace meshfill {
namespace {

TEST(BenchModels, AreOfDifferentShapesAndGoWithTheirObject) {
  std::vector<std::string> folders;
  {
    BenchModels models;
    ASSERT_TRUE(models.Make().ok());
    folders = models.folders();
    ASSERT_EQ(folders.size(), 5u);
    EXPECT_THAT(folders,
                testing::Each(testing::ResultOf(
                    [](const std::string& folder) { return ReadWholeFile(folder + "/config.json").empty(); },
                    false)));
  }
  for (const std::string& folder : folders) EXPECT_FALSE(std::filesystem::exists(folder)) << folder;
}

TEST(BenchModels, SayWhereTheyCannotBe) {
  const std::string working_folder = std::filesystem::current_path();
  for (const char* folder : {"/proc", "/there/is/no/such/folder"}) {
    const Tmpdir tmpdir(folder);
    BenchModels models;
    const absl::Status status = models.Make();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(
        std::string(status.message()),
        testing::MatchesRegex("cannot make a temporary folder .*meshfill-bench-.*: .+; set TMPDIR to a "
                              "folder that can be written"));
    EXPECT_TRUE(models.folders().empty());
  }
  for (const auto& entry : std::filesystem::directory_iterator(working_folder)) {
    EXPECT_THAT(entry.path().filename().string(), testing::Not(testing::StartsWith("meshfill-bench-")))
        << "models where the command runs";
  }
}

}  // namespace
}  // namespace meshfill
