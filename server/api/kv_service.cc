#include "server/api/kv_service.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"
#include "server/api/status_details.h"

namespace meshfill {

KvService::KvService(KvStore& store, const Options& options, Metrics& metrics)
    : store_(store), options_(options), metrics_(metrics), watcher_([this] { Watch(); }) {
  store_.SetObserver([this] {
    const MutexLock lock(mu_);
    changed_ = true;
    wake_.NotifyAll();
  });
}

KvService::~KvService() {
  store_.SetObserver(nullptr);
  {
    const MutexLock lock(mu_);
    stopping_ = true;
    wake_.NotifyAll();
  }
  watcher_.join();
}

absl::Duration KvService::LeaseOf(uint32_t seconds) const {
  return seconds == 0 ? options_.lease : std::min(absl::Seconds(seconds), options_.max_lease);
}

absl::StatusOr<std::unique_ptr<KvLease>> KvService::Admit(const std::shared_ptr<KvPrompt>& prompt,
                                                          const std::string& tenant, uint32_t seconds) {
  absl::StatusOr<std::unique_ptr<KvLease>> lease = store_.Admit(prompt, tenant, LeaseOf(seconds));
  if (!absl::IsResourceExhausted(lease.status())) return lease;
  Publish();  // nothing has changed but the count of refusals
  const std::optional<absl::Duration> wait = store_.RoomIn(prompt->bytes());
  if (!wait.has_value()) return lease.status();
  return WithRetryAfter(lease.status(), std::max(*wait, absl::Seconds(1)));
}

KvFetchReactor* KvService::Fetch(grpc::CallbackServerContext* context, const v1::FetchKvRequest* request) {
  auto stream = std::make_shared<KvFetchStream>(*this, context, request);
  {
    const MutexLock lock(mu_);
    streams_[stream.get()] = stream;
  }
  stream->OnChange();
  return stream.get();  // gRPC's until OnDone
}

void KvService::Remove(KvFetchStream* stream) {
  std::shared_ptr<KvFetchStream> gone;  // after the lock
  const MutexLock lock(mu_);
  gone = std::move(streams_.at(stream));
  streams_.erase(stream);
  settled_.NotifyAll();
}

absl::StatusOr<v1::KvLease> KvService::Renew(const v1::RenewKvRequest& request, const std::string& tenant) {
  ASSIGN_OR_RETURN(const absl::Duration rest,
                   store_.Renew(request.lease(), tenant, LeaseOf(request.seconds())));
  v1::KvLease lease;
  lease.set_lease(request.lease());
  lease.set_expires_in_seconds(absl::ToDoubleSeconds(rest));
  return lease;
}

void KvService::Release(const v1::ReleaseKvRequest& request, const std::string& tenant) {
  store_.Release(request.lease(), tenant);
}

bool KvService::WaitUntilNoLease(absl::Time deadline) {
  MutexLock lock(mu_);
  while (store_.counts().leases > 0 && MonotonicNow() < deadline) settled_.WaitUntil(mu_, deadline);
  return store_.counts().leases == 0;
}

void KvService::WaitUntilNoStream() {
  MutexLock lock(mu_);
  while (!streams_.empty()) settled_.Wait(mu_);
}

void KvService::Publish() const {
  const KvStore::Counts counts = store_.counts();
  metrics_.SetKv({.leases = counts.leases,
                  .bytes = counts.bytes,
                  .max_bytes = store_.budget_bytes(),
                  .lapsed = counts.lapsed,
                  .refused = counts.refused});
}

void KvService::Watch() {
  absl::Time next_lapse = absl::InfiniteFuture();
  MutexLock lock(mu_);
  while (!stopping_) {
    if (!changed_ && MonotonicNow() < next_lapse) {
      wake_.WaitUntil(mu_, next_lapse);
      continue;
    }
    changed_ = false;
    std::vector<std::shared_ptr<KvFetchStream>> streams;
    for (const auto& [key, stream] : streams_) streams.push_back(stream);
    lock.Unlock();
    next_lapse = store_.EndLapsed();
    Publish();
    for (const auto& stream : streams) stream->OnChange();
    streams.clear();
    lock.Lock();
    settled_.NotifyAll();
  }
}

}  // namespace meshfill
