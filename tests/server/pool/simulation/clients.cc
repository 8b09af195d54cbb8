// The clients: what they ask for, whose turn it is, and whether each answer is right.
#include <algorithm>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/kv/block_hash.h"
#include "tests/server/pool/simulation/pool_simulation.h"
#include "tests/server/pool/simulation/simulated_pool.h"

namespace meshfill {
namespace {

constexpr int kBlockTokens = 2;
constexpr int kAllLengths = 6, kShortLengths = 4;  // of prompts: DrawPrompt
// From the last fault to a pool that is whole again, kKeptOut included.
constexpr absl::Duration kSettle = absl::Seconds(10);
constexpr absl::Duration kHealed = absl::Seconds(60);  // the same beside runs that met the fault late: paused

}  // namespace

void PoolSimulation::SubmitNext() {
  if (leader_ == nullptr || LiveOfClients() >= most_requests_) return SubmitAgainAfter(DrawMs(20, 200));
  if (requests_left_ <= 0 && !healed_) return SubmitAgainAfter(DrawMs(100, 300));
  const bool last = requests_left_ <= 0;  // alone, in a pool that is whole
  const bool alone = LiveOfClients() == 0 && (!small_ || leader_->kv_counts().leases == 0);
  if (last && (!alone || !CalmSince(now_ - kSettle))) return SubmitAgainAfter(DrawMs(100, 1000));
  if (const std::string missing = last ? Missing() : ""; !missing.empty()) {
    if (CalmSince(now_ - kHealed)) Fail(absl::StrCat("the pool did not heal: without", missing));
    return SubmitAgainAfter(DrawMs(100, 1000));
  }
  --requests_left_;
  if (queued_) {
    queue_clients_.Add(DrawRequest(last, /*for_pack=*/!last && packs_ && Chance(0.5)), last);
    if (!last) SubmitAgainAfter(Chance(0.6) ? DrawMs(0, 3) : DrawMs(1, 500));
    return;
  }
  if (!last && packs_ && Chance(0.3) && leader_->RankCapacity().has_value()) return SubmitPackNext();
  const Leader::Ticket ticket = SubmitAlone(DrawRequest(last, /*for_pack=*/false));
  if (Chance(0.6)) GiveTurn(ticket);
  if (last) return;
  SubmitAgainAfter(DrawMs(1, 600));
  if (requests_.contains(ticket) && Chance(0.15)) CancelAfter(DrawMs(0, 600), ticket);
}

PoolSimulation::DrawnRequest PoolSimulation::DrawRequest(bool last, bool for_pack) {
  ClientRequest request;
  request.tokens = DrawPrompt(for_pack ? kShortLengths : kAllLengths);
  request.poisonous = !last && !healed_ && Chance(quiet_ ? 0.25 : 0.1);
  if (request.poisonous) request.tokens[Draw(0, static_cast<int>(request.tokens.size()) - 1)] = kPoison;
  request.calm = last;
  NoteSubmitted(request);
  Note(absl::StrCat("submit ", request.tokens.size(), " tokens", request.poisonous ? ", poisonous" : "",
                    last ? ", the last" : ""));
  PrefillOptions options;
  if (Chance(0.9)) {
    request.cache_tenant = Chance(0.8) ? kTenant : "another";
    options.ignore_cache = request.ignores_cache = Chance(0.1);
    BlockHasher hasher(kBlockTokens, "");
    hasher.Append(request.tokens);
    options.block_names = std::make_shared<const KvBlockNames>(KvBlockNames{
        .tenant = request.cache_tenant, .block_tokens = kBlockTokens, .hashes = hasher.hashes()});
  }
  if (!queued_ && !last && !for_pack && side_by_side_ && Chance(0.7)) {
    options.submeshes = request.submeshes = Draw(1, 2) * 2;
  }
  if (!queued_ && !last && Chance(0.95)) options.kv_lease = AdmitKv(std::ssize(request.tokens));
  request.lease = options.kv_lease;
  return {.client = std::move(request), .options = std::move(options)};
}

void PoolSimulation::NoteSubmitted(ClientRequest& request) {
  if (request.poisonous) last_fault_end_ = std::max(last_fault_end_, now_);
  request.losses = leader_->counters().losses;
  request.submitted_at = now_;
}

Leader::Ticket PoolSimulation::SubmitAlone(DrawnRequest drawn) {
  ClientRequest& request = drawn.client;
  const Leader::Ticket ticket =
      leader_->Submit({.id = "r", .tokens = request.tokens, .options = drawn.options}, now_);
  if (leader_->CrowdedOut(ticket)) ++census_.crowded_out;
  requests_.emplace(ticket, std::move(request));  // its tokens stay where they are
  if (queued_) queue_->Attach(ticket);
  DoLeaderActions();
  return ticket;
}

void PoolSimulation::CancelAfter(absl::Duration delay, Leader::Ticket ticket) {
  After(delay, -1, [this, ticket, incarnation = leader_incarnation_] {
    if (leader_ != nullptr && incarnation == leader_incarnation_) CancelAtLeader(ticket);
  });
}

void PoolSimulation::CancelAtLeader(Leader::Ticket ticket) {
  const bool lives = requests_.contains(ticket);
  if (lives) requests_.at(ticket).cancelled = true;
  if (const RunId run = leader_->run_of(ticket); run != 0) {
    Note(absl::StrCat("the client of run ", run, " goes"));
    runs_told_.at(run).left = true;
  }
  leader_->CancelRequest(ticket, absl::CancelledError("client"), now_);
  const bool was_last = lives && requests_.size() == 1;
  DoLeaderActions();
  if (was_last) CheckNothingRuns();
}

std::string PoolSimulation::Missing() {
  std::string missing;
  std::set<std::string> members;
  for (const Leader::WorkerView& worker : leader_->workers()) members.insert(worker.offer->name());
  for (const Node& node : nodes_) {
    if (!members.contains(node.name)) absl::StrAppend(&missing, " ", node.name);
  }
  return missing;
}

// As a queue does it: one goes on, or those on sub-meshes like its own, and the others stand still.
void PoolSimulation::GiveTurn(Leader::Ticket ticket) {
  if (leader_ == nullptr || requests_.empty()) return;
  if (ticket == 0)
    ticket = std::next(requests_.begin(), Draw(0, static_cast<int>(requests_.size()) - 1))->first;
  const bool for_all = Chance(0.1);
  turn_ = for_all ? 0 : ticket;
  const auto own = requests_.find(ticket);  // it may have its answer already
  const int submeshes = own == requests_.end() ? 1 : own->second.submeshes;
  const Leader::Ticket pack = own == requests_.end() ? 0 : own->second.pack;
  const auto set_paused = [this](Leader::Ticket of, ClientRequest& request, bool paused) {
    if (request.paused && !paused) request.resumed_at = now_;
    request.paused = paused;
    leader_->SetPaused(of, paused, now_);
  };
  for (auto& [other, request] : requests_) {
    const bool beside =
        (submeshes > 1 && request.submeshes == submeshes) || (pack != 0 && request.pack == pack);
    if (other != ticket) set_paused(other, request, !for_all && !beside);
  }
  if (own != requests_.end()) set_paused(ticket, own->second, false);
  DoLeaderActions();
}

void PoolSimulation::ChangeTurns() {
  const bool gone = turn_ != 0 && !requests_.contains(turn_);
  if (gone || (!sticky_ && Chance(0.1))) GiveTurn(0);
  After(DrawMs(10, 400), -1, [this] { ChangeTurns(); });
}

// One request lived: once it is cancelled, no run goes on, but for those whose pass is over.
void PoolSimulation::CheckNothingRuns() {
  bool last_word_comes = false;
  for (const auto& [run, told] : runs_told_) {
    if (told.pack == 0 || !Lives(told)) continue;
    const std::vector<RunTold*> mates = MatesOf(told);
    last_word_comes =
        std::any_of(mates.begin(), mates.end(), [](const RunTold* mate) { return mate->finished; });
    if (!last_word_comes) Fail("a run of a pack goes on that nobody wants");
  }
  if (last_word_comes) return;
  for (const Leader::WorkerView& worker : leader_->workers()) {
    const bool runs =
        worker.state == Leader::WorkerState::kPreparing || worker.state == Leader::WorkerState::kRunning;
    if (runs) Fail("the run of a cancelled request goes on");
  }
}

PoolSimulation::ClientRequest* PoolSimulation::RequestOf(const WorkerMachine::RunPart& part) {
  if (part.epoch < kEpochsOfALeader * leader_incarnation_) return nullptr;
  for (auto& [ticket, request] : requests_) {
    if (request.runs.contains(part.number)) return &request;
  }
  return nullptr;
}

std::vector<uint32_t> PoolSimulation::DrawPrompt(int lengths) {
  constexpr int kLengths[] = {1, 3, 8, 17, 40, kLongestPrompt};
  constexpr int kInCommon[] = {7, 16, 33, 64};
  std::vector<uint32_t> prompt;
  const size_t length = static_cast<size_t>(kLengths[Draw(0, lengths - 1)]);
  if (!prompts_.empty() && Chance(0.7)) {
    prompt = prompts_[static_cast<size_t>(Draw(0, static_cast<int>(prompts_.size()) - 1))];
    prompt.resize(std::min({prompt.size(), length, static_cast<size_t>(kInCommon[Draw(0, 3)])}));
  }
  if (!prompt.empty() && Chance(0.2)) {  // blocks behind it are of another prompt
    prompt[static_cast<size_t>(Draw(0, static_cast<int>(prompt.size()) - 1))] =
        static_cast<uint32_t>(Draw(0, 255));
  }
  while (prompt.size() < length) prompt.push_back(static_cast<uint32_t>(Draw(0, 255)));
  prompts_.push_back(prompt);
  return prompt;
}

void PoolSimulation::OnAnswer(const Leader::Answer& answer) {
  auto entry = requests_.extract(answer.ticket);
  if (refuses_pack_ && entry.empty() && !answer.result.ok() && refused_.insert(answer.ticket).second) return;
  if (entry.empty()) return Fail("an answer to nobody, or a second one");
  if (queued_ && queue_->Takes(answer)) return;
  ++census_.answers;
  const ClientRequest request = std::move(entry.mapped());
  if (queued_) {
    queue_->OnAnswer(answer.ticket, answer.result.status());
  } else {
    After(absl::ZeroDuration(), -1,
          [this, lease = request.lease, done = answer.result.ok()] { OnPrefillEnded(lease, done); });
  }
  if (answer.result.ok()) {
    ++census_.results;
    const Leader::Result& result = *answer.result;
    Note(absl::StrCat("result of run ", static_cast<int>(result.logits[3]), " on ", result.plan.ranks(),
                      " ranks"));
    uint64_t sum = 0;
    for (size_t token = 0; token < request.tokens.size(); ++token) sum += Mix(token, request.tokens[token]);
    const uint64_t run = request.runs.empty() ? 0 : *request.runs.rbegin();
    const std::vector<float> expected = {static_cast<float>(sum & 0xFFFFF),
                                         static_cast<float>(sum >> 20 & 0xFFFFF),
                                         static_cast<float>(sum >> 40 & 0xFFFFF), static_cast<float>(run)};
    if (result.logits != expected) Fail("a wrong result, or one of an old run");
    if (result.ranks.size() != static_cast<size_t>(result.plan.ranks())) Fail("a partial result");
    std::set<uint64_t> pieces;
    int64_t cached = 0, run_numbers = 0;
    for (const uint64_t by : runs_told_.at(run).computed_by) {
      if (request.runs.contains(by)) pieces.insert(by);
      cached += request.runs.contains(by) ? 0 : 1;
    }
    for (const uint64_t piece : pieces) run_numbers += static_cast<int64_t>(piece);
    if (pieces.size() > 1) ++census_.in_pieces;
    if (result.pieces != std::ssize(pieces) || result.cached_tokens != cached)
      Fail("a result of other pieces");
    for (const RankStats& stats : result.ranks) {
      if (stats.blocks != run_numbers) Fail("a result put together from other runs than its own");
    }
    if (request.poisonous) Fail("a poisonous request has a result");
    const bool in_pack = runs_told_.at(run).pack != 0;
    if (result.pack_prompts != (in_pack ? request.pack_prompts : 1) ||
        result.pack_share != (in_pack ? request.pack_share : 1)) {
      Fail("a result of another pack");
    }
    if (request.pack != 0 && !in_pack) ++census_.packs_again;
    if (result.attempts < request.attempts) Fail("a result with another number of attempts");
    const auto losses = static_cast<int64_t>(leader_->counters().losses - request.losses);
    if (request.calm && result.attempts > 1 + losses) Fail("a pool that lost nobody begins a request again");
    if (result.attempts > 1 && quiet_) ++census_.attempts_of_innocents;
    const double seconds = absl::ToDoubleSeconds(now_ - request.submitted_at);
    if (result.seconds < 0 || result.lost_seconds < 0 ||
        result.seconds + result.lost_seconds > seconds + 1e-6 || result.paused_seconds < 0 ||
        result.paused_seconds > seconds + 1e-6) {
      Fail("a result that took longer than its request");
    }
    if (request.calm && result.plan.ranks() == leader_->capacity().ranks) CheckLinks(/*all_measured=*/true);
  } else {
    ++census_.errors;
    Note(absl::StrCat("error: ", answer.result.status().ToString()));
    const absl::StatusCode code = answer.result.status().code();
    if (code == absl::StatusCode::kCancelled) ++census_.cancelled;
    if (code == absl::StatusCode::kCancelled && !request.cancelled) Fail("cancelled, but not by its client");
    if (code == absl::StatusCode::kInternal) ++census_.poisoned;
    if (code == absl::StatusCode::kInternal && EpochsEnded(request) < 2) {
      Fail("a request is refused as poisonous that did not end two epochs");
    }
    if (code == absl::StatusCode::kInternal && !request.poisonous && quiet_) {
      Fail("a request is refused as poisonous that only lived beside one");
    }
    // Too few workers were left for a prompt in pieces.
    const bool too_small = small_ && code == absl::StatusCode::kFailedPrecondition;
    const RunTold* last = request.runs.empty() ? nullptr : &runs_told_.at(*request.runs.rbegin());
    if (code == absl::StatusCode::kResourceExhausted && last != nullptr && last->finished &&
        last->losses == leader_->counters().losses) {
      Fail("a piece has no room beside what came after its prompt");
    }
    const bool known = too_small || code == absl::StatusCode::kCancelled ||
                       code == absl::StatusCode::kInternal || code == absl::StatusCode::kUnavailable ||
                       code == absl::StatusCode::kResourceExhausted;
    if (!known) Fail(absl::StrCat("an error that nothing explains: ", answer.result.status().ToString()));
    if (request.calm) Fail(absl::StrCat("an error in a healthy pool: ", answer.result.status().ToString()));
  }
  if (!queued_ && (answer.ticket == turn_ || turn_ == 0)) After(DrawMs(0, 20), -1, [this] { GiveTurn(0); });
  if (!request.calm) return;
  census_.losses += static_cast<int>(leader_->counters().losses);
  census_.retries += static_cast<int>(leader_->counters().retries);
  std::vector<std::string> names;
  for (const auto& [name, lease] : leases_) names.push_back(name);
  for (const std::string& name : names) EndLease(name);
  After(absl::Seconds(2), -1, [this] { CheckEnd(); });
}

}  // namespace meshfill
