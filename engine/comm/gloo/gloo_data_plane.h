// The data plane of ranks whose memory is the host's: gloo over TCP. It keeps nothing between runs.
#ifndef MESHFILL_ENGINE_COMM_GLOO_GLOO_DATA_PLANE_H_
#define MESHFILL_ENGINE_COMM_GLOO_GLOO_DATA_PLANE_H_

#include <memory>

#include "engine/comm/data_plane.h"

namespace meshfill {

inline constexpr char kGlooDataPlane[] = "gloo";  // DataPlane::kind

std::unique_ptr<DataPlane> MakeGlooDataPlane(const DataPlaneOptions& options);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_COMM_GLOO_GLOO_DATA_PLANE_H_
