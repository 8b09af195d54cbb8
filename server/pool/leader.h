// The leader of a pool: membership, epochs, and the runs of requests over the workers that are there.
//
// A pure state machine: events with their time go in, actions come out. No threads, no clock, no network, so
// that the server (pool_engine.h) and the deterministic simulation run the very same code. Not thread-safe.
// Who is in the pool is Membership's (membership.h), which request runs next RunStarter's (run_starter.h), on
// whom of the pool, and by which plan, RunPlacer's (run_placer.h). One attempt at a request is a
// RunCoordinator's (run_coordinator.h), and what its end means for the request is RunEnder's (run_ender.h).
// The leader joins them.
//
//              Submit                             a run completes
//     ─────────────────► waiting ──────────────► running ──────────────────► answered
//                           ▲     begins a run      │ the run fails, a worker is lost
//                           └───────────────────────┘ a piece of the prompt is done, and it has more
//
// A prompt that does not fit the memory whole runs in pieces, one run after the other (prompt_pieces.h). A
// turn may end between two of them as anywhere else; what comes back waits for memory like any other.
//
// Several runs live at once; whose turn it is, SetPaused says: the others' ranks stand still between two
// tiles, each wherever it is. No rank has to agree with another on that place: each run has connections,
// threads and memory of its own, so that what stands still keeps only its own peers waiting, whose waits do
// not count the pause. Order matters nowhere either: for a moment two runs may compute at once. Where workers
// say that messages of runs do not mix (GPUs), the ranks do agree, and a run goes on when all others that
// share a worker with it stand still.
//
// Invariants:
//  - A request is answered exactly once, with the result of one complete run or with one error.
//  - Requests of a pack begin together, each as a run of its own on one rank. Those on one rank share its
//    pass: they end together, or all are tried anew, each by itself and one after the other. One that is
//    cancelled computes on while another of its pass is wanted, and what it gives is dropped.
//  - At most Options::runs_at_once runs live, of which a pack is one. A run lives until every worker of it
//    has confirmed its end or is out of the pool. Where messages do not mix, one run on a worker has some
//    under way.
//  - The runs that live take no more memory of a worker than it offered. One alone may always begin.
//  - A request that is paused begins no run. While one whose turn it is waits for memory, or for a place
//    among those that live, the runs that have it go on.
//  - A worker is out when its stream ends, when it is silent for silence_timeout, when an operation of its
//    compute loop takes longer than hang_timeout (or ten times the predicted block), when it does not answer
//    Prepare, Cancel or Abort in time, or when it speaks of an epoch that is not yet. It may join again.
//  - A request whose runs ended two epochs at the same place of its prompt is refused as poisonous
//    (ended_epochs.h). A run is blamed for an epoch's end only where it may have computed within
//    silence_timeout of it. If another run may have, too, on a worker of its own, each is a suspect from
//    then on, until one of them is refused. None is where no worker is lost and a rank of the run has not
//    said that it computed: a worker that cannot be reached is not the prompt's fault. One that was lost in
//    six runs that may have computed is refused with UNAVAILABLE.
//  - A worker that drains stays while it holds K and V under a live lease, or of a prompt in pieces.
#ifndef MESHFILL_SERVER_POOL_LEADER_H_
#define MESHFILL_SERVER_POOL_LEADER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/prefill_engine.h"
#include "meshfill/v1/control.pb.h"
#include "server/pool/kv_directory.h"
#include "server/pool/leader_actions.h"
#include "server/pool/link_survey.h"
#include "server/pool/live_runs.h"
#include "server/pool/membership.h"
#include "server/pool/run_coordinator.h"
#include "server/pool/run_ender.h"
#include "server/pool/run_placer.h"
#include "server/pool/run_starter.h"

namespace meshfill {

class Leader {
 public:
  using Connection = LeaderActions::Connection;
  using Ticket = LeaderActions::Ticket;
  using Request = PoolRequest;
  using Result = RunResult;

  struct Options {
    std::string build;
    v1::ModelId model;     // weights_hash 0: that of the first worker counts while the pool is not empty
    bool encrypt = false;  // the data plane
    KvShape kv;            // the model's K and V
    std::optional<bool> kv_cache;  // whether prompts begin behind cached ones (KvDirectory)
    int64_t vocab = 1;
    ConfiguredLinks links;
    uint64_t first_epoch = 1;
    uint64_t least_memory_bytes = 1 << 20;  // least memory that a worker may offer
    // Each is planned over the whole pool, or over a sub-mesh, as if it had that for itself.
    int runs_at_once = 1;
    absl::Duration heartbeat_interval = absl::Milliseconds(200);
    absl::Duration silence_timeout = absl::Milliseconds(1500);
    absl::Duration hang_timeout = absl::Seconds(2);
    absl::Duration prepare_timeout = absl::Seconds(5);  // plus a second for each million tokens
    absl::Duration stop_timeout = absl::Seconds(2);
    absl::Duration join_timeout = absl::Seconds(5);  // from a connection to its Join
    // How long a worker that did not prepare is kept out: twice as long each time.
    absl::Duration least_kept_out = absl::Seconds(10);
    absl::Duration most_kept_out = absl::Minutes(5);
    absl::Duration empty_timeout = absl::Seconds(10);  // how long a request waits for a worker to come
    absl::Duration room_timeout = absl::Seconds(3);    // longest wait for the room of runs that are stopped
  };

  // ---- Actions, in the order in which they are to be done.
  using Send = LeaderActions::Send;
  using Close = LeaderActions::Close;
  using Answer = LeaderActions::Answer;
  using LayersDone = LeaderActions::LayersDone;
  using LogLine = LeaderActions::LogLine;
  using Action = LeaderActions::Action;

  // ---- What dashboards ask.
  enum class WorkerState { kReady, kPreparing, kRunning, kStopping, kDraining };
  struct WorkerView {
    const v1::Join* offer;
    WorkerState state;  // in the oldest run that it takes part in
    int first_rank;     // its first rank in that run; -1: none
    int ranks_in_use;
  };
  struct Counters : Membership::Counters {
    uint64_t retries = 0;  // attempts at a request after the first one
  };

  Leader(const Options& options, PoolPlanner planner);
  Leader(const Leader&) = delete;
  Leader& operator=(const Leader&) = delete;

  // ---- Events. `now` never falls and never jumps: no time of day (kernels/monotonic_time.h).
  void OnConnected(Connection connection, absl::Time now);
  void OnMessage(Connection connection, const v1::WorkerMessage& message, absl::Time now);
  void OnDisconnected(Connection connection, absl::Time now);
  void OnTick(absl::Time now);  // a few times in a second
  // This process stood still for so long, up to now: stopped, frozen, or swapped out. Whom it could not hear
  // meanwhile is no more silent than before.
  void OnStoodStill(absl::Duration stood, absl::Time now);
  // Requests that cannot begin yet wait, in order.
  Ticket Submit(const Request& request, absl::Time now);
  struct PackedRequest {
    Request request;
    int rank = 0;      // the pool's, which computes it
    double share = 1;  // of the tokens that this rank computes
  };
  // Requests that share a pass, predicted to take so long: all begin now, or none does and this is empty.
  // They count as one that lives. What fails runs by itself from then on.
  std::vector<Ticket> SubmitPack(const std::vector<PackedRequest>& requests, double seconds, absl::Time now);
  // Answers with `reason` at once; the ranks stop, unless they compute others in the same pass. Too late
  // where the answer is out.
  void CancelRequest(Ticket ticket, absl::Status reason, absl::Time now);
  // Its run stands still, with all it has, or goes on. Nothing where the answer is out.
  void SetPaused(Ticket ticket, bool paused, absl::Time now);
  // It waits for the end of another request: there is no memory, or no place, beside what lives.
  bool CrowdedOut(Ticket ticket) const;
  // The same, while a run is being stopped: it may have room in a moment. It was submitted at `since`.
  bool Undecided(Ticket ticket, absl::Time since, absl::Time now) const {
    return CrowdedOut(ticket) && MayGetRoom(since, now);
  }
  // Whether to wait on for room since then: not longer than room_timeout, whoever else is stopped meanwhile.
  bool MayGetRoom(absl::Time since, absl::Time now) const {
    return MakesRoom() && now - since < options_.room_timeout;
  }
  // A run is being stopped: there may be more room soon.
  bool MakesRoom() const { return live_.AnyStops(); }
  bool empty() const { return live_.runs.empty(); }
  RunId run_of(Ticket ticket) const;  // the live run of a request; 0: it waits, or is answered

  // ---- Leases on K and V. Those that lapse end by OnTick, or by EndLapsed there.
  KvDirectory& kv() { return kv_; }
  const KvDirectory& kv() const { return kv_; }
  // A lease for a prompt that would run by `plan`; errors and answers as the directory's.
  absl::Status AdmitKv(const KvDirectory::Admission& admission, const Plan& plan) {
    return kv_.Admit(admission, plan, members_.ByPlace());
  }
  std::optional<absl::Duration> RoomForKvIn(const Plan& plan, absl::Time now) const {
    return kv_.RoomIn(plan, members_.ByPlace(), now);
  }
  KvStore::Counts kv_counts() const { return kv_.counts(members_.all()); }
  std::map<std::string, KvDirectory::WorkerKv> kv_by_worker() const {
    return kv_.CountByWorker(members_.all());
  }

  std::vector<Action> TakeActions() { return actions_.Take(); }

  uint64_t epoch() const { return members_.epoch(); }
  // Counts the workers that are there to stay.
  PoolCapacity capacity() const { return CapacityOf(members_.ByPlace(), survey_.links()); }
  int workers_to_stay() const { return members_.workers_to_stay(); }
  // Where a request runs now, as Prefill::place has it.
  uint64_t PlaceOf(Ticket ticket) const;
  // As RunPlacer has it.
  std::vector<PlanSite> SitesFor(const PrefillOptions& options) const { return placer_.SitesFor(options); }
  // As RunPlacer has it.
  std::optional<PoolCapacity> SubmeshCapacity(int submeshes) const {
    return placer_.SubmeshCapacity(submeshes);
  }
  // As RunPlacer has it.
  std::optional<PoolCapacity> RankCapacity() const { return placer_.RankCapacity(); }
  // As RunPlacer has it.
  void LeaveToShort(int64_t rank_bytes) { placer_.LeaveToShort(rank_bytes); }
  // The workers' speeds have been wrong for long: what they keep of them is dropped.
  void ForgetSpeeds();
  // As RunPlacer has it.
  int64_t MostRankBytes() const { return placer_.MostRankBytes(); }
  std::vector<PoolLink> links() const { return survey_.Describe(capacity().topology, members_.changed()); }
  double peak_flops() const { return members_.peak_flops(); }
  std::vector<WorkerView> workers() const;  // in the order of their ranks
  Counters counters() const { return {members_.counters(), starter_.retries()}; }
  bool idle() const { return live_.runs.empty() && live_.requests.empty(); }

 private:
  RunCoordinator::Outcome OnRunMessage(Connection connection, const v1::WorkerMessage& message,
                                       absl::Time now);
  // The run that the message is of, if it is of one that lives; else null.
  LiveRun* RunOf(const v1::WorkerMessage& message);

  // What an event at a run means for its request and the pool.
  void Apply(RunId run, RunCoordinator::Outcome outcome, absl::Time now);
  void Take(RunId run, RunCoordinator::Outcome outcome, absl::Time now);  // without what may begin now
  void Do(RunId, std::monostate&, absl::Time) {}
  void Do(RunId run, RunCoordinator::LayersDone& done, absl::Time now);
  void Do(RunId run, RunCoordinator::Completed& completed, absl::Time now);
  void Do(RunId run, RunCoordinator::RequestFailed& failed, absl::Time now);
  void Do(RunId run, RunCoordinator::RunFailed& failed, absl::Time now);
  void Do(RunId run, RunCoordinator::WorkersFailed& failed, absl::Time now);

  // Takes workers out of the pool, and ends the epoch of the runs that they take part in.
  void DropWorkers(const std::set<Connection>& connections, const std::string& why, absl::Time now);
  bool Waits(Ticket ticket) const;
  void NoteWhoHasWorkers(absl::Time now);  // or needs none yet
  void RefuseOverdue(absl::Time now);      // requests that have waited for a worker for empty_timeout

  const Options options_;
  LeaderActions actions_;
  Membership members_;
  KvDirectory kv_;
  LinkSurvey survey_;
  LiveRuns live_;
  RunPlacer placer_;
  RunStarter starter_;
  RunEnder ender_;
  Ticket last_ticket_ = 0;
  uint64_t last_pack_ = 0;
  absl::Time last_heartbeat_ = absl::InfinitePast();
};

const char* WorkerStateName(
    Leader::WorkerState state);  // "ready", "preparing", "running", "stopping", "draining"

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_LEADER_H_
