#include "server/cli/bench/cold_files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <set>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "engine/model/safetensors_folder.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

constexpr size_t kReadBytes = 8 << 20;

class OpenFile {
 public:
  explicit OpenFile(const std::string& path) : descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  ~OpenFile() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  int descriptor() const { return descriptor_; }  // below 0: errno says why

 private:
  const int descriptor_;
};

absl::Status CannotBeRead(const std::string& path) {
  return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot be read"));
}

// Bytes of an open file that are in the page cache; -1: errno says why.
int64_t CachedBytes(int descriptor) {
  struct stat file = {};
  if (fstat(descriptor, &file) != 0) return -1;
  if (file.st_size == 0) return 0;
  const auto bytes = static_cast<size_t>(file.st_size);
  void* const map = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, 0);
  if (map == MAP_FAILED) return -1;
  const absl::Cleanup unmap = [&] { munmap(map, bytes); };
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages((bytes + page - 1) / page);
  if (mincore(map, bytes, pages.data()) != 0) return -1;
  const auto is_cached = [](unsigned char flags) { return (flags & 1) != 0; };
  return std::count_if(pages.begin(), pages.end(), is_cached) * static_cast<int64_t>(page);
}

}  // namespace

absl::StatusOr<ColdFiles> ColdFiles::Of(const std::string& folder) {
  ASSIGN_OR_RETURN(const SafetensorsFolder weights, SafetensorsFolder::Open(folder));
  std::set<std::string> paths;
  for (const auto& [name, entry] : weights.entries()) paths.insert(entry.file->path());
  ColdFiles files;
  for (const std::string& path : paths) {
    struct stat file = {};
    if (stat(path.c_str(), &file) != 0) return CannotBeRead(path);
    files.paths_.push_back(path);
    files.bytes_ += file.st_size;
  }
  return files;
}

absl::Status ColdFiles::Drop() const {
  int64_t cached = 0;
  for (const std::string& path : paths_) {
    const OpenFile file(path);
    if (file.descriptor() < 0) return CannotBeRead(path);
    fdatasync(file.descriptor());  // only pages that have been written can go
    posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_DONTNEED);
    const int64_t of_file = CachedBytes(file.descriptor());
    if (of_file < 0) return CannotBeRead(path);
    cached += of_file;
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
    const OpenFile file(path);
    if (file.descriptor() < 0) return CannotBeRead(path);
    ssize_t count = 0;
    while ((count = read(file.descriptor(), buffer.data(), buffer.size())) > 0) {
    }
    if (count < 0) return CannotBeRead(path);
  }
  return SecondsSince(start);
}

}  // namespace meshfill
