// Accepts the connections of one port, in bounded numbers, and hands them on.
//
// gRPC's own listener stops for ever once accept has failed for want of a descriptor. This one goes on: it
// closes what it has no room for. An error after which no connection can be accepted ends the process, with
// a line that says so: a server that nobody can reach must not look alive.
#ifndef MESHFILL_SERVER_LISTENER_CONNECTION_ACCEPTOR_H_
#define MESHFILL_SERVER_LISTENER_CONNECTION_ACCEPTOR_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/config/address.h"

namespace meshfill {

class ConnectionAcceptor {
 public:
  // Takes over a connected socket. Called from the acceptor's thread.
  using Handler = std::function<void(int connection)>;

  // Binds `address`, whose port 0 stands for any that is free; at most `max_connections` are open at a time.
  // Connections wait until Start. UNAVAILABLE: the address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> Bind(const HostPort& address,
                                                                  int max_connections);
  ~ConnectionAcceptor();  // closes the port; connections that were handed on live
  ConnectionAcceptor(const ConnectionAcceptor&) = delete;
  ConnectionAcceptor& operator=(const ConnectionAcceptor&) = delete;

  const HostPort& address() const { return address_; }  // HOST:PORT with the real port
  int listener() const { return listener_; }            // the socket that listens

  void Start(Handler handler);  // once

 private:
  ConnectionAcceptor(HostPort address, int listener, int stop, int max_connections);

  void Run();
  void AcceptOne();
  void MakeRoomAndRefuse();  // no descriptor is free
  // Whether one more connection may live.
  bool HasRoomFor(int connection);
  void ForgetClosed();

  const HostPort address_;
  const int listener_;
  const int max_connections_;
  const int stop_;  // an eventfd: readable when the thread is to end
  int spare_;       // a descriptor that is given up to refuse a connection for which there is none
  Handler handler_;
  std::map<int, ino_t> open_;  // connections that were handed on, and perhaps closed since
  absl::Time forgot_at_ = absl::InfinitePast();
  std::thread thread_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_LISTENER_CONNECTION_ACCEPTOR_H_
