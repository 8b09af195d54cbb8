// Addresses to listen on, "HOST:PORT".
#ifndef MESHFILL_SERVER_CONFIG_ADDRESS_H_
#define MESHFILL_SERVER_CONFIG_ADDRESS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace meshfill {

struct HostPort {
  std::string host;   // a name, an IPv4 address, or an IPv6 address without its brackets
  uint16_t port = 0;  // 0: the system chooses one

  // Whether none but this machine can reach it: localhost, 127.0.0.0/8 and ::1.
  bool IsThisMachine() const;
  std::string DebugString() const;  // "127.0.0.1:50051", "[::1]:50051"
};

// INVALID_ARGUMENT unless `text` is HOST:PORT, with an IPv6 host in brackets.
absl::StatusOr<HostPort> ParseHostPort(absl::string_view text);

// The numeric address of `text`, which is free to be listened on now. UNAVAILABLE, with the system's reason,
// where the host has no address or the port is in use.
absl::StatusOr<HostPort> ResolveFreeAddress(absl::string_view text);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CONFIG_ADDRESS_H_
