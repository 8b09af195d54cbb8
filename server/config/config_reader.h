// Which of the two processes a configuration is for.
#ifndef MESHFILL_SERVER_CONFIG_CONFIG_READER_H_
#define MESHFILL_SERVER_CONFIG_CONFIG_READER_H_

#include "absl/status/status.h"
#include "server/config/config_yaml.h"

namespace meshfill {

// `meshfill serve`, and the commands that do its work without it; `meshfill worker`.
enum class ConfigReader { kServe, kWorker };

// INVALID_ARGUMENT, named by where it was set, for a key that the other process alone reads: the file is the
// other's, or what it says would have no effect.
absl::Status CheckReader(const KeyOrigins& origins, ConfigReader reader);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CONFIG_CONFIG_READER_H_
