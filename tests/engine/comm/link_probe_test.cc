// What is measured of links whose speed is known, who takes part, and how a measurement ends.
#include "engine/comm/link_probe.h"

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/comm/in_process.h"
#include "kernels/monotonic_time.h"
#include "tests/engine/comm/gloo/gloo_ranks.h"
#include "tests/engine/random_seed.h"
#include "tests/kernels/lone_stream.h"

namespace meshfill {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(60);

// Hands messages over as late as a link would that begins each when the one before has arrived.
class LinkedCommunicator : public Communicator {
 public:
  LinkedCommunicator(std::unique_ptr<Communicator> communicator, Link link)
      : communicator_(std::move(communicator)), link_(link) {}

  int rank() const override { return communicator_->rank(); }
  int size() const override { return communicator_->size(); }
  absl::StatusOr<std::unique_ptr<PendingReceive>> SendReceive(Traffic traffic, int to, BufferRef message,
                                                              int from, size_t receive_bytes) override {
    moved_bytes_ += message->size_bytes();
    auto pending = communicator_->SendReceive(traffic, to, std::move(message), from, receive_bytes);
    if (!pending.ok()) return pending.status();
    return std::make_unique<Late>(*std::move(pending), link_.Seconds(static_cast<double>(receive_bytes)));
  }
  void Abort(absl::Status reason) override { communicator_->Abort(std::move(reason)); }

  size_t moved_bytes() const { return moved_bytes_; }

 private:
  class Late : public PendingReceive {
   public:
    Late(std::unique_ptr<PendingReceive> pending, double seconds)
        : pending_(std::move(pending)), at_(MonotonicNow() + absl::Seconds(seconds)) {}
    absl::StatusOr<BufferRef> Wait(absl::Time deadline) override {
      absl::StatusOr<BufferRef> message = pending_->Wait(deadline);
      absl::SleepFor(at_ - MonotonicNow());
      return message;
    }

   private:
    const std::unique_ptr<PendingReceive> pending_;
    const absl::Time at_;
  };

  const std::unique_ptr<Communicator> communicator_;
  const Link link_;
  size_t moved_bytes_ = 0;
};

struct Measured {
  std::vector<absl::StatusOr<std::optional<Link>>> links;  // by rank
  std::vector<size_t> moved_bytes;
  double seconds = 0;
};

Measured MeasureWith(const LinkProbe& probe, std::vector<std::unique_ptr<Communicator>> communicators,
                     Link link) {
  const auto start = std::chrono::steady_clock::now();
  Measured measured;
  measured.links.resize(communicators.size(), absl::UnknownError(""));
  measured.moved_bytes.resize(communicators.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < communicators.size(); ++rank) {
    threads.emplace_back([&, rank] {
      const LoneStream stream = ReferenceStream(DType::kF32);
      LinkedCommunicator communicator(std::move(communicators[rank]), link);
      measured.links[rank] = Probe(probe, communicator, *stream, kTimeout);
      measured.moved_bytes[rank] = communicator.moved_bytes();
    });
  }
  for (std::thread& thread : threads) thread.join();
  measured.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return measured;
}

TEST(LinkProbeTest, KnowsAPairing) {
  EXPECT_TRUE(IsPairing({{1, 0, 2}}, 3));
  EXPECT_FALSE(IsPairing({{1, 0}}, 3));
  EXPECT_FALSE(IsPairing({{1, 2, 0}}, 3)) << "a ring";
  EXPECT_FALSE(IsPairing({{3, 1, 2}}, 3));
  EXPECT_FALSE(IsPairing({{-1, 1, 2}}, 3));
}

bool IsAbout(const Link& found, const Link& link) {
  return found.bytes_per_second > 0.5 * link.bytes_per_second &&
         found.bytes_per_second < 1.1 * link.bytes_per_second &&
         found.latency_seconds > 0.9 * link.latency_seconds &&
         found.latency_seconds < 10 * link.latency_seconds;
}

TEST(LinkProbeTest, FindsTheLinkThatThereIs) {
  for (const Link& link : {Link{.latency_seconds = 2e-3, .bytes_per_second = 10e6},
                           Link{.latency_seconds = 5e-4, .bytes_per_second = 200e6}}) {
    bool is_found = false;  // in an attempt in which the machine did not stand still
    std::string tried;
    for (int attempt = 0; attempt < 5 && !is_found; ++attempt) {
      const Measured measured = MeasureWith({{2, 1, 0}}, MakeInProcessCommunicators(3), link);
      is_found = true;
      for (int rank : {0, 2}) {
        ASSERT_TRUE(measured.links[rank].ok()) << measured.links[rank].status();
        const Link found = **measured.links[rank];
        is_found = is_found && IsAbout(found, link);
        absl::StrAppend(&tried, " ", found.latency_seconds, " s and ", found.bytes_per_second, " B/s,");
      }
      EXPECT_EQ(*measured.links[0], *measured.links[2]) << "both ends know the same";
      EXPECT_EQ(*measured.links[1], std::nullopt);
      EXPECT_EQ(measured.moved_bytes[1], 0u) << "who sits out sends nothing";
    }
    EXPECT_TRUE(is_found) << link.latency_seconds << " s and " << link.bytes_per_second
                          << " B/s, found:" << tried;
  }
}

TEST(LinkProbeTest, ASlowLinkIsLeftAlone) {
  const Measured measured = MeasureWith({{1, 0}}, MakeInProcessCommunicators(2), {.bytes_per_second = 1e6});
  ASSERT_TRUE(measured.links[0].ok());
  EXPECT_LT(measured.moved_bytes[0], 400u << 10);
  EXPECT_LT(measured.seconds, 2);
}

TEST(LinkProbeTest, MeasuresOverGlooAndLeavesItAsItWas) {
  const int n = 4;
  GlooEndpoints run(n);
  std::vector<std::unique_ptr<Communicator>> communicators = run.ConnectAll();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      Communicator& communicator = *communicators[rank];
      const auto link = Probe({{1, 0, 3, 2}}, communicator, *run.streams[rank], kTimeout);
      ASSERT_TRUE(link.ok()) << link.status();
      EXPECT_GT((*link)->bytes_per_second, 1e5);
      EXPECT_LT((*link)->bytes_per_second, 1e12);
      EXPECT_GT((*link)->latency_seconds, 0);
      EXPECT_LT((*link)->latency_seconds, 1);
      auto pending = communicator.SendReceive(Traffic::kKv, (rank + n - 1) % n, PatternBuffer(1000, rank),
                                              (rank + 1) % n, 1000);
      ASSERT_TRUE(pending.ok()) << pending.status();
      const auto received = (*pending)->Wait(Soon());
      ASSERT_TRUE(received.ok()) << received.status();
      EXPECT_TRUE(HasPattern(**received, 1000, (rank + 1) % n));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(LinkProbeTest, EndsWithTheRunAndByItsDeadline) {
  std::vector<std::unique_ptr<Communicator>> communicators = MakeInProcessCommunicators(2);
  const LoneStream stream = ReferenceStream(DType::kF32);
  ExpectStatus(Probe({{1, 0}}, *communicators[0], *stream, absl::Milliseconds(20)).status(),
               absl::StatusCode::kDeadlineExceeded, {"measuring the link with rank 1"});
  std::thread peer([&] {
    absl::SleepFor(absl::Milliseconds(20));
    communicators[1]->Abort(absl::AbortedError("the epoch ended"));
  });
  ExpectStatus(Probe({{1, 0}}, *communicators[0], *stream, kTimeout).status(), absl::StatusCode::kAborted,
               {"the epoch ended"});
  peer.join();
}

}  // namespace
}  // namespace meshfill
