#include "server/api/refusal.h"

#include <algorithm>

#include "absl/strings/cord.h"

namespace meshfill {
namespace {

constexpr size_t kMostTenants = 4096;  // tenants that have a line; others are told no wait

}  // namespace

absl::Status WithRefusal(absl::Status status, Refusal refusal) {
  status.SetPayload(kRefusalUrl, absl::Cord(std::string(1, static_cast<char>(refusal))));
  return status;
}

Refusal RefusalOf(const absl::Status& status) {
  if (const auto given = status.GetPayload(kRefusalUrl); given.has_value()) {
    return static_cast<Refusal>((*given)[0]);
  }
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
      return Refusal::kInvalid;
    case absl::StatusCode::kNotFound:
      return Refusal::kUnknownModel;
    case absl::StatusCode::kOutOfRange:
      return Refusal::kTooLong;
    case absl::StatusCode::kFailedPrecondition:
      return Refusal::kPoolTooSmall;
    case absl::StatusCode::kAlreadyExists:
      return Refusal::kDuplicate;
    case absl::StatusCode::kDeadlineExceeded:
      return Refusal::kDeadline;
    case absl::StatusCode::kResourceExhausted:
      return Refusal::kMemory;
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kPermissionDenied:
      return Refusal::kCredentials;
    case absl::StatusCode::kUnavailable:
      return Refusal::kNotReady;
    default:
      return Refusal::kOther;
  }
}

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
