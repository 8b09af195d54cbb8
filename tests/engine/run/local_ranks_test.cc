#include "engine/run/local_ranks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace meshfill {
namespace {

constexpr int kRanks = 4;

TEST(LocalRanksTest, RunsEachRankOnAThreadOfItsOwn) {
  std::promise<void> all_run;
  const std::shared_future<void> go = all_run.get_future().share();
  std::mutex mutex;
  std::set<int> begun;
  std::set<std::thread::id> threads;
  std::vector<absl::StatusOr<RankOutput>> outputs(kRanks, absl::UnknownError("not done"));
  LocalRanks ranks;
  ranks.Start(
      kRanks,
      [&](int index) -> absl::StatusOr<RankOutput> {
        {
          const std::lock_guard<std::mutex> lock(mutex);
          begun.insert(index);
          threads.insert(std::this_thread::get_id());
          if (begun.size() == kRanks) all_run.set_value();
        }
        go.wait();  // for the others, which therefore run at the same time
        if (index == 2) return absl::InternalError("NaN");
        return RankOutput{.logits = std::vector<float>(index, 1.0f)};
      },
      [&](int index, absl::StatusOr<RankOutput> output) { outputs[index] = std::move(output); });
  ranks.Join();
  EXPECT_EQ(threads.size(), static_cast<size_t>(kRanks));
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == 2) {
      EXPECT_EQ(outputs[rank].status(), absl::InternalError("NaN"));
    } else {
      ASSERT_TRUE(outputs[rank].ok()) << outputs[rank].status();
      EXPECT_EQ(outputs[rank]->logits.size(), static_cast<size_t>(rank));
    }
  }
  ranks.Join();  // twice is fine
}

TEST(FirstCauseTest, IsAFailureOfARanksOwn) {
  const absl::StatusOr<RankOutput> done = RankOutput(), stopped = absl::CancelledError("stopped"),
                                   aborted = absl::AbortedError("another rank failed"),
                                   failed = absl::InternalError("NaN"), later = absl::InternalError("later");
  EXPECT_TRUE(FirstCause({done, done}).ok());
  EXPECT_EQ(FirstCause({done, stopped, failed, later, aborted}), failed.status());
  EXPECT_EQ(FirstCause({aborted, failed}), failed.status());
  EXPECT_EQ(FirstCause({failed, stopped}), failed.status());
  EXPECT_EQ(FirstCause({stopped, done}), stopped.status()) << "the prefill was cancelled";
}

TEST(PeerWaitTimeoutTest, GrowsWithWhatIsPredicted) {
  Plan plan{PlanShape{.layout = TokenLayout::Make(LayoutKind::kStriped, 1, 8, 1).value()}};
  EXPECT_EQ(PeerWaitTimeout(plan), absl::Minutes(1));
  plan.predicted.seconds = 30;
  EXPECT_EQ(PeerWaitTimeout(plan), absl::Minutes(11));
}

TEST(LocalRanksTest, ItsEndWaitsForTheRanks) {
  std::promise<void> proceed;
  const std::shared_future<void> go = proceed.get_future().share();
  std::atomic<int> done{0};
  std::thread later;
  {
    LocalRanks ranks;
    ranks.Start(
        kRanks,
        [&](int) -> absl::StatusOr<RankOutput> {
          go.wait();
          return RankOutput{};
        },
        [&](int, absl::StatusOr<RankOutput>) { ++done; });
    EXPECT_EQ(done, 0);
    later = std::thread([&] { proceed.set_value(); });
  }
  EXPECT_EQ(done, kRanks);
  later.join();
}

}  // namespace
}  // namespace meshfill
