// Leases on what the ranks of this process keep, in a KvStore.
#ifndef MESHFILL_SERVER_API_STORE_LEASES_H_
#define MESHFILL_SERVER_API_STORE_LEASES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "server/api/kv_leases.h"

namespace meshfill {

class StoreLeases final : public KvLeases {
 public:
  explicit StoreLeases(KvStore& store) : store_(store) {}  // which outlives this

  absl::StatusOr<std::unique_ptr<KvReader>> Open(const v1::FetchKvRequest& request, const std::string& tenant,
                                                 int64_t max_message_bytes,
                                                 std::function<void()> changed) override;
  absl::Time EndLapsed() override { return store_.EndLapsed(); }
  KvStore::Counts counts() const override { return store_.counts(); }
  void SetObserver(std::function<void()> changed) override { store_.SetObserver(std::move(changed)); }

  int64_t budget_bytes() const override { return store_.budget_bytes(); }
  std::vector<KvStore::LeaseEnd> LeasesOf(const std::string& tenant) const override {
    return store_.LeasesOf(tenant);
  }
  absl::StatusOr<std::unique_ptr<HeldKvLease>> Admit(const std::shared_ptr<KvPrompt>& prompt,
                                                     const Plan& plan, std::string tenant,
                                                     absl::Duration lasts) override;
  std::optional<absl::Duration> RoomIn(const KvPrompt& prompt, const Plan& plan) const override;
  absl::StatusOr<absl::Duration> Renew(const std::string& lease, const std::string& tenant,
                                       absl::Duration lasts) override;
  void Release(const std::string& lease, const std::string& tenant) override;

 private:
  KvStore& store_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_STORE_LEASES_H_
