#include "engine/comm/gloo/gloo.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <exception>
#include <iterator>
#include <list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "engine/comm/checksum.h"
#include "engine/comm/gloo/gloo_pair.h"
#include "engine/comm/gloo/gloo_rendezvous.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"
#include "kernels/run_deadline.h"

namespace meshfill {
namespace {

// How long an end of a run waits for peers to take what they were sent, and for the loop to close its
// sockets.
constexpr absl::Duration kLinger = absl::Minutes(1);
constexpr absl::Duration kCloseTimeout = absl::Seconds(1);

// What goes before each payload, as a message of its own. Both ends have one byte order.
struct Header {
  uint64_t run;
  uint64_t sequence;  // number of this operation between this pair
  uint32_t traffic;
  uint32_t from;
  uint64_t bytes;
  uint64_t has_checksum;
  uint64_t payload_checksum;
  uint64_t header_checksum;  // checksum of the fields above

  uint64_t Sum() const { return Checksum(this, offsetof(Header, header_checksum)); }
};
static_assert(std::has_unique_object_representations_v<Header> && std::is_standard_layout_v<Header>);

// A message under way in either direction. gloo has pointers into it: it stays where it is until both
// transfers ended, or the pair is closed.
struct Message {
  Message(const std::shared_ptr<GlooContext>& context, int peer, Traffic traffic, uint64_t sequence,
          BufferRef buffer)
      : peer(peer),
        traffic(traffic),
        sequence(sequence),
        payload(std::move(buffer)),
        header_transfer(context, &header, sizeof(header)),
        payload_transfer(context, payload->data(), payload->size_bytes()) {}

  bool sent() { return header_transfer.sent() && (payload->size_bytes() == 0 || payload_transfer.sent()); }
  bool received() {
    return header_transfer.received() && (payload->size_bytes() == 0 || payload_transfer.received());
  }

  // gloo matches sends and receives of a pair by slot.
  uint64_t header_slot() const { return (sequence * kTraffics + static_cast<uint64_t>(traffic)) * 2; }
  uint64_t payload_slot() const { return header_slot() + 1; }

  const int peer;
  const Traffic traffic;
  const uint64_t sequence;
  const BufferRef payload;
  Header header = {};
  GlooTransfer header_transfer;
  GlooTransfer payload_transfer;
};

// One rank's part of a run: its pairs, and what is under way on them.
//
// Three kinds of threads: the rank's own (SendReceive, Wait, Close), gloo's loop (OnEvents), anyone (Abort).
// No lock of a pair is taken under mu_. Mutex and the abort reason as plain fields, as in
// in_process.cc.
class GlooRun {
 public:
  explicit GlooRun(const GlooOptions& options) : options_(options), counters_(options.ranks) {}
  ~GlooRun() { Close(); }

  const GlooOptions& options() const { return options_; }

  absl::Status Start(const SocketAddress& interface, std::vector<PeerSocket> sockets, Stream& stream);

  // A message to `to` leaves; the returned one, from `from`, is on its way to `into`.
  absl::StatusOr<std::shared_ptr<Message>> SendReceive(Traffic traffic, int to, BufferRef message, int from,
                                                       BufferRef into);
  absl::StatusOr<BufferRef> Allocate(size_t size_bytes) { return stream_->Allocate(size_bytes); }
  absl::StatusOr<BufferRef> Wait(Message& message, absl::Time deadline);

  void Abort(const absl::Status& reason);
  absl::Status AbortReason(absl::string_view while_doing);  // OK: not aborted

  // Waits until all has left, then closes the pairs. Unless aborted, peers still get what they were sent.
  void Close();

 private:
  struct Counters {
    PerTraffic<uint64_t> sent;
    PerTraffic<uint64_t> received;
  };

  absl::Status StartReceive(Message& message);
  absl::Status StartSend(Message& message);
  void OnEvents();
  void Reap() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ShutDownPairs(int how);  // SHUT_WR, SHUT_RDWR
  bool Ended(Message& message) const;
  // The message has ended, or never will.
  bool WaitIsOver(Message& message) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return aborted_ || closed_ || lost_send_to_ >= 0 || Ended(message);
  }
  absl::Status CheckHeader(const Message& message) const;
  absl::Status AbortedIn(absl::string_view what) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Lost(int peer, absl::string_view what);
  std::string Describe(Traffic traffic, absl::string_view direction, int peer) const {
    return absl::StrCat("rank ", options_.rank, ": ", OperationName(traffic), " ", direction, " rank ", peer);
  }
  std::string Describe(const Message& receive) const {
    return Describe(receive.traffic, "from", receive.peer);
  }

  const GlooOptions options_;
  Stream* stream_ = nullptr;

  std::vector<Counters> counters_;  // [ranks], by peer; the rank's thread alone uses it

  Mutex mu_;
  CondVar changed_;
  bool aborted_ ABSL_GUARDED_BY(mu_) = false;
  absl::StatusCode abort_code_ ABSL_GUARDED_BY(mu_) = absl::StatusCode::kOk;
  std::string abort_message_ ABSL_GUARDED_BY(mu_);
  // Messages stay in these lists until they have left or come, whether or not anybody still waits.
  std::list<std::shared_ptr<Message>> sends_ ABSL_GUARDED_BY(mu_);
  std::list<std::shared_ptr<Message>> receives_ ABSL_GUARDED_BY(mu_);
  int lost_send_to_ ABSL_GUARDED_BY(mu_) = -1;  // a rank that went before it took what it was sent
  bool standing_ ABSL_GUARDED_BY(mu_) = false;  // pairs_ are complete
  bool closed_ ABSL_GUARDED_BY(mu_) = false;    // no more calls

  std::vector<GlooPair*> pairs_;          // by rank, null for this one; of context_; constant once standing
  std::shared_ptr<GlooContext> context_;  // last, so that the loop's thread ends first
};

absl::Status GlooRun::Start(const SocketAddress& interface, std::vector<PeerSocket> sockets, Stream& stream) {
  stream_ = &stream;
  gloo::transport::tcp::attr attr;
  attr.ai_family = interface.storage.ss_family;
  attr.ai_socktype = SOCK_STREAM;
  attr.ai_protocol = 0;
  attr.ai_addr = interface.storage;
  attr.ai_addrlen = static_cast<int>(interface.length);
  try {
    context_ = std::make_shared<GlooContext>(std::make_shared<gloo::transport::tcp::Device>(attr),
                                             options_.rank, options_.ranks);
    pairs_.resize(options_.ranks);
    for (int peer = 0; peer < options_.ranks; ++peer) {
      if (peer == options_.rank) continue;
      pairs_[peer] = &context_->AddPair(peer, [this] { OnEvents(); });
    }
    for (int peer = 0; peer < options_.ranks; ++peer) {
      if (pairs_[peer] != nullptr) pairs_[peer]->Adopt(std::move(sockets[peer]));
    }
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("rank ", options_.rank, ": gloo on ", options_.listen, ": ", error.what()));
  }
  const MutexLock lock(mu_);
  standing_ = true;
  return aborted_ ? AbortedIn(absl::StrCat("rank ", options_.rank, ": connecting")) : absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Message>> GlooRun::SendReceive(Traffic traffic, int to, BufferRef message,
                                                              int from, BufferRef into) {
  {
    const MutexLock lock(mu_);
    if (aborted_) return AbortedIn(Describe(traffic, "from", from));
  }
  auto receive = std::make_shared<Message>(context_, from, traffic, counters_[from].received[traffic]++,
                                           std::move(into));
  auto send =
      std::make_shared<Message>(context_, to, traffic, counters_[to].sent[traffic]++, std::move(message));
  // The receive first: the peer's message flows while ours is summed.
  RETURN_IF_ERROR(StartReceive(*receive));
  {
    const MutexLock lock(mu_);
    receives_.push_back(receive);
  }
  RETURN_IF_ERROR(StartSend(*send));
  const MutexLock lock(mu_);
  sends_.push_back(std::move(send));
  Reap();
  return receive;
}

absl::Status GlooRun::StartReceive(Message& message) {
  try {
    message.header_transfer.recv(message.peer, message.header_slot(), 0, sizeof(Header));
    const size_t size_bytes = message.payload->size_bytes();
    if (size_bytes > 0) message.payload_transfer.recv(message.peer, message.payload_slot(), 0, size_bytes);
  } catch (const std::exception&) {
    return Lost(message.peer, Describe(message));
  }
  return absl::OkStatus();
}

absl::Status GlooRun::StartSend(Message& message) {
  const size_t size_bytes = message.payload->size_bytes();
  const bool checksum = options_.checksum && !options_.encrypt;
  message.header = {.run = options_.run,
                    .sequence = message.sequence,
                    .traffic = static_cast<uint32_t>(message.traffic),
                    .from = static_cast<uint32_t>(options_.rank),
                    .bytes = size_bytes,
                    .has_checksum = checksum,
                    .payload_checksum = checksum ? Checksum(message.payload->data(), size_bytes) : 0,
                    .header_checksum = 0};
  message.header.header_checksum = message.header.Sum();
  try {
    // The header first: a receiver of another size learns so before the payload breaks its pair.
    message.header_transfer.send(message.peer, message.header_slot(), 0, sizeof(Header));
    if (size_bytes > 0) message.payload_transfer.send(message.peer, message.payload_slot(), 0, size_bytes);
  } catch (const std::exception&) {
    return Lost(message.peer, Describe(message.traffic, "to", message.peer));
  }
  return absl::OkStatus();
}

absl::StatusOr<BufferRef> GlooRun::Wait(Message& message, absl::Time deadline) {
  int lost_peer;
  {
    const RunDeadline until(options_.stop, deadline);
    MutexLock lock(mu_);
    while (!WaitIsOver(message)) {
      if (changed_.WaitUntil(mu_, until.Now()) || WaitIsOver(message)) continue;
      if (MonotonicNow() < until.Now()) continue;
      return absl::DeadlineExceededError(
          absl::StrCat(Describe(message), ": nothing whole arrived before the deadline"));
    }
    if (aborted_) return AbortedIn(Describe(message));
    lost_peer = lost_send_to_ >= 0 && !pairs_[message.peer]->closed() ? lost_send_to_ : message.peer;
  }
  if (message.header_transfer.received()) {
    RETURN_IF_ERROR(CheckHeader(message));
  }
  if (!message.received()) return Lost(lost_peer, Describe(message));
  const Header& header = message.header;
  if (header.has_checksum && Checksum(message.payload->data(), header.bytes) != header.payload_checksum) {
    return absl::DataLossError(absl::StrCat(Describe(message), ": message ", header.sequence, " of ",
                                            header.bytes, " bytes is not what was sent (checksum)"));
  }
  return message.payload;
}

// Whether the wait for a receive has something to say.
bool GlooRun::Ended(Message& message) const {
  if (message.received() || pairs_[message.peer]->closed()) return true;
  return message.header_transfer.received() && !CheckHeader(message).ok();
}

absl::Status GlooRun::CheckHeader(const Message& message) const {
  const Header& header = message.header;
  if (header.header_checksum != header.Sum()) {
    return absl::DataLossError(absl::StrCat(Describe(message), ": the header of message ", message.sequence,
                                            " is not what was sent (checksum)"));
  }
  if (header.run != options_.run || header.sequence != message.sequence ||
      header.traffic != static_cast<uint32_t>(message.traffic) ||
      header.from != static_cast<uint32_t>(message.peer)) {
    return absl::InternalError(absl::StrCat(
        Describe(message), ": the ranks have diverged: message ", message.sequence, " of run ", options_.run,
        " was expected, message ", header.sequence, " of run ", header.run, " arrived"));
  }
  if (header.bytes != message.payload->size_bytes()) {
    return absl::InternalError(absl::StrCat(Describe(message), ": the ranks have diverged: ", header.bytes,
                                            " bytes arrived, ", message.payload->size_bytes(),
                                            " were expected"));
  }
  return absl::OkStatus();
}

void GlooRun::OnEvents() {
  const MutexLock lock(mu_);
  Reap();
  changed_.NotifyAll();
}

// Lets go of what gloo has no more business with.
void GlooRun::Reap() {
  for (auto send = sends_.begin(); send != sends_.end();) {
    const bool sent = (*send)->sent();
    const bool lost = !sent && pairs_[(*send)->peer]->closed();
    if (lost) lost_send_to_ = (*send)->peer;
    send = sent || lost ? sends_.erase(send) : std::next(send);
  }
  receives_.remove_if(
      [&](const auto& receive) { return receive->received() || pairs_[receive->peer]->closed(); });
}

void GlooRun::Abort(const absl::Status& reason) {
  bool standing;
  {
    const MutexLock lock(mu_);
    if (std::exchange(aborted_, true)) return;
    abort_code_ = reason.ok() ? absl::StatusCode::kAborted : reason.code();
    abort_message_ = reason.ok() ? "aborted without a reason" : std::string(reason.message());
    changed_.NotifyAll();
    standing = standing_;
  }
  if (standing) ShutDownPairs(SHUT_RDWR);
}

absl::Status GlooRun::AbortReason(absl::string_view while_doing) {
  const MutexLock lock(mu_);
  if (!aborted_) return absl::OkStatus();
  return AbortedIn(absl::StrCat("rank ", options_.rank, ": ", while_doing));
}

// Each peer reads all that it was sent, then the end, and closes; so that nothing on its way is lost.
void GlooRun::Close() {
  bool aborted;
  {
    MutexLock lock(mu_);
    if (std::exchange(closed_, true)) return;
    changed_.NotifyAll();
    if (!standing_) return;
    const absl::Time linger_end = MonotonicNow() + kLinger;
    Reap();
    while (!aborted_ && !sends_.empty() && changed_.WaitUntil(mu_, linger_end)) Reap();
    aborted = aborted_;
  }
  ShutDownPairs(aborted ? SHUT_RDWR : SHUT_WR);
  {
    MutexLock lock(mu_);
    const absl::Time close_end = MonotonicNow() + kCloseTimeout;
    const auto closed = [](const GlooPair* pair) { return pair == nullptr || pair->closed(); };
    while (!std::all_of(pairs_.begin(), pairs_.end(), closed) && changed_.WaitUntil(mu_, close_end)) {
    }
  }
  for (GlooPair* pair : pairs_) {
    if (pair != nullptr) pair->Close();
  }
  const MutexLock lock(mu_);
  sends_.clear();
  receives_.clear();
}

void GlooRun::ShutDownPairs(int how) {
  for (GlooPair* pair : pairs_) {
    if (pair != nullptr) pair->Shutdown(how);
  }
}

absl::Status GlooRun::AbortedIn(absl::string_view what) const {
  return absl::Status(abort_code_, absl::StrCat(what, ": ", abort_message_));
}

// An abort breaks the connections too: then its reason is the one to tell.
absl::Status GlooRun::Lost(int peer, absl::string_view what) {
  const MutexLock lock(mu_);
  if (aborted_) return AbortedIn(what);
  const GlooPair& pair = *pairs_[peer];
  const std::string why = absl::StrCat(what, ": the connection with rank ", peer,
                                       " is lost: ", pair.closed() ? pair.close_reason() : "closing");
  return pair.closed() && pair.forged() ? absl::DataLossError(why) : absl::UnavailableError(why);
}

class GlooReceive : public PendingReceive {
 public:
  GlooReceive(std::shared_ptr<GlooRun> run, std::shared_ptr<Message> message)
      : run_(std::move(run)), message_(std::move(message)) {}

  absl::StatusOr<BufferRef> Wait(absl::Time deadline) override {
    if (message_ == nullptr) {
      return absl::InternalError(absl::StrCat("rank ", run_->options().rank, ": a message waited for twice"));
    }
    return run_->Wait(*std::exchange(message_, nullptr), deadline);
  }

 private:
  const std::shared_ptr<GlooRun> run_;  // before message_, which points into it
  std::shared_ptr<Message> message_;
};

class GlooCommunicator : public Communicator {
 public:
  explicit GlooCommunicator(std::shared_ptr<GlooRun> run) : run_(std::move(run)) {}
  ~GlooCommunicator() override { run_->Close(); }

  int rank() const override { return run_->options().rank; }
  int size() const override { return run_->options().ranks; }

  absl::StatusOr<std::unique_ptr<PendingReceive>> SendReceive(Traffic traffic, int to, BufferRef message,
                                                              int from, size_t receive_bytes) override {
    ASSIGN_OR_RETURN(BufferRef into, run_->Allocate(receive_bytes));
    return SendReceiveInto(traffic, to, std::move(message), from, std::move(into));
  }

  absl::StatusOr<std::unique_ptr<PendingReceive>> SendReceiveInto(Traffic traffic, int to, BufferRef message,
                                                                  int from, BufferRef into) override {
    for (int peer : {to, from}) {
      if (peer < 0 || peer >= size() || peer == rank()) {
        return absl::InvalidArgumentError(absl::StrCat("rank ", rank(), ": ", OperationName(traffic),
                                                       " with rank ", peer, ", which is no other of the ",
                                                       size(), " ranks"));
      }
    }
    if (message == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", rank(), ": ", OperationName(traffic), " to rank ", to, " without a message"));
    }
    ASSIGN_OR_RETURN(std::shared_ptr<Message> receive,
                     run_->SendReceive(traffic, to, std::move(message), from, std::move(into)));
    return std::make_unique<GlooReceive>(run_, std::move(receive));
  }

  void Abort(absl::Status reason) override { run_->Abort(reason); }

 private:
  const std::shared_ptr<GlooRun> run_;  // shared with the endpoint and the receives, which end in any order
};

class GlooEndpointImpl : public GlooEndpoint {
 public:
  GlooEndpointImpl(const GlooOptions& options, std::unique_ptr<GlooRendezvous> rendezvous)
      : run_(std::make_shared<GlooRun>(options)), rendezvous_(std::move(rendezvous)) {}

  const std::string& address() const override { return rendezvous_->address(); }

  absl::StatusOr<std::unique_ptr<Communicator>> Connect(std::span<const std::string> addresses,
                                                        Stream& stream, absl::Time deadline) override {
    if (std::exchange(connected_, true)) {
      return absl::InternalError(absl::StrCat("rank ", run_->options().rank, ": connected twice"));
    }
    absl::StatusOr<std::vector<PeerSocket>> sockets = rendezvous_->Connect(addresses, deadline);
    absl::Status status = run_->AbortReason("connecting");
    if (status.ok()) status = sockets.status();
    if (status.ok()) status = run_->Start(rendezvous_->interface(), *std::move(sockets), stream);
    if (status.ok()) return std::make_unique<GlooCommunicator>(run_);
    run_->Close();
    return status;
  }

  int strangers() const override { return rendezvous_->strangers(); }

  void Abort(absl::Status reason) override {
    run_->Abort(reason);
    rendezvous_->Interrupt();
  }

 private:
  const std::shared_ptr<GlooRun> run_;
  const std::unique_ptr<GlooRendezvous> rendezvous_;
  bool connected_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<GlooEndpoint>> GlooEndpoint::Listen(const GlooOptions& options) {
  if (options.ranks < 1 || options.rank < 0 || options.rank >= options.ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("data plane: rank ", options.rank, " of ", options.ranks, " ranks"));
  }
  struct sigaction action = {};
  if (sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL)
    std::signal(SIGPIPE, SIG_IGN);
  ASSIGN_OR_RETURN(std::unique_ptr<GlooRendezvous> rendezvous,
                   GlooRendezvous::Listen({.listen = options.listen,
                                           .rank = options.rank,
                                           .ranks = options.ranks,
                                           .run = options.run,
                                           .encrypt = options.encrypt}));
  return std::make_unique<GlooEndpointImpl>(options, std::move(rendezvous));
}

}  // namespace meshfill
