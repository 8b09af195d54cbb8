// The models of random weights that benchmarks make.
#include "server/cli/bench/bench_models.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/engine/temp_folder.h"

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

}  // namespace
}  // namespace meshfill
