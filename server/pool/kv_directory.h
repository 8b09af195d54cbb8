// The leader's directory of kept K and V: leases, and which workers hold what of them.
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
#include "meshfill/v1/control.pb.h"
#include "server/pool/leader_actions.h"
#include "server/pool/membership.h"

namespace meshfill {

class KvDirectory {
 public:
  using Connection = LeaderActions::Connection;
  using Workers = std::vector<const Membership::Worker*>;  // by place, as a run takes them

  struct Admission {
    std::string lease;  // its name
    std::string tenant;
    int64_t tokens = 0;
    absl::Duration lasts;  // from Keep on
  };
  struct Holder {
    Connection worker = 0;
    std::string name;
    std::string address;     // of its FetchKv
    std::vector<int> ranks;  // of the plan
    int64_t bytes = 0;       // charged
  };
  // Where the K and V of a run are.
  struct Place {
    TokenLayout layout;
    std::vector<Holder> holders;
  };
  // What a reader needs before each part.
  struct View {
    uint64_t run = 0;  // whose K and V can be read; 0: none yet
    int layers_done = 0;
    int64_t tokens = 0;  // of the prompt
  };
  struct WorkerKv {
    int64_t leases = 0;
    int64_t bytes = 0;  // charged
    int64_t max_bytes = 0;
  };

  // `actions` outlives the directory.
  KvDirectory(const KvShape& shape, LeaderActions& actions) : shape_(shape), actions_(actions) {}

  // Charges a prompt to the workers that would run `plan`. RESOURCE_EXHAUSTED: one has no room.
  absl::Status Admit(const Admission& admission, const Plan& plan, const Workers& workers);
  // How long until each of them will have room, if no lease is renewed; leases whose prefill runs are taken
  // for ones that end now. Nothing: never.
  std::optional<absl::Duration> RoomIn(const Plan& plan, const Workers& workers, absl::Time now) const;

  // A run of the prompt begins: what its workers are told. NOT_FOUND: the lease has ended; the run keeps
  // nothing. RESOURCE_EXHAUSTED: as for Admit.
  absl::StatusOr<v1::KeepKv> BeginRun(const std::string& lease, const Plan& plan, const Workers& workers);
  // All workers of the run know of the lease: readers may come.
  void OnRunning(const std::string& lease, uint64_t run);
  void OnLayersDone(const std::string& lease, int layers);
  // The run is over, and its workers keep what they have.
  void OnRunOver(const std::string& lease);
  // The run is being stopped: its workers drop what they have.
  void OnRunFailed(const std::string& lease);

  // The prefill is done: the lease lasts its time from now on, or as long as it was renewed for. NOT_FOUND:
  // it was released meanwhile.
  absl::StatusOr<absl::Duration> Keep(const std::string& lease, absl::Time now);
  void End(const std::string& lease);  // by the prefill that holds it; nothing where there is none

  // Errors: those of Find.
  absl::StatusOr<absl::Duration> Renew(const std::string& lease, const std::string& tenant,
                                       absl::Duration lasts, absl::Time now);
  void Release(const std::string& lease, const std::string& tenant, absl::Time now);
  // Ends what has lapsed. When the next lease lapses; infinite: none does.
  absl::Time EndLapsed(absl::Time now);

  void OnWorkerJoined() { ++version_; }  // there may be room now
  void OnWorkerLost(Connection worker, const std::string& name, const std::string& why);
  bool Holds(Connection worker) const;  // something under a live lease, or of a run

  // NOT_FOUND: unknown, ended, or another tenant's. UNAVAILABLE: lost; the message has the worker.
  absl::StatusOr<View> Find(const std::string& lease, const std::string& tenant, absl::Time now) const;
  // Of a lease that was found with a run.
  const Place& PlaceOf(const std::string& lease) const { return *leases_.at(lease).place; }

  KvStore::Counts counts() const;
  // By name, of the workers that are given.
  std::map<std::string, WorkerKv> CountByWorker(
      const std::map<Connection, Membership::Worker>& workers) const;
  uint64_t version() const { return version_; }  // another one after each change

 private:
  struct Lease {
    Admission admission;
    bool held = true;                           // by its prefill
    absl::Time expires = absl::InfinitePast();  // not before, if held
    std::optional<Place> place;  // of the run, or expected; none: its run has failed, or it is lost
    bool begun = false;          // a run of it lives, or is over
    bool over = false;           // its run is
    uint64_t run = 0;            // that can be read; 0: none yet
    int layers_done = 0;
    std::string lost;  // why; not empty: nothing can be read any more
  };
  using Leases = std::map<std::string, Lease>;

  Place PlaceFor(const Plan& plan, const Workers& workers) const;
  absl::Status CheckRoom(const Place& place, const Workers& workers);
  void Charge(Lease& lease, Place place);
  void Discharge(Lease& lease);
  // Its workers hear of the end, and the entry goes.
  Leases::iterator Erase(Leases::iterator lease);
  // Null: it is not found.
  const Lease* Live(const std::string& lease, const std::string& tenant, absl::Time now) const;
  void TellLasts(const std::string& lease, const Place& place, absl::Duration lasts);

  const KvShape shape_;
  LeaderActions& actions_;
  Leases leases_;
  std::map<Connection, int64_t> charged_;  // bytes, by worker
  uint64_t lapsed_ = 0;
  uint64_t refused_ = 0;
  uint64_t version_ = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_KV_DIRECTORY_H_
