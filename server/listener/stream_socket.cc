#include "server/listener/stream_socket.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace meshfill {

StreamSocket::~StreamSocket() { close(socket_); }

StreamSocket::State StreamSocket::Handshake() {
  if (tls_ == nullptr) return State::kDone;
  ERR_clear_error();
  const State state = StateOfTls(SSL_do_handshake(tls_.get()));
  if (state != State::kDone) return state;
  const unsigned char* protocol = nullptr;
  unsigned size = 0;
  SSL_get0_alpn_selected(tls_.get(), &protocol, &size);
  if (size > 0) return State::kDone;
  error_ = "the client does not say that it speaks HTTP/2 (ALPN)";
  return State::kFailed;
}

StreamSocket::Moved StreamSocket::Receive(absl::Span<uint8_t> into) {
  if (tls_ != nullptr) {
    ERR_clear_error();
    size_t got = 0;
    const State state = StateOfTls(SSL_read_ex(tls_.get(), into.data(), into.size(), &got));
    return {state, got};
  }
  const ssize_t got = recv(socket_, into.data(), into.size(), MSG_DONTWAIT);
  if (got > 0) return {State::kDone, static_cast<size_t>(got)};
  if (got == 0) return {State::kEnded, 0};
  if (errno == EAGAIN || errno == EINTR) return {State::kWantsRead, 0};
  error_ = std::strerror(errno);
  return {State::kFailed, 0};
}

StreamSocket::Moved StreamSocket::Send(absl::Span<const uint8_t> bytes) {
  if (tls_ != nullptr) {
    size_t sent = 0;
    State state = State::kDone;
    while (state == State::kDone && sent < bytes.size()) {  // a record at a time
      ERR_clear_error();
      size_t went = 0;
      state = StateOfTls(SSL_write_ex(tls_.get(), bytes.data() + sent, bytes.size() - sent, &went));
      sent += went;
    }
    return {state, sent};
  }
  const ssize_t sent = send(socket_, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent >= 0) {
    const bool all = static_cast<size_t>(sent) == bytes.size();
    return {all ? State::kDone : State::kWantsWrite, static_cast<size_t>(sent)};
  }
  if (errno == EAGAIN || errno == EINTR) return {State::kWantsWrite, 0};
  error_ = std::strerror(errno);
  return {State::kFailed, 0};
}

void StreamSocket::EndSending() {
  if (tls_ != nullptr) SSL_shutdown(tls_.get());
  shutdown(socket_, SHUT_WR);
}

StreamSocket::State StreamSocket::StateOfTls(int result) {
  switch (SSL_get_error(tls_.get(), result)) {
    case SSL_ERROR_NONE:
      return State::kDone;
    case SSL_ERROR_WANT_READ:
      return State::kWantsRead;
    case SSL_ERROR_WANT_WRITE:
      return State::kWantsWrite;
    case SSL_ERROR_ZERO_RETURN:
    case SSL_ERROR_SYSCALL:  // the peer is gone
      return State::kEnded;
    default:
      break;
  }
  const long verified = SSL_get_verify_result(tls_.get());
  const int reason = ERR_GET_REASON(ERR_peek_last_error());
  error_ = absl::StrCat("TLS: ", OpenSslReason());
  if (reason == SSL_R_WRONG_VERSION_NUMBER || reason == SSL_R_HTTP_REQUEST) {
    absl::StrAppend(&error_, ", as of a client in plain text");
  }
  if (verified != X509_V_OK) absl::StrAppend(&error_, ", ", X509_verify_cert_error_string(verified));
  return State::kFailed;
}

}  // namespace meshfill
