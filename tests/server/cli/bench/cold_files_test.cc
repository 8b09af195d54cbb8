// Weights that are not in the page cache. Where the temporary folder is in memory, they always are.
#include "server/cli/bench/cold_files.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "engine/model/make_model.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

using testing::HasSubstr;
using testing::MatchesRegex;

// A model in files of `shard_bytes` at most.
class ColdFilesTest : public testing::Test {
 protected:
  void Make(int64_t shard_bytes) {
    ASSERT_TRUE(MakeModel({.layers = 2, .hidden = 64, .shard_bytes = shard_bytes}, Model()).ok());
    for (const auto& entry : std::filesystem::directory_iterator(Model())) {
      if (entry.path().extension() != ".safetensors") continue;
      bytes_ += static_cast<int64_t>(entry.file_size());
      files_.push_back(entry.path());
    }
    std::sort(files_.begin(), files_.end());
  }
  void MakeOne() { Make(1 << 30); }
  void MakeSeveral() { Make(50'000); }

  std::string Model() const { return folder_ / "model"; }
  ColdFiles Cold() const {
    auto cold = ColdFiles::Of(Model());
    EXPECT_TRUE(cold.ok()) << cold.status();
    return *std::move(cold);
  }
  // Drops them while this process has `file` mapped.
  absl::Status DropWhileMapped(const ColdFiles& cold, const std::string& file) const {
    const size_t bytes = std::filesystem::file_size(file);
    const int descriptor = open(file.c_str(), O_RDONLY | O_CLOEXEC);
    void* const map = mmap(nullptr, bytes, PROT_READ, MAP_SHARED | MAP_POPULATE, descriptor, 0);
    EXPECT_NE(map, MAP_FAILED);
    const absl::Cleanup unmap = [&] {
      munmap(map, bytes);
      close(descriptor);
    };
    return cold.Drop();
  }

  const TempFolder folder_;
  std::vector<std::string> files_;
  int64_t bytes_ = 0;
};

TEST_F(ColdFilesTest, AreAllOfAModelsWeights) {
  MakeSeveral();
  EXPECT_GT(files_.size(), 1u);
  EXPECT_EQ(Cold().bytes(), bytes_);
}

TEST_F(ColdFilesTest, AFolderWithoutWeightsHasNone) {
  std::filesystem::create_directory(Model());
  EXPECT_THAT(std::string(ColdFiles::Of(Model()).status().message()),
              HasSubstr("neither model.safetensors nor model.safetensors.index.json is in it"));
}

TEST_F(ColdFilesTest, WhatAProcessHasMappedStays) {
  MakeOne();
  const ColdFiles one = Cold();
  const absl::Status status = DropWhileMapped(one, files_.front());
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              MatchesRegex(absl::StrCat("[0-9]+ of ", bytes_, " bytes of ", files_.front(),
                                        " stay in the page cache; put the model on a disk, and end what else "
                                        "has it open")));
}

TEST_F(ColdFilesTest, OneMappedFileOfSeveralStays) {
  MakeSeveral();
  const ColdFiles several = Cold();
  EXPECT_THAT(std::string(DropWhileMapped(several, files_.back()).message()),
              MatchesRegex(absl::StrCat("[0-9]+ of ", bytes_, " bytes of ", files_.front(),
                                        " and the files beside it stay in the page cache; .*")));
  if (absl::IsFailedPrecondition(several.Drop())) GTEST_SKIP() << "the temporary folder lies on no disk";
  const auto seconds = several.Read();
  ASSERT_TRUE(seconds.ok()) << seconds.status();
  EXPECT_GT(*seconds, 0);
}

TEST_F(ColdFilesTest, SayWhichFileCannotBeRead) {
  MakeOne();
  const ColdFiles cold = Cold();
  std::filesystem::remove(files_.front());
  EXPECT_EQ(cold.Drop().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(cold.Read().status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(cold.Drop().message()), HasSubstr(files_.front() + ": cannot be read"));
  std::filesystem::create_directory(files_.front());
  EXPECT_THAT(std::string(cold.Read().status().message()), HasSubstr(files_.front() + ": cannot be read"));
}

TEST_F(ColdFilesTest, AnEmptyFileIsNotInTheCache) {
  MakeOne();
  const ColdFiles cold = Cold();
  std::filesystem::resize_file(files_.front(), 0);
  EXPECT_TRUE(cold.Drop().ok()) << cold.Drop();
  EXPECT_TRUE(cold.Read().ok()) << cold.Read().status();
}

}  // namespace
}  // namespace meshfill
