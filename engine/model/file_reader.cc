#include "engine/model/file_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

// What direct reads are multiples of: their place in the file, their length, and their place in memory.
constexpr size_t kDirectBytes = 4096;

// -1 where the file system has no direct reads.
int OpenDirect(int descriptor) {
  // Not by its path, where another file may lie by now.
  return open(absl::StrCat("/proc/self/fd/", descriptor).c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// As pread, by a direct read into memory of the calling thread.
ssize_t ReadDirect(int descriptor, std::byte* to, size_t size_bytes, off_t at) {
  constexpr size_t kRoomBytes = size_t{1} << 20;
  static thread_local const std::unique_ptr<void, Free> room(std::aligned_alloc(kDirectBytes, kRoomBytes));
  if (room == nullptr) {
    errno = ENOMEM;
    return -1;
  }
  const size_t before = static_cast<size_t>(at) % kDirectBytes;
  const size_t wanted = std::min(before + size_bytes, kRoomBytes);
  const size_t whole = (wanted + kDirectBytes - 1) / kDirectBytes * kDirectBytes;
  const ssize_t count = pread(descriptor, room.get(), whole, at - static_cast<off_t>(before));
  if (count <= static_cast<ssize_t>(before)) return std::min<ssize_t>(count, 0);
  const size_t read = std::min(static_cast<size_t>(count), wanted) - before;
  std::memcpy(to, static_cast<const std::byte*>(room.get()) + before, read);
  return static_cast<ssize_t>(read);
}

}  // namespace

FileReader::FileReader(std::string path, int descriptor, std::span<const std::byte> mapped)
    : path_(std::move(path)), descriptor_(descriptor), direct_(OpenDirect(descriptor)), mapped_(mapped) {}

FileReader::~FileReader() {
  close(descriptor_);
  if (direct_ >= 0) close(direct_);
}

absl::Status FileReader::Read(std::span<const std::byte> bytes, PageCache cache, void* to) const {
  const off_t begin = bytes.data() - mapped_.data();
  auto* const target = static_cast<std::byte*>(to);
  for (size_t done = 0; done < bytes.size();) {
    const off_t at = begin + static_cast<off_t>(done);
    const size_t rest = bytes.size() - done;
    const ssize_t count = cache == PageCache::kPass ? ReadPastCache(target + done, rest, at)
                                                    : pread(descriptor_, target + done, rest, at);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return absl::ErrnoToStatus(errno, absl::StrCat(path_, ": cannot be read at byte ", at));
    if (count == 0) {
      return absl::DataLossError(
          absl::StrCat(path_, ": ends at byte ", at, " or before, and had ", mapped_.size(),
                       " when it was opened; put the whole file back, and start the process anew"));
    }
    done += static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

// Whether the page cache has all of it. The system tells that of files that the process may write; of others
// it says yes.
bool FileReader::Cached(off_t at, size_t size_bytes) const {
  const size_t page_bytes = sysconf(_SC_PAGESIZE);
  const size_t begin = static_cast<size_t>(at) / page_bytes * page_bytes;
  const size_t end = static_cast<size_t>(at) + size_bytes;
  std::vector<unsigned char> pages((end - begin + page_bytes - 1) / page_bytes);
  if (mincore(const_cast<std::byte*>(mapped_.data()) + begin, end - begin, pages.data()) != 0) return true;
  return std::all_of(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1) != 0; });
}

// As pread. Where a direct read fails, the other one says why.
ssize_t FileReader::ReadPastCache(std::byte* to, size_t size_bytes, off_t at) const {
  if (direct_ >= 0 && !Cached(at, size_bytes)) {
    const ssize_t count = ReadDirect(direct_, to, size_bytes, at);
    if (count >= 0) return count;
  }
  return pread(descriptor_, to, size_bytes, at);
}

}  // namespace meshfill
