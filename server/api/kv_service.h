// The front-end's part in kept K and V: admits prompts, and answers FetchKv, RenewKv and ReleaseKv.
// Thread-safe.
#ifndef MESHFILL_SERVER_API_KV_SERVICE_H_
#define MESHFILL_SERVER_API_KV_SERVICE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/server_context.h"
#include "kernels/mutex.h"
#include "meshfill/v1/prefill.pb.h"
#include "server/api/kv_leases.h"
#include "server/api/kv_streams.h"
#include "server/config/tenants.h"
#include "server/observe/metrics.h"

namespace meshfill {

class KvService final : private KvStreams::Listener {
 public:
  struct Options {
    absl::Duration lease = absl::Seconds(30);  // where a request does not say
    absl::Duration max_lease = absl::Hours(1);
    int block_tokens = 16;
    Tenants tenants;
    KvStreams::Limits streams;
  };

  // Both outlive the service. No stream is live any more when it goes.
  KvService(KvLeases& leases, const Options& options, Metrics& metrics);

  const Options& options() const { return options_; }
  int64_t cached_bytes() const { return leases_.counts().cached_bytes; }

  // A lease for a prompt that no run has begun and that `plan` is for; `seconds` as a request says them.
  // RESOURCE_EXHAUSTED: no room, or the tenant has as much as it may; with RetryInfo where leases will make
  // room.
  absl::StatusOr<std::unique_ptr<HeldKvLease>> Admit(const std::shared_ptr<KvPrompt>& prompt,
                                                     const Plan& plan, const std::string& tenant,
                                                     uint32_t seconds);
  // Whether such a prompt would be admitted now, or once prefills that run are over.
  bool HasRoom(const KvPrompt& prompt, const Plan& plan, const std::string& tenant) const;

  KvFetchReactor* Fetch(grpc::CallbackServerContext* context, std::string tenant,
                        v1::FetchKvRequest request) {
    return streams_.Fetch(context, std::move(tenant), std::move(request));
  }
  absl::StatusOr<v1::KvLease> Renew(const v1::RenewKvRequest& request, const std::string& tenant);
  void Release(const v1::ReleaseKvRequest& request, const std::string& tenant);

  // False where a lease is live at the deadline.
  bool WaitUntilNoLease(absl::Time deadline) { return streams_.WaitUntilNoLease(deadline); }
  void WaitUntilNoStream() { streams_.WaitUntilNoStream(); }

 private:
  void OnKvChanged(const KvStore::Counts& counts) override;
  void OnKvFetched(int64_t bytes) override { metrics_.OnKvFetched(bytes); }
  void OnFetchRefused(absl::StatusCode code) override { metrics_.OnCallRefused("FetchKv", code); }
  absl::Duration LeaseOf(uint32_t seconds) const;
  absl::Status CheckTenantsShare(const std::string& tenant, int64_t bytes) const;

  KvLeases& leases_;
  const Options options_;
  Metrics& metrics_;
  Mutex admit_mu_;     // held from the check of a tenant's share to its new lease
  KvStreams streams_;  // last: its thread uses all of the above
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_KV_SERVICE_H_
