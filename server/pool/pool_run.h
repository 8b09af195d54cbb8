// One request at the leader, as a prefill: what pool_engine.h gives to its callers.
//
// Whoever waits for one of a pack tells the observers of all: the queue waits for all in one thread.
#ifndef MESHFILL_SERVER_POOL_POOL_RUN_H_
#define MESHFILL_SERVER_POOL_POOL_RUN_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/prefill_engine.h"
#include "server/pool/leader.h"
#include "server/pool/pool_engine.h"

namespace meshfill {

// Any thread may call it. The engine outlives it.
class PoolEngine::Run final : public Prefill {
 public:
  // The request's tokens stay until the prefill goes, or Stop or Wait has returned.
  Run(PoolEngine& engine, const PrefillRequest& request, PrefillObserver* observer);
  ~Run() override;

  // ---- The engine calls these, all but the first with its mutex held.
  Leader::Request ForLeader() const;
  // It is the leader's request of that ticket, and of the pack of that number; 0: of none.
  void Attach(Leader::Ticket ticket, uint64_t pack);
  // Its rank's pass is predicted to take that: what it takes tells of all of the rank's prompts.
  void TellOfPass(const PartSeconds& predicted);
  // To the leader, by itself. RESOURCE_EXHAUSTED: there is no room beside those that live.
  absl::Status Submit();
  uint64_t pack() const;
  bool answered() const;
  void OnAnswer(absl::StatusOr<Leader::Result> answer);
  void OnLayersDone(const Leader::LayersDone& done);

  // ---- Its callers call these.
  void Stop() override;
  void Pause() override { SetPaused(true); }
  void Resume() override { SetPaused(false); }
  uint64_t place() const override;
  absl::StatusOr<PrefillResult> Wait() override;
  bool done() const override;
  void WaitForAny() override;

 private:
  class Listener;
  // What an observer has not heard yet.
  struct News {
    std::shared_ptr<Listener> listener;
    Leader::LayersDone done;
    bool anew;
  };
  static constexpr Leader::LayersDone kNothingDone = {.ticket = 0, .layers = 0, .of = 1, .attempt = 1};

  void SetPaused(bool paused);
  // What a run took that was planned with all links known.
  void Learn(const PrefillResult& result, double pack_share);
  void AddNews(std::vector<News>& news);  // with the engine's mutex held
  std::vector<Run*> OfPack();             // it and those of its pack that live; with the engine's mutex held
  // Tells observers what is new until this one has its answer, or, with `any`, one of its pack has.
  void TellUntilAnswered(bool any);

  PoolEngine& engine_;
  const PrefillRequest request_;
  const std::shared_ptr<Listener> listener_;
  Leader::Ticket ticket_ ABSL_GUARDED_BY(engine_.mu_) = 0;
  uint64_t pack_ ABSL_GUARDED_BY(engine_.mu_) = 0;                   // 0: it began by itself
  std::optional<PartSeconds> of_pass_ ABSL_GUARDED_BY(engine_.mu_);  // its rank's; none: another tells of it
  Leader::LayersDone layers_done_ ABSL_GUARDED_BY(engine_.mu_) = kNothingDone;  // of all pieces
  Leader::LayersDone told_ ABSL_GUARDED_BY(engine_.mu_) = kNothingDone;
  std::optional<absl::StatusOr<Leader::Result>> answer_ ABSL_GUARDED_BY(engine_.mu_);
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_POOL_RUN_H_
