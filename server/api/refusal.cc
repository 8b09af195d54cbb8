#include "server/api/refusal.h"

#include <string>

#include "absl/strings/cord.h"

namespace meshfill {

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

}  // namespace meshfill
