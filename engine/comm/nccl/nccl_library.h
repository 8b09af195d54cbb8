// NCCL, loaded when it is first needed: a binary with CUDA also starts on machines that have none of it.
#ifndef MESHFILL_ENGINE_COMM_NCCL_NCCL_LIBRARY_H_
#define MESHFILL_ENGINE_COMM_NCCL_NCCL_LIBRARY_H_

#include <nccl.h>

#include "absl/status/statusor.h"

namespace meshfill {

// The functions that are called, by the names of nccl.h without their prefix.
struct Nccl {
  decltype(&ncclGetUniqueId) GetUniqueId;
  decltype(&ncclCommInitRankConfig) CommInitRankConfig;
  decltype(&ncclCommGetAsyncError) CommGetAsyncError;
  decltype(&ncclCommAbort) CommAbort;
  decltype(&ncclCommFinalize) CommFinalize;
  decltype(&ncclCommDestroy) CommDestroy;
  decltype(&ncclGroupStart) GroupStart;
  decltype(&ncclGroupEnd) GroupEnd;
  decltype(&ncclSend) Send;
  decltype(&ncclRecv) Recv;
  decltype(&ncclGetErrorString) GetErrorString;
  decltype(&ncclGetLastError) GetLastError;

  // The same for all callers, and never unloaded. FAILED_PRECONDITION: the library is not on this machine.
  static absl::StatusOr<const Nccl*> Load();
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_NCCL_NCCL_LIBRARY_H_
