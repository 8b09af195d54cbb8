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
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

constexpr double kEnough = 0.025;  // seconds of a message that says how fast the link is
constexpr size_t kFirstBytes = size_t{8} << 10;
constexpr size_t kMostBytes = size_t{8} << 20;
constexpr size_t kGrowth = 4;
constexpr int kSmallMessages = 7;
constexpr Traffic kOp = Traffic::kKv;  // all messages are of this traffic: no layer is under way

class Prober {
 public:
  Prober(int peer, Communicator& communicator, Stream& stream, absl::Duration wait_timeout)
      : peer_(peer), communicator_(communicator), stream_(stream), wait_timeout_(wait_timeout) {}

  absl::StatusOr<Link> Measure() {
    ASSIGN_OR_RETURN(double latency, SmallMessageSeconds());
    for (size_t bytes = kFirstBytes;; bytes *= kGrowth) {
      ASSIGN_OR_RETURN(const double seconds, BestSeconds(bytes));
      if (seconds < kEnough && bytes < kMostBytes) continue;
      // What a message takes beyond its latency, which itself is measured and may be off.
      const double moving = std::max(seconds - latency, seconds / 2);
      return Link{.latency_seconds = latency, .bytes_per_second = static_cast<double>(bytes) / moving};
    }
  }

 private:
  // The latency: the least time of small messages. The first one makes both ranks begin together.
  absl::StatusOr<double> SmallMessageSeconds() {
    std::array<double, kSmallMessages> seconds;
    RETURN_IF_ERROR(AgreedSeconds(sizeof(double)).status());
    for (double& each : seconds) {
      ASSIGN_OR_RETURN(double agreed, AgreedSeconds(sizeof(double)));
      each = agreed;
    }
    std::nth_element(seconds.begin(), seconds.begin() + kSmallMessages / 2, seconds.end());
    return seconds[kSmallMessages / 2];
  }

  // The least time of three messages, or of two where two say enough: one may have met a rank without its
  // core.
  absl::StatusOr<double> BestSeconds(size_t bytes) {
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 3 && (i < 2 || best < kEnough); ++i) {
      ASSIGN_OR_RETURN(const double seconds, AgreedSeconds(bytes));
      best = std::min(best, seconds);
    }
    return best;
  }

  // The seconds of one message each way, as both ranks agree on them.
  absl::StatusOr<double> AgreedSeconds(size_t bytes) {
    ASSIGN_OR_RETURN(BufferRef message, stream_.Allocate(bytes));
    const std::vector<std::byte> zeros(bytes);
    RETURN_IF_ERROR(stream_.Upload(zeros.data(), bytes, message->data()));
    double mine = 0;
    RETURN_IF_ERROR(Exchange(std::move(message), mine).status());

    ASSIGN_OR_RETURN(BufferRef told, stream_.Allocate(sizeof(double)));
    RETURN_IF_ERROR(stream_.Upload(&mine, sizeof(double), told->data()));
    double ignored = 0, theirs = 0;
    ASSIGN_OR_RETURN(BufferRef heard, Exchange(std::move(told), ignored));
    RETURN_IF_ERROR(stream_.Download(heard->data(), sizeof(double), &theirs));
    return std::min(mine, theirs);
  }

  // Sends the message and receives one as large.
  absl::StatusOr<BufferRef> Exchange(BufferRef message, double& seconds) {
    const size_t bytes = message->size_bytes();
    RETURN_IF_ERROR(stream_.Finish());
    const auto start = std::chrono::steady_clock::now();
    ASSIGN_OR_RETURN(std::unique_ptr<PendingReceive> pending,
                     communicator_.SendReceive(kOp, peer_, std::move(message), peer_, bytes));
    ASSIGN_OR_RETURN(BufferRef received, pending->Wait(MonotonicNow() + wait_timeout_));
    RETURN_IF_ERROR(stream_.Finish());
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return received;
  }

  const int peer_;
  Communicator& communicator_;
  Stream& stream_;
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

absl::StatusOr<std::optional<Link>> Probe(const LinkProbe& probe, Communicator& communicator, Stream& stream,
                                          absl::Duration wait_timeout) {
  const int peer = probe.peer_of_rank[communicator.rank()];
  if (peer == communicator.rank()) return std::nullopt;
  absl::StatusOr<Link> link = Prober(peer, communicator, stream, wait_timeout).Measure();
  if (!link.ok()) {
    return absl::Status(link.status().code(),
                        absl::StrCat("measuring the link with rank ", peer, ": ", link.status().message()));
  }
  return *link;
}

}  // namespace meshfill
