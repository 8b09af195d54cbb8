// cuBLASLt, loaded when it is first needed: a binary with CUDA also starts on machines that have none of it.
#ifndef MESHFILL_KERNELS_CUDA_CUBLASLT_LIBRARY_H_
#define MESHFILL_KERNELS_CUDA_CUBLASLT_LIBRARY_H_

#include <cublasLt.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace meshfill {

// The functions that are called, by the names of cublasLt.h without their prefix.
struct CublasLt {
  decltype(&cublasLtCreate) Create;
  decltype(&cublasLtDestroy) Destroy;
  decltype(&cublasLtGetStatusString) GetStatusString;
  decltype(&cublasLtMatmulDescCreate) MatmulDescCreate;
  decltype(&cublasLtMatmulDescDestroy) MatmulDescDestroy;
  decltype(&cublasLtMatmulDescSetAttribute) MatmulDescSetAttribute;
  decltype(&cublasLtMatrixLayoutCreate) MatrixLayoutCreate;
  decltype(&cublasLtMatrixLayoutDestroy) MatrixLayoutDestroy;
  decltype(&cublasLtMatmulPreferenceCreate) MatmulPreferenceCreate;
  decltype(&cublasLtMatmulPreferenceDestroy) MatmulPreferenceDestroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) MatmulPreferenceSetAttribute;
  decltype(&cublasLtMatmulAlgoGetHeuristic) MatmulAlgoGetHeuristic;
  decltype(&cublasLtMatmul) Matmul;

  // The same for all callers, and never unloaded. FAILED_PRECONDITION: the library is not on this machine.
  static absl::StatusOr<const CublasLt*> Load();

  absl::Status ToStatus(const char* what, cublasStatus_t status) const {
    if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("cublasLt: ", what, ": ", GetStatusString(status)));
  }
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_CUBLASLT_LIBRARY_H_
