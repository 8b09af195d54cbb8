// gloo's TCP pair and buffer, made fit for peers that die and for ports that strangers know. Of gloo's
// classes only these are used by Meshfill, and only gloo.cc knows them.
//
// What gloo's own pair does, and this one does not: it listens on a port of its own and takes the first
// connection for its peer; a message that it does not expect throws on the thread of its loop, which ends the
// process; a connection that breaks in the middle of a message leaves who waits for it waiting; a wait that
// times out breaks all pairs.
//
// So a socket is connected elsewhere (gloo_rendezvous.h) and adopted; exceptions end at handleEvents; and
// nobody waits inside gloo: an observer hears of every event, and then looks at the state of his transfers.
//
// Debian's gloo has no TLS. A pair with a channel (tls_channel.h) moves gloo's bytes through that instead of
// the socket, gloo's own framing within.
#ifndef MESHFILL_ENGINE_COMM_GLOO_GLOO_PAIR_H_
#define MESHFILL_ENGINE_COMM_GLOO_GLOO_PAIR_H_

#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/pair.h>
#include <gloo/transport/tcp/unbound_buffer.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "engine/comm/gloo/gloo_rendezvous.h"
#include "engine/comm/gloo/tls_channel.h"

namespace meshfill {

class GlooPair : public gloo::transport::tcp::Pair {
 public:
  // `on_events` runs on the loop's thread, without the pair's lock, after each event.
  GlooPair(gloo::transport::tcp::Context* context, gloo::transport::tcp::Device* device, int peer,
           std::function<void()> on_events)
      : Pair(context, device, peer, gloo::kNoTimeout), on_events_(std::move(on_events)) {
    std::lock_guard<std::mutex> lock(m_);
    CloseDescriptor();                            // the base class listens
    if (state_ == CONNECTED) state_ = LISTENING;  // and a stranger was fast
  }

  ~GlooPair() override { Close(); }

  // Takes over a connection. Throws what gloo throws: of one that the peer has reset already, for example.
  void Adopt(PeerSocket connection) {
    std::lock_guard<std::mutex> lock(m_);
    throwIfException();
    tls_ = std::move(connection.tls);
    fd_ = connection.socket.Release();
    try {
      handleConnected();
    } catch (...) {
      CloseDescriptor();  // the loop does not know it: a pair that closes would ask the loop to forget it
      throw;
    }
    adopted_ = true;
  }

  // SHUT_WR: the peer reads the end after all that was sent, and closes, and then so does this pair.
  // SHUT_RDWR: this pair closes soon, whatever the peer does.
  void Shutdown(int how) {
    std::lock_guard<std::mutex> lock(m_);
    if (fd_ >= 0) ::shutdown(fd_, how);
  }

  // After this the loop's thread knows the pair no more, and has left it. Not from on_events.
  void Close() {
    {
      std::lock_guard<std::mutex> lock(m_);
      if (state_ != CLOSED) GlooPair::changeState(CLOSED);
    }
    std::lock_guard<std::mutex> left(handling_events_);
  }

  bool closed() const { return closed_; }
  const std::string& close_reason() const { return close_reason_; }  // once closed
  bool forged() const { return forged_; }  // once closed: by bytes that the peer did not send

  void handleEvents(int events) override {
    std::lock_guard<std::mutex> lock(handling_events_);
    if (!adopted_) return;  // the event is of the descriptor that the base class listened on
    std::string failure;
    try {
      Pair::handleEvents(events);
    } catch (const std::exception& error) {
      failure = error.what();
    }
    if (!failure.empty()) Fail(failure);
    on_events_();
  }

 protected:
  // These three run under the lock. Both directions go on with the next event where they return false.
  bool write(gloo::transport::tcp::Op& op) override {
    if (tls_ == nullptr) return Pair::write(op);
    if (state_ == CLOSED) return false;
    gloo::NonOwningPtr<gloo::transport::tcp::UnboundBuffer> buffer;
    const auto opcode = op.getOpcode();
    if (opcode == gloo::transport::tcp::Op::SEND_UNBOUND_BUFFER) {
      buffer = gloo::NonOwningPtr<gloo::transport::tcp::UnboundBuffer>(op.ubuf);
      if (!buffer) return false;
    }
    while (op.nwritten < op.preamble.nbytes) {
      iovec pieces[2] = {};  // the rest of the preamble, where there is one, and of the payload
      int count = 0;
      prepareWrite(op, buffer, pieces, count);
      const TlsChannel::Moved moved = tls_->Write(pieces[0].iov_base, pieces[0].iov_len);
      if (moved.state == TlsChannel::State::kFailed) SignalFailure();
      if (moved.state != TlsChannel::State::kDone) return false;  // kEnded: the reader hears of it
      op.nwritten += moved.bytes;
    }
    writeComplete(op, buffer, opcode);
    return true;
  }

  // To the end of what has come, so that none of it is left in the channel, where no event tells of it.
  bool read() override {
    if (tls_ == nullptr) return Pair::read();
    if (state_ == CLOSED) return false;
    gloo::NonOwningPtr<gloo::transport::tcp::UnboundBuffer> buffer;
    while (true) {
      iovec rest = {};
      const ssize_t bytes = prepareRead(rx_, buffer, rest);
      if (bytes < 0) return false;
      if (bytes == 0) break;
      const TlsChannel::Moved moved = tls_->Read(rest.iov_base, rest.iov_len);
      if (moved.state == TlsChannel::State::kFailed) SignalFailure();
      if (moved.state == TlsChannel::State::kEnded)
        signalException("Connection closed by peer " + peer_.str());
      if (moved.state != TlsChannel::State::kDone) return false;
      rx_.nread += moved.bytes;
    }
    readComplete(buffer);
    return true;
  }

  void changeState(state next) noexcept override {
    Pair::changeState(next);
    if (next != CLOSED || closed_) return;
    close_reason_ = ExceptionText();
    closed_ = true;
  }

 private:
  void CloseDescriptor() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

  void SignalFailure() {
    forged_ = true;
    signalException(tls_->error());
  }

  // Where a user's thread has the lock, the loop comes back with the same event: the lock is not waited for,
  // since its owner may wait for the loop.
  void Fail(const std::string& reason) {
    std::unique_lock<std::mutex> lock(m_, std::try_to_lock);
    if (lock && ex_ == nullptr && state_ != CLOSED) signalException(reason);
  }

  // The text of the exception that gloo keeps for its users, without its place in the source.
  std::string ExceptionText() const {
    if (ex_ == nullptr) return "closed";
    try {
      std::rethrow_exception(ex_);
    } catch (const std::exception& error) {
      const std::string text = error.what();  // "[FILE:LINE] Connection closed by peer [ADDRESS]:PORT"
      const size_t place = text.find("] ");
      return place == std::string::npos ? text : text.substr(place + 2);
    }
  }

  const std::function<void()> on_events_;
  std::mutex handling_events_;  // held by the loop's thread while it is in here
  std::atomic<bool> adopted_ = false;
  std::atomic<bool> closed_ = false;
  std::unique_ptr<TlsChannel> tls_;   // null: plain text
  std::atomic<bool> forged_ = false;  // written before closed_
  std::string close_reason_;          // written before closed_
};

class GlooContext : public gloo::transport::tcp::Context {
 public:
  GlooContext(std::shared_ptr<gloo::transport::tcp::Device> device, int rank, int ranks)
      : Context(std::move(device), rank, ranks) {
    setTimeout(gloo::kNoTimeout);
  }

  GlooPair& AddPair(int peer, std::function<void()> on_events) {
    auto pair = std::make_unique<GlooPair>(this, device_.get(), peer, std::move(on_events));
    GlooPair& added = *pair;
    pairs_[peer] = std::move(pair);
    return added;
  }
};

// One send, or one receive, of a piece of memory that outlives it.
class GlooTransfer : public gloo::transport::tcp::UnboundBuffer {
 public:
  using UnboundBuffer::UnboundBuffer;

  bool sent() {
    std::lock_guard<std::mutex> lock(m_);
    return sendCompletions_ > 0;
  }
  bool received() {
    std::lock_guard<std::mutex> lock(m_);
    return recvCompletions_ > 0;
  }
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_GLOO_GLOO_PAIR_H_
