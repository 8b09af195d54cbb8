#include "server/access/bearer_token.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"
#include "server/access/small_file.h"

namespace meshfill {

absl::StatusOr<std::string> ReadBearerToken(const std::string& key, const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(key, path));
  std::string token(absl::StripAsciiWhitespace(text));
  if (!token.empty() && std::all_of(token.begin(), token.end(), absl::ascii_isgraph)) return token;
  return absl::InvalidArgumentError(absl::StrCat(
      key, ": ", path, " has no token: one line of printable characters, as `openssl rand -hex 32` prints"));
}

}  // namespace meshfill
