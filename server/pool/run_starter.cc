#include "server/pool/run_starter.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

constexpr int kMaxLosses = 6;  // of one request's runs, those that ended before they began included

}  // namespace

RunStarter::RunStarter(const Options& options, Membership& members, LinkSurvey& survey, LiveRuns& live,
                       RunPlacer& placer, LeaderActions& actions)
    : options_(options),
      members_(members),
      survey_(survey),
      live_(live),
      placer_(placer),
      actions_(actions) {}

// The policy of what lives at once: the oldest requests whose turn it is, as many as the options and the
// workers' memory allow. A run that is being stopped counts.
void RunStarter::StartWaiting(absl::Time now) {
  while (auto* next = live_.FirstWaiting()) {
    auto& [ticket, request] = *next;
    if (request.no_room || placer_.WorkersFor(request).empty()) break;  // OnTick ends the wait for a worker
    if (!MayStart()) {
      request.no_room = true;
    } else {
      Start(ticket, now);
    }
  }
  live_.Pause(now);
}

void RunStarter::Start(LeaderActions::Ticket ticket, absl::Time now) {
  LiveRequest& request = live_.requests.at(ticket);
  if (request.losses >= kMaxLosses) {
    return live_.Answer(
        ticket, absl::UnavailableError(absl::StrCat("the pool lost workers in each of ", request.losses,
                                                    " attempts at this request; try again later")));
  }
  const RunId number = last_run_ + 1;
  absl::StatusOr<std::optional<PlacedRun>> placed = placer_.Place(number, request);
  if (placed.ok() && !placed->has_value()) {
    request.no_room = true;
    return;
  }
  if (!placed.ok()) {
    const bool shrunk = request.attempts > 0 && absl::IsInvalidArgument(placed.status());
    return live_.Answer(ticket, shrunk ? absl::UnavailableError(absl::StrCat("the pool lost workers and now ",
                                                                             placed.status().message()))
                                       : placed.status());
  }
  if (members_.BeginRun()) survey_.AskAgain();
  if (std::exchange(request.new_attempt, false)) BeginAttempt(request, now);
  request.run = last_run_ = number;
  const int64_t tokens_ahead = request.pieces.has_value() ? request.pieces->tokens_ahead() : 0;
  PlacedRun& run = **placed;
  const RunCoordinator::Options options = {
      .layers = options_.layers,
      .vocab = options_.vocab,
      .shares_weights = run.shares_weights,
      .tokens_ahead = tokens_ahead,
      .pool_ranks = request.pack.has_value() ? std::vector<int>{request.pack->rank}
                                             : PoolRanks(members_.ByPlace(), run.workers, run.plan.ranks()),
      .pack = request.pack.has_value() ? RunCoordinator::Pack{.number = request.pack->pack,
                                                              .local_rank = request.pack->local_rank,
                                                              .runs = request.pack->rank_prompts}
                                       : RunCoordinator::Pack(),
      .hang_timeout = options_.hang_timeout,
      .prepare_timeout = options_.prepare_timeout,
      .stop_timeout = options_.stop_timeout};
  const auto first = static_cast<size_t>(run.plan.cached_tokens);
  const auto tokens = request.request.tokens.subspan(first, static_cast<size_t>(run.plan.layout.tokens()));
  live_.runs.emplace(
      number, LiveRun{.ticket = ticket,
                      .coordinator = RunCoordinator(number, members_.epoch(), std::move(run.plan), tokens,
                                                    run.workers, run.kv, options, actions_, survey_, now),
                      .pack = request.pack});
}

void RunStarter::BeginAttempt(LiveRequest& request, absl::Time now) {
  if (request.attempts++ > 0) ++retries_;
  if (request.attempts == 1) {
    request.begin = now;
    request.pauses = {};
  }
  // Pieces may have run on while their request was asked to stand still.
  const double counted = request.pieces.has_value() ? request.pieces->seconds() : 0;
  const double lost = absl::ToDoubleSeconds(now - request.begin - request.pauses.Total(now)) - counted;
  request.lost_seconds = std::max(0.0, lost);
}

}  // namespace meshfill
