#include "server/access/peer_names.h"

#include <openssl/rand.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace meshfill {
namespace {

constexpr absl::string_view kScheme = "unix-abstract:";  // how gRPC writes such an address

}  // namespace

std::string PeerNames::Add(int socket, Names names) {
  std::array<unsigned char, 16> random{};
  if (RAND_bytes(random.data(), static_cast<int>(random.size())) != 1) return "";
  const std::string connection = absl::StrCat(
      "meshfill-", absl::BytesToHexString({reinterpret_cast<const char*>(random.data()), random.size()}));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // An abstract name begins with a zero, and is in no file system. Nobody listens at it.
  std::copy(connection.begin(), connection.end(), address.sun_path + 1);
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + connection.size());
  if (bind(socket, reinterpret_cast<const sockaddr*>(&address), size) != 0) return "";
  const MutexLock lock(mu_);
  names_[connection] = std::move(names);
  return connection;
}

void PeerNames::Remove(const std::string& connection) {
  const MutexLock lock(mu_);
  names_.erase(connection);
}

PeerNames::Names PeerNames::Of(absl::string_view peer) const {
  if (!absl::ConsumePrefix(&peer, kScheme)) return {};
  const MutexLock lock(mu_);
  const auto found = names_.find(peer);
  return found == names_.end() ? Names() : found->second;
}

}  // namespace meshfill
