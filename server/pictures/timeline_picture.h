// Draws a timeline: two lanes for each rank, compute with its waits above, communication below.
#ifndef MESHFILL_SERVER_PICTURES_TIMELINE_PICTURE_H_
#define MESHFILL_SERVER_PICTURES_TIMELINE_PICTURE_H_

#include <span>

#include "engine/schedule/timeline.h"
#include "server/pictures/svg_writer.h"

namespace meshfill {

// Draws the timeline into `width` from (x, y) down, with its legend; returns where it ends. Of more than 64
// ranks, 64 are drawn.
double DrawTimeline(const Timeline& timeline, double x, double y, double width, SvgWriter& svg);

struct TimelineView {
  // Most ranks that are drawn, the one that ends last among them; fewer are where each has thousands of
  // spans.
  int most_ranks = 64;
  double seconds = 0;  // seconds that the width stands for; 0: the timeline's own
};

// Draws the lanes alone: several timelines below each other share one legend.
double DrawTimelineLanes(const Timeline& timeline, const TimelineView& view, double x, double y, double width,
                         SvgWriter& svg);

// What the colours mean, of those that these timelines have.
double DrawTimelineLegend(std::span<const Timeline> timelines, double x, double y, double width,
                          SvgWriter& svg);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_PICTURES_TIMELINE_PICTURE_H_
