// What a placement is called wherever a plan is told of: in text, in JSON and in the API.
#ifndef MESHFILL_ENGINE_MESH_PLACEMENT_NAME_H_
#define MESHFILL_ENGINE_MESH_PLACEMENT_NAME_H_

#include <string>

namespace meshfill {

// The ranks in the order of the seats, which is what a plan without a placement means.
constexpr char kRowFirst[] = "row-first";

inline std::string PlacementName(const std::string& placement) {
  return placement.empty() ? kRowFirst : placement;
}

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MESH_PLACEMENT_NAME_H_
