// An NCCL communicator with errors that name the rank and what it did, and that any thread may abort.
//
// NCCL's own calls block nothing: it goes on with them by itself, and Init and Group wait until it has taken
// them up, up to a deadline. Calls come from the rank's thread alone; Abort may meet one.
#ifndef MESHFILL_ENGINE_COMM_NCCL_NCCL_COMM_H_
#define MESHFILL_ENGINE_COMM_NCCL_NCCL_COMM_H_

#include <functional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/comm/nccl/nccl_library.h"
#include "kernels/mutex.h"

namespace meshfill {

class NcclComm {
 public:
  NcclComm(const Nccl& nccl, int rank) : nccl_(nccl), rank_(rank) {}
  // What was sent leaves first; a peer that does not take it is not waited for.
  ~NcclComm();

  // Joins with the current device of this thread. `most_ctas` 0: NCCL decides.
  absl::Status Init(int ranks, const ncclUniqueId& id, int most_ctas, absl::Time deadline);
  // One group of calls: `body` makes them. Returns when NCCL has taken it up, not when the bytes have moved.
  absl::Status Group(const std::string& what, absl::Time deadline,
                     const std::function<ncclResult_t(ncclComm_t)>& body);
  // The state now: the reason of Abort, a failure that NCCL met meanwhile, or OK.
  absl::Status Check(const std::string& what);
  // The kernels that wait for a peer end, with anything in their buffers.
  void Abort(absl::Status reason);

 private:
  // Waits until a call that NCCL goes on with by itself is over.
  absl::Status Settle(ncclResult_t result, const std::string& what, absl::Time deadline);
  absl::Status Failure(const std::string& what, ncclResult_t result) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Nccl& nccl_;
  const int rank_;
  Mutex mu_;
  bool aborted_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status reason_ ABSL_GUARDED_BY(mu_);
  ncclComm_t comm_ ABSL_GUARDED_BY(mu_) = nullptr;
  bool connected_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_NCCL_NCCL_COMM_H_
