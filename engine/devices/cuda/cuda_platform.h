// The CUDA devices of this machine: neighbouring ranks share one (4 ranks on 2 devices: 0 0 1 1). They
// compute in bf16.
#ifndef MESHFILL_ENGINE_DEVICES_CUDA_CUDA_PLATFORM_H_
#define MESHFILL_ENGINE_DEVICES_CUDA_CUDA_PLATFORM_H_

#include <memory>

#include "engine/devices/platform.h"

namespace meshfill {

std::unique_ptr<Platform> MakeCudaPlatform();

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_DEVICES_CUDA_CUDA_PLATFORM_H_
