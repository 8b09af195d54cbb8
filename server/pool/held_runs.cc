#include "server/pool/held_runs.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

int64_t Offered(const Membership::Worker& worker) {
  return static_cast<int64_t>(worker.offer.kv_memory_bytes());
}

bool DealtAlike(const TokenLayout& left, const TokenLayout& right) {
  return left.kind() == LayoutKind::kStriped && right.kind() == LayoutKind::kStriped &&
         left.ranks() == right.ranks() && left.stripe() == right.stripe();
}

}  // namespace

std::vector<HeldRuns::Holder> HeldRuns::HoldersOf(const Plan& plan, const TokenLayout& layout,
                                                  const Workers& workers) const {
  std::vector<Holder> holders;
  for (const SeatsOfWorker& seats : SeatWorkers(workers, plan.ranks())) {
    const Membership::Worker& worker = *seats.worker;
    Holder& holder = holders.emplace_back(Holder{.worker = worker.connection,
                                                 .name = worker.offer.name(),
                                                 .address = worker.offer.kv_address(),
                                                 .ranks = {},
                                                 .bytes = 0});
    for (int seat = seats.first; seat < seats.first + seats.count; ++seat) {
      const int rank = plan.RankAt(seat);
      holder.ranks.push_back(rank);
      holder.bytes += shape_.layers * shape_.LayerBytes(layout.ChunkTokens(rank));
    }
  }
  return holders;
}

int64_t HeldRuns::ChargedTo(Connection worker) const {
  const auto found = charged_.find(worker);
  return found == charged_.end() ? 0 : found->second;
}

int64_t HeldRuns::IdleOn(Connection worker) const {
  const auto found = idle_.find(worker);
  return found == idle_.end() ? 0 : found->second;
}

int64_t HeldRuns::Room(const Membership::Worker& worker) const {
  return Offered(worker) - ChargedTo(worker.connection) + IdleOn(worker.connection);
}

int64_t HeldRuns::charged(const Membership::Worker& worker) const {
  const int64_t all = ChargedTo(worker.connection);
  const int64_t beyond = std::max<int64_t>(0, all - Offered(worker));
  return all - std::min(beyond, IdleOn(worker.connection));
}

absl::Status HeldRuns::CheckRoom(const std::vector<Holder>& holders, const Workers& workers) const {
  for (const Holder& holder : holders) {
    const auto found = std::find_if(workers.begin(), workers.end(), [&](const Membership::Worker* each) {
      return each->connection == holder.worker;
    });
    const Membership::Worker& worker = **found;
    const int64_t room = Room(worker);
    if (holder.bytes <= room) continue;
    return absl::ResourceExhaustedError(
        absl::StrCat("no room for the ", holder.bytes, " bytes of K and V that worker ", holder.name,
                     " is to keep: ", Offered(worker) - room, " of ", Offered(worker), " bytes are taken; ",
                     holder.bytes > Offered(worker) ? "raise the workers' kv budget, or send a shorter prompt"
                                                    : "try again later"));
  }
  return absl::OkStatus();
}

void HeldRuns::MakeRoom(const Workers& workers) {
  const auto overfull = [this](const Membership::Worker* worker) {
    return ChargedTo(worker->connection) > Offered(*worker);
  };
  while (std::any_of(workers.begin(), workers.end(), overfull)) {
    const int64_t before = cache_.bytes();
    if (cache_.Evict().empty()) return;
    ++evictions_;
    evicted_bytes_ += static_cast<uint64_t>(before - cache_.bytes());
  }
}

std::shared_ptr<const KvRunSlabs> HeldRuns::Hold(uint64_t run, const TokenLayout& layout,
                                                 const std::vector<Holder>& holders) {
  Record record;
  record.run = run;
  record.worker_of_rank.resize(layout.ranks());
  int64_t bytes = 0;
  for (const Holder& holder : holders) {
    for (const int rank : holder.ranks) record.worker_of_rank[rank] = holder.worker;
    record.bytes[holder.worker] = holder.bytes;
    charged_[holder.worker] += holder.bytes;
    bytes += holder.bytes;
  }
  sum_->Add(bytes);
  auto slabs = std::make_unique<KvRunSlabs>(
      KvRunSlabs{.layout = layout, .slabs = {}, .charges = {std::make_shared<KvCharge>(sum_, bytes)}});
  Record& known = records_.emplace(slabs.get(), std::move(record)).first->second;
  ++version_;
  const std::shared_ptr<const KvRunSlabs> held = {slabs.release(), [this](const KvRunSlabs* gone) {
                                                    LetGo(gone);
                                                    delete gone;
                                                  }};
  known.held = held;
  return Use(held);
}

std::shared_ptr<const KvRunSlabs> HeldRuns::Use(const std::shared_ptr<const KvRunSlabs>& held) {
  Record& record = records_.at(held.get());
  if (auto in_use = record.in_use.lock()) return in_use;
  SetIdle(*held, false);
  // The record's weak_ptr keeps the deleter, so that it lets go of its own by itself.
  const std::shared_ptr<const KvRunSlabs> in_use = {held.get(),
                                                    [this, own = held](const KvRunSlabs* run) mutable {
                                                      SetIdle(*run, true);
                                                      own.reset();
                                                    }};
  record.in_use = in_use;
  return in_use;
}

void HeldRuns::SetIdle(const KvRunSlabs& run, bool idle) {
  Record& record = records_.at(&run);
  if (std::exchange(record.idle, idle) == idle) return;
  for (const auto& [worker, bytes] : record.bytes) idle_[worker] += idle ? bytes : -bytes;
}

KvSlabs HeldRuns::Find(const KvBlockNames& names) {
  KvSlabs found = cache_.Find(names);
  for (KvPiece& piece : found.pieces) piece.run = Use(piece.run);
  return found;
}

void HeldRuns::LetGo(const KvRunSlabs* run) {
  const Record record = std::move(records_.extract(run).mapped());
  for (const auto& [worker, bytes] : record.bytes) {
    if ((charged_[worker] -= bytes) == 0) charged_.erase(worker);
    if (record.idle) idle_[worker] -= bytes;
    if (record.kept) actions_.AddMessage(worker, /*epoch=*/0).mutable_kv_run_ends()->set_run(record.run);
  }
  ++version_;
}

std::optional<Placement> HeldRuns::PlacementOf(const KvRunSlabs& run, const Workers& workers) const {
  const std::vector<Connection>& worker_of_rank = records_.at(&run).worker_of_rank;
  std::map<Connection, std::vector<int>> seats;  // not taken yet, the first one last
  for (const SeatsOfWorker& of_worker : SeatWorkers(workers, run.layout.ranks())) {
    std::vector<int>& free = seats[of_worker.worker->connection];
    for (int seat = of_worker.first + of_worker.count - 1; seat >= of_worker.first; --seat)
      free.push_back(seat);
  }
  Placement placement = {.seat_of_rank = {}, .name = "as the cached prefix"};
  for (const Connection worker : worker_of_rank) {
    std::vector<int>& free = seats[worker];
    if (free.empty()) return std::nullopt;
    placement.seat_of_rank.push_back(free.back());
    free.pop_back();
  }
  return placement;
}

HeldRuns::Workers HeldRuns::HoldersAmong(const KvRunSlabs& run, const Workers& workers) const {
  const std::vector<Connection>& worker_of_rank = records_.at(&run).worker_of_rank;
  Workers holders;
  std::copy_if(workers.begin(), workers.end(), std::back_inserter(holders),
               [&](const Membership::Worker* worker) {
                 return std::find(worker_of_rank.begin(), worker_of_rank.end(), worker->connection) !=
                        worker_of_rank.end();
               });
  return holders;
}

bool HeldRuns::Follow(const KvSlabs& prefix, const Workers& workers, Plan& plan) const {
  const KvRunSlabs& first = *prefix.pieces.front().run;
  if (!DealtAlike(first.layout, plan.layout)) return false;
  std::optional<Placement> placement = PlacementOf(first, workers);
  if (!placement.has_value()) return false;
  const std::vector<Connection>& worker_of_rank = records_.at(&first).worker_of_rank;
  bool there = true;
  for (const SeatsOfWorker& seats : SeatWorkers(workers, plan.ranks())) {
    for (int seat = seats.first; seat < seats.first + seats.count; ++seat) {
      there = there && worker_of_rank[plan.RankAt(seat)] == seats.worker->connection;
    }
  }
  if (!there) plan.placement = *std::move(placement);
  return true;
}

void HeldRuns::Enter(const KvBlockNames& names, const KvSlabs& slabs, const Workers& workers) {
  const KvRunSlabs& own = *slabs.pieces.back().run;
  if (own.layout.kind() != LayoutKind::kStriped || !CanFollow(own, HoldersAmong(own, workers))) return;
  // What was dealt otherwise would stand in the way of what this prompt's next run can follow.
  const KvSlabs known = cache_.Look(names);
  if (known.tokens() == names.blocks() * names.block_tokens) {
    std::set<const KvRunSlabs*> others;
    for (const KvPiece& piece : known.pieces) {
      const bool alike = DealtAlike(piece.run->layout, own.layout) &&
                         records_.at(piece.run.get()).worker_of_rank == records_.at(&own).worker_of_rank;
      if (!alike) others.insert(piece.run.get());
    }
    cache_.EraseIf([&](const KvRunSlabs& run) { return others.contains(&run); });
  }
  KvSlabs held = slabs;
  for (KvPiece& piece : held.pieces) piece.run = records_.at(piece.run.get()).held.lock();
  cache_.Enter(names, held);
  ++version_;
}

void HeldRuns::OnWorkerLost(Connection worker) {
  for (auto& [run, record] : records_) record.bytes.erase(worker);
  charged_.erase(worker);
  idle_.erase(worker);
  ++version_;
}

void HeldRuns::OnWorkersChanged(const Workers& workers) {
  cache_.EraseIf([&](const KvRunSlabs& run) { return !CanFollow(run, HoldersAmong(run, workers)); });
}

}  // namespace meshfill
