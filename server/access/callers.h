// Who may call, as the file of api.credentials says: a line for each credential, of four words.
//
//     # name   role    tenant  credential
//     alice    client  team-a  sha256:HASH
//     bob      client  team-b  certificate:bob.example
//     pool     worker  -       sha256:…
//     ops      admin   -       certificate:ops.example
//
// The file has a token's SHA-256 and never the token. A certificate is named by its subject's common name, or
// by a DNS name that it has. An immutable value; thread-safe.
#ifndef MESHFILL_SERVER_ACCESS_CALLERS_H_
#define MESHFILL_SERVER_ACCESS_CALLERS_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace meshfill {

enum class Role : uint8_t {
  kClient,  // prefills, K and V, plans, the pool: of its own tenant
  kWorker,  // a process of the pool: reads K and V, of every tenant
  kAdmin,   // all, for every tenant
};

struct Caller {
  std::string name;  // the caller's name in messages
  Role role = Role::kClient;
  std::string tenant;  // a client's tenant

  bool operator==(const Caller&) const = default;
};

class Callers {
 public:
  // INVALID_ARGUMENT "FILE:LINE: what is wrong; what to do": wrong words, a name or a credential that is
  // there twice, no line at all. Messages never repeat a credential.
  static absl::StatusOr<Callers> Parse(absl::string_view file_name, absl::string_view text);

  // Null: the token is nobody's. Takes the same time for every token of a length.
  const Caller* OfToken(absl::string_view token) const;
  const Caller* OfCertificate(absl::string_view name) const;

 private:
  struct Token {
    std::string sha256;  // 32 bytes
    Caller caller;
  };
  std::map<uint64_t, Token> tokens_;  // keys are the first eight bytes of the hashes
  std::map<std::string, Caller, std::less<>> certificates_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_ACCESS_CALLERS_H_
