#include "server/api/live_streams.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/comm/monotonic_time.h"

namespace meshfill {

LiveStreams::LiveStreams(absl::Duration upload_timeout)
    : upload_timeout_(upload_timeout), watcher_([this] { Watch(); }) {}

LiveStreams::~LiveStreams() {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    stopping_ = true;
    changed_.notify_all();
  }
  watcher_.join();
}

void LiveStreams::Add(std::shared_ptr<Stream> stream) {
  const std::lock_guard<std::mutex> lock(mu_);
  Stream* key = stream.get();
  streams_[key] = {std::move(stream), MonotonicNow() + upload_timeout_};
  changed_.notify_all();
}

void LiveStreams::OnMessage(Stream* stream) {
  const std::lock_guard<std::mutex> lock(mu_);
  // The watcher need not wake: it finds the later time when it looks at the earlier one.
  if (const auto entry = streams_.find(stream); entry != streams_.end()) {
    entry->second.idle_at = MonotonicNow() + upload_timeout_;
  }
}

void LiveStreams::UploadDone(Stream* stream) {
  const std::lock_guard<std::mutex> lock(mu_);
  if (const auto entry = streams_.find(stream); entry != streams_.end()) {
    entry->second.idle_at = absl::InfiniteFuture();
  }
}

void LiveStreams::Remove(Stream* stream) {
  std::shared_ptr<Stream> last;  // dropped after the lock
  const std::lock_guard<std::mutex> lock(mu_);
  const auto entry = streams_.find(stream);
  if (entry == streams_.end()) return;
  last = std::move(entry->second.stream);
  streams_.erase(entry);
  changed_.notify_all();
}

bool LiveStreams::WaitUntilNone(absl::Time deadline) {
  std::unique_lock<std::mutex> lock(mu_);
  while (!streams_.empty() && MonotonicNow() < deadline) changed_.wait_until(lock, ToSteadyTime(deadline));
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
      std::unique_lock<std::mutex> lock(mu_);
      if (!stopping_) changed_.wait_until(lock, ToSteadyTime(EarliestIdle()));
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
