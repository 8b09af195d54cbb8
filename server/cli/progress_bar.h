// A progress bar on a terminal: layers done, percent, elapsed and remaining time, redrawn in place.
#ifndef MESHFILL_SERVER_CLI_PROGRESS_BAR_H_
#define MESHFILL_SERVER_CLI_PROGRESS_BAR_H_

#include <functional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"

namespace meshfill {

struct PrefillProgress {
  int before = 0;           // requests whose turn comes first; above 0 and no layers known: it is queued
  double wait_seconds = 0;  // predicted wait for these requests
  int layers_done = 0;
  int layers = 0;              // 0: not known yet
  double elapsed_seconds = 0;  // since it was accepted or, once that is known, since it began to compute
  // Computing, until the last of layers_done was done; without lost runs.
  double computed_seconds = 0;
  double since_layer_seconds = 0;  // since then, whether it computes or stands still
  double predicted_seconds = 0;    // the whole prefill; 0: unknown. Used until the first layer is done.
};

// "prefill [=====>      ] 12/32 layers  38 %  12 s, 20 s left", or "queued, 2 before it, about 24 s", at most
// `width` columns. Time alone claims no layer: where nothing computes, bar and rest soon stand still.
std::string RenderProgress(const PrefillProgress& progress, int width);

// "820 ms", "12.3 s", "4 min 05 s", "2 h 03 min": three figures at most.
std::string FormatSeconds(double seconds);

// Draws on standard error while it lives, several times a second, and leaves a clean line behind. Draws
// nothing where standard error is no terminal. Any thread may report progress.
class ProgressBar {
 public:
  using Clock = std::function<absl::Time()>;  // from any thread

  explicit ProgressBar(Clock clock = MonotonicNow);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // It is queued; with nothing before it, the prefill begins.
  void SetPrediction(double predicted_seconds, int before = 0, double wait_seconds = 0);
  // The prefill has computed for so many seconds, those of runs that were lost included.
  void SetLayersDone(int layers_done, int layers, double computed_seconds);

  PrefillProgress progress() const;  // now

 private:
  void DrawUntilStopped();
  PrefillProgress ProgressNow() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Clock clock_;
  mutable Mutex mu_;
  PrefillProgress progress_ ABSL_GUARDED_BY(mu_);  // as it was at `layer_at_`
  absl::Time start_ ABSL_GUARDED_BY(mu_);
  absl::Time layer_at_ ABSL_GUARDED_BY(mu_);      // when the layers done were told
  double lost_seconds_ ABSL_GUARDED_BY(mu_) = 0;  // computed by runs that were begun anew
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  CondVar stop_;        // stopped_ has been set
  std::thread drawer_;  // not started where nothing is drawn
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_PROGRESS_BAR_H_
