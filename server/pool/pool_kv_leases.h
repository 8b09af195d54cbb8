// Leases on what the workers of a pool keep: the leader's directory (kv_directory.h) behind the API's calls,
// and readers that fetch from the holders.
#ifndef MESHFILL_SERVER_POOL_POOL_KV_LEASES_H_
#define MESHFILL_SERVER_POOL_POOL_KV_LEASES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "kernels/mutex.h"
#include "server/api/kv_leases.h"
#include "server/pool/holder_call.h"
#include "server/pool/leader.h"

namespace meshfill {

class PoolKvLeases final : public KvLeases {
 public:
  // The leader, under the lock that guards it; what it then wants done is done before the call returns.
  using UseLeader = std::function<void(const std::function<void(Leader&, absl::Time now)>&)>;

  PoolKvLeases(const KvShape& shape, std::unique_ptr<HolderChannels> channels, UseLeader use_leader)
      : shape_(shape), use_leader_(std::move(use_leader)), channels_(std::move(channels)) {}

  // The directory has changed. Whoever guards the leader calls it, perhaps under that lock.
  void OnChanged();

  absl::StatusOr<std::unique_ptr<KvReader>> Open(const v1::FetchKvRequest& request, const std::string& tenant,
                                                 int64_t max_message_bytes,
                                                 std::function<void()> changed) override;
  absl::Time EndLapsed() override;
  KvStore::Counts counts() const override;
  void SetObserver(std::function<void()> changed) override;

  int64_t budget_bytes() const override;  // sum over the workers that are there
  std::vector<KvStore::LeaseEnd> LeasesOf(const std::string& tenant) const override;
  absl::StatusOr<std::unique_ptr<HeldKvLease>> Admit(const std::shared_ptr<KvPrompt>& prompt,
                                                     const Plan& plan, std::string tenant,
                                                     absl::Duration lasts) override;
  std::optional<absl::Duration> RoomIn(const KvPrompt& prompt, const Plan& plan) const override;
  absl::StatusOr<absl::Duration> Renew(const std::string& lease, const std::string& tenant,
                                       absl::Duration lasts) override;
  void Release(const std::string& lease, const std::string& tenant) override;

 private:
  class Held;

  // What `use` returns of the leader.
  template <typename Result, typename Use>
  Result Ask(Use use) const;

  const KvShape shape_;
  const UseLeader use_leader_;
  const std::unique_ptr<HolderChannels> channels_;
  Mutex mu_;  // held while `changed_` runs
  std::function<void()> changed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_POOL_KV_LEASES_H_
