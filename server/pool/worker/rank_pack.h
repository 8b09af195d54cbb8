// The runs of a pack on one rank of a worker (engine/plan/pack.h): each brings its prompt, and one pass over
// the weights computes them all.
//
//     run 1 ──Compute──► waits ─────────────────────────────────► its output
//     run 2 ──Compute──► waits ─────────────────────────────────► its output
//     run 3 ──Compute──► the last one: computes all three ──────► its output
//
// What ends one of them before that, ends all: the leader tries each by itself then. Thread-safe.
#ifndef MESHFILL_SERVER_POOL_WORKER_RANK_PACK_H_
#define MESHFILL_SERVER_POOL_WORKER_RANK_PACK_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/embedded_pool.h"
#include "engine/run/prompt_attention.h"
#include "engine/run/rank_runner.h"
#include "kernels/mutex.h"
#include "kernels/stop_token.h"
#include "server/pool/worker/counting_stream.h"

namespace meshfill {

class RankPack {
 public:
  // Of so many runs, on that rank of the pool, which outlives it.
  RankPack(const EmbeddedPool& pool, int rank, int runs) : pool_(pool), rank_(rank), runs_(runs) {}

  int runs() const { return runs_; }

  // A run's part of the pass: waits for the other runs, and until all are computed. Its stats are its share
  // of the rank's, by tokens. Once for each run, on a thread of its own; `on_layer_done` as RankRun's.
  // ABORTED: the pass failed, or is ended. INTERNAL: more come than it is of.
  absl::StatusOr<RankOutput> Compute(const RankPrompt& prompt, std::function<void(int layer)> on_layer_done);

  // The pass stands still while any of its runs does.
  void Pause(uint64_t run);
  void Resume(uint64_t run);
  // The pass ends soon, for all. Nothing happens once it is over.
  void Abort(const absl::Status& reason);
  // As CountingStream has it; 0 until the pass begins.
  uint64_t operations() const;

 private:
  struct Part {
    const RankPrompt& prompt;
    std::function<void(int layer)> on_layer_done;
    absl::StatusOr<RankOutput> output;
  };

  // Of all runs, on the last one's thread.
  absl::StatusOr<RankOutput> ComputePass(const std::vector<RankPrompt>& prompts);
  void Share(const absl::StatusOr<RankOutput>& pass) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const EmbeddedPool& pool_;
  const int rank_;
  const int runs_;
  StopToken stop_;
  mutable Mutex mu_;
  CondVar over_changed_;
  std::vector<Part*> parts_ ABSL_GUARDED_BY(mu_);  // each on the stack of its Compute
  std::set<uint64_t> paused_ ABSL_GUARDED_BY(mu_);
  bool computes_ ABSL_GUARDED_BY(mu_) = false;  // all have come
  bool over_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status reason_ ABSL_GUARDED_BY(mu_);  // why it was ended
  std::unique_ptr<CountingStream> stream_ ABSL_GUARDED_BY(mu_);
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_WORKER_RANK_PACK_H_
