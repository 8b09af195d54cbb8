// The data plane of ranks on GPUs: NCCL. It keeps each rank's communicators for later runs (nccl_links.h).
#ifndef MESHFILL_ENGINE_COMM_NCCL_NCCL_DATA_PLANE_H_
#define MESHFILL_ENGINE_COMM_NCCL_NCCL_DATA_PLANE_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/comm/data_plane.h"

namespace meshfill {

// `device_of_rank`: the CUDA ordinal of each rank of this worker, one rank on each. FAILED_PRECONDITION: a
// build without NCCL.
absl::StatusOr<std::unique_ptr<DataPlane>> MakeNcclDataPlane(const DataPlaneOptions& options,
                                                             std::vector<int> device_of_rank);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_NCCL_NCCL_DATA_PLANE_H_
