#include "server/cli/output_file.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <span>
#include <string>

#include "server/cli/tensor_output.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

TEST(CheckOutputPath, AsksForAFolderAndAFileInIt) {
  const TempFolder folder;
  EXPECT_TRUE(CheckOutputPath(folder / "new").ok());
  EXPECT_TRUE(CheckOutputPath(folder.Write("old", "x")).ok());
  EXPECT_TRUE(CheckOutputPath("in-the-working-folder").ok());
  EXPECT_EQ(CheckOutputPath(folder / "none/file").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(CheckOutputPath(folder / "old/file").code(), absl::StatusCode::kNotFound) << "old is no folder";
  EXPECT_EQ(CheckOutputPath(folder.path()).message(),
            folder.path() + ": is a folder; give the name of a file to write");
}

TEST(WriteTextFile, ReplacesTheFile) {
  const TempFolder folder;
  const std::string path = folder.Write("file", "a longer text");
  ASSERT_TRUE(WriteTextFile(path, "text\n").ok());
  EXPECT_EQ(ReadWholeFile(path), "text\n");
  EXPECT_EQ(WriteTextFile("/dev/full", "text").code(), absl::StatusCode::kUnknown);
}

TEST(WriteKv, EndsWithTheFirstLayerThatCannotBeRead) {
  const TempFolder folder;
  const KvShape shape = {.layers = 3, .kv_heads = 1, .head_dim = 2, .dtype = DType::kF32};
  int read = 0;
  const absl::Status status = WriteKv(folder / "kv", shape, /*tokens=*/5,
                                      [&](int layer, std::span<std::byte> k, std::span<std::byte> v) {
                                        EXPECT_EQ(layer, read++);
                                        EXPECT_EQ(k.size(), 5u * 2 * 4);
                                        EXPECT_EQ(v.size(), k.size());
                                        return layer == 1 ? absl::DataLossError("layer 1") : absl::OkStatus();
                                      });
  EXPECT_EQ(status, absl::DataLossError("layer 1"));
  EXPECT_EQ(read, 2);
}

}  // namespace
}  // namespace meshfill
