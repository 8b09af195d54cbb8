// What a run has of weights that stream, whatever the paces of its ranks: the right part, and never more than
// two.
#include "engine/model/streamed_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/model/make_model.h"
#include "engine/model/model_tensors.h"
#include "engine/model/weight_feed.h"
#include "kernels/monotonic_time.h"
#include "kernels/reference/reference_device.h"
#include "kernels/return_if_error.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/temp_folder.h"
#include "tests/kernels/lone_stream.h"

namespace meshfill {
namespace {

using testing::HasSubstr;

constexpr absl::Duration kLong = absl::Minutes(1);
constexpr int64_t kVocab = 1300;
constexpr int kLayers = 6;

class StreamedWeightsTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(MakeModel({.layers = kLayers,
                           .hidden = 16,
                           .intermediate = 24,
                           .q_heads = 2,
                           .kv_heads = 1,
                           .vocab = kVocab,
                           .dtype = DType::kF32},
                          path_)
                    .ok());
    auto tensors = ModelTensors::Find(path_);
    ASSERT_TRUE(tensors.ok()) << tensors.status();
    weights_ = std::make_unique<StreamedWeights>(*std::move(tensors), *device_);
  }

  int parts() const { return kLayers + weights_->head_parts(); }

  const TempFolder folder_;
  const std::string path_ = folder_ / "model";
  const std::unique_ptr<Device> device_ = MakeReferenceDevice(DType::kF32);
  std::unique_ptr<StreamedWeights> weights_;
};

// Nobody else needs what it makes.
class LoneMaker : public PartMaker {
 public:
  void Quit() override {}
  bool serves_others() const override { return false; }
  WeightMode mode() const override { return WeightMode::kStreamed; }
  int64_t sent_bytes() const override { return 0; }
  std::string PartName(int /*part*/) const override { return "the part"; }
  const char* advice() const override { return "wait"; }
};

// Reads all the time, for so long, until its one part is there.
class SlowMaker final : public LoneMaker {
 public:
  explicit SlowMaker(absl::Duration takes) : takes_(takes) {}

  absl::StatusOr<std::shared_ptr<const WeightPart>> Load(int /*part*/,
                                                         const BeforeRead& before_read) override {
    const absl::Time end = MonotonicNow() + takes_;
    while (MonotonicNow() < end) {
      RETURN_IF_ERROR(before_read().status());
      std::this_thread::yield();
    }
    return std::make_shared<const WeightPart>();
  }

 private:
  const absl::Duration takes_;
};

TEST(WeightFeedTest, APartThatIsBeingReadIsWaitedForBeyondTheTimeout) {
  absl::Status status = absl::UnknownError("not taken");
  // A longer timeout where other processes keep the thread that reads from its core.
  for (absl::Duration timeout = absl::Milliseconds(50); !status.ok() && timeout < absl::Seconds(2);
       timeout *= 2) {
    const std::unique_ptr<WeightFeed> feed =
        MakeAhead(std::make_unique<SlowMaker>(4 * timeout), 1, 1, /*at_once=*/false, nullptr);
    status = feed->Take(0, 0, timeout).status();
  }
  EXPECT_TRUE(status.ok()) << status;
}

// Reads once for each part; keeps how.
class AskingMaker final : public LoneMaker {
 public:
  explicit AskingMaker(std::vector<PageCache>& answers) : answers_(answers) {}

  absl::StatusOr<std::shared_ptr<const WeightPart>> Load(int /*part*/,
                                                         const BeforeRead& before_read) override {
    ASSIGN_OR_RETURN(const PageCache answer, before_read());
    answers_.push_back(answer);
    return std::make_shared<const WeightPart>();
  }

 private:
  std::vector<PageCache>& answers_;
};

// The part that a reader waits for is kept for later runs; the one ahead of it passes the cache.
TEST(WeightFeedTest, KeepsInThePageCacheWhatIsWaitedFor) {
  std::vector<PageCache> answers;
  {
    const std::unique_ptr<WeightFeed> feed =
        MakeAhead(std::make_unique<AskingMaker>(answers), 1, 2, /*at_once=*/false, nullptr);
    ASSERT_TRUE(feed->Take(0, 0, kLong).ok());
    while (feed->reads() < 2) std::this_thread::yield();
  }
  EXPECT_EQ(answers, (std::vector{PageCache::kFill, PageCache::kPass}));
}

TEST_F(StreamedWeightsTest, CutsTheHeadWhereAProductMay) {
  EXPECT_EQ(weights_->head_rows() % 512, 0);
  EXPECT_EQ(weights_->head_parts(), 3);  // a layer is smaller than 512 rows: the least part
  const std::unique_ptr<WeightFeed> feed = weights_->Open(1, parts(), nullptr);
  int64_t rows = 0;
  for (int part = kLayers; part < parts(); ++part) {
    const auto taken = feed->Take(0, part, kLong);
    ASSERT_TRUE(taken.ok()) << taken.status();
    rows += (*taken)->head->out_features();
  }
  EXPECT_EQ(rows, kVocab);
}

// About a layer's bytes, and 512 rows at least.
TEST(RowsOfHeadPart, TakeAsMuchAsALayer) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 100; ++draw) {
    const ModelShape shape = {.layers = 2,
                              .hidden = Draw<int64_t>(random, 8, 200),
                              .intermediate = Draw<int64_t>(random, 1, 4000),
                              .q_heads = 4,
                              .kv_heads = 2,
                              .head_dim = 32,
                              .vocab = Draw<int64_t>(random, 1, 8000)};
    const int64_t rows = RowsOfHeadPart(shape);
    const int64_t layer_rows = WeightBytesOf(shape, DType::kF32).most_layer / (4 * shape.hidden);
    EXPECT_TRUE(rows == shape.vocab || (rows % 512 == 0 && rows < shape.vocab)) << rows;
    EXPECT_LE(rows, std::max<int64_t>(512, layer_rows));
    EXPECT_GT(rows + 512, std::min(layer_rows, shape.vocab));
    EXPECT_GE((int64_t{HeadParts(shape)}) * rows, shape.vocab);
    EXPECT_LT((HeadParts(shape) - int64_t{1}) * rows, shape.vocab);
  }
}

// Each part of the head has the rows that follow those of the part before.
TEST_F(StreamedWeightsTest, PartsOfTheHeadAreItsRowsInOrder) {
  const auto nothing = [] { return PageCache::kFill; };
  const auto head = weights_->tensors().PackHead(*device_, 0, kVocab, FillPageCache);
  ASSERT_TRUE(head.ok()) << head.status();
  const LoneStream stream = ReferenceStream(DType::kF32);
  const auto logits_of = [&](const PackedWeight& weight) {
    std::vector<float> x(16, 0.5f), y(static_cast<size_t>(weight.out_features()));
    EXPECT_TRUE(stream->Gemm({&weight, x.data(), 1, y.data(), DType::kF32}).ok());
    return y;
  };
  std::vector<float> logits;
  for (int part = kLayers; part < parts(); ++part) {
    const auto loaded = weights_->Load(part, nothing);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    const std::vector<float> of_part = logits_of(*(*loaded)->head);
    logits.insert(logits.end(), of_part.begin(), of_part.end());
  }
  EXPECT_EQ(logits, logits_of(**head));
}

// Each thing that is read may be the last: a run that is stopped waits for one of them at most.
TEST_F(StreamedWeightsTest, EveryReadAsksBefore) {
  for (const int part : {0, kLayers}) {
    int reads = 0;
    ASSERT_TRUE(weights_
                    ->Load(part,
                           [&] {
                             ++reads;
                             return PageCache::kFill;
                           })
                    .ok());
    EXPECT_GE(reads, part < kLayers ? 9 : 1);  // a layer's norms and matrices
    for (int last = 0; last < reads; ++last) {
      int read = 0;
      const auto stopped = weights_->Load(part, [&]() -> absl::StatusOr<PageCache> {
        if (read++ == last) return absl::CancelledError("stopped");
        return PageCache::kPass;
      });
      EXPECT_TRUE(absl::IsCancelled(stopped.status())) << stopped.status();
      EXPECT_EQ(read, last + 1);
    }
  }
}

TEST_F(StreamedWeightsTest, ReadingBeginsBeforeAnybodyAsks) {
  const std::unique_ptr<WeightFeed> feed = weights_->Open(1, parts(), nullptr);
  const absl::Time end = MonotonicNow() + kLong;
  while (weights_->held_parts() < kPartsAhead && MonotonicNow() < end) std::this_thread::yield();
  EXPECT_EQ(weights_->held_parts(), kPartsAhead);
  EXPECT_GT(feed->reads(), 0u);
  EXPECT_EQ(feed->mode(), WeightMode::kStreamed);
  EXPECT_EQ(feed->sent_bytes(), 0);
}

// Runs of several ranks at random paces, which may be stopped anywhere. Each rank sees each layer once, in
// order, and two parts of each run are in memory at most: one more may be on its way out.
TEST_F(StreamedWeightsTest, RanksAtAnyPaceHaveTwoPartsOfEachRun) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 20; ++draw) {
    const int runs = Draw(random, 1, 3);
    std::atomic<bool> done{false};
    std::atomic<int> most{0};
    std::vector<std::unique_ptr<StopToken>> stops;
    std::vector<std::unique_ptr<WeightFeed>> feeds;
    std::vector<std::thread> ranks;
    for (int run = 0; run < runs; ++run) {
      const int readers = Draw(random, 1, 4);
      const int last = Draw(random, 0, 1) == 1 ? parts() : kLayers;
      stops.push_back(std::make_unique<StopToken>());
      feeds.push_back(weights_->Open(readers, last, stops.back().get()));
      for (int reader = 0; reader < readers; ++reader) {
        const int leaves_at = Draw(random, 0, 3) == 0 ? Draw(random, 0, last) : last;
        ranks.emplace_back(
            [feed = feeds.back().get(), stop = stops.back().get(), reader, leaves_at, seed = random()] {
              std::mt19937_64 pace(seed);
              for (int part = 0; part < leaves_at; ++part) {
                const auto taken = feed->Take(reader, part, kLong);
                if (!taken.ok()) {
                  EXPECT_TRUE(absl::IsCancelled(taken.status())) << taken.status();
                  break;
                }
                EXPECT_EQ((*taken)->head == nullptr, part < kLayers);
                if (part < kLayers) {
                  EXPECT_EQ((*taken)->layer.attention_norm.values().size(), 16u);
                }
                std::this_thread::sleep_for(std::chrono::microseconds(Draw(pace, 0, 300)));
                if (Draw(pace, 0, 60) == 0) stop->Stop();
              }
              feed->Leave(reader);
            });
      }
    }
    std::thread watch([&] {
      while (!done) {
        most = std::max(most.load(), weights_->held_parts());
        std::this_thread::yield();
      }
    });
    for (std::thread& rank : ranks) rank.join();
    done = true;
    watch.join();
    EXPECT_LE(most, kPartsAhead * runs);
    feeds.clear();
    EXPECT_EQ(weights_->held_parts(), 0);
  }
}

TEST_F(StreamedWeightsTest, RunsShareAPart) {
  const auto nothing = [] { return PageCache::kFill; };
  const auto one = weights_->Load(3, nothing);
  const auto fails = [] { return absl::InternalError("it was read again"); };
  const auto other = weights_->Load(3, fails);
  ASSERT_TRUE(one.ok() && other.ok()) << other.status();
  EXPECT_EQ(*one, *other);
  EXPECT_TRUE(absl::IsInternal(weights_->Load(4, fails).status()));
}

// One part's disk stands still; who wants the same part waits, who wants another gets it.
TEST_F(StreamedWeightsTest, ARunWaitsForNobodyElsesDisk) {
  std::atomic<bool> reading{false}, go_on{false};
  const auto stuck = [&] {
    reading = true;
    while (!go_on) std::this_thread::yield();
    return PageCache::kFill;
  };
  const auto at_once = [] { return PageCache::kFill; };
  std::shared_ptr<const WeightPart> slow, same;
  std::thread reader([&] { slow = weights_->Load(1, stuck).value(); });
  while (!reading) std::this_thread::yield();
  std::thread waiter([&] { same = weights_->Load(1, at_once).value(); });
  EXPECT_TRUE(weights_->Load(2, at_once).ok());
  go_on = true;
  reader.join();
  waiter.join();
  EXPECT_EQ(slow, same);
}

// Whoever waits for another run's reads counts them as its own, and may be stopped between them.
TEST_F(StreamedWeightsTest, ARunIsToldOfTheReadsThatItWaitsFor) {
  std::atomic<bool> reading{false}, go_on{false};
  std::atomic<int> begun{0}, told{0};
  const auto stuck = [&] {
    ++begun;
    reading = true;
    while (!go_on) std::this_thread::yield();
    return PageCache::kFill;
  };
  std::shared_ptr<const WeightPart> kept;
  std::thread reader([&] { kept = weights_->Load(1, stuck).value(); });
  while (!reading) std::this_thread::yield();
  const auto stopped = [] { return absl::CancelledError("stopped"); };
  EXPECT_TRUE(absl::IsCancelled(weights_->Load(1, stopped).status()));
  EXPECT_EQ(begun, 1);  // the reader still stands there
  std::thread waiter([&] {
    const auto counts = [&] {
      ++told;
      return PageCache::kFill;
    };
    EXPECT_TRUE(weights_->Load(1, counts).ok());
  });
  while (told == 0) std::this_thread::yield();
  EXPECT_EQ(told, 1);  // one read is one sign of life, however long it takes
  go_on = true;
  reader.join();
  waiter.join();
  EXPECT_LE(told, begun);
}

TEST_F(StreamedWeightsTest, AFileThatShrinksIsAnErrorThatNamesIt) {
  const std::string file = path_ + "/model.safetensors";
  const std::string whole = ReadWholeFile(file);
  std::unique_ptr<WeightFeed> before = weights_->Open(1, parts(), nullptr);
  ASSERT_TRUE(before->Take(0, 0, kLong).ok());
  std::filesystem::resize_file(file, whole.size() / 4);
  absl::Status status;
  for (int part = 1; part < parts() && status.ok(); ++part) status = before->Take(0, part, kLong).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(HasSubstr(file), HasSubstr("when it was opened")));
  before.reset();  // it may still hold a part, which the next one would share
  std::filesystem::resize_file(file, 0);
  const std::unique_ptr<WeightFeed> none = weights_->Open(2, parts(), nullptr);
  EXPECT_TRUE(absl::IsDataLoss(none->Take(1, 0, kLong).status()));
  EXPECT_TRUE(absl::IsDataLoss(none->Take(0, 0, kLong).status()));
}

// The rank that is behind stands still with the run.
TEST_F(StreamedWeightsTest, PausesAreNoPartOfAWait) {
  StopToken stop;
  const std::unique_ptr<WeightFeed> feed = weights_->Open(2, parts(), &stop);
  ASSERT_TRUE(feed->Take(0, 0, kLong).ok());
  ASSERT_TRUE(feed->Take(1, 1, kLong).ok());
  stop.Pause();
  std::thread resumer([&] {
    const absl::Time until = MonotonicNow() + absl::Milliseconds(100);
    while (MonotonicNow() < until) std::this_thread::yield();
    feed->Leave(0);
    stop.Resume();
  });
  const absl::Status paused = feed->Take(1, 2, absl::Milliseconds(30)).status();
  EXPECT_TRUE(paused.ok()) << paused;
  resumer.join();
}

// The rank that is ahead waits for the other, which says when it gets on.
TEST_F(StreamedWeightsTest, WaitsEndAtTheirDeadlineOrWithTheRun) {
  StopToken stop;
  const std::unique_ptr<WeightFeed> feed = weights_->Open(2, parts(), &stop);
  ASSERT_TRUE(feed->Take(0, 0, kLong).ok());
  ASSERT_TRUE(feed->Take(1, 1, kLong).ok());
  const absl::Status late = feed->Take(1, 2, absl::Milliseconds(30)).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
  EXPECT_THAT(std::string(late.message()), testing::AllOf(HasSubstr(path_), HasSubstr("layer 2")));
  std::thread stopper([&] { stop.Stop(); });
  EXPECT_TRUE(absl::IsCancelled(feed->Take(1, 2, kLong).status()));
  stopper.join();
}

}  // namespace
}  // namespace meshfill
