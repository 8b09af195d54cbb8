#include "server/api/kv_service.h"

#include <algorithm>
#include <optional>

#include "kernels/return_if_error.h"
#include "server/api/status_details.h"

namespace meshfill {

KvService::KvService(KvLeases& leases, const Options& options, Metrics& metrics)
    : leases_(leases), options_(options), metrics_(metrics), streams_(leases, options.streams, this) {}

absl::Duration KvService::LeaseOf(uint32_t seconds) const {
  return seconds == 0 ? options_.lease : std::min(absl::Seconds(seconds), options_.max_lease);
}

absl::StatusOr<std::unique_ptr<HeldKvLease>> KvService::Admit(const std::shared_ptr<KvPrompt>& prompt,
                                                              const Plan& plan, const std::string& tenant,
                                                              uint32_t seconds) {
  absl::StatusOr<std::unique_ptr<HeldKvLease>> lease = leases_.Admit(prompt, plan, tenant, LeaseOf(seconds));
  if (!absl::IsResourceExhausted(lease.status())) return lease;
  OnKvChanged(leases_.counts());  // nothing has changed but the count of refusals
  const std::optional<absl::Duration> wait = leases_.RoomIn(*prompt, plan);
  if (!wait.has_value()) return lease.status();
  return WithRetryAfter(lease.status(), std::max(*wait, absl::Seconds(1)));
}

absl::StatusOr<v1::KvLease> KvService::Renew(const v1::RenewKvRequest& request, const std::string& tenant) {
  ASSIGN_OR_RETURN(const absl::Duration rest,
                   leases_.Renew(request.lease(), tenant, LeaseOf(request.seconds())));
  v1::KvLease lease;
  lease.set_lease(request.lease());
  lease.set_expires_in_seconds(absl::ToDoubleSeconds(rest));
  return lease;
}

void KvService::Release(const v1::ReleaseKvRequest& request, const std::string& tenant) {
  leases_.Release(request.lease(), tenant);
}

void KvService::OnKvChanged(const KvStore::Counts& counts) {
  metrics_.SetKv({.leases = counts.leases,
                  .bytes = counts.bytes,
                  .max_bytes = leases_.budget_bytes(),
                  .lapsed = counts.lapsed,
                  .refused = counts.refused,
                  .cached_bytes = counts.cached_bytes,
                  .hit_tokens = counts.hit_tokens,
                  .miss_tokens = counts.miss_tokens,
                  .evictions = counts.evictions,
                  .evicted_bytes = counts.evicted_bytes});
}

}  // namespace meshfill
