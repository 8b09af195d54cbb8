#include "server/pool/kv_directory.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/kv/lease_name.h"
#include "kernels/return_if_error.h"

namespace meshfill {

KvDirectory::Place KvDirectory::PlaceFor(const Plan& plan, const Workers& workers) const {
  Place place{.layout = plan.layout, .holders = {}};
  for (const SeatsOfWorker& seats : SeatWorkers(workers, plan.ranks())) {
    const Membership::Worker& worker = *seats.worker;
    Holder holder{.worker = worker.connection,
                  .name = worker.offer.name(),
                  .address = worker.offer.kv_address(),
                  .ranks = {},
                  .bytes = 0};
    for (int seat = seats.first; seat < seats.first + seats.count; ++seat) {
      const int rank = plan.RankAt(seat);
      holder.ranks.push_back(rank);
      holder.bytes += shape_.layers * shape_.LayerBytes(plan.layout.ChunkTokens(rank));
    }
    place.holders.push_back(std::move(holder));
  }
  return place;
}

absl::Status KvDirectory::CheckRoom(const Place& place, const Workers& workers) {
  for (const Holder& holder : place.holders) {
    const auto worker = std::find_if(workers.begin(), workers.end(), [&](const Membership::Worker* each) {
      return each->connection == holder.worker;
    });
    const auto budget = static_cast<int64_t>((*worker)->offer.kv_memory_bytes());
    const auto found = charged_.find(holder.worker);
    const int64_t charged = found == charged_.end() ? 0 : found->second;
    if (holder.bytes <= budget - charged) continue;
    ++refused_;
    return absl::ResourceExhaustedError(
        absl::StrCat("no room for the ", holder.bytes, " bytes of K and V that worker ", holder.name,
                     " is to keep: ", charged, " of ", budget, " bytes are taken; ",
                     holder.bytes > budget ? "raise the workers' kv budget, or send a shorter prompt"
                                           : "try again later"));
  }
  return absl::OkStatus();
}

void KvDirectory::Charge(Lease& lease, Place place) {
  for (const Holder& holder : place.holders) charged_[holder.worker] += holder.bytes;
  lease.place = std::move(place);
  ++version_;
}

void KvDirectory::Discharge(Lease& lease) {
  if (!lease.place.has_value()) return;
  for (const Holder& holder : lease.place->holders) {
    const auto charged = charged_.find(holder.worker);
    if (charged != charged_.end() && (charged->second -= holder.bytes) == 0) charged_.erase(charged);
  }
  lease.place.reset();
  ++version_;
}

absl::Status KvDirectory::Admit(const Admission& admission, const Plan& plan, const Workers& workers) {
  Place place = PlaceFor(plan, workers);
  RETURN_IF_ERROR(CheckRoom(place, workers));
  Lease& lease = leases_[admission.lease];
  lease.admission = admission;
  Charge(lease, std::move(place));
  return absl::OkStatus();
}

std::optional<absl::Duration> KvDirectory::RoomIn(const Plan& plan, const Workers& workers,
                                                  absl::Time now) const {
  absl::Time when = now;
  for (const Holder& wanted : PlaceFor(plan, workers).holders) {
    int64_t room = 0;
    for (const Membership::Worker* worker : workers) {
      if (worker->connection == wanted.worker) room = static_cast<int64_t>(worker->offer.kv_memory_bytes());
    }
    if (wanted.bytes > room) return std::nullopt;
    std::vector<std::pair<absl::Time, int64_t>> ends;
    for (const auto& [name, lease] : leases_) {
      if (!lease.place.has_value()) continue;
      for (const Holder& holder : lease.place->holders) {
        if (holder.worker != wanted.worker) continue;
        room -= holder.bytes;
        ends.emplace_back(std::max(now, lease.expires), holder.bytes);
      }
    }
    std::sort(ends.begin(), ends.end());
    for (const auto& [end, freed] : ends) {
      if (room >= wanted.bytes) break;
      room += freed;
      when = std::max(when, end);
    }
  }
  return when - now;
}

absl::StatusOr<v1::KeepKv> KvDirectory::BeginRun(const std::string& name, const Plan& plan,
                                                 const Workers& workers) {
  const auto found = leases_.find(name);
  if (found == leases_.end()) return NoLease(name);
  Lease& lease = found->second;
  Discharge(lease);  // as it was expected to run
  Place place = PlaceFor(plan, workers);
  RETURN_IF_ERROR(CheckRoom(place, workers));
  Charge(lease, std::move(place));
  lease.begun = true;
  v1::KeepKv keep;
  keep.set_lease(name);
  keep.set_tenant(lease.admission.tenant);
  keep.set_lasts_seconds(absl::ToDoubleSeconds(lease.admission.lasts));
  return keep;
}

void KvDirectory::OnRunning(const std::string& name, uint64_t run) {
  const auto found = leases_.find(name);
  if (found == leases_.end() || found->second.run == run) return;
  found->second.run = run;
  ++version_;
}

void KvDirectory::OnLayersDone(const std::string& name, int layers) {
  const auto found = leases_.find(name);
  if (found == leases_.end()) return;
  found->second.layers_done = layers;
  ++version_;
}

void KvDirectory::OnRunOver(const std::string& name) {
  const auto found = leases_.find(name);
  if (found == leases_.end()) return;
  found->second.over = true;
  OnLayersDone(name, shape_.layers);
}

void KvDirectory::OnRunFailed(const std::string& name) {
  const auto found = leases_.find(name);
  if (found == leases_.end()) return;
  Lease& lease = found->second;
  Discharge(lease);
  lease.begun = false;
  lease.run = 0;
  lease.layers_done = 0;
  ++version_;
}

const KvDirectory::Lease* KvDirectory::Live(const std::string& name, const std::string& tenant,
                                            absl::Time now) const {
  const auto found = leases_.find(name);
  if (found == leases_.end() || found->second.admission.tenant != tenant) return nullptr;
  return found->second.held || now < found->second.expires ? &found->second : nullptr;
}

absl::StatusOr<KvDirectory::View> KvDirectory::Find(const std::string& name, const std::string& tenant,
                                                    absl::Time now) const {
  const Lease* lease = Live(name, tenant, now);
  if (lease == nullptr) return NoLease(name);
  if (!lease->lost.empty()) {
    return absl::UnavailableError(
        absl::StrCat("lease ", ShownLease(name), ": ", lease->lost, "; prefill the prompt again"));
  }
  return View{.run = lease->run, .layers_done = lease->layers_done, .tokens = lease->admission.tokens};
}

void KvDirectory::TellLasts(const std::string& name, const Place& place, absl::Duration lasts) {
  for (const Holder& holder : place.holders) {
    v1::KvLasts& message = *actions_.AddMessage(holder.worker, /*epoch=*/0).mutable_kv_lasts();
    message.set_lease(name);
    message.set_seconds(absl::ToDoubleSeconds(lasts));
  }
}

absl::StatusOr<absl::Duration> KvDirectory::Renew(const std::string& name, const std::string& tenant,
                                                  absl::Duration lasts, absl::Time now) {
  RETURN_IF_ERROR(Find(name, tenant, now).status());  // what is lost cannot be renewed
  Lease& lease = leases_.at(name);
  lease.expires = now + lasts;
  if (lease.begun && lease.place.has_value()) TellLasts(name, *lease.place, lasts);
  ++version_;
  return lasts;
}

absl::StatusOr<absl::Duration> KvDirectory::Keep(const std::string& name, absl::Time now) {
  const auto found = leases_.find(name);
  if (found == leases_.end()) return NoLease(name);
  Lease& lease = found->second;
  lease.held = false;
  lease.expires = std::max(lease.expires, now + lease.admission.lasts);
  if (lease.place.has_value()) TellLasts(name, *lease.place, lease.expires - now);
  ++version_;
  return lease.expires - now;
}

KvDirectory::Leases::iterator KvDirectory::Erase(Leases::iterator lease) {
  if (lease->second.begun && lease->second.place.has_value()) {
    for (const Holder& holder : lease->second.place->holders) {
      actions_.AddMessage(holder.worker, /*epoch=*/0).mutable_kv_ends()->set_lease(lease->first);
    }
  }
  Discharge(lease->second);
  ++version_;
  return leases_.erase(lease);
}

void KvDirectory::End(const std::string& name) {
  const auto found = leases_.find(name);
  if (found != leases_.end()) Erase(found);
}

void KvDirectory::Release(const std::string& name, const std::string& tenant, absl::Time now) {
  if (Live(name, tenant, now) != nullptr) End(name);
}

absl::Time KvDirectory::EndLapsed(absl::Time now) {
  absl::Time next = absl::InfiniteFuture();
  for (auto lease = leases_.begin(); lease != leases_.end();) {
    if (!lease->second.held && lease->second.expires <= now) {
      ++lapsed_;
      lease = Erase(lease);
      continue;
    }
    if (!lease->second.held) next = std::min(next, lease->second.expires);
    ++lease;
  }
  return next;
}

// What was to run there is planned anew; what ran there goes with its run; what is over has lost a part, and
// the rest of it is of no use.
void KvDirectory::OnWorkerLost(Connection worker, const std::string& name, const std::string& why) {
  for (auto& [lease_name, lease] : leases_) {
    if (!lease.place.has_value()) continue;
    std::vector<Holder>& holders = lease.place->holders;
    const auto holder = std::find_if(holders.begin(), holders.end(),
                                     [worker](const Holder& each) { return each.worker == worker; });
    if (holder == holders.end()) continue;
    if (!lease.begun) Discharge(lease);
    if (!lease.over) continue;
    if (holder->bytes > 0) {
      lease.lost = absl::StrCat("worker ", name, ", which held the K and V of rank",
                                holder->ranks.size() > 1 ? "s " : " ", absl::StrJoin(holder->ranks, ", "),
                                ", is lost: ", why);
    }
    holders.erase(holder);
    if (lease.lost.empty()) continue;
    for (const Holder& other : holders) {
      actions_.AddMessage(other.worker, /*epoch=*/0).mutable_kv_ends()->set_lease(lease_name);
    }
    Discharge(lease);
  }
  charged_.erase(worker);
  ++version_;
}

bool KvDirectory::Holds(Connection worker) const {
  return std::any_of(leases_.begin(), leases_.end(), [worker](const auto& entry) {
    const Lease& lease = entry.second;
    if (!lease.begun || !lease.place.has_value()) return false;
    return std::any_of(lease.place->holders.begin(), lease.place->holders.end(),
                       [worker](const Holder& holder) { return holder.worker == worker; });
  });
}

KvStore::Counts KvDirectory::counts() const {
  KvStore::Counts counts{.leases = std::ssize(leases_), .lapsed = lapsed_, .refused = refused_};
  for (const auto& [worker, bytes] : charged_) counts.bytes += bytes;
  return counts;
}

std::map<std::string, KvDirectory::WorkerKv> KvDirectory::CountByWorker(
    const std::map<Connection, Membership::Worker>& workers) const {
  std::map<Connection, int64_t> leases;
  for (const auto& [name, lease] : leases_) {
    if (!lease.place.has_value()) continue;
    for (const Holder& holder : lease.place->holders) ++leases[holder.worker];
  }
  std::map<std::string, WorkerKv> counts;
  for (const auto& [connection, worker] : workers) {
    const auto charged = charged_.find(connection);
    counts[worker.offer.name()] = {.leases = leases[connection],
                                   .bytes = charged == charged_.end() ? 0 : charged->second,
                                   .max_bytes = static_cast<int64_t>(worker.offer.kv_memory_bytes())};
  }
  return counts;
}

}  // namespace meshfill
