// The server's configuration: YAML in, a complete and valid v1::Config out (docs/configuration.md).
//
// The schema, its defaults and its ranges stand in proto/meshfill/v1/config.proto. After LoadConfig every
// field that has a default reads as it, and every value is in its range, so that readers need no checks of
// their own.
#ifndef MESHFILL_SERVER_CONFIG_CONFIG_H_
#define MESHFILL_SERVER_CONFIG_CONFIG_H_

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine_options.h"
#include "meshfill/v1/config.pb.h"
#include "server/config/config_reader.h"

namespace meshfill {

inline constexpr char kDefaultListen[] = "127.0.0.1:50051";  // the API's address

// Reads `path` (empty: defaults alone), then applies `overrides` in order, each "pool.embedded.ranks=4" (as
// --set). NOT_FOUND: no such file. INVALID_ARGUMENT: an unknown, duplicate, badly typed or out-of-range key,
// in one line:
//     configs/local.yaml:7: pool.embeded: unknown key; did you mean embedded? known keys here:
//     control_listen, embedded
// So is a key that is not for `reader`; nullopt: of whatever process. `model.path` may be empty: who needs a
// model says so.
absl::StatusOr<v1::Config> LoadConfig(const std::string& path, std::span<const std::string> overrides = {},
                                      std::optional<ConfigReader> reader = std::nullopt);

// The numbers in a list like pool.worker.devices, "2,3"; empty: none. INVALID_ARGUMENT: it is none, or has a
// number twice.
absl::StatusOr<std::vector<int>> ParseDeviceNumbers(const std::string& list);

// Whether `model.path` is a folder. NOT_FOUND: nothing is there. INVALID_ARGUMENT: a file.
absl::Status CheckModelFolder(const v1::Config& config);

// Reads the options out of a config that LoadConfig returned.
EngineOptions ToEngineOptions(const v1::Config& config);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CONFIG_CONFIG_H_
