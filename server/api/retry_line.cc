#include "server/api/retry_line.h"

#include <algorithm>

namespace meshfill {
namespace {

constexpr size_t kMostTenants = 4096;  // that have a line; others are told no wait

}  // namespace

double RetryLine::Join(const std::string& tenant, double work_seconds, absl::Time now) {
  auto end = ends_.find(tenant);
  if (end == ends_.end()) {
    std::erase_if(ends_, [&](const auto& each) { return each.second <= now; });
    if (ends_.size() >= kMostTenants) return 0;
    end = ends_.emplace(tenant, now).first;
  }
  const absl::Time place = std::max(end->second, now);
  end->second = std::min(place + absl::Seconds(kPace * work_seconds), now + longest_);
  return absl::ToDoubleSeconds(place - now);
}

}  // namespace meshfill
