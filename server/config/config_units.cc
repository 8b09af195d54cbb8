#include "server/config/config_units.h"

#include <algorithm>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace meshfill {

absl::StatusOr<absl::Duration> ParseDuration(absl::string_view text) {
  absl::Duration duration;
  const bool has_unit = !text.empty() && absl::ascii_isalpha(static_cast<unsigned char>(text.back()));
  if (!has_unit || !absl::ParseDuration({text.data(), text.size()}, &duration)) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\" is no duration with a unit; write e.g. 500ms, 30s, 5m or 2h"));
  }
  if (duration < absl::ZeroDuration() || duration > absl::Hours(24) * 36500) {
    return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is not between 0s and 100 years"));
  }
  return duration;
}

absl::Duration ToDuration(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

google::protobuf::Duration ToProto(absl::Duration duration) {
  google::protobuf::Duration message;
  absl::Duration rest;
  message.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &rest));
  message.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(rest)));
  return message;
}

absl::StatusOr<uint64_t> ParseByteSize(absl::string_view text) {
  struct Unit {
    absl::string_view name;
    double bytes;
  };
  static constexpr Unit kUnits[] = {{"B", 1},        {"KB", 1e3},     {"MB", 1e6},
                                    {"GB", 1e9},     {"TB", 1e12},    {"KiB", 1024},
                                    {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  const size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
  const absl::string_view unit_name = text.substr(std::min(text.find_first_not_of(' ', digits), text.size()));
  double number = 0;
  if (text == "0") return 0;  // the same in every unit
  for (const Unit& unit : kUnits) {
    if (unit.name != unit_name || !absl::SimpleAtod(text.substr(0, digits), &number)) continue;
    const double bytes = number * unit.bytes;
    if (bytes >= 0x1p63) return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is 8 EiB or more"));
    return static_cast<uint64_t>(bytes);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", text, "\" is no byte size with a unit; write e.g. 512MiB, 8GiB or 4096B"));
}

}  // namespace meshfill
