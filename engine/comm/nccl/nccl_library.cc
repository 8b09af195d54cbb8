#include "engine/comm/nccl/nccl_library.h"

#include <dlfcn.h>

#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

void* Open() {
  for (const char* path : {"libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2"}) {
    if (void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  return nullptr;
}

absl::StatusOr<Nccl> LoadNow() {
  void* const library = Open();
  if (library == nullptr) {
    return absl::FailedPreconditionError(
        "libnccl.so.2 cannot be loaded; install NCCL, or name its folder in LD_LIBRARY_PATH");
  }
  Nccl functions;
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) missing = name;
  };
  find(functions.GetUniqueId, "ncclGetUniqueId");
  find(functions.CommInitRankConfig, "ncclCommInitRankConfig");
  find(functions.CommGetAsyncError, "ncclCommGetAsyncError");
  find(functions.CommAbort, "ncclCommAbort");
  find(functions.CommFinalize, "ncclCommFinalize");
  find(functions.CommDestroy, "ncclCommDestroy");
  find(functions.GroupStart, "ncclGroupStart");
  find(functions.GroupEnd, "ncclGroupEnd");
  find(functions.Send, "ncclSend");
  find(functions.Recv, "ncclRecv");
  find(functions.GetErrorString, "ncclGetErrorString");
  find(functions.GetLastError, "ncclGetLastError");
  if (!missing.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("libnccl.so.2 has no ", missing, "; install NCCL 2.18 or later"));
  }
  return functions;
}

}  // namespace

absl::StatusOr<const Nccl*> Nccl::Load() {
  static const auto* const loaded = new absl::StatusOr<Nccl>(LoadNow());
  RETURN_IF_ERROR(loaded->status());
  return &**loaded;
}

}  // namespace meshfill
