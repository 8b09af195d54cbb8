#include "server/access/callers.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <cstring>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/config/tenant_name.h"

namespace meshfill {
namespace {

constexpr size_t kHashBytes = SHA256_DIGEST_LENGTH;
constexpr size_t kMaxNameBytes = 128;

std::optional<Role> RoleOf(absl::string_view word) {
  if (word == "client") return Role::kClient;
  if (word == "worker") return Role::kWorker;
  if (word == "admin") return Role::kAdmin;
  return std::nullopt;
}

uint64_t KeyOf(absl::string_view sha256) {
  uint64_t key = 0;
  std::memcpy(&key, sha256.data(), sizeof(key));
  return key;
}

bool IsHexHash(absl::string_view text) {
  return text.size() == 2 * kHashBytes &&
         text.find_first_not_of("0123456789abcdefABCDEF") == absl::string_view::npos;
}

}  // namespace

absl::StatusOr<Callers> Callers::Parse(absl::string_view file_name, absl::string_view text) {
  Callers callers;
  std::set<std::string> names;
  int line_number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++line_number;
    const auto error = [&](absl::string_view problem) {
      return absl::InvalidArgumentError(absl::StrCat(file_name, ":", line_number, ": ", problem));
    };
    const std::vector<absl::string_view> words =
        absl::StrSplit(line.substr(0, line.find('#')), absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty()) continue;
    if (words.size() != 4) {
      return error(absl::StrCat(words.size(), " words; write NAME ROLE TENANT CREDENTIAL"));
    }
    const auto role = RoleOf(words[1]);
    if (!role.has_value()) return error("the role, the second word, is none of client, worker, admin");
    if ((words[2] == "-") == (*role == Role::kClient)) {
      return error("a client has a tenant, the third word; workers and admins have - there");
    }
    if (words[0].size() > kMaxNameBytes) return error(absl::StrCat("a name above ", kMaxNameBytes, " bytes"));
    if (const absl::Status tenant = CheckTenantName(words[2]); !tenant.ok()) {
      return error(absl::StrCat("the tenant, the third word, ", tenant.message()));
    }
    Caller caller{.name = std::string(words[0]), .role = *role, .tenant = ""};
    if (*role == Role::kClient) caller.tenant = std::string(words[2]);
    if (!names.insert(caller.name).second) {
      return error(absl::StrCat("the name ", caller.name, " is there twice; each line has its own"));
    }
    absl::string_view credential = words[3];
    bool added = false;
    if (absl::ConsumePrefix(&credential, "sha256:") && IsHexHash(credential)) {
      std::string hash = absl::HexStringToBytes(credential);
      const uint64_t key = KeyOf(hash);
      added = callers.tokens_.emplace(key, Token{std::move(hash), std::move(caller)}).second;
    } else if (absl::ConsumePrefix(&credential, "certificate:") && !credential.empty()) {
      added = callers.certificates_.emplace(std::string(credential), std::move(caller)).second;
    } else {
      return error(
          "the credential, the fourth word, is no sha256: with 64 digits and no certificate: with a name; "
          "`printf %s \"$TOKEN\" | sha256sum` hashes a token");
    }
    if (!added) return error("the same credential as on an earlier line; each caller has its own");
  }
  if (names.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        file_name, ": nobody is in it, so that nobody could call; write NAME ROLE TENANT CREDENTIAL"));
  }
  return callers;
}

const Caller* Callers::OfToken(absl::string_view token) const {
  unsigned char hash[kHashBytes];
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), hash);
  const auto found = tokens_.find(KeyOf({reinterpret_cast<const char*>(hash), kHashBytes}));
  if (found == tokens_.end()) return nullptr;
  return CRYPTO_memcmp(found->second.sha256.data(), hash, kHashBytes) == 0 ? &found->second.caller : nullptr;
}

const Caller* Callers::OfCertificate(absl::string_view name) const {
  const auto found = certificates_.find(name);
  return found == certificates_.end() ? nullptr : &found->second;
}

}  // namespace meshfill
