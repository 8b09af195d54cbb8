#include "engine/kv/kv_device_memory.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/run/watched_stream.h"

namespace meshfill {
namespace {

constexpr KvShape kShape = {.layers = 1, .kv_heads = 2, .head_dim = 4, .dtype = DType::kF32};
constexpr int64_t kTokenBytes = 2 * 2 * 4 * 4;

float Value(int slab, int half, int64_t slot, int head, int element) {
  return static_cast<float>((((slab * 2 + half) * 1000 + slot) * 2 + head) * 4 + element + 1);
}

class CopyingStream final : public WatchedStream {
 public:
  using WatchedStream::WatchedStream;
  absl::StatusOr<std::unique_ptr<HostCopy>> CopyHeadsToHost(const CopyHeadsArgs& args,
                                                            BufferRef source) override {
    ++copies;
    return WatchedStream::CopyHeadsToHost(args, std::move(source));
  }
  int copies = 0;  // of K or of V
};

// A run's stream, whose copies come late, and slabs that it leaves on its device.
class KvDeviceMemoryTest : public testing::Test {
 protected:
  void SetUp() override { stream_.copies_late = true; }

  // The device outlives the memory: both are the test's.
  std::shared_ptr<KvDeviceMemory> MemoryOf(int64_t tokens) {
    return std::make_shared<KvDeviceMemory>(std::vector<std::shared_ptr<Device>>{device_},
                                            tokens * kTokenBytes);
  }

  // As the projections leave it: heads outermost.
  BufferRef KvOf(int slab, int64_t tokens) {
    BufferRef kv = stream_.Allocate(static_cast<size_t>(tokens * kTokenBytes)).value();
    auto* value = kv->data<float>();
    for (int half = 0; half < 2; ++half) {
      for (int head = 0; head < 2; ++head) {
        for (int64_t slot = 0; slot < tokens; ++slot) {
          for (int element = 0; element < 4; ++element) *value++ = Value(slab, half, slot, head, element);
        }
      }
    }
    return kv;
  }
  static std::unique_ptr<KvSlab> NewSlab(int64_t tokens) {
    return std::make_unique<KvSlab>(KvSlabShape{.model = kShape, .tokens = tokens});
  }
  KvDeviceMemory::Holding Hold(KvDeviceMemory& memory, KvSlab& slab, int number) {
    auto holding = memory.Hold(slab, KvOf(number, slab.shape().tokens), stream_);
    EXPECT_TRUE(holding.ok()) << holding.status();
    return *std::move(holding);
  }
  bool OnDevice(const KvSlab& slab) { return slab.On(*device_).has_value(); }

  // What a reader gets.
  static void ExpectValues(KvSlab& slab, int number) {
    const absl::Status there = slab.BringToHost();
    ASSERT_TRUE(there.ok()) << there;
    for (int half = 0; half < 2; ++half) {
      for (int64_t slot = 0; slot < slab.shape().tokens; ++slot) {
        float row[8];
        std::memcpy(row, slab.Row(half, slot), sizeof row);
        for (int at = 0; at < 8; ++at) {
          ASSERT_EQ(row[at], Value(number, half, slot, at / 4, at % 4)) << "slab " << number;
        }
      }
    }
  }

  CopyingStream stream_{DType::kF32};
  const std::shared_ptr<Device> device_{&stream_.device(), [](Device*) {}};
};

TEST_F(KvDeviceMemoryTest, WhatWasNotUsedForLongestGoesToTheHost) {
  const auto memory = MemoryOf(30);
  std::vector<std::unique_ptr<KvSlab>> slabs;
  for (int i = 0; i < 4; ++i) slabs.push_back(NewSlab(10));
  for (int i = 0; i < 3; ++i) {
    const KvDeviceMemory::Holding holding = Hold(*memory, *slabs[i], i);
    EXPECT_TRUE(holding.held);
    EXPECT_EQ(holding.beside, nullptr);
    EXPECT_FALSE(slabs[i]->on_host());
  }
  EXPECT_EQ(memory->bytes(), 30 * kTokenBytes);
  EXPECT_TRUE(OnDevice(*slabs[0]));  // a use
  KvDeviceMemory::Holding holding = Hold(*memory, *slabs[3], 3);
  EXPECT_TRUE(holding.held);
  ASSERT_NE(holding.beside, nullptr);
  EXPECT_EQ(stream_.memory.live_bytes(), 40 * kTokenBytes);  // until the copy is there
  ASSERT_TRUE(holding.beside->Finish().ok());
  EXPECT_EQ(stream_.memory.live_bytes(), 30 * kTokenBytes);
  EXPECT_EQ(memory->bytes(), 30 * kTokenBytes);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(OnDevice(*slabs[i]), i != 1) << i;
    EXPECT_EQ(slabs[i]->on_host(), i == 1) << i;
    ExpectValues(*slabs[i], i);
  }
  slabs.clear();
  EXPECT_EQ(memory->bytes(), 0);
  EXPECT_EQ(stream_.memory.live_bytes(), 0);
}

TEST_F(KvDeviceMemoryTest, WhatAReaderBroughtToTheHostGoesWithoutACopy) {
  const auto memory = MemoryOf(20);
  const auto read = NewSlab(10), other = NewSlab(10), late = NewSlab(10);
  Hold(*memory, *read, 0);
  Hold(*memory, *other, 1);
  ExpectValues(*read, 0);
  EXPECT_TRUE(read->on_host());
  EXPECT_EQ(memory->bytes(), 20 * kTokenBytes);  // it is in both
  EXPECT_EQ(Hold(*memory, *late, 2).beside, nullptr);
  EXPECT_FALSE(OnDevice(*read));
  EXPECT_TRUE(OnDevice(*other));
  EXPECT_EQ(stream_.memory.live_bytes(), 20 * kTokenBytes);
  ExpectValues(*read, 0);
}

// Its reader has pointers there.
TEST_F(KvDeviceMemoryTest, WhatAReaderBroughtToTheHostStaysWhereItIs) {
  const auto memory = MemoryOf(10);
  const auto read = NewSlab(10), next = NewSlab(10);
  Hold(*memory, *read, 0);
  const KvDeviceMemory::Holding holding = Hold(*memory, *next, 1);
  ASSERT_NE(holding.beside, nullptr);
  ExpectValues(*read, 0);  // while it leaves
  const std::byte* const row = read->Row(0, 0);
  ASSERT_TRUE(holding.beside->Finish().ok());
  EXPECT_EQ(read->Row(0, 0), row);
  EXPECT_FALSE(OnDevice(*read));
}

TEST_F(KvDeviceMemoryTest, OfAStoppedRunWhatWasLeavingStays) {
  const auto memory = MemoryOf(10);
  const auto earlier = NewSlab(10);
  Hold(*memory, *earlier, 0);
  {
    const auto stopped = NewSlab(10);
    const KvDeviceMemory::Holding holding = Hold(*memory, *stopped, 1);
    ASSERT_NE(holding.beside, nullptr);
    EXPECT_TRUE(OnDevice(*earlier));
  }
  EXPECT_TRUE(OnDevice(*earlier));
  EXPECT_FALSE(earlier->on_host());
  EXPECT_EQ(memory->bytes(), 10 * kTokenBytes);
  // It leaves for the next one.
  const auto next = NewSlab(4);
  KvDeviceMemory::Holding holding = Hold(*memory, *next, 2);
  ASSERT_NE(holding.beside, nullptr);
  ASSERT_TRUE(holding.beside->Finish().ok());
  EXPECT_FALSE(OnDevice(*earlier));
  ExpectValues(*earlier, 0);
  ExpectValues(*next, 2);
}

TEST_F(KvDeviceMemoryTest, WhatGoesWhileItIsLeavingIsForgotten) {
  const auto memory = MemoryOf(10);
  auto earlier = NewSlab(10);
  const auto next = NewSlab(10);
  Hold(*memory, *earlier, 0);
  KvDeviceMemory::Holding holding = Hold(*memory, *next, 1);
  ASSERT_NE(holding.beside, nullptr);
  earlier.reset();
  EXPECT_EQ(memory->bytes(), 10 * kTokenBytes);
  EXPECT_TRUE(holding.beside->Finish().ok());
  holding.beside.reset();
  EXPECT_EQ(stream_.memory.live_bytes(), 10 * kTokenBytes);
  ExpectValues(*next, 1);
}

TEST_F(KvDeviceMemoryTest, WhatIsLeavingIsNotSentAgain) {
  const auto memory = MemoryOf(20);
  std::vector<std::unique_ptr<KvSlab>> slabs;
  std::vector<KvDeviceMemory::Holding> holdings;
  for (int i = 0; i < 4; ++i) {
    slabs.push_back(NewSlab(10));
    holdings.push_back(Hold(*memory, *slabs[i], i));
    EXPECT_TRUE(holdings[i].held);
  }
  EXPECT_EQ(stream_.copies, 4);  // K and V of two
  for (int i : {3, 2}) ASSERT_TRUE(holdings[i].beside->Finish().ok());
  for (int i = 0; i < 4; ++i) EXPECT_EQ(OnDevice(*slabs[i]), i >= 2) << i;
}

TEST_F(KvDeviceMemoryTest, WhatIsEmptyOrTooLargeIsNotHeld) {
  const auto memory = MemoryOf(10);
  for (const int64_t tokens : {0, 11}) {
    const auto slab = NewSlab(tokens);
    EXPECT_FALSE(Hold(*memory, *slab, 0).held);
    EXPECT_FALSE(OnDevice(*slab));
  }
  EXPECT_EQ(memory->bytes(), 0);
}

TEST_F(KvDeviceMemoryTest, EachDeviceHasThePartOfItsRanks) {
  WatchedStream second(DType::kF32);
  const std::shared_ptr<Device> two(&second.device(), [](Device*) {});
  const auto memory = std::make_shared<KvDeviceMemory>(
      std::vector<std::shared_ptr<Device>>{device_, device_, two}, 30 * kTokenBytes);
  const auto large = NewSlab(20), small = NewSlab(10), none = NewSlab(11);
  EXPECT_TRUE(memory->Hold(*large, KvOf(0, 20), stream_)->held);
  EXPECT_FALSE(memory->Hold(*none, KvOf(1, 11), second)->held);
  EXPECT_TRUE(memory->Hold(*small, KvOf(2, 10), second)->held);
  EXPECT_TRUE(large->On(*device_).has_value());
  EXPECT_FALSE(large->On(*two).has_value());
  EXPECT_TRUE(small->On(*two).has_value());
}

// Runs that keep layers, some of which are stopped, prompts that go, readers and later runs: what is read is
// right, the budget is exceeded by what runs have under way alone, and nothing is left.
TEST_F(KvDeviceMemoryTest, AnyHistoryKeepsWhatItWasGiven) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int history = 0; history < 60; ++history) {
    SCOPED_TRACE("seed " + std::to_string(seed) + ", history " + std::to_string(history));
    const int64_t budget = Draw<int64_t>(random, 1, 100);
    const auto memory = MemoryOf(budget);
    struct Kept {
      int number;
      std::unique_ptr<KvSlab> slab;
      std::unique_ptr<KvKeeping> beside;
    };
    std::vector<Kept> kept;
    for (int step = 0; step < 80; ++step) {
      const size_t any = kept.empty() ? 0 : Draw<size_t>(random, 0, kept.size() - 1);
      const int what = kept.empty() ? 0 : Draw<int>(random, 0, 9);
      if (what < 4) {
        auto slab = NewSlab(Draw<int64_t>(random, 0, 40));
        KvDeviceMemory::Holding holding = Hold(*memory, *slab, step);
        const bool may = slab->shape().tokens > 0 && slab->shape().tokens <= budget;
        const bool all_settled =
            std::all_of(kept.begin(), kept.end(), [](const Kept& one) { return one.beside == nullptr; });
        ASSERT_TRUE(holding.held ? may : !may || !all_settled);
        if (holding.held) kept.push_back({step, std::move(slab), std::move(holding.beside)});
      } else if (what < 6) {
        ASSERT_TRUE(kept[any].beside == nullptr || kept[any].beside->Finish().ok());
        kept[any].beside.reset();
      } else if (what == 6) {
        kept.erase(kept.begin() + static_cast<ptrdiff_t>(any));
      } else if (what == 7) {
        ExpectValues(*kept[any].slab, kept[any].number);
      } else if (const auto on_device = kept[any].slab->On(*device_); on_device.has_value()) {
        const auto* values = on_device->buffer->data<float>();
        ASSERT_EQ(values[0], Value(kept[any].number, 0, 0, 0, 0));
      } else {
        ASSERT_TRUE(kept[any].slab->on_host());
      }
      int64_t under_way = 0;
      for (const Kept& one : kept) under_way += one.beside == nullptr ? 0 : one.slab->shape().bytes();
      ASSERT_LE(memory->bytes(), budget * kTokenBytes + under_way);
    }
    for (Kept& one : kept) {
      ASSERT_TRUE(one.beside == nullptr || one.beside->Finish().ok());
      one.beside.reset();
    }
    ASSERT_LE(memory->bytes(), budget * kTokenBytes);
    ASSERT_EQ(stream_.memory.live_bytes(), memory->bytes());
    for (Kept& one : kept) ExpectValues(*one.slab, one.number);
    kept.clear();
    ASSERT_EQ(memory->bytes(), 0);
    ASSERT_EQ(stream_.memory.live_bytes(), 0);
  }
}

// For ThreadSanitizer: a run makes room while others read.
TEST_F(KvDeviceMemoryTest, IsReadWhileARunMakesRoom) {
  constexpr int kSlabs = 60;
  const auto memory = MemoryOf(50);
  std::vector<std::unique_ptr<KvSlab>> slabs;
  for (int i = 0; i < kSlabs; ++i) slabs.push_back(NewSlab(10));
  std::atomic<int> there{0};
  std::thread run([&] {
    for (int i = 0; i < kSlabs; ++i) {
      const KvDeviceMemory::Holding holding = Hold(*memory, *slabs[i], i);
      there = i + 1;
      EXPECT_TRUE(holding.beside == nullptr || holding.beside->Finish().ok());
    }
  });
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 2; ++reader) {
    readers.emplace_back([&, reader] {
      for (int i = reader; i < kSlabs; i += 1 + reader) {
        while (there <= i) std::this_thread::yield();
        EXPECT_TRUE(OnDevice(*slabs[i]) || slabs[i]->on_host());
        ExpectValues(*slabs[i], i);
      }
    });
  }
  run.join();
  for (std::thread& reader : readers) reader.join();
  EXPECT_LE(memory->bytes(), 50 * kTokenBytes);
}

}  // namespace
}  // namespace meshfill
