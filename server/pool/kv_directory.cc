#include "server/pool/kv_directory.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/kv/lease_name.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

TokenLayout WithTokens(const TokenLayout& layout, int64_t tokens) {
  return TokenLayout::Make(layout.kind(), layout.ranks(), tokens, layout.stripe()).value();
}

}  // namespace

KvDirectory::Place KvDirectory::PlaceFor(const Plan& plan, const Workers& workers) const {
  const TokenLayout layout = plan.kv_layout();
  return {.layout = layout, .holders = runs_held_.HoldersOf(plan, layout, workers)};
}

void KvDirectory::Discharge(Lease& lease) {
  if (!lease.place.has_value()) return;
  lease.place.reset();
  lease.slabs = {};
  ++version_;
}

absl::Status KvDirectory::Admit(const Admission& admission, const Plan& plan, const Workers& workers) {
  Place place = PlaceFor(plan, workers);
  if (absl::Status room = runs_held_.CheckRoom(place.holders, workers); !room.ok()) {
    ++refused_;
    return room;
  }
  Lease& lease = leases_[admission.lease];
  lease.admission = admission;
  Charge(lease, std::move(place));
  return absl::OkStatus();
}

void KvDirectory::Charge(Lease& lease, Place place) {
  lease.slabs.pieces = {
      {.tokens = place.layout.tokens(), .run = runs_held_.Hold(/*run=*/0, place.layout, place.holders)}};
  lease.place = std::move(place);
}

std::optional<absl::Duration> KvDirectory::RoomIn(const Plan& plan, const Workers& workers,
                                                  absl::Time now) const {
  absl::Time when = now;
  for (const Holder& wanted : PlaceFor(plan, workers).holders) {
    int64_t room = 0;
    for (const Membership::Worker* worker : workers) {
      if (worker->connection != wanted.worker) continue;
      if (wanted.bytes > static_cast<int64_t>(worker->offer.kv_memory_bytes())) return std::nullopt;
      room = runs_held_.Room(*worker);
    }
    std::vector<std::pair<absl::Time, int64_t>> ends;
    for (const auto& [name, lease] : leases_) {
      if (!lease.place.has_value()) continue;
      for (const Holder& holder : lease.place->holders) {
        if (holder.worker == wanted.worker) {
          ends.emplace_back(std::max(now, lease.expires), holder.bytes);
        }
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

std::vector<KvStore::LeaseEnd> KvDirectory::LeasesOf(const std::string& tenant, absl::Time now) const {
  std::vector<KvStore::LeaseEnd> leases;
  for (const auto& [name, lease] : leases_) {
    if (Live(name, tenant, now) == nullptr || !lease.lost.empty()) continue;
    leases.push_back({.ends_in = std::max(absl::ZeroDuration(), lease.expires - now),
                      .bytes = shape_.layers * shape_.LayerBytes(lease.admission.tokens)});
  }
  return leases;
}

bool KvDirectory::ReadsCache(const PrefillOptions& options) const {
  return cache_.value_or(true) && options.block_names != nullptr && !options.ignore_cache;
}

bool KvDirectory::CachesAll(const Workers& workers) const {
  const bool on_cpus = std::none_of(workers.begin(), workers.end(), [](const Membership::Worker* worker) {
    return worker->offer.kv_on_host();
  });
  return cache_.value_or(on_cpus);
}

KvSlabs KvDirectory::FindPrefix(const PrefillOptions& options) {
  return ReadsCache(options) ? runs_held_.Find(*options.block_names) : KvSlabs();
}

KvSlabs KvDirectory::LookUpPrefix(const PrefillOptions& options) const {
  return ReadsCache(options) ? runs_held_.Look(*options.block_names) : KvSlabs();
}

CachedPrefix KvDirectory::Describe(const KvSlabs& prefix) {
  if (prefix.pieces.empty()) return {};
  const TokenLayout& layout = prefix.pieces.front().run->layout;
  return {.tokens = prefix.tokens(), .ranks = layout.ranks(), .stripe = layout.stripe()};
}

KvDirectory::Workers KvDirectory::HoldersOf(const KvSlabs& prefix, const Workers& workers) const {
  return prefix.pieces.empty() ? Workers() : runs_held_.HoldersAmong(*prefix.pieces.front().run, workers);
}

bool KvDirectory::CanFollow(const KvSlabs& prefix, const Workers& workers) const {
  return !prefix.pieces.empty() && runs_held_.CanFollow(*prefix.pieces.front().run, workers);
}

absl::StatusOr<KvDirectory::RunKv> KvDirectory::BeginRun(uint64_t run, const PrefillOptions& options,
                                                         const KvSlabs& prefix, const Piece& piece,
                                                         Plan& plan, const Workers& workers) {
  const auto found = leases_.find(options.kv_lease);
  Lease* const lease = found == leases_.end() ? nullptr : &found->second;
  const bool caches = cache_.value_or(true) && options.block_names != nullptr;
  const bool more_pieces = piece.tokens_ahead > 0;
  const bool was_leased = !options.kv_lease.empty();
  const bool wanted = lease != nullptr || (caches && (was_leased || CachesAll(workers)));
  const bool keeps = wanted || more_pieces;
  const bool leased = lease != nullptr && !more_pieces;
  std::optional<Place> expected;  // where the run was expected, and what is charged for it
  if (lease != nullptr) {
    expected = lease->place;
    Discharge(*lease);
  }
  const auto refuse = [&](const absl::Status& why) {
    if (expected.has_value()) Charge(*lease, *std::move(expected));
    return why;
  };

  Running running = {.lease = leased ? options.kv_lease : "",
                     .names = nullptr,
                     .more_pieces = more_pieces,
                     .looked_up = ReadsCache(options),
                     .cached_tokens = piece.first ? plan.cached_tokens : 0,
                     .new_tokens = plan.layout.tokens(),
                     .slabs = FirstTokens(prefix, plan.cached_tokens)};
  const bool follows = plan.cached_tokens > 0;
  if (follows && !runs_held_.Follow(running.slabs, workers, plan)) {
    return refuse(
        absl::ResourceExhaustedError("the workers of a cached prefix are not where the plan has them"));
  }
  const auto holders_of = [&](int64_t tokens) {
    std::vector<Holder> holders = runs_held_.HoldersOf(plan, WithTokens(plan.layout, tokens), workers);
    for (Holder& holder : holders) holder.bytes = keeps ? holder.bytes : 0;
    return holders;
  };
  const int64_t tokens = plan.layout.tokens();
  const absl::Status room = keeps || follows
                                ? runs_held_.CheckRoom(holders_of(tokens + piece.tokens_ahead), workers)
                                : absl::OkStatus();
  if (!room.ok() && (follows || lease != nullptr || more_pieces)) {
    if (!follows) ++refused_;
    return refuse(room);
  }

  RunKv told;
  for (const KvPiece& earlier : running.slabs.pieces) {
    v1::RunTokens& of_run = told.prefix.emplace_back();
    of_run.set_run(runs_held_.NumberOf(*earlier.run));
    of_run.set_tokens(static_cast<uint64_t>(earlier.tokens));
  }
  if (keeps && room.ok()) {
    if (caches && !more_pieces) running.names = options.block_names;
    running.slabs.shape = shape_;
    running.slabs.pieces.push_back({.first_token = plan.cached_tokens,
                                    .tokens = plan.layout.tokens(),
                                    .run = runs_held_.Hold(run, plan.layout, holders_of(tokens))});
    told.keep.emplace();
    told.keep->set_cache(caches || more_pieces);
  }
  if (more_pieces) told.ahead = HoldAhead(plan, piece.tokens_ahead, workers);
  if (leased) {
    lease->place = PlaceFor(plan, workers);
    lease->slabs = running.slabs;
    lease->begun = true;
    told.keep->set_lease(options.kv_lease);
    told.keep->set_tenant(lease->admission.tenant);
    told.keep->set_lasts_seconds(absl::ToDoubleSeconds(lease->admission.lasts));
  }
  running.expected = std::move(expected);
  running_.emplace(run, std::move(running));
  runs_held_.MakeRoom(workers);
  return told;
}

std::shared_ptr<const KvRunSlabs> KvDirectory::HoldAhead(const Plan& plan, int64_t tokens,
                                                         const Workers& workers) {
  const TokenLayout layout = WithTokens(plan.layout, tokens);
  return runs_held_.Hold(/*run=*/0, layout, runs_held_.HoldersOf(plan, layout, workers));
}

KvDirectory::Lease* KvDirectory::LeaseOf(uint64_t run) {
  const auto running = running_.find(run);
  if (running == running_.end()) return nullptr;
  const auto lease = leases_.find(running->second.lease);
  return lease == leases_.end() ? nullptr : &lease->second;
}

void KvDirectory::OnRunning(uint64_t run) {
  Lease* const lease = LeaseOf(run);
  if (lease == nullptr || lease->run == run) return;
  lease->run = run;
  ++version_;
}

void KvDirectory::OnLayersDone(uint64_t run, int layers) {
  Lease* const lease = LeaseOf(run);
  if (lease == nullptr) return;
  lease->layers_done = layers;
  ++version_;
}

KvSlabs KvDirectory::OnRunOver(uint64_t run, bool good, const Workers& workers) {
  Lease* const lease = LeaseOf(run);
  auto extracted = running_.extract(run);
  if (extracted.empty()) return {};
  Running& running = extracted.mapped();
  if (running.looked_up) {
    hit_tokens_ += static_cast<uint64_t>(running.cached_tokens);
    miss_tokens_ += static_cast<uint64_t>(running.new_tokens);
  }
  ++version_;
  if (lease != nullptr) {
    lease->over = true;
    lease->layers_done = shape_.layers;
  }
  if (running.names == nullptr && !running.more_pieces) return {};
  runs_held_.OnKept(*running.slabs.pieces.back().run);
  if (running.more_pieces) return std::move(running.slabs);
  if (good) runs_held_.Enter(*running.names, running.slabs, workers);
  return {};
}

void KvDirectory::OnRunFailed(uint64_t run, const std::string& why, const Workers& again_on) {
  Lease* const lease = LeaseOf(run);
  running_.erase(run);
  if (lease == nullptr) return;
  std::optional<Place> place = lease->place;
  Discharge(*lease);
  const bool all_there =
      place.has_value() &&
      std::all_of(place->holders.begin(), place->holders.end(), [&](const Holder& holder) {
        return std::any_of(again_on.begin(), again_on.end(), [&](const Membership::Worker* worker) {
          return worker->connection == holder.worker;
        });
      });
  if (all_there && runs_held_.CheckRoom(place->holders, again_on).ok()) Charge(*lease, *std::move(place));
  lease->last_failure = why;
  lease->begun = false;
  lease->run = 0;
  lease->layers_done = 0;
  ++version_;
}

void KvDirectory::UndoRun(uint64_t run) {
  Lease* const lease = LeaseOf(run);
  std::optional<Place> expected = std::move(running_.at(run).expected);
  running_.erase(run);
  if (lease == nullptr) return;
  Discharge(*lease);
  if (expected.has_value()) Charge(*lease, *std::move(expected));
  lease->begun = false;
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
  return View{.run = lease->run,
              .layers_done = lease->layers_done,
              .tokens = lease->admission.tokens,
              .last_failure = lease->last_failure};
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
  runs_held_.OnWorkerLost(worker);
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
}

void KvDirectory::OnWorkersChanged(const Workers& workers) {
  runs_held_.OnWorkersChanged(workers);
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

KvStore::Counts KvDirectory::counts(const std::map<Connection, Membership::Worker>& workers) const {
  KvStore::Counts counts{.leases = std::ssize(leases_),
                         .lapsed = lapsed_,
                         .refused = refused_,
                         .cached_bytes = runs_held_.cached_bytes(),
                         .hit_tokens = hit_tokens_,
                         .miss_tokens = miss_tokens_,
                         .evictions = runs_held_.evictions(),
                         .evicted_bytes = runs_held_.evicted_bytes()};
  for (const auto& [connection, worker] : workers) counts.bytes += runs_held_.charged(worker);
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
    counts[worker.offer.name()] = {.leases = leases[connection],
                                   .bytes = runs_held_.charged(worker),
                                   .max_bytes = static_cast<int64_t>(worker.offer.kv_memory_bytes())};
  }
  return counts;
}

}  // namespace meshfill
