// Priority classes of requests: from -kTopPriority to kTopPriority, the higher first.
#ifndef MESHFILL_SERVER_CONFIG_PRIORITY_CLASS_H_
#define MESHFILL_SERVER_CONFIG_PRIORITY_CLASS_H_

#include <algorithm>

namespace meshfill {

inline constexpr int kTopPriority = 2;

// Others count as the nearest.
constexpr int ClassOf(int priority) { return std::clamp(priority, -kTopPriority, kTopPriority); }

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CONFIG_PRIORITY_CLASS_H_
