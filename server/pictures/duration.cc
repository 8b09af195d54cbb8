#include "server/pictures/duration.h"

#include "absl/strings/str_format.h"

namespace meshfill {

std::string DurationText(double seconds) {
  if (seconds == 0) return "0 s";
  if (seconds < 0.9995e-3) return absl::StrFormat("%.3g µs", seconds * 1e6);
  if (seconds < 0.9995) return absl::StrFormat("%.3g ms", seconds * 1e3);
  return seconds < 999.5 ? absl::StrFormat("%.3g s", seconds) : absl::StrFormat("%.0f s", seconds);
}

}  // namespace meshfill
