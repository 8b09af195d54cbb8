// Names of network interfaces in place of addresses.
#ifndef MESHFILL_ENGINE_COMM_INTERFACE_ADDRESS_H_
#define MESHFILL_ENGINE_COMM_INTERFACE_ADDRESS_H_

#include <optional>
#include <string>

namespace meshfill {

// The first numeric address of an interface ("eth0"): IPv4 before IPv6. Nothing: there is no such interface,
// or it has no address.
std::optional<std::string> InterfaceAddress(const std::string& name);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_INTERFACE_ADDRESS_H_
