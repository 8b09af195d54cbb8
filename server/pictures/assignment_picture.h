// Draws the assignment matrix (engine/mesh/mesh.h): who computes which block of the attention, with one
// rank's tile in full and what it has to fetch for it in words.
#ifndef MESHFILL_SERVER_PICTURES_ASSIGNMENT_PICTURE_H_
#define MESHFILL_SERVER_PICTURES_ASSIGNMENT_PICTURE_H_

#include "engine/plan/plan.h"
#include "server/pictures/svg_writer.h"

namespace meshfill {

// Draws the assignment into `width` from (x, y) down; returns where it ends.
double DrawAssignment(const Plan& plan, double x, double y, double width, SvgWriter& svg);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_PICTURES_ASSIGNMENT_PICTURE_H_
