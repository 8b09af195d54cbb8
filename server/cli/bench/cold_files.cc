#include "server/cli/bench/cold_files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

constexpr size_t kReadBytes = 8 << 20;

absl::StatusOr<int> Open(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot be opened"));
  return descriptor;
}

// Pages of an open file that are in the page cache.
absl::StatusOr<int64_t> CachedPages(int descriptor, const std::string& path) {
  const auto bytes = static_cast<size_t>(std::filesystem::file_size(path));
  if (bytes == 0) return 0;
  void* const map = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, 0);
  if (map == MAP_FAILED) return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot be mapped"));
  const absl::Cleanup unmap = [&] { munmap(map, bytes); };
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> cached((bytes + page - 1) / page);
  if (mincore(map, bytes, cached.data()) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat(path, ": mincore"));
  }
  return std::count_if(cached.begin(), cached.end(), [](unsigned char flags) { return (flags & 1) != 0; });
}

}  // namespace

absl::StatusOr<ColdFiles> ColdFiles::Of(const std::string& folder) {
  ColdFiles files;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().extension() != ".safetensors") continue;
    files.paths_.push_back(entry.path().string());
    files.bytes_ += static_cast<int64_t>(entry.file_size());
  }
  if (files.paths_.empty()) return absl::NotFoundError(absl::StrCat(folder, " has no *.safetensors"));
  return files;
}

absl::Status ColdFiles::Drop() const {
  int64_t cached = 0;
  for (const std::string& path : paths_) {
    ASSIGN_OR_RETURN(const int descriptor, Open(path));
    const absl::Cleanup close_it = [&] { close(descriptor); };
    fdatasync(descriptor);  // only pages that have been written can go
    posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
    ASSIGN_OR_RETURN(const int64_t of_file, CachedPages(descriptor, path));
    cached += of_file * sysconf(_SC_PAGESIZE);
  }
  if (cached <= bytes_ / 100) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(cached, " of ", bytes_, " bytes of ", paths_.front(),
                   paths_.size() > 1 ? " and the files beside it" : "",
                   " stay in the page cache; put the model on a disk, and end what else has it open"));
}

absl::StatusOr<double> ColdFiles::Read() const {
  RETURN_IF_ERROR(Drop());
  std::vector<char> buffer(kReadBytes);
  const auto start = std::chrono::steady_clock::now();
  for (const std::string& path : paths_) {
    ASSIGN_OR_RETURN(const int descriptor, Open(path));
    const absl::Cleanup close_it = [&] { close(descriptor); };
    ssize_t count = 0;
    while ((count = read(descriptor, buffer.data(), buffer.size())) > 0) {
    }
    if (count < 0) return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot be read"));
  }
  return SecondsSince(start);
}

}  // namespace meshfill
