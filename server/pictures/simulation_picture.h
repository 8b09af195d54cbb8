// Draws simulated strategies below each other on one axis of time, so that they compare at a glance.
#ifndef MESHFILL_SERVER_PICTURES_SIMULATION_PICTURE_H_
#define MESHFILL_SERVER_PICTURES_SIMULATION_PICTURE_H_

#include <string>
#include <vector>

#include "engine/schedule/timeline.h"

namespace meshfill {

struct SimulatedStrategy {
  std::string name;      // "Mesh-Attention"
  std::string settings;  // "2·4x32, box 2x1x4"
  Timeline timeline;
};

// A file of its own; `cluster` is the line under the title. Of each strategy a few ranks are drawn, the one
// that ends last among them. Strategies that take more than twice as long as the fastest are named with their
// time, not drawn: they would leave the others no room.
std::string SimulationSvg(const std::string& title, const std::string& cluster,
                          std::vector<SimulatedStrategy> strategies);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_PICTURES_SIMULATION_PICTURE_H_
