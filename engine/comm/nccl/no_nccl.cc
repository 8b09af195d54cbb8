// What a build without NCCL answers.
#include "engine/comm/nccl/nccl.h"

namespace meshfill {

class NcclLinks::State {};
NcclLinks::NcclLinks() = default;
NcclLinks::~NcclLinks() = default;
void NcclLinks::End(uint64_t, bool) {}
int NcclLinks::made() const { return 0; }

absl::StatusOr<std::unique_ptr<Endpoint>> ListenNccl(const NcclOptions&) {
  return absl::FailedPreconditionError(
      "this build has no NCCL, which ranks on GPUs of several processes need; build it where nvcc and nccl.h "
      "are");
}

}  // namespace meshfill
