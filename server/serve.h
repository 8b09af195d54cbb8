// `meshfill serve`: the front-end with its embedded pool, or as the leader of workers, from the first bind to
// the last answer.
#ifndef MESHFILL_SERVER_SERVE_H_
#define MESHFILL_SERVER_SERVE_H_

#include "absl/status/status.h"
#include "meshfill/v1/config.pb.h"

namespace meshfill {

// Binds the ports (health says NOT_SERVING), loads the model, says where it listens, and serves until SIGTERM
// or SIGINT, then drains: new requests are refused, accepted ones finish, for at most limits.drain_timeout; a
// second signal stops what is left at once. Prints one line on standard error for each address ("listening on
// 127.0.0.1:50051"), each request and each change of state. OK after a clean drain. INVALID_ARGUMENT: a
// broken model. UNAVAILABLE: a port is in use, or a device of an embedded pool has failed. DEADLINE_EXCEEDED:
// drain_timeout passed. CANCELLED: a second signal. Takes over the process's signal handling.
absl::Status Serve(const v1::Config& config);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_SERVE_H_
