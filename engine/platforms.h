// The platforms of this process, by name: the one list of backends.
#ifndef MESHFILL_ENGINE_PLATFORMS_H_
#define MESHFILL_ENGINE_PLATFORMS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/devices/platform.h"

namespace meshfill {

// Takes the first platform of the list that has devices for the request.
inline constexpr char kAutoDevice[] = "auto";

// Adds a platform to the end of the list. While nobody else reads it; a name is registered once.
void RegisterPlatform(std::unique_ptr<const Platform> platform);

std::vector<std::string> DeviceNames();  // "auto", then the platforms' in alphabetical order

// The name itself, where it is one of DeviceNames(). INVALID_ARGUMENT with these names.
absl::StatusOr<std::string> ParseDevice(const std::string& name);

// The devices of the platform with this name, or of the one that "auto" takes. INVALID_ARGUMENT: no such
// name, or that platform has none for this request, with the reason and what to do.
absl::StatusOr<std::unique_ptr<PoolDevices>> FindDevices(const std::string& name,
                                                         const DeviceRequest& request);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLATFORMS_H_
