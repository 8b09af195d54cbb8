// Sockets between the ranks of one run: who listens where, who may connect, and when all of them stand.
//
// Rank i connects to every lower rank and is connected to by every higher one:
//
//     client                                 server
//       │──── Hello: run, both ranks, ────────►│  drops whoever does not know both secrets
//       │     both endpoints' secrets          │
//       │◄─── Welcome: the client's secret ────│
//       │◄─── TLS handshake, if encrypted ────►│  by a key of both endpoints' keys, which no hello shows
//
// No byte beyond these is read, so that the sockets are as new. Whatever else comes to the port costs one
// descriptor for a few seconds at most, and never delays a peer. Who has heard a hello and repeats it gets as
// far as the handshake.
#ifndef MESHFILL_ENGINE_COMM_GLOO_GLOO_RENDEZVOUS_H_
#define MESHFILL_ENGINE_COMM_GLOO_GLOO_RENDEZVOUS_H_

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "engine/comm/gloo/tls_channel.h"

namespace meshfill {

// Owns a descriptor.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.Release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor();

  bool valid() const { return fd_ >= 0; }
  int get() const { return fd_; }
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t length = 0;

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// A connection with a peer.
struct PeerSocket {
  FileDescriptor socket;            // connected, non-blocking; none for the rank itself
  std::unique_ptr<TlsChannel> tls;  // over the socket, after its handshake; null: plain text
};

// Whether `address` is a rendezvous' of such a rank of such a run. INVALID_ARGUMENT says what it is instead,
// as "is none".
absl::Status CheckGlooAddress(absl::string_view address, uint64_t run, int rank, bool encrypt);

class GlooRendezvous {
 public:
  using Secret = std::array<uint8_t, 16>;

  struct Options {
    std::string listen;  // an interface, an address or a host name
    int rank = 0;
    int ranks = 1;
    uint64_t run = 0;
    bool encrypt = false;  // the same on all ranks
    // A peer says its hello with its first packet. Who stays silent longer is none.
    absl::Duration hello_timeout = absl::Seconds(3);
  };
  // INVALID_ARGUMENT: `listen` is none of its three, or all interfaces at once. UNAVAILABLE: it cannot be
  // bound.
  static absl::StatusOr<std::unique_ptr<GlooRendezvous>> Listen(const Options& options);

  const std::string& address() const { return address_; }        // opaque bytes
  const SocketAddress& interface() const { return interface_; }  // bound to, port 0

  // Connections by rank, once. Errors name the peers; INVALID_ARGUMENT where one encrypts and the other does
  // not.
  absl::StatusOr<std::vector<PeerSocket>> Connect(std::span<const std::string> addresses,
                                                  absl::Time deadline);

  int strangers() const { return strangers_; }  // connections that Connect dropped, once it returned

  // Ends Connect, now or in future, with ABORTED; from any thread.
  void Interrupt();

 private:
  explicit GlooRendezvous(const Options& options) : options_(options) {}

  const Options options_;
  Secret secret_ = {};
  SocketAddress interface_;
  FileDescriptor listener_;
  FileDescriptor interrupt_;  // an eventfd: readable once interrupted
  std::string address_;
  int strangers_ = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_GLOO_GLOO_RENDEZVOUS_H_
