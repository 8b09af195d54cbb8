// The CPU: its ranks share the cores and one copy of the weights. Every machine has it.
#ifndef MESHFILL_ENGINE_DEVICES_CPU_CPU_PLATFORM_H_
#define MESHFILL_ENGINE_DEVICES_CPU_CPU_PLATFORM_H_

#include <memory>

#include "engine/devices/platform.h"

namespace meshfill {

std::unique_ptr<Platform> MakeCpuPlatform();

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_DEVICES_CPU_CPU_PLATFORM_H_
