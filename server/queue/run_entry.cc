#include "server/queue/run_entry.h"

#include <cmath>
#include <limits>

namespace meshfill {

double RunJob::SecondsOn(int of_submeshes) const {
  if (of_submeshes == 1) return work_seconds;
  for (const SubmeshSeconds& on : submeshes) {
    if (on.submeshes == of_submeshes) return on.seconds;
  }
  return std::numeric_limits<double>::infinity();
}

absl::Duration RunEntry::Computed(absl::Time now) const {
  return computes ? computed + (now - since) : computed;
}

double RunEntry::Rest(absl::Time now) const {
  if (leaving) return 0;
  const absl::Duration since_measured = Computed(now) - measured_at;
  // What takes longer than predicted may take as long again.
  return std::abs(rest_seconds - absl::ToDoubleSeconds(since_measured));
}

double RunEntry::RestOnAll(absl::Time now) const {
  const double work = job.work_seconds;
  return (whole_seconds == work ? 1 : work / whole_seconds) * Rest(now);
}

bool RunEntry::CanMeetDeadline(absl::Time now) const {
  return state != RunState::kUploading && !leaving && now + absl::Seconds(Rest(now)) <= job.deadline;
}

}  // namespace meshfill
