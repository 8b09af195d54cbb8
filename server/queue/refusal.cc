#include "server/queue/refusal.h"

#include <algorithm>

#include "absl/strings/cord.h"
#include "google/rpc/error_details.pb.h"
#include "server/config/config_units.h"

namespace meshfill {
namespace {

constexpr absl::string_view kRetryInfoUrl = "type.googleapis.com/google.rpc.RetryInfo";
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

absl::Status WithRetryAfter(absl::Status status, absl::Duration delay) {
  google::rpc::RetryInfo info;
  *info.mutable_retry_delay() = ToProto(delay);
  status.SetPayload(kRetryInfoUrl, absl::Cord(info.SerializeAsString()));
  return status;
}

std::optional<absl::Duration> RetryAfter(const absl::Status& status) {
  const auto payload = status.GetPayload(kRetryInfoUrl);
  google::rpc::RetryInfo info;
  if (!payload.has_value() || !info.ParseFromString(std::string(*payload))) return std::nullopt;
  return ToDuration(info.retry_delay());
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
