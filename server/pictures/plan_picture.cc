#include "server/pictures/plan_picture.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "server/pictures/assignment_picture.h"
#include "server/pictures/duration.h"
#include "server/pictures/schedule_picture.h"
#include "server/pictures/svg_writer.h"
#include "server/pictures/timeline_picture.h"

namespace meshfill {
namespace {

constexpr double kWidth = 1240;
constexpr double kMargin = 32;
constexpr double kSectionGap = 48;

std::string Title(const Plan& plan) {
  std::string title =
      absl::StrCat("Mesh-Attention on ", plan.ranks(), plan.ranks() == 1 ? " rank: " : " ranks: ");
  if (plan.heads > 1) absl::StrAppend(&title, plan.heads, " meshes with a share of the heads each, ");
  return absl::StrCat(title, "tile ", plan.tile.a, " × ", plan.tile.b);
}

std::string Subtitle(const Plan& plan) {
  const std::string placement =
      plan.placement.name.empty() ? "" : absl::StrCat(", ", plan.placement.name, " on a host");
  return absl::StrCat(plan.layout.tokens(), " tokens, ", LayoutName(plan.layout.kind()), " in stripes of ",
                      plan.layout.stripe(), ", partial outputs in ", DTypeName(plan.partial_dtype), placement,
                      "; predicted ", DurationText(plan.predicted.seconds), " for all layers, of it ",
                      DurationText(plan.predicted.comm_wait_seconds), " exposed wait");
}

std::string TimelineTitle(const Timeline& layer) {
  double wait = 0;
  for (const Span& span : layer.spans) {
    if (span.rank == 0 && span.kind == SpanKind::kWait) wait += span.seconds();
  }
  return absl::StrCat("How long: the attention of one layer, predicted ", DurationText(layer.end_seconds()),
                      ", of it ", DurationText(wait), " exposed wait");
}

}  // namespace

std::string PlanSvg(const Plan& plan, const Timeline& layer) {
  constexpr double kInner = kWidth - 2 * kMargin;
  SvgWriter svg;
  double y = 44;
  svg.Text(kMargin, y, Title(plan), "bold", 22);
  svg.Text(kMargin, y += 24, Subtitle(plan), "muted", 14);
  const auto section = [&](absl::string_view title) {
    svg.Text(kMargin, y += kSectionGap, title, "bold", 17);
    y += 14;
  };
  section("Who: the assignment matrix");
  y = DrawAssignment(plan, kMargin, y, kInner, svg);
  section("In which order: the schedule, the same on every rank, in its own local indices (Q#u, KV#v)");
  y = DrawSchedule(plan.schedule, kMargin, y, kInner, svg);
  section(TimelineTitle(layer));
  y = DrawTimeline(layer, kMargin, y, kInner, svg);
  return std::move(svg).Finish(kWidth, y + kMargin, Title(plan));
}

}  // namespace meshfill
