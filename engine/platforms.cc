#include "engine/platforms.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/devices/cpu/cpu_platform.h"
#include "engine/devices/cuda/cuda_platform.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

using Platforms = std::vector<std::unique_ptr<const Platform>>;

// In the order in which "auto" tries them.
Platforms BuiltInPlatforms() {
  Platforms platforms;
  platforms.push_back(MakeCudaPlatform());
  platforms.push_back(MakeCpuPlatform());
  return platforms;
}

Platforms& AllPlatforms() {
  static Platforms platforms = BuiltInPlatforms();
  return platforms;
}

}  // namespace

void RegisterPlatform(std::unique_ptr<const Platform> platform) {
  AllPlatforms().push_back(std::move(platform));
}

std::vector<std::string> DeviceNames() {
  std::vector<std::string> names;
  for (const auto& platform : AllPlatforms()) names.push_back(platform->name());
  std::sort(names.begin(), names.end());
  names.insert(names.begin(), kAutoDevice);
  return names;
}

absl::StatusOr<std::string> ParseDevice(const std::string& name) {
  const std::vector<std::string> names = DeviceNames();
  if (std::find(names.begin(), names.end(), name) != names.end()) return name;
  return absl::InvalidArgumentError(
      absl::StrCat("'", name, "' is no device; choose one of ", absl::StrJoin(names, ", ")));
}

absl::StatusOr<std::unique_ptr<PoolDevices>> FindDevices(const std::string& name,
                                                         const DeviceRequest& request) {
  RETURN_IF_ERROR(ParseDevice(name).status());
  absl::Status missing;
  for (const auto& platform : AllPlatforms()) {
    if (name != kAutoDevice && name != platform->name()) continue;
    absl::StatusOr<std::unique_ptr<PoolDevices>> found = platform->Find(request);
    if (!absl::IsFailedPrecondition(found.status())) return found;
    missing = absl::InvalidArgumentError(absl::StrCat(
        "device ", platform->name(), ": ", found.status().message(), ", or choose the device cpu"));
  }
  return missing;
}

}  // namespace meshfill
