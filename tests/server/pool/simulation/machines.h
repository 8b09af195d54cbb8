// What is where in a story: workers, what they hold of runs, and the streams between them and the leader.
#ifndef MESHFILL_TESTS_SERVER_POOL_SIMULATION_MACHINES_H_
#define MESHFILL_TESTS_SERVER_POOL_SIMULATION_MACHINES_H_

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/pool/worker/held_kv.h"
#include "server/pool/worker/worker_machine.h"

namespace meshfill::story {

struct Mesh {  // the ranks of one run that have started, by the run's addresses
  struct Member {
    int node = -1;  // -1: not started yet
    int seat = 0;
    int incarnation = 0;
    int done = 0;  // operations
    uint64_t digest = 0;
  };
  uint64_t run = 0;
  std::vector<Member> members;  // by rank
  bool broken = false;          // a member died
};

struct HostRank {
  int seat = 0;
  int operations = 0;  // ended
  bool computing = false;
  absl::Time computing_since;
  bool held = false;  // it stands still: at the end of its operation, or before the message behind it
  bool over = false;
};

// What runs of a pack share on a rank of a node.
struct Pass {
  int runs = 0;       // so many come
  int started = 0;    // of these
  bool held = false;  // it stands still, at the end of an operation, for one of them
  bool over = false;  // all operations have ended
  bool failed = false;
};
using PassKey = std::pair<uint64_t, int>;  // the pack's number, and the rank of its node

// A run's part of a node.
struct Host {
  WorkerMachine::RunPart part;
  bool paused = false;
  // Where messages do not mix: the pause's number (0: it goes on), how many messages a rank may begin, and
  // whether all workers have agreed on that, and all ranks here stand still.
  uint64_t pause = 0;
  int64_t most_messages = std::numeric_limits<int64_t>::max();
  bool agreed = false, still = false;
  std::vector<std::string> addresses = {};
  std::vector<LinkProbe> probes = {};
  std::vector<HostRank> ranks = {};
  std::shared_ptr<Mesh> mesh = nullptr;
  std::shared_ptr<Pass> pass = nullptr;             // null: it shares none
  std::shared_ptr<KvPrompt> kv = nullptr;           // null: K and V are dropped
  std::shared_ptr<const KvSlabs> prefix = nullptr;  // of the plan's cached tokens; null: there are none
};

struct Node {
  std::string name;
  int ranks = 1;
  int incarnation = 0;
  std::unique_ptr<WorkerMachine> machine;  // null: dead
  std::unique_ptr<HeldKv> kv;              // of this incarnation
  int64_t memory_bytes = 0;
  bool may_share = false;          // its weights
  std::map<uint64_t, Host> hosts;  // by run
  std::map<PassKey, std::weak_ptr<Pass>> passes;
  uint64_t link = 0;                  // 0: none
  absl::Time host_free_at;            // it prepares and stops runs in the order in which it was told
  absl::Time frozen_until;            // stopped: nothing happens
  absl::Time compute_frozen_until;    // its host does nothing, the control plane lives
  absl::Time partitioned_until;       // from the leader
  absl::Time data_partitioned_until;  // from its peers
};

struct Link {
  int node = 0;
  int node_incarnation = 0;
  uint64_t node_connection = 0;
  int leader_incarnation = 0;
  bool open_at_node = true;
  bool open_at_leader = true;
  bool cut = false;               // nothing arrives any more
  absl::Time to_leader, to_node;  // the last arrival: streams keep their order
};

}  // namespace meshfill::story

#endif  // MESHFILL_TESTS_SERVER_POOL_SIMULATION_MACHINES_H_
