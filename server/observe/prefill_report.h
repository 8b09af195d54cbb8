// What a prefill did, without its answer: for the pages that people look at afterwards.
#ifndef MESHFILL_SERVER_OBSERVE_PREFILL_REPORT_H_
#define MESHFILL_SERVER_OBSERVE_PREFILL_REPORT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/plan/plan.h"
#include "engine/prefill_engine.h"
#include "engine/run/rank_stats.h"
#include "engine/schedule/timeline.h"

namespace meshfill {

struct PrefillReport {
  int64_t number = 0;  // of the prefill in this process, from 1
  Plan plan;
  double prefill_seconds = 0;
  double mfu = 0;
  double attention_mfu = 0;
  std::vector<RankStats> ranks;            // by rank
  int layer = 0;                           // the middle one, which stands for all
  std::optional<Timeline> layer_timeline;  // measured, from the layer's begin; if the engine recorded it
};

PrefillReport MakePrefillReport(const PrefillResult& result, int64_t number);

// The plan's assignment and schedule, and the layer's timeline, as one SVG.
std::string PrefillReportSvg(const PrefillReport& report);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_PREFILL_REPORT_H_
