// Durations and byte sizes as the configuration writes them: a number with its unit. Durations as its
// messages hold them.
#ifndef MESHFILL_SERVER_CONFIG_CONFIG_UNITS_H_
#define MESHFILL_SERVER_CONFIG_CONFIG_UNITS_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "google/protobuf/duration.pb.h"

namespace meshfill {

// "500ms", "30s", "1h30m". INVALID_ARGUMENT without a unit, below zero or above 100 years.
absl::StatusOr<absl::Duration> ParseDuration(absl::string_view text);

absl::Duration ToDuration(const google::protobuf::Duration& duration);
google::protobuf::Duration ToProto(absl::Duration duration);  // to the nanosecond

// "512MiB", "1.5GB", "4096B": B, powers of 1000 (KB, MB, GB, TB) and of 1024 (KiB, MiB, GiB, TiB).
// INVALID_ARGUMENT without a unit, unless it is 0, or at 2^63 bytes and above.
absl::StatusOr<uint64_t> ParseByteSize(absl::string_view text);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CONFIG_CONFIG_UNITS_H_
