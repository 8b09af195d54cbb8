// Reads through the page cache and past it: the same bytes, the same errors, and what each leaves in the
// cache.
#include "engine/model/file_reader.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

constexpr size_t kBytes = (3 << 20) + 777;  // several reads past the cache, and no whole page at the end

class FileReaderTest : public testing::Test {
 protected:
  void SetUp() override {
    content_.resize(kBytes);
    std::generate(content_.begin(), content_.end(), [&] { return static_cast<char>(random_()); });
    path_ = folder_.Write("file", content_);
    descriptor_ = open(path_.c_str(), O_RDONLY);
    ASSERT_GE(descriptor_, 0);
    void* const mapped = mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE, descriptor_, 0);
    ASSERT_NE(mapped, MAP_FAILED);
    mapped_ = {static_cast<const std::byte*>(mapped), kBytes};
  }
  void TearDown() override {
    if (!mapped_.empty()) munmap(const_cast<std::byte*>(mapped_.data()), kBytes);
  }

  void MakeCold() const {
    ASSERT_EQ(fdatasync(descriptor_), 0);  // pages that are not written yet stay
    ASSERT_EQ(posix_fadvise(descriptor_, 0, 0, POSIX_FADV_DONTNEED), 0);
  }

  size_t CachedPages() const {
    std::vector<unsigned char> pages((kBytes + getpagesize() - 1) / getpagesize());
    EXPECT_EQ(mincore(const_cast<std::byte*>(mapped_.data()), kBytes, pages.data()), 0);
    return std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1) != 0; });
  }

  void ExpectRead(const FileReader& reader, size_t begin, size_t count, PageCache cache) const {
    SCOPED_TRACE(testing::Message() << count << " bytes from " << begin);
    std::string read(count, '\0');
    const absl::Status status = reader.Read(mapped_.subspan(begin, count), cache, read.data());
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(read == content_.substr(begin, count));
  }

  std::mt19937_64 random_{TestSeed()};
  const TempFolder folder_;
  std::string content_, path_;
  int descriptor_ = -1;  // its reader's
  std::span<const std::byte> mapped_;
};

TEST_F(FileReaderTest, ReadsTheSameBytesEitherWay) {
  const FileReader reader(path_, descriptor_, mapped_);
  for (const PageCache cache : {PageCache::kPass, PageCache::kFill}) {
    for (int draw = 0; draw < 40; ++draw) {
      if (draw % 10 == 0) MakeCold();
      const auto begin = Draw<size_t>(random_, 0, kBytes);
      const auto count = Draw<size_t>(random_, 0, kBytes - begin);
      ExpectRead(reader, begin, draw % 2 == 0 ? count : std::min<size_t>(count, 5000), cache);
    }
    MakeCold();
    ExpectRead(reader, 0, kBytes, cache);
    ExpectRead(reader, kBytes - 1, 1, cache);
  }
}

TEST_F(FileReaderTest, FillsTheCacheOrLeavesItAsItIs) {
  const FileReader reader(path_, descriptor_, mapped_);
  MakeCold();
  if (CachedPages() > 0) GTEST_SKIP() << folder_.path() << ": the file system keeps its files in memory";
  ExpectRead(reader, 0, kBytes, PageCache::kPass);
  EXPECT_EQ(CachedPages(), 0u);
  ExpectRead(reader, 0, kBytes, PageCache::kFill);
  EXPECT_EQ(CachedPages(), (kBytes + getpagesize() - 1) / getpagesize());
}

TEST_F(FileReaderTest, MissesBytesThatAreGone) {
  const FileReader reader(path_, descriptor_, mapped_);
  MakeCold();
  std::filesystem::resize_file(path_, kBytes - 1000);
  std::string read(kBytes, '\0');
  for (const PageCache cache : {PageCache::kPass, PageCache::kFill}) {
    ExpectRead(reader, 5000, kBytes - 6000, cache);
    for (const size_t begin : {kBytes - 1001, kBytes - 1000, kBytes - 1}) {
      const absl::Status gone = reader.Read(mapped_.subspan(begin), cache, read.data());
      EXPECT_TRUE(absl::IsDataLoss(gone)) << gone;
      EXPECT_THAT(std::string(gone.message()),
                  testing::AllOf(testing::HasSubstr(path_), testing::HasSubstr(absl::StrCat(kBytes))));
    }
  }
}

// Another file of that name is none of ours.
TEST_F(FileReaderTest, ReadsTheFileThatItWasGiven) {
  std::filesystem::rename(path_, folder_ / "moved");
  folder_.Write("file", std::string(kBytes, 'x'));
  const FileReader reader(path_, descriptor_, mapped_);
  MakeCold();
  ExpectRead(reader, 100, 10'000, PageCache::kPass);
}

}  // namespace
}  // namespace meshfill
