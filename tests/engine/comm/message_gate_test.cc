// Ranks that count their messages, in one process and in several that agree as a leader has them do it.
#include "engine/comm/message_gate.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "engine/comm/in_process.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"

namespace meshfill {
namespace {

absl::Status Finished() { return absl::OkStatus(); }

// The pauses in which a gate has told that all stand still, in order.
class Told {
 public:
  std::function<void(uint64_t)> Hear() {
    return [this](uint64_t pause) {
      const MutexLock lock(mu_);
      pauses_.push_back(pause);
      changed_.NotifyAll();
    };
  }
  std::vector<uint64_t> pauses() {
    const MutexLock lock(mu_);
    return pauses_;
  }
  // Until the pause is told. Ten seconds fail the test.
  void Await(uint64_t pause) {
    const absl::Time deadline = MonotonicNow() + absl::Seconds(10);
    const MutexLock lock(mu_);
    while (std::find(pauses_.begin(), pauses_.end(), pause) == pauses_.end()) {
      ASSERT_TRUE(changed_.WaitUntil(mu_, deadline)) << "pause " << pause << " was not told";
    }
  }

 private:
  Mutex mu_;
  CondVar changed_;
  std::vector<uint64_t> pauses_ ABSL_GUARDED_BY(mu_);
};

// A process: its ranks' threads pass the gate before each message, and then wait for all ranks of all
// processes, as those of messages that need each other.
struct Process {
  Process(int ranks, int messages, std::barrier<>& all) : gate(ranks, told.Hear()), begun(ranks) {
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([this, rank, messages, &all] {
        std::mt19937 random(static_cast<unsigned>(rank));
        for (int i = 0; i < messages; ++i) {
          const absl::Status passed = gate.Pass(rank, [&] {
            ++finishes;
            return absl::OkStatus();
          });
          EXPECT_TRUE(passed.ok()) << passed;
          ++begun[rank];
          if (random() % 4 == 0) absl::SleepFor(absl::Microseconds(random() % 300));
          all.arrive_and_wait();
        }
      });
    }
  }
  ~Process() {
    for (std::thread& thread : threads) thread.join();
  }

  Told told;
  MessageGate gate;
  std::vector<std::atomic<int>> begun;  // by rank
  std::atomic<int> finishes{0};
  std::vector<std::thread> threads;
};

TEST(MessageGateTest, RanksOfSeveralProcessesStandBeforeTheSameMessage) {
  constexpr int kMessages = 400;
  std::mt19937 random(7);
  int agreements = 0;
  for (int round = 0; round < 12 && !HasFailure(); ++round) {
    const int processes = 1 + static_cast<int>(random() % 3);
    std::vector<int> ranks(processes);
    int all_ranks = 0;
    for (int& each : ranks) all_ranks += each = 1 + static_cast<int>(random() % 3);
    std::barrier<> all(all_ranks);
    std::vector<std::unique_ptr<Process>> pool;
    for (const int each : ranks) pool.push_back(std::make_unique<Process>(each, kMessages, all));
    uint64_t pause = 0;
    for (int64_t most = 0; most < kMessages && !HasFailure();) {
      ++pause;
      most = 0;
      for (const auto& process : pool) {
        if (random() % 2 == 0) absl::SleepFor(absl::Microseconds(random() % 500));
        most = std::max(most, process->gate.Close(pause));
      }
      if (random() % 4 > 0 && most < kMessages) {  // else it is over before it is agreed
        for (const auto& process : pool) process->gate.CloseAt(pause, most);
        for (const auto& process : pool) process->told.Await(pause);
        ++agreements;
        for (const auto& process : pool) {
          EXPECT_GE(process->finishes, std::ssize(process->begun));
          for (const std::atomic<int>& begun : process->begun) EXPECT_EQ(begun, most);
        }
      }
      for (const auto& process : pool) process->gate.Open();
      for (const auto& process : pool) process->gate.CloseAt(pause, most);  // late
    }
    for (const auto& process : pool) {
      const std::vector<uint64_t> told = process->told.pauses();
      EXPECT_EQ(std::set<uint64_t>(told.begin(), told.end()).size(), told.size()) << "a pause is told once";
    }
  }
  EXPECT_GT(agreements, 12);
}

TEST(MessageGateTest, NoRankPassesTheFurthestOneHere) {
  Told told;
  MessageGate gate(2, told.Hear());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(gate.Pass(1, Finished).ok());
  ASSERT_TRUE(gate.Pass(0, Finished).ok());
  EXPECT_EQ(gate.Close(1), 3);
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(gate.Pass(0, Finished).ok());  // goes on to where the other one is
  std::atomic<bool> passed{false};
  std::thread further([&] {
    EXPECT_TRUE(gate.Pass(0, Finished).ok());
    passed = true;
  });
  std::thread other([&] { EXPECT_TRUE(gate.Pass(1, Finished).ok()); });
  gate.CloseAt(2, 9);  // of another pause
  EXPECT_TRUE(told.pauses().empty());
  gate.CloseAt(1, 3);
  told.Await(1);
  EXPECT_FALSE(passed);
  gate.CloseAt(1, 9);  // it is agreed already
  EXPECT_FALSE(passed);
  gate.Open();
  further.join();
  other.join();
  EXPECT_EQ(gate.Close(2), 4);
  gate.Open();
}

// A word of fewer messages than have begun here holds nobody before these.
TEST(MessageGateTest, ClosesBehindWhatHasBegun) {
  Told told;
  MessageGate gate(1, told.Hear());
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(gate.Pass(0, Finished).ok());
  EXPECT_EQ(gate.Close(1), 2);
  gate.CloseAt(1, 1);
  std::thread rank([&] { EXPECT_TRUE(gate.Pass(0, Finished).ok()); });
  told.Await(1);
  gate.Open();
  rank.join();
}

TEST(MessageGateTest, APauseMayFollowAnotherAtOnce) {
  Told told;
  MessageGate gate(1, told.Hear());
  std::thread rank;
  for (const uint64_t pause : {1, 2}) {
    EXPECT_EQ(gate.Close(pause), 0);
    gate.CloseAt(pause, 0);
    if (!rank.joinable()) rank = std::thread([&] { EXPECT_TRUE(gate.Pass(0, Finished).ok()); });
    told.Await(pause);
  }
  gate.Open();
  rank.join();
}

// A rank has another number in its process than in its run.
TEST(GatedCommunicatorTest, CountsItsRanksMessagesAndForwardsAll) {
  auto ranks = MakeInProcessCommunicators(3);
  const auto message = [] { return std::make_shared<Buffer>(nullptr, 0, std::shared_ptr<void>()); };
  Told told;
  MessageGate gate(2, told.Hear());
  GatedCommunicator gated(*ranks[2], gate, /*rank=*/1, [] { return absl::UnavailableError("lost"); });
  EXPECT_EQ(gated.rank(), 2);
  EXPECT_EQ(gated.size(), 3);
  auto receive = gated.SendReceive(Traffic::kQ, 0, message(), 0, 0);
  ASSERT_TRUE(receive.ok()) << receive.status();
  EXPECT_EQ(gate.Close(1), 1);
  EXPECT_EQ(gated.SendReceive(Traffic::kQ, 0, message(), 0, 0).status(), absl::UnavailableError("lost"));
  EXPECT_TRUE(gate.Pass(0, [] { return absl::InternalError("it has begun nothing"); }).ok());
  gated.Abort(absl::CancelledError("over"));
  EXPECT_TRUE(absl::IsCancelled((*receive)->Wait(MonotonicNow() + absl::Seconds(30)).status()));
}

TEST(MessageGateTest, WaitsForTheDeviceBeforeItStands) {
  Told told;
  MessageGate gate(1, told.Hear());
  EXPECT_EQ(gate.Close(1), 0);
  gate.CloseAt(1, 0);
  EXPECT_EQ(gate.Pass(0, [] { return absl::UnavailableError("the device is lost"); }),
            absl::UnavailableError("the device is lost"));
  EXPECT_TRUE(told.pauses().empty());
  std::thread rank([&] {
    EXPECT_TRUE(gate.Pass(0,
                          [&] {
                            EXPECT_TRUE(told.pauses().empty());
                            return absl::OkStatus();
                          })
                    .ok());
  });
  told.Await(1);
  gate.Open();
  rank.join();
}

TEST(MessageGateTest, StopLetsAllGoForGood) {
  Told told;
  MessageGate gate(1, told.Hear());
  gate.Close(1);
  std::thread rank([&] {
    for (int i = 0; i < 10; ++i) EXPECT_TRUE(gate.Pass(0, Finished).ok());
  });
  gate.Stop();
  rank.join();
  EXPECT_EQ(gate.Close(2), 10);
  std::atomic<bool> passed{false};
  std::thread later([&] {
    EXPECT_TRUE(gate.Pass(0, Finished).ok());
    passed = true;
  });
  const absl::Time deadline = MonotonicNow() + absl::Seconds(10);
  while (!passed && MonotonicNow() < deadline) absl::SleepFor(absl::Microseconds(100));
  EXPECT_TRUE(passed) << "it does not close again";
  gate.Open();
  later.join();
}

}  // namespace
}  // namespace meshfill
