#include "server/pool/pool_kv_leases.h"

#include <utility>

#include "engine/kv/lease_name.h"
#include "kernels/return_if_error.h"
#include "server/api/kv_fetch.h"
#include "server/pool/pool_kv_reader.h"

namespace meshfill {
namespace {

// Ranks' tokens as runs at equal distances: of the striped layout one entry for a rank, of the others one for
// each of its pieces.
void AddHolder(const KvDirectory::Holder& holder, const TokenLayout& layout, const KvShape& shape,
               v1::KvManifest& manifest) {
  for (const int rank : holder.ranks) {
    const int64_t stripe = layout.stripe();
    const int64_t tokens = layout.ChunkTokens(rank);
    const int64_t round_tokens = layout.ranks() * stripe;
    const bool striped = layout.kind() == LayoutKind::kStriped;
    for (int64_t slot = 0; slot < tokens; slot += striped ? tokens : stripe) {
      v1::KvHolder& entry = *manifest.add_holders();
      entry.set_address(holder.address);
      entry.set_layers(static_cast<uint32_t>(shape.layers));
      entry.set_heads(static_cast<uint32_t>(shape.kv_heads));
      entry.set_first_token(static_cast<uint64_t>(layout.TokenAt(rank, slot)));
      entry.set_run_tokens(static_cast<uint64_t>(stripe));
      if (striped && tokens > stripe) entry.set_step_tokens(static_cast<uint64_t>(round_tokens));
    }
  }
}

}  // namespace

template <typename Result, typename Use>
Result PoolKvLeases::Ask(Use use) const {
  std::optional<Result> result;
  use_leader_([&](Leader& leader, absl::Time now) { result.emplace(use(leader, now)); });
  return *std::move(result);
}

class PoolKvLeases::Held final : public HeldKvLease {
 public:
  Held(PoolKvLeases& leases, std::string lease, std::string tenant)
      : leases_(leases), lease_(std::move(lease)), tenant_(std::move(tenant)) {}
  ~Held() override {
    if (kept_) return;
    leases_.use_leader_([this](Leader& leader, absl::Time) { leader.kv().End(lease_); });
  }

  const std::string& id() const override { return lease_; }
  absl::StatusOr<absl::Duration> Keep() override {
    kept_ = true;
    return leases_.Ask<absl::StatusOr<absl::Duration>>(
        [this](Leader& leader, absl::Time now) { return leader.kv().Keep(lease_, now); });
  }
  void AddHolders(v1::KvManifest& manifest) const override {
    leases_.use_leader_([&](Leader& leader, absl::Time now) {
      const auto view = leader.kv().Find(lease_, tenant_, now);
      if (!view.ok() || view->run == 0) return;  // who reads hears why
      const KvDirectory::Place& place = leader.kv().PlaceOf(lease_);
      for (const KvDirectory::Holder& holder : place.holders) {
        AddHolder(holder, place.layout, leases_.shape_, manifest);
      }
    });
  }

 private:
  PoolKvLeases& leases_;
  const std::string lease_;
  const std::string tenant_;
  bool kept_ = false;
};

void PoolKvLeases::OnChanged() {
  const MutexLock lock(mu_);
  if (changed_ != nullptr) changed_();
}

void PoolKvLeases::SetObserver(std::function<void()> changed) {
  const MutexLock lock(mu_);
  changed_ = std::move(changed);
}

absl::StatusOr<std::unique_ptr<KvReader>> PoolKvLeases::Open(const v1::FetchKvRequest& request,
                                                             const std::string& tenant,
                                                             int64_t max_message_bytes,
                                                             std::function<void()> changed) {
  const auto find = [this, lease = request.lease(), tenant](uint64_t known_run) {
    return Ask<absl::StatusOr<PoolKvReader::Found>>(
        [&](Leader& leader, absl::Time now) -> absl::StatusOr<PoolKvReader::Found> {
          PoolKvReader::Found found;
          ASSIGN_OR_RETURN(found.view, leader.kv().Find(lease, tenant, now));
          if (found.view.run != known_run && found.view.run != 0) {
            found.place = std::make_shared<const KvDirectory::Place>(leader.kv().PlaceOf(lease));
          }
          return found;
        });
  };
  ASSIGN_OR_RETURN(const PoolKvReader::Found found, find(0));
  ASSIGN_OR_RETURN(const KvFetch fetch, CheckFetch(request, shape_, found.view.tokens, max_message_bytes));
  return std::make_unique<PoolKvReader>(shape_, fetch, request.lease(), tenant, find, *channels_,
                                        std::move(changed));
}

absl::Time PoolKvLeases::EndLapsed() {
  return Ask<absl::Time>([](Leader& leader, absl::Time now) { return leader.kv().EndLapsed(now); });
}

KvStore::Counts PoolKvLeases::counts() const {
  return Ask<KvStore::Counts>([](Leader& leader, absl::Time) { return leader.kv_counts(); });
}

int64_t PoolKvLeases::budget_bytes() const {
  return Ask<int64_t>([](Leader& leader, absl::Time) {
    int64_t bytes = 0;
    for (const auto& [name, worker] : leader.kv_by_worker()) bytes += worker.max_bytes;
    return bytes;
  });
}

std::vector<KvStore::LeaseEnd> PoolKvLeases::LeasesOf(const std::string& tenant) const {
  return Ask<std::vector<KvStore::LeaseEnd>>(
      [&](Leader& leader, absl::Time now) { return leader.kv().LeasesOf(tenant, now); });
}

absl::StatusOr<std::unique_ptr<HeldKvLease>> PoolKvLeases::Admit(const std::shared_ptr<KvPrompt>& prompt,
                                                                 const Plan& plan, std::string tenant,
                                                                 absl::Duration lasts) {
  ASSIGN_OR_RETURN(std::string lease, NewLeaseName());
  RETURN_IF_ERROR(Ask<absl::Status>([&](Leader& leader, absl::Time now) {
    leader.kv().EndLapsed(now);
    return leader.AdmitKv({.lease = lease, .tenant = tenant, .tokens = prompt->tokens(), .lasts = lasts},
                          plan);
  }));
  return std::make_unique<Held>(*this, std::move(lease), std::move(tenant));
}

std::optional<absl::Duration> PoolKvLeases::RoomIn(const KvPrompt& /*prompt*/, const Plan& plan) const {
  return Ask<std::optional<absl::Duration>>(
      [&](Leader& leader, absl::Time now) { return leader.RoomForKvIn(plan, now); });
}

absl::StatusOr<absl::Duration> PoolKvLeases::Renew(const std::string& lease, const std::string& tenant,
                                                   absl::Duration lasts) {
  return Ask<absl::StatusOr<absl::Duration>>(
      [&](Leader& leader, absl::Time now) { return leader.kv().Renew(lease, tenant, lasts, now); });
}

void PoolKvLeases::Release(const std::string& lease, const std::string& tenant) {
  use_leader_([&](Leader& leader, absl::Time now) { leader.kv().Release(lease, tenant, now); });
}

}  // namespace meshfill
