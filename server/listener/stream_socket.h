// A connected socket that does not block, in plain text or in TLS. Not thread-safe.
#ifndef MESHFILL_SERVER_LISTENER_STREAM_SOCKET_H_
#define MESHFILL_SERVER_LISTENER_STREAM_SOCKET_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/types/span.h"
#include "server/access/openssl_handles.h"

namespace meshfill {

class StreamSocket {
 public:
  // What became of a call.
  enum class State : uint8_t {
    kDone,
    kWantsRead,   // call again once the socket is readable
    kWantsWrite,  // call again with the same bytes once the socket is writable
    kEnded,       // the peer sends no more
    kFailed,      // error() says why; call nothing any more
  };
  struct Moved {
    State state;
    size_t bytes;  // of kDone: above 0
  };
  // Room for a record of TLS: less may leave bytes in it that epoll does not tell of.
  static constexpr size_t kLeastRoom = 16 << 10;

  // Owns both. `tls`: over `socket`; null for plain text.
  StreamSocket(int socket, TlsConnection tls) : socket_(socket), tls_(std::move(tls)) {}
  ~StreamSocket();  // closes the socket
  StreamSocket(const StreamSocket&) = delete;
  StreamSocket& operator=(const StreamSocket&) = delete;

  int fd() const { return socket_; }
  const SSL* tls() const { return tls_.get(); }  // null: plain text

  // Call it first where there is TLS, until it is done.
  State Handshake();
  // `into`: kLeastRoom or more.
  Moved Receive(absl::Span<uint8_t> into);
  // As much as goes at once.
  Moved Send(absl::Span<const uint8_t> bytes);
  void EndSending();

  const std::string& error() const { return error_; }

 private:
  State StateOfTls(int result);

  const int socket_;
  const TlsConnection tls_;
  std::string error_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_LISTENER_STREAM_SOCKET_H_
