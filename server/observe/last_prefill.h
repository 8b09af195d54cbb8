// What the last prefill did, without its answer: for the pages that people look at afterwards.
#ifndef MESHFILL_SERVER_OBSERVE_LAST_PREFILL_H_
#define MESHFILL_SERVER_OBSERVE_LAST_PREFILL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "engine/plan/plan.h"
#include "engine/prefill_engine.h"
#include "engine/run/rank_stats.h"
#include "engine/schedule/timeline.h"
#include "kernels/mutex.h"

namespace meshfill {

struct PrefillReport {
  int64_t number = 0;  // counts the prefills of this process, from 1
  Plan plan;
  double prefill_seconds = 0;
  double mfu = 0;
  double attention_mfu = 0;
  std::vector<RankStats> ranks;            // by rank
  int layer = 0;                           // the middle one, which stands for all
  std::optional<Timeline> layer_timeline;  // measured, from the layer's begin; if the engine recorded it
};

// The plan's assignment and schedule, and the layer's timeline, as one SVG.
std::string PrefillReportSvg(const PrefillReport& report);

// Keeps the report of the last prefill of this process. Thread-safe.
class LastPrefill {
 public:
  void OnPrefillDone(const PrefillResult& result);
  std::shared_ptr<const PrefillReport> report() const;  // null before the first prefill

 private:
  mutable Mutex mu_;
  std::shared_ptr<const PrefillReport> report_ ABSL_GUARDED_BY(mu_);
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_LAST_PREFILL_H_
