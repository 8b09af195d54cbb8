// What one rank of a process keeps of NCCL from run to run: the communicators of runs that lived at once.
//
//     Offer ──► the run's, until it has chosen ──Use──► in use ──End, not aborted──► idle
//                  └──Return, those that it does not take──────────────────────────────►┘
//
// An endpoint may outlive the links' owner: both hold them.
#ifndef MESHFILL_ENGINE_COMM_NCCL_NCCL_LINKS_H_
#define MESHFILL_ENGINE_COMM_NCCL_NCCL_LINKS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "engine/comm/nccl/nccl_comm.h"
#include "kernels/cuda/queue.h"
#include "kernels/mutex.h"

namespace meshfill {

// A communicator, and whose it is.
struct KeptComm {
  std::shared_ptr<NcclComm> comm;
  std::shared_ptr<CudaQueue> queue;
  uint64_t name = 0;  // the same on all its ranks, and above 0
  uint64_t epoch = 0;
  int rank = 0;
  int ranks = 0;
};

// Thread-safe.
class NcclLinks {
 public:
  // Communicators that no run uses. Each takes the device some memory; the one used last stays longest.
  static constexpr size_t kMostIdle = 4;

  ~NcclLinks();  // waits for no peer

  // Takes what fits a run out of what is idle, the one used last first: no other run is offered it meanwhile.
  std::vector<KeptComm> Offer(uint64_t epoch, int rank, int ranks);
  void Return(std::vector<KeptComm> unused);
  // The run's from now on. `fresh`: it was made for it.
  void Use(uint64_t run, KeptComm kept, bool fresh);
  // The run is over here, and lets go of its communicator. It is kept unless it was aborted or has failed.
  void End(uint64_t run);

  // Rank 0's, that no communicator has been made with: NCCL frees none that is not used.
  std::optional<ncclUniqueId> TakeSpareId();
  void KeepSpareId(const ncclUniqueId& id);

  int made() const;  // communicators, so far

 private:
  static void Drop(KeptComm& kept);
  void AddIdle(KeptComm kept) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  std::vector<KeptComm> idle_ ABSL_GUARDED_BY(mu_);           // the one used last first
  std::map<uint64_t, KeptComm> in_use_ ABSL_GUARDED_BY(mu_);  // by run
  std::vector<ncclUniqueId> spare_ids_ ABSL_GUARDED_BY(mu_);
  int made_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_NCCL_NCCL_LINKS_H_
