// A worker of a pool: its membership, and the parts of runs that its ranks take.
//
// A pure state machine like the leader (leader.h): events in, actions out, the same code under the real
// control stream and in the simulation. Not thread-safe. What computes, the host (rank_host.h), obeys the run
// actions in their order.
//
//     connection:  away ──Connect──► joining ──Welcome──► member ──Goodbye──► exit
//                   ▲ backoff           │ Refused, silence    │ stream end, silence
//                   └───────────────────┴────────────────────┘
//     a run:  ─Prepare─► receiving ─last Shard─► preparing ──► prepared ─Run─► running ─Finish─► over
//                            └──────────────────────┴─────────────┴───────────────┴──► stopping ──► over
//                                        Cancel, Abort, loss of the leader
//
// Invariants:
//  - Runs are kept by number and know nothing of each other; the leader says how many live at once, and
//    which of them stand still.
//  - The host stands still before the worker joins again.
//  - Memory is reserved from Prepare to Finish or to the host's OnRunStopped, by all runs together never more
//    than was offered.
//  - What is of an unknown run is late and ignored, but Cancel and Abort are always confirmed.
#ifndef MESHFILL_SERVER_POOL_WORKER_WORKER_MACHINE_H_
#define MESHFILL_SERVER_POOL_WORKER_WORKER_MACHINE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/model/weight_feed.h"
#include "engine/plan/plan.h"
#include "engine/run/rank_runner.h"
#include "meshfill/v1/control.pb.h"
#include "server/observe/log_line.h"
#include "server/pool/worker/held_kv.h"

namespace meshfill {

class WorkerMachine {
 public:
  using Connection = uint64_t;  // an attempt to attach; numbers are never used again

  struct Options {
    v1::Join offer;
    absl::Duration progress_interval = absl::Milliseconds(200);
    absl::Duration silence_timeout = absl::Milliseconds(1500);  // of workers; their leader has twice that
    absl::Duration least_backoff = absl::Milliseconds(100);
    absl::Duration most_backoff = absl::Seconds(2);
    absl::Duration drain_timeout = absl::Hours(1);  // from Drain to the exit, whatever is left
  };

  // What a rank is at, read by the host from its compute loop.
  struct RankProgress {
    int rank = 0;
    int layers_done = 0;
    uint64_t operations = 0;  // grows while it does something
    bool computing = false;
    bool has_computed = false;
  };

  using ProgressOfRuns = std::map<uint64_t, std::vector<RankProgress>>;  // by the run's number

  // Which of the shared weights a run's worker keeps.
  struct RunWeights {
    WeightShare share;  // `of` 0: the weights are not shared
    int head = 0;       // the share of whose worker reads the LM head
  };

  // The runs that share a pass of one rank, each with a prompt of its own.
  struct RunPack {
    uint64_t number = 0;
    int runs = 0;
  };

  // The part of a run that this worker takes.
  struct RunPart {
    uint64_t number = 0;
    uint64_t epoch = 0;
    Plan plan;
    int first_rank = 0;
    int64_t reserve_bytes = 0;
    std::optional<HeldKv::Keeping> keep_kv;  // none: K and V are dropped
    RunWeights weights = {};
    std::vector<HeldKv::RunTokens> prefix;  // runs that computed K and V of the plan's cached tokens
    int64_t tokens_ahead = 0;               // prompt tokens of later runs; above 0: this run has no logits
    int local_rank = 0;                     // the worker's, of the first seat; the others follow
    std::optional<RunPack> pack;            // none: the run shares no pass
    std::vector<std::vector<uint32_t>> shards;  // tokens by rank of this worker, by slot
  };

  // ---- Actions.
  struct Connect {
    Connection connection;
  };
  struct Disconnect {  // no event of this connection counts any more
    Connection connection;
  };
  struct Send {
    v1::WorkerMessage message;
  };
  struct PrepareRun {  // → OnRunPrepared
    RunPart part;
  };
  struct StartRun {  // → OnRankDone for each rank
    uint64_t run;
    std::vector<std::string> addresses;  // by rank of the whole run, then by share of the weights
    std::vector<LinkProbe> probes;       // pairings of its ranks, for before the first layer
  };
  struct PauseRun {  // between two tiles, until ResumeRun or StopRun
    uint64_t run;
    uint64_t number;  // above 0: → OnRunPaused, with the messages that have begun
  };
  struct PauseRunAt {  // → OnRunPaused, once all ranks stand still
    uint64_t run;
    uint64_t number;
    int64_t messages;
  };
  struct ResumeRun {
    uint64_t run;
  };
  struct StopRun {  // at a block's boundary, whatever it is at; → OnRunStopped, then nothing more of this run
    uint64_t run;
    std::string reason;
  };
  struct ReleaseRun {  // it is done everywhere: let go of connections and memory
    uint64_t run;
  };
  struct KvLasts {
    std::string lease;
    absl::Duration lasts;  // from now on
  };
  struct KvEnds {  // the lease may be of a run that was prepared before
    std::string lease;
  };
  struct KvRunEnds {  // the run may have been prepared before
    uint64_t run;
  };
  struct ForgetSpeed {};  // what is kept of it is wrong
  struct AllKvEnds {};    // a leader that has just let this worker in knows of none
  struct Exit {
    absl::Status status;
  };
  struct LogLine {
    std::string text;
    LogLevel level;
  };
  using Action =
      std::variant<Connect, Disconnect, Send, PrepareRun, StartRun, PauseRun, PauseRunAt, ResumeRun, StopRun,
                   ReleaseRun, KvLasts, KvEnds, KvRunEnds, AllKvEnds, ForgetSpeed, Exit, LogLine>;

  // `progress` tells what the ranks of all runs are at now; it is asked within OnTick, OnMessage and
  // OnRankDone.
  WorkerMachine(Options options, std::function<ProgressOfRuns()> progress)
      : options_(std::move(options)), progress_(std::move(progress)) {}

  // ---- Events. `now` never falls and never jumps: no time of day (kernels/monotonic_time.h).
  void Start(absl::Time now);
  void OnMessage(Connection connection, const v1::LeaderMessage& message, absl::Time now);
  void OnDisconnected(Connection connection, const absl::Status& why, absl::Time now);
  void OnTick(absl::Time now);  // a few times in a second
  // Finish the runs, leave, exit. The leader lets go once nobody needs what this worker holds.
  void Drain(absl::Time now);

  // On the host's side.
  void OnRunPrepared(uint64_t number, absl::StatusOr<std::vector<std::string>> addresses);
  void OnRankDone(uint64_t number, int rank, absl::StatusOr<RankOutput> output);
  // `pause`: the number of PauseRun.
  void OnRunPaused(uint64_t number, uint64_t pause, int64_t messages, bool still);
  void OnRunStopped(uint64_t number, absl::Time now);

  std::vector<Action> TakeActions();

  bool member() const { return link_ == Link::kMember; }
  int64_t reserved_bytes() const;  // by all runs

 private:
  enum class Link { kAway, kJoining, kMember, kExited };
  enum class Phase { kReceiving, kPreparing, kPrepared, kRunning, kStopping };
  struct ActiveRun {
    RunPart part;
    Phase phase = Phase::kReceiving;
    bool confirm = false;  // the leader wants to hear Stopped
    uint64_t hash = 0;     // RunHash, once the shards are complete: they go to the host
  };

  void SendProgress();
  // At once, if it runs: the leader blames a prompt for its run's end only where its ranks have computed.
  void SendProgressOf(uint64_t number);
  void AddProgress(uint64_t number, const ActiveRun& run, const ProgressOfRuns& progress);
  void OnRefused(const v1::Refused& refused, absl::Time now);
  void OnPrepare(const v1::Prepare& message, uint64_t epoch);
  void OnShard(const v1::Shard& message);
  void RefuseRun(uint64_t number, uint64_t epoch, const absl::Status& why);  // the leader ends it
  void MaybePrepare(ActiveRun& run);                                         // once its shards are complete
  void OnRun(const v1::Run& message);
  void OnFinish(uint64_t number);
  void OnStop(uint64_t number, uint64_t epoch, const std::string& reason);
  void OnGoodbye();
  void OnKvEnds(const std::string& lease);
  // The run if it is in this phase, else null.
  ActiveRun* Find(uint64_t number, Phase phase);
  // The run may be over at once: it is gone then.
  void StopRunning(uint64_t number, const std::string& reason);

  void Detach(const std::string& why, absl::Time now);
  void MaybeExit();
  v1::WorkerMessage& AddMessage(uint64_t epoch);
  void Log(std::string text, LogLevel level = LogLevel::kInfo) {
    actions_.push_back(LogLine{std::move(text), level});
  }

  const Options options_;
  const std::function<ProgressOfRuns()> progress_;
  Link link_ = Link::kAway;
  Connection connection_ = 0;
  absl::Time heard_at_;
  absl::Time connect_at_ = absl::InfiniteFuture();  // while away
  absl::Duration backoff_ = absl::ZeroDuration();
  std::set<std::string> troubles_;  // on the way in, logged: each once until it has joined
  bool draining_ = false;
  absl::Time drain_until_ = absl::InfiniteFuture();
  uint64_t epoch_ = 0;
  uint64_t last_run_ = 0;  // the newest of this connection
  absl::Time last_progress_ = absl::InfinitePast();
  std::map<uint64_t, ActiveRun> runs_;  // by number
  std::vector<Action> actions_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_WORKER_WORKER_MACHINE_H_
