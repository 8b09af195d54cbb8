#include "server/api/live_streams.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "server/access/tenant.h"
#include "server/api/header_check.h"

namespace meshfill {

LiveStreams::LiveStreams(const Limits& limits) : limits_(limits), watcher_([this] { Watch(); }) {}

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
  const absl::Time now = MonotonicNow();
  streams_[key] = {.stream = std::move(stream), .begin = now, .overdue_at = now + limits_.upload_timeout};
  changed_.NotifyAll();
}

void LiveStreams::OnMessage(Stream* stream, int64_t tokens_so_far) {
  const MutexLock lock(mu_);
  const auto entry = streams_.find(stream);
  if (entry == streams_.end() || entry->second.overdue_at == absl::InfiniteFuture()) return;  // told, or done
  // The watcher need not wake: it finds the later time when it looks at the earlier one.
  absl::Time from = MonotonicNow();
  if (limits_.upload_tokens_per_second > 0) {
    const double paid_seconds = static_cast<double>(tokens_so_far) / limits_.upload_tokens_per_second;
    from = std::min(from, entry->second.begin + absl::Seconds(paid_seconds));
  }
  entry->second.overdue_at = from + limits_.upload_timeout;
}

void LiveStreams::UploadDone(Stream* stream) {
  const MutexLock lock(mu_);
  if (const auto entry = streams_.find(stream); entry != streams_.end()) {
    entry->second.overdue_at = absl::InfiniteFuture();
  }
}

void LiveStreams::Ended(Stream* stream, int64_t unread_bytes) {
  const MutexLock lock(mu_);
  const auto entry = streams_.find(stream);
  if (entry == streams_.end()) return;
  entry->second.overdue_at = absl::InfiniteFuture();
  const absl::Duration in_drain = std::min(limits_.drain_result_timeout, limits_.result_timeout);
  entry->second.read_by = MonotonicNow() + (draining_ ? in_drain : limits_.result_timeout);
  entry->second.unread_bytes = unread_bytes;
  unread_bytes_ += unread_bytes;
  BoundUnread();
  changed_.NotifyAll();
}

void LiveStreams::BoundUnread() {
  while (unread_bytes_ > limits_.unread_bytes) {
    Entry* oldest = nullptr;
    int unread = 0;
    for (auto& [key, entry] : streams_) {
      if (entry.unread_bytes == 0) continue;
      ++unread;
      if (oldest == nullptr || entry.read_by < oldest->read_by) oldest = &entry;
    }
    if (unread <= 1) return;  // the newest
    oldest->read_by = absl::InfinitePast();
    unread_bytes_ -= std::exchange(oldest->unread_bytes, 0);
  }
}

void LiveStreams::StartDrain() {
  const MutexLock lock(mu_);
  draining_ = true;
  const absl::Time read_by = MonotonicNow() + limits_.drain_result_timeout;
  for (auto& [key, entry] : streams_) {
    if (entry.read_by != absl::InfiniteFuture()) entry.read_by = std::min(entry.read_by, read_by);
  }
  changed_.NotifyAll();
}

void LiveStreams::Remove(Stream* stream) {
  std::shared_ptr<Stream> last;  // dropped after the lock
  const MutexLock lock(mu_);
  const auto entry = streams_.find(stream);
  if (entry == streams_.end()) return;
  unread_bytes_ -= entry->second.unread_bytes;
  last = std::move(entry->second.stream);
  streams_.erase(entry);
  changed_.NotifyAll();
}

std::vector<std::shared_ptr<LiveStreams::Stream>> LiveStreams::Streams() {
  std::vector<std::shared_ptr<Stream>> streams;
  const MutexLock lock(mu_);
  for (const auto& [key, entry] : streams_) streams.push_back(entry.stream);
  return streams;
}

void LiveStreams::StopUploads() {
  for (const auto& stream : Streams()) stream->OnUploadStopped();
}

absl::Status LiveStreams::CancelRequest(const std::string& request_id, const std::string* tenant) {
  std::vector<std::shared_ptr<Stream>> streams = Streams();
  std::erase_if(streams, [&](const auto& stream) { return !stream->IsOf(request_id, tenant); });
  if (tenant == nullptr && streams.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat("several tenants have a live request with the id \"",
                                                   ShownName(request_id), "\"; name one, in the metadata ",
                                                   kTenantMetadata));
  }
  const bool ended = std::any_of(streams.begin(), streams.end(), [&](const auto& stream) {
    return stream->CancelRequest(request_id, tenant);
  });
  if (ended) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("no live request", tenant == nullptr ? "" : " of this tenant",
                                          " has the id \"", ShownName(request_id), "\"; it may have ended"));
}

bool LiveStreams::WaitUntilNone(absl::Time deadline) {
  MutexLock lock(mu_);
  while (!streams_.empty() && MonotonicNow() < deadline) changed_.WaitUntil(mu_, deadline);
  return streams_.empty();
}

absl::Time LiveStreams::NextLook() const {
  absl::Time earliest = absl::InfiniteFuture();
  for (const auto& [key, entry] : streams_) {
    if (draining_ && !entry.knows_of_drain) return absl::InfinitePast();
    earliest = std::min({earliest, entry.overdue_at, entry.read_by});
  }
  return earliest;
}

void LiveStreams::Watch() {
  while (true) {
    std::vector<std::shared_ptr<Stream>> drained, overdue, unread;
    {
      MutexLock lock(mu_);
      if (!stopping_) changed_.WaitUntil(mu_, NextLook());
      if (stopping_) return;
      const absl::Time now = MonotonicNow();
      for (auto& [key, entry] : streams_) {
        if (draining_ && !std::exchange(entry.knows_of_drain, true)) drained.push_back(entry.stream);
        if (entry.overdue_at <= now) {
          entry.overdue_at = absl::InfiniteFuture();
          overdue.push_back(entry.stream);
        }
        if (entry.read_by <= now) {
          entry.read_by = absl::InfiniteFuture();
          unread_bytes_ -= std::exchange(entry.unread_bytes, 0);
          unread.push_back(entry.stream);
        }
      }
    }
    for (const auto& stream : drained) stream->OnDrain();
    for (const auto& stream : overdue) stream->OnUploadOverdue();
    for (const auto& stream : unread) stream->OnResultUnread();
  }
}

}  // namespace meshfill
