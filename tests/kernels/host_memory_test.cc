// Memory that is freed in one layer and used in the next: nothing is lost, and it never takes more than it
// must.
#include "kernels/cpu/host_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace meshfill {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kPage = 4096;

// A block with a mark on each of its pages.
struct Marked {
  BufferRef buffer;
  uint64_t mark;

  void Write() const {
    for (size_t at = 0; at < buffer->size_bytes(); at += kPage) {
      *reinterpret_cast<uint64_t*>(buffer->data<std::byte>() + at) = mark + at;
    }
  }
  bool Holds() const {
    for (size_t at = 0; at < buffer->size_bytes(); at += kPage) {
      if (*reinterpret_cast<const uint64_t*>(buffer->data<std::byte>() + at) != mark + at) return false;
    }
    return true;
  }
};

BufferRef Map(size_t size_bytes) {
  auto buffer = MapHostMemory(size_bytes);
  EXPECT_TRUE(buffer.ok()) << buffer.status();
  return *std::move(buffer);
}

TEST(SpareMappingsTest, NothingStaysWhereNobodyKeepsIt) {
  Map(8 * kMiB);
  EXPECT_EQ(SpareMappings::spare_bytes(), 0u);
  {
    const SpareMappings kept;
    Map(8 * kMiB);
    EXPECT_EQ(SpareMappings::spare_bytes(), 8 * kMiB);
  }
  EXPECT_EQ(SpareMappings::spare_bytes(), 0u);
}

TEST(SpareMappingsTest, WhatOneRunLeavesIsForTheOthers) {
  {
    const SpareMappings longer;
    {
      const SpareMappings shorter;
      Map(8 * kMiB);
    }
    EXPECT_EQ(SpareMappings::spare_bytes(), 8 * kMiB);
    const BufferRef taken = Map(8 * kMiB);
    EXPECT_EQ(SpareMappings::spare_bytes(), 0u);
  }
  Map(8 * kMiB);
  EXPECT_EQ(SpareMappings::spare_bytes(), 0u);
}

TEST(SpareMappingsTest, BlocksAreCutFromLargerOnesAndBecomeOneAgain) {
  const SpareMappings kept;
  Marked whole = {Map(12 * kMiB), 42};
  std::byte* const first = whole.buffer->data<std::byte>();
  std::vector<int> order = {0, 1, 2};
  do {
    whole.Write();
    whole.buffer = nullptr;
    std::vector<BufferRef> parts;
    for (int i = 0; i < 3; ++i) {
      parts.push_back(Map(4 * kMiB - kPage + 1));  // whole pages are taken
      EXPECT_EQ(parts.back()->data<std::byte>(), first + i * 4 * kMiB);
    }
    EXPECT_EQ(SpareMappings::spare_bytes(), 0u);
    for (const int part : order) parts[part] = nullptr;
    EXPECT_EQ(SpareMappings::spare_bytes(), 12 * kMiB);
    whole.buffer = Map(12 * kMiB);
    EXPECT_TRUE(whole.Holds()) << "it is mapped anew";
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(SpareMappingsTest, TheSmallestBlockThatIsLargeEnoughIsTaken) {
  std::vector<size_t> sizes = {5, 7, 9};
  do {
    const SpareMappings kept;
    std::vector<BufferRef> blocks, between;
    std::byte* middle = nullptr;
    for (const size_t size : sizes) {
      blocks.push_back(Map(size * kMiB));
      between.push_back(Map(4 * kMiB));
      if (size == 7) middle = blocks.back()->data<std::byte>();
    }
    blocks.clear();
    EXPECT_EQ(Map(6 * kMiB)->data<std::byte>(), middle);
  } while (std::next_permutation(sizes.begin(), sizes.end()));
}

TEST(SpareMappingsTest, BlocksKeepTheirBytesAndTheSumItsBound) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const SpareMappings kept;
  std::vector<Marked> blocks;
  size_t used = 0, most = 0;
  for (int step = 0; step < 2000; ++step) {
    if (blocks.size() < 2 || (blocks.size() < 12 && random() % 2 == 0)) {
      const size_t size_bytes = (1 + random() % 2048) * kPage;
      blocks.push_back({Map(size_bytes), random()});
      blocks.back().Write();
      used += size_bytes;
      most = std::max(most, used);
    } else {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      ASSERT_TRUE(blocks.back().Holds()) << step;
      used -= blocks.back().buffer->size_bytes();
      blocks.pop_back();
    }
    ASSERT_LE(used + SpareMappings::spare_bytes(), most) << step;
  }
  for (const Marked& block : blocks) EXPECT_TRUE(block.Holds());
}

TEST(SpareMappingsTest, AnyThreadTakesWhatAnotherFreed) {
  constexpr int kThreads = 4;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([thread] {
      std::mt19937_64 random(thread);
      for (int run = 0; run < 10; ++run) {
        const SpareMappings kept;
        for (int layer = 0; layer < 20; ++layer) {
          const Marked one = {Map((1 + random() % 512) * kPage), random()};
          const Marked other = {Map((1 + random() % 512) * kPage), random()};
          one.Write();
          other.Write();
          EXPECT_TRUE(one.Holds() && other.Holds());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(SpareMappings::spare_bytes(), 0u);
}

TEST(HostMemoryTest, MoreThanThereIsIsRefused) {
  const SpareMappings kept;
  EXPECT_EQ(MapHostMemory(SIZE_MAX / 4).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(AllocateHostMemory(SIZE_MAX - 1).status().code(), absl::StatusCode::kResourceExhausted);
  // What was refused is in no sum: what is freed has no more room than before.
  const BufferRef first = Map(8 * kMiB);
  Map(8 * kMiB);
  Map(12 * kMiB);
  EXPECT_LE(SpareMappings::spare_bytes(), 12 * kMiB);
}

}  // namespace
}  // namespace meshfill
