#include "server/pictures/timeline_picture.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "server/pictures/duration.h"
#include "server/pictures/legend.h"
#include "server/pictures/rank_colour.h"

namespace meshfill {
namespace {

constexpr double kLabels = 92;  // room for the ranks' names
constexpr double kAxis = 24;
constexpr double kThinnest = 0.35;  // narrower neighbours of one kind are drawn as one
constexpr double kLabelSize = 9.5;
constexpr double kCharacterWidth = 5.9;  // width of a character of a label

// A rule of the style sheet.
absl::string_view ClassOf(const Span& span) {
  if (span.kind == SpanKind::kTransfer) return span.what;
  if (span.kind == SpanKind::kWait) return "wait";
  return span.what == "block" ? "block" : "work";
}

// The least of 1, 2, 5 × 10^k that leaves at most `most` ticks.
double TickSeconds(double seconds, int most) {
  const double raw = std::max(seconds, 1e-12) / most;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

// In the legend's order: a rule of the style sheet, and what it stands for.
constexpr std::pair<const char*, const char*> kMeanings[] = {
    {"block", "attention blocks"},  {"work", "other work"},   {"wait", "exposed wait"},
    {"recv_q", "Recv Q"},           {"recv_kv", "Recv KV"},   {"send_o", "Send O"},
    {"send_dq", "Send dQ"},         {"send_dkv", "Send dKV"}, {"all_to_all", "all-to-all"},
    {"gather", "gather and reduce"}};

using Spans = std::vector<const Span*>;

// Puts each transfer on the first line that is free: more than one only where two are under way at once.
std::vector<Spans> Lines(const Spans& spans) {
  std::vector<Spans> lines;
  for (const Span* span : spans) {
    const auto free = std::find_if(lines.begin(), lines.end(), [span](const Spans& line) {
      return line.back()->end_seconds <= span->start_seconds + 1e-12;
    });
    (free == lines.end() ? lines.emplace_back() : *free).push_back(span);
  }
  return lines;
}

// How many ranks have so many spans together that a viewer draws them at once.
int RanksWithin(const Timeline& timeline) {
  constexpr size_t kMostSpans = 24000;
  constexpr int kLeastRanks = 8;
  const size_t spans_of_a_rank = timeline.spans.size() / std::max(1, timeline.ranks) + 1;
  return std::max(kLeastRanks, static_cast<int>(kMostSpans / spans_of_a_rank));
}

// `count` of the ranks, evenly spaced, but for one: the rank that ends last, which decides the time, takes
// its neighbour's place.
std::vector<int> DrawnRanks(const Timeline& timeline, int count) {
  std::vector<int> drawn(count);
  for (int i = 0; i < count; ++i) drawn[i] = i * timeline.ranks / count;
  const auto last =
      std::max_element(timeline.spans.begin(), timeline.spans.end(),
                       [](const Span& a, const Span& b) { return a.end_seconds < b.end_seconds; });
  if (last == timeline.spans.end()) return drawn;
  const auto after = std::upper_bound(drawn.begin(), drawn.end(), last->rank);
  *std::prev(after) = last->rank;  // the first of them is rank 0
  return drawn;
}

class TimelinePicture {
 public:
  TimelinePicture(const Timeline& timeline, const TimelineView& view, double x, double width, SvgWriter& svg)
      : timeline_(timeline),
        drawn_(DrawnRanks(timeline, std::min({timeline.ranks, view.most_ranks, RanksWithin(timeline)}))),
        seconds_(std::max(view.seconds > 0 ? view.seconds : timeline.end_seconds(), 1e-12)),
        left_(x + kLabels),
        width_(width - kLabels),
        svg_(svg),
        lanes_(timeline.ranks) {
    for (const Span& span : timeline.spans) lanes_[span.rank][static_cast<int>(span.lane())].push_back(&span);
    for (auto& [compute, comm] : lanes_) {
      const auto earlier = [](const Span* a, const Span* b) { return a->start_seconds < b->start_seconds; };
      std::stable_sort(compute.begin(), compute.end(), earlier);
      std::stable_sort(comm.begin(), comm.end(), earlier);
    }
  }

  double Draw(double x, double y) {
    const double row = drawn_.size() <= 16 ? 44 : drawn_.size() <= 32 ? 26 : 17;
    const double bottom = y + kAxis + static_cast<double>(drawn_.size()) * row;
    DrawAxis(y, bottom);
    y += kAxis;
    for (const int rank : drawn_) {
      DrawRank(rank, x, y, row);
      y += row;
    }
    return bottom;
  }

 private:
  struct RankLanes {
    Spans compute;
    Spans comm;
    Spans& operator[](int lane) { return lane == 0 ? compute : comm; }
  };

  double At(double seconds) const { return left_ + width_ * seconds / seconds_; }

  void DrawAxis(double top, double bottom) {
    const double tick = TickSeconds(seconds_, 10);
    for (int i = 0; i * tick <= seconds_ * (1 + 1e-9); ++i) {
      const double x = At(i * tick);
      svg_.Line(x, top + kAxis - 6, x, bottom, "rule");
      svg_.Text(x, top + 12, i == 0 ? "0" : DurationText(i * tick), i == 0 ? "muted" : "mid muted", 11);
    }
  }

  void DrawRank(int rank, double x, double y, double row) {
    const double wait = WaitSeconds(rank);
    svg_.OpenGroup("rank", absl::StrFormat("rank %d: %s of wait, %.1f %% of the time shown", rank,
                                           DurationText(wait), 100 * wait / seconds_));
    const double gap = row * 0.14;
    const double compute_height = (row - gap) * 0.62, comm_height = (row - gap) - compute_height - 1;
    const double size = std::min(12.0, row * 0.62);
    svg_.Rect({x, y + 1, 10, row - gap - 2}, "", RankColour(rank));
    svg_.Text(x + 16, y + compute_height / 2 + 0.45 * size, absl::StrCat("rank ", rank), "", size);
    DrawLane(lanes_[rank].compute, y, compute_height);
    const std::vector<Spans> lines = Lines(lanes_[rank].comm);
    const double line_height = comm_height / static_cast<double>(std::max<size_t>(1, lines.size()));
    for (size_t i = 0; i < lines.size(); ++i) {
      DrawLane(lines[i], y + compute_height + 1 + static_cast<double>(i) * line_height, line_height);
    }
    svg_.CloseGroup();
  }

  double WaitSeconds(int rank) {
    double seconds = 0;
    for (const Span* span : lanes_[rank].compute)
      seconds += span->kind == SpanKind::kWait ? span->seconds() : 0;
    return seconds;
  }

  // Spans too narrow to see, of one kind and side by side, become one.
  void DrawLane(const Spans& spans, double y, double height) {
    for (size_t i = 0; i < spans.size();) {
      const double start = At(spans[i]->start_seconds);
      double end = At(spans[i]->end_seconds);
      size_t next = i + 1;
      while (next < spans.size() && ClassOf(*spans[next]) == ClassOf(*spans[i]) &&
             At(spans[next]->end_seconds) - At(spans[next]->start_seconds) < kThinnest &&
             At(spans[next]->start_seconds) - end < kThinnest) {
        end = At(spans[next++]->end_seconds);
      }
      DrawSpan(*spans[i], next - i > 1, {start, y, std::max(end - start, kThinnest), height});
      i = next;
    }
  }

  void DrawSpan(const Span& span, bool joined, Box box) {
    const double gap = box.width > 4 ? 0.8 : 0;
    box.width -= gap;
    svg_.Rect(box, ClassOf(span));
    const std::string label =
        span.block.has_value() ? absl::StrCat("(", span.block->u, ",", span.block->v, ")") : span.Name();
    const bool fits =
        box.height >= kLabelSize && box.width >= kCharacterWidth * static_cast<double>(label.size()) + 4;
    if (joined || !fits || span.kind == SpanKind::kWait) return;
    svg_.Text(box.x + box.width / 2, box.y + box.height / 2 + 0.33 * kLabelSize, label,
              span.kind == SpanKind::kWork ? "mid on-dark" : "mid on-colour", kLabelSize);
  }

  const Timeline& timeline_;
  const std::vector<int> drawn_;  // ranks
  const double seconds_;
  const double left_;  // left edge of the lanes
  const double width_;
  SvgWriter& svg_;
  std::vector<RankLanes> lanes_;  // by rank, each by rising start
};

}  // namespace

double DrawTimeline(const Timeline& timeline, double x, double y, double width, SvgWriter& svg) {
  y = DrawTimelineLegend({&timeline, 1}, x, y, width, svg) + 4;
  return DrawTimelineLanes(timeline, {}, x, y, width, svg);
}

double DrawTimelineLanes(const Timeline& timeline, const TimelineView& view, double x, double y, double width,
                         SvgWriter& svg) {
  return TimelinePicture(timeline, view, x, width, svg).Draw(x, y);
}

double DrawTimelineLegend(std::span<const Timeline> timelines, double x, double y, double width,
                          SvgWriter& svg) {
  std::set<absl::string_view> seen;
  for (const Timeline& timeline : timelines) {
    for (const Span& span : timeline.spans) seen.insert(ClassOf(span));
  }
  std::vector<LegendEntry> entries;
  for (const auto& [classes, text] : kMeanings) {
    if (seen.contains(classes)) entries.push_back({classes, text});
  }
  return DrawLegend(entries, x, y, width, svg);
}

}  // namespace meshfill
