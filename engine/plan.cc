#include "engine/plan.h"

#include "absl/strings/str_cat.h"

namespace meshfill {

std::string Plan::DebugString() const {
  return absl::StrCat(tile.DebugString(), ", ", heads, heads == 1 ? " head group, " : " head groups, ",
                      layout.DebugString(), ", partial outputs in ", DTypeName(partial_dtype), ", ",
                      schedule.steps.size(), " steps");
}

}  // namespace meshfill
