#include "server/pool/live_runs.h"

#include <algorithm>
#include <vector>

#include "server/pool/offered_speed.h"

namespace meshfill {

LiveRequest* LiveRuns::Find(Ticket ticket) {
  const auto request = requests.find(ticket);
  return request != requests.end() ? &request->second : nullptr;
}

const LiveRequest* LiveRuns::Find(Ticket ticket) const {
  const auto request = requests.find(ticket);
  return request != requests.end() ? &request->second : nullptr;
}

std::pair<const LiveRuns::Ticket, LiveRequest>* LiveRuns::FirstWaiting() {
  const auto next = std::find_if(requests.begin(), requests.end(), [](const auto& request) {
    return request.second.waits() && request.second.has_turn();
  });
  return next != requests.end() ? &*next : nullptr;
}

bool LiveRuns::HasTurn(const LiveRun& run) const {
  const LiveRequest* request = Find(run.ticket);
  return request != nullptr && request->has_turn();
}

bool LiveRuns::AnyStops() const {
  return std::any_of(runs.begin(), runs.end(), [](const auto& run) {
    return run.second.coordinator.phase() == RunCoordinator::Phase::kStopping;
  });
}

bool LiveRuns::Blocked(const LiveRun& run) const {
  return !run.coordinator.messages_mix() && std::any_of(runs.begin(), runs.end(), [&run](const auto& other) {
    return &other.second != &run && !other.second.coordinator.StandsStill() &&
           other.second.coordinator.Shares(run.coordinator);
  });
}

// Where messages do not mix, one after the other goes on, and none beside a run whose turn it is.
void LiveRuns::Pause(absl::Time now) {
  const bool all_go_on = FirstWaiting() != nullptr && !AnyStops();
  std::vector<LiveRun*> wait;
  for (auto& [number, run] : runs) {
    if (!requests.contains(run.ticket)) continue;
    RunCoordinator& coordinator = run.coordinator;
    const bool gives_way = std::any_of(runs.begin(), runs.end(), [&](const auto& other) {
      return HasTurn(other.second) && other.second.coordinator.Shares(coordinator);
    });
    const bool goes_on = HasTurn(run) || (all_go_on && (coordinator.messages_mix() || !gives_way));
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

int64_t LiveRuns::TakenOn(const Membership::Worker& worker, const WeightShare& with) const {
  std::vector<WeightShare> shares = {with};
  int64_t taken = 0;
  for (const auto& [number, run] : runs) {
    if (!run.coordinator.Has(worker.connection)) continue;
    taken += run.coordinator.reserved_bytes(worker.connection);
    const WeightShare share = run.coordinator.weight_share(worker.connection);
    if (std::find(shares.begin(), shares.end(), share) == shares.end()) shares.push_back(share);
  }
  if (taken == 0) return 0;
  const PlanWeights weights =
      FromProto(worker.offer.weights().sharded() ? worker.offer.weights() : worker.offer.shared_weights());
  for (const WeightShare& share : shares) taken += share.of > 0 ? ShareBytes(weights, share.of) : 0;
  return taken;
}

}  // namespace meshfill
