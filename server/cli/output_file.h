// Files that a command writes because it was asked to.
#ifndef MESHFILL_SERVER_CLI_OUTPUT_FILE_H_
#define MESHFILL_SERVER_CLI_OUTPUT_FILE_H_

#include <string>

#include "absl/status/status.h"

namespace meshfill {

// Asked before long work, so that its result is not lost for want of a folder. NOT_FOUND: the path's folder
// is not there. INVALID_ARGUMENT: the path is a folder, or may not be written.
absl::Status CheckOutputPath(const std::string& path);

// Writes the file, or replaces it. UNKNOWN where the disk refuses, with its reason.
absl::Status WriteTextFile(const std::string& path, const std::string& text);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_OUTPUT_FILE_H_
