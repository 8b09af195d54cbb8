// Weights that several workers have together: whatever the paces of their ranks, each gets the parts that one
// process would have packed, and keeps no more than its share and two parts.
#include "engine/run/sharded_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/comm/in_process.h"
#include "engine/model/family.h"
#include "engine/model/make_model.h"
#include "engine/model/model_tensors.h"
#include "engine/model/streamed_weights.h"
#include "engine/run/weight_exchange.h"
#include "kernels/cpu/cpu_device.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/run/part_products.h"
#include "tests/engine/run/ready_endpoint.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

using testing::HasSubstr;

constexpr absl::Duration kLong = absl::Minutes(1);

// One model, and as many workers of it as a test wants.
class ShardedWeightsTest : public testing::TestWithParam<SharedModelCase> {
 protected:
  void SetUp() override {
    const absl::Status made = MakeSharedModel(GetParam(), path_);
    ASSERT_TRUE(made.ok()) << made;
  }

  struct Worker {
    std::unique_ptr<Device> device = MakeCpuDevice(DType::kF32, 1, 1);
    std::unique_ptr<const ModelTensors> tensors;
    std::unique_ptr<ShardedWeights> weights;
  };
  Worker Load() const {
    Worker worker;
    auto tensors = ModelTensors::Find(path_);
    EXPECT_TRUE(tensors.ok()) << tensors.status();
    worker.tensors = *std::move(tensors);
    auto weights = ShardedWeights::Make(*worker.tensors, *worker.device);
    EXPECT_TRUE(weights.ok()) << weights.status();
    worker.weights = *std::move(weights);
    return worker;
  }
  std::vector<Worker> LoadWorkers(int count) const {
    std::vector<Worker> workers;
    for (int i = 0; i < count; ++i) workers.push_back(Load());
    return workers;
  }

  // A run over the workers: a feed for each.
  struct Run {
    std::vector<std::unique_ptr<ReadyEndpoint>> endpoints;
    std::vector<std::unique_ptr<Stream>> streams;
    StopToken stop;
    std::vector<std::unique_ptr<WeightFeed>> feeds;  // last: they use the rest
  };
  static std::unique_ptr<Run> Open(std::vector<Worker>& workers, std::optional<int> head,
                                   const std::vector<int>& readers, absl::Duration wait = kLong,
                                   bool all_at_once = false) {
    auto run = std::make_unique<Run>();
    const int of = static_cast<int>(workers.size());
    std::vector<std::unique_ptr<Communicator>> communicators = MakeInProcessCommunicators(of);
    for (int i = 0; i < of; ++i) {
      run->endpoints.push_back(std::make_unique<ReadyEndpoint>(std::move(communicators[i])));
      auto stream = workers[i].device->NewStream(&run->stop);
      EXPECT_TRUE(stream.ok()) << stream.status();
      run->streams.push_back(*std::move(stream));
      run->feeds.push_back(workers[i].weights->Open(
          {.share = {.index = i, .of = of},
           .head = head,
           .at_once = all_at_once || i % 2 == 0,
           .exchange = MakeWeightExchange(*run->endpoints.back(), {}, *run->streams.back(),
                                          {.connect = kLong, .piece = wait})},
          readers[i], &run->stop));
    }
    return run;
  }

  // A rank of each worker takes all that it needs. Then everything has been sent, and the feeds go.
  static void TakeAll(Run& run, const std::vector<Worker>& workers, int head) {
    std::vector<std::thread> ranks;
    for (int i = 0; i < static_cast<int>(run.feeds.size()); ++i) {
      const int parts = i == head ? workers[i].weights->parts() : kLayers;
      ranks.emplace_back([&run, i, parts] {
        for (int part = 0; part < parts; ++part) EXPECT_TRUE(run.feeds[i]->Take(0, part, kLong).ok());
        run.feeds[i]->Leave(0);
      });
    }
    for (std::thread& rank : ranks) rank.join();
    run.feeds.clear();
  }

  // Of the model, as one process packs it.
  std::vector<std::vector<std::vector<float>>> Expected() const {
    const std::unique_ptr<Device> device = MakeCpuDevice(DType::kF32, 2, 1);
    const auto tensors = ModelTensors::Find(path_);
    const auto stream = device->NewStream(nullptr);
    EXPECT_TRUE(tensors.ok() && stream.ok()) << tensors.status();
    std::vector<std::vector<std::vector<float>>> expected;
    for (int layer = 0; layer < kLayers; ++layer) {
      auto packed = (*tensors)->PackLayer(*device, layer, FillPageCache);
      EXPECT_TRUE(packed.ok()) << packed.status();
      expected.push_back(ProductsWith(**stream, {.layer = *std::move(packed), .head = nullptr}));
    }
    auto head = (*tensors)->PackHead(*device, 0, kVocab, FillPageCache);
    EXPECT_TRUE(head.ok()) << head.status();
    expected.push_back(ProductsWith(**stream, {.layer = {}, .head = *std::move(head)}));
    return expected;
  }

  // All packed bytes of the model, and of its largest part.
  std::pair<int64_t, int64_t> Bytes() const {
    const std::unique_ptr<Device> device = MakeCpuDevice(DType::kF32, 1, 1);
    const auto tensors = ModelTensors::Find(path_);
    EXPECT_TRUE(tensors.ok()) << tensors.status();
    std::vector<int64_t> parts;
    for (int layer = 0; layer < kLayers; ++layer) {
      parts.push_back((*tensors)->LayerImage(*device, layer).value().bytes);
    }
    const int64_t head_rows = RowsOfHeadPart((*tensors)->config().shape);
    for (int64_t first = 0; first < kVocab; first += head_rows) {
      parts.push_back((*tensors)->HeadImage(*device, std::min(head_rows, kVocab - first)).value().bytes);
    }
    return {std::accumulate(parts.begin(), parts.end(), int64_t{0}),
            *std::max_element(parts.begin(), parts.end())};
  }

  const TempFolder folder_;
  const std::string path_ = folder_ / "model";
};

INSTANTIATE_TEST_SUITE_P(Families, ShardedWeightsTest,
                         testing::Values(SharedModelCase{ModelFamily::kLlama},
                                         SharedModelCase{ModelFamily::kQwen2},
                                         SharedModelCase{ModelFamily::kMixtral},
                                         SharedModelCase{ModelFamily::kGemma3},
                                         SharedModelCase{ModelFamily::kGptOss},
                                         SharedModelCase{ModelFamily::kQwen2, DType::kF8E4M3},
                                         SharedModelCase{ModelFamily::kMixtral, DType::kF8E4M3},
                                         SharedModelCase{ModelFamily::kGptOss, DType::kF4E2M1}),
                         [](const auto& param) {
                           const std::string name = FamilyOf(param.param.family).name;
                           return name + "_" + DTypeName(param.param.dtype);
                         });

TEST_P(ShardedWeightsTest, RanksAtAnyPaceGetTheSamePartsFromTheirShares) {
  std::mt19937_64 random(TestSeed());
  const auto expected = Expected();
  for (int draw = 0; draw < 4; ++draw) {
    const int count = Draw(random, 2, 5);
    std::optional<int> head;  // nobody: a run that ends before the logits
    if (draw > 0) head = Draw(random, 0, count - 1);
    std::vector<Worker> workers = LoadWorkers(count);
    for (int runs = 0; runs < 2; ++runs) {  // the second finds the shares in memory
      std::vector<int> readers;
      for (int i = 0; i < count; ++i) readers.push_back(Draw(random, 1, 3));
      const auto run = Open(workers, head, readers);
      std::vector<std::thread> ranks;
      for (int i = 0; i < count; ++i) {
        for (int reader = 0; reader < readers[i]; ++reader) {
          const int parts = i == head ? workers[i].weights->parts() : kLayers;
          ranks.emplace_back([&, i, reader, parts, seed = random()] {
            std::mt19937_64 pace(seed);
            const auto stream = workers[i].device->NewStream(nullptr);
            ASSERT_TRUE(stream.ok()) << stream.status();
            std::vector<float> logits;
            for (int part = 0; part < parts; ++part) {
              const auto taken = run->feeds[i]->Take(reader, part, kLong);
              ASSERT_TRUE(taken.ok()) << taken.status();
              std::this_thread::sleep_for(std::chrono::microseconds(Draw(pace, 0, 2000)));
              const auto products = ProductsWith(**stream, **taken);
              if (part < kLayers) {
                EXPECT_EQ(products, expected[part]) << "layer " << part;
              } else {
                logits.insert(logits.end(), products[0].begin(), products[0].end());
              }
            }
            if (parts > kLayers) {
              EXPECT_EQ(logits, expected.back()[0]);
            }
            run->feeds[i]->Leave(reader);
          });
        }
      }
      for (std::thread& rank : ranks) rank.join();
      std::vector<int64_t> counted;
      for (const auto& feed : run->feeds) counted.push_back(feed->sent_bytes());
      run->feeds.clear();  // all has been sent
      for (int i = 0; i < count; ++i) EXPECT_EQ(run->endpoints[i]->sent_bytes(), counted[i]) << i;
    }
    if (head.has_value()) continue;
    int64_t kept = 0, layers = 0;
    for (const Worker& worker : workers) kept += worker.weights->memory().bytes;
    for (int layer = 0; layer < kLayers; ++layer) {
      layers += workers[0].tensors->LayerImage(*workers[0].device, layer).value().bytes;
    }
    EXPECT_EQ(kept, layers);
  }
}

TEST_P(ShardedWeightsTest, AWorkerKeepsItsShareAndTwoParts) {
  const std::pair<int64_t, int64_t> bytes = Bytes();
  const int64_t all = bytes.first, largest = bytes.second;
  constexpr int64_t kCutBytes = 256;   // shares of a part differ by so many
  for (const int count : {2, 4, 9}) {  // 9: more than a layer has panels
    std::vector<Worker> workers = LoadWorkers(count);
    for (int runs = 0; runs < 2; ++runs) {  // the second packs nothing
      TakeAll(*Open(workers, 0, std::vector<int>(count, 1)), workers, 0);
    }
    int64_t kept = 0;
    for (int i = 0; i < count; ++i) {
      const WeightMemory memory = workers[i].weights->memory();
      kept += memory.bytes;
      EXPECT_LE(memory.bytes, all / count + workers[i].weights->parts() * kCutBytes);
      EXPECT_LE(memory.most_bytes, memory.bytes + kPartsAhead * largest) << i;
      EXPECT_GE(memory.most_bytes, largest) << i;
    }
    EXPECT_EQ(kept, all);
  }
}

// Another number of workers: new shares, read from the file, and the old ones go.
TEST_P(ShardedWeightsTest, OtherSharesReplaceTheOldOnes) {
  std::vector<Worker> workers = LoadWorkers(3);
  const auto take_all = [&](const std::vector<int>& readers, int head) {
    const auto run = Open(workers, head, readers);
    TakeAll(*run, workers, head);
  };
  take_all({1, 1, 1}, 0);
  const int64_t all = Bytes().first;
  workers.pop_back();
  take_all({1, 1}, 1);
  EXPECT_EQ(workers[0].weights->memory().bytes + workers[1].weights->memory().bytes, all);
}

TEST_P(ShardedWeightsTest, AShareStaysWhileARunUsesIt) {
  std::vector<Worker> workers = LoadWorkers(2);
  const auto kept = [&workers] {
    int64_t bytes = 0;
    for (const Worker& worker : workers) bytes += worker.weights->memory().bytes;
    return bytes;
  };
  const auto run = Open(workers, 0, {1, 1});
  for (const Worker& worker : workers) worker.weights->DropUnused();
  TakeAll(*run, workers, 0);
  EXPECT_EQ(kept(), Bytes().first);
  for (const Worker& worker : workers) worker.weights->DropUnused();
  EXPECT_EQ(kept(), 0);
}

TEST_P(ShardedWeightsTest, APeerThatDoesNotComeIsAnErrorThatNamesIt) {
  std::vector<Worker> workers = LoadWorkers(2);
  const auto run = Open(workers, 0, {1, 1}, /*wait=*/absl::Milliseconds(50));  // nobody asks the other
  const auto taken = run->feeds[0]->Take(0, 0, kLong);
  EXPECT_TRUE(absl::IsDeadlineExceeded(taken.status())) << taken.status();
  EXPECT_THAT(std::string(taken.status().message()), HasSubstr("gather from rank 1"));
}

TEST_P(ShardedWeightsTest, APartThatDoesNotComeIsNamed) {
  std::vector<Worker> workers = LoadWorkers(2);
  const auto run = Open(workers, /*head=*/0, {1, 1});  // the other one never asks, so that it gives nothing
  const absl::Status layer = run->feeds[0]->Take(0, 0, absl::Milliseconds(50)).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(layer)) << layer;
  EXPECT_THAT(std::string(layer.message()), HasSubstr("share 0 of 2 of the weights: layer 0 has not come"));
  EXPECT_THAT(std::string(layer.message()), HasSubstr("whether the other workers get on"));
  const absl::Status head = run->feeds[0]->Take(0, kLayers, absl::Milliseconds(50)).status();
  EXPECT_THAT(std::string(head.message()),
              HasSubstr("share 0 of 2 of the weights: the LM head has not come"));
}

TEST_P(ShardedWeightsTest, AStopAndAnAbortEndTheWait) {
  std::vector<Worker> workers = LoadWorkers(2);
  {
    const auto run = Open(workers, 0, {1, 1});
    run->endpoints[0]->Abort(absl::AbortedError("another rank failed"));  // before any reader asks
    EXPECT_TRUE(absl::IsAborted(run->feeds[0]->Take(0, 0, kLong).status()));
  }
  const auto run = Open(workers, 0, {1, 1});
  run->stop.Stop();
  EXPECT_TRUE(absl::IsCancelled(run->feeds[1]->Take(0, 0, kLong).status()));
}

TEST_P(ShardedWeightsTest, AFileThatShrinksIsAnErrorThatNamesIt) {
  std::vector<Worker> workers = LoadWorkers(2);
  const std::string file = path_ + "/model.safetensors";
  std::filesystem::resize_file(file, std::filesystem::file_size(file) / 4);
  const auto run = Open(workers, 0, {1, 1}, absl::Seconds(1), /*all_at_once=*/true);
  absl::Status status;  // the other worker's is that nothing comes
  for (int part = 0; part < kLayers && !absl::IsDataLoss(status); ++part) {
    for (const int rank : {1, 0}) {  // the file's end is in rank 1's share
      if (!absl::IsDataLoss(status)) status = run->feeds[rank]->Take(0, part, kLong).status();
    }
  }
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(file));
}

}  // namespace
}  // namespace meshfill
