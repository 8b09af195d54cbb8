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
// What the ranks measure: the links of a virtual network, told by their virtual speed, and nonsense by ranks
// that fail. Half of the leaders are given the links instead.
#ifndef MESHFILL_TESTS_SERVER_POOL_SIMULATION_POOL_SIMULATION_H_
#define MESHFILL_TESTS_SERVER_POOL_SIMULATION_POOL_SIMULATION_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/pool/leader.h"
#include "server/pool/worker/held_kv.h"
#include "server/pool/worker/worker_machine.h"

namespace meshfill {

class PoolSimulation {
 public:
  explicit PoolSimulation(uint64_t seed, bool verbose = false);
  ~PoolSimulation();

  // Runs the whole story. Empty, or the first invariant that broke.
  std::string Run();

  // Totals that show that the story had what it is for.
  struct Census {
    int answers = 0, results = 0, errors = 0, retries = 0, losses = 0, poisoned = 0, cancelled = 0;
    int leases = 0, refused = 0, reads = 0, lost_reads = 0, missed_reads = 0, renewals = 0, releases = 0,
        lapses = 0;
    int behind_a_prefix = 0, evictions = 0;
    int in_pieces = 0, pieces_again = 0, pieces_lost = 0;
    int streamed = 0, shared = 0;            // runs prepared where workers may share weights
    int on_submeshes = 0, side_by_side = 0;  // runs on one, of these beside another that goes on
    int most_at_once = 0, pauses = 0, crowded_out = 0, attempts_of_innocents = 0;
    int agreements = 0;           // of all workers of a run on where to stand still
    int packs = 0, in_packs = 0;  // that began, and prompts in them
    int packs_refused = 0;        // packs that had no room
    int left_in_packs = 0;        // prompts that were computed to the end without their clients
    int packs_again = 0;          // results of prompts whose pack failed, each by a run of its own
  };
  const Census& census() const { return census_; }

 private:
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
  struct ClientRequest {
    std::vector<uint32_t> tokens;
    bool poisonous = false;
    bool calm = false;    // no fault since it was submitted, and well before
    uint64_t losses = 0;  // of workers, before it
    bool cancelled = false;
    std::set<uint64_t> runs;   // of this leader
    int attempts = 0;          // that these began
    int deaths = 0;            // in its runs, by its poison
    std::string lease;         // empty: K and V are not kept
    std::string cache_tenant;  // whose prompts it may begin like
    bool ignores_cache = false;
    int submeshes = 1;
    // The same for all of a pack, which have their turns in common. 0: it was submitted by itself.
    Leader::Ticket pack = 0;
    int pack_prompts = 1;
    double pack_share = 1;
    bool paused = false;
    absl::Time resumed_at = absl::InfinitePast();
    absl::Time submitted_at;
  };
  // A run as its workers were told of it.
  struct RunTold {
    std::vector<uint32_t> tokens;  // of the whole prompt
    std::string cache_tenant;
    std::vector<uint64_t> computed_by;  // by token, up to the end of the piece: the run
    bool stopped = false;
    bool cancelled = false;  // stopped for its client alone
    bool finished = false;
    uint64_t losses = 0;  // of workers, until it was
    bool begun = false;
    bool is_next_piece = false;                        // of its prompt: it runs where those before it did
    uint64_t pause = 0;                                // number of the last one
    std::set<uint64_t> still;                          // links whose workers stand still in it
    absl::Time paused_since = absl::InfiniteFuture();  // it goes on
    bool innocent = false;  // of its epoch's end: it had stood still for as long as a worker may be silent
    Leader::Ticket ticket = 0;
    std::map<int, int> nodes;           // its workers' incarnations
    std::map<uint64_t, int64_t> links;  // bytes that it reserves, by its worker's link
    absl::Time stopped_at = absl::InfiniteFuture();
    uint64_t pack = 0;  // 0: it shares no pass
    int pack_runs = 0, local_rank = 0;
    bool left = false;                                   // its client is gone
    bool done = false;                                   // the leader has its rank's last word
    absl::Time unwanted_since = absl::InfiniteFuture();  // nobody wants its pass
  };
  // A request before it is submitted.
  struct DrawnRequest {
    ClientRequest client;
    PrefillOptions options;
  };

  // A client's lease, as it must be.
  struct KvClient {
    int leader_incarnation = 0;
    int64_t tokens = 0;
    bool held = true;  // by its prefill
    bool ended = false;
    absl::Time expires;
    absl::Time changed_at;  // when the workers were told last
  };

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
  // The last run before it, and K and V then.
  void OnPackRefused(std::vector<DrawnRequest> drawn, uint64_t last_run,
                     const std::map<std::string, KvDirectory::WorkerKv>& kv_before);
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
  void CancelAfter(absl::Duration delay, Leader::Ticket ticket);
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
  bool sticky_ = false;                                  // turns change only when somebody comes or goes
  uint64_t poison_deaths_ = 0;                           // of workers
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
