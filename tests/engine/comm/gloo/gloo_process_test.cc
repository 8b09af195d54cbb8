// Ranks as processes: they give the same bits as threads, and are killed and stopped while they work.
#include <random>
#include <thread>

#include "engine/comm/in_process.h"
#include "kernels/monotonic_time.h"
#include "tests/engine/comm/gloo/gloo_ranks.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/schedule/random_schedule.h"

namespace meshfill {
namespace {

// One round on a ring: a message to the next rank, one from the rank before.
absl::Status PassOn(Communicator& communicator, int rank, size_t size_bytes, absl::Time deadline) {
  const int n = communicator.size();
  auto receive = communicator.SendReceive(Traffic::kKv, (rank + 1) % n, PatternBuffer(size_bytes, rank),
                                          (rank + n - 1) % n, size_bytes);
  if (!receive.ok()) return receive.status();
  const auto message = (*receive)->Wait(deadline);
  if (message.ok() && !HasPattern(**message, size_bytes, (rank + n - 1) % n)) {
    return absl::UnknownError("another message");
  }
  return message.status();
}

TEST(GlooProcesses, GiveTheBitsOfInProcessRanks) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (Tile tile : {Tile{1, 4}, Tile{2, 3}, Tile{4, 2}}) {
    const int n = tile.ranks();
    const int kv_inner = tile.b == 4 ? 2 : 0;
    const Plan plan = {
        {.layout = *TokenLayout::Make(LayoutKind::kStriped, n, Draw<int64_t>(random, n, 300), 4),
         .tile = tile,
         .kv_inner = kv_inner,
         .partial_dtype = DType::kF32},
        /*slice_tokens=*/1024,
        /*placement=*/{},
        RandomSchedule(random, tile, kv_inner),
        /*predicted=*/{}};
    const ModelShape model = {.layers = 1, .q_heads = 4, .kv_heads = 2, .head_dim = 8, .dtype = DType::kF32};
    std::vector<std::vector<float>> expected(n);
    auto threads = MakeInProcessCommunicators(n);
    RunRanks(n, [&](int rank) { expected[rank] = RunExecutor(plan, model, seed, rank, *threads[rank]); });
    ASSERT_FALSE(expected[0].empty());
    GlooProcesses processes(n, [&](int rank, Communicator& communicator, Pipe&, Pipe&) {
      return RunExecutor(plan, model, seed, rank, communicator) == expected[rank] ? 0 : 1;
    });
    EXPECT_EQ(RunExecutor(plan, model, seed, 0, processes.communicator()), expected[0]);
    for (int rank = 1; rank < n; ++rank) EXPECT_EQ(processes.Join(rank), 0) << "rank " << rank;
  }
}

// Rank 2 of a ring of 5 is killed among large messages. Who waits for it hears of it from gloo, within 200
// ms; rank 0 is no neighbour, and waits until its control plane, here a thread, aborts.
TEST(GlooProcesses, SurviveAKill) {
  constexpr int kRanks = 5;
  constexpr size_t kMessageBytes = 8 << 20;
  GlooProcesses processes(kRanks, [](int rank, Communicator& communicator, Pipe& report, Pipe& command) {
    absl::Status status;
    for (int round = 0; status.ok(); ++round) {
      status = PassOn(communicator, rank, kMessageBytes, Soon());
      if (round == 2) report.Write("r");
    }
    if (rank == 3) report.Write("d");
    command.Read(1);  // until the test has seen enough
    communicator.Abort(absl::AbortedError("over"));
    const bool names_it = status.message().find("rank 2") != absl::string_view::npos;
    return status.code() == absl::StatusCode::kUnavailable && names_it ? 0 : 1;
  });
  absl::Status end;
  absl::Time ended;
  std::thread rank0([&] {
    while (end.ok()) end = PassOn(processes.communicator(), 0, kMessageBytes, Soon());
    ended = MonotonicNow();
  });
  for (int rank = 1; rank < kRanks; ++rank) EXPECT_EQ(processes.report(rank).Read(1), "r");
  const absl::Time killed = MonotonicNow();
  processes.Kill(2, SIGKILL);
  EXPECT_EQ(processes.report(3).Read(1), "d");
  const absl::Duration noticed = MonotonicNow() - killed;
  const absl::Time aborted = MonotonicNow();
  processes.communicator().Abort(absl::UnavailableError("worker 2 died"));
  rank0.join();
  std::printf("noticed after %s, aborted in %s\n", absl::FormatDuration(noticed).c_str(),
              absl::FormatDuration(ended - aborted).c_str());
  ExpectStatus(end, absl::StatusCode::kUnavailable, {"rank 0", "worker 2 died"});
  EXPECT_LT(noticed, absl::Seconds(5));  // 200 ms on a machine of its own
  EXPECT_LT(ended - aborted, absl::Seconds(5));
  processes.command(3).Write("e");
  EXPECT_EQ(processes.Join(3), 0);
  EXPECT_EQ(processes.Join(2), -SIGKILL);
}

// A stopped peer breaks nothing: waits end at their deadlines, an abort ends the run, and had the peer gone
// on it would have been heard.
TEST(GlooProcesses, SurviveAStop) {
  GlooProcesses processes(2, [](int rank, Communicator& communicator, Pipe& report, Pipe& command) {
    report.Write("r");
    command.Read(1);
    if (!PassOn(communicator, rank, 1000, Soon()).ok()) return 1;
    return PassOn(communicator, rank, 1000, Soon()).code() == absl::StatusCode::kUnavailable ? 0 : 2;
  });
  EXPECT_EQ(processes.report(1).Read(1), "r");
  processes.Kill(1, SIGSTOP);
  processes.command(1).Write("g");
  auto receive = processes.communicator().SendReceive(Traffic::kQ, 1, PatternBuffer(8, 0), 1, 8).value();
  const absl::Time start = MonotonicNow();
  ExpectStatus(receive->Wait(start + absl::Milliseconds(100)).status(), absl::StatusCode::kDeadlineExceeded,
               {"rank 0", "recv_q", "rank 1"});
  EXPECT_LT(MonotonicNow() - start, absl::Seconds(10));
  processes.Kill(1, SIGCONT);
  EXPECT_TRUE(PassOn(processes.communicator(), 0, 1000, Soon()).ok());
  processes.communicator().Abort(absl::CancelledError("over"));
  EXPECT_EQ(processes.Join(1), 0);
}

// Nor does it keep who has ended its run: a worker takes no other until then.
TEST(GlooProcesses, ARunEndsSoonBesideAStoppedPeer) {
  GlooProcesses processes(2, [](int, Communicator&, Pipe& report, Pipe&) {
    report.Write("r");
    while (true) pause();
    return 0;
  });
  EXPECT_EQ(processes.report(1).Read(1), "r");
  processes.Stop(1);
  const absl::Time start = MonotonicNow();
  processes.EndRun();
  EXPECT_LT(MonotonicNow() - start, absl::Seconds(20)) << "a second is what it waits";
}

// A peer that is killed while it is stopped ends the waits for it, and those of who had a message for it that
// has not left.
TEST(GlooProcesses, AKillOfAStoppedPeerIsNoticed) {
  for (int from : {1, 2}) {
    GlooProcesses processes(3, [](int, Communicator&, Pipe& report, Pipe& command) {
      report.Write("r");
      command.Read(1);
      return 0;
    });
    for (int rank : {1, 2}) EXPECT_EQ(processes.report(rank).Read(1), "r");
    auto receive =
        processes.communicator().SendReceive(Traffic::kO, 1, PatternBuffer(8 << 20, 0), from, 8).value();
    processes.Kill(1, SIGSTOP);
    std::thread kill([&] {
      absl::SleepFor(absl::Milliseconds(50));
      processes.Kill(1, SIGKILL);
    });
    const absl::Time start = MonotonicNow();
    ExpectStatus(receive->Wait(Soon()).status(), absl::StatusCode::kUnavailable,
                 {"rank 0", "send_o", "with rank 1 is lost"});
    EXPECT_LT(MonotonicNow() - start, absl::Seconds(10));
    kill.join();
  }
}

}  // namespace
}  // namespace meshfill
