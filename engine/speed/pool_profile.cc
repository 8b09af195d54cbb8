#include "engine/speed/pool_profile.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/return_if_error.h"
#include "nlohmann/json.hpp"

namespace meshfill {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kSliceTokens[] = "slice_tokens";
constexpr char kPeak[] = "peak_flops_per_second";
constexpr char kMeasured[] = "measured";
constexpr char kDateFormat[] = "%Y-%m-%dT%H:%M:%SZ";

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
  for (const SpeedField& field : kSpeedFields) {
    const auto found = object.find(field.name);
    if (found == object.end() || !found->is_number()) {
      return Broken(path, absl::StrCat("no number ", field.name));
    }
    speed.*field.value = found->get<double>();
  }
  const auto slice = object.find(kSliceTokens);
  if (slice == object.end() || !slice->is_number_integer()) {
    return Broken(path, absl::StrCat("no whole number ", kSliceTokens));
  }
  speed.slice_tokens = slice->get<int64_t>();
  if (absl::Status good = CheckPoolSpeed(speed); !good.ok()) return Broken(path, std::string(good.message()));
  return speed;
}

Json SpeedJson(const PoolSpeed& speed) {
  Json object = Json::object();
  for (const SpeedField& field : kSpeedFields) object[field.name] = speed.*field.value;
  object[kSliceTokens] = speed.slice_tokens;
  return object;
}

struct KeptSpeed {
  PoolSpeed speed;
  std::string measured;  // "2026-01-31T12:00:00Z", for people
};

// The date in another's file, whatever the file holds: it has no line break.
std::string DateOf(const Json& pool) {
  const auto found = pool.find(kMeasured);
  absl::Time time;
  const bool dated = found != pool.end() && found->is_string() &&
                     absl::ParseTime(absl::RFC3339_full, found->get<std::string>(), &time, nullptr);
  return dated ? absl::FormatTime(kDateFormat, time, absl::UTCTimeZone()) : "at a time that it does not say";
}

absl::StatusOr<std::optional<KeptSpeed>> ReadKeptSpeed(const std::string& path, const std::string& key) {
  ASSIGN_OR_RETURN(Json object, ReadObject(path));
  if (object.is_null()) return std::nullopt;
  for (const Json& pool : object["pools"]) {
    if (pool["pool"] != key) continue;
    ASSIGN_OR_RETURN(PoolSpeed speed, ParseSpeed(pool["speed"], path));
    return KeptSpeed{.speed = speed, .measured = DateOf(pool)};
  }
  return std::nullopt;
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
  const ExpertsShape& experts = model.experts;
  const std::string mlp = experts.count == 0
                              ? ""
                              : absl::StrCat(experts.used, " of ", experts.count, " experts of ",
                                             experts.width, " + ", experts.shared_width, ", ");
  std::string fp8 = model.fp8.rows == 0 ? "" : absl::StrCat(", FP8 in ", model.fp8.columns);
  model.ForEachKind([&](const LayerForm& form, int layers) {
    if (!form.wide.empty()) absl::StrAppend(&fp8, ", parts ", form.wide.bits(), " of ", layers, " wide");
  });
  return absl::StrCat(mlp, model.layers, " layers of ", model.hidden, " and ", model.intermediate, ", ",
                      model.q_heads, ":", model.kv_heads, " heads of ", model.head_dim, ", vocabulary ",
                      model.vocab, ", ", DTypeName(model.dtype), model.post_norms ? ", post norms" : "",
                      model.activation == Activation::kGelu ? ", GELU" : "", fp8,
                      model.fp4_experts ? ", experts in MXFP4" : "");
}

absl::Status WritePools(const std::string& path, const Json& pools) {
  const Json object = {{"version", kPoolProfileVersion}, {"pools", pools}};

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
  if (!error) return absl::OkStatus();
  const absl::Status status = failed(error.message());
  std::filesystem::remove(draft, error);
  return status;
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
  ASSIGN_OR_RETURN(const std::optional<KeptSpeed> kept, ReadKeptSpeed(path, key));
  if (!kept.has_value()) return std::nullopt;
  return kept->speed;
}

absl::Status StorePoolProfile(const std::string& path, const std::string& key, const PoolSpeed& speed) {
  absl::StatusOr<Json> old = ReadObject(path);
  Json pools = Json::array();
  const std::string now = absl::FormatTime(kDateFormat, absl::Now(), absl::UTCTimeZone());
  pools.push_back({{"pool", key}, {kMeasured, now}, {"speed", SpeedJson(speed)}});
  if (old.ok() && !old->is_null()) {
    for (Json& pool : (*old)["pools"]) {
      if (pool["pool"] != key && pools.size() < kMaxKeptPools) pools.push_back(std::move(pool));
    }
  }
  return WritePools(path, pools);
}

absl::Status ForgetPoolSpeed(const std::string& path, const std::string& key) {
  ASSIGN_OR_RETURN(Json object, ReadObject(path));
  if (object.is_null()) return absl::OkStatus();
  Json others = Json::array();
  for (Json& pool : object["pools"]) {
    if (pool["pool"] != key) others.push_back(std::move(pool));
  }
  return WritePools(path, others);
}

absl::StatusOr<PoolSpeed> KeptPoolSpeed(const std::string& path, const std::string& key, bool anew,
                                        const std::function<absl::StatusOr<PoolSpeed>()>& measure,
                                        const PoolNotes& notes) {
  if (path.empty()) {
    ASSIGN_OR_RETURN(PoolSpeed speed, measure());
    notes("the pool's speed: measured now, and not kept", /*warning=*/false);
    return speed;
  }
  absl::StatusOr<std::optional<KeptSpeed>> kept = ReadKeptSpeed(path, key);
  if (!kept.ok()) {
    notes(std::string(kept.status().message()), /*warning=*/true);
  } else if (kept->has_value() && !anew) {
    notes(absl::StrCat("the pool's speed: kept in ", path, ", measured ", (*kept)->measured),
          /*warning=*/false);
    return (*kept)->speed;
  }
  ASSIGN_OR_RETURN(PoolSpeed speed, measure());
  if (const absl::Status stored = StorePoolProfile(path, key, speed); !stored.ok()) {
    notes(std::string(stored.message()), /*warning=*/true);
  } else {
    notes(absl::StrCat("the pool's speed: measured now, and kept in ", path), /*warning=*/false);
  }
  return speed;
}

double KeptPeakFlops(const std::string& path, const std::string& key, bool anew, double measured) {
  if (path.empty()) return measured;
  absl::StatusOr<Json> object = ReadObject(path);
  if (!object.ok() || object->is_null()) return measured;  // KeptPoolSpeed has said why
  for (Json& pool : (*object)["pools"]) {
    if (pool["pool"] != key) continue;
    const auto kept = pool.find(kPeak);
    if (!anew && kept != pool.end() && kept->is_number() && kept->get<double>() >= measured) {
      return kept->get<double>();
    }
    pool[kPeak] = measured;
    WritePools(path, (*object)["pools"]).IgnoreError();
    break;
  }
  return measured;
}

}  // namespace meshfill
