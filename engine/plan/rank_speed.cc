#include "engine/plan/rank_speed.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

constexpr int64_t kMostSliceTokens = int64_t{1} << 20;

bool IsGood(SpeedField::Kind kind, double value) {
  switch (kind) {
    case SpeedField::Kind::kRate:
      return value > 0;
    case SpeedField::Kind::kSeconds:
      return value >= 0 && std::isfinite(value);
    case SpeedField::Kind::kFactor:
      return value >= 1 && std::isfinite(value);
  }
  return false;
}

const char* RangeOf(SpeedField::Kind kind) {
  switch (kind) {
    case SpeedField::Kind::kRate:
      return "above 0";
    case SpeedField::Kind::kSeconds:
      return "finite, and 0 or more";
    case SpeedField::Kind::kFactor:
      return "finite, and 1 or more";
  }
  return "";
}

}  // namespace

absl::Status CheckPoolSpeed(const PoolSpeed& speed) {
  for (const auto& [name, value, kind] : kSpeedFields) {
    if (IsGood(kind, speed.*value)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("a pool's ", name, " is ", speed.*value, "; it must be ", RangeOf(kind)));
  }
  if (speed.slice_tokens >= 1 && speed.slice_tokens <= kMostSliceTokens) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("a pool's slice_tokens is ", speed.slice_tokens, "; it must be 1 to ", kMostSliceTokens));
}

}  // namespace meshfill
