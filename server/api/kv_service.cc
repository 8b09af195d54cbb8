#include "server/api/kv_service.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"
#include "server/queue/refusal.h"

namespace meshfill {

KvService::KvService(KvLeases& leases, const Options& options, Metrics& metrics)
    : leases_(leases), options_(options), metrics_(metrics), streams_(leases, options.streams, this) {}

absl::Duration KvService::LeaseOf(uint32_t seconds) const {
  return seconds == 0 ? options_.lease : std::min(absl::Seconds(seconds), options_.max_lease);
}

absl::Status KvService::CheckTenantsShare(const std::string& tenant, int64_t bytes) const {
  const int64_t most = options_.tenants.LimitsOf(tenant).max_kv_bytes;
  if (most == std::numeric_limits<int64_t>::max()) return absl::OkStatus();
  std::vector<KvStore::LeaseEnd> leases = leases_.LeasesOf(tenant);
  int64_t taken = 0;
  for (const KvStore::LeaseEnd& lease : leases) taken += lease.bytes;
  if (bytes <= most - taken) return absl::OkStatus();
  const absl::Status refused = WithRefusal(
      absl::ResourceExhaustedError(absl::StrCat(
          "the tenant has no room for the ", bytes, " bytes of K and V that are to be kept beside its ",
          taken, " (its max_kv_bytes is ", most, "); ",
          bytes > most ? "send a shorter prompt" : "release a lease, or try again later")),
      Refusal::kTenantShare);
  if (bytes > most) return refused;
  std::sort(leases.begin(), leases.end(),
            [](const auto& left, const auto& right) { return left.ends_in < right.ends_in; });
  absl::Duration wait;
  for (const KvStore::LeaseEnd& lease : leases) {
    if (bytes <= most - taken) break;
    taken -= lease.bytes;
    wait = lease.ends_in;
  }
  return WithRetryAfter(refused, std::max(wait, absl::Seconds(1)));
}

absl::StatusOr<std::unique_ptr<HeldKvLease>> KvService::Admit(const std::shared_ptr<KvPrompt>& prompt,
                                                              const Plan& plan, const std::string& tenant,
                                                              uint32_t seconds) {
  const MutexLock lock(admit_mu_);
  RETURN_IF_ERROR(CheckTenantsShare(tenant, prompt->bytes()));
  absl::StatusOr<std::unique_ptr<HeldKvLease>> lease = leases_.Admit(prompt, plan, tenant, LeaseOf(seconds));
  if (!absl::IsResourceExhausted(lease.status())) return lease;
  OnKvChanged(leases_.counts());  // nothing has changed but the count of refusals
  const std::optional<absl::Duration> wait = leases_.RoomIn(*prompt, plan);
  const absl::Status no_room = WithRefusal(lease.status(), Refusal::kKvRoom);
  return wait.has_value() ? WithRetryAfter(no_room, std::max(*wait, absl::Seconds(1))) : no_room;
}

bool KvService::HasRoom(const KvPrompt& prompt, const Plan& plan, const std::string& tenant) const {
  return CheckTenantsShare(tenant, prompt.bytes()).ok() &&
         leases_.RoomIn(prompt, plan) == absl::ZeroDuration();
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
                  .evicted_bytes = counts.evicted_bytes,
                  .device_bytes = counts.device_bytes});
}

}  // namespace meshfill
