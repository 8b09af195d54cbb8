// What the leader tells workers of runs: what each follows, which workers it takes, and why it is stopped.
#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/server/pool/simulation/pool_simulation.h"
#include "tests/server/pool/simulation/simulated_pool.h"

namespace meshfill {

void PoolSimulation::OnTold(uint64_t link, const v1::LeaderMessage& message) {
  if (message.has_prepare()) {
    OnRunTold(message.prepare());
    const Link& to = links_.at(link);  // perhaps of a worker that has died since, and is back
    runs_told_.at(message.prepare().run()).nodes[to.node] = to.node_incarnation;
    OnPackTold(link, message.prepare());
  }
  if (message.has_run()) runs_told_.at(message.run().run()).begun = true;
  if (message.has_pause()) {
    RunTold& told = runs_told_.at(message.pause().run());
    told.pause = message.pause().number();
    told.still.clear();
    if (messages_mix_) told.paused_since = now_;
    told_now_.push_back(message.pause().run());
  }
  if (message.has_resume()) {
    told_now_.push_back(message.resume().run());
    runs_told_.at(message.resume().run()).pause = 0;
    runs_told_.at(message.resume().run()).paused_since = absl::InfiniteFuture();
  }
  if (message.has_finish()) {
    runs_told_.at(message.finish().run()).finished = true;
    runs_told_.at(message.finish().run()).losses = leader_->counters().losses;
    if (runs_told_.at(message.finish().run()).left) Fail("a run whose client is gone is kept");
  }
  if (message.has_cancel()) {
    RunTold& told = runs_told_.at(message.cancel().run());
    told.stopped = told.cancelled = true;
    told_now_.push_back(message.cancel().run());
    if (told.pack != 0 && told.left && told.done) ++census_.left_in_packs;
    told.stopped_at = now_;
  }
  if (!message.has_abort()) return;
  RunTold& told = runs_told_.at(message.abort().run());
  told.stopped = true;
  told.stopped_at = now_;
  told_now_.push_back(message.abort().run());
  CheckWorkersLost(told);
  told.innocent = told.paused_since < now_ - Leader::Options().silence_timeout;
}

// Where messages do not mix, a run stands still once the last of its workers has said so.
void PoolSimulation::OnStillTold(uint64_t link, const v1::Paused& paused) {
  const auto entry = runs_told_.find(paused.run());
  if (entry == runs_told_.end() || entry->second.pause != paused.number()) return;
  RunTold& told = entry->second;
  if (told.still.insert(link).second && told.still.size() == told.nodes.size()) told.paused_since = now_;
}

// In quiet stories nothing else stops a run.
void PoolSimulation::CheckWorkersLost(const RunTold& told) {
  const bool lost = std::any_of(told.nodes.begin(), told.nodes.end(), [this](const auto& entry) {
    const auto& [node, incarnation] = entry;
    return nodes_[node].machine == nullptr || nodes_[node].incarnation != incarnation;
  });
  if (quiet_ && !lost) Fail("a run is stopped that lost none of its workers");
}

// A run on a sub-mesh takes its share of the workers. It takes none on which others compute while nothing
// lives on another sub-mesh, and there is room for K and V; but for a prompt's next piece, which runs where
// the first one did.
void PoolSimulation::CheckSubmesh(uint64_t run) {
  const RunTold& told = runs_told_.at(run);
  const auto request = requests_.find(told.ticket);
  if (request == requests_.end() || request->second.submeshes == 1 || told.is_next_piece) return;
  std::vector<int> members;  // by place
  for (const Leader::WorkerView& worker : leader_->workers()) {
    const auto node = std::find_if(nodes_.begin(), nodes_.end(),
                                   [&](const Node& each) { return each.name == worker.offer->name(); });
    if (worker.state != Leader::WorkerState::kDraining) {
      members.push_back(static_cast<int>(node - nodes_.begin()));
    }
  }
  const int count = std::min(request->second.submeshes, static_cast<int>(members.size()));
  if (count == 0 || count * std::ssize(told.nodes) >= std::ssize(members) + count) return;  // on all of them
  ++census_.on_submeshes;
  std::map<int, int> live, computing;  // runs, by node
  for (const auto& [number, other] : runs_told_) {
    // What begins after it, in the same moment, takes what it has left; what goes on then may have stood
    // still when it began.
    if (number >= run || other.finished || now_ - other.stopped_at > kHungBound) continue;
    const auto owner = requests_.find(other.ticket);
    const bool computes = !other.stopped && owner != requests_.end() && !owner->second.paused &&
                          owner->second.resumed_at < now_ &&
                          leader_->run_of(other.ticket) == number;  // else all its workers are lost
    for (const auto& [node, incarnation] : other.nodes) {
      ++live[node];
      if (computes) ++computing[node];
    }
  }
  if (computing.empty()) return;
  const bool beside = std::none_of(told.nodes.begin(), told.nodes.end(),
                                   [&](const auto& entry) { return computing[entry.first] > 0; });
  if (beside) {
    ++census_.side_by_side;
    return;
  }
  const auto kv = leader_->kv_by_worker();
  for (int i = 0; i < count; ++i) {
    const size_t begin = members.size() * static_cast<size_t>(i) / static_cast<size_t>(count);
    const size_t end = members.size() * static_cast<size_t>(i + 1) / static_cast<size_t>(count);
    const bool idle = std::all_of(
        members.begin() + static_cast<std::ptrdiff_t>(begin),
        members.begin() + static_cast<std::ptrdiff_t>(end), [&](int node) {
          const KvDirectory::WorkerKv& of = kv.at(nodes_[node].name);
          const int64_t most = kLongestPrompt * kTokenBytes;
          const int64_t room = (RankBytes() + short_rank_bytes_) * nodes_[node].ranks;
          return live[node] == 0 && of.bytes + most <= of.max_bytes && room <= nodes_[node].memory_bytes;
        });
    if (!idle || small_) continue;
    std::vector<std::string> taken, free;
    for (const auto& [node, incarnation] : told.nodes) taken.push_back(nodes_[node].name);
    for (size_t at = begin; at < end; ++at) free.push_back(nodes_[members[at]].name);
    return Fail(absl::StrCat("run ", run, " takes ", absl::StrJoin(taken, ", "),
                             ", on which others compute, and ", absl::StrJoin(free, ", "), " are idle"));
  }
}

// A run whose workers are all lost is told of nothing.
int PoolSimulation::EpochsEnded(const ClientRequest& request) const {
  return static_cast<int>(std::count_if(request.runs.begin(), request.runs.end(), [this](uint64_t run) {
    const RunTold& told = runs_told_.at(run);
    return told.begun && !told.innocent;
  }));
}

// What a run is told to follow was computed from the same tokens, for the same tenant, by runs that are over.
void PoolSimulation::OnRunTold(const v1::Prepare& prepare) {
  const auto [entry, fresh] = runs_told_.try_emplace(prepare.run());
  if (!fresh) return;
  const auto owner = std::find_if(requests_.begin(), requests_.end(), [&](const auto& request) {
    return leader_->run_of(request.first) == prepare.run();
  });
  if (owner == requests_.end()) return;  // it was stopped in the moment in which it began
  ClientRequest& request = owner->second;
  const uint64_t last = request.runs.empty() ? 0 : *request.runs.rbegin();
  bool goes_on = false, begun = false;
  RunTold& told = entry->second;
  told = {
      .tokens = request.tokens, .cache_tenant = request.cache_tenant, .computed_by = {}, .stopped = false};
  told.ticket = owner->first;
  for (const v1::RunTokens& piece : prepare.prefix()) {
    const auto found = runs_told_.find(piece.run());
    if (found == runs_told_.end()) return Fail("a prefix of a run that never was");
    const RunTold& before = found->second;
    const bool own = request.runs.contains(piece.run());
    if (!own && (begun || request.ignores_cache)) Fail("the cache is not ignored, or comes between pieces");
    if (!before.finished || before.stopped) Fail("a prefix of a run that was not done");
    begun = begun || own;
    goes_on = goes_on || piece.run() == last;
    const size_t end = told.computed_by.size() + piece.tokens();
    if (before.cache_tenant != told.cache_tenant) Fail("a prefix of another tenant");
    if (end >= told.tokens.size() || end > before.computed_by.size() ||
        !std::equal(told.tokens.begin(), told.tokens.begin() + static_cast<std::ptrdiff_t>(end),
                    before.tokens.begin())) {
      return Fail("a prefix of other tokens");
    }
    told.computed_by.resize(end, piece.run());
  }
  told.is_next_piece = begun;
  if (told.computed_by.size() != prepare.plan().cached_tokens()) Fail("a prefix of another length");
  if (prepare.prefix_size() > 0 && !begun) ++census_.behind_a_prefix;
  told.computed_by.resize(prepare.plan().cached_tokens() + prepare.plan().tokens(), prepare.run());
  const bool is_last = told.computed_by.size() == told.tokens.size();
  if (prepare.more_pieces() == is_last) Fail("a piece that does not know whether more come");
  if (told.computed_by.size() + prepare.tokens_ahead() != told.tokens.size()) {
    Fail("a run that takes its prompt for another length");
  }
  if (prepare.pack() != 0 && (request.pack == 0 || !request.runs.empty())) {
    Fail("a run of a pack, of a request that is in none by now");
  }
  if (prepare.more_pieces() && !prepare.keep_kv().cache()) Fail("a piece that no other can follow");
  if (prepare.more_pieces() && !prepare.keep_kv().lease().empty()) Fail("a lease of a piece");
  if (last != 0 && begun && !goes_on) ++census_.pieces_again;
  if (last != 0 && !begun && runs_told_.at(last).finished) ++census_.pieces_lost;
  request.attempts += goes_on ? 0 : 1;
  request.runs.insert(prepare.run());
}

}  // namespace meshfill
