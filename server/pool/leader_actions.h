// What the leader wants done: actions in the order in which its parts asked for them.
#ifndef MESHFILL_SERVER_POOL_LEADER_ACTIONS_H_
#define MESHFILL_SERVER_POOL_LEADER_ACTIONS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/plan/plan.h"
#include "engine/run/rank_stats.h"
#include "meshfill/v1/control.pb.h"
#include "server/observe/log_line.h"

namespace meshfill {

// What a complete run gave.
struct RunResult {
  Plan plan;  // a prompt in pieces: the last piece's plan, with the prediction of all
  std::vector<float> logits;
  std::vector<RankStats> ranks;
  std::vector<int> pool_ranks;  // the pool's rank that each of these is, when the run began
  double peak_flops = 0;        // sum of the ranks that took part
  double seconds = 0;           // this run, from Prepare to the last RankDone, without probes and pauses
  bool probed = false;          // the run measured links, too
  int pieces = 1;               // pieces that the prompt ran in: ranks' stats and seconds are sums over them
  int64_t piece_tokens = 0;     // tokens of each piece but the last; 0: there is one piece
  int64_t cached_tokens = 0;    // cached tokens before the first piece
  int attempts = 1;             // attempts at the request, each after a run that failed
  double lost_seconds = 0;      // from the first attempt's begin to this one's, without pauses
  double paused_seconds = 0;    // pauses of all attempts together
  int pack_prompts = 1;         // prompts that shared its pass, it included
  double pack_share = 1;        // of the tokens that its rank computed in the pass
};

class LeaderActions {
 public:
  using Connection = uint64_t;  // a worker's stream; numbers are never used again
  using Ticket = uint64_t;      // a request; numbers are never used again

  struct Send {
    Connection to;
    v1::LeaderMessage message;
  };
  struct Close {  // after what was sent; no event of this connection counts any more
    Connection connection;
  };
  struct Answer {
    Ticket ticket;
    absl::StatusOr<RunResult> result;
  };
  struct LayersDone {  // all ranks have done them; each piece of a prompt has all layers
    Ticket ticket;
    int layers;
    int of;
    int attempt;  // from 1 on
  };
  struct LogLine {
    std::string text;
    LogLevel level;
  };
  using Action = std::variant<Send, Close, Answer, LayersDone, LogLine>;

  // A message to fill in.
  v1::LeaderMessage& AddMessage(Connection to, uint64_t epoch) {
    Send& send = std::get<Send>(actions_.emplace_back(Send{.to = to, .message = {}}));
    send.message.set_epoch(epoch);
    return send.message;
  }
  void Add(Action action) { actions_.push_back(std::move(action)); }
  void Log(std::string text, LogLevel level = LogLevel::kInfo) {
    actions_.push_back(LogLine{std::move(text), level});
  }
  std::vector<Action> Take() { return std::exchange(actions_, {}); }

 private:
  std::vector<Action> actions_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_LEADER_ACTIONS_H_
