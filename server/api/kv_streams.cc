#include "server/api/kv_streams.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/monotonic_time.h"

namespace meshfill {
namespace {

constexpr absl::Duration kRound = absl::Seconds(1);  // the longest time between two looks at the streams

}  // namespace

KvStreams::KvStreams(KvSource& source, const Limits& limits, Listener* listener)
    : source_(source), limits_(limits), listener_(listener), watcher_([this] { Watch(); }) {
  source_.SetObserver([this] {
    const MutexLock lock(mu_);
    changed_ = true;
    counted_ = false;
    wake_.NotifyAll();
  });
}

KvStreams::~KvStreams() {
  source_.SetObserver(nullptr);
  {
    const MutexLock lock(mu_);
    stopping_ = true;
    wake_.NotifyAll();
  }
  watcher_.join();
}

KvFetchReactor* KvStreams::Fetch(grpc::CallbackServerContext* context, std::string tenant,
                                 v1::FetchKvRequest request) {
  auto stream = std::make_shared<KvFetchStream>(*this, context, std::move(tenant), std::move(request));
  {
    const MutexLock lock(mu_);
    streams_[stream.get()] = {.stream = stream, .write_begin = {}};
  }
  stream->OnChange();
  return stream.get();  // gRPC's until OnDone
}

void KvStreams::OnFetched(int64_t bytes) {
  if (listener_ != nullptr) listener_->OnKvFetched(bytes);
}

void KvStreams::OnRefused(absl::StatusCode code) {
  if (listener_ != nullptr) listener_->OnFetchRefused(code);
}

void KvStreams::OnWriteBegin(KvFetchStream* stream, absl::Time now, int64_t bytes) {
  const MutexLock lock(mu_);
  Entry& entry = streams_.at(stream);
  entry.write_begin = now;
  entry.unread_bytes = bytes;
  unread_bytes_ += bytes;
  unread_.emplace(now, stream);
  BoundUnread(now);
}

void KvStreams::OnWriteEnd(KvFetchStream* stream) {
  const MutexLock lock(mu_);
  TakeUnread(streams_.at(stream));
}

void KvStreams::TakeUnread(Entry& entry) {
  unread_bytes_ -= std::exchange(entry.unread_bytes, 0);
  unread_.erase({entry.write_begin, entry.stream.get()});
}

void KvStreams::BoundUnread(absl::Time now) {
  while (unread_bytes_ > limits_.unread_bytes && unread_.size() > 1) {  // the newest stays
    const auto [write_begin, stream] = *unread_.begin();
    if (now - write_begin < limits_.least_wait) return;  // all read
    Entry& oldest = streams_.at(stream);
    TakeUnread(oldest);
    crowded_out_.push_back(oldest);
    wake_.NotifyAll();
  }
}

void KvStreams::Remove(KvFetchStream* stream) {
  std::shared_ptr<KvFetchStream> gone;  // after the lock
  const MutexLock lock(mu_);
  gone = std::move(streams_.at(stream).stream);
  streams_.erase(stream);
  settled_.NotifyAll();
}

bool KvStreams::WaitUntilNoLease(absl::Time deadline) {
  MutexLock lock(mu_);
  while ((!counted_ || leases_ > 0) && MonotonicNow() < deadline) settled_.WaitUntil(mu_, deadline);
  return counted_ && leases_ == 0;
}

void KvStreams::WaitUntilNoStream() {
  MutexLock lock(mu_);
  while (!streams_.empty()) settled_.Wait(mu_);
}

void KvStreams::Watch() {
  absl::Time next_lapse = absl::InfiniteFuture();
  absl::Time next_round = absl::InfinitePast();
  MutexLock lock(mu_);
  while (!stopping_) {
    if (!crowded_out_.empty()) {
      std::vector<Entry> crowded_out = std::exchange(crowded_out_, {});
      lock.Unlock();
      for (const Entry& each : crowded_out) each.stream->OnCrowdedOut(each.write_begin);
      crowded_out.clear();
      lock.Lock();
      continue;
    }
    const absl::Time next = streams_.empty() ? next_lapse : std::min(next_lapse, next_round);
    if (!changed_ && MonotonicNow() < next) {
      wake_.WaitUntil(mu_, std::min(next_lapse, MonotonicNow() + kRound));
      continue;
    }
    changed_ = false;
    std::vector<std::shared_ptr<KvFetchStream>> streams;
    for (const auto& [key, entry] : streams_) streams.push_back(entry.stream);
    lock.Unlock();
    next_lapse = source_.EndLapsed();
    const KvStore::Counts counts = source_.counts();
    if (listener_ != nullptr) listener_->OnKvChanged(counts);
    for (const auto& stream : streams) stream->OnChange();
    streams.clear();
    next_round = MonotonicNow() + kRound;
    lock.Lock();
    BoundUnread(MonotonicNow());
    leases_ = counts.leases;
    counted_ = !changed_;
    settled_.NotifyAll();
  }
}

}  // namespace meshfill
