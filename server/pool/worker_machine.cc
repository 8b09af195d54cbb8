#include "server/pool/worker_machine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/observe/log.h"
#include "server/pool/run_plan.h"

namespace meshfill {

void WorkerMachine::Start(absl::Time now) { connect_at_ = now; }

void WorkerMachine::OnTick(absl::Time now, const std::vector<RankProgress>& progress) {
  if (link_ == Link::kAway && !run_.has_value() && now >= connect_at_) {
    link_ = Link::kJoining;
    heard_at_ = now;
    last_run_ = 0;
    actions_.push_back(Connect{++connection_});
    *AddMessage(epoch_).mutable_join() = options_.offer;
    return;
  }
  if (link_ != Link::kJoining && link_ != Link::kMember) return;
  if (now - heard_at_ >= options_.silence_timeout) {
    const Connection silent = connection_;
    Detach(absl::StrCat("the leader was silent for ", absl::FormatDuration(options_.silence_timeout)), now);
    actions_.push_back(Disconnect{silent});
    return;
  }
  if (link_ != Link::kMember || now - last_progress_ < options_.progress_interval) return;
  last_progress_ = now;
  v1::WorkerProgress& message = *AddMessage(run_.has_value() ? run_->part.epoch : epoch_).mutable_progress();
  if (!run_.has_value() || run_->phase != Phase::kRunning) return;
  message.set_run(run_->part.number);
  for (const RankProgress& each : progress) {
    v1::WorkerProgress::Rank& rank = *message.add_ranks();
    rank.set_rank(static_cast<uint32_t>(each.rank));
    rank.set_layers_done(static_cast<uint32_t>(each.layers_done));
    rank.set_operations(each.operations);
    rank.set_computing(each.computing);
  }
}

void WorkerMachine::OnMessage(Connection connection, const v1::LeaderMessage& message, absl::Time now) {
  if (connection != connection_ || (link_ != Link::kJoining && link_ != Link::kMember)) return;
  heard_at_ = now;
  epoch_ = std::max(epoch_, message.epoch());
  switch (message.body_case()) {
    case v1::LeaderMessage::kWelcome:
      if (link_ == Link::kMember) break;
      link_ = Link::kMember;
      backoff_ = absl::ZeroDuration();
      last_trouble_.clear();
      Log("joined the pool");
      if (draining_) AddMessage(epoch_).mutable_leave();
      break;
    case v1::LeaderMessage::kRefused:
      OnRefused(message.refused(), now);
      break;
    case v1::LeaderMessage::kPrepare:
      OnPrepare(message.prepare(), message.epoch());
      break;
    case v1::LeaderMessage::kShard:
      OnShard(message.shard());
      break;
    case v1::LeaderMessage::kRun:
      OnRun(message.run());
      break;
    case v1::LeaderMessage::kFinish:
      OnFinish(message.finish().run());
      break;
    case v1::LeaderMessage::kCancel:
      OnStop(message.cancel().run(), message.epoch(), "the request was cancelled");
      break;
    case v1::LeaderMessage::kAbort:
      OnStop(message.abort().run(), message.epoch(), message.abort().reason());
      break;
    case v1::LeaderMessage::kGoodbye:
      OnGoodbye();
      break;
    case v1::LeaderMessage::kHeartbeat:
    case v1::LeaderMessage::BODY_NOT_SET:
      break;
  }
}

void WorkerMachine::OnDisconnected(Connection connection, const absl::Status& why, absl::Time now) {
  if (connection != connection_ || (link_ != Link::kJoining && link_ != Link::kMember)) return;
  Detach(absl::StrCat("the control stream ended: ", why.message()), now);
}

void WorkerMachine::OnRefused(const v1::Refused& refused, absl::Time now) {
  if (link_ != Link::kJoining) return;
  if (!refused.retry()) {
    link_ = Link::kExited;
    actions_.push_back(Disconnect{connection_});
    actions_.push_back(Exit{
        absl::FailedPreconditionError(absl::StrCat("the leader refused this worker: ", refused.reason()))});
    return;
  }
  const Connection refused_connection = connection_;
  Detach(refused.reason(), now);
  actions_.push_back(Disconnect{refused_connection});
}

// Away from the leader: what runs stops, and then the worker tries again.
void WorkerMachine::Detach(const std::string& why, absl::Time now) {
  if (link_ == Link::kMember) {
    Log(absl::StrCat("left without the leader: ", LogQuote(why)));
  } else if (why != last_trouble_) {  // once, however often it tries
    Log(absl::StrCat("cannot join yet: ", LogQuote(why)));
    last_trouble_ = why;
  }
  link_ = Link::kAway;
  backoff_ = std::clamp(2 * backoff_, options_.least_backoff, options_.most_backoff);
  connect_at_ = now + backoff_;
  if (run_.has_value()) {
    run_->confirm = false;
    StopActiveRun("the leader is gone");
  }
  MayExit();
}

void WorkerMachine::Drain(absl::Time now) {
  if (draining_) return;
  draining_ = true;
  if (link_ == Link::kMember) AddMessage(epoch_).mutable_leave();
  MayExit();
}

void WorkerMachine::OnGoodbye() {
  if (link_ != Link::kMember) return;
  link_ = Link::kAway;
  connect_at_ = absl::InfiniteFuture();
  actions_.push_back(Disconnect{connection_});
  MayExit();
}

// A draining worker without a leader has nothing left to do once its host stands still.
void WorkerMachine::MayExit() {
  if (!draining_ || link_ != Link::kAway || run_.has_value()) return;
  link_ = Link::kExited;
  actions_.push_back(Exit{absl::OkStatus()});
}

void WorkerMachine::OnPrepare(const v1::Prepare& message, uint64_t epoch) {
  if (link_ != Link::kMember || message.run() <= last_run_ || run_.has_value()) return;
  last_run_ = message.run();
  const uint64_t ranks = message.ranks();
  absl::StatusOr<Plan> plan = FromRunPlan(message.plan());
  absl::Status status = plan.status();
  if (status.ok() && (ranks < 1 || ranks > options_.offer.ranks() ||
                      message.first_rank() + ranks > static_cast<uint64_t>(plan->ranks()))) {
    status = absl::InternalError(absl::StrCat("the leader gave ", ranks, " ranks from ", message.first_rank(),
                                              " to a worker of ", options_.offer.ranks()));
  }
  const uint64_t offered = options_.offer.memory_bytes();
  if (status.ok() && offered != 0 && message.reserve_bytes() > offered) {
    status = absl::FailedPreconditionError(absl::StrCat("the run needs ", message.reserve_bytes(),
                                                        " bytes, this worker has ", offered,
                                                        "; shorten the prompt or add ranks"));
  }
  if (!status.ok()) {
    v1::WorkerMessage& reply = AddMessage(epoch);
    reply.mutable_prepared()->set_run(message.run());
    *reply.mutable_prepared()->mutable_outcome() = ToOutcome(status);
    return;
  }
  run_.emplace(ActiveRun{.part = {.number = message.run(),
                                  .epoch = epoch,
                                  .plan = *std::move(plan),
                                  .first_rank = static_cast<int>(message.first_rank()),
                                  .reserve_bytes = static_cast<int64_t>(message.reserve_bytes()),
                                  .shards = std::vector<std::vector<uint32_t>>(ranks)}});
  ShardsMayBeComplete();  // all chunks may be empty
}

void WorkerMachine::OnShard(const v1::Shard& message) {
  if (!run_.has_value() || run_->part.number != message.run() || run_->phase != Phase::kReceiving) return;
  const int64_t index = int64_t{message.rank()} - run_->part.first_rank;
  if (index < 0 || index >= static_cast<int64_t>(run_->part.shards.size())) return;
  std::vector<uint32_t>& shard = run_->part.shards[index];
  if (message.begin() != shard.size()) return;  // it came before
  shard.insert(shard.end(), message.ids().begin(), message.ids().end());
  ShardsMayBeComplete();
}

void WorkerMachine::ShardsMayBeComplete() {
  RunPart& part = run_->part;
  for (size_t i = 0; i < part.shards.size(); ++i) {
    const int rank = part.plan.RankAt(part.first_rank + static_cast<int>(i));
    const int64_t tokens = part.plan.layout.ChunkTokens(rank);
    if (static_cast<int64_t>(part.shards[i].size()) < tokens) return;
  }
  run_->phase = Phase::kPreparing;
  run_->hash = RunHash(part.plan, part.first_rank, part.shards);
  std::vector<std::vector<uint32_t>> shards = std::exchange(part.shards, {});
  PrepareRun& prepare = std::get<PrepareRun>(actions_.emplace_back(PrepareRun{part}));
  prepare.part.shards = std::move(shards);
}

void WorkerMachine::OnRunPrepared(uint64_t run, absl::StatusOr<std::vector<std::string>> addresses) {
  if (!run_.has_value() || run_->part.number != run || run_->phase != Phase::kPreparing) return;
  run_->phase = Phase::kPrepared;
  v1::WorkerMessage& message = AddMessage(run_->part.epoch);
  v1::Prepared& prepared = *message.mutable_prepared();
  prepared.set_run(run);
  *prepared.mutable_outcome() = ToOutcome(addresses.status());
  if (!addresses.ok()) return;  // the leader ends the run
  for (const std::string& address : *addresses) prepared.add_addresses(address);
  prepared.set_hash(run_->hash);
}

void WorkerMachine::OnRun(const v1::Run& message) {
  if (!run_.has_value() || run_->part.number != message.run() || run_->phase != Phase::kPrepared) return;
  run_->phase = Phase::kRunning;
  StartRun start{message.run(), {message.addresses().begin(), message.addresses().end()}, {}};
  for (const v1::LinkProbe& probe : message.probes()) {
    start.probes.push_back({{probe.peers().begin(), probe.peers().end()}});
    // All ranks are told the same: where it is no pairing, none takes part.
    if (!IsPairing(start.probes.back(), run_->part.plan.ranks())) start.probes.clear();
    if (start.probes.empty()) break;
  }
  actions_.push_back(std::move(start));
}

void WorkerMachine::OnRankDone(uint64_t run, int rank, absl::StatusOr<RankOutput> output) {
  if (!run_.has_value() || run_->part.number != run || run_->phase != Phase::kRunning) return;
  v1::RankDone& done = *AddMessage(run_->part.epoch).mutable_rank_done();
  done.set_run(run);
  done.set_rank(static_cast<uint32_t>(rank));
  *done.mutable_outcome() = ToOutcome(output.status());
  if (!output.ok()) return;
  *done.mutable_stats() = ToProto(output->stats);
  done.mutable_logits()->Add(output->logits.begin(), output->logits.end());
  *done.mutable_links() = ToProto(output->links);
  done.set_probe_seconds(output->probe_seconds);
}

void WorkerMachine::OnFinish(uint64_t run) {
  if (!run_.has_value() || run_->part.number != run || run_->phase != Phase::kRunning) return;
  actions_.push_back(ReleaseRun{run});
  run_.reset();
  MayExit();
}

void WorkerMachine::OnStop(uint64_t run, uint64_t epoch, const std::string& reason) {
  if (link_ != Link::kMember) return;
  last_run_ = std::max(last_run_, run);
  if (run_.has_value() && run_->part.number == run) {
    run_->confirm = true;
    return StopActiveRun(reason);
  }
  AddMessage(epoch).mutable_stopped()->set_run(run);  // it never began here, or is over
}

void WorkerMachine::StopActiveRun(const std::string& reason) {
  if (run_->phase == Phase::kStopping) return;
  const bool host_knows = run_->phase != Phase::kReceiving;
  run_->phase = Phase::kStopping;
  if (host_knows) {
    actions_.push_back(StopRun{run_->part.number, reason});
    return;
  }
  if (run_->confirm) AddMessage(run_->part.epoch).mutable_stopped()->set_run(run_->part.number);
  run_.reset();
}

void WorkerMachine::OnRunStopped(uint64_t run, absl::Time now) {
  if (!run_.has_value() || run_->part.number != run) return;
  if (run_->confirm) AddMessage(run_->part.epoch).mutable_stopped()->set_run(run);
  run_.reset();
  if (link_ == Link::kAway) connect_at_ = std::max(connect_at_, now);
  MayExit();
}

std::vector<WorkerMachine::Action> WorkerMachine::TakeActions() { return std::exchange(actions_, {}); }

v1::WorkerMessage& WorkerMachine::AddMessage(uint64_t epoch) {
  Send& send = std::get<Send>(actions_.emplace_back(Send{}));
  send.message.set_epoch(epoch);
  return send.message;
}

}  // namespace meshfill
