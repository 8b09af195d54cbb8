// A pool in virtual time: one leader and up to eight workers, the real state machines, on a network and
// machines that fail. Everything that happens is drawn from one seed, so a failing seed replays.
//
// Several requests live at once, each as long as it lasts. One has the turn, the others stand still; who has
// it changes whenever somebody comes or goes, and in between. Memory is too small for many of them. In quiet
// stories nothing fails but what poisonous requests kill.
//
// What fails: streams (cut, or half-open, so that one side learns it late), messages (late, twice; in order
// within one stream), partitions of the control and of the data plane, workers (killed at named steps,
// stopped, frozen in compute, short of memory, with a wrong shard) that come back under their name, workers
// with a name that is taken, and the leader (killed and started again). Faults last for a while; then the
// pool must heal.
//
// What shares a device: in some stories messages of runs do not mix. Then one run on a worker has some under
// way, and all ranks of one that stands still have begun the same ones.
//
// What runs side by side: in some stories requests take sub-meshes. Those that may take as many of them go on
// at once, none beside another while a sub-mesh is idle, and none is stopped for the loss of a worker that it
// has no part of.
//
// What is computed: each rank adds up a hash of its tokens and positions; the rank of the last token answers
// with the sum over the mesh and the run's number as its logits. So a result of an incomplete or an old run
// shows.
//
// What is kept: nearly all requests want K and V under a lease, which a client reads, renews, releases or
// lets lapse. Each token's K says which run computed it, and from which id. A reader finds the whole K and V
// of one run and of those that it followed, or none.
//
// What is cached: prompts begin like earlier ones. What a run adds up of a cached prefix is what its ranks
// have kept of it, so that a wrong one shows.
//
// What runs in pieces: in some stories the ranks' memory takes the longest prompts in pieces alone. Each
// piece runs behind those before it, all of which are there, and a result is that of exactly one run of each.
//
// What is left: in half of the stories long runs leave memory of each rank to short ones.
//
// What is shared: in some stories the workers may share weights that they would stream. All of a run agree on
// whose share is which, and shares of runs that live take of the memory.
//
// What shares a pass: in some stories a few short prompts are submitted together, each for a rank of the
// pool. Those on one rank begin, stand still and end together there, or fail together and run again by
// themselves. Each has its own result. Who loses its client computes on while another of the pass is wanted.
//
// Whose turn it is: drawn at random in half of the stories. In the others the server's own queue says it
// (queue.h), and who enters, and which sub-mesh or pack a prompt gets.
//
// What the ranks measure: the links of a virtual network, told by their virtual speed, and nonsense by ranks
// that fail. Half of the leaders are given the links instead.
#ifndef MESHFILL_TESTS_SERVER_POOL_SIMULATION_POOL_SIMULATION_H_
#define MESHFILL_TESTS_SERVER_POOL_SIMULATION_POOL_SIMULATION_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/pool/leader.h"
#include "server/pool/worker/held_kv.h"
#include "server/pool/worker/worker_machine.h"
#include "tests/server/pool/simulation/census.h"
#include "tests/server/pool/simulation/machines.h"
#include "tests/server/pool/simulation/queue.h"
#include "tests/server/pool/simulation/queue_clients.h"
#include "tests/server/pool/simulation/requests.h"

namespace meshfill {

class PoolSimulation {
 public:
  explicit PoolSimulation(uint64_t seed, bool verbose = false);
  ~PoolSimulation();

  // Runs the whole story. Empty, or the first invariant that broke.
  std::string Run();

  using Census = story::Census;
  const Census& census() const { return census_; }

 private:
  friend class QueueClients;
  friend class QueueWatch;
  friend class StoryQueue;
  static constexpr int kLayers = 3;
  static constexpr int kOperations = 2 * kLayers;  // of a rank in a run
  static constexpr int kVocab = 4;

  // Steps of a worker at which it can be killed.
  enum class Step {
    kJoin,
    kPrepare,
    kShard,
    kHostPrepare,
    kPrepared,
    kRun,
    kCompute,
    kRankDone,
    kFinish,
    kAbort,
    kStopped
  };
  static constexpr int kSteps = 11;

  using Mesh = story::Mesh;
  using HostRank = story::HostRank;
  using Pass = story::Pass;
  using Host = story::Host;
  using Node = story::Node;
  using Link = story::Link;
  using ClientRequest = story::ClientRequest;
  using RunTold = story::RunTold;
  using DrawnRequest = story::DrawnRequest;
  using KvClient = story::KvClient;

  // ---- Time: pool_simulation.cc.
  void At(absl::Time when, int node, std::function<void()> what);  // node −1: not a worker's
  void After(absl::Duration delay, int node, std::function<void()> what) {
    At(now_ + delay, node, std::move(what));
  }
  void Fail(const std::string& what);
  void Note(const std::string& what) const;
  void CheckEnd();

  int Draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  bool Chance(double probability) { return std::bernoulli_distribution(probability)(random_); }
  absl::Duration DrawMs(int low, int high) { return absl::Milliseconds(Draw(low, high)); }
  absl::Duration Latency();

  // ---- Machines: machines.cc.
  int64_t RankBytes() const;
  void StartLeader();
  void CrashLeader();
  void StartNode(int node);
  void CrashNode(int node, bool half_open);
  void TickLeader(int incarnation);
  void CheckHungRanksAreLost();
  bool IsMember(const Node& node);
  static WorkerMachine::ProgressOfRuns ProgressOf(const Node& node);
  void TickNode(int node, int incarnation);
  void DoLeaderActions();
  void DoNodeActions(int node);
  bool MayCrashAt(int node, Step step);

  // ---- Network: network.cc.
  void Connect(int node, uint64_t connection);
  void CutLink(uint64_t link, bool tell_leader, bool tell_node);
  void CloseAtNode(uint64_t link);
  void CloseAtLeader(uint64_t link);
  void DeliverToNode(uint64_t link, v1::LeaderMessage message);
  void DeliverToLeader(uint64_t link, v1::WorkerMessage message);

  // ---- Computing: computing.cc.
  void CheckWeights(const Node& node, const WorkerMachine::RunPart& part);
  void PrepareHost(int node, WorkerMachine::RunPart part);
  void StartHost(int node, const WorkerMachine::StartRun& start);
  void PauseHost(int node, const WorkerMachine::PauseRun& pause);
  void PauseHostAt(int node, const WorkerMachine::PauseRunAt& pause);
  void ResumeHost(int node, uint64_t run);
  void LetGo(int node, Host& host);  // what is held and may go on, each rank in its own time
  void TellStill(int node, Host& host);
  // That its messages are alone on the worker, from now on.
  void CheckAlone(const Node& node, uint64_t run);
  void StopHost(int node, uint64_t run);
  // Null: it is gone, or of another mesh.
  Host* HostOfMesh(int node, int incarnation, const std::shared_ptr<Mesh>& mesh);
  void BeginOperation(int node, uint64_t run, int seat);
  void EndOperation(int node, uint64_t run, int seat);
  void PassBarrier(const std::shared_ptr<Mesh>& mesh, int operation);
  void FinishRank(int node, uint64_t run, int seat);
  void RankFails(const std::shared_ptr<Mesh>& mesh, int rank);
  static bool IsPoisonous(const Host& host, int seat);
  void CountDeath(const Host& host);  // of a worker, by the run's poison
  // Of the tokens that a rank computes, and of those of the prefix that it has.
  uint64_t Digest(const Host& host, int seat) const;
  static uint64_t Mix(uint64_t token, uint64_t id);

  // ---- Passes that runs share on a node: passes.cc.
  void JoinPass(Node& node, Host& host);  // as it is prepared
  void StartInPass(int node, uint64_t run);
  static bool PassPaused(const Node& node, const Pass& pass);
  void ResumePass(int node, const std::shared_ptr<Pass>& pass);
  void BeginPassOperation(int node, const std::shared_ptr<Pass>& pass);
  void EndPassOperation(int node, const std::shared_ptr<Pass>& pass);
  // The members that have started hear of it, but for the one that is being stopped.
  void FailPass(int node, const std::shared_ptr<Pass>& pass, uint64_t but_for);
  void FailInPass(int node, uint64_t run);
  // Those that have started and are still there.
  static std::vector<std::pair<const uint64_t, Host>*> MembersOf(Node& node, const Pass& pass);
  static int LivesOn(const Node& node);  // runs, a pack as one

  // ---- Links that ranks measure: links.cc.
  void CheckProbes(const std::vector<LinkProbe>& probes, const WorkerMachine::RunPart& part);
  std::optional<meshfill::Link> MeasuredLink(const LinkProbe& probe, const Mesh& mesh, int rank);
  void CheckLinks(bool all_measured);

  // ---- Runs, as their workers are told of them: runs.cc.
  void OnTold(uint64_t link, const v1::LeaderMessage& message);
  void OnRunTold(const v1::Prepare& prepare);
  void OnStillTold(uint64_t link, const v1::Paused& paused);
  void CheckSubmesh(uint64_t run);
  void CheckWorkersLost(const RunTold& told);
  int EpochsEnded(const ClientRequest& request) const;  // by its runs, at most

  // ---- Packs, as their clients and their workers see them: packs.cc.
  void SubmitPackNext();
  // As many as are drawn, and their packs' places. Empty: there was no room, and nothing of it is left.
  std::vector<Leader::Ticket> BeginPack(std::vector<DrawnRequest>& drawn,
                                        std::vector<Leader::PackedRequest> packed, double seconds);
  // The last run before it, and K and V then.
  void CheckPackLeftNothing(uint64_t last_run, const std::map<std::string, KvDirectory::WorkerKv>& kv_before);
  void OnPackRefused(std::vector<DrawnRequest> drawn);
  int LiveOfClients() const;  // requests, a pack as one
  void CheckPackPlaces(const std::vector<Leader::Ticket>& tickets,
                       const std::vector<Leader::PackedRequest>& packed);
  void OnPackTold(uint64_t link, const v1::Prepare& prepare);
  // The other runs of its pass.
  std::vector<RunTold*> MatesOf(const RunTold& run);
  bool Lives(const RunTold& run) const;  // at the leader
  int LivePlaces() const;                // of the runs that live, a pack as one
  static bool StandsStill(const RunTold& run);
  void CheckToldTogether();  // at the end of what the leader does at once
  void CheckLivePlaces();
  void CheckNobodyWaitsInVain();
  void CheckUnwantedPasses();

  // ---- K and V: kv.cc.
  std::string AdmitKv(int64_t tokens);  // the lease; empty: none
  void KeepLayers(const Host& host, int seat);
  void OnPrefillEnded(const std::string& lease, bool done);
  void UseLease(const std::string& lease);
  void ReadLease(const std::string& lease);
  // What the holders have. Empty, or why it cannot be read.
  std::string ReadHolders(const std::string& lease, const KvDirectory::Place& place, uint64_t run);
  void EndLease(const std::string& lease);
  void CheckKvBudgets();

  // ---- Clients: clients.cc.
  std::vector<uint32_t> DrawPrompt(int lengths);  // one of so many lengths, from the shortest on
  void SubmitNext();
  DrawnRequest DrawRequest(bool last, bool for_pack);
  Leader::Ticket SubmitAlone(DrawnRequest drawn);
  void NoteSubmitted(ClientRequest& request);
  void CancelAfter(absl::Duration delay, Leader::Ticket ticket);
  void CancelAtLeader(Leader::Ticket ticket);
  void SubmitAgainAfter(absl::Duration delay) {
    After(delay, -1, [this] { SubmitNext(); });
  }
  // Somebody's turn; `ticket` 0: of a random one.
  void GiveTurn(Leader::Ticket ticket);
  void ChangeTurns();
  std::string Missing();  // workers that are not in the pool
  void OnAnswer(const Leader::Answer& answer);
  void CheckNothingRuns();
  ClientRequest* RequestOf(const WorkerMachine::RunPart& part);

  // ---- Chaos: chaos.cc.
  void Chaos();
  void Heal();
  bool CalmSince(absl::Time since) const { return last_fault_end_ < since; }
  void Fault(absl::Duration duration);

  const uint64_t seed_;
  const bool verbose_;
  std::mt19937_64 random_;
  absl::Time now_ = absl::UnixEpoch();
  struct Event {
    absl::Time when;
    uint64_t order;
    int node;
    std::function<void()> what;
  };
  struct Later {
    bool operator()(const Event& left, const Event& right) const {
      return left.when != right.when ? left.when > right.when : left.order > right.order;
    }
  };
  std::vector<Event> events_;  // a heap
  uint64_t last_order_ = 0;

  std::unique_ptr<Leader> leader_;  // null: dead
  int leader_incarnation_ = 0;
  bool leader_measures_links_ = false;
  std::vector<Node> nodes_;
  bool messages_mix_ = true;
  std::map<uint64_t, Link> links_;
  uint64_t last_link_ = 0;
  std::map<std::string, std::shared_ptr<Mesh>> meshes_;  // by the run's addresses
  std::map<std::pair<int, Step>, int> crash_plan_;       // → how many passes until the crash
  std::map<uint64_t, RunTold> runs_told_;                // of this leader
  std::vector<std::vector<uint32_t>> prompts_;           // that later ones may begin like
  std::map<Leader::Ticket, ClientRequest> requests_;     // that have no answer yet
  std::vector<uint64_t> told_now_;                       // runs, until what the leader does at once is done
  std::set<Leader::Ticket> refused_;                     // answered, of a pack that did not begin
  bool refuses_pack_ = false;                            // while it answers these
  Leader::Ticket turn_ = 0;                              // whose turn it is; 0: everybody's
  int most_requests_ = 1;                                // that live at once
  int runs_at_once_ = 1;                                 // of this leader
  bool quiet_ = false;                                   // nothing fails but by poison
  bool packs_ = false;                                   // requests may share passes
  bool small_ = false;                                   // long prompts run in pieces
  int64_t weight_bytes_ = 0;                             // that workers may share; 0: they may not
  int64_t short_rank_bytes_ = 0;                         // of each rank that long runs leave to short ones
  bool side_by_side_ = false;                            // requests may take sub-meshes
  std::unique_ptr<StoryQueue> queue_;                    // null: turns are drawn, or the leader is dead
  QueueClients queue_clients_{*this};
  bool queued_ = false;         // turns are the queue's
  bool sticky_ = false;         // turns change only when somebody comes or goes
  uint64_t poison_deaths_ = 0;  // of workers
  std::map<std::string, KvClient> leases_;
  int requests_left_ = 0;
  absl::Time chaos_ends_;
  absl::Time last_fault_end_ = absl::InfinitePast();
  bool healed_ = false;
  bool final_answered_ = false;
  std::string failure_;
  Census census_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_POOL_SIMULATION_POOL_SIMULATION_H_
