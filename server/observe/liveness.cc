#include "server/observe/liveness.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

constexpr absl::Duration kLeastStandstill = absl::Minutes(2);  // the first step of a process takes longer
constexpr double kSlowestStep = 20;                            // times its prediction

absl::Duration LongestStandstill(double predicted_seconds) {
  return std::max(kLeastStandstill, absl::Seconds(kSlowestStep * predicted_seconds));
}

}  // namespace

std::string StandstillWatch::Look(const std::vector<At>& all, absl::Time now) {
  std::map<std::pair<uint64_t, int>, Seen> seen;
  std::string standstill;
  for (const At& at : all) {
    const std::pair key(at.run, at.rank);
    const auto before = seen_.find(key);
    const bool stands = at.has_to_move && before != seen_.end() && before->second.moves == at.moves;
    const absl::Time moved_at = stands ? before->second.moved_at : now;
    seen[key] = {.moves = at.moves, .moved_at = moved_at};
    if (now - moved_at <= LongestStandstill(at.predicted_seconds)) continue;
    standstill = absl::StrCat("rank ", at.rank, " of run ", at.run, " has stood still for ",
                              absl::FormatDuration(absl::Trunc(now - moved_at, absl::Seconds(1))));
  }
  seen_ = std::move(seen);
  return standstill;
}

void Liveness::Beat(std::string standstill) {
  const absl::Time now = clock_();
  const MutexLock lock(mu_);
  last_beat_ = now;
  standstill_ = std::move(standstill);
}

std::string Liveness::Trouble() const {
  const absl::Time now = clock_();
  const MutexLock lock(mu_);
  const absl::Duration silence = now - last_beat_;
  if (silence <= kLongestSilence) return standstill_;
  return absl::StrCat("the main loop has stood still for ",
                      absl::FormatDuration(absl::Trunc(silence, absl::Seconds(1))));
}

HttpPage Liveness::Page() const {
  return {"/healthz", "text/plain",
          [this] {
            const std::string trouble = Trouble();
            return absl::StrCat(trouble.empty() ? "lives" : trouble, "\n");
          },
          [this] { return Trouble().empty(); }};
}

}  // namespace meshfill
