#include "engine/kv/kv_slab.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <utility>
#include <vector>

namespace meshfill {
namespace {

int64_t ResidentBytes() {
  int64_t all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

KvSlabShape ShapeOf(int64_t bytes) {
  const KvSlabShape one = {.model = {.layers = 1, .kv_heads = 1, .head_dim = 32, .dtype = DType::kF32},
                           .tokens = 1};
  return {.model = one.model, .tokens = bytes / one.bytes()};
}

// Slabs that are freed between others go back to the system, whatever their size: the heap would keep them.
TEST(NewSlabMemory, WhatIsFreedBetweenOthersGoesBack) {
  for (const int64_t bytes : {int64_t{1} << 20, int64_t{9} << 20}) {
    const KvSlabShape shape = ShapeOf(bytes);
    ASSERT_EQ(shape.bytes(), bytes);
    ASSERT_TRUE(NewSlabMemory(shape).ok());  // the heap would take the next one of this size for itself
    std::vector<SlabMemory> slabs;
    for (int64_t taken = 0; taken < int64_t{128} << 20; taken += bytes) {
      auto memory = NewSlabMemory(shape);
      ASSERT_TRUE(memory.ok()) << memory.status();
      std::memset(memory->get(), 1, static_cast<size_t>(bytes));
      slabs.push_back(*std::move(memory));
    }
    const int64_t before = ResidentBytes();
    int64_t freed = 0;
    for (size_t i = 0; i < slabs.size(); i += 2) {
      slabs[i].reset();
      freed += bytes;
    }
    EXPECT_GE(before - ResidentBytes(), freed * 9 / 10) << bytes;
  }
}

TEST(NewSlabMemory, SmallOnesAndLargeOnesAreTheirs) {
  std::vector<std::pair<SlabMemory, KvSlabShape>> slabs;
  for (const int64_t bytes : {256, 4096, (1 << 20) - 256, 1 << 20, (1 << 20) + 256, 5 << 20}) {
    const KvSlabShape shape = ShapeOf(bytes);
    auto memory = NewSlabMemory(shape);
    ASSERT_TRUE(memory.ok()) << memory.status();
    std::memset(memory->get(), static_cast<int>(slabs.size()), static_cast<size_t>(shape.bytes()));
    slabs.emplace_back(*std::move(memory), shape);
  }
  for (size_t i = 0; i < slabs.size(); ++i) {
    const auto& [memory, shape] = slabs[i];
    EXPECT_EQ(memory[0], static_cast<std::byte>(i));
    EXPECT_EQ(memory[static_cast<size_t>(shape.bytes() - 1)], static_cast<std::byte>(i));
  }
}

TEST(NewSlabMemory, WhatTheSystemRefusesIsSaid) {
  const auto refused = NewSlabMemory(ShapeOf(int64_t{1} << 56));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  EXPECT_NE(refused.status().message().find("kv.memory_bytes"), std::string::npos);
}

}  // namespace
}  // namespace meshfill
