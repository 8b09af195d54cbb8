#include "engine/comm/link_probe.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/comm/monotonic_time.h"

namespace meshfill {
namespace {

constexpr double kEnough = 0.025;  // seconds of a message that says how fast the link is
constexpr size_t kFirstBytes = size_t{8} << 10;
constexpr size_t kMostBytes = size_t{8} << 20;
constexpr size_t kGrowth = 4;
constexpr int kSmallMessages = 7;
constexpr CommOp kOp = CommOp::kRecvKv;  // of all messages: no layer is under way

class Prober {
 public:
  Prober(int peer, Communicator& communicator, Backend& backend, absl::Duration wait_timeout)
      : peer_(peer), communicator_(communicator), backend_(backend), wait_timeout_(wait_timeout) {}

  absl::StatusOr<Link> Measure() {
    absl::StatusOr<double> latency = SmallMessageSeconds();
    if (!latency.ok()) return latency.status();
    for (size_t bytes = kFirstBytes;; bytes *= kGrowth) {
      const absl::StatusOr<double> seconds = BestSeconds(bytes);
      if (!seconds.ok()) return seconds.status();
      if (*seconds < kEnough && bytes < kMostBytes) continue;
      // What a message takes beyond its latency, which itself is measured and may be off.
      const double moving = std::max(*seconds - *latency, *seconds / 2);
      return Link{.latency_seconds = *latency, .bytes_per_second = static_cast<double>(bytes) / moving};
    }
  }

 private:
  // Of the smallest there are; the first makes both ranks begin together.
  absl::StatusOr<double> SmallMessageSeconds() {
    std::array<double, kSmallMessages> seconds;
    if (absl::StatusOr<double> begun = AgreedSeconds(sizeof(double)); !begun.ok()) return begun.status();
    for (double& each : seconds) {
      absl::StatusOr<double> agreed = AgreedSeconds(sizeof(double));
      if (!agreed.ok()) return agreed.status();
      each = *agreed;
    }
    std::nth_element(seconds.begin(), seconds.begin() + kSmallMessages / 2, seconds.end());
    return seconds[kSmallMessages / 2];
  }

  // Of three messages, or of two that say enough: one may have met a rank that did not have its core.
  absl::StatusOr<double> BestSeconds(size_t bytes) {
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 3 && (i < 2 || best < kEnough); ++i) {
      const absl::StatusOr<double> seconds = AgreedSeconds(bytes);
      if (!seconds.ok()) return seconds.status();
      best = std::min(best, *seconds);
    }
    return best;
  }

  // Of a message each way.
  absl::StatusOr<double> AgreedSeconds(size_t bytes) {
    absl::StatusOr<BufferRef> message = backend_.Allocate(bytes);
    if (!message.ok()) return message.status();
    const std::vector<std::byte> zeros(bytes);
    if (absl::Status status = backend_.Upload(zeros.data(), bytes, (*message)->data()); !status.ok())
      return status;
    double mine = 0;
    if (absl::StatusOr<BufferRef> received = Exchange(*std::move(message), mine); !received.ok())
      return received.status();

    absl::StatusOr<BufferRef> told = backend_.Allocate(sizeof(double));
    if (!told.ok()) return told.status();
    if (absl::Status status = backend_.Upload(&mine, sizeof(double), (*told)->data()); !status.ok())
      return status;
    double ignored = 0, theirs = 0;
    absl::StatusOr<BufferRef> heard = Exchange(*std::move(told), ignored);
    if (!heard.ok()) return heard.status();
    if (absl::Status status = backend_.Download((*heard)->data(), sizeof(double), &theirs); !status.ok())
      return status;
    return std::min(mine, theirs);
  }

  // Sends the message and receives one as large.
  absl::StatusOr<BufferRef> Exchange(BufferRef message, double& seconds) {
    const size_t bytes = message->size_bytes();
    if (absl::Status status = backend_.Finish(); !status.ok()) return status;
    const auto start = std::chrono::steady_clock::now();
    absl::StatusOr<std::unique_ptr<PendingReceive>> pending =
        communicator_.SendReceive(kOp, peer_, std::move(message), peer_, bytes);
    if (!pending.ok()) return pending.status();
    absl::StatusOr<BufferRef> received = (*pending)->Wait(MonotonicNow() + wait_timeout_);
    if (!received.ok()) return received.status();
    if (absl::Status status = backend_.Finish(); !status.ok()) return status;
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return received;
  }

  const int peer_;
  Communicator& communicator_;
  Backend& backend_;
  const absl::Duration wait_timeout_;
};

}  // namespace

bool IsPairing(const LinkProbe& probe, int ranks) {
  const std::vector<int>& peers = probe.peer_of_rank;
  if (std::ssize(peers) != ranks) return false;
  for (int rank = 0; rank < ranks; ++rank) {
    if (peers[rank] < 0 || peers[rank] >= ranks || peers[peers[rank]] != rank) return false;
  }
  return true;
}

absl::StatusOr<std::optional<Link>> Probe(const LinkProbe& probe, Communicator& communicator,
                                          Backend& backend, absl::Duration wait_timeout) {
  const int peer = probe.peer_of_rank[communicator.rank()];
  if (peer == communicator.rank()) return std::nullopt;
  absl::StatusOr<Link> link = Prober(peer, communicator, backend, wait_timeout).Measure();
  if (!link.ok()) {
    return absl::Status(link.status().code(),
                        absl::StrCat("measuring the link with rank ", peer, ": ", link.status().message()));
  }
  return *link;
}

}  // namespace meshfill
