#include "server/pool/worker/worker_machine.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/observe/log.h"
#include "server/pool/run_plan.h"

namespace meshfill {
namespace {

// More than any machine has. Sums of a few do not overflow.
constexpr uint64_t kMostBytes = uint64_t{1} << 60;
constexpr uint64_t kMostTokens = uint64_t{1} << 32;
constexpr uint32_t kMostPackRuns = 4096;
constexpr size_t kMostTroubles = 16;  // that a worker remembers to have logged

}  // namespace

void WorkerMachine::Start(absl::Time now) { connect_at_ = now; }

int64_t WorkerMachine::reserved_bytes() const {
  int64_t bytes = 0;
  for (const auto& [number, run] : runs_) bytes += run.part.reserve_bytes;
  return bytes;
}

WorkerMachine::ActiveRun* WorkerMachine::Find(uint64_t run, Phase phase) {
  const auto entry = runs_.find(run);
  return entry != runs_.end() && entry->second.phase == phase ? &entry->second : nullptr;
}

void WorkerMachine::OnTick(absl::Time now) {
  if (now >= drain_until_ && link_ != Link::kExited) {
    link_ = Link::kExited;
    actions_.push_back(Exit{
        absl::DeadlineExceededError(absl::StrCat("the leader had not let go after limits.drain_timeout of ",
                                                 absl::FormatDuration(options_.drain_timeout)))});
    return;
  }
  if (link_ == Link::kAway && runs_.empty() && now >= connect_at_) {
    link_ = Link::kJoining;
    heard_at_ = now;
    last_run_ = 0;
    actions_.push_back(Connect{++connection_});
    *AddMessage(epoch_).mutable_join() = options_.offer;
    return;
  }
  if (link_ != Link::kJoining && link_ != Link::kMember) return;
  // The leader, who hears of all workers, is to notice first where the network is at fault.
  const absl::Duration longest_silence = 2 * options_.silence_timeout;
  if (now - heard_at_ >= longest_silence) {
    const Connection silent = connection_;
    Detach(absl::StrCat("the leader was silent for ", absl::FormatDuration(longest_silence)), now);
    actions_.push_back(Disconnect{silent});
    return;
  }
  if (link_ != Link::kMember || now - last_progress_ < options_.progress_interval) return;
  last_progress_ = now;
  SendProgress();
}

// A message for each run that computes; without one, a sign of life.
void WorkerMachine::SendProgress() {
  const ProgressOfRuns progress = progress_();
  bool computes = false;
  for (const auto& [number, run] : runs_) {
    if (run.phase != Phase::kRunning) continue;
    computes = true;
    AddProgress(number, run, progress);
  }
  if (!computes) AddMessage(epoch_).mutable_progress();
}

void WorkerMachine::SendProgressOf(uint64_t number) {
  if (const ActiveRun* run = Find(number, Phase::kRunning)) AddProgress(number, *run, progress_());
}

void WorkerMachine::AddProgress(uint64_t number, const ActiveRun& run, const ProgressOfRuns& progress) {
  v1::WorkerProgress& message = *AddMessage(run.part.epoch).mutable_progress();
  message.set_run(number);
  const auto ranks = progress.find(number);
  if (ranks == progress.end()) return;
  for (const RankProgress& each : ranks->second) {
    v1::WorkerProgress::Rank& rank = *message.add_ranks();
    rank.set_rank(static_cast<uint32_t>(each.rank));
    rank.set_layers_done(static_cast<uint32_t>(each.layers_done));
    rank.set_operations(each.operations);
    rank.set_computing(each.computing);
    rank.set_has_computed(each.has_computed);
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
      troubles_.clear();
      Log("joined the pool");
      actions_.push_back(AllKvEnds{});
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
    case v1::LeaderMessage::kPause:
      if (Find(message.pause().run(), Phase::kRunning) != nullptr) {
        actions_.push_back(PauseRun{message.pause().run(), message.pause().number()});
      }
      break;
    case v1::LeaderMessage::kPauseAt:
      if (Find(message.pause_at().run(), Phase::kRunning) != nullptr) {
        actions_.push_back(PauseRunAt{message.pause_at().run(), message.pause_at().number(),
                                      static_cast<int64_t>(message.pause_at().messages())});
      }
      break;
    case v1::LeaderMessage::kResume:
      if (Find(message.resume().run(), Phase::kRunning) != nullptr) {
        actions_.push_back(ResumeRun{message.resume().run()});
      }
      break;
    case v1::LeaderMessage::kFinish:
      OnFinish(message.finish().run());
      break;
    case v1::LeaderMessage::kCancel:
      OnStop(message.cancel().run(), message.epoch(), "the request was cancelled");
      break;
    case v1::LeaderMessage::kAbort:
      SendProgressOf(message.abort().run());
      OnStop(message.abort().run(), message.epoch(), message.abort().reason());
      break;
    case v1::LeaderMessage::kGoodbye:
      OnGoodbye();
      break;
    case v1::LeaderMessage::kKvLasts:
      actions_.push_back(KvLasts{message.kv_lasts().lease(), absl::Seconds(message.kv_lasts().seconds())});
      break;
    case v1::LeaderMessage::kKvEnds:
      OnKvEnds(message.kv_ends().lease());
      break;
    case v1::LeaderMessage::kKvRunEnds:
      actions_.push_back(KvRunEnds{message.kv_run_ends().run()});
      break;
    case v1::LeaderMessage::kForgetSpeed:
      actions_.push_back(ForgetSpeed{});
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

// The host hears of it behind the Prepare of a run that was to keep K and V; a run that has none yet keeps
// what it caches alone.
void WorkerMachine::OnKvEnds(const std::string& lease) {
  for (auto& [number, run] : runs_) {
    std::optional<HeldKv::Keeping>& kept = run.part.keep_kv;
    if (run.phase != Phase::kReceiving || !kept.has_value() || kept->lease != lease) continue;
    if (!kept->cache) kept.reset();
    if (kept.has_value()) kept->lease.clear();
  }
  actions_.push_back(KvEnds{lease});
}

// Away from the leader: what runs stops, and then the worker tries again.
void WorkerMachine::Detach(const std::string& why, absl::Time now) {
  if (link_ == Link::kMember) {
    Log(absl::StrCat("left without the leader: ", LogQuote(why)), LogLevel::kWarning);
  } else if (!troubles_.contains(why)) {  // once, however often it tries and however they take turns
    Log(absl::StrCat("cannot join yet: ", LogQuote(why)), LogLevel::kWarning);
    if (troubles_.size() == kMostTroubles) troubles_.clear();
    troubles_.insert(why);
  }
  link_ = Link::kAway;
  backoff_ = std::clamp(2 * backoff_, options_.least_backoff, options_.most_backoff);
  connect_at_ = now + backoff_;
  for (auto next = runs_.begin(); next != runs_.end();) {
    const auto run = next++;  // it may be gone after this
    run->second.confirm = false;
    StopRunning(run->first, "the leader is gone");
  }
  MaybeExit();
}

void WorkerMachine::Drain(absl::Time now) {
  if (draining_) return;
  draining_ = true;
  drain_until_ = now + options_.drain_timeout;
  if (link_ == Link::kMember) AddMessage(epoch_).mutable_leave();
  MaybeExit();
}

void WorkerMachine::OnGoodbye() {
  if (link_ != Link::kMember) return;
  link_ = Link::kAway;
  connect_at_ = absl::InfiniteFuture();
  actions_.push_back(Disconnect{connection_});
  MaybeExit();
}

// A draining worker without a leader has nothing left to do once its host stands still.
void WorkerMachine::MaybeExit() {
  if (!draining_ || link_ != Link::kAway || !runs_.empty()) return;
  link_ = Link::kExited;
  actions_.push_back(Exit{absl::OkStatus()});
}

void WorkerMachine::OnPrepare(const v1::Prepare& message, uint64_t epoch) {
  if (link_ != Link::kMember || message.run() <= last_run_) return;
  last_run_ = message.run();
  const uint64_t ranks = message.ranks();
  absl::StatusOr<Plan> plan = FromRunPlan(message.plan());
  absl::Status status = plan.status();
  if (status.ok() && (ranks < 1 || ranks > options_.offer.ranks() ||
                      message.first_rank() + ranks > static_cast<uint64_t>(plan->ranks()))) {
    status = absl::InternalError(absl::StrCat("the leader gave ", ranks, " ranks from ", message.first_rank(),
                                              " to a worker of ", options_.offer.ranks()));
  }
  if (status.ok() && message.local_rank() + ranks > options_.offer.ranks()) {
    status =
        absl::InternalError(absl::StrCat("the leader gave ", ranks, " ranks from its rank ",
                                         message.local_rank(), " to a worker of ", options_.offer.ranks()));
  }
  if (status.ok() && message.pack() != 0 &&
      (plan->ranks() != 1 || message.pack_runs() < 1 || message.pack_runs() > kMostPackRuns ||
       message.weight_shares() > 0 || message.tokens_ahead() > 0)) {
    status = absl::InternalError(
        absl::StrCat("the leader lets ", message.pack_runs(), " runs of ", plan->ranks(),
                     " ranks share a pass, which only whole prompts on one rank with all weights do"));
  }
  std::vector<HeldKv::RunTokens> prefix;
  uint64_t prefix_tokens = 0;
  for (const v1::RunTokens& of_run : message.prefix()) {
    prefix.push_back({.run = of_run.run(), .tokens = static_cast<int64_t>(of_run.tokens())});
    prefix_tokens += std::min(of_run.tokens(), kMostTokens);
  }
  if (status.ok() && prefix_tokens != static_cast<uint64_t>(plan->cached_tokens)) {
    status =
        absl::InternalError(absl::StrCat("the leader names ", prefix_tokens, " tokens of earlier runs for ",
                                         plan->cached_tokens, " cached ones"));
  }
  if (status.ok() &&
      (message.more_pieces() != (message.tokens_ahead() > 0) || message.tokens_ahead() > kMostTokens)) {
    status = absl::InternalError(absl::StrCat("the leader says that ", message.tokens_ahead(),
                                              " tokens of the prompt come in later runs, and that there ",
                                              message.more_pieces() ? "are such" : "is none"));
  }
  const uint64_t offered = options_.offer.memory_bytes() != 0 ? options_.offer.memory_bytes() : kMostBytes;
  const uint64_t reserved = static_cast<uint64_t>(reserved_bytes());
  if (status.ok() && (reserved > offered || message.reserve_bytes() > offered - reserved)) {
    status = absl::FailedPreconditionError(
        absl::StrCat("the run needs ", message.reserve_bytes(), " bytes, this worker has ", offered,
                     reserved > 0 ? absl::StrCat(", ", reserved, " of them in use by other runs") : "",
                     "; shorten the prompt or add ranks"));
  }
  const RunWeights weights = {.share = {.index = static_cast<int>(message.weight_share()),
                                        .of = static_cast<int>(message.weight_shares())},
                              .head = static_cast<int>(message.weight_head_share())};
  if (status.ok() && message.weight_shares() > 0 &&
      (message.weight_shares() > static_cast<uint32_t>(plan->ranks()) ||
       std::max(message.weight_share(), message.weight_head_share()) >= message.weight_shares())) {
    status = absl::InternalError(absl::StrCat("the leader gave share ", message.weight_share(), " of ",
                                              message.weight_shares(), " of the weights to a worker of ",
                                              plan->ranks(), " ranks, the LM head to share ",
                                              message.weight_head_share()));
  }
  if (!status.ok()) return RefuseRun(message.run(), epoch, status);
  ActiveRun run{.part = {.number = message.run(),
                         .epoch = epoch,
                         .plan = *std::move(plan),
                         .first_rank = static_cast<int>(message.first_rank()),
                         .reserve_bytes = static_cast<int64_t>(message.reserve_bytes()),
                         .keep_kv = std::nullopt,
                         .weights = weights,
                         .prefix = std::move(prefix),
                         .tokens_ahead = static_cast<int64_t>(message.tokens_ahead()),
                         .local_rank = static_cast<int>(message.local_rank()),
                         .pack = std::nullopt,
                         .shards = std::vector<std::vector<uint32_t>>(ranks)}};
  if (message.pack() != 0) {
    run.part.pack = {.number = message.pack(), .runs = static_cast<int>(message.pack_runs())};
  }
  if (message.has_keep_kv()) {
    run.part.keep_kv = {.lease = message.keep_kv().lease(),
                        .tenant = message.keep_kv().tenant(),
                        .lasts = absl::Seconds(message.keep_kv().lasts_seconds()),
                        .cache = message.keep_kv().cache()};
  }
  MaybePrepare(runs_.emplace(message.run(), std::move(run)).first->second);  // all chunks may be empty
}

void WorkerMachine::RefuseRun(uint64_t number, uint64_t epoch, const absl::Status& why) {
  v1::Prepared& prepared = *AddMessage(epoch).mutable_prepared();
  prepared.set_run(number);
  *prepared.mutable_outcome() = ToOutcome(why);
  runs_.erase(number);
}

void WorkerMachine::OnShard(const v1::Shard& message) {
  ActiveRun* run = Find(message.run(), Phase::kReceiving);
  if (run == nullptr) return;
  const int64_t index = int64_t{message.rank()} - run->part.first_rank;
  if (index < 0 || index >= static_cast<int64_t>(run->part.shards.size())) return;
  std::vector<uint32_t>& shard = run->part.shards[index];
  if (message.begin() != shard.size()) return;  // it came before
  const int64_t tokens =
      run->part.plan.layout.ChunkTokens(run->part.plan.RankAt(static_cast<int>(message.rank())));
  if (message.ids_size() > tokens - std::ssize(shard)) {
    return RefuseRun(message.run(), run->part.epoch,
                     absl::InternalError(absl::StrCat("the leader sent more than the ", tokens,
                                                      " tokens of rank ", message.rank())));
  }
  shard.insert(shard.end(), message.ids().begin(), message.ids().end());
  MaybePrepare(*run);
}

void WorkerMachine::MaybePrepare(ActiveRun& run) {
  RunPart& part = run.part;
  for (size_t i = 0; i < part.shards.size(); ++i) {
    const int rank = part.plan.RankAt(part.first_rank + static_cast<int>(i));
    const int64_t tokens = part.plan.layout.ChunkTokens(rank);
    if (static_cast<int64_t>(part.shards[i].size()) < tokens) return;
  }
  run.phase = Phase::kPreparing;
  run.hash = RunHash(part.plan, part.first_rank, part.shards);
  std::vector<std::vector<uint32_t>> shards = std::exchange(part.shards, {});
  PrepareRun& prepare = std::get<PrepareRun>(actions_.emplace_back(PrepareRun{part}));
  prepare.part.shards = std::move(shards);
}

void WorkerMachine::OnRunPrepared(uint64_t number, absl::StatusOr<std::vector<std::string>> addresses) {
  ActiveRun* run = Find(number, Phase::kPreparing);
  if (run == nullptr) return;
  run->phase = Phase::kPrepared;
  v1::Prepared& prepared = *AddMessage(run->part.epoch).mutable_prepared();
  prepared.set_run(number);
  *prepared.mutable_outcome() = ToOutcome(addresses.status());
  if (!addresses.ok()) return;  // the leader ends the run
  for (const std::string& address : *addresses) prepared.add_addresses(address);
  prepared.set_hash(run->hash);
}

void WorkerMachine::OnRun(const v1::Run& message) {
  ActiveRun* run = Find(message.run(), Phase::kPrepared);
  if (run == nullptr) return;
  run->phase = Phase::kRunning;
  StartRun start{message.run(), {message.addresses().begin(), message.addresses().end()}, {}};
  for (const v1::LinkProbe& probe : message.probes()) {
    start.probes.push_back({{probe.peers().begin(), probe.peers().end()}});
    // All ranks are told the same: where it is no pairing, none takes part.
    if (!IsPairing(start.probes.back(), run->part.plan.ranks())) start.probes.clear();
    if (start.probes.empty()) break;
  }
  actions_.push_back(std::move(start));
}

void WorkerMachine::OnRankDone(uint64_t number, int rank, absl::StatusOr<RankOutput> output) {
  const ActiveRun* run = Find(number, Phase::kRunning);
  if (run == nullptr) return;
  if (!output.ok()) SendProgressOf(number);
  v1::RankDone& done = *AddMessage(run->part.epoch).mutable_rank_done();
  done.set_run(number);
  done.set_rank(static_cast<uint32_t>(rank));
  *done.mutable_outcome() = ToOutcome(output.status());
  if (!output.ok()) return;
  *done.mutable_stats() = ToProto(output->stats);
  done.mutable_logits()->Add(output->logits.begin(), output->logits.end());
  *done.mutable_links() = ToProto(output->links);
  done.set_probe_seconds(output->probe_seconds);
}

void WorkerMachine::OnRunPaused(uint64_t number, uint64_t pause, int64_t messages, bool still) {
  const ActiveRun* run = Find(number, Phase::kRunning);
  if (run == nullptr) return;
  v1::Paused& paused = *AddMessage(run->part.epoch).mutable_paused();
  paused.set_run(number);
  paused.set_number(pause);
  paused.set_messages(static_cast<uint64_t>(messages));
  paused.set_still(still);
}

void WorkerMachine::OnFinish(uint64_t number) {
  if (Find(number, Phase::kRunning) == nullptr) return;
  actions_.push_back(ReleaseRun{number});
  runs_.erase(number);
  MaybeExit();
}

void WorkerMachine::OnStop(uint64_t number, uint64_t epoch, const std::string& reason) {
  if (link_ != Link::kMember) return;
  last_run_ = std::max(last_run_, number);
  const auto run = runs_.find(number);
  if (run != runs_.end()) {
    run->second.confirm = true;
    return StopRunning(number, reason);
  }
  AddMessage(epoch).mutable_stopped()->set_run(number);  // it never began here, or is over
}

void WorkerMachine::StopRunning(uint64_t number, const std::string& reason) {
  ActiveRun& run = runs_.at(number);
  if (run.phase == Phase::kStopping) return;
  const bool host_knows = run.phase != Phase::kReceiving;
  run.phase = Phase::kStopping;
  if (host_knows) {
    actions_.push_back(StopRun{number, reason});
    return;
  }
  if (run.confirm) AddMessage(run.part.epoch).mutable_stopped()->set_run(number);
  runs_.erase(number);
}

void WorkerMachine::OnRunStopped(uint64_t number, absl::Time now) {
  const auto run = runs_.find(number);
  if (run == runs_.end()) return;
  if (run->second.confirm) AddMessage(run->second.part.epoch).mutable_stopped()->set_run(number);
  runs_.erase(run);
  if (link_ == Link::kAway) connect_at_ = std::max(connect_at_, now);
  MaybeExit();
}

std::vector<WorkerMachine::Action> WorkerMachine::TakeActions() { return std::exchange(actions_, {}); }

v1::WorkerMessage& WorkerMachine::AddMessage(uint64_t epoch) {
  Send& send = std::get<Send>(actions_.emplace_back(Send{}));
  send.message.set_epoch(epoch);
  return send.message;
}

}  // namespace meshfill
