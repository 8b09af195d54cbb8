#include "server/pictures/simulation_picture.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/pictures/duration.h"
#include "server/pictures/svg_writer.h"
#include "server/pictures/timeline_picture.h"

namespace meshfill {
namespace {

constexpr double kWidth = 1240;
constexpr double kMargin = 32;
constexpr double kInner = kWidth - 2 * kMargin;
constexpr int kRanksOfEach = 4;
constexpr double kSlowest = 2;          // times as long as the fastest
constexpr double kTitleCharacter = 10;  // the widest, of bold text of 15

}  // namespace

std::string SimulationSvg(const std::string& title, const std::string& cluster,
                          std::vector<SimulatedStrategy> strategies) {
  std::stable_sort(strategies.begin(), strategies.end(), [](const auto& a, const auto& b) {
    return a.timeline.end_seconds() < b.timeline.end_seconds();
  });
  std::vector<Timeline> drawn;
  std::vector<std::string> titles;
  size_t longest_title = 0;
  double seconds = 0;
  std::vector<std::string> left_out;
  for (const SimulatedStrategy& strategy : strategies) {
    const double end = strategy.timeline.end_seconds();
    if (end > kSlowest * strategies.front().timeline.end_seconds()) {
      left_out.push_back(absl::StrCat(strategy.name, " (", DurationText(end), ")"));
      continue;
    }
    drawn.push_back(strategy.timeline);
    titles.push_back(absl::StrCat(strategy.name, ": ", DurationText(end)));
    longest_title = std::max(longest_title, titles.back().size());
    seconds = std::max(seconds, end);
  }

  SvgWriter svg;
  double y = 44;
  svg.Text(kMargin, y, title, "bold", 22);
  svg.Text(kMargin, y += 24, cluster, "muted", 14);
  svg.Text(kMargin, y += 24,
           absl::StrCat("Up to ", kRanksOfEach,
                        " ranks of each strategy, the one that ends last among them. The fastest "
                        "strategy comes first."),
           "muted", 14);
  if (!left_out.empty()) {
    svg.Text(kMargin, y += 20, absl::StrCat("Too slow to draw: ", absl::StrJoin(left_out, ", "), "."),
             "muted", 14);
  }
  y = DrawTimelineLegend(drawn, kMargin, y + 20, kInner, svg);
  for (size_t i = 0; i < drawn.size(); ++i) {
    svg.Text(kMargin, y += 26, titles[i], "bold", 15);
    // The strategies are sorted, and those left out come last: index i is right for both.
    svg.Text(kMargin + kTitleCharacter * static_cast<double>(longest_title), y, strategies[i].settings,
             "muted");
    y = DrawTimelineLanes(drawn[i], {.most_ranks = kRanksOfEach, .seconds = seconds}, kMargin, y + 6, kInner,
                          svg);
  }
  return std::move(svg).Finish(kWidth, y + kMargin, title);
}

}  // namespace meshfill
