// Who is in the pool: workers that join, are refused, drain, leave or are lost, and the epoch, which is one
// membership. What they compute is run_coordinator.h's.
//
// Part of the leader's state machine (leader.h): events with their time go in, actions come out. Not
// thread-safe.
//
//     connected ──Join──► member ──Leave──► draining ──no run──► out (Goodbye)
//         │ refused,        │ stream end, silence, a run's complaint │
//         ▼ no Join         ▼                                        ▼
//        out               out ◄─────────────────────────────────────┘
#ifndef MESHFILL_SERVER_POOL_MEMBERSHIP_H_
#define MESHFILL_SERVER_POOL_MEMBERSHIP_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "engine/plan/cost_model.h"
#include "meshfill/v1/control.pb.h"
#include "server/pool/leader_actions.h"

namespace meshfill {

inline constexpr uint32_t kControlProtocol = 11;

// What the pool can do now, as a plan needs it: the slowest rank's speed, the tightest rank's memory, and
// which seats are on one host.
struct PoolCapacity {
  int ranks = 0;
  PoolSpeed speed;
  Topology topology;
  int64_t rank_memory_bytes = 0;  // beside shared weights; 0: no limit, below: not even for those
  PlanWeights rank_weights;       // one rank's, where a worker needs most for it; sharded: one worker's
  // The same of runs whose workers share the weights instead of streaming them. None: they cannot.
  std::optional<PlanWeights> shared_weights;
  int64_t shared_rank_memory_bytes = 0;
  int64_t short_rank_bytes = 0;    // of a rank's memory: left to short prompts (engine/plan/short_room.h)
  std::vector<int> first_seats;    // each worker's first seat
  bool kv_on_host = true;          // where K and V are kept, they take of no rank's memory
  int64_t rank_kv_bytes = 0;       // bytes of K and V that the tightest rank may keep
  bool many_messages = true;       // all workers' messages go on beside compute, many at once
  bool ranks_share_cores = false;  // those of a worker do: one is faster where others have less to do
  // The first workers alone, without those after them that are slower, fewest first. None: all are as fast.
  std::vector<PoolCapacity> faster_parts;
};

class Membership {
 public:
  using Connection = LeaderActions::Connection;

  struct Options {
    std::string build;
    v1::ModelId model;     // weights_hash 0: that of the first worker counts while the pool is not empty
    bool encrypt = false;  // the data plane, on all workers or none
    uint64_t first_epoch = 1;
    uint64_t least_memory_bytes = 0;  // least memory that a worker with a limit may offer
    absl::Duration silence_timeout;
    absl::Duration join_timeout;  // from a connection to its Join
    absl::Duration least_kept_out;
    absl::Duration most_kept_out;  // longest time; that long after the last one it begins anew with the least
  };
  struct Worker {
    Connection connection = 0;
    v1::Join offer;
    bool leaving = false;
    absl::Time heard_at;
    int unprepared = 0;  // runs in a row, up to the last, that it could not prepare
  };
  struct Counters {
    uint64_t epochs = 0;
    uint64_t joins = 0;
    uint64_t losses = 0;  // streams that ended without Leave, silent and hung workers
    uint64_t refusals = 0;
  };

  // `actions` outlives the membership.
  Membership(Options options, LeaderActions& actions);

  void OnConnected(Connection connection, absl::Time now) { strangers_[connection] = now; }
  // A message of a connection that has not joined. True: it has now.
  bool OnStrangerMessage(Connection connection, const v1::WorkerMessage& message, absl::Time now);
  void OnStrangerGone(Connection connection) { strangers_.erase(connection); }
  void OnLeave(Worker& worker);
  // Refuses who is connected and has not joined in time.
  void RefuseUnjoined(absl::Time now);

  // A worker that is about to be removed: one of its name is not taken again for a while, which gets longer
  // each time, unless nobody else is there.
  void KeepOut(Connection connection, absl::Time now);
  // A worker could or could not prepare a run, for reasons of its own. True: it could not again and again,
  // and others are there without it.
  bool FailsToPrepare(Connection connection, bool prepared);
  // The leader could hear nobody for so long, up to now.
  void OnLeaderStoodStill(absl::Duration stood, absl::Time now);
  // Takes a worker out of the pool. Returns its name.
  std::string Remove(Connection connection, const std::string& why);
  // Says Goodbye to draining workers that take part in no run.
  void ReleaseDrained(const std::function<bool(Connection)>& is_busy);

  // The next run begins in a new epoch.
  void EndEpoch() { changed_ = true; }
  // Called before a run. True: a new epoch has begun.
  bool BeginRun();
  uint64_t epoch() const { return epoch_; }
  bool changed() const { return changed_; }  // since the epoch began

  Worker* Find(Connection connection);  // null: not a member
  std::set<Connection> Silent(absl::Time now) const;
  const std::map<Connection, Worker>& all() const { return workers_; }
  // Who is there to stay: hosts together, those with a slower worker behind the others, and so on a host.
  std::vector<const Worker*> ByPlace() const;
  int workers_to_stay() const;
  double peak_flops() const;
  const Counters& counters() const { return counters_; }

 private:
  struct KeptOut {
    absl::Time until;
    absl::Duration length;
  };

  int ranks() const;  // ranks of the workers that are there to stay
  absl::Status CheckOffer(const v1::Join& offer, uint64_t heard_epoch, absl::Time now, bool& retry) const;
  // Says why, closes, and logs each reason once for a name; the name of a stranger is empty.
  void Refuse(Connection connection, const std::string& name, const std::string& reason, bool retry);
  void ForgetWeightsWhereEmpty();

  const Options options_;
  LeaderActions& actions_;
  std::map<Connection, absl::Time> strangers_;  // connected, not joined: since when
  std::map<Connection, Worker> workers_;
  std::set<std::pair<std::string, std::string>> refused_;  // name and reason, logged
  std::map<std::string, KeptOut> kept_out_;                // by name
  uint64_t weights_hash_;                                  // the pool's; 0: nobody has said yet
  uint64_t epoch_;
  bool changed_ = true;  // since the epoch began
  Counters counters_;
};

// What these workers can do, by place.
PoolCapacity CapacityOf(const std::vector<const Membership::Worker*>& workers, const Topology& links);

// Of any one rank, beside others that compute.
PoolCapacity OneRankOf(PoolCapacity capacity);

// Sub-meshes: each has as many of the workers, up to one, those that follow each other by place. There are no
// more of them than workers. The first one is no larger than any other.
std::vector<std::vector<const Membership::Worker*>> DivideWorkers(
    const std::vector<const Membership::Worker*>& workers, int submeshes);

// Seats of a run that one worker has.
struct SeatsOfWorker {
  const Membership::Worker* worker;
  int first = 0;
  int count = 0;
};
// The seats of a run over so many ranks: as many of `workers` as it needs, in their order.
std::vector<SeatsOfWorker> SeatWorkers(const std::vector<const Membership::Worker*>& workers, int ranks);
// By seat of such a run: which rank of the pool sits there. The pool's ranks are those of `all`, in order,
// and then those of workers that drain, which are not among them.
std::vector<int> PoolRanks(const std::vector<const Membership::Worker*>& all,
                           const std::vector<const Membership::Worker*>& workers, int ranks);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_MEMBERSHIP_H_
