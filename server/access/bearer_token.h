// The token that a process shows where it calls.
#ifndef MESHFILL_SERVER_ACCESS_BEARER_TOKEN_H_
#define MESHFILL_SERVER_ACCESS_BEARER_TOKEN_H_

#include <string>

#include "absl/status/statusor.h"

namespace meshfill {

// The one line of a file, without the white space around it. INVALID_ARGUMENT, which never repeats it: as
// ReadSmallFile has it; or it is no token, which are of printable ASCII without spaces. `key` names the file.
absl::StatusOr<std::string> ReadBearerToken(const std::string& key, const std::string& path);

// What goes into the metadata `authorization`.
inline std::string BearerHeader(const std::string& token) { return "Bearer " + token; }

}  // namespace meshfill

#endif  // MESHFILL_SERVER_ACCESS_BEARER_TOKEN_H_
