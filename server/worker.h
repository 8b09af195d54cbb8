// `meshfill worker`: one process of a pool, from its first join to its leave.
#ifndef MESHFILL_SERVER_WORKER_H_
#define MESHFILL_SERVER_WORKER_H_

#include <string>

#include "absl/status/status.h"
#include "meshfill/v1/config.pb.h"

namespace meshfill {

// Loads the model, joins the leader at `join` (HOST:PORT) and computes for it until SIGTERM or SIGINT; then
// finishes the run that it takes part in, leaves and returns OK; a second signal stops at once. A signal
// before the join ends the process at once. Joins again where the leader is lost. Weights stay loaded all the
// time. INVALID_ARGUMENT: a broken model, a bad
// address. FAILED_PRECONDITION: the leader refuses this worker for good (another model or
// version), or there are no certificates and there should be. CANCELLED: a second signal. Takes over the
// process's signal handling.
absl::Status RunWorker(const v1::Config& config, const std::string& join);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_WORKER_H_
