// Runs: from a request to its answer, over the workers that are there.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/observe/log.h"
#include "server/pool/leader.h"
#include "server/pool/run_plan.h"

namespace meshfill {
namespace {

constexpr int kMaxEpochsEnded = 2;    // by one request's runs: then it is poisonous
constexpr int kMaxAttempts = 6;       // runs of one request, those that ended before they began included
constexpr int kShardIds = 512 << 10;  // of a message: below 4 MiB at 3 to 5 bytes each
constexpr double kSlowBlock = 10;     // times the predicted seconds of a block: hung
constexpr double kPrepareSecondsPerToken = 1e-6;

// What a rank fails with when others did: the network, a peer, an abort. Anything else is the request's own.
bool MayGoBetterAgain(absl::StatusCode code) {
  return code == absl::StatusCode::kUnavailable || code == absl::StatusCode::kAborted ||
         code == absl::StatusCode::kCancelled || code == absl::StatusCode::kDeadlineExceeded ||
         code == absl::StatusCode::kDataLoss || code == absl::StatusCode::kUnknown;
}

absl::Status Named(const std::string& worker, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("worker ", worker, ": ", status.message()));
}

}  // namespace

Leader::Ticket Leader::Submit(const Request& request, absl::Time now) {
  request_.emplace(LiveRequest{.ticket = ++last_ticket_, .request = request, .waiting_since = now});
  const Ticket ticket = last_ticket_;
  StartNext(now);
  return ticket;
}

void Leader::CancelRequest(Ticket ticket, absl::Status reason, absl::Time now) {
  if (!request_.has_value() || request_->ticket != ticket) return;
  AnswerRequest(std::move(reason));
  if (run_.has_value() && run_->phase != Phase::kStopping) StopRun(now);
}

void Leader::AnswerRequest(absl::StatusOr<Result> result) {
  actions_.push_back(Answer{request_->ticket, std::move(result)});
  request_.reset();
}

// Begins a run for the request that waits, if it can.
void Leader::StartNext(absl::Time now) {
  if (!request_.has_value() || run_.has_value()) return;
  const std::vector<const Worker*> workers = ByPlace();
  if (workers.empty()) return;  // OnTick ends the wait
  if (request_->attempts >= kMaxAttempts) {
    return AnswerRequest(
        absl::UnavailableError(absl::StrCat("the pool lost workers in each of ", request_->attempts,
                                            " attempts at this request; try again later")));
  }
  absl::StatusOr<PlanChoice> choice =
      planner_(capacity(), static_cast<int64_t>(request_->request.tokens.size()), request_->request.options);
  if (!choice.ok()) {
    const bool shrunk = request_->attempts > 0 && absl::IsInvalidArgument(choice.status());
    return AnswerRequest(shrunk ? absl::UnavailableError(absl::StrCat("the pool lost workers and now ",
                                                                      choice.status().message()))
                                : choice.status());
  }
  BeginRun(std::move(choice->plan), workers, now);
}

void Leader::BeginRun(Plan plan, const std::vector<const Worker*>& workers, absl::Time now) {
  if (membership_changed_) {
    ++epoch_;
    ++counters_.epochs;
    membership_changed_ = false;
    survey_.AskAgain();
  }
  if (request_->attempts++ > 0) ++counters_.retries;
  const double blocks = std::max(1, plan.tile.ranks()) * static_cast<double>(options_.layers);
  const double block_seconds = std::min(plan.predicted.compute_seconds / blocks, 1e6);
  const double tokens = static_cast<double>(plan.layout.tokens());
  run_.emplace(ActiveRun{
      .number = ++last_run_,
      .epoch = epoch_,
      .plan = std::move(plan),
      .begin = now,
      .deadline = now + options_.prepare_timeout + absl::Seconds(tokens * kPrepareSecondsPerToken),
      .hang_timeout = std::max(options_.hang_timeout, absl::Seconds(kSlowBlock * block_seconds)),
  });
  const int ranks = run_->plan.ranks();
  for (const Worker* worker : workers) {
    const int first = static_cast<int>(run_->seats.size());
    const int count = std::min(static_cast<int>(worker->offer.ranks()), ranks - first);
    if (count == 0) break;  // this worker and those after it are idle
    run_->seats.resize(first + count, Seat{.worker = worker->connection, .moved_at = now});
    run_->first_rank[worker->connection] = first;
    run_->unanswered.insert(worker->connection);
    SendPrepare(*worker, first, count);
  }
}

// The plan, then the tokens of this worker's ranks.
void Leader::SendPrepare(const Worker& worker, int first_rank, int ranks) {
  const Plan& plan = run_->plan;
  v1::Prepare& prepare = *AddMessage(worker.connection, run_->epoch).mutable_prepare();
  prepare.set_run(run_->number);
  *prepare.mutable_plan() = ToRunPlan(plan);
  prepare.set_first_rank(static_cast<uint32_t>(first_rank));
  prepare.set_ranks(static_cast<uint32_t>(ranks));
  prepare.set_reserve_bytes(
      static_cast<uint64_t>((plan.predicted.peak_bytes + plan.ranks() - 1) / plan.ranks()) * ranks);
  std::vector<std::vector<uint32_t>> shards;
  for (int seat = first_rank; seat < first_rank + ranks; ++seat) {
    const std::vector<uint32_t>& ids =
        shards.emplace_back(ShardOf(plan.layout, plan.RankAt(seat), request_->request.tokens));
    for (size_t begin = 0; begin < ids.size(); begin += kShardIds) {
      const size_t end = std::min(ids.size(), begin + kShardIds);
      v1::Shard& shard = *AddMessage(worker.connection, run_->epoch).mutable_shard();
      shard.set_run(run_->number);
      shard.set_rank(static_cast<uint32_t>(seat));
      shard.set_begin(begin);
      shard.mutable_ids()->Add(ids.begin() + static_cast<ptrdiff_t>(begin),
                               ids.begin() + static_cast<ptrdiff_t>(end));
    }
  }
  run_->expected_hash[worker.connection] = RunHash(plan, first_rank, shards);
}

bool Leader::IsOfRun(const v1::WorkerMessage& message, uint64_t run) const {
  return run_.has_value() && run == run_->number && message.epoch() == run_->epoch;
}

void Leader::OnPrepared(Worker& worker, const v1::Prepared& message, absl::Time now) {
  if (run_->phase != Phase::kPreparing || !run_->unanswered.contains(worker.connection)) return;
  if (const absl::Status status = FromOutcome(message.outcome()); !status.ok()) {
    if (MayGoBetterAgain(status.code())) return Lose({worker.connection}, std::string(status.message()), now);
    AnswerRequest(Named(worker.offer.name(), status));
    return StopRun(now);
  }
  const int first = run_->first_rank.at(worker.connection);
  const auto seats = std::count_if(run_->seats.begin(), run_->seats.end(),
                                   [&](const Seat& seat) { return seat.worker == worker.connection; });
  if (message.hash() != run_->expected_hash.at(worker.connection) || message.addresses_size() != seats) {
    return Lose({worker.connection}, "it prepared another run than the one it was sent", now);
  }
  run_->unanswered.erase(worker.connection);
  for (int i = 0; i < message.addresses_size(); ++i) run_->seats[first + i].address = message.addresses(i);
  if (run_->unanswered.empty()) SendRun(now);
}

void Leader::SendRun(absl::Time now) {
  run_->phase = Phase::kRunning;
  for (Seat& seat : run_->seats) seat.moved_at = now;
  std::map<std::string, int> host_numbers;
  std::vector<int> host_of_rank;
  for (int rank = 0; rank < run_->plan.ranks(); ++rank) {
    const std::string& host = workers_.at(run_->seats[run_->plan.SeatOf(rank)].worker).offer.host();
    host_of_rank.push_back(host_numbers.emplace(host, std::ssize(host_numbers)).first->second);
  }
  run_->probes = survey_.Ask(std::move(host_of_rank));
  for (const auto& [connection, first_rank] : run_->first_rank) {
    v1::Run& run = *AddMessage(connection, run_->epoch).mutable_run();
    run.set_run(run_->number);
    for (int rank = 0; rank < run_->plan.ranks(); ++rank) {
      run.add_addresses(run_->seats[run_->plan.SeatOf(rank)].address);
    }
    for (const LinkProbe& probe : run_->probes.pairs) {
      run.add_probes()->mutable_peers()->Assign(probe.peer_of_rank.begin(), probe.peer_of_rank.end());
    }
  }
}

void Leader::OnProgress(const Worker& worker, const v1::WorkerProgress& message, absl::Time now) {
  if (run_->phase != Phase::kRunning) return;
  for (const v1::WorkerProgress::Rank& rank : message.ranks()) {
    if (rank.rank() >= run_->seats.size() || run_->seats[rank.rank()].worker != worker.connection) continue;
    Seat& seat = run_->seats[rank.rank()];
    if (rank.operations() > seat.operations) {
      seat.operations = rank.operations();
      seat.moved_at = now;
    }
    seat.computing = rank.computing();
    seat.layers_done =
        std::max(seat.layers_done, std::min(static_cast<int>(rank.layers_done()), options_.layers));
  }
  const auto last =
      std::min_element(run_->seats.begin(), run_->seats.end(),
                       [](const Seat& a, const Seat& b) { return a.layers_done < b.layers_done; });
  if (last->layers_done <= run_->layers_done) return;
  run_->layers_done = last->layers_done;
  actions_.push_back(LayersDone{request_->ticket, run_->layers_done});
}

void Leader::OnRankDone(const Worker& worker, const v1::RankDone& message, absl::Time now) {
  if (run_->phase != Phase::kRunning || message.rank() >= run_->seats.size()) return;
  Seat& seat = run_->seats[message.rank()];
  if (seat.worker != worker.connection || seat.done) return;
  if (const absl::Status status = FromOutcome(message.outcome()); !status.ok()) {
    const absl::Status named =
        Named(worker.offer.name(),
              absl::Status(status.code(), absl::StrCat("rank ", message.rank(), ": ", status.message())));
    if (MayGoBetterAgain(status.code())) return EndEpoch(std::string(named.message()), now);
    AnswerRequest(named);
    return StopRun(now);
  }
  seat.done = true;
  seat.stats = FromProto(message.stats());
  seat.links = FromProto(message.links());
  seat.probe_seconds = message.probe_seconds();
  if (message.logits_size() > 0) run_->logits.assign(message.logits().begin(), message.logits().end());
  if (std::all_of(run_->seats.begin(), run_->seats.end(), [](const Seat& each) { return each.done; })) {
    FinishRun(now);
  }
}

void Leader::FinishRun(absl::Time now) {
  Result result{.plan = std::move(run_->plan), .logits = std::move(run_->logits)};
  result.seconds = absl::ToDoubleSeconds(now - run_->begin);
  TakeLinks(result);
  for (const Seat& seat : run_->seats) {
    result.ranks.push_back(seat.stats);
    const v1::Join& offer = workers_.at(seat.worker).offer;
    result.peak_flops += offer.peak_flops() / offer.ranks();
  }
  for (const auto& [connection, first_rank] : run_->first_rank) {
    AddMessage(connection, run_->epoch).mutable_finish()->set_run(run_->number);
  }
  run_.reset();
  if (static_cast<int64_t>(result.logits.size()) == options_.vocab) {
    AnswerRequest(std::move(result));
  } else {
    AnswerRequest(
        absl::InternalError(absl::StrCat("the run ended with ", result.logits.size(), " logits instead of ",
                                         options_.vocab, "; this is a bug of Meshfill: please report it")));
  }
  LetGoOfLeaving();
  StartNext(now);
}

// What the run's ranks measured is for the plans to come; the time that it took is none of the request's.
void Leader::TakeLinks(Result& result) {
  if (run_->probes.pairs.empty()) return;
  std::vector<LinkSurvey::RankLinks> by_rank;
  double seconds = 0;
  for (int rank = 0; rank < result.plan.ranks(); ++rank) {
    Seat& seat = run_->seats[result.plan.SeatOf(rank)];
    by_rank.push_back(std::move(seat.links));
    if (seat.probe_seconds > seconds && seat.probe_seconds < result.seconds) seconds = seat.probe_seconds;
  }
  Log(absl::StrCat(survey_.Take(run_->probes, by_rank), "; it took ",
                   absl::FormatDuration(absl::Trunc(absl::Seconds(seconds), absl::Milliseconds(1)))));
  result.seconds -= seconds;
  result.probed = true;
}

void Leader::EndEpoch(const std::string& why, absl::Time now) {
  const bool was_running = run_->phase == Phase::kRunning;
  membership_changed_ = true;
  Log(absl::StrCat("epoch ", run_->epoch, " ended in run ", run_->number, ": ", LogQuote(why)));
  BeginStopping(now);
  for (Connection connection : run_->unanswered) {
    v1::Abort& abort = *AddMessage(connection, run_->epoch).mutable_abort();
    abort.set_run(run_->number);
    abort.set_reason(why);
  }
  if (was_running && ++request_->epochs_ended >= kMaxEpochsEnded) {
    AnswerRequest(absl::InternalError(
        absl::StrCat("request ", request_->request.id, " ended ", kMaxEpochsEnded,
                     " epochs of the pool and is refused as poisonous; the last one: ", why)));
  } else {
    request_->waiting_since = now;
  }
  StoppingMayBeOver(now);
}

void Leader::StopRun(absl::Time now) {
  BeginStopping(now);
  for (Connection connection : run_->unanswered) {
    AddMessage(connection, run_->epoch).mutable_cancel()->set_run(run_->number);
  }
  StoppingMayBeOver(now);
}

// Everybody who takes part and is still in the pool must confirm.
void Leader::BeginStopping(absl::Time now) {
  run_->phase = Phase::kStopping;
  run_->deadline = now + options_.stop_timeout;
  run_->unanswered.clear();
  for (const auto& [connection, first_rank] : run_->first_rank) {
    if (workers_.contains(connection)) run_->unanswered.insert(connection);
  }
}

void Leader::OnStopped(Connection connection, absl::Time now) {
  if (run_->phase != Phase::kStopping) return;
  run_->unanswered.erase(connection);
  StoppingMayBeOver(now);
}

void Leader::StoppingMayBeOver(absl::Time now) {
  if (!run_->unanswered.empty()) return;
  run_.reset();
  LetGoOfLeaving();
  StartNext(now);
}

// Ends what takes too long.
void Leader::CheckProgress(absl::Time now) {
  if (request_.has_value() && !run_.has_value() && now - request_->waiting_since >= options_.empty_timeout) {
    AnswerRequest(absl::UnavailableError(absl::StrCat("the pool has no workers, and none joined within ",
                                                      absl::FormatDuration(options_.empty_timeout),
                                                      "; start some, or try again later")));
  }
  if (!run_.has_value()) return;
  if (run_->phase != Phase::kRunning) {
    if (now < run_->deadline) return;
    const char* why =
        run_->phase == Phase::kPreparing ? "it did not prepare in time" : "it did not stop in time";
    return Lose(std::set<Connection>(run_->unanswered), why, now);
  }
  std::set<Connection> hung;
  absl::Time last_move = absl::InfinitePast();
  for (const Seat& seat : run_->seats) {
    if (seat.done) continue;
    last_move = std::max(last_move, seat.moved_at);
    if (seat.computing && now - seat.moved_at >= run_->hang_timeout) hung.insert(seat.worker);
  }
  if (!hung.empty()) {
    return Lose(hung,
                absl::StrCat("its compute loop stood still for ", absl::FormatDuration(run_->hang_timeout)),
                now);
  }
  // All wait for each other and no stream has ended: chunks get lost between them.
  if (now - last_move >= 2 * run_->hang_timeout) EndEpoch("no rank gets on", now);
}

}  // namespace meshfill
