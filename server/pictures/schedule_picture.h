// Draws a schedule as a grid: for each step its communication, and the tile with the blocks computed
// meanwhile.
#ifndef MESHFILL_SERVER_PICTURES_SCHEDULE_PICTURE_H_
#define MESHFILL_SERVER_PICTURES_SCHEDULE_PICTURE_H_

#include "engine/schedule/schedule.h"
#include "server/pictures/svg_writer.h"

namespace meshfill {

// Draws the schedule into `width` from (x, y) down; returns where it ends.
double DrawSchedule(const Schedule& schedule, double x, double y, double width, SvgWriter& svg);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_PICTURES_SCHEDULE_PICTURE_H_
