#include "server/queue/recent_work.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace meshfill {
namespace {

constexpr double kMeanSeconds = 120;                // that the averages look back
constexpr absl::Duration kKept = absl::Seconds(1);  // before they are lowered again
constexpr double kLeastWork = 1.0 / (1 << 20);      // s: shorter ones count as this

}  // namespace

void RecentWork::Add(int priority, double work_seconds, double seconds, absl::Time now) {
  if (now - at_ >= kKept) {
    const double decay = Decay(now);
    for (ByLength& shares : shares_) {
      for (double& share : shares) share *= decay;
    }
    at_ = now;
  }
  ByLength& shares = shares_[static_cast<size_t>(ClassOf(priority) + kTopPriority)];
  const double octaves = std::log2(std::max(kLeastWork, work_seconds) / kLeastWork);
  const double place = std::min(kPerOctave * octaves, static_cast<double>(shares.size() - 1));
  shares[static_cast<size_t>(place)] += seconds / kMeanSeconds;
}

double RecentWork::ShareBefore(int priority, double rest_seconds, absl::Time now) const {
  const auto own = static_cast<size_t>(ClassOf(priority) + kTopPriority);
  double share = 0;
  for (size_t higher = own + 1; higher < shares_.size(); ++higher) {
    share = std::accumulate(shares_[higher].begin(), shares_[higher].end(), share);
  }
  const double octaves = std::log2(std::max(kLeastWork, rest_seconds / 2) / kLeastWork);
  const double end = std::min(kPerOctave * octaves, static_cast<double>(shares_[own].size()));
  share = std::accumulate(shares_[own].begin(), shares_[own].begin() + static_cast<ptrdiff_t>(end), share);
  return std::min(kMostShare, Decay(now) * share);
}

double RecentWork::Decay(absl::Time now) const {
  return std::exp(-absl::ToDoubleSeconds(now - at_) / kMeanSeconds);
}

}  // namespace meshfill
