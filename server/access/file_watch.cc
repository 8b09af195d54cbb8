#include "server/access/file_watch.h"

#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "kernels/monotonic_time.h"

namespace meshfill {

FileWatch::FileWatch(std::vector<std::string> paths) : paths_(std::move(paths)), known_(Look()) {}

void FileWatch::Start(std::function<void()> changed) {
  changed_ = std::move(changed);
  const bool none = std::all_of(paths_.begin(), paths_.end(), [](const auto& path) { return path.empty(); });
  if (!none) thread_ = std::thread([this] { Watch(); });
}

FileWatch::~FileWatch() {
  if (!thread_.joinable()) return;
  {
    const MutexLock lock(mu_);
    stopping_ = true;
    wake_.NotifyAll();
  }
  thread_.join();
}

FileWatch::Stamps FileWatch::Look() const {
  Stamps stamps;
  for (const std::string& path : paths_) {
    struct stat found {};
    if (path.empty() || stat(path.c_str(), &found) != 0) {
      stamps.emplace_back();
      continue;
    }
    stamps.push_back({static_cast<int64_t>(found.st_dev), static_cast<int64_t>(found.st_ino), found.st_size,
                      found.st_mtim.tv_sec, found.st_mtim.tv_nsec, found.st_ctim.tv_sec,
                      found.st_ctim.tv_nsec});
  }
  return stamps;
}

void FileWatch::Watch() {
  Stamps last = known_;
  MutexLock lock(mu_);
  while (!stopping_) {
    const absl::Time next = MonotonicNow() + kPeriod;
    while (!stopping_ && MonotonicNow() < next) wake_.WaitUntil(mu_, next);
    if (stopping_) return;
    Stamps now = Look();
    const bool still = now == last;
    last = now;
    if (!still || now == known_) continue;
    known_ = std::move(now);
    lock.Unlock();
    changed_();
    lock.Lock();
  }
}

}  // namespace meshfill
