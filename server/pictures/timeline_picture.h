// Draws a timeline: two lanes for each rank, compute with its waits above, communication below.
#ifndef MESHFILL_SERVER_PICTURES_TIMELINE_PICTURE_H_
#define MESHFILL_SERVER_PICTURES_TIMELINE_PICTURE_H_

#include <string>

#include "engine/timeline.h"
#include "server/pictures/svg_writer.h"

namespace meshfill {

// Into `width` from (x, y) down; returns where it ends. Of more than 64 ranks, 64 evenly spaced ones are
// drawn.
double DrawTimeline(const Timeline& timeline, double x, double y, double width, SvgWriter& svg);

// A file of its own.
std::string TimelineSvg(const Timeline& timeline, const std::string& title, const std::string& subtitle);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_PICTURES_TIMELINE_PICTURE_H_
