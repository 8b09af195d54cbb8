#include "server/pictures/rank_colour.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"

namespace meshfill {
namespace {

// One channel of an HSL colour; `shift` is 0 for red, 8 for green, 4 for blue.
int Channel(double hue_degrees, double saturation, double lightness, double shift) {
  const double k = std::fmod(shift + hue_degrees / 30, 12);
  const double span = saturation * std::min(lightness, 1 - lightness);
  return static_cast<int>(
      std::lround(255 * (lightness - span * std::clamp(std::min(k - 3, 9 - k), -1.0, 1.0))));
}

}  // namespace

// Hues a golden angle apart and two lightnesses: ranks that are neighbours, in number or in a small group,
// differ.
std::string RankColour(int rank) {
  constexpr double kGoldenAngle = 137.508;
  const double hue = std::fmod(210 + rank * kGoldenAngle, 360);
  const double lightness = rank % 2 == 0 ? 0.80 : 0.70;
  return absl::StrFormat("#%02x%02x%02x", Channel(hue, 0.6, lightness, 0), Channel(hue, 0.6, lightness, 8),
                         Channel(hue, 0.6, lightness, 4));
}

}  // namespace meshfill
