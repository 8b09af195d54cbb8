#include "server/pool/live_runs.h"

#include <algorithm>
#include <set>
#include <utility>

#include "server/pool/offered_speed.h"

namespace meshfill {
namespace {

bool SharePass(const LiveRun& one, const LiveRun& other) {
  return one.pack.has_value() && other.pack.has_value() && one.pack->pack == other.pack->pack &&
         one.pack->rank == other.pack->rank && other.coordinator.phase() != RunCoordinator::Phase::kStopping;
}

bool Stops(const std::pair<const RunId, LiveRun>& run) {
  return run.second.coordinator.phase() == RunCoordinator::Phase::kStopping;
}

}  // namespace

void LiveRuns::Answer(Ticket ticket, absl::StatusOr<RunResult> result) {
  if (requests.erase(ticket) > 0) actions.Add(LeaderActions::Answer{ticket, std::move(result)});
}

void LiveRuns::Forget(RunId run) {
  runs.erase(run);
  LookForRoomAgain();
}

void LiveRuns::LookForRoomAgain() {
  for (auto& [ticket, request] : requests) request.no_room = false;
}

LiveRequest* LiveRuns::Find(Ticket ticket) {
  const auto request = requests.find(ticket);
  return request != requests.end() ? &request->second : nullptr;
}

const LiveRequest* LiveRuns::Find(Ticket ticket) const {
  const auto request = requests.find(ticket);
  return request != requests.end() ? &request->second : nullptr;
}

std::pair<const LiveRuns::Ticket, LiveRequest>* LiveRuns::FirstWaiting() {
  const auto next = std::find_if(requests.begin(), requests.end(), [this](const auto& request) {
    return request.second.waits() && request.second.has_turn() && !WaitsForPack(request.second);
  });
  return next != requests.end() ? &*next : nullptr;
}

int LiveRuns::count() const {
  std::set<uint64_t> packs;
  return static_cast<int>(std::count_if(runs.begin(), runs.end(), [&](const auto& run) {
    return !run.second.pack.has_value() || packs.insert(run.second.pack->pack).second;
  }));
}

std::vector<RunId> LiveRuns::InPassOf(RunId run) const {
  std::vector<RunId> in_pass = {run};
  const LiveRun& own = runs.at(run);
  if (!own.pack.has_value()) return in_pass;
  for (const auto& [number, other] : runs) {
    if (number != run && SharePass(own, other)) in_pass.push_back(number);
  }
  return in_pass;
}

bool LiveRuns::IsWanted(RunId run) const {
  const std::vector<RunId> in_pass = InPassOf(run);
  return std::any_of(in_pass.begin(), in_pass.end(),
                     [&](RunId number) { return requests.contains(runs.at(number).ticket); });
}

bool LiveRuns::WaitsForPack(const LiveRequest& request) const {
  if (request.failed_pack == 0) return false;
  return std::any_of(runs.begin(), runs.end(), [&](const auto& run) {
    const LiveRequest* other = Find(run.second.ticket);
    return other != nullptr && other != &request && other->failed_pack == request.failed_pack;
  });
}

bool LiveRuns::HasTurn(const LiveRun& run) const {
  const LiveRequest* request = Find(run.ticket);
  return request != nullptr && request->has_turn();
}

bool LiveRuns::AnyStops() const { return std::any_of(runs.begin(), runs.end(), Stops); }

bool LiveRuns::AnyGoesOn() const { return !std::all_of(runs.begin(), runs.end(), Stops); }

bool LiveRuns::Blocked(const LiveRun& run) const {
  return !run.coordinator.messages_mix() && std::any_of(runs.begin(), runs.end(), [&run](const auto& other) {
    return &other.second != &run && !other.second.coordinator.StandsStill() &&
           other.second.coordinator.Shares(run.coordinator);
  });
}

// Where messages do not mix, one after the other goes on, and none beside a run whose turn it is.
void LiveRuns::Pause(absl::Time now) {
  const bool all_go_on = FirstWaiting() != nullptr && !AnyStops();
  std::set<std::pair<uint64_t, int>> passes_with_turn;
  for (const auto& [number, run] : runs) {
    if (run.pack.has_value() && HasTurn(run)) passes_with_turn.emplace(run.pack->pack, run.pack->rank);
  }
  const auto has_turn = [&](const LiveRun& run) {
    return run.pack.has_value() ? passes_with_turn.contains({run.pack->pack, run.pack->rank}) : HasTurn(run);
  };
  std::vector<LiveRun*> wait;
  for (auto& [number, run] : runs) {
    RunCoordinator& coordinator = run.coordinator;
    const auto gives_way = [&] {
      return std::any_of(runs.begin(), runs.end(), [&](const auto& other) {
        return has_turn(other.second) && other.second.coordinator.Shares(coordinator);
      });
    };
    const bool goes_on = has_turn(run) || (all_go_on && (coordinator.messages_mix() || !gives_way()));
    if (!goes_on || !coordinator.paused()) {
      coordinator.SetPaused(!goes_on, now);
    } else {
      wait.push_back(&run);
    }
  }
  for (LiveRun* run : wait) {
    if (!Blocked(*run)) run->coordinator.SetPaused(false, now);
  }
}

bool LiveRuns::TakesPart(Connection worker) const {
  return std::any_of(runs.begin(), runs.end(),
                     [worker](const auto& run) { return run.second.coordinator.Has(worker); });
}

bool LiveRuns::HasPiecesOf(Connection worker) const {
  return std::any_of(requests.begin(), requests.end(), [worker](const auto& request) {
    return request.second.pieces.has_value() && request.second.pieces->Has(worker);
  });
}

TakenBytes LiveRuns::TakenOn(const Membership::Worker& worker, const WeightShare& with,
                             int64_t short_rank_bytes) const {
  std::vector<WeightShare> shares = {with};
  TakenBytes taken;
  for (const auto& [number, run] : runs) {
    if (!run.coordinator.Has(worker.connection)) continue;
    const int64_t bytes = run.coordinator.reserved_bytes(worker.connection);
    taken.all += bytes;
    if (bytes > run.coordinator.ranks(worker.connection) * short_rank_bytes) taken.by_long += bytes;
    const WeightShare share = run.coordinator.weight_share(worker.connection);
    if (std::find(shares.begin(), shares.end(), share) == shares.end()) shares.push_back(share);
  }
  if (taken.all == 0) return {};
  const PlanWeights weights =
      FromProto(worker.offer.weights().sharded() ? worker.offer.weights() : worker.offer.shared_weights());
  for (const WeightShare& share : shares) {
    const int64_t bytes = share.of > 0 ? ShareBytes(weights, share.of) : 0;
    taken.all += bytes;
    taken.by_long += bytes;
  }
  return taken;
}

}  // namespace meshfill
