#include "server/pictures/legend.h"

namespace meshfill {

double DrawLegend(const std::vector<LegendEntry>& entries, double x, double y, double width, SvgWriter& svg) {
  constexpr double kSwatch = 12, kLineHeight = 20, kGap = 18, kCharacter = 6.2;
  double at = x;
  for (const LegendEntry& entry : entries) {
    const double needed = kSwatch + 6 + kCharacter * static_cast<double>(entry.text.size());
    if (at > x && at + needed > x + width) {
      at = x;
      y += kLineHeight;
    }
    svg.Rect({at + 0.5, y + 0.5, kSwatch - 1, kSwatch - 1}, entry.classes);
    svg.Text(at + kSwatch + 6, y + 10.5, entry.text, "muted", 12);
    at += needed + kGap;
  }
  return y + kLineHeight;
}

}  // namespace meshfill
