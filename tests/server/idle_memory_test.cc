#include "server/idle_memory.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

namespace meshfill {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr size_t kBlock = 100'000;  // below what the allocator maps by itself

absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

// Takes memory in small blocks and frees all but the last, which holds the heap's top.
std::unique_ptr<char[]> TakeAndFree(int64_t bytes) {
  std::vector<std::unique_ptr<char[]>> blocks;
  for (int64_t taken = 0; taken < bytes; taken += kBlock) {
    blocks.push_back(std::make_unique<char[]>(kBlock));
    std::memset(blocks.back().get(), 1, kBlock);
  }
  return std::move(blocks.back());
}

class IdleMemoryTest : public testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "a sanitizer has an allocator of its own";
#endif
    memory_.Look(true, At(0));
    memory_.Look(true, At(100));
  }
  IdleMemory memory_;
};

TEST_F(IdleMemoryTest, GivesBackWhatWasFreedOnceThePoolIsIdle) {
  const int64_t before = ResidentBytes();
  const auto top = TakeAndFree(300 * kMiB);
  ASSERT_GT(ResidentBytes(), before + 250 * kMiB) << "the allocator gave it back by itself";
  EXPECT_FALSE(memory_.Look(false, At(200)));
  EXPECT_FALSE(memory_.Look(true, At(209.9))) << "it was in use just now";
  EXPECT_FALSE(memory_.Look(false, At(210)));
  EXPECT_FALSE(memory_.Look(true, At(219.9)));
  EXPECT_TRUE(memory_.Look(true, At(220)));
  EXPECT_LT(ResidentBytes(), before + 30 * kMiB);
}

TEST_F(IdleMemoryTest, LeavesItWhereNothingIsToBeWon) {
  std::vector<char> held(300 * kMiB, 1);
  [[maybe_unused]] char* volatile seen = held.data();  // or a compiler leaves it out
  EXPECT_TRUE(memory_.Look(true, At(200)));
  EXPECT_GT(ResidentBytes(), 300 * kMiB) << "it is in use";
  EXPECT_FALSE(memory_.Look(true, At(300)));
  const auto top = TakeAndFree(IdleMemory::kWorthwhile / 2);
  EXPECT_FALSE(memory_.Look(true, At(400)));
  held = {};
  EXPECT_FALSE(memory_.Look(true, At(500)));
  const auto more = TakeAndFree(2 * IdleMemory::kWorthwhile);
  EXPECT_TRUE(memory_.Look(true, At(600))) << "more than after it had shrunk";
}

// From one prompt to the next.
TEST_F(IdleMemoryTest, KeepsMappingsWhileThePoolIsInUse) {
  const auto map = [] { EXPECT_TRUE(MapHostMemory(8 * kMiB).ok()); };
  map();
  EXPECT_EQ(SpareMappings::spare_bytes(), 0u) << "the pool has not been used yet";
  memory_.Look(false, At(200));
  map();
  EXPECT_FALSE(memory_.Look(true, At(209.9)));
  EXPECT_EQ(SpareMappings::spare_bytes(), 8u * kMiB);
  EXPECT_TRUE(memory_.Look(true, At(210)));
  EXPECT_EQ(SpareMappings::spare_bytes(), 0u);
  EXPECT_FALSE(memory_.Look(true, At(220)));
  memory_.Look(false, At(300));
  map();
  EXPECT_EQ(SpareMappings::spare_bytes(), 8u * kMiB);
}

}  // namespace
}  // namespace meshfill
