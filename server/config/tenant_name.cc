#include "server/config/tenant_name.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

constexpr size_t kMaxCharacters = 128;

bool IsPrintable(char byte) { return absl::ascii_isprint(static_cast<unsigned char>(byte)); }

}  // namespace

absl::Status CheckTenantName(absl::string_view name) {
  const auto other = std::find_if_not(name.begin(), name.end(), IsPrintable);
  if (other != name.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "has a character that is not printable ASCII, at byte ", other - name.begin(),
        "; gRPC metadata, where other calls say their tenant, cannot carry it: choose another name"));
  }
  if (name.size() <= kMaxCharacters) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("has ", name.size(), " characters; at most ", kMaxCharacters, " are allowed"));
}

}  // namespace meshfill
