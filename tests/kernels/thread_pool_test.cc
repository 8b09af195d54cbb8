#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace meshfill {
namespace {

class ThreadPoolTest : public testing::TestWithParam<int> {};

TEST_P(ThreadPoolTest, RunsEachTaskOnceInEveryRun) {
  ThreadPool pool(GetParam());
  ASSERT_EQ(pool.threads(), GetParam());
  for (int64_t tasks = 0; tasks < 300; ++tasks) {
    std::vector<int> calls(tasks,
                           0);  // not atomic: a task that ran twice or a run that returned early is a race
    pool.ParallelFor(tasks, [&](int64_t task, int worker) {
      EXPECT_GE(worker, 0);
      EXPECT_LT(worker, GetParam());
      ++calls[task];
    });
    EXPECT_EQ(calls, std::vector<int>(tasks, 1));
  }
}

TEST_P(ThreadPoolTest, AWorkerIsOneThreadThroughoutARun) {
  ThreadPool pool(GetParam());
  std::vector<std::vector<std::thread::id>> seen(GetParam());
  pool.ParallelFor(2000, [&](int64_t, int worker) { seen[worker].push_back(std::this_thread::get_id()); });
  for (const auto& ids : seen) {
    for (const auto& id : ids) EXPECT_EQ(id, ids.front());
  }
}

TEST_P(ThreadPoolTest, AWorkersTasksRise) {
  ThreadPool pool(GetParam());
  std::vector<std::vector<int64_t>> drawn(GetParam());
  pool.ParallelFor(5000, [&](int64_t task, int worker) { drawn[worker].push_back(task); });
  size_t total = 0;
  for (const auto& tasks : drawn) {
    total += tasks.size();
    EXPECT_TRUE(std::is_sorted(tasks.begin(), tasks.end()));
  }
  EXPECT_EQ(total, 5000u);
}

INSTANTIATE_TEST_SUITE_P(Teams, ThreadPoolTest, testing::Values(1, 2, 3, 8));

// The whole team must be at work at once: each task waits until all have begun.
TEST(ThreadPool, TasksRunAtTheSameTime) {
  ThreadPool pool(4);
  for (int run = 0; run < 50; ++run) {
    std::atomic<int> begun{0};
    pool.ParallelFor(4, [&](int64_t, int) {
      ++begun;
      while (begun < 4) std::this_thread::yield();
    });
    EXPECT_EQ(begun, 4);
  }
}

// Two ranks' teams on the same cores do not disturb each other.
TEST(ThreadPool, TeamsAreIndependent) {
  const auto rank = [] {
    ThreadPool pool(3);
    for (int run = 0; run < 500; ++run) {
      std::atomic<int64_t> sum{0};
      pool.ParallelFor(17, [&](int64_t task, int) { sum += task; });
      EXPECT_EQ(sum, 17 * 16 / 2);
    }
  };
  std::thread other(rank);
  rank();
  other.join();
}

}  // namespace
}  // namespace meshfill
