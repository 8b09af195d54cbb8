// A prompt in pieces at the leader: what its request runs next, and what it has from the runs before.
//
//     piece 0 ──run──► K and V stay ──► piece 1 ──run──► … ──► the last one: logits, and the request's result
//                                          └── the run fails: the piece runs again
//
// The workers of the first piece take all of them, each the same ranks: who joins meanwhile changes nothing,
// and who drains stays. Once one of them is lost, its part of K and V is, too: the prompt begins anew.
//
// Part of the leader's state machine (leader.h). Not thread-safe.
#ifndef MESHFILL_SERVER_POOL_PROMPT_PIECES_H_
#define MESHFILL_SERVER_POOL_PROMPT_PIECES_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/kv/kv_slabs.h"
#include "engine/plan/plan.h"
#include "server/pool/leader_actions.h"

namespace meshfill {

class PromptPieces {
 public:
  using Connection = LeaderActions::Connection;

  // `choice` is in pieces. `workers` by place.
  PromptPieces(PlanChoice choice, std::vector<Connection> workers);

  // The piece that runs, or runs next. It takes the memory of the largest one, so that none waits for more.
  Plan plan() const;
  bool first() const { return done_ == 0; }
  bool last() const { return done_ + 1 == count(); }
  int64_t tokens_ahead() const;  // tokens of the pieces after it
  int done() const { return done_; }
  int count() const { return static_cast<int>(pieces_.size()); }

  const std::vector<Connection>& workers() const { return workers_; }
  bool Has(Connection worker) const;
  bool shares_weights() const { return shares_weights_; }

  // K and V of the tokens before the piece.
  const KvSlabs& before() const { return before_; }
  // Room for the pieces that do not run (KvDirectory::BeginRun); null: none is charged.
  void HoldAhead(std::shared_ptr<const KvRunSlabs> ahead) { ahead_ = std::move(ahead); }

  // The piece is done, and is not the last one.
  void OnDone(RunResult result, KvSlabs kept);
  // The last one is: what the whole prompt gave.
  RunResult Finish(RunResult last) const;
  double seconds() const { return so_far_.seconds; }  // seconds of the runs that are done

 private:
  std::vector<Plan> pieces_;  // pieces to come have their ranks where those that are done had them
  Prediction predicted_;      // the prediction of all pieces
  std::vector<Connection> workers_;
  bool shares_weights_;  // the workers do
  int done_ = 0;
  KvSlabs before_;
  std::shared_ptr<const KvRunSlabs> ahead_;
  RunResult so_far_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_PROMPT_PIECES_H_
