#include "server/cli/output_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"

namespace meshfill {

absl::Status CheckOutputPath(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::path folder = std::filesystem::absolute(path, ignored).parent_path();
  if (!std::filesystem::is_directory(folder, ignored)) {
    return absl::NotFoundError(absl::StrCat(path, ": its folder does not exist; create it first"));
  }
  if (std::filesystem::is_directory(path, ignored)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": is a folder; give the name of a file to write"));
  }
  const bool exists = std::filesystem::exists(path, ignored);
  if (access(exists ? path.c_str() : folder.c_str(), W_OK) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": cannot be written: ", std::strerror(errno), "; give another file"));
  }
  return absl::OkStatus();
}

absl::Status WriteTextFile(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (file) return absl::OkStatus();
  return absl::UnknownError(
      absl::StrCat(path, ": cannot be written: ", std::strerror(errno), "; give another file or make room"));
}

}  // namespace meshfill
