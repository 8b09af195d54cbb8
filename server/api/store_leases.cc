#include "server/api/store_leases.h"

#include <utility>

#include "kernels/return_if_error.h"
#include "server/api/kv_fetch.h"
#include "server/api/slab_reader.h"

namespace meshfill {
namespace {

class HeldStoreLease final : public HeldKvLease {
 public:
  HeldStoreLease(std::shared_ptr<const KvPrompt> prompt, std::unique_ptr<KvLease> lease)
      : prompt_(std::move(prompt)), lease_(std::move(lease)) {}

  const std::string& id() const override { return lease_->id(); }
  absl::StatusOr<absl::Duration> Keep() override { return lease_->Keep(); }
  void AddHolders(v1::KvManifest& manifest) const override {
    v1::KvHolder& holder = *manifest.add_holders();
    holder.set_layers(static_cast<uint32_t>(prompt_->shape().layers));
    holder.set_heads(static_cast<uint32_t>(prompt_->shape().kv_heads));
    holder.set_run_tokens(static_cast<uint64_t>(prompt_->tokens()));
  }

 private:
  const std::shared_ptr<const KvPrompt> prompt_;
  const std::unique_ptr<KvLease> lease_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<KvReader>> StoreLeases::Open(const v1::FetchKvRequest& request,
                                                            const std::string& tenant,
                                                            int64_t max_message_bytes,
                                                            std::function<void()> /*changed*/) {
  const auto find = [this, lease = request.lease(), tenant] { return store_.Find(lease, tenant); };
  ASSIGN_OR_RETURN(const std::shared_ptr<const KvPrompt> prompt, find());
  ASSIGN_OR_RETURN(const KvFetch fetch,
                   CheckFetch(request, prompt->shape(), prompt->tokens(), max_message_bytes));
  return std::make_unique<SlabReader>(fetch, std::vector<bool>(), find);
}

absl::StatusOr<std::unique_ptr<HeldKvLease>> StoreLeases::Admit(const std::shared_ptr<KvPrompt>& prompt,
                                                                const Plan& /*plan*/, std::string tenant,
                                                                absl::Duration lasts) {
  ASSIGN_OR_RETURN(std::unique_ptr<KvLease> lease, store_.Admit(prompt, std::move(tenant), lasts));
  return std::make_unique<HeldStoreLease>(prompt, std::move(lease));
}

std::optional<absl::Duration> StoreLeases::RoomIn(const KvPrompt& prompt, const Plan& /*plan*/) const {
  return store_.RoomIn(prompt.bytes());
}

absl::StatusOr<absl::Duration> StoreLeases::Renew(const std::string& lease, const std::string& tenant,
                                                  absl::Duration lasts) {
  return store_.Renew(lease, tenant, lasts);
}

void StoreLeases::Release(const std::string& lease, const std::string& tenant) {
  store_.Release(lease, tenant);
}

}  // namespace meshfill
