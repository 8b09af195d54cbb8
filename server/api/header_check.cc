#include "server/api/header_check.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"
#include "server/config/tenant_name.h"

namespace meshfill {
namespace {

constexpr size_t kMaxNameCharacters = 128;                  // most characters of request_id and cache_salt
constexpr size_t kMaxLoggedBytes = 4 * kMaxNameCharacters;  // most bytes of a name in UTF-8

// Characters of UTF-8 text, which protobuf has checked.
size_t Characters(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char byte) { return (byte & 0xc0) != 0x80; }));
}

absl::Status CheckName(const char* field, const std::string& name) {
  const size_t characters = Characters(name);
  if (characters <= kMaxNameCharacters) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " has ", characters, " characters; at most ", kMaxNameCharacters, " are allowed"));
}

}  // namespace

absl::Status CheckHeader(const v1::PrefillHeader& header, const std::string& model_name) {
  RETURN_IF_ERROR(CheckName("request_id", header.request_id()));
  if (const absl::Status tenant = CheckTenantName(header.tenant()); !tenant.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("tenant ", tenant.message()));
  }
  RETURN_IF_ERROR(CheckName("cache_salt", header.cache_salt()));
  if (!header.model().empty() && header.model() != model_name) {
    return absl::NotFoundError(absl::StrCat("model \"", ShownName(header.model()),
                                            "\" is not served here; name \"", model_name, "\" or none"));
  }
  return CheckTokenCount(header.token_count());
}

absl::Status CheckTokenCount(uint64_t token_count) {
  if (token_count > 0) return absl::OkStatus();
  return absl::InvalidArgumentError("token_count is 0; a prompt needs at least one token");
}

std::string ShownName(const std::string& name) { return name.substr(0, kMaxLoggedBytes); }

}  // namespace meshfill
