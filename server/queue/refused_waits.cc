#include "server/queue/refused_waits.h"

#include <algorithm>

#include "server/config/priority_class.h"

namespace meshfill {
namespace {

// What runs on all devices by itself: sub-meshes and passes have turns of their own.
bool RunsAlone(const RunJob& job) { return job.submeshes.empty() && job.pack.tokens == 0; }

// Whether `job` has its turn no sooner than `other` would have it.
bool IsNoSooner(const RunJob& job, const RunJob& other) {
  return RunsAlone(job) && RunsAlone(other) && job.tenant == other.tenant &&
         ClassOf(job.priority) <= ClassOf(other.priority) && job.work_seconds >= other.work_seconds &&
         job.work_seconds - job.may_save_seconds >= other.work_seconds - other.may_save_seconds &&
         job.deadline >= other.deadline;
}

}  // namespace

double RefusedWaits::LeastSeconds(const RunJob& job, absl::Time now) {
  std::erase_if(refused_, [now](const Refused& each) { return now >= each.until; });
  double seconds = 0;
  for (const Refused& each : refused_) {
    if (IsNoSooner(job, each.job)) seconds = std::max(seconds, each.seconds);
  }
  return seconds;
}

void RefusedWaits::Add(const RunJob& job, double seconds, absl::Time begin, absl::Time end) {
  refused_.push_back({.job = job, .seconds = seconds, .until = end + kRefusalsShare * (end - begin)});
}

}  // namespace meshfill
