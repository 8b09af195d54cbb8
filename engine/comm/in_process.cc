#include "engine/comm/in_process.h"

#include <compare>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"
#include "kernels/run_deadline.h"

namespace meshfill {
namespace {

// Messages of one mailbox that their receiver has not taken. A rank in a ring is at most as many messages
// ahead of its neighbour as there are other ranks, so that only a broken caller meets this.
constexpr size_t kMailboxMessages = 1024;

struct Route {
  int from;
  int to;
  Traffic traffic;
  auto operator<=>(const Route&) const = default;

  // Describes the route as the receiver sees it, which is the one that waits.
  std::string DebugString() const {
    return absl::StrCat("rank ", to, ": ", OperationName(traffic), " from rank ", from);
  }
};

// Where the ranks of one run meet. Messages and receives of a route are numbered in the order of their calls,
// and equal numbers belong together.
//
// Mutex and the abort reason as plain fields, not absl::Mutex and absl::Status: ThreadSanitizer does not
// see the synchronisation inside a prebuilt Abseil.
class Exchange {
 public:
  explicit Exchange(const StopToken* run) : run_(run) {}

  absl::Status Send(const Route& route, DeviceMessage message) {
    const MutexLock lock(mu_);
    if (aborted_) return AbortedOn(route);
    Mailbox& mailbox = mailboxes_[route];
    if (mailbox.messages.size() >= kMailboxMessages) {
      return absl::ResourceExhaustedError(absl::StrCat("rank ", route.from, ": rank ", route.to,
                                                       " has not taken ", mailbox.messages.size(),
                                                       " messages of ", OperationName(route.traffic)));
    }
    mailbox.messages.emplace(mailbox.sent++, std::move(message));
    mailbox.changed.NotifyAll();
    return absl::OkStatus();
  }

  // The number of the next receive on this route.
  int64_t StartReceive(const Route& route) {
    const MutexLock lock(mu_);
    return mailboxes_[route].receives++;
  }

  absl::StatusOr<DeviceMessage> Receive(const Route& route, int64_t number, absl::Time deadline) {
    const RunDeadline until(run_, deadline);
    MutexLock lock(mu_);
    Mailbox& mailbox = mailboxes_[route];  // stays where it is: the map is a std::map
    while (!aborted_ && !mailbox.messages.contains(number)) {
      if (mailbox.changed.WaitUntil(mu_, until.Now()) || aborted_ || mailbox.messages.contains(number))
        continue;
      if (MonotonicNow() < until.Now()) continue;
      return absl::DeadlineExceededError(
          absl::StrCat(route.DebugString(), ": nothing arrived before the deadline"));
    }
    if (aborted_) return AbortedOn(route);
    return std::move(mailbox.messages.extract(number).mapped());
  }

  void Abort(const absl::Status& reason) {
    const MutexLock lock(mu_);
    if (std::exchange(aborted_, true)) return;
    abort_code_ = reason.ok() ? absl::StatusCode::kAborted : reason.code();
    abort_message_ = reason.ok() ? "aborted without a reason" : std::string(reason.message());
    for (auto& [route, mailbox] : mailboxes_) {
      mailbox.messages.clear();
      mailbox.changed.NotifyAll();
    }
  }

 private:
  struct Mailbox {
    int64_t sent = 0;
    int64_t receives = 0;
    std::map<int64_t, DeviceMessage> messages;  // by number
    CondVar changed;
  };

  absl::Status AbortedOn(const Route& route) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return absl::Status(abort_code_, absl::StrCat(route.DebugString(), ": ", abort_message_));
  }

  const StopToken* const run_;  // null: it is never paused
  Mutex mu_;
  bool aborted_ ABSL_GUARDED_BY(mu_) = false;
  absl::StatusCode abort_code_ ABSL_GUARDED_BY(mu_) = absl::StatusCode::kOk;
  std::string abort_message_ ABSL_GUARDED_BY(mu_);
  std::map<Route, Mailbox> mailboxes_ ABSL_GUARDED_BY(mu_);
};

class InProcessReceive : public PendingReceive {
 public:
  InProcessReceive(std::shared_ptr<Exchange> exchange, Stream* stream, const Route& route,
                   size_t receive_bytes)
      : exchange_(std::move(exchange)),
        stream_(stream),
        route_(route),
        receive_bytes_(receive_bytes),
        number_(exchange_->StartReceive(route)) {}

  absl::StatusOr<BufferRef> Wait(absl::Time deadline) override {
    if (std::exchange(waited_, true))
      return absl::InternalError(absl::StrCat(route_.DebugString(), ": waited twice"));
    ASSIGN_OR_RETURN(DeviceMessage message, exchange_->Receive(route_, number_, deadline));
    if (message.buffer->size_bytes() != receive_bytes_) {
      return absl::InternalError(absl::StrCat(route_.DebugString(), ": ", message.buffer->size_bytes(),
                                              " bytes arrived, ", receive_bytes_, " were expected"));
    }
    if (stream_ == nullptr) return std::move(message.buffer);
    return stream_->TakeOver(std::move(message));
  }

 private:
  const std::shared_ptr<Exchange> exchange_;
  Stream* const stream_;  // null: the ranks' operations have run when their calls return
  const Route route_;
  const size_t receive_bytes_;
  const int64_t number_;
  bool waited_ = false;
};

class InProcessCommunicator : public Communicator {
 public:
  // The exchange is shared because ranks end in any order.
  InProcessCommunicator(int rank, int size, std::shared_ptr<Exchange> exchange, std::vector<Stream*> streams)
      : rank_(rank), size_(size), exchange_(std::move(exchange)), streams_(std::move(streams)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  absl::StatusOr<std::unique_ptr<PendingReceive>> SendReceive(Traffic traffic, int to, BufferRef message,
                                                              int from, size_t receive_bytes) override {
    for (int peer : {to, from}) {
      if (peer < 0 || peer >= size_ || peer == rank_) {
        return absl::InvalidArgumentError(absl::StrCat("rank ", rank_, ": ", OperationName(traffic),
                                                       " with rank ", peer, ", which is no other of the ",
                                                       size_, " ranks"));
      }
    }
    if (message == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", rank_, ": ", OperationName(traffic), " to rank ", to, " without a message"));
    }
    ASSIGN_OR_RETURN(DeviceMessage fetched, FetchTo(to, std::move(message)));
    RETURN_IF_ERROR(exchange_->Send({.from = rank_, .to = to, .traffic = traffic}, std::move(fetched)));
    return std::make_unique<InProcessReceive>(exchange_, streams_.empty() ? nullptr : streams_[rank_],
                                              Route{.from = from, .to = rank_, .traffic = traffic},
                                              receive_bytes);
  }

  void Abort(absl::Status reason) override { exchange_->Abort(reason); }

 private:
  // Brings the message to the device of rank `to`.
  absl::StatusOr<DeviceMessage> FetchTo(int to, BufferRef message) {
    if (streams_.empty()) return DeviceMessage{std::move(message), nullptr};
    ASSIGN_OR_RETURN(std::shared_ptr<const StreamPoint> ready, streams_[rank_]->Mark());
    return streams_[to]->Fetch({std::move(message), std::move(ready)});
  }

  const int rank_;
  const int size_;
  const std::shared_ptr<Exchange> exchange_;
  const std::vector<Stream*> streams_;  // by rank, or none
};

std::vector<std::unique_ptr<Communicator>> MakeCommunicators(int ranks, const std::vector<Stream*>& streams,
                                                             const StopToken* run) {
  auto exchange = std::make_shared<Exchange>(run);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int rank = 0; rank < ranks; ++rank) {
    communicators.push_back(std::make_unique<InProcessCommunicator>(rank, ranks, exchange, streams));
  }
  return communicators;
}

}  // namespace

std::vector<std::unique_ptr<Communicator>> MakeInProcessCommunicators(int ranks) {
  return MakeCommunicators(ranks, {}, nullptr);
}

std::vector<std::unique_ptr<Communicator>> MakeInProcessCommunicators(std::span<Stream* const> streams,
                                                                      const StopToken* run) {
  return MakeCommunicators(static_cast<int>(streams.size()), {streams.begin(), streams.end()}, run);
}

}  // namespace meshfill
