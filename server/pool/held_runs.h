// The leader's account of the K and V that workers have, run by run: who has how many bytes, what later
// prompts may begin with (KvPrefixCache), and when the workers may forget it.
//
// Part of the leader's state machine (kv_directory.h). Not thread-safe. A run's K and V are named by
// KvRunSlabs without slabs: leases, runs behind it and the cache hold it, and when the last of them lets go,
// its bytes are free and its workers hear of it.
//
//     Hold ──► charged ──OnKept──► its workers keep it ──nobody holds it──► free, KvRunEnds
//                 └─────────nobody holds it: the run was stopped───────────► free
//
// Two kinds of shared_ptr hold a run: the cache has its own, and Hold and Find give out another, in use. The
// last of those in use that goes leaves the run idle: its bytes are what the cache can give up. So each
// worker's sums are kept as runs come and go, and no question walks the cache.
//
// Invariants: no worker is charged more than it offered, but for what the cache gives up in MakeRoom; the
// cache has only what a run over the present workers could follow, each rank's tokens where the rank would
// be.
#ifndef MESHFILL_SERVER_POOL_HELD_RUNS_H_
#define MESHFILL_SERVER_POOL_HELD_RUNS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/kv/kv_charge.h"
#include "engine/kv/kv_prefix_cache.h"
#include "engine/kv/kv_slabs.h"
#include "engine/mesh/placement.h"
#include "engine/plan/plan.h"
#include "server/pool/leader_actions.h"
#include "server/pool/membership.h"

namespace meshfill {

class HeldRuns {
 public:
  using Connection = LeaderActions::Connection;
  using Workers = std::vector<const Membership::Worker*>;  // by place, as a run takes them

  struct Holder {
    Connection worker = 0;
    std::string name;
    std::string address;     // where its FetchKv is served
    std::vector<int> ranks;  // its ranks in the plan
    int64_t bytes = 0;       // K and V of these ranks' tokens
  };

  // `actions` outlives this.
  HeldRuns(const KvShape& shape, LeaderActions& actions) : shape_(shape), actions_(actions) {}

  // Who would have the tokens of `layout`, where `plan` runs on `workers`.
  std::vector<Holder> HoldersOf(const Plan& plan, const TokenLayout& layout, const Workers& workers) const;

  // RESOURCE_EXHAUSTED: one of `holders` has no room for its bytes, whatever the cache gives up.
  absl::Status CheckRoom(const std::vector<Holder>& holders, const Workers& workers) const;
  // Bytes that `worker` has room for, with what the cache can give up.
  int64_t Room(const Membership::Worker& worker) const;
  // The cache gives up what workers are charged beyond what they offered. Before they are told of a run.
  void MakeRoom(const Workers& workers);

  // Charges a run's bytes to its holders. Of a run that has not begun, `run` is 0.
  std::shared_ptr<const KvRunSlabs> Hold(uint64_t run, const TokenLayout& layout,
                                         const std::vector<Holder>& holders);
  uint64_t NumberOf(const KvRunSlabs& run) const { return records_.at(&run).run; }
  void OnKept(const KvRunSlabs& run) { records_.at(&run).kept = true; }

  // What the cache has of a prompt. Find counts as a use.
  KvSlabs Find(const KvBlockNames& names);
  // As Find, for a look alone: whoever has the result does not keep the cache from giving it up.
  KvSlabs Look(const KvBlockNames& names) const { return cache_.Look(names); }
  // Those of `workers` that have a run's K and V: whom another must take to follow it.
  Workers HoldersAmong(const KvRunSlabs& run, const Workers& workers) const;
  // Whether a run on all of `workers`, or on as many of the first as it needs, can follow that one.
  bool CanFollow(const KvRunSlabs& run, const Workers& workers) const {
    return PlacementOf(run, workers).has_value();
  }
  // All of a prompt whose runs were kept. Nothing where no run over some of `workers` could follow it.
  void Enter(const KvBlockNames& names, const KvSlabs& slabs, const Workers& workers);
  // Puts the plan's ranks where those of the prefix are. False: the plan deals tokens otherwise, or the
  // workers are not there.
  bool Follow(const KvSlabs& prefix, const Workers& workers, Plan& plan) const;

  void OnWorkerLost(Connection worker);
  // Others are there to stay than before: the cache drops what no run can follow any more.
  void OnWorkersChanged(const Workers& workers);

  // Bytes charged to `worker`, without what the cache will give up.
  int64_t charged(const Membership::Worker& worker) const;
  int64_t cached_bytes() const { return cache_.bytes(); }
  uint64_t evictions() const { return evictions_; }
  uint64_t evicted_bytes() const { return evicted_bytes_; }
  uint64_t version() const { return version_; }  // another one after each change

 private:
  struct Record {
    uint64_t run = 0;
    bool kept = false;
    std::vector<Connection> worker_of_rank;
    std::map<Connection, int64_t> bytes;     // by worker; without those that are lost
    std::weak_ptr<const KvRunSlabs> held;    // as the cache holds it
    std::weak_ptr<const KvRunSlabs> in_use;  // as the others do
    bool idle = false;                       // nobody but the cache holds it
  };

  // The run in use; idle again as the last one that has this lets go.
  std::shared_ptr<const KvRunSlabs> Use(const std::shared_ptr<const KvRunSlabs>& held);
  void SetIdle(const KvRunSlabs& run, bool idle);
  void LetGo(const KvRunSlabs* run);
  // A placement of the run's ranks on the same workers; nothing: there is none.
  std::optional<Placement> PlacementOf(const KvRunSlabs& run, const Workers& workers) const;
  int64_t ChargedTo(Connection worker) const;  // all of it
  int64_t IdleOn(Connection worker) const;     // what the cache can give up of it

  const KvShape shape_;
  LeaderActions& actions_;
  const std::shared_ptr<KvBytes> sum_ = std::make_shared<KvBytes>();
  std::map<Connection, int64_t> charged_;  // bytes, by worker
  std::map<Connection, int64_t> idle_;     // bytes of idle runs, by worker
  std::map<const KvRunSlabs*, Record> records_;
  uint64_t evictions_ = 0;
  uint64_t evicted_bytes_ = 0;
  uint64_t version_ = 0;
  KvPrefixCache cache_;  // last: what it lets go is in all of the above
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_HELD_RUNS_H_
