// The requests and runs that live at the leader, and what can be asked of all of them together: who waits,
// whose turn it is, and what their runs have of a worker.
//
// Part of the leader's state machine (leader.h), which alone decides what begins and ends. Not thread-safe.
#ifndef MESHFILL_SERVER_POOL_LIVE_RUNS_H_
#define MESHFILL_SERVER_POOL_LIVE_RUNS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/model/weight_feed.h"
#include "engine/plan/short_room.h"
#include "engine/prefill_engine.h"
#include "kernels/paused_time.h"
#include "server/pool/ended_epochs.h"
#include "server/pool/leader_actions.h"
#include "server/pool/membership.h"
#include "server/pool/prompt_pieces.h"
#include "server/pool/run_coordinator.h"

namespace meshfill {

using RunId = uint64_t;  // a run's number; only grows

// Where a prompt is computed that shares a pass with others (engine/plan/pack.h).
struct PackSeat {
  uint64_t pack = 0;
  int prompts = 1;  // in the pack
  int rank = 0;     // the pool's
  LeaderActions::Connection worker = 0;
  int local_rank = 0;    // the worker's
  int rank_prompts = 1;  // that the rank computes, it included
  double share = 1;      // of the tokens that the rank computes
  double seconds = 0;    // predicted, of the pass
};

struct PoolRequest {
  std::string id;
  std::span<const uint32_t> tokens;  // valid until the answer
  PrefillOptions options;            // kv_lease: K and V are kept under it, where it is live
};

struct LiveRequest {
  PoolRequest request;
  std::optional<PackSeat> pack = std::nullopt;  // none: it shares no pass, or no more
  uint64_t failed_pack = 0;                     // whose pass failed it shared: those run one after the other
  RunId run = 0;                                // 0: it waits
  absl::Time had_workers_at;                    // when it last ran, stood still, or had workers to run on
  std::optional<PromptPieces> pieces;           // none: its prompt is whole, or no piece is begun
  bool new_attempt = true;                      // its next run begins one
  int attempts = 0;
  int losses = 0;           // attempts that workers were lost in, but for those that stood still
  EndedEpochs ended;        // epochs that its runs may have ended
  bool no_room = false;     // no place or memory beside the runs that live, until one of them is over
  PausedTime pauses;        // pauses as they were asked for
  absl::Time begin;         // when its first run began
  double lost_seconds = 0;  // from `begin` to its present attempt's begin, without pauses and what counts

  bool has_turn() const { return !pauses.paused(); }
  bool waits() const { return run == 0; }
};

struct LiveRun {
  LeaderActions::Ticket ticket;  // the run's request, which may be answered already
  RunCoordinator coordinator;
  std::optional<PackSeat> pack = std::nullopt;  // where it shares a pass
  // Its end, where a rank had not said that it computed: the prompt's, if all do until they have stopped, or
  // if a worker proves to be lost in it.
  std::optional<EpochEnd> doubtful = std::nullopt;
};

struct LiveRuns {
  using Connection = LeaderActions::Connection;
  using Ticket = LeaderActions::Ticket;

  explicit LiveRuns(LeaderActions& all_actions) : actions(all_actions) {}

  LeaderActions& actions;                  // outlives this
  std::map<Ticket, LiveRequest> requests;  // until their answers
  std::map<RunId, LiveRun> runs;           // until their workers have confirmed the end, or are lost

  // The request lives no more. Nothing where it is answered already.
  void Answer(Ticket ticket, absl::StatusOr<RunResult> result);
  // The run is over: those that wait may find room.
  void Forget(RunId run);
  // Something has changed that those that wait without room may begin by.
  void LookForRoomAgain();

  // Null: it is answered.
  LiveRequest* Find(Ticket ticket);
  const LiveRequest* Find(Ticket ticket) const;
  // The first request whose turn it is and that has no run, and need not wait for that of another of its
  // failed pack; null: none.
  std::pair<const Ticket, LiveRequest>* FirstWaiting();

  // How many live, of those that may: a pack counts as one.
  int count() const;
  // The run, and those that share its rank's pass and do not stop.
  std::vector<RunId> InPassOf(RunId run) const;
  // Whether the request of one of those lives.
  bool IsWanted(RunId run) const;
  bool HasTurn(const LiveRun& run) const;
  // Whether another request of its failed pack runs: of two that run, none is to blame for what they end.
  bool WaitsForPack(const LiveRequest& request) const;
  bool AnyStops() const;   // whether a run is being stopped
  bool AnyGoesOn() const;  // whether a run is not
  // Whether another run has its messages under way on a worker of this one, where they do not mix.
  bool Blocked(const LiveRun& run) const;
  // Lets all runs stand still whose turn it is not, and others go on; what shares a pass goes on while it is
  // the turn of one of them. Who waits beside runs that stand still waits for their ends: they go on, too.
  void Pause(absl::Time now);

  bool TakesPart(Connection worker) const;    // in a run
  bool HasPiecesOf(Connection worker) const;  // whether it takes part in a prompt in pieces
  // What the runs have of its memory, with their shares of the weights and the share of one more run; long
  // are those that take more than that of a rank. Nothing: none lives on it.
  TakenBytes TakenOn(const Membership::Worker& worker, const WeightShare& with,
                     int64_t short_rank_bytes) const;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_LIVE_RUNS_H_
