#include "kernels/cuda/cublaslt_library.h"

#include <dlfcn.h>

#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// By the name that the loader knows, or where CUDA's own packages put it.
void* Open() {
  const std::string name = absl::StrCat("libcublasLt.so.", CUBLAS_VER_MAJOR);
  for (const std::string& path :
       {name, "/usr/local/cuda/lib64/" + name, "/usr/local/cuda/targets/x86_64-linux/lib/" + name}) {
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  }
  return nullptr;
}

absl::StatusOr<CublasLt> LoadNow() {
  void* const library = Open();
  if (library == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("libcublasLt.so.", CUBLAS_VER_MAJOR, " cannot be loaded; install cuBLAS of CUDA ",
                     CUBLAS_VER_MAJOR, ", or name its folder in LD_LIBRARY_PATH"));
  }
  CublasLt functions;
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) missing = name;
  };
  find(functions.Create, "cublasLtCreate");
  find(functions.Destroy, "cublasLtDestroy");
  find(functions.GetStatusString, "cublasLtGetStatusString");
  find(functions.MatmulDescCreate, "cublasLtMatmulDescCreate");
  find(functions.MatmulDescDestroy, "cublasLtMatmulDescDestroy");
  find(functions.MatmulDescSetAttribute, "cublasLtMatmulDescSetAttribute");
  find(functions.MatrixLayoutCreate, "cublasLtMatrixLayoutCreate");
  find(functions.MatrixLayoutDestroy, "cublasLtMatrixLayoutDestroy");
  find(functions.MatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate");
  find(functions.MatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
  find(functions.MatmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute");
  find(functions.MatmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(functions.Matmul, "cublasLtMatmul");
  if (!missing.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("libcublasLt.so.", CUBLAS_VER_MAJOR, " has no ", missing, "; install a current cuBLAS"));
  }
  return functions;
}

}  // namespace

absl::StatusOr<const CublasLt*> CublasLt::Load() {
  static const auto* const loaded = new absl::StatusOr<CublasLt>(LoadNow());
  RETURN_IF_ERROR(loaded->status());
  return &**loaded;
}

}  // namespace meshfill
