// Files of a certificate's or a token's size.
#ifndef MESHFILL_SERVER_ACCESS_SMALL_FILE_H_
#define MESHFILL_SERVER_ACCESS_SMALL_FILE_H_

#include <string>

#include "absl/status/statusor.h"

namespace meshfill {

// The whole file, 1 byte to 1 MiB. INVALID_ARGUMENT "KEY: PATH cannot be read: why; …": it is missing, not a
// regular file (a FIFO is never waited for), unreadable, empty, or larger. `key` of the configuration names
// it.
absl::StatusOr<std::string> ReadSmallFile(const std::string& key, const std::string& path);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_ACCESS_SMALL_FILE_H_
