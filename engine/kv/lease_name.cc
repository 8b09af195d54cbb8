#include "engine/kv/lease_name.h"

#include <unistd.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace meshfill {
namespace {

constexpr size_t kNameBytes = 16;  // 128 random bits
constexpr size_t kShownCharacters = 8;

}  // namespace

absl::StatusOr<std::string> NewLeaseName() {
  char bytes[kNameBytes];
  if (getentropy(bytes, sizeof bytes) != 0) {
    return absl::InternalError("the system gives no random bytes for a lease's name");
  }
  return absl::BytesToHexString(absl::string_view(bytes, sizeof bytes));
}

std::string ShownLease(const std::string& lease) {
  return absl::StrCat(absl::CHexEscape(lease.substr(0, kShownCharacters)), "…");
}

absl::Status NoLease(const std::string& lease) {
  return absl::NotFoundError(
      absl::StrCat("lease ", ShownLease(lease), " is unknown, or has ended; prefill the prompt again"));
}

}  // namespace meshfill
