#include "server/access/small_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace meshfill {
namespace {

constexpr size_t kMaxBytes = 1 << 20;  // a bundle of all public authorities has a quarter of it

}  // namespace

absl::StatusOr<std::string> ReadSmallFile(const std::string& key, const std::string& path) {
  const auto unreadable = [&](absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat(key, ": ", path, " cannot be read: ", why, "; name a file that this user may read"));
  };
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a FIFO must not hold up the start
  if (fd < 0) return unreadable(std::strerror(errno));
  struct stat found {};
  const bool regular = fstat(fd, &found) == 0 && S_ISREG(found.st_mode);
  std::string text(regular ? kMaxBytes + 1 : 0, '\0');
  size_t bytes = 0;
  ssize_t got = 0;
  while (bytes < text.size() && (got = read(fd, text.data() + bytes, text.size() - bytes)) > 0) {
    bytes += static_cast<size_t>(got);
  }
  const int error = errno;
  close(fd);
  if (!regular) return unreadable("not a regular file");
  if (got < 0) return unreadable(std::strerror(error));
  if (bytes > kMaxBytes) return unreadable("more than 1 MiB");
  if (bytes == 0) return unreadable("it is empty");
  text.resize(bytes);
  return text;
}

}  // namespace meshfill
