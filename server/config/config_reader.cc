#include "server/config/config_reader.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace meshfill {
namespace {

struct Readers {
  absl::string_view key;  // with all below it
  absl::string_view command;
};

// Keys that one command alone reads; the others are for both. docs/configuration.md has it from here.
constexpr Readers kReaders[] = {
    {"listen", "serve"},
    {"metrics_listen", "serve"},
    {"pool.control_listen", "serve"},
    {"pool.embedded", "serve"},
    {"pool.hang_timeout", "serve"},
    {"pool.empty_timeout", "serve"},
    {"pool.link_bytes_per_second", "serve"},
    {"pool.link_latency", "serve"},
    {"pool.host_bytes_per_second", "serve"},
    {"pool.host_link_bytes_per_second", "serve"},
    {"pool.host_link_latency", "serve"},
    {"pool.measure_links", "serve"},
    {"pool.worker", "worker"},
    {"queue", "serve"},
    {"tenant_limits", "serve"},
    {"tenants", "serve"},
    {"api.tls.server_name", "serve"},
    {"api.token", "serve"},
    {"plan.layout", "serve"},
    {"plan.stripe", "serve"},
    {"plan.schedule", "serve"},
    {"plan.exchange", "serve"},
    {"kv.listen", "worker"},
    {"trace", "serve"},
};

// The command that alone reads the key at `path`; empty: both do.
absl::string_view ReaderOf(absl::string_view path) {
  for (const Readers& each : kReaders) {
    if (path == each.key || absl::StartsWith(path, absl::StrCat(each.key, "."))) return each.command;
  }
  return "";
}

}  // namespace

absl::Status CheckReader(const KeyOrigins& origins, ConfigReader reader) {
  const bool serve = reader == ConfigReader::kServe;
  for (const auto& [path, origin] : origins) {
    const absl::string_view reads = ReaderOf(path);
    if (reads.empty() || reads == (serve ? "serve" : "worker")) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(origin, ": ", path, ": `meshfill ", reads,
                     "` alone reads this key; take it out, or give a configuration as ",
                     serve ? "configs/local.yaml or configs/pool.yaml" : "configs/worker.yaml"));
  }
  return absl::OkStatus();
}

}  // namespace meshfill
