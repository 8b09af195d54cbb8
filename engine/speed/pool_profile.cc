#include "engine/speed/pool_profile.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/return_if_error.h"
#include "nlohmann/json.hpp"

namespace meshfill {
namespace {

using Json = nlohmann::ordered_json;

constexpr struct {
  const char* name;
  double PoolSpeed::*value;
  bool is_rate;  // above 0; else seconds, or a factor
} kFields[] = {
    {"gemm_flops_per_second", &PoolSpeed::gemm_flops_per_second, true},
    {"attention_flops_per_second", &PoolSpeed::attention_flops_per_second, true},
    {"merge_bytes_per_second", &PoolSpeed::merge_bytes_per_second, true},
    {"link_bytes_per_second", &PoolSpeed::link_bytes_per_second, true},
    {"link_latency_seconds", &PoolSpeed::link_latency_seconds, false},
    {"slice_seconds", &PoolSpeed::slice_seconds, false},
    {"block_row_seconds", &PoolSpeed::block_row_seconds, false},
    {"token_seconds", &PoolSpeed::token_seconds, false},
    {"start_seconds", &PoolSpeed::start_seconds, false},
    {"lm_head_bytes_per_second", &PoolSpeed::lm_head_bytes_per_second, true},
    {"lone_rank_speedup", &PoolSpeed::lone_rank_speedup, true},
};

constexpr char kSliceTokens[] = "slice_tokens";
constexpr uint64_t kMostSliceTokens = uint64_t{1} << 20;

absl::Status Broken(const std::string& path, const std::string& what) {
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": ", what, "; delete the file, or let the next measurement replace it"));
}

// The file's object; a null value where there is no file.
absl::StatusOr<Json> ReadObject(const std::string& path) {
  std::error_code error;
  const uintmax_t bytes = std::filesystem::file_size(path, error);
  if (error == std::errc::no_such_file_or_directory) return Json();
  if (error) return Broken(path, error.message());
  if (bytes > static_cast<uintmax_t>(kMaxPoolProfileBytes)) {
    return Broken(path, absl::StrCat(bytes, " bytes, more than a profile of pools has"));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return Broken(path, "cannot be read");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  Json object = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return Broken(path, "no JSON object");
  const auto version = object.find("version");
  if (version == object.end() || *version != kPoolProfileVersion) {
    return Broken(path, absl::StrCat("no profile of version ", kPoolProfileVersion));
  }
  const auto pools = object.find("pools");
  if (pools == object.end() || !pools->is_array()) return Broken(path, "no list of pools");
  for (const Json& pool : *pools) {
    const bool whole = pool.is_object() && pool.contains("pool") && pool["pool"].is_string() &&
                       pool.contains("speed") && pool["speed"].is_object();
    if (!whole) return Broken(path, "a pool without its key or its speed");
  }
  return object;
}

absl::StatusOr<PoolSpeed> ParseSpeed(const Json& object, const std::string& path) {
  PoolSpeed speed;
  for (const auto& [name, value, is_rate] : kFields) {
    const auto found = object.find(name);
    if (found == object.end() || !found->is_number()) return Broken(path, absl::StrCat("no number ", name));
    const double number = found->get<double>();
    if (!std::isfinite(number) || number < 0 || (is_rate && number == 0)) {
      return Broken(path, absl::StrCat(name, " is ", found->dump()));
    }
    speed.*value = number;
  }
  const auto slice = object.find(kSliceTokens);
  if (slice == object.end() || !slice->is_number_unsigned())
    return Broken(path, absl::StrCat("no whole number ", kSliceTokens));
  const uint64_t slice_tokens = slice->get<uint64_t>();
  if (slice_tokens < 1 || slice_tokens > kMostSliceTokens) {
    return Broken(path, absl::StrCat(kSliceTokens, " is ", slice_tokens));
  }
  speed.slice_tokens = static_cast<int64_t>(slice_tokens);
  if (speed.lone_rank_speedup < 1) return Broken(path, "lone_rank_speedup is below 1");
  return speed;
}

Json SpeedJson(const PoolSpeed& speed) {
  Json object = Json::object();
  for (const auto& [name, value, is_rate] : kFields) object[name] = speed.*value;
  object[kSliceTokens] = speed.slice_tokens;
  return object;
}

// Another build has another size or was written at another time.
std::string ExecutableId() {
  const std::filesystem::path self = "/proc/self/exe";
  std::error_code error;
  const uintmax_t bytes = std::filesystem::file_size(self, error);
  if (error) return "unknown build";
  const auto written = std::filesystem::last_write_time(self, error).time_since_epoch().count();
  return absl::StrCat("build ", bytes, ".", error ? 0 : written);
}

std::string ShapeKey(const ModelShape& model) {
  return absl::StrCat(model.layers, " layers of ", model.hidden, " and ", model.intermediate, ", ",
                      model.q_heads, ":", model.kv_heads, " heads of ", model.head_dim, ", vocabulary ",
                      model.vocab, ", ", DTypeName(model.dtype));
}

}  // namespace

std::string DefaultPoolProfilePath() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache == '/') {
    return absl::StrCat(cache, "/meshfill/pool_speed.json");
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/') {
    return absl::StrCat(home, "/.cache/meshfill/pool_speed.json");
  }
  return "";
}

std::string PoolKey(const std::string& hardware, const ModelShape& model, const std::string& shared_by) {
  return absl::StrCat(hardware, ", ", ExecutableId(), "; ", ShapeKey(model), "; ", shared_by);
}

absl::StatusOr<std::optional<PoolSpeed>> ReadPoolProfile(const std::string& path, const std::string& key) {
  ASSIGN_OR_RETURN(Json object, ReadObject(path));
  if (object.is_null()) return std::nullopt;
  for (const Json& pool : object["pools"]) {
    if (pool["pool"] != key) continue;
    ASSIGN_OR_RETURN(PoolSpeed speed, ParseSpeed(pool["speed"], path));
    return speed;
  }
  return std::nullopt;
}

absl::Status StorePoolProfile(const std::string& path, const std::string& key, const PoolSpeed& speed) {
  absl::StatusOr<Json> old = ReadObject(path);
  Json pools = Json::array();
  pools.push_back({{"pool", key}, {"speed", SpeedJson(speed)}});
  if (old.ok() && !old->is_null()) {
    for (Json& pool : (*old)["pools"]) {
      if (pool["pool"] != key && pools.size() < kMaxKeptPools) pools.push_back(std::move(pool));
    }
  }
  const Json object = {{"version", kPoolProfileVersion}, {"pools", std::move(pools)}};

  const auto failed = [&path](const std::string& why) {
    return absl::UnavailableError(absl::StrCat(path, ": the pool's speed cannot be kept: ", why));
  };
  std::error_code error;
  if (const auto folder = std::filesystem::path(path).parent_path(); !folder.empty()) {
    std::filesystem::create_directories(folder, error);
    if (error) return failed(error.message());
  }
  const std::string draft = absl::StrCat(path, ".", getpid());
  std::ofstream file(draft, std::ios::binary | std::ios::trunc);
  file << object.dump(1, ' ', false, Json::error_handler_t::replace) << "\n";
  file.close();
  if (!file) {
    std::filesystem::remove(draft, error);
    return failed(absl::StrCat("cannot write ", draft));
  }
  std::filesystem::rename(draft, path, error);
  if (error) return failed(error.message());
  return absl::OkStatus();
}

absl::StatusOr<PoolSpeed> KeptPoolSpeed(const std::string& path, const std::string& key,
                                        const std::function<absl::StatusOr<PoolSpeed>()>& measure) {
  if (path.empty()) return measure();
  const auto warn = [](const absl::Status& status) {
    std::fprintf(stderr, "meshfill: %s\n", std::string(status.message()).c_str());
  };
  absl::StatusOr<std::optional<PoolSpeed>> kept = ReadPoolProfile(path, key);
  if (!kept.ok()) {
    warn(kept.status());
  } else if (kept->has_value()) {
    return **kept;
  }
  ASSIGN_OR_RETURN(PoolSpeed speed, measure());
  if (absl::Status status = StorePoolProfile(path, key, speed); !status.ok()) warn(status);
  return speed;
}

}  // namespace meshfill
