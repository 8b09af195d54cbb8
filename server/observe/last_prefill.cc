#include "server/observe/last_prefill.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/pictures/assignment_picture.h"
#include "server/pictures/duration.h"
#include "server/pictures/schedule_picture.h"
#include "server/pictures/svg_writer.h"
#include "server/pictures/timeline_picture.h"

namespace meshfill {
namespace {

int MiddleLayer(const Timeline& timeline) {
  int last = 0;
  for (const Span& span : timeline.spans) last = std::max(last, span.layer);
  return last / 2;
}

// The spans of one layer, timed from the first one's start.
Timeline CutLayer(const Timeline& timeline, int layer) {
  Timeline cut{.ranks = timeline.ranks, .dropped_spans = timeline.dropped_spans};
  double begin = std::numeric_limits<double>::infinity();
  for (const Span& span : timeline.spans) {
    if (span.layer != layer) continue;
    cut.spans.push_back(span);
    begin = std::min(begin, span.start_seconds);
  }
  for (Span& span : cut.spans) {
    span.start_seconds -= begin;
    span.end_seconds -= begin;
  }
  return cut;
}

PrefillReport ReportOf(const PrefillResult& result) {
  PrefillReport report{.plan = result.plan,
                       .prefill_seconds = result.prefill_seconds,
                       .mfu = result.mfu,
                       .attention_mfu = result.attention_mfu,
                       .ranks = result.ranks};
  if (result.timeline.has_value()) {
    report.layer = MiddleLayer(*result.timeline);
    report.layer_timeline = CutLayer(*result.timeline, report.layer);
  }
  return report;
}

}  // namespace

void LastPrefill::OnPrefillDone(const PrefillResult& result) {
  auto report = std::make_shared<PrefillReport>(ReportOf(result));
  const MutexLock lock(mu_);
  report->number = report_ == nullptr ? 1 : report_->number + 1;
  report_ = std::move(report);
}

std::shared_ptr<const PrefillReport> LastPrefill::report() const {
  const MutexLock lock(mu_);
  return report_;
}

std::string PrefillReportSvg(const PrefillReport& report) {
  constexpr double kWidth = 1240;
  constexpr double kMargin = 16;
  constexpr double kInner = kWidth - 2 * kMargin;
  SvgWriter svg;
  double y = 0;
  const auto section = [&](absl::string_view title) {
    svg.Text(kMargin, y += 36, title, "bold", 17);
    y += 14;
  };
  section("Who: the assignment matrix");
  y = DrawAssignment(report.plan, kMargin, y, kInner, svg);
  section("In which order: the schedule, the same on every rank, in its own local indices (Q#u, KV#v)");
  y = DrawSchedule(report.plan.schedule, kMargin, y, kInner, svg);
  if (report.layer_timeline.has_value()) {
    section(absl::StrCat("How long: layer ", report.layer, " as it was measured, ",
                         DurationText(report.layer_timeline->end_seconds())));
    y = DrawTimeline(*report.layer_timeline, kMargin, y, kInner, svg);
  }
  return std::move(svg).Finish(kWidth, y + kMargin, "The last prefill");
}

}  // namespace meshfill
