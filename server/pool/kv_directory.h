// The leader's directory of kept K and V: leases, which workers hold what of them, and what of a new prompt
// they have already.
//
// Part of the leader's state machine (leader.h): events with their time go in, messages to the workers come
// out. Not thread-safe. The directory knows where K and V are, the workers have them (held_kv.h).
//
//     Admit ──► admitted ──BeginRun──► running ──OnRunOver──► over ──► ended, by Release, End, or its lapse
//                  ▲  charged as         │ charged as it runs   │
//                  │  it would run       │ OnRunFailed          │ OnWorkerLost
//                  └─────────────────────┘                      └──► lost: UNAVAILABLE until it ends
//
// Until Keep the lease is held by its prefill: it cannot lapse. Who ends a lease tells its workers; those
// lapse by themselves, too, as they were last told.
//
// A prompt may run in pieces: each run but the last keeps its K and V for the next, whoever wants them, and
// the room of all that is to come is charged with the first. The lease is the last run's, and has it all.
//
// A run may begin behind what earlier runs of the same tenant computed: FindPrefix, before it is planned. A
// run that is over is such a prefix for others, also where its lease ended before. held_runs.h has the
// account.
//
// Invariants: no worker is charged more than it offered; nothing is found after its lease; a worker that is
// lost holds nothing.
#ifndef MESHFILL_SERVER_POOL_KV_DIRECTORY_H_
#define MESHFILL_SERVER_POOL_KV_DIRECTORY_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/kv/kv_shape.h"
#include "engine/kv/kv_store.h"
#include "engine/mesh/layout.h"
#include "engine/plan/plan.h"
#include "engine/prefill_engine.h"
#include "meshfill/v1/control.pb.h"
#include "server/pool/held_runs.h"
#include "server/pool/leader_actions.h"
#include "server/pool/membership.h"

namespace meshfill {

// What the workers have of what a prompt begins with: so many tokens, dealt in stripes to so many ranks.
struct CachedPrefix {
  int64_t tokens = 0;  // whole blocks; 0: nothing
  int ranks = 0;
  int64_t stripe = 0;
};

class KvDirectory {
 public:
  using Connection = HeldRuns::Connection;
  using Workers = HeldRuns::Workers;
  using Holder = HeldRuns::Holder;

  struct Admission {
    std::string lease;  // its name
    std::string tenant;
    int64_t tokens = 0;
    absl::Duration lasts;  // from Keep on
  };
  // Where the K and V of a prompt are.
  struct Place {
    TokenLayout layout;
    std::vector<Holder> holders;
  };
  // What the workers of a run are told.
  struct RunKv {
    std::optional<v1::KeepKv> keep;           // none: K and V are dropped
    std::vector<v1::RunTokens> prefix;        // runs that computed the plan's cached tokens
    std::shared_ptr<const KvRunSlabs> ahead;  // nobody is told: room for the pieces to come; null: none do
  };
  // Which piece of its prompt a run is.
  struct Piece {
    bool first = true;         // else what it follows is of the pieces before it
    int64_t tokens_ahead = 0;  // tokens of the pieces after it
  };
  // What a reader needs before each part.
  struct View {
    uint64_t run = 0;  // the run whose K and V can be read; 0: none yet
    int layers_done = 0;
    int64_t tokens = 0;        // the prompt's tokens
    std::string last_failure;  // why a run before this one was stopped; empty: none was
  };
  struct WorkerKv {
    int64_t leases = 0;
    int64_t bytes = 0;  // charged
    int64_t max_bytes = 0;
  };

  // `cache`: whether prompts begin behind what others have in common with them; none: those too that no
  // client wants kept, where all workers are on CPUs. `actions` outlives the directory.
  KvDirectory(const KvShape& shape, std::optional<bool> cache, LeaderActions& actions)
      : shape_(shape), cache_(cache), actions_(actions), runs_held_(shape, actions) {}

  // Charges a prompt to the workers that would run `plan`. RESOURCE_EXHAUSTED: one has no room.
  absl::Status Admit(const Admission& admission, const Plan& plan, const Workers& workers);
  // How long until each of them will have room, if no lease is renewed; leases whose prefill runs are taken
  // for ones that end now. Nothing: never.
  std::optional<absl::Duration> RoomIn(const Plan& plan, const Workers& workers, absl::Time now) const;

  // What workers have of a prompt with these options, whole blocks. FindPrefix counts as a use.
  KvSlabs FindPrefix(const PrefillOptions& options);
  KvSlabs LookUpPrefix(const PrefillOptions& options) const;
  static CachedPrefix Describe(const KvSlabs& prefix);
  // Those of `workers` that have it, by place: a run behind it takes these.
  Workers HoldersOf(const KvSlabs& prefix, const Workers& workers) const;
  // Whether a run on `workers`, by place, can be behind it. Not where there is none.
  bool CanFollow(const KvSlabs& prefix, const Workers& workers) const;

  // A run of a prompt, or of a piece of it, begins, by a plan behind the first tokens of `prefix`, if it has
  // cached ones: where its ranks sit follows the prefix. A lease that has ended: the run keeps what the cache
  // may have, as if it ended after the run.
  // The caller has let go of the room that the piece before this one left ahead. RESOURCE_EXHAUSTED: as for
  // Admit; or not behind this prefix, which would take the room of what was promised to others.
  absl::StatusOr<RunKv> BeginRun(uint64_t run, const PrefillOptions& options, const KvSlabs& prefix,
                                 const Piece& piece, Plan& plan, const Workers& workers);
  // Charges room for `tokens` more that are dealt as the plan's.
  std::shared_ptr<const KvRunSlabs> HoldAhead(const Plan& plan, int64_t tokens, const Workers& workers);
  // All workers of the run know of its lease: readers may come.
  void OnRunning(uint64_t run);
  void OnLayersDone(uint64_t run, int layers);
  // The run is over, and its workers keep what they have. `workers` are those that are there to stay. What
  // the next piece of its prompt runs behind, if one does. What is not `good` is not for later prompts: they
  // would be as bad.
  KvSlabs OnRunOver(uint64_t run, bool good, const Workers& workers);
  // The run is being stopped: its workers drop what they have. Once is enough. If the prompt goes again on
  // these workers, all of its own among them, its room stays its own.
  void OnRunFailed(uint64_t run, const std::string& why, const Workers& again_on);
  // As if it had never begun. Nothing else has happened since.
  void UndoRun(uint64_t run);

  // The prefill is done: the lease lasts its time from now on, or as long as it was renewed for. NOT_FOUND:
  // it was released meanwhile.
  absl::StatusOr<absl::Duration> Keep(const std::string& lease, absl::Time now);
  // The prefill that holds the lease ends it; nothing happens where there is none.
  void End(const std::string& lease);

  // Errors: those of Find.
  absl::StatusOr<absl::Duration> Renew(const std::string& lease, const std::string& tenant,
                                       absl::Duration lasts, absl::Time now);
  void Release(const std::string& lease, const std::string& tenant, absl::Time now);
  // Ends what has lapsed. When the next lease lapses; infinite: none does.
  absl::Time EndLapsed(absl::Time now);

  void OnWorkersChanged(const Workers& workers);  // `workers` are there to stay; there may be room now
  void OnWorkerLost(Connection worker, const std::string& name, const std::string& why);
  bool Holds(Connection worker) const;  // something under a live lease, or of a run

  // NOT_FOUND: unknown, ended, or another tenant's. UNAVAILABLE: lost; the message has the worker.
  absl::StatusOr<View> Find(const std::string& lease, const std::string& tenant, absl::Time now) const;
  // Where a lease's K and V are. Find has found the lease with a run.
  const Place& PlaceOf(const std::string& lease) const { return *leases_.at(lease).place; }

  // The live leases of a tenant, by the bytes that its tokens take.
  std::vector<KvStore::LeaseEnd> LeasesOf(const std::string& tenant, absl::Time now) const;
  KvStore::Counts counts(const std::map<Connection, Membership::Worker>& workers) const;
  // What each of `workers` keeps, by name.
  std::map<std::string, WorkerKv> CountByWorker(
      const std::map<Connection, Membership::Worker>& workers) const;
  uint64_t version() const { return version_ + runs_held_.version(); }  // another one after each change

 private:
  struct Lease {
    Admission admission;
    bool held = true;                           // its prefill holds it
    absl::Time expires = absl::InfinitePast();  // not before, if held
    // Where the run's K and V are, or are expected. None: the run has failed and goes elsewhere or not at
    // all, is a piece before the last, or is lost.
    std::optional<Place> place;
    KvSlabs slabs;       // the runs there, without slabs
    bool begun = false;  // a run of it lives, or is over
    bool over = false;   // its run is
    uint64_t run = 0;    // the run that can be read; 0: none yet
    int layers_done = 0;
    std::string last_failure;  // why a run failed
    std::string lost;          // why; not empty: nothing can be read any more
  };
  using Leases = std::map<std::string, Lease>;

  struct Running {
    std::string lease;                          // empty: none, or not this piece's
    std::shared_ptr<const KvBlockNames> names;  // names under which it enters the cache; null: it does not
    bool more_pieces = false;                   // more pieces follow it
    bool looked_up = false;                     // its tokens count as hits and misses
    int64_t cached_tokens = 0;                  // cached tokens before the first piece; 0 in others
    int64_t new_tokens = 0;
    KvSlabs slabs;                  // the prefix, and the run where it is kept
    std::optional<Place> expected;  // where its lease was charged before
  };

  Place PlaceFor(const Plan& plan, const Workers& workers) const;
  bool ReadsCache(const PrefillOptions& options) const;
  // Whether a run is to be cached that no lease keeps.
  bool CachesAll(const Workers& workers) const;
  Lease* LeaseOf(uint64_t run);            // the lease of a live run; null: it has none, or that has ended
  void Charge(Lease& lease, Place place);  // for a run that is expected there
  void Discharge(Lease& lease);
  // Its workers hear of the end, and the entry goes.
  Leases::iterator Erase(Leases::iterator lease);
  // Null: there is no such live lease of the tenant.
  const Lease* Live(const std::string& lease, const std::string& tenant, absl::Time now) const;
  void TellLasts(const std::string& lease, const Place& place, absl::Duration lasts);

  const KvShape shape_;
  const std::optional<bool> cache_;
  LeaderActions& actions_;
  HeldRuns runs_held_;
  Leases leases_;
  std::map<uint64_t, Running> running_;  // by run
  uint64_t hit_tokens_ = 0;
  uint64_t miss_tokens_ = 0;
  uint64_t lapsed_ = 0;
  uint64_t refused_ = 0;
  uint64_t version_ = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_KV_DIRECTORY_H_
