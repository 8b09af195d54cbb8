#include "server/pool/run_ender.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/prefill_summary.h"
#include "server/observe/log.h"

namespace meshfill {

RunEnder::RunEnder(absl::Duration silence_timeout, Membership& members, LiveRuns& live, RunPlacer& placer,
                   KvDirectory& kv, LeaderActions& actions)
    : silence_timeout_(silence_timeout),
      members_(members),
      live_(live),
      placer_(placer),
      kv_(kv),
      actions_(actions) {}

void RunEnder::Complete(RunId run, absl::StatusOr<RunResult> result, absl::Time now) {
  const LeaderActions::Ticket ticket = live_.runs.at(run).ticket;
  const bool good = result.ok() && AreFinite(result->logits);
  KvSlabs kept = kv_.OnRunOver(run, good, members_.ByPlace());
  std::vector<RunId> others = live_.InPassOf(run);
  std::erase(others, run);
  live_.Forget(run);
  if (LiveRequest* request = live_.Find(ticket); request != nullptr && result.ok()) {
    if (request->pieces.has_value()) {
      PromptPieces& pieces = *request->pieces;
      if (!pieces.last()) {
        pieces.OnDone(*std::move(result), std::move(kept));
        request->run = 0;
        return;
      }
      result = pieces.Finish(*std::move(result));
    }
    if (request->pack.has_value()) {
      result->pack_prompts = request->pack->prompts;
      result->pack_share = request->pack->share;
    }
    result->attempts = request->attempts;
    result->lost_seconds = request->lost_seconds;
    result->paused_seconds = absl::ToDoubleSeconds(request->pauses.Total(now));
  }
  live_.Answer(ticket, std::move(result));
  if (!others.empty() && !live_.IsWanted(others.front())) CancelUnwanted(others, now);
}

void RunEnder::EndEpoch(RunId number, const std::string& why, bool lost_workers, absl::Time now) {
  const std::vector<RunId> in_pass = live_.InPassOf(number);
  const RunCoordinator& run = live_.runs.at(number).coordinator;
  if (run.phase() != RunCoordinator::Phase::kStopping) {
    const std::string others =
        in_pass.size() > 1 ? absl::StrCat(", and in ", in_pass.size() - 1, " others of its pass") : "";
    actions_.Log(absl::StrCat("epoch ", run.epoch(), " ended in run ", number, others, ": ", LogQuote(why)),
                 LogLevel::kWarning);
  }
  for (const RunId each : in_pass) EndEpochOf(each, why, lost_workers, now);
}

void RunEnder::EndEpochOf(RunId number, const std::string& why, bool lost_workers, absl::Time now) {
  auto& [ticket, run, pack, doubtful] = live_.runs.at(number);
  const bool stops = run.phase() == RunCoordinator::Phase::kStopping;
  LiveRequest* request = live_.Find(ticket);
  std::optional<EpochEnd> end = stops ? std::exchange(doubtful, std::nullopt) : EndOf(run, now);
  if (end.has_value()) end->why = why;
  // A prompt does not keep its ranks from connecting. One may tell of a failure before the loss of a worker
  // shows, and before the others have said that they compute.
  if (!lost_workers && !run.HasComputed()) doubtful = std::exchange(end, std::nullopt);
  const std::string poisonous = request != nullptr && end.has_value() ? Blame(*request, *end) : "";
  if (!stops) {
    members_.EndEpoch();
    run.Abort(why, now);
    // What a prompt in pieces has stays charged in another way, by KeepPieces.
    const bool is_whole = request != nullptr && !request->pieces.has_value();
    kv_.OnRunFailed(number, why, is_whole ? members_.ByPlace() : KvDirectory::Workers());
    if (request != nullptr) {
      if (request->pack.has_value()) request->failed_pack = request->pack->pack;
      request->pack.reset();
      request->new_attempt = true;
      if (run.MayHaveComputed(now - silence_timeout_)) ++request->losses;
      placer_.KeepPieces(*request);
    }
  }
  if (!poisonous.empty()) live_.Answer(ticket, absl::InternalError(poisonous));
}

std::optional<EpochEnd> RunEnder::EndOf(const RunCoordinator& run, absl::Time now) const {
  const absl::Time since = now - silence_timeout_;
  if (run.phase() != RunCoordinator::Phase::kRunning || !run.MayHaveComputed(since)) return std::nullopt;
  const bool alone = std::none_of(live_.runs.begin(), live_.runs.end(), [&](const auto& other) {
    return &other.second.coordinator != &run && other.second.coordinator.Shares(run) &&
           other.second.coordinator.MayHaveComputed(since);
  });
  return EpochEnd{.place = run.PlaceOfEnd(now, silence_timeout_), .alone = alone};
}

std::string RunEnder::Blame(LiveRequest& request, const EpochEnd& end) {
  if (!end.alone) {
    request.ended.Suspect(end.place);
    return "";
  }
  if (!request.ended.Blame(end.place)) return "";
  for (auto& [ticket, other] : live_.requests) other.ended.ForgetSuspicions();
  return absl::StrCat("request ", request.request.id,
                      " ended 2 epochs of the pool at the same place of its prompt and is refused as "
                      "poisonous; the last one: ",
                      end.why);
}

void RunEnder::Cancel(LiveRun& run, absl::Time now) {
  run.coordinator.Cancel(now);
  kv_.OnRunFailed(run.coordinator.number(), "it was cancelled", /*again_on=*/{});
}

void RunEnder::Leave(RunId run, absl::Time now) {
  if (!live_.IsWanted(run)) CancelUnwanted(live_.InPassOf(run), now);
}

void RunEnder::CancelUnwanted(const std::vector<RunId>& in_pass, absl::Time now) {
  for (const RunId run : in_pass) {
    if (live_.Find(live_.runs.at(run).ticket) == nullptr) Cancel(live_.runs.at(run), now);
  }
}

void RunEnder::ForgetStopped() {
  for (auto next = live_.runs.begin(); next != live_.runs.end();) {
    const auto run = next++;
    const auto& [ticket, coordinator, pack, doubtful] = run->second;
    if (!coordinator.stopped()) continue;
    if (LiveRequest* request = live_.Find(ticket)) {
      request->run = 0;
      const bool computed = doubtful.has_value() && coordinator.HasComputed();
      const std::string poisonous = computed ? Blame(*request, *doubtful) : "";
      if (!poisonous.empty()) live_.Answer(ticket, absl::InternalError(poisonous));
    }
    live_.Forget(run->first);
  }
  members_.ReleaseDrained([this](LeaderActions::Connection connection) {
    return kv_.Holds(connection) || live_.HasPiecesOf(connection) || live_.TakesPart(connection);
  });
}

}  // namespace meshfill
