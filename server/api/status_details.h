// Statuses across the gRPC seam: our code speaks absl::Status, the wire speaks grpc::Status with google.rpc
// details.
//
// A status may say when to try again (server/queue/refusal.h). It travels as google.rpc.RetryInfo inside
// google.rpc.Status, the public error model, in the trailer grpc-status-details-bin. A reason for the metrics
// stays inside.
#ifndef MESHFILL_SERVER_API_STATUS_DETAILS_H_
#define MESHFILL_SERVER_API_STATUS_DETAILS_H_

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

namespace meshfill {

// Messages above 1 KiB are cut, so that a trailer always fits the peer's limit. Details survive the way there
// and back.
grpc::Status ToGrpcStatus(const absl::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_STATUS_DETAILS_H_
