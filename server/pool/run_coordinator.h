// One run at the leader: one attempt at one request, over the workers that are there when it begins.
//
// Part of the leader's state machine (leader.h): events with their time go in, messages to the workers come
// out, and an outcome says what an event means beyond this run. A run knows nothing of other runs, nor of who
// else is in the pool. Not thread-safe.
//
//                        all Prepared, its turn    all RankDone
//     ──────► preparing ──────────────► running ────────────────► over   (Finish, Completed)
//                 │ Abort, Cancel          │ Abort, Cancel
//                 └────────► stopping ◄────┘
//                               │ every worker has confirmed, or is lost
//                               └────────────────────────────────► over
//
// Where a worker's messages of runs do not mix, a run begins paused, and a pause is an agreement of its
// workers on the place (message_gate.h). The leader lets go on what it knows to be alone.
//
//     going ──SetPaused──► asking ──all have answered──► halting ──all stand still──► still
//       ▲                    │ the furthest is told         │                           │
//       └────────SetPaused───┴──────────────────────────────┴───────────────────────────┘
#ifndef MESHFILL_SERVER_POOL_RUN_COORDINATOR_H_
#define MESHFILL_SERVER_POOL_RUN_COORDINATOR_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/model/weight_feed.h"
#include "engine/plan/plan.h"
#include "engine/run/rank_stats.h"
#include "kernels/paused_time.h"
#include "meshfill/v1/control.pb.h"
#include "server/pool/ended_epochs.h"
#include "server/pool/kv_directory.h"
#include "server/pool/leader_actions.h"
#include "server/pool/link_survey.h"
#include "server/pool/membership.h"

namespace meshfill {

// Activations that so many ranks of the plan take of their worker's memory.
int64_t ReservedBytes(const Plan& plan, int ranks);

class RunCoordinator {
 public:
  using Connection = LeaderActions::Connection;

  struct Pack {           // whose pass it shares, as Prepare has it
    uint64_t number = 0;  // 0: it shares none
    int local_rank = 0;   // its worker's rank
    int runs = 0;
  };
  struct Options {
    int layers = 1;  // the model's layers
    int64_t vocab = 1;
    bool shares_weights = false;  // the workers gather them from each other
    int64_t tokens_ahead = 0;     // prompt tokens of later runs; above 0: this run has no logits
    std::vector<int> pool_ranks;  // by seat: which of the pool's ranks sits there
    Pack pack = {};
    absl::Duration hang_timeout;
    absl::Duration prepare_timeout;  // plus a second for each million tokens
    absl::Duration stop_timeout;
  };
  enum class Phase { kPreparing, kRunning, kStopping };

  // ---- What an event means beyond this run.
  struct LayersDone {  // all ranks have done them
    int layers;
  };
  struct Completed {  // the run is over
    absl::StatusOr<RunResult> result;
  };
  struct RequestFailed {  // the request is to blame: no other run would do better
    absl::Status status;
    Connection unprepared = 0;  // the worker that could not prepare it, whatever the request is
  };
  struct RunFailed {  // the network or a peer is to blame: another run may do better
    std::string why;
  };
  struct WorkersFailed {  // they are to be taken out of the pool
    std::set<Connection> workers;
    std::string why;
    bool keep_out = false;  // keeps them out for a while: they would cost the next run its time, too
  };
  using Outcome =
      std::variant<std::monostate, LayersDone, Completed, RequestFailed, RunFailed, WorkersFailed>;

  // Sends Prepare and the tokens, which are those behind the plan's cached ones, to as many of `workers` as
  // the plan has ranks for. `actions` and `survey` outlive the run; `options` are copied.
  RunCoordinator(uint64_t number, uint64_t epoch, Plan plan, std::span<const uint32_t> tokens,
                 const std::vector<const Membership::Worker*>& workers, const KvDirectory::RunKv& kv,
                 const Options& options, LeaderActions& actions, LinkSurvey& survey, absl::Time now);

  // ---- Events. A message is of this run: its number and epoch are. `worker` takes part.
  Outcome OnPrepared(Connection worker, const v1::Prepared& message, absl::Time now);
  void OnPaused(Connection worker, const v1::Paused& message, absl::Time now);
  Outcome OnProgress(Connection worker, const v1::WorkerProgress& message, absl::Time now);
  Outcome OnRankDone(Connection worker, const v1::RankDone& message, absl::Time now);
  void OnStopped(Connection worker);
  // It is out of the pool: no longer waited for. The caller aborts the run unless it stops already.
  void OnWorkerLost(Connection worker);
  // The leader could hear nobody for so long, up to now.
  void OnLeaderStoodStill(absl::Duration stood, absl::Time now);
  // What has taken too long: workers, or the run. Nothing: all is in time.
  Outcome OnTick(absl::Time now) const;

  // Lets its ranks stand still, or go on. A run whose turn it is not begins no further than to be prepared.
  void SetPaused(bool paused, absl::Time now);
  bool paused() const { return pauses_.paused(); }
  // Whether its messages may be under way beside those of other runs.
  bool messages_mix() const { return messages_mix_; }
  // Whether it has no message under way, and none begins before SetPaused.
  bool StandsStill() const;

  // Stop the run: because it failed, or because its answer is out. Nothing happens while it stops already.
  void Abort(const std::string& why, absl::Time now);
  void Cancel(absl::Time now);

  uint64_t number() const { return number_; }
  uint64_t epoch() const { return epoch_; }
  Phase phase() const { return phase_; }
  // It was stopped, and all who take part have confirmed it or are lost.
  bool stopped() const { return phase_ == Phase::kStopping && unanswered_.empty(); }
  int layers_done() const { return layers_done_; }  // by all ranks, as far as they have said
  bool Has(Connection worker) const { return parts_.contains(worker); }
  // One of its workers, the same for all runs on the same workers; 0: all are lost.
  Connection a_worker() const { return parts_.empty() ? 0 : parts_.begin()->first; }
  // Whether a worker takes part, or took part until it was lost, in both.
  bool Shares(const RunCoordinator& other) const;
  // Where in the prompt the run is, were it to end now, if words of its ranks take no longer than `delay`.
  PromptPlace PlaceOfEnd(absl::Time now, absl::Duration delay) const;
  // Whether all ranks have said that they computed: none is still connecting to its peers.
  bool HasComputed() const;
  // Whether its ranks may have computed since then. What stood still when it was stopped computes no more.
  bool MayHaveComputed(absl::Time since) const {
    const bool still = phase_ == Phase::kStopping ? stopped_still_ : StandsStill();
    return !pauses_.PausedSince(since) || !still || (!messages_mix_ && still_since_ >= since);
  }
  int64_t reserved_bytes(Connection worker) const { return ReservedBytes(plan_, ranks(worker)); }
  // The worker's share of the weights, where the workers share them.
  WeightShare weight_share(Connection worker) const {
    return weight_shares_ > 0 ? WeightShare{parts_.at(worker).weight_share, weight_shares_} : WeightShare();
  }
  int first_rank(Connection worker) const { return parts_.at(worker).first_rank; }
  int ranks(Connection worker) const { return parts_.at(worker).ranks; }

 private:
  struct Part {  // one worker's part of the run
    std::string name;
    std::string host;
    double rank_peak_flops = 0;
    int first_rank = 0;
    int ranks = 0;
    uint64_t expected_hash = 0;
    bool over_gloo = false;  // its data plane
    bool encrypts = false;
    int weight_share = 0;        // where the workers share the weights
    std::string weight_address;  // where the others gather its share from
  };
  struct Seat {  // one rank's seat
    Connection worker = 0;
    std::string address;
    int layers_done = 0;
    uint64_t operations = 0;
    bool computing = false;
    bool has_computed = false;
    absl::Time moved_at;   // when `operations` last grew
    absl::Duration heard;  // what it had computed when it last said how far it is
    bool done = false;
    RankStats stats;
    LinkSurvey::RankLinks links;
    double probe_seconds = 0;
  };

  void SendPrepare(Connection worker, Part& part, std::span<const uint32_t> tokens,
                   const KvDirectory::RunKv& kv);
  // INVALID_ARGUMENT: what is wrong with one that a worker on CPUs has sent.
  absl::Status CheckAddresses(const Part& part, const v1::Prepared& message) const;
  void SendRun(absl::Time now);
  void SendPause(bool paused);
  void MaybeHalt(absl::Time now);  // once all have answered
  // How long its ranks have computed, without pauses.
  absl::Duration Computed(absl::Time now) const { return now - pauses_.Total(now) - runs_since_; }
  // How long it may wait for the others of its pass, which are still prepared.
  absl::Duration PackTimeout() const;
  Outcome Finish(absl::Time now);
  void TakeLinks(RunResult& result);
  void BeginStopping(absl::Time now);
  v1::LeaderMessage& AddMessage(Connection to) { return actions_.AddMessage(to, epoch_); }

  const uint64_t number_;
  const uint64_t epoch_;
  const Options options_;
  LeaderActions& actions_;
  LinkSurvey& survey_;
  const int membership_;  // of the pool when the run began, as the survey counts them
  Plan plan_;
  const absl::Time begin_;
  absl::Time runs_since_;  // by a clock that stands still in pauses
  absl::Time deadline_;    // until when the workers prepare, and later stop
  absl::Duration hang_timeout_;
  Phase phase_ = Phase::kPreparing;
  PausedTime pauses_;
  // A pause where messages do not mix.
  enum class Halt { kAsking, kHalting, kStill };
  bool messages_mix_ = true;
  uint64_t pause_number_ = 0;  // of the last one
  Halt halt_ = Halt::kStill;   // while it is paused
  absl::Time still_since_;
  bool stopped_still_ = false;        // whether it stood still when it was stopped
  std::set<Connection> not_paused_;   // workers that have not answered what they were asked or told last
  uint64_t messages_begun_ = 0;       // by the furthest rank of those that have answered
  int weight_shares_ = 0;             // 0: they are not shared
  std::vector<Seat> seats_;           // by rank
  std::map<Connection, Part> parts_;  // the workers that take part and are not lost
  std::set<Connection> unanswered_;   // Prepare, or Cancel or Abort, not answered yet
  int layers_done_ = 0;               // by all ranks
  LinkSurvey::Probes probes_;
  std::vector<float> logits_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_RUN_COORDINATOR_H_
