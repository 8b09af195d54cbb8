// K and V under leases: what runs keep, and what clients read, renew and release.
#include <algorithm>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/server/pool/simulation/pool_simulation.h"
#include "tests/server/pool/simulation/simulated_pool.h"

namespace meshfill {
namespace {

constexpr absl::Duration kTold = absl::Seconds(2);  // within which workers hear what the leader has said
constexpr int kMostLeaseMs = 2000;

}  // namespace

std::string PoolSimulation::AdmitKv(int64_t tokens) {
  const absl::StatusOr<PlanChoice> choice = RememberedPlan(leader_->capacity(), tokens, {}, {});
  if (!choice.ok()) return "";
  const std::string name = absl::StrCat("lease", ++last_order_);
  const absl::Status admitted = leader_->AdmitKv(
      {.lease = name, .tenant = kTenant, .tokens = tokens, .lasts = DrawMs(100, kMostLeaseMs)}, choice->plan);
  if (!admitted.ok()) {
    ++census_.refused;
    if (!absl::IsResourceExhausted(admitted)) Fail(absl::StrCat("a lease is refused: ", admitted.message()));
    return "";
  }
  ++census_.leases;
  leases_[name] = {
      .leader_incarnation = leader_incarnation_, .tokens = tokens, .expires = now_, .changed_at = now_};
  for (int i = Draw(0, 2); i > 0; --i) After(DrawMs(0, 1500), -1, [this, name] { ReadLease(name); });
  if (Chance(0.05)) After(DrawMs(0, 800), -1, [this, name] { EndLease(name); });
  return name;
}

// A row's first bytes say who computed it, the next ones from which id.
void PoolSimulation::KeepLayers(const Host& host, int seat) {
  if (host.kv == nullptr) return;
  const KvShape shape = KvShapeOf(SimulatedShape());
  const WorkerMachine::RunPart& part = host.part;
  const TokenLayout& layout = part.plan.layout;
  const int rank = part.plan.RankAt(seat);
  const int64_t row_bytes = shape.kv_heads * shape.head_bytes();
  for (int layer = 0; layer < shape.layers; ++layer) {
    std::byte* const slab = host.kv->Place(rank, layer).value();
    if (slab == nullptr) return;  // the lease has ended
    for (int64_t slot = 0; slot < layout.ChunkTokens(rank); ++slot) {
      const uint64_t token = static_cast<uint64_t>(part.plan.cached_tokens + layout.TokenAt(rank, slot));
      const uint64_t values[] = {Mix(token, part.number * shape.layers + layer),
                                 Mix(token, part.shards[seat - part.first_rank][slot])};
      std::memcpy(slab + slot * row_bytes, values, sizeof values);
    }
    host.kv->OnLayerKept(rank, layer);
  }
}

void PoolSimulation::OnPrefillEnded(const std::string& name, bool done) {
  if (name.empty()) return;
  KvClient& lease = leases_.at(name);
  lease.held = false;
  lease.changed_at = now_;
  if (lease.ended) {  // released while it ran, or its leader is gone
    if (leader_ != nullptr && leader_->kv().Keep(name, now_).ok()) Fail("a lease that has ended is kept");
    return;
  }
  if (!done) {
    lease.ended = true;
    leader_->kv().End(name);
    return DoLeaderActions();
  }
  const absl::StatusOr<absl::Duration> rest = leader_->kv().Keep(name, now_);
  if (!rest.ok()) return Fail("a lease of a prefill that is done is gone");
  lease.expires = now_ + *rest;
  DoLeaderActions();
  UseLease(name);
}

void PoolSimulation::UseLease(const std::string& name) {
  for (int i = Draw(1, 4); i > 0; --i) {
    After(DrawMs(0, 2 * kMostLeaseMs), -1, [this, name] { ReadLease(name); });
  }
  if (Chance(0.3)) {
    After(DrawMs(0, kMostLeaseMs), -1, [this, name] {
      KvClient& lease = leases_.at(name);
      if (leader_ == nullptr || lease.leader_incarnation != leader_incarnation_) return;
      const auto lasts = leader_->kv().Renew(name, kTenant, DrawMs(100, kMostLeaseMs), now_);
      DoLeaderActions();
      if (absl::IsUnavailable(lasts.status())) return;  // lost
      const bool live = !lease.ended && now_ < lease.expires;
      if (lasts.ok() != live) Fail("a lease is renewed that has ended, or not one that lives");
      if (!lasts.ok()) return;
      ++census_.renewals;
      lease.expires = now_ + *lasts;
      lease.changed_at = now_;
    });
  }
  if (Chance(0.3)) After(DrawMs(0, kMostLeaseMs), -1, [this, name] { EndLease(name); });
}

void PoolSimulation::EndLease(const std::string& name) {
  KvClient& lease = leases_.at(name);
  if (leader_ == nullptr || lease.leader_incarnation != leader_incarnation_) return;
  leader_->kv().Release(name, "another", now_);  // does nothing
  leader_->kv().Release(name, kTenant, now_);
  DoLeaderActions();
  if (!lease.ended && (lease.held || now_ < lease.expires)) ++census_.releases;
  lease.ended = true;
}

void PoolSimulation::ReadLease(const std::string& name) {
  const KvClient& lease = leases_.at(name);
  if (leader_ == nullptr || lease.leader_incarnation != leader_incarnation_) return;
  if (leader_->kv().Find(name, "another", now_).ok()) Fail("another tenant finds a lease");
  const absl::StatusOr<KvDirectory::View> view = leader_->kv().Find(name, kTenant, now_);
  const bool live = !lease.ended && (lease.held || now_ < lease.expires);
  if (!live) {
    if (!lease.ended) ++census_.lapses;
    if (!absl::IsNotFound(view.status())) Fail("a lease is found after its end");
    return;
  }
  if (absl::IsUnavailable(view.status())) {
    ++census_.lost_reads;
    return;
  }
  if (!view.ok()) return Fail(absl::StrCat("a live lease: ", view.status().ToString()));
  if (view->run != 0 && runs_told_.at(view->run).stopped) return Fail("a run that was stopped can be read");
  if (view->run == 0 || view->layers_done < kLayers) return;  // a reader waits
  const std::string missed = ReadHolders(name, leader_->kv().PlaceOf(name), view->run);
  if (missed.empty()) {
    ++census_.reads;
    return;
  }
  ++census_.missed_reads;
  Note(absl::StrCat("a read of ", name, " misses: ", missed));
  const bool told = now_ - lease.changed_at > kTold && lease.expires - now_ > kTold / 4;
  if (!lease.held && told && CalmSince(now_ - kTold)) Fail(absl::StrCat("a lease without K and V: ", missed));
}

std::string PoolSimulation::ReadHolders(const std::string& name, const KvDirectory::Place& place,
                                        uint64_t run) {
  v1::FetchKvRequest request;
  request.set_lease(name);
  int64_t tokens = 0;
  for (const KvDirectory::Holder& holder : place.holders) {
    const auto node = std::find_if(nodes_.begin(), nodes_.end(),
                                   [&](const Node& each) { return each.name == holder.address; });
    if (node->machine == nullptr || node->frozen_until > now_) return absl::StrCat(holder.name, " is away");
    if (node->kv->Open(request, "another", 1 << 20, nullptr).ok()) Fail("another tenant reads from a holder");
    auto reader = node->kv->Open(request, kTenant, 1 << 20, nullptr);
    if (!reader.ok()) return absl::StrCat(holder.name, ": ", reader.status().message());
    v1::KvPart part;
    while (true) {
      const absl::StatusOr<KvReader::Next> next = (*reader)->Take(part);
      if (!next.ok()) return absl::StrCat(holder.name, ": ", next.status().message());
      if (*next == KvReader::Next::kNotYet) return absl::StrCat(holder.name, " has not all layers");
      if (*next == KvReader::Next::kEnd) break;
      const size_t row_bytes = part.k().size() / part.tokens();
      for (uint64_t i = 0; i < part.tokens(); ++i) {
        const uint64_t token = part.first_token() + i;
        uint64_t values[2] = {};
        std::memcpy(values, part.k().data() + i * row_bytes, sizeof values);
        const RunTold& told = runs_told_.at(run);
        if (values[0] != Mix(token, told.computed_by[token] * kLayers + part.layer())) {
          Fail("K of another run, token or layer");
        }
        if (values[1] != Mix(token, told.tokens[token])) Fail("K of another prompt");
      }
      tokens += static_cast<int64_t>(part.tokens());
    }
  }
  if (tokens != kLayers * place.layout.tokens()) Fail("the holders do not have each token once");
  return "";
}

void PoolSimulation::CheckKvBudgets() {
  for (const auto& [name, kv] : leader_->kv_by_worker()) {
    if (kv.bytes > kv.max_bytes) Fail(absl::StrCat(name, " is charged more K and V than it has room for"));
  }
  for (const Node& node : nodes_) {
    if (node.kv != nullptr && node.kv->counts().bytes > node.kv->budget_bytes()) {
      Fail(absl::StrCat(node.name, " keeps more than its budget"));
    }
  }
}

}  // namespace meshfill
