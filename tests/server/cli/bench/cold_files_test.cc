// Weights that are not in the page cache.
#include "server/cli/bench/cold_files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "engine/model/make_model.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

TEST(ColdFiles, AreAllOfAModelsWeights) {
  const TempFolder folder;
  const std::string model = folder / "model";
  ASSERT_TRUE(MakeModel({.layers = 2, .hidden = 64, .shard_bytes = 50'000}, model).ok());
  int64_t bytes = 0, files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(model)) {
    if (entry.path().extension() != ".safetensors") continue;
    bytes += static_cast<int64_t>(entry.file_size());
    ++files;
  }
  EXPECT_GT(files, 1);
  const auto cold = ColdFiles::Of(model);
  ASSERT_TRUE(cold.ok()) << cold.status();
  EXPECT_EQ(cold->bytes(), bytes);
}

}  // namespace
}  // namespace meshfill
