// A complete backend, added by this folder and one line: RegisterPlatform(MakeToyPlatform()). A machine has
// two toys, with memory of the host.
#ifndef MESHFILL_TESTS_ENGINE_DEVICES_TOY_TOY_PLATFORM_H_
#define MESHFILL_TESTS_ENGINE_DEVICES_TOY_TOY_PLATFORM_H_

#include <memory>

#include "engine/devices/platform.h"

namespace meshfill {

std::unique_ptr<Platform> MakeToyPlatform();

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_DEVICES_TOY_TOY_PLATFORM_H_
