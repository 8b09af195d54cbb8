#include "engine/comm/in_process.h"

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "kernels/reference/reference_device.h"
#include "kernels/run_deadline.h"
#include "kernels/stop_token.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/run/watched_stream.h"

namespace meshfill {
namespace {

BufferRef MakeBuffer(size_t size_bytes) {
  return std::make_shared<Buffer>(::operator new(size_bytes), size_bytes,
                                  [](void* data, size_t) { ::operator delete(data); });
}

BufferRef NumberBuffer(int64_t number) {
  BufferRef buffer = MakeBuffer(sizeof(number));
  *buffer->data<int64_t>() = number;
  return buffer;
}

absl::Time Soon() { return MonotonicNow() + absl::Seconds(30); }

void RunRanks(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

// Whether `message` names each of the words.
void ExpectNames(const absl::Status& status, const std::vector<std::string>& words) {
  for (const std::string& word : words) EXPECT_NE(status.message().find(word), std::string::npos) << status;
}

TEST(InProcess, HandsOverTheReference) {
  auto ranks = MakeInProcessCommunicators(2);
  EXPECT_EQ(ranks[1]->rank(), 1);
  EXPECT_EQ(ranks[1]->size(), 2);
  BufferRef from0 = NumberBuffer(10);
  BufferRef from1 = NumberBuffer(11);
  auto receive0 = ranks[0]->SendReceive(Traffic::kQ, 1, from0, 1, 8);
  auto receive1 = ranks[1]->SendReceive(Traffic::kQ, 0, from1, 0, 8);
  ASSERT_TRUE(receive0.ok() && receive1.ok());
  EXPECT_EQ((*receive0)->Wait(Soon()).value(), from1);
  EXPECT_EQ((*receive1)->Wait(Soon()).value(), from0);
  EXPECT_EQ(from0.use_count(), 1) << "the exchange keeps a message that was taken";
}

TEST(InProcess, MatchesInTheOrderOfCallsForEachOperation) {
  auto ranks = MakeInProcessCommunicators(2);
  std::vector<std::unique_ptr<PendingReceive>> receives;
  for (int i = 0; i < 3; ++i) {
    receives.push_back(ranks[0]->SendReceive(Traffic::kKv, 1, NumberBuffer(i), 1, 8).value());
  }
  auto other = ranks[0]->SendReceive(Traffic::kO, 1, NumberBuffer(0), 1, 8).value();
  ASSERT_TRUE(ranks[1]->SendReceive(Traffic::kO, 0, NumberBuffer(99), 0, 8).ok());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(ranks[1]->SendReceive(Traffic::kKv, 0, NumberBuffer(100 + i), 0, 8).ok());
  }
  for (int i : {2, 0, 1}) {  // waited for in any order
    EXPECT_EQ(*receives[i]->Wait(Soon()).value()->data<int64_t>(), 100 + i);
  }
  EXPECT_EQ(*other->Wait(Soon()).value()->data<int64_t>(), 99);
}

TEST(InProcess, CopiesToWhereAReceiverWantsIt) {
  auto ranks = MakeInProcessCommunicators(2);
  const BufferRef into = NumberBuffer(1);
  auto receive = ranks[0]->SendReceiveInto(Traffic::kGather, 1, MakeBuffer(0), 1, into).value();
  auto empty = ranks[0]->SendReceiveInto(Traffic::kGather, 1, MakeBuffer(0), 1, MakeBuffer(0)).value();
  ASSERT_TRUE(ranks[1]->SendReceive(Traffic::kGather, 0, NumberBuffer(7), 0, 0).ok());
  ASSERT_TRUE(ranks[1]->SendReceive(Traffic::kGather, 0, MakeBuffer(0), 0, 0).ok());
  EXPECT_EQ(receive->Wait(Soon()).value(), into);
  EXPECT_EQ(*into->data<int64_t>(), 7);
  EXPECT_EQ(empty->Wait(Soon()).value()->size_bytes(), 0u);
  auto late = ranks[0]->SendReceiveInto(Traffic::kGather, 1, MakeBuffer(0), 1, into).value();
  EXPECT_TRUE(absl::IsDeadlineExceeded(late->Wait(MonotonicNow()).status()));
}

TEST(InProcess, CarriesEmptyMessages) {
  auto ranks = MakeInProcessCommunicators(2);
  auto receive = ranks[0]->SendReceive(Traffic::kQ, 1, MakeBuffer(0), 1, 0).value();
  ASSERT_TRUE(ranks[1]->SendReceive(Traffic::kQ, 0, MakeBuffer(0), 0, 0).ok());
  EXPECT_EQ(receive->Wait(Soon()).value()->size_bytes(), 0u);
}

// Every rank passes numbers round a ring of a random stride; each must see its neighbour's, in order.
TEST(InProcess, RingsOfThreads) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int draw = 0; draw < 30; ++draw) {
    const int n = Draw(random, 2, 16);
    const int stride = Draw(random, 1, n - 1);
    const int rounds = Draw(random, 1, 50);
    auto ranks = MakeInProcessCommunicators(n);
    std::vector<int> wrong(n, 0);
    RunRanks(n, [&](int rank) {
      const int to = (rank + stride) % n;
      const int from = (rank + n - stride) % n;
      for (int64_t round = 0; round < rounds; ++round) {
        const auto op = kPrefillTraffics[round % std::ssize(kPrefillTraffics)];
        auto receive = ranks[rank]->SendReceive(op, to, NumberBuffer(rank * 1000 + round), from, 8);
        const auto message = receive.ok() ? (*receive)->Wait(Soon()) : receive.status();
        if (!message.ok() || *(*message)->data<int64_t>() != from * 1000 + round) ++wrong[rank];
      }
    });
    ASSERT_EQ(wrong, std::vector<int>(n, 0)) << "seed " << seed << ", draw " << draw;
  }
}

TEST(InProcess, AWaitEndsAtItsDeadlineAndNamesWhoWaitsForWhom) {
  auto ranks = MakeInProcessCommunicators(4);
  auto receive = ranks[2]->SendReceive(Traffic::kKv, 1, NumberBuffer(0), 3, 8).value();
  const absl::Time start = MonotonicNow();
  const absl::Status status = receive->Wait(start + absl::Milliseconds(30)).status();
  EXPECT_GE(MonotonicNow() - start, absl::Milliseconds(30));
  EXPECT_LT(MonotonicNow() - start, absl::Seconds(10));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  ExpectNames(status, {"rank 2", "recv_kv", "rank 3"});
}

TEST(InProcess, AbortWakesEveryRankWithTheFirstReason) {
  constexpr int kRanks = 8;
  auto ranks = MakeInProcessCommunicators(kRanks);
  std::vector<absl::Status> ends(kRanks);
  const absl::Time start = MonotonicNow();
  RunRanks(kRanks, [&](int rank) {
    if (rank == 0) {  // never sends
      absl::SleepFor(absl::Milliseconds(20));
      ranks[0]->Abort(absl::CancelledError("the client left"));
      ranks[0]->Abort(absl::InternalError("a later reason"));
      return;
    }
    while (ends[rank].ok()) {
      auto receive = ranks[rank]->SendReceive(Traffic::kO, (rank + 1) % kRanks, NumberBuffer(rank),
                                              (rank + kRanks - 1) % kRanks, 8);
      ends[rank] =
          receive.ok() ? (*receive)->Wait(MonotonicNow() + absl::Seconds(60)).status() : receive.status();
    }
  });
  EXPECT_LT(MonotonicNow() - start, absl::Seconds(20));
  for (int rank = 1; rank < kRanks; ++rank) {
    EXPECT_EQ(ends[rank].code(), absl::StatusCode::kCancelled);
    ExpectNames(ends[rank], {"rank " + std::to_string(rank), "send_o", "the client left"});
  }
  const absl::Status after = ranks[3]->SendReceive(Traffic::kQ, 4, NumberBuffer(0), 4, 8).status();
  EXPECT_EQ(after.code(), absl::StatusCode::kCancelled);
}

TEST(InProcess, AnAbortWithoutAReasonIsAnErrorAllTheSame) {
  auto ranks = MakeInProcessCommunicators(2);
  auto receive = ranks[0]->SendReceive(Traffic::kQ, 1, NumberBuffer(0), 1, 8).value();
  ranks[1]->Abort(absl::OkStatus());
  EXPECT_EQ(receive->Wait(Soon()).status().code(), absl::StatusCode::kAborted);
}

TEST(InProcess, AbortFreesWhatNobodyTook) {
  auto ranks = MakeInProcessCommunicators(2);
  BufferRef message = NumberBuffer(0);
  auto receive = ranks[0]->SendReceive(Traffic::kQ, 1, message, 1, 8);
  EXPECT_EQ(message.use_count(), 2);
  ranks[1]->Abort(absl::AbortedError("over"));
  EXPECT_EQ(message.use_count(), 1);
}

TEST(InProcess, ReceivesAfterThePeerIsGone) {
  auto ranks = MakeInProcessCommunicators(2);
  ASSERT_TRUE(ranks[1]->SendReceive(Traffic::kQ, 0, NumberBuffer(5), 0, 8).ok());
  ranks[1].reset();
  auto receive = ranks[0]->SendReceive(Traffic::kQ, 1, NumberBuffer(4), 1, 8).value();
  ranks[0].reset();
  EXPECT_EQ(*receive->Wait(Soon()).value()->data<int64_t>(), 5);
}

TEST(InProcess, RefusesMisuse) {
  auto ranks = MakeInProcessCommunicators(3);
  const auto code = [&](int to, BufferRef message, int from) {
    return ranks[1]->SendReceive(Traffic::kQ, to, std::move(message), from, 8).status().code();
  };
  EXPECT_EQ(code(1, NumberBuffer(0), 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, NumberBuffer(0), 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(3, NumberBuffer(0), 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, NumberBuffer(0), -1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, nullptr, 0), absl::StatusCode::kInvalidArgument);

  auto receive = ranks[0]->SendReceive(Traffic::kKv, 1, NumberBuffer(0), 2, 16).value();
  ASSERT_TRUE(ranks[2]->SendReceive(Traffic::kKv, 0, NumberBuffer(0), 1, 8).ok());
  const absl::Status wrong_size = receive->Wait(Soon()).status();
  EXPECT_EQ(wrong_size.code(), absl::StatusCode::kInternal);
  ExpectNames(wrong_size, {"rank 0", "rank 2", "8 bytes", "16"});
  EXPECT_EQ(receive->Wait(Soon()).status().code(), absl::StatusCode::kInternal) << "waited twice";
}

TEST(InProcess, MailboxesAreBounded) {
  auto ranks = MakeInProcessCommunicators(2);
  absl::Status status;
  int sent = 0;
  for (; status.ok() && sent < 100000; ++sent) {
    status = ranks[0]->SendReceive(Traffic::kQ, 1, MakeBuffer(0), 1, 0).status();
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_GT(sent, 64) << "a ring of 64 ranks must fit";
  ExpectNames(status, {"rank 0", "rank 1", "recv_q"});
}

class Point final : public StreamPoint {
 public:
  double SecondsSince(const StreamPoint&) const override { return 0; }
};

// A rank's stream that queues its operations, and the points behind which messages came to it.
class QueueingStream final : public WatchedStream {
 public:
  QueueingStream() : WatchedStream(DType::kF32) {}
  absl::StatusOr<std::shared_ptr<const StreamPoint>> Mark() override { return marked; }
  absl::StatusOr<DeviceMessage> Fetch(DeviceMessage message) override {
    fetched.push_back(message.ready);
    return message;
  }
  absl::StatusOr<BufferRef> TakeOver(DeviceMessage message) override {
    taken_over.push_back(message.ready);
    return std::move(message.buffer);
  }

  using Points = std::vector<std::shared_ptr<const StreamPoint>>;
  const std::shared_ptr<const StreamPoint> marked = std::make_shared<Point>();
  Points fetched, taken_over;
};

TEST(InProcess, AMessageComesToItsReceiversStreamBehindItsSendersOperations) {
  QueueingStream streams[2];
  auto ranks = MakeInProcessCommunicators(std::vector<Stream*>{&streams[0], &streams[1]});
  std::unique_ptr<PendingReceive> receives[2];
  for (int rank : {0, 1}) {
    receives[rank] =
        ranks[rank]->SendReceive(Traffic::kKv, 1 - rank, NumberBuffer(rank), 1 - rank, 8).value();
    EXPECT_EQ(streams[1 - rank].fetched, QueueingStream::Points{streams[rank].marked});
  }
  for (int rank : {0, 1}) {
    EXPECT_EQ(streams[rank].taken_over, QueueingStream::Points());
    EXPECT_EQ(*receives[rank]->Wait(Soon()).value()->data<int64_t>(), 1 - rank);
    EXPECT_EQ(streams[rank].taken_over, QueueingStream::Points{streams[1 - rank].marked});
  }
}

// A paused run's waits do not end while it stands still, and the rest of their time is left afterwards.
// Pauses before a wait begins do not count, so that an attempt in which this thread was late to begin proves
// nothing.
TEST(InProcess, PausesMoveTheDeadline) {
  const std::unique_ptr<Device> device = MakeReferenceDevice(DType::kF32);
  StopToken run;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int rank = 0; rank < 2; ++rank) streams.push_back(device->NewStream(&run).value());
  auto ranks = MakeInProcessCommunicators(std::vector<Stream*>{streams[0].get(), streams[1].get()}, &run);
  constexpr absl::Duration kWait = absl::Milliseconds(30);
  bool moved = false;
  for (int attempt = 0; attempt < 30 && !moved; ++attempt) {
    auto receive = ranks[0]->SendReceive(Traffic::kQ, 1, NumberBuffer(0), 1, 8).value();
    const absl::Duration before = run.PausedTime();
    run.Pause();
    std::thread owner([&] {
      absl::SleepFor(3 * kWait);
      run.Resume();
    });
    const absl::Time begin = MonotonicNow();
    const absl::Status status = receive->Wait(begin + kWait).status();
    const absl::Duration waited = MonotonicNow() - begin;
    owner.join();
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    moved = waited >= run.PausedTime() - before + kWait - absl::Milliseconds(1);
  }
  EXPECT_TRUE(moved);
}

// Pauses before the wait began move no deadline.
TEST(RunDeadlineTest, IsMovedByThePausesSinceItsBegin) {
  const absl::Time time = MonotonicNow();
  EXPECT_EQ(RunDeadline(nullptr, time).Now(), time);
  StopToken run;
  const auto pause = [&run] {
    run.Pause();
    absl::SleepFor(absl::Milliseconds(2));
    run.Resume();
  };
  pause();
  const absl::Duration before = run.PausedTime();
  const RunDeadline deadline(&run, time);
  EXPECT_EQ(deadline.Now(), time);
  pause();
  EXPECT_GT(run.PausedTime(), before);
  EXPECT_EQ(deadline.Now(), time + (run.PausedTime() - before));
}

}  // namespace
}  // namespace meshfill
