// Packs: what clients submit together, and whether the leader keeps together what shares a pass.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/pool/simulation/pool_simulation.h"
#include "tests/server/pool/simulation/simulated_pool.h"

namespace meshfill {

bool PoolSimulation::StandsStill(const RunTold& run) { return run.paused_since < absl::InfiniteFuture(); }

int PoolSimulation::LiveOfClients() const {
  if (queued_) return queue_clients_.count();
  std::set<Leader::Ticket> packs;
  return static_cast<int>(std::count_if(requests_.begin(), requests_.end(), [&](const auto& entry) {
    return entry.second.pack == 0 || packs.insert(entry.second.pack).second;
  }));
}

// Now and then for a rank that is gone.
void PoolSimulation::SubmitPackNext() {
  --requests_left_;
  const int pool_ranks = leader_->capacity().ranks;
  std::vector<int> places;
  for (int i = Draw(1, 3); i > 0; --i) {
    places.push_back(Chance(0.03) ? pool_ranks : Draw(0, pool_ranks - 1));
  }
  std::vector<DrawnRequest> drawn;
  std::vector<Leader::PackedRequest> packed;
  for (int i = Draw(2, 5); i > 0; --i) {
    drawn.push_back(DrawRequest(/*last=*/false, /*for_pack=*/true));
    const int place = places[static_cast<size_t>(Draw(0, static_cast<int>(places.size()) - 1))];
    packed.push_back({.request = {.id = "p", .tokens = {}, .options = drawn.back().options}, .rank = place});
  }
  const double seconds = Draw(1, 300) / 1000.0;
  const std::vector<Leader::Ticket> tickets = BeginPack(drawn, std::move(packed), seconds);
  SubmitAgainAfter(DrawMs(1, 600));
  if (tickets.empty()) return OnPackRefused(std::move(drawn));
  if (Chance(0.6)) GiveTurn(tickets[static_cast<size_t>(Draw(0, static_cast<int>(tickets.size()) - 1))]);
  for (const Leader::Ticket ticket : tickets) {
    if (requests_.contains(ticket) && Chance(0.25)) CancelAfter(DrawMs(0, 500), ticket);
  }
}

std::vector<Leader::Ticket> PoolSimulation::BeginPack(std::vector<DrawnRequest>& drawn,
                                                      std::vector<Leader::PackedRequest> packed,
                                                      double seconds) {
  std::map<int, double> tokens_of_rank;
  for (size_t i = 0; i < drawn.size(); ++i) {
    tokens_of_rank[packed[i].rank] += static_cast<double>(drawn[i].client.tokens.size());
  }
  for (size_t i = 0; i < drawn.size(); ++i) {
    ClientRequest& client = drawn[i].client;
    packed[i].request.tokens = client.tokens;
    packed[i].share = static_cast<double>(client.tokens.size()) / tokens_of_rank.at(packed[i].rank);
    client.pack_prompts = static_cast<int>(drawn.size());
    client.pack_share = packed[i].share;
  }
  const auto kv_before = leader_->kv_by_worker();
  const uint64_t last_run = runs_told_.empty() ? 0 : runs_told_.rbegin()->first;
  std::vector<Leader::Ticket> tickets = leader_->SubmitPack(packed, seconds, now_);
  if (tickets.empty()) {
    CheckPackLeftNothing(last_run, kv_before);
    return tickets;
  }
  if (tickets.size() != drawn.size()) Fail("a pack without one of its prompts");
  ++census_.packs;
  census_.in_packs += static_cast<int>(drawn.size());
  for (size_t i = 0; i < tickets.size(); ++i) {
    drawn[i].client.pack = tickets.front();
    requests_.emplace(tickets[i], std::move(drawn[i].client));  // its tokens stay where they are
    if (queued_) queue_->Attach(tickets[i]);
  }
  DoLeaderActions();
  CheckPackPlaces(tickets, packed);
  return tickets;
}

void PoolSimulation::CheckPackLeftNothing(uint64_t last_run,
                                          const std::map<std::string, KvDirectory::WorkerKv>& kv_before) {
  ++census_.packs_refused;
  refuses_pack_ = true;
  DoLeaderActions();
  refuses_pack_ = false;
  refused_.clear();
  for (auto run = runs_told_.upper_bound(last_run); run != runs_told_.end(); ++run) {
    if (Lives(run->second)) Fail("a pack that has no room leaves a run");
  }
  for (const auto& [name, kv] : leader_->kv_by_worker()) {
    if (kv.bytes > kv_before.at(name).bytes) Fail("a pack that has no room leaves K and V");
  }
}

// Its clients submit them by themselves, as many as may live, or give up.
void PoolSimulation::OnPackRefused(std::vector<DrawnRequest> drawn) {
  const bool alone = Chance(0.7);
  for (DrawnRequest& each : drawn) {
    if (alone && LiveOfClients() < most_requests_) {
      SubmitAlone(std::move(each));
    } else {
      OnPrefillEnded(each.client.lease, /*done=*/false);
    }
  }
}

// Each prompt is where it was to be, and with as many others.
void PoolSimulation::CheckPackPlaces(const std::vector<Leader::Ticket>& tickets,
                                     const std::vector<Leader::PackedRequest>& packed) {
  std::vector<std::pair<std::string, int>> place_of_rank;  // the worker, and its rank
  for (const Leader::WorkerView& worker : leader_->workers()) {
    if (worker.state == Leader::WorkerState::kDraining) continue;
    for (uint32_t rank = 0; rank < worker.offer->ranks(); ++rank) {
      place_of_rank.emplace_back(worker.offer->name(), static_cast<int>(rank));
    }
  }
  std::set<uint64_t> packs, runs;
  for (size_t i = 0; i < tickets.size(); ++i) {
    const auto told = runs_told_.find(leader_->run_of(tickets[i]));
    if (told == runs_told_.end()) return Fail("a pack has begun without one of its prompts");
    packs.insert(told->second.pack);
    runs.insert(told->first);
    const auto rank = static_cast<size_t>(packed[i].rank);
    if (rank >= place_of_rank.size()) return Fail("a pack has begun on a rank that is gone");
    const auto& [name, local_rank] = place_of_rank[rank];
    const auto together = std::count_if(packed.begin(), packed.end(),
                                        [&](const auto& other) { return other.rank == packed[i].rank; });
    if (nodes_[told->second.nodes.begin()->first].name != name || told->second.local_rank != local_rank) {
      Fail("a prompt of a pack is elsewhere than on its rank");
    }
    if (told->second.pack_runs != together) Fail("a pass of another number of runs");
  }
  for (const auto& [run, told] : runs_told_) {
    if (!runs.contains(run) && packs.contains(told.pack)) Fail("two packs have one number");
  }
  if (packs.size() != 1 || packs.contains(0)) Fail("the runs of a pack do not have its number");
}

void PoolSimulation::OnPackTold(uint64_t link, const v1::Prepare& prepare) {
  RunTold& told = runs_told_.at(prepare.run());
  told.links[link] = static_cast<int64_t>(prepare.reserve_bytes());
  if (prepare.pack() == 0) return;
  told.pack = prepare.pack();
  told.pack_runs = static_cast<int>(prepare.pack_runs());
  told.local_rank = static_cast<int>(prepare.local_rank());
  Note(absl::StrCat("run ", prepare.run(), " is of pack ", told.pack, ", with ", told.pack_runs, " on rank ",
                    told.local_rank, " of ", nodes_[links_.at(link).node].name));
  if (prepare.ranks() != 1 || told.links.size() != 1) Fail("a run of a pack has more than one rank");
  if (prepare.prefix_size() > 0 || prepare.tokens_ahead() > 0) Fail("a run of a pack has not all its prompt");
}

std::vector<PoolSimulation::RunTold*> PoolSimulation::MatesOf(const RunTold& run) {
  std::vector<RunTold*> mates;
  for (auto& [number, other] : runs_told_) {
    if (&other != &run && run.pack != 0 && other.pack == run.pack && other.local_rank == run.local_rank &&
        other.links.begin()->first == run.links.begin()->first) {
      mates.push_back(&other);
    }
  }
  return mates;
}

bool PoolSimulation::Lives(const RunTold& run) const {
  return !run.stopped && !run.finished &&
         std::any_of(run.links.begin(), run.links.end(),
                     [&](const auto& to) { return links_.at(to.first).open_at_leader; });
}

// What ends one before its rank's last word ends all of its pass, so that none that is wanted loses another.
// They stand still and go on together, too.
void PoolSimulation::CheckToldTogether() {
  for (const uint64_t run : std::exchange(told_now_, {})) {
    const RunTold& told = runs_told_.at(run);
    if (told.cancelled && requests_.contains(told.ticket)) {
      Fail(absl::StrCat("run ", run, " is cancelled, and its client is there"));
    }
    if (told.done) continue;
    for (const RunTold* mate : MatesOf(told)) {
      if (!Lives(*mate)) continue;
      if (told.stopped) Fail(absl::StrCat("run ", run, " is stopped, and one goes on that shares its pass"));
      const bool both_begun = told.begun && mate->begun;
      if (both_begun && StandsStill(told) != StandsStill(*mate)) {
        Fail(absl::StrCat("one goes on that shares the pass of run ", run, ", and one stands still"));
      }
    }
  }
}

void PoolSimulation::CheckLivePlaces() {
  if (LivePlaces() > runs_at_once_) Fail("more runs live than may at once");
}

int PoolSimulation::LivePlaces() const {
  std::set<uint64_t> packs;
  return static_cast<int>(std::count_if(runs_told_.begin(), runs_told_.end(), [&](const auto& entry) {
    const RunTold& told = entry.second;
    return Lives(told) && (told.pack == 0 || packs.insert(told.pack).second);
  }));
}

// The first one whose turn it is begins where there is a place, and memory for whatever it is. Those of a
// failed pack take turns.
void PoolSimulation::CheckNobodyWaitsInVain() {
  std::set<Leader::Ticket> packs_that_run;
  for (const auto& [ticket, request] : requests_) {
    if (request.pack != 0 && leader_->run_of(ticket) != 0) packs_that_run.insert(request.pack);
  }
  const bool waits = std::any_of(requests_.begin(), requests_.end(), [&](const auto& entry) {
    const auto& [ticket, request] = entry;
    return !request.paused && leader_->run_of(ticket) == 0 && !packs_that_run.contains(request.pack);
  });
  const bool knows_room = !small_ && weight_bytes_ == 0;
  if (!waits || !knows_room || leader_->MakesRoom() || leader_->workers_to_stay() == 0) return;
  if (LivePlaces() >= runs_at_once_) return;
  for (const Leader::WorkerView& worker : leader_->workers()) {
    int64_t reserved = 0;
    for (const auto& [run, told] : runs_told_) {
      for (const auto& [link, bytes] : told.links) {
        if (Lives(told) && nodes_[links_.at(link).node].name == worker.offer->name()) reserved += bytes;
      }
    }
    const auto offered = static_cast<int64_t>(worker.offer->memory_bytes());
    if (offered > 0 && reserved + (RankBytes() + short_rank_bytes_) * worker.offer->ranks() > offered) return;
  }
  Fail("a request waits, and fewer runs live than may");
}

// What nobody wants ends soon.
void PoolSimulation::CheckUnwantedPasses() {
  const auto wanted = [&](const RunTold& run) { return Lives(run) && requests_.contains(run.ticket); };
  for (auto& [run, told] : runs_told_) {
    if (told.pack == 0 || !Lives(told)) continue;
    const std::vector<RunTold*> mates = MatesOf(told);
    if (wanted(told) ||
        std::any_of(mates.begin(), mates.end(), [&](const auto* mate) { return wanted(*mate); })) {
      told.unwanted_since = absl::InfiniteFuture();
    } else {
      told.unwanted_since = std::min(told.unwanted_since, now_);
    }
    if (now_ - told.unwanted_since > kHungBound)
      Fail(absl::StrCat("run ", run, " of a pack goes on for nobody"));
  }
}

}  // namespace meshfill
