// The leader of a pool: membership, epochs, and one run at a time over the workers that are there.
//
// A pure state machine: events with their time go in, actions come out. No threads, no clock, no network, so
// that the server (pool_engine.h) and the deterministic simulation run the very same code. Not thread-safe.
//
//              Submit                all Prepared              all RankDone
//     idle ─────────────► preparing ──────────────► running ────────────────► idle   (Finish, the answer)
//      ▲                      │ cancel, a worker is lost, a rank fails │
//      │   all Stopped        ▼                                        ▼
//      └──────────────────────────────── stopping ◄────────────────────┘
//        then the same request again, planned over who is left, unless it has been answered
//
// Invariants:
//  - A request is answered exactly once, with the result of one complete run or with one error.
//  - No run begins before every worker of the last one has confirmed its end or is out of the pool.
//  - A worker is out when its stream ends, when it is silent for silence_timeout, when an operation of its
//    compute loop takes longer than hang_timeout (or ten times the predicted block), when it does not answer
//    Prepare, Cancel or Abort in time, or when it speaks of an epoch that is not yet. It may join again.
//  - A request whose runs ended two epochs is refused as poisonous.
#ifndef MESHFILL_SERVER_POOL_LEADER_H_
#define MESHFILL_SERVER_POOL_LEADER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/plan/cost_model.h"
#include "engine/prefill_engine.h"
#include "meshfill/v1/control.pb.h"
#include "server/pool/link_survey.h"

namespace meshfill {

inline constexpr uint32_t kControlProtocol = 3;

// What the pool can do now, as a plan needs it: the slowest rank's speed, the tightest rank's memory, and
// which seats are on one host.
struct PoolCapacity {
  int ranks = 0;
  PoolSpeed speed;
  Topology topology;
  int64_t rank_memory_bytes = 0;  // 0: no limit
};

// Chooses how many of the ranks to use, and their plan. A pure function.
using PoolPlanner = std::function<absl::StatusOr<PlanChoice>(const PoolCapacity& capacity, int64_t tokens,
                                                             const PrefillOptions& options)>;

class Leader {
 public:
  using Connection = uint64_t;  // a worker's stream; numbers are never used again
  using Ticket = uint64_t;      // a request; likewise

  struct Options {
    std::string build;
    v1::ModelId model;  // weights_hash 0: that of the first worker counts while the pool is not empty
    int layers = 1;     // of the model
    int64_t vocab = 1;
    ConfiguredLinks links;
    uint64_t first_epoch = 1;
    absl::Duration heartbeat_interval = absl::Milliseconds(200);
    absl::Duration silence_timeout = absl::Milliseconds(1500);
    absl::Duration hang_timeout = absl::Seconds(2);
    absl::Duration prepare_timeout = absl::Seconds(5);  // and a second for each million tokens
    absl::Duration stop_timeout = absl::Seconds(2);
    absl::Duration join_timeout = absl::Seconds(5);    // from a connection to its Join
    absl::Duration empty_timeout = absl::Seconds(10);  // how long a request waits for a worker to come
  };

  struct Request {
    std::string id;
    std::span<const uint32_t> tokens;  // valid until the answer
    PrefillOptions options;
  };

  struct Result {
    Plan plan;
    std::vector<float> logits;
    std::vector<RankStats> ranks;
    double peak_flops = 0;  // of the ranks that took part
    double seconds = 0;     // of this run, from Prepare to the last RankDone, without probes
    bool probed = false;    // the run measured links, too
  };

  // ---- Actions, in the order in which they are to be done.
  struct Send {
    Connection to;
    v1::LeaderMessage message;
  };
  struct Close {  // after what was sent; no event of this connection counts any more
    Connection connection;
  };
  struct Answer {
    Ticket ticket;
    absl::StatusOr<Result> result;
  };
  struct LayersDone {  // by all ranks of the present run
    Ticket ticket;
    int layers;
  };
  struct LogLine {
    std::string text;
  };
  using Action = std::variant<Send, Close, Answer, LayersDone, LogLine>;

  // ---- What dashboards ask.
  enum class WorkerState { kReady, kPreparing, kRunning, kStopping, kDraining };
  struct WorkerView {
    const v1::Join* offer;
    WorkerState state;
    int first_rank;  // in the present run; -1: none
    int ranks_in_use;
  };
  struct Counters {
    uint64_t epochs = 0;
    uint64_t joins = 0;
    uint64_t losses = 0;  // streams that ended without Leave, silent and hung workers
    uint64_t refusals = 0;
    uint64_t retries = 0;  // runs begun again for the same request
  };

  Leader(Options options, PoolPlanner planner);

  // ---- Events. `now` never falls and never jumps: no time of day (kernels/monotonic_time.h).
  void OnConnected(Connection connection, absl::Time now);
  void OnMessage(Connection connection, const v1::WorkerMessage& message, absl::Time now);
  void OnDisconnected(Connection connection, absl::Time now);
  void OnTick(absl::Time now);  // a few times in a second
  // At most one request is live: from Submit to its Answer.
  Ticket Submit(const Request& request, absl::Time now);
  // Answers with `reason` at once; the ranks stop. Too late where the answer is out.
  void CancelRequest(Ticket ticket, absl::Status reason, absl::Time now);

  std::vector<Action> TakeActions();

  uint64_t epoch() const { return epoch_; }
  // Of the workers that are there to stay.
  PoolCapacity capacity() const;
  std::vector<PoolLink> links() const { return survey_.Describe(capacity().topology, membership_changed_); }
  double peak_flops() const;
  std::vector<WorkerView> workers() const;  // in the order of their ranks
  const Counters& counters() const { return counters_; }
  bool idle() const { return !run_.has_value() && !request_.has_value(); }

 private:
  struct Worker {
    Connection connection = 0;
    v1::Join offer;
    bool leaving = false;
    absl::Time heard_at;
  };
  struct Seat {  // of one rank in the run
    Connection worker = 0;
    std::string address;
    int layers_done = 0;
    uint64_t operations = 0;
    bool computing = false;
    absl::Time moved_at;  // when `operations` last grew
    bool done = false;
    RankStats stats;
    LinkSurvey::RankLinks links;
    double probe_seconds = 0;
  };
  enum class Phase { kPreparing, kRunning, kStopping };
  struct ActiveRun {
    uint64_t number = 0;
    uint64_t epoch = 0;
    Plan plan;
    std::vector<Seat> seats;               // by rank
    std::map<Connection, int> first_rank;  // of the workers that take part
    std::map<Connection, uint64_t> expected_hash;
    std::set<Connection> unanswered;  // Prepare, or Cancel or Abort, not answered yet
    Phase phase = Phase::kPreparing;
    absl::Time begin;
    absl::Time deadline;  // of preparing and stopping
    absl::Duration hang_timeout;
    int layers_done = 0;
    LinkSurvey::Probes probes;
    std::vector<float> logits;
  };
  struct LiveRequest {
    Ticket ticket = 0;
    Request request;
    absl::Time waiting_since;
    int attempts = 0;
    int epochs_ended = 0;
  };

  void OnJoin(Connection connection, const v1::Join& offer, uint64_t heard_epoch, absl::Time now);
  absl::Status CheckOffer(const v1::Join& offer, uint64_t heard_epoch, bool& retry) const;
  // Says why, closes, and logs each reason once for a name; the name of a stranger is empty.
  void Refuse(Connection connection, const std::string& name, const std::string& reason, bool retry);
  void OnPrepared(Worker& worker, const v1::Prepared& message, absl::Time now);
  void OnProgress(const Worker& worker, const v1::WorkerProgress& message, absl::Time now);
  void OnRankDone(const Worker& worker, const v1::RankDone& message, absl::Time now);
  void OnStopped(Connection connection, absl::Time now);
  void OnLeave(Worker& worker);

  // Takes workers out of the pool, and with them the run that one of them takes part in.
  void Lose(const std::set<Connection>& connections, const std::string& why, absl::Time now);
  // Stops the run: its request goes again (where it is still live), unless it is poisonous.
  void EndEpoch(const std::string& why, absl::Time now);
  // Stops the run without ending the epoch.
  void StopRun(absl::Time now);
  void BeginStopping(absl::Time now);
  void StoppingMayBeOver(absl::Time now);
  void FinishRun(absl::Time now);
  void StartNext(absl::Time now);
  void BeginRun(Plan plan, const std::vector<const Worker*>& workers, absl::Time now);
  void SendPrepare(const Worker& worker, int first_rank, int ranks);
  void SendRun(absl::Time now);
  void TakeLinks(Result& result);
  void CheckProgress(absl::Time now);
  void LetGoOfLeaving();

  std::vector<const Worker*> ByPlace() const;  // who is there to stay, hosts together
  bool InRun(Connection connection) const {
    return run_.has_value() && run_->first_rank.contains(connection);
  }
  bool IsOfRun(const v1::WorkerMessage& message, uint64_t run) const;
  void AnswerRequest(absl::StatusOr<Result> result);
  v1::LeaderMessage& AddMessage(Connection to, uint64_t epoch);
  void Log(std::string text) { actions_.push_back(LogLine{std::move(text)}); }

  const Options options_;
  const PoolPlanner planner_;
  std::map<Connection, absl::Time> strangers_;  // connected, not joined: since when
  std::map<Connection, Worker> workers_;
  std::set<std::pair<std::string, std::string>> refused_;  // name and reason, logged
  uint64_t weights_hash_;                                  // of the pool; 0: nobody has said yet
  LinkSurvey survey_;
  uint64_t epoch_;
  bool membership_changed_ = true;  // since the epoch began
  uint64_t last_run_ = 0;
  Ticket last_ticket_ = 0;
  absl::Time last_heartbeat_ = absl::InfinitePast();
  std::optional<ActiveRun> run_;
  std::optional<LiveRequest> request_;
  Counters counters_;
  std::vector<Action> actions_;
};

const char* WorkerStateName(
    Leader::WorkerState state);  // "ready", "preparing", "running", "stopping", "draining"

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_LEADER_H_
