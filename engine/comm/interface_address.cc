#include "engine/comm/interface_address.h"

#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>

#include <memory>

namespace meshfill {

std::optional<std::string> InterfaceAddress(const std::string& name) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return std::nullopt;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, &freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family || name != entry->ifa_name)
        continue;
      const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      char numeric[NI_MAXHOST];
      if (getnameinfo(entry->ifa_addr, length, numeric, sizeof numeric, nullptr, 0, NI_NUMERICHOST) == 0) {
        return numeric;
      }
    }
  }
  return std::nullopt;
}

}  // namespace meshfill
