// A line, or more, of colours and what they mean.
#ifndef MESHFILL_SERVER_PICTURES_LEGEND_H_
#define MESHFILL_SERVER_PICTURES_LEGEND_H_

#include <string>
#include <vector>

#include "server/pictures/svg_writer.h"

namespace meshfill {

struct LegendEntry {
  std::string classes;
  std::string text;
};

// Draws the legend into `width` from (x, y) down; returns where it ends.
double DrawLegend(const std::vector<LegendEntry>& entries, double x, double y, double width, SvgWriter& svg);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_PICTURES_LEGEND_H_
