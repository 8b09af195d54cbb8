// What a build without NCCL answers.
#include "engine/comm/nccl/nccl_data_plane.h"

namespace meshfill {

absl::StatusOr<std::unique_ptr<DataPlane>> MakeNcclDataPlane(const DataPlaneOptions&, std::vector<int>) {
  return absl::FailedPreconditionError(
      "this build has no NCCL, which ranks on GPUs of several processes need; build it where nvcc and nccl.h "
      "are");
}

}  // namespace meshfill
