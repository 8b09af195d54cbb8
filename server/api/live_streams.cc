#include "server/api/live_streams.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"

namespace meshfill {

LiveStreams::LiveStreams(absl::Duration upload_timeout)
    : upload_timeout_(upload_timeout), watcher_([this] { Watch(); }) {}

LiveStreams::~LiveStreams() {
  {
    const MutexLock lock(mu_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  watcher_.join();
}

void LiveStreams::Add(std::shared_ptr<Stream> stream) {
  const MutexLock lock(mu_);
  Stream* key = stream.get();
  streams_[key] = {std::move(stream), MonotonicNow() + upload_timeout_};
  changed_.NotifyAll();
}

void LiveStreams::OnMessage(Stream* stream) {
  const MutexLock lock(mu_);
  // The watcher need not wake: it finds the later time when it looks at the earlier one.
  if (const auto entry = streams_.find(stream); entry != streams_.end()) {
    entry->second.idle_at = MonotonicNow() + upload_timeout_;
  }
}

void LiveStreams::UploadDone(Stream* stream) {
  const MutexLock lock(mu_);
  if (const auto entry = streams_.find(stream); entry != streams_.end()) {
    entry->second.idle_at = absl::InfiniteFuture();
  }
}

void LiveStreams::Remove(Stream* stream) {
  std::shared_ptr<Stream> last;  // dropped after the lock
  const MutexLock lock(mu_);
  const auto entry = streams_.find(stream);
  if (entry == streams_.end()) return;
  last = std::move(entry->second.stream);
  streams_.erase(entry);
  changed_.NotifyAll();
}

bool LiveStreams::CancelRequest(const std::string& request_id, const std::string& tenant) {
  std::vector<std::shared_ptr<Stream>> streams;  // called, and dropped, without the lock
  {
    const MutexLock lock(mu_);
    for (const auto& [key, entry] : streams_) streams.push_back(entry.stream);
  }
  return std::any_of(streams.begin(), streams.end(),
                     [&](const auto& stream) { return stream->CancelRequest(request_id, tenant); });
}

bool LiveStreams::WaitUntilNone(absl::Time deadline) {
  MutexLock lock(mu_);
  while (!streams_.empty() && MonotonicNow() < deadline) changed_.WaitUntil(mu_, deadline);
  return streams_.empty();
}

absl::Time LiveStreams::EarliestIdle() const {
  absl::Time earliest = absl::InfiniteFuture();
  for (const auto& [key, entry] : streams_) earliest = std::min(earliest, entry.idle_at);
  return earliest;
}

void LiveStreams::Watch() {
  while (true) {
    std::vector<std::shared_ptr<Stream>> idle;
    {
      MutexLock lock(mu_);
      if (!stopping_) changed_.WaitUntil(mu_, EarliestIdle());
      if (stopping_) return;
      const absl::Time now = MonotonicNow();
      for (auto& [key, entry] : streams_) {
        if (entry.idle_at > now) continue;
        entry.idle_at = absl::InfiniteFuture();
        idle.push_back(entry.stream);
      }
    }
    for (const auto& stream : idle) stream->OnUploadIdle();
  }
}

}  // namespace meshfill
