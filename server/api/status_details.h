// Statuses across the gRPC seam: our code speaks absl::Status, the wire speaks grpc::Status with google.rpc
// details.
//
// A status may say when to try again. It travels as google.rpc.RetryInfo inside google.rpc.Status, the public
// error model, in the trailer grpc-status-details-bin; inside our code it is a payload of the absl::Status.
// A reason for the metrics (refusal.h) stays inside.
#ifndef MESHFILL_SERVER_API_STATUS_DETAILS_H_
#define MESHFILL_SERVER_API_STATUS_DETAILS_H_

#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/support/status.h"

namespace meshfill {

// `status` with the advice to try again after `delay`.
absl::Status WithRetryAfter(absl::Status status, absl::Duration delay);
std::optional<absl::Duration> RetryAfter(const absl::Status& status);

// Messages above 1 KiB are cut, so that a trailer always fits the peer's limit. Details survive the way there
// and back.
grpc::Status ToGrpcStatus(const absl::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_STATUS_DETAILS_H_
