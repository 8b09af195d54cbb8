// Weights that devices of one process share: whatever the paces of their readers, each gets the parts that
// one device would have packed, of the same bits. On the CPU a device is an object of its own; where there
// are fewer GPUs than devices, some are on the same GPU.
#include "engine/run/peer_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/model/family.h"
#include "engine/model/make_model.h"
#include "engine/model/streamed_weights.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/reference/reference_device.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/run/part_products.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/test_device.h"

namespace meshfill {
namespace {

using testing::HasSubstr;

constexpr absl::Duration kLong = absl::Minutes(1);

class PeerWeightsTest : public testing::TestWithParam<SharedModelCase> {
 protected:
  void SetUp() override {
    const absl::Status made = MakeSharedModel(GetParam(), path_);
    ASSERT_TRUE(made.ok()) << made;
  }

  std::unique_ptr<const ModelTensors> Tensors() const {
    auto tensors = ModelTensors::Find(path_);
    EXPECT_TRUE(tensors.ok()) << tensors.status();
    return *std::move(tensors);
  }

  static std::unique_ptr<Device> MakeDevice(int index) {
    if (!TestsOnCuda()) return MakeCpuDevice(DType::kF32, 1, 1);
    const auto hardware = FindDevices(TestDevice(), {.ranks = 64});
    EXPECT_TRUE(hardware.ok()) << hardware.status();
    auto device = (*hardware)->Make(index % (*hardware)->count(), DType::kBf16);
    EXPECT_TRUE(device.ok()) << device.status();
    return *std::move(device);
  }

  struct Pool {
    std::vector<std::unique_ptr<Device>> devices;
    std::vector<std::unique_ptr<const ModelTensors>> tensors;
    std::unique_ptr<const PeerWeights> weights;
  };
  Pool Load(int count) const {
    Pool pool;
    std::vector<PeerWeights::Place> places;
    for (int i = 0; i < count; ++i) {
      pool.devices.push_back(MakeDevice(i));
      pool.tensors.push_back(Tensors());
      places.push_back({.tensors = pool.tensors.back().get(), .device = pool.devices.back().get()});
    }
    auto weights = PeerWeights::Load(places);
    EXPECT_TRUE(weights.ok()) << weights.status();
    if (weights.ok()) pool.weights = *std::move(weights);
    return pool;
  }

  // Products with each part, as one device packs it.
  std::vector<std::vector<std::vector<float>>> Expected() const {
    const auto device = MakeDevice(0);
    StreamedWeights streamed(Tensors(), *device);
    const auto stream = device->NewStream(nullptr);
    EXPECT_TRUE(stream.ok()) << stream.status();
    std::vector<std::vector<std::vector<float>>> products;
    for (int part = 0; part < kLayers + streamed.head_parts(); ++part) {
      const auto packed = streamed.Load(part, [] { return PageCache::kFill; });
      EXPECT_TRUE(packed.ok()) << packed.status();
      products.push_back(ProductsWith(**stream, **packed));
    }
    return products;
  }

  TempFolder folder_;
  const std::string path_ = folder_ / "model";
};

INSTANTIATE_TEST_SUITE_P(Models, PeerWeightsTest,
                         testing::Values(SharedModelCase{ModelFamily::kLlama},
                                         SharedModelCase{ModelFamily::kQwen3Moe},
                                         SharedModelCase{ModelFamily::kQwen2},
                                         SharedModelCase{ModelFamily::kQwen3Moe, DType::kF8E4M3},
                                         SharedModelCase{ModelFamily::kGptOss, DType::kF4E2M1}),
                         NameOf);

// 9 devices: more than a layer has panels. Not every device is in the run; some have two readers; some
// readers read no LM head, and some leave early.
TEST_P(PeerWeightsTest, EveryReaderGetsTheParts) {
  const auto expected = Expected();
  const uint64_t seed = TestSeed();
  SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed);
  for (const int count : {2, 3, 9}) {
    const Pool pool = Load(count);
    ASSERT_NE(pool.weights, nullptr);
    std::vector<std::unique_ptr<WeightFeed>> feeds;
    std::vector<std::thread> readers;
    for (int device = 0; device < count; ++device) {
      std::mt19937_64 random(seed + 100 * count + device);
      if (count > 2 && Draw(random, 0, 3) == 0) continue;
      const int at_once = Draw(random, 1, 2);
      const bool with_head = Draw(random, 0, 1) == 1;
      feeds.push_back(pool.weights->Open(*pool.tensors[device], at_once, with_head, nullptr));
      WeightFeed& feed = *feeds.back();
      EXPECT_EQ(feed.mode(), WeightMode::kSharded);
      EXPECT_EQ(feed.sent_bytes(), 0);
      for (int reader = 0; reader < at_once; ++reader) {
        const int until = Draw(random, 0, 4) == 0 ? Draw(random, 0, kLayers)
                          : with_head             ? static_cast<int>(expected.size())
                                                  : kLayers;
        readers.emplace_back([&, device, reader, until, pace = Draw(random, 0, 3)] {
          const auto stream = pool.devices[device]->NewStream(nullptr);
          ASSERT_TRUE(stream.ok()) << stream.status();
          for (int part = 0; part < until; ++part) {
            const auto taken = feed.Take(reader, part, kLong);
            ASSERT_TRUE(taken.ok()) << taken.status();
            absl::SleepFor(absl::Milliseconds(pace));  // any pace will do
            EXPECT_EQ(ProductsWith(**stream, **taken), expected[part])
                << "part " << part << " on device " << device << " of " << count;
          }
          feed.Leave(reader);
        });
      }
    }
    for (std::thread& reader : readers) reader.join();
  }
}

// Runs one after another, and at once, have what the first had.
TEST_P(PeerWeightsTest, RunsAtOnceShareTheShares) {
  const auto expected = Expected();
  const Pool pool = Load(2);
  ASSERT_NE(pool.weights, nullptr);
  std::filesystem::remove_all(path_);  // open files stay
  const auto stream = pool.devices[1]->NewStream(nullptr);
  ASSERT_TRUE(stream.ok()) << stream.status();
  const auto first = pool.weights->Open(*pool.tensors[1], 1, /*with_head=*/false, nullptr);
  for (int part = 0; part < kLayers; ++part) {
    const auto second = pool.weights->Open(*pool.tensors[1], 1, /*with_head=*/true, nullptr);
    for (const auto& [feed, at] : {std::pair(first.get(), part), {second.get(), 0}}) {
      const auto taken = feed->Take(0, at, kLong);
      ASSERT_TRUE(taken.ok()) << taken.status();
      EXPECT_EQ(ProductsWith(**stream, **taken), expected[at]);
    }
  }
}

TEST_P(PeerWeightsTest, AStoppedRunEndsTheFeed) {
  const Pool pool = Load(2);
  ASSERT_NE(pool.weights, nullptr);
  StopToken stop;
  const auto feed = pool.weights->Open(*pool.tensors[0], 1, /*with_head=*/true, &stop);
  ASSERT_TRUE(feed->Take(0, 0, kLong).ok());
  stop.Stop();
  EXPECT_TRUE(absl::IsCancelled(feed->Take(0, kLayers, kLong).status()));
}

// A file that lost its end meanwhile: said by name, however many devices read it.
TEST_P(PeerWeightsTest, AFileThatIsCutOffIsSaid) {
  const auto device = MakeDevice(0);
  const auto first = Tensors(), second = Tensors();
  for (const auto& entry : std::filesystem::directory_iterator(path_)) {
    if (entry.path().extension() == ".safetensors") std::filesystem::resize_file(entry.path(), 3000);
  }
  const auto weights = PeerWeights::Load({{first.get(), device.get()}, {second.get(), device.get()}});
  EXPECT_TRUE(absl::IsDataLoss(weights.status())) << weights.status();
  EXPECT_THAT(std::string(weights.status().message()), HasSubstr(path_));
}

TEST_P(PeerWeightsTest, DevicesThatCannotDivideSaySo) {
  const auto device = MakeReferenceDevice(DType::kF32);
  const auto tensors = Tensors();
  EXPECT_TRUE(absl::IsUnimplemented(PeerWeights::Load({{tensors.get(), device.get()}}).status()));
}

}  // namespace
}  // namespace meshfill
