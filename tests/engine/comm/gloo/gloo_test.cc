// Ranks as threads: what arrives, what is refused, and how runs end.
#include "engine/comm/gloo/gloo.h"

#include <arpa/inet.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "engine/comm/checksum.h"
#include "engine/comm/in_process.h"
#include "kernels/monotonic_time.h"
#include "kernels/stop_token.h"
#include "tests/engine/comm/gloo/gloo_ranks.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/schedule/random_schedule.h"

namespace meshfill {
namespace {

// Where a test looks into an address, which is opaque to everybody else.
constexpr size_t kRunOffset = 8;
constexpr size_t kSocketOffset = 40;

sockaddr_in SocketOf(const std::string& address) {
  sockaddr_in socket;
  std::memcpy(&socket, address.data() + kSocketOffset, sizeof(socket));
  return socket;
}

// -1: refused.
int ConnectTo(const sockaddr_in& address) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return fd;
  close(fd);
  return -1;
}

// Both in plain text and encrypted.
class Gloo : public ::testing::TestWithParam<bool> {
 protected:
  static GlooOptions With(GlooOptions options = {}) {
    options.encrypt = GetParam();
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(Wire, Gloo, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Encrypted" : "Plain"; });

TEST(Checksum, IsXxh3AndSeesEveryBit) {
  EXPECT_EQ(Checksum(nullptr, 0), 0x2d06800538d394c2);
  std::mt19937_64 random(TestSeed());
  for (size_t size : {1, 3, 16, 100, 240, 1000, 5000}) {
    BufferRef buffer = PatternBuffer(size, random());
    const uint64_t sum = Checksum(buffer->data(), size);
    for (int i = 0; i < 50; ++i) {
      uint8_t& byte = buffer->data<uint8_t>()[Draw<size_t>(random, 0, size - 1)];
      const uint8_t flip = static_cast<uint8_t>(1 << Draw(random, 0, 7));
      byte ^= flip;
      EXPECT_NE(Checksum(buffer->data(), size), sum);
      byte ^= flip;
    }
    EXPECT_EQ(Checksum(buffer->data(), size), sum);
  }
}

// Every rank passes messages round a ring of a random stride; each must see its neighbour's, in order.
TEST_P(Gloo, RingsOfThreads) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int draw = 0; draw < 8; ++draw) {
    const int n = Draw(random, 2, 8);
    const int stride = Draw(random, 1, n - 1);
    std::vector<size_t> sizes = {0, 1, (4 << 20) + 3};
    for (int i = 0; i < 20; ++i)
      sizes.push_back(Draw<size_t>(random, 0, 1) * Draw<size_t>(random, 0, 100000));
    GlooEndpoints endpoints(n, With({.run = random(), .checksum = Draw(random, 0, 3) > 0}));
    auto ranks = endpoints.ConnectAll();
    EXPECT_EQ(ranks[n - 1]->rank(), n - 1);
    EXPECT_EQ(ranks[n - 1]->size(), n);
    std::vector<absl::Status> ends(n);
    RunRanks(n, [&](int rank) {
      const int to = (rank + stride) % n;
      const int from = (rank + n - stride) % n;
      for (size_t round = 0; round < sizes.size() && ends[rank].ok(); ++round) {
        const auto op = kPrefillTraffics[round % std::ssize(kPrefillTraffics)];
        auto receive = ranks[rank]->SendReceive(op, to, PatternBuffer(sizes[round], rank * 1000 + round),
                                                from, sizes[round]);
        const auto message = receive.ok() ? (*receive)->Wait(Soon()) : receive.status();
        ends[rank] = message.status();
        if (message.ok() && !HasPattern(**message, sizes[round], from * 1000 + round)) {
          ends[rank] = absl::UnknownError("another message");
        }
      }
    });
    for (const absl::Status& end : ends)
      ASSERT_TRUE(end.ok()) << "seed " << seed << ", draw " << draw << ": " << end;
  }
}

TEST_P(Gloo, MatchesInTheOrderOfCallsForEachOperation) {
  GlooEndpoints endpoints(2, With());
  auto ranks = endpoints.ConnectAll();
  std::vector<std::unique_ptr<PendingReceive>> receives;
  for (int i = 0; i < 3; ++i) {
    receives.push_back(ranks[0]->SendReceive(Traffic::kKv, 1, PatternBuffer(8, i), 1, 8).value());
  }
  auto other = ranks[0]->SendReceive(Traffic::kO, 1, PatternBuffer(8, 0), 1, 8).value();
  ASSERT_TRUE(ranks[1]->SendReceive(Traffic::kO, 0, PatternBuffer(8, 99), 0, 8).ok());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(ranks[1]->SendReceive(Traffic::kKv, 0, PatternBuffer(8, 100 + i), 0, 8).ok());
  }
  for (int i : {2, 0, 1}) {  // waited for in any order
    EXPECT_TRUE(HasPattern(**receives[i]->Wait(Soon()), 8, 100 + i));
  }
  EXPECT_TRUE(HasPattern(**other->Wait(Soon()), 8, 99));
  EXPECT_EQ(other->Wait(Soon()).status().code(), absl::StatusCode::kInternal) << "waited twice";
}

// Two parts of one buffer, whose neighbours stay as they are.
// Whatever the order in which the two ranks come to their operations.
TEST_P(Gloo, MessagesOfOneOperationMeetNoneOfAnother) {
  constexpr int kMessages = 3;
  GlooEndpoints endpoints(2, With());
  auto ranks = endpoints.ConnectAll();
  std::map<std::pair<Traffic, int>, std::unique_ptr<PendingReceive>> receives;
  const auto pattern = [](Traffic traffic, int i) { return 100 * static_cast<int>(traffic) + i; };
  for (const Traffic traffic : kAllTraffics) {
    for (int i = 0; i < kMessages; ++i) {
      receives[{traffic, i}] = ranks[0]->SendReceive(traffic, 1, PatternBuffer(8, i), 1, 8).value();
    }
  }
  for (size_t at = kTraffics; at-- > 0;) {
    for (int i = 0; i < kMessages; ++i) {
      const Traffic traffic = kAllTraffics[at];
      ASSERT_TRUE(ranks[1]->SendReceive(traffic, 0, PatternBuffer(8, pattern(traffic, i)), 0, 8).ok());
    }
  }
  for (const auto& [which, receive] : receives) {
    const auto message = receive->Wait(Soon());
    ASSERT_TRUE(message.ok()) << message.status();
    EXPECT_TRUE(HasPattern(**message, 8, pattern(which.first, which.second)))
        << TrafficName(which.first) << " " << which.second;
  }
}

TEST_P(Gloo, ReceivesIntoMemoryThatIsThere) {
  GlooEndpoints endpoints(2, With());
  auto ranks = endpoints.ConnectAll();
  const BufferRef whole = PatternBuffer(5000, 1);
  const BufferRef first = PartOf(whole, 100, 2000), second = PartOf(whole, 3000, 1);
  auto one = ranks[0]->SendReceiveInto(Traffic::kGather, 1, MakeBuffer(0), 1, first).value();
  auto other = ranks[0]->SendReceiveInto(Traffic::kGather, 1, MakeBuffer(0), 1, second).value();
  ASSERT_TRUE(ranks[1]->SendReceive(Traffic::kGather, 0, PatternBuffer(2000, 2), 0, 0).ok());
  ASSERT_TRUE(ranks[1]->SendReceive(Traffic::kGather, 0, PatternBuffer(1, 3), 0, 0).ok());
  EXPECT_EQ(other->Wait(Soon()).value(), second);
  EXPECT_EQ(one->Wait(Soon()).value(), first);
  EXPECT_TRUE(HasPattern(*first, 2000, 2));
  EXPECT_TRUE(HasPattern(*second, 1, 3));
  for (size_t i = 0; i < whole->size_bytes(); ++i) {
    if ((i >= 100 && i < 2100) || i == 3000) continue;
    ASSERT_EQ(whole->data<uint8_t>()[i], PatternByte(1, i)) << i;
  }
}

TEST_P(Gloo, CarriesAMessageOf300MiB) {
  const size_t size_bytes = size_t{300} << 20;
  GlooEndpoints endpoints(2, With());
  auto ranks = endpoints.ConnectAll();
  BufferRef message = MakeBuffer(size_bytes);
  for (size_t i = 0; i < size_bytes / 8; ++i) message->data<uint64_t>()[i] = i * 0x9e3779b97f4a7c15;
  auto receive = ranks[0]->SendReceive(Traffic::kQ, 1, MakeBuffer(0), 1, size_bytes).value();
  auto other = ranks[1]->SendReceive(Traffic::kQ, 0, message, 0, 0).value();
  auto received = receive->Wait(Soon());
  ASSERT_TRUE(received.ok()) << received.status();
  EXPECT_EQ(std::memcmp((*received)->data(), message->data(), size_bytes), 0);
  EXPECT_EQ((*other->Wait(Soon()))->size_bytes(), 0u);
}

TEST_P(Gloo, HoldsAMessageUntilItHasLeft) {
  GlooEndpoints endpoints(2, With());
  auto ranks = endpoints.ConnectAll();
  std::weak_ptr<Buffer> message;
  {
    BufferRef buffer = PatternBuffer(1 << 20, 5);
    message = buffer;
    ASSERT_TRUE(ranks[0]->SendReceive(Traffic::kQ, 1, std::move(buffer), 1, 1).ok());
  }
  EXPECT_FALSE(message.expired()) << "nobody has received it";
  std::weak_ptr<Buffer> received;
  {
    auto receive = ranks[1]->SendReceive(Traffic::kQ, 0, PatternBuffer(1, 6), 0, 1 << 20).value();
    const BufferRef buffer = receive->Wait(Soon()).value();
    EXPECT_TRUE(HasPattern(*buffer, 1 << 20, 5));
    received = buffer;
  }
  const auto all_gone = [&] { return message.expired() && received.expired(); };
  for (int i = 0; i < 1000 && !all_gone(); ++i) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_TRUE(message.expired());
  EXPECT_TRUE(received.expired()) << "and what has come is its receiver's alone";
}

TEST_P(Gloo, AnEndedRankStillDeliversWhatItSent) {
  GlooEndpoints endpoints(3, With());
  auto ranks = endpoints.ConnectAll();
  const size_t size_bytes = 20 << 20;
  // Rank 1 waits for nobody: what rank 0 sends goes to rank 2, which stays.
  ASSERT_TRUE(ranks[1]->SendReceive(Traffic::kQ, 0, PatternBuffer(size_bytes, 5), 2, 1).ok());
  const auto staying = ranks[2]->SendReceive(Traffic::kQ, 1, PatternBuffer(1, 3), 0, 1);
  ASSERT_TRUE(staying.ok()) << staying.status();
  std::thread end([&] { ranks[1].reset(); });
  absl::SleepFor(absl::Milliseconds(GetParam() ? 50 : 1100));  // a slow peer, and one that is slower
  auto receive = ranks[0]->SendReceive(Traffic::kQ, 2, PatternBuffer(1, 4), 1, size_bytes);
  const auto message = receive.ok() ? (*receive)->Wait(Soon()) : receive.status();
  end.join();
  ASSERT_TRUE(message.ok()) << message.status();
  EXPECT_TRUE(HasPattern(**message, size_bytes, 5));
  auto late = ranks[0]->SendReceive(Traffic::kKv, 1, PatternBuffer(1, 4), 1, 1);
  ExpectStatus(late.ok() ? (*late)->Wait(Soon()).status() : late.status(), absl::StatusCode::kUnavailable,
               {"rank 0", "recv_kv", "rank 1", "is lost: Connection closed by peer"});
}

// A rank that waits for one peer hears that another one has gone before it took what it was sent.
TEST_P(Gloo, AMessageThatNobodyTakesEndsTheWaitForAnother) {
  GlooEndpoints endpoints(3, With());
  auto ranks = endpoints.ConnectAll();
  auto receive = ranks[0]->SendReceive(Traffic::kQ, 1, PatternBuffer(20 << 20, 5), 2, 1).value();
  ranks[1]->Abort(absl::AbortedError("over"));
  ExpectStatus(receive->Wait(Soon()).status(), absl::StatusCode::kUnavailable,
               {"rank 0", "recv_q from rank 2", "the connection with rank 1 is lost"});
  for (auto& rank : ranks) rank->Abort(absl::AbortedError("over"));
}

// ---- The executor sees no difference.

std::vector<std::vector<float>> RunExecutors(const Plan& plan, const ModelShape& model, uint64_t seed,
                                             std::vector<std::unique_ptr<Communicator>>& ranks) {
  std::vector<std::vector<float>> outputs(ranks.size());
  RunRanks(static_cast<int>(ranks.size()),
           [&](int rank) { outputs[rank] = RunExecutor(plan, model, seed, rank, *ranks[rank]); });
  return outputs;
}

TEST_P(Gloo, RandomMeshesGiveTheBitsOfInProcessRanks) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int draw = 0; draw < 6; ++draw) {
    const Tile tile = {.a = Draw(random, 1, 2), .b = std::array{2, 3, 4, 6}[Draw(random, 0, 3)]};
    const int kv_inner = DrawKvInner(random, tile);
    const Plan plan = {
        {.layout = *TokenLayout::Make(LayoutKind::kStriped, tile.ranks(), Draw<int64_t>(random, 1, 200),
                                      Draw<int64_t>(random, 1, 8)),
         .tile = tile,
         .kv_inner = kv_inner,
         .partial_dtype = Draw(random, 0, 1) ? DType::kF32 : DType::kBf16},
        /*slice_tokens=*/1024,
        /*placement=*/{},
        RandomSchedule(random, tile, kv_inner),
        /*predicted=*/{}};
    const ModelShape model = {.layers = 1, .q_heads = 4, .kv_heads = 2, .head_dim = 8, .dtype = DType::kF32};
    auto threads = MakeInProcessCommunicators(tile.ranks());
    GlooEndpoints endpoints(tile.ranks(), With());
    auto sockets = endpoints.ConnectAll();
    const uint64_t chunks_seed = random();
    const auto expected = RunExecutors(plan, model, chunks_seed, threads);
    ASSERT_FALSE(expected[0].empty());  // rank 0 has the first token
    ASSERT_EQ(RunExecutors(plan, model, chunks_seed, sockets), expected)
        << "seed " << seed << ": " << plan.DebugString();
  }
}

// ---- What is found.

// A payload has its checksum once SendReceive has returned, and leaves when the peer is ready: what is
// changed in between arrives as a wire or a memory would have corrupted it.
absl::Status SendCorrupted(bool checksum) {
  GlooEndpoints endpoints(2, {.checksum = checksum});
  auto ranks = endpoints.ConnectAll();
  std::mt19937_64 random(TestSeed());
  BufferRef message = PatternBuffer(100000, 1);
  auto sent = ranks[0]->SendReceive(Traffic::kKv, 1, message, 1, 10).value();
  message->data<uint8_t>()[Draw(random, 0, 99999)] ^= static_cast<uint8_t>(1 << Draw(random, 0, 7));
  auto receive = ranks[1]->SendReceive(Traffic::kKv, 0, PatternBuffer(10, 2), 0, 100000).value();
  EXPECT_TRUE(sent->Wait(Soon()).ok()) << "the other direction is whole";
  return receive->Wait(Soon()).status();
}

TEST(GlooPlain, FindsACorruptedPayload) {
  ExpectStatus(SendCorrupted(true), absl::StatusCode::kDataLoss,
               {"rank 1", "recv_kv", "rank 0", "message 0", "100000 bytes"});
  EXPECT_TRUE(SendCorrupted(false).ok());
}

TEST_P(Gloo, FindsDivergedSizes) {
  for (auto [sent, expected] : {std::pair<size_t, size_t>{8, 16}, {16, 8}, {0, 8}, {8, 0}, {1 << 20, 8}}) {
    GlooEndpoints endpoints(2, With());
    auto ranks = endpoints.ConnectAll();
    auto receive = ranks[0]->SendReceive(Traffic::kO, 1, PatternBuffer(4, 0), 1, expected).value();
    ASSERT_TRUE(ranks[1]->SendReceive(Traffic::kO, 0, PatternBuffer(sent, 0), 0, 4).ok());
    ExpectStatus(receive->Wait(Soon()).status(), absl::StatusCode::kInternal,
                 {"rank 0", "rank 1", std::to_string(sent) + " bytes", std::to_string(expected)});
  }
}

TEST(GlooPlain, RefusesMisuse) {
  GlooEndpoints endpoints(3);
  auto ranks = endpoints.ConnectAll();
  const auto code = [&](int to, BufferRef message, int from) {
    return ranks[1]->SendReceive(Traffic::kQ, to, std::move(message), from, 8).status().code();
  };
  EXPECT_EQ(code(1, PatternBuffer(8, 0), 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, PatternBuffer(8, 0), 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(3, PatternBuffer(8, 0), 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, PatternBuffer(8, 0), -1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, nullptr, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(endpoints.Connect(1).status().code(), absl::StatusCode::kInternal) << "connected twice";
}

// ---- Ends.

TEST(GlooPlain, AWaitDoesNotCountThePausesOfItsRun) {
  StopToken run;
  GlooEndpoints endpoints(2, {.stop = &run});
  auto ranks = endpoints.ConnectAll();
  auto receive = ranks[0]->SendReceive(Traffic::kKv, 1, PatternBuffer(8, 0), 1, 8).value();
  constexpr absl::Duration kDeadline = absl::Milliseconds(250);  // so that this thread is in time
  run.Pause();
  std::thread peer([&] {
    absl::SleepFor(2 * kDeadline);  // longer than the wait would last
    EXPECT_TRUE(ranks[1]->SendReceive(Traffic::kKv, 0, PatternBuffer(8, 1), 0, 8).ok());
  });
  const absl::StatusOr<BufferRef> received = receive->Wait(MonotonicNow() + kDeadline);
  peer.join();
  EXPECT_TRUE(received.ok()) << received.status();
}

TEST_P(Gloo, AWaitEndsAtItsDeadlineAndOthersGoOn) {
  GlooEndpoints endpoints(3, With());
  auto ranks = endpoints.ConnectAll();
  auto receive = ranks[2]->SendReceive(Traffic::kKv, 0, PatternBuffer(8, 0), 1, 8).value();
  const absl::Time start = MonotonicNow();
  const absl::Status status = receive->Wait(start + absl::Milliseconds(50)).status();
  EXPECT_GE(MonotonicNow() - start, absl::Milliseconds(50));
  EXPECT_LT(MonotonicNow() - start, absl::Seconds(10));
  ExpectStatus(status, absl::StatusCode::kDeadlineExceeded, {"rank 2", "recv_kv", "rank 1"});
  auto other = ranks[2]->SendReceive(Traffic::kQ, 1, PatternBuffer(8, 1), 1, 8).value();
  ASSERT_TRUE(ranks[1]->SendReceive(Traffic::kQ, 2, PatternBuffer(8, 2), 2, 8).ok());
  EXPECT_TRUE(HasPattern(**other->Wait(Soon()), 8, 2));
  for (auto& rank : ranks) rank->Abort(absl::AbortedError("over"));
}

TEST(GlooPlain, AnAbortWithoutAReasonIsAnErrorAllTheSame) {
  GlooEndpoints endpoints(2);
  auto ranks = endpoints.ConnectAll();
  auto receive = ranks[0]->SendReceive(Traffic::kKv, 1, PatternBuffer(8, 0), 1, 8).value();
  ranks[0]->Abort(absl::OkStatus());
  EXPECT_EQ(receive->Wait(Soon()).status().code(), absl::StatusCode::kAborted);
}

TEST_P(Gloo, AbortFromAnyThreadEndsEveryWait) {
  constexpr int kRanks = 5;
  GlooEndpoints endpoints(kRanks, With());
  auto ranks = endpoints.ConnectAll();
  std::vector<absl::Status> ends(kRanks);
  std::vector<absl::Duration> took(kRanks);
  std::atomic<int> waiting = 0;
  std::thread abort([&] {
    while (waiting < kRanks - 1) absl::SleepFor(absl::Milliseconds(1));
    absl::SleepFor(absl::Milliseconds(20));
    endpoints.endpoints[2]->Abort(absl::CancelledError("the client left"));
    ranks[2]->Abort(absl::InternalError("a later reason"));
  });
  const absl::Time start = MonotonicNow();
  RunRanks(kRanks, [&](int rank) {
    if (rank == 0) return;               // never sends
    const int from = rank == 2 ? 0 : 2;  // rank 2 sends to rank 0 only
    auto receive = ranks[rank]->SendReceive(Traffic::kO, 0, PatternBuffer(8, 0), from, 8);
    ++waiting;
    ends[rank] = receive.ok() ? (*receive)->Wait(Soon()).status() : receive.status();
    took[rank] = MonotonicNow() - start;
  });
  abort.join();
  ExpectStatus(ends[2], absl::StatusCode::kCancelled, {"rank 2", "send_o", "rank 0", "the client left"});
  for (int rank : {1, 3, 4}) {  // rank 2's peers know only that it has gone
    ExpectStatus(ends[rank], absl::StatusCode::kUnavailable,
                 {"rank " + std::to_string(rank), "send_o", "rank 2"});
  }
  for (absl::Duration duration : took) EXPECT_LT(duration, absl::Seconds(10));
  EXPECT_EQ(ranks[2]->SendReceive(Traffic::kQ, 3, PatternBuffer(8, 0), 3, 8).status().code(),
            absl::StatusCode::kCancelled);
  const absl::Time end = MonotonicNow();
  ranks[2].reset();  // with a message that nobody took
  EXPECT_LT(MonotonicNow() - end, absl::Seconds(10));
  for (auto& rank : ranks) {
    if (rank != nullptr) rank->Abort(absl::AbortedError("over"));
  }
}

TEST_P(Gloo, RunsOneAfterTheOther) {
  for (uint64_t run = 0; run < 10; ++run) {
    GlooEndpoints endpoints(4, With({.run = run}));
    auto ranks = endpoints.ConnectAll();
    std::vector<absl::Status> ends(4);
    RunRanks(4, [&](int rank) {
      auto receive = ranks[rank]->SendReceive(Traffic::kKv, rank ^ 1, PatternBuffer(8, run), rank ^ 1, 8);
      ends[rank] = receive.ok() ? (*receive)->Wait(Soon()).status() : receive.status();
      if (run % 2 == 1) ranks[rank]->Abort(absl::AbortedError("over"));
      ranks[rank].reset();
    });
    if (run % 2 == 0) {
      for (const absl::Status& end : ends) EXPECT_TRUE(end.ok()) << end;
    }
  }
}

// ---- Connecting.

TEST(GlooConnect, OneRankHasNobodyToMeet) {
  GlooEndpoints endpoints(1);
  EXPECT_EQ((*endpoints.Connect(0))->size(), 1);
}

// Ports where this process listens, here and now.
int ListeningPorts() {
  int listening = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    int listens = 0;
    socklen_t length = sizeof(listens);
    listening += getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 && listens != 0 ? 1 : 0;
  }
  return listening;
}

// gloo's own pairs would listen, each on a port.
TEST(GlooConnect, ListensOncePerRank) {
  constexpr int kRanks = 4;
  const int before = ListeningPorts();
  GlooEndpoints endpoints(kRanks);
  const auto ranks = endpoints.ConnectAll();
  EXPECT_LE(ListeningPorts(), before + kRanks);
}

TEST(GlooConnect, ListensOnOneInterface) {
  const auto listen = [](const std::string& where) {
    return GlooEndpoint::Listen({.listen = where}).status();
  };
  EXPECT_TRUE(listen("lo").ok()) << listen("lo");
  EXPECT_TRUE(listen("localhost").ok()) << listen("localhost");
  ExpectStatus(listen("no-such-interface0"), absl::StatusCode::kInvalidArgument, {"no-such-interface0"});
  ExpectStatus(listen("0.0.0.0"), absl::StatusCode::kInvalidArgument, {"every interface"});
  ExpectStatus(listen("192.0.2.1"), absl::StatusCode::kUnavailable, {"192.0.2.1"});
  EXPECT_EQ(GlooEndpoint::Listen({.rank = 2, .ranks = 2}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(GlooConnect, RefusesAddressesOfOtherRunsAndRanks) {
  const auto connect = [](const std::function<void(std::vector<std::string>&)>& change) {
    GlooEndpoints endpoints(2, {.run = 5});
    change(endpoints.addresses);
    return endpoints.Connect(0).status();
  };
  const std::string of_run_4 = GlooEndpoints(2, {.run = 4}).addresses[1];
  ExpectStatus(connect([&](auto& addresses) { addresses[1] = of_run_4; }), absl::StatusCode::kInvalidArgument,
               {"rank 1", "run 4", "run 5"});
  ExpectStatus(connect([](auto& addresses) { std::swap(addresses[0], addresses[1]); }),
               absl::StatusCode::kInvalidArgument, {"rank 0", "rank 1"});
  ExpectStatus(connect([](auto& addresses) { addresses[1] = "junk"; }), absl::StatusCode::kInvalidArgument,
               {"rank 1"});
  ExpectStatus(connect([](auto& addresses) { addresses[1].assign(addresses[1].size(), 'x'); }),
               absl::StatusCode::kInvalidArgument, {"rank 1"});
  ExpectStatus(connect([](auto& addresses) { addresses.pop_back(); }), absl::StatusCode::kInvalidArgument,
               {"1 addresses for 2"});
}

TEST(GlooListen, IgnoresSigpipeUnlessTheProcessHandlesIt) {
  void (*const handler)(int) = [](int) {};
  for (const auto& [before, after] : {std::pair(SIG_DFL, SIG_IGN), {handler, handler}}) {
    void (*const of_test)(int) = std::signal(SIGPIPE, before);
    EXPECT_TRUE(GlooEndpoint::Listen({}).ok());
    EXPECT_EQ(std::signal(SIGPIPE, of_test), after);
  }
}

// A rank of an old epoch that pretends to the new one does not get in.
TEST(GlooConnect, DropsARankOfAnotherRun) {
  GlooEndpoints run5(2, {.run = 5});
  GlooEndpoints run4(2, {.run = 4});
  std::vector<std::string> forged = {run5.addresses[0], run4.addresses[1]};
  const uint64_t run = 4;
  std::memcpy(forged[0].data() + kRunOffset, &run, sizeof(run));
  absl::Status old_status;
  std::thread old_rank(
      [&] { old_status = run4.endpoints[1]->Connect(forged, *run4.streams[1], Soon()).status(); });
  const absl::Status status = run5.Connect(0, MonotonicNow() + absl::Seconds(3)).status();
  old_rank.join();
  ExpectStatus(status, absl::StatusCode::kDeadlineExceeded, {"rank 0", "rank 1"});
  ExpectStatus(old_status, absl::StatusCode::kUnavailable, {"rank 1", "rank 0", "another run"});
}

TEST(GlooConnect, NamesWhoIsMissing) {
  GlooEndpoints endpoints(4);
  const absl::Time start = MonotonicNow();
  absl::Status waited;
  std::thread rank3([&] { waited = endpoints.Connect(3, start + absl::Milliseconds(300)).status(); });
  ExpectStatus(endpoints.Connect(1, start + absl::Milliseconds(200)).status(),
               absl::StatusCode::kDeadlineExceeded, {"rank 1", "0, 2"});
  EXPECT_GE(MonotonicNow() - start, absl::Milliseconds(200));
  rank3.join();
  EXPECT_FALSE(waited.ok());
  endpoints.endpoints[0].reset();  // died
  ExpectStatus(endpoints.Connect(2).status(), absl::StatusCode::kUnavailable,
               {"rank 2", "rank 0", "refused"});
  EXPECT_LT(MonotonicNow() - start, absl::Seconds(20));
}

TEST(GlooConnect, IsAbortedAtOnce) {
  for (bool before : {true, false}) {
    GlooEndpoints endpoints(2);
    const absl::Time start = MonotonicNow();
    std::thread abort([&] {
      if (!before) absl::SleepFor(absl::Milliseconds(50));
      endpoints.endpoints[0]->Abort(absl::CancelledError("a worker left"));
    });
    if (before) abort.join();
    ExpectStatus(endpoints.Connect(0).status(), absl::StatusCode::kCancelled, {"rank 0", "a worker left"});
    EXPECT_LT(MonotonicNow() - start, absl::Seconds(10));
    if (!before) abort.join();
  }
}

// Rank 1 shows who it is, and its process ends before rank 2 has come: rank 0 has a connection that is reset.
TEST(GlooConnect, APeerThatIsGoneBeforeAllHaveMetEndsTheMeeting) {
  constexpr size_t kHelloBytes = 56, kWelcomeBytes = 24;
  GlooEndpoints endpoints(3);
  sockaddr_in here = {};
  here.sin_family = AF_INET;
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(here);
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&here), length), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&here), &length), 0);
  std::vector<std::string> of_rank1 = endpoints.addresses;
  std::memcpy(of_rank1[0].data() + kSocketOffset, &here, sizeof(here));
  std::thread rank1([&] { (void)endpoints.endpoints[1]->Connect(of_rank1, *endpoints.streams[1], Soon()); });
  std::thread rank2([&] {
    const int client = accept(listener, nullptr, nullptr);
    const int server = ConnectTo(SocketOf(endpoints.addresses[0]));
    const auto pass = [](int from, int to, size_t bytes) {
      std::string passed(bytes, 0);
      EXPECT_EQ(recv(from, passed.data(), bytes, MSG_WAITALL), std::ssize(passed));
      EXPECT_EQ(send(to, passed.data(), bytes, MSG_NOSIGNAL), std::ssize(passed));
    };
    pass(client, server, kHelloBytes);
    pass(server, client, kWelcomeBytes);
    const linger reset = {.l_onoff = 1, .l_linger = 0};
    EXPECT_EQ(setsockopt(server, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)), 0);
    close(server);
    (void)endpoints.Connect(2);
    close(client);
  });
  ExpectStatus(endpoints.Connect(0).status(), absl::StatusCode::kUnavailable, {"rank 0", "gloo"});
  rank1.join();
  rank2.join();
  close(listener);
}

// Strangers that say nothing, nonsense, or half a hello, before and while the ranks meet.
TEST(GlooConnect, StrangersNeitherGetInNorInTheWay) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  GlooEndpoints endpoints(3);
  std::vector<int> strangers;
  const auto visit = [&] {
    for (const std::string& address : endpoints.addresses) {
      const int fd = ConnectTo(SocketOf(address));
      if (fd < 0) continue;  // who has met everybody listens no more
      std::string nonsense(Draw<size_t>(random, 0, 300), 0);
      for (char& byte : nonsense) byte = static_cast<char>(random());
      if (Draw(random, 0, 3) == 0) nonsense = address.substr(0, 20);
      if (!nonsense.empty()) send(fd, nonsense.data(), nonsense.size(), MSG_NOSIGNAL);
      strangers.push_back(fd);
    }
  };
  for (int i = 0; i < 100; ++i) visit();
  std::vector<std::unique_ptr<Communicator>> ranks;
  std::atomic<bool> met = false;
  std::thread meet([&] {
    ranks = endpoints.ConnectAll();
    met = true;
  });
  while (!met) visit();
  meet.join();
  EXPECT_EQ(ConnectTo(SocketOf(endpoints.addresses[0])), -1) << "the port is closed once all have met";
  EXPECT_GE(endpoints.endpoints[0]->strangers(), 100) << "who came before the peers was heard before them";
  std::vector<absl::Status> ends(3);
  RunRanks(3, [&](int rank) {
    auto receive = ranks[rank]->SendReceive(Traffic::kKv, (rank + 1) % 3, PatternBuffer(100000, rank),
                                            (rank + 2) % 3, 100000);
    const auto message = receive.ok() ? (*receive)->Wait(Soon()) : receive.status();
    ends[rank] = message.status();
    if (message.ok() && !HasPattern(**message, 100000, (rank + 2) % 3)) {
      ends[rank] = absl::UnknownError("another message");
    }
  });
  for (const absl::Status& end : ends) EXPECT_TRUE(end.ok()) << "seed " << seed << ": " << end;
  for (int fd : strangers) close(fd);
}

}  // namespace
}  // namespace meshfill
