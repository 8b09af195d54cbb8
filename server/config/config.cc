#include "server/config/config.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "engine/platforms.h"
#include "engine/speed/pool_profile.h"
#include "kernels/return_if_error.h"
#include "server/config/address.h"
#include "server/config/config_units.h"
#include "server/config/config_yaml.h"
#include "server/config/priority_class.h"
#include "server/config/tenant_name.h"

namespace meshfill {
namespace {

constexpr uint32_t kMaxThreads = 4096;
constexpr uint32_t kNcclCtas = 8;
constexpr uint32_t kMaxNcclCtas = 32;
constexpr uint32_t kMaxAttentionMargin = 64;
constexpr uint32_t kMaxStripe = 1u << 20;
constexpr uint32_t kMaxBlockTokens = 1u << 16;
constexpr uint64_t kMinMemoryBytes = 1 << 20;  // no prompt fits into less
constexpr uint64_t kMinMessageBytes = 64 << 10;
constexpr uint64_t kMaxMessageBytes = 1 << 30;
constexpr uint64_t kMinChannelBytes = 16 << 20;

void FillDefaults(v1::Config& config) {
  if (!config.has_listen()) config.set_listen(kDefaultListen);
  if (!config.has_metrics_listen()) config.set_metrics_listen("127.0.0.1:9464");
  auto& embedded = *config.mutable_pool()->mutable_embedded();
  if (!embedded.has_ranks()) embedded.set_ranks(1);
  if (!embedded.has_device()) embedded.set_device("auto");
  auto& pool = *config.mutable_pool();
  if (!pool.has_silence_timeout()) *pool.mutable_silence_timeout() = ToProto(absl::Milliseconds(1500));
  if (!pool.has_hang_timeout()) *pool.mutable_hang_timeout() = ToProto(absl::Seconds(2));
  if (!pool.has_empty_timeout()) *pool.mutable_empty_timeout() = ToProto(absl::Seconds(10));
  auto& worker = *pool.mutable_worker();
  if (!worker.has_ranks()) worker.set_ranks(1);
  if (!worker.has_device()) worker.set_device("auto");
  if (!worker.has_data_listen()) worker.set_data_listen("127.0.0.1");
  if (!worker.has_nccl_ctas()) worker.set_nccl_ctas(kNcclCtas);
  if (!worker.has_attention_sm_margin()) worker.set_attention_sm_margin(worker.nccl_ctas());
  auto& queue = *config.mutable_queue();
  if (!queue.has_max_requests()) queue.set_max_requests(64);
  if (!queue.has_max_tokens()) queue.set_max_tokens(16 << 20);
  if (!queue.has_max_wait()) queue.mutable_max_wait()->set_seconds(3600);
  if (!queue.has_max_age()) queue.mutable_max_age()->set_seconds(600);
  auto& trace = *config.mutable_trace();
  if (!trace.has_timeout()) trace.mutable_timeout()->set_seconds(10);
  auto& plan = *config.mutable_plan();
  if (!plan.has_stripe()) plan.set_stripe(64);
  auto& limits = *config.mutable_limits();
  if (!limits.has_upload_timeout()) limits.mutable_upload_timeout()->set_seconds(30);
  if (!limits.has_drain_timeout()) limits.mutable_drain_timeout()->set_seconds(3600);
  if (!limits.has_max_streams()) limits.set_max_streams(128);
  if (!limits.has_max_message_bytes()) limits.set_max_message_bytes(4 << 20);
  if (!limits.has_upload_tokens_per_second()) limits.set_upload_tokens_per_second(1000);
  if (!limits.has_result_timeout()) limits.mutable_result_timeout()->set_seconds(30);
  if (!limits.has_unread_bytes()) limits.set_unread_bytes(256 << 20);
  if (!limits.has_max_top_k()) limits.set_max_top_k(1024);
  if (!limits.has_return_logits()) limits.set_return_logits(true);
  if (!limits.has_max_connections()) limits.set_max_connections(8192);
  if (!limits.has_channel_memory_bytes()) limits.set_channel_memory_bytes(512 << 20);
  auto& kv = *config.mutable_kv();
  if (!kv.has_lease()) kv.mutable_lease()->set_seconds(30);
  if (!kv.has_max_lease()) kv.mutable_max_lease()->set_seconds(3600);
  if (!kv.has_block_tokens()) kv.set_block_tokens(16);
}

// Collects the first problem of a config's values, named by where its key was set.
class Checker {
 public:
  explicit Checker(const KeyOrigins& origins) : origins_(origins) {}

  void Require(bool good, const std::string& path, const std::string& problem) {
    if (good || !status_.ok()) return;
    const auto origin = origins_.find(path);
    // The message is one line, though a value that it repeats may have several.
    status_ = absl::InvalidArgumentError(absl::StrReplaceAll(
        absl::StrCat(origin == origins_.end() ? "config" : origin->second, ": ", path, ": ", problem),
        {{"\n", " "}, {"\r", " "}}));
  }
  void RequireRange(uint64_t value, uint64_t least, uint64_t most, const std::string& path) {
    Require(least <= value && value <= most, path,
            absl::StrCat(value, " is not between ", least, " and ", most));
  }
  void RequireDevice(const std::string& value, const std::string& path) {
    const std::vector<std::string> names = DeviceNames();
    Require(std::find(names.begin(), names.end(), value) != names.end(), path,
            absl::StrCat("\"", value, "\" is not known; choose one of ", absl::StrJoin(names, ", ")));
  }
  void RequireAddress(const std::string& value, const std::string& path) {
    const auto address = ParseHostPort(value);
    Require(address.ok(), path, std::string(address.status().message()));
  }
  void RequireMemory(uint64_t bytes, const std::string& path) {
    Require(bytes == 0 || bytes >= kMinMemoryBytes, path,
            absl::StrCat(bytes, " bytes are too few; give 1MiB or more"));
  }
  void RequirePositive(const google::protobuf::Duration& value, const std::string& path) {
    Require(value.seconds() > 0 || value.nanos() > 0, path, "must be above 0s");
  }
  const absl::Status& status() const { return status_; }

 private:
  const KeyOrigins& origins_;
  absl::Status status_;
};

// What leader and workers of a pool of processes need.
void ValidatePool(const v1::PoolSection& pool, const KeyOrigins& origins, Checker& check) {
  const auto embedded = origins.lower_bound("pool.embedded");
  const bool has_embedded = embedded != origins.end() && absl::StartsWith(embedded->first, "pool.embedded");
  if (!pool.control_listen().empty()) {
    check.RequireAddress(pool.control_listen(), "pool.control_listen");
    check.Require(!has_embedded, "pool.control_listen",
                  "the pool is of workers that join, or embedded; leave out control_listen or pool.embedded");
  }
  check.RequirePositive(pool.silence_timeout(), "pool.silence_timeout");
  check.RequirePositive(pool.hang_timeout(), "pool.hang_timeout");
  check.RequirePositive(pool.empty_timeout(), "pool.empty_timeout");
  check.Require(!pool.has_link_bytes_per_second() || pool.link_bytes_per_second() > 0,
                "pool.link_bytes_per_second", "must be above 0");
  check.Require(pool.host_bytes_per_second() >= 0, "pool.host_bytes_per_second", "must not be below 0");
  check.Require(!pool.has_host_link_bytes_per_second() || pool.host_link_bytes_per_second() > 0,
                "pool.host_link_bytes_per_second", "must be above 0");
  if (pool.has_link_latency()) check.RequirePositive(pool.link_latency(), "pool.link_latency");
  if (pool.has_host_link_latency()) check.RequirePositive(pool.host_link_latency(), "pool.host_link_latency");
  check.RequireRange(pool.worker().ranks(), 1, kMaxHostRanks, "pool.worker.ranks");
  check.RequireDevice(pool.worker().device(), "pool.worker.device");
  check.RequireRange(pool.worker().threads(), 0, kMaxThreads, "pool.worker.threads");
  check.RequireRange(pool.worker().nccl_ctas(), 0, kMaxNcclCtas, "pool.worker.nccl_ctas");
  check.RequireRange(pool.worker().attention_sm_margin(), 0, kMaxAttentionMargin,
                     "pool.worker.attention_sm_margin");
  const auto devices = ParseDeviceNumbers(pool.worker().devices());
  check.Require(devices.ok(), "pool.worker.devices", std::string(devices.status().message()));
  check.RequireMemory(pool.worker().memory_bytes(), "pool.worker.memory_bytes");
  check.Require(pool.worker().peak_flops() >= 0, "pool.worker.peak_flops", "must not be below 0");
  if (!pool.worker().metrics_listen().empty()) {
    check.RequireAddress(pool.worker().metrics_listen(), "pool.worker.metrics_listen");
  }
  const v1::PoolSection::Tls& tls = pool.tls();
  const int files = (tls.cert().empty() ? 0 : 1) + (tls.key().empty() ? 0 : 1) + (tls.ca().empty() ? 0 : 1);
  check.Require(files == 0 || files == 3, "pool.tls", "TLS needs all of cert, key and ca");
}

void ValidateTenant(const v1::Tenant& tenant, const std::string& path, Checker& check) {
  check.Require(!tenant.has_weight() || (tenant.weight() >= 1e-3 && tenant.weight() <= 1e3), path + ".weight",
                "must be from 0.001 to 1000");
  if (tenant.has_max_requests())
    check.RequireRange(tenant.max_requests(), 1, UINT32_MAX, path + ".max_requests");
  if (tenant.has_max_tokens()) check.RequireRange(tenant.max_tokens(), 1, INT64_MAX, path + ".max_tokens");
  check.Require(-kTopPriority <= tenant.max_priority() && tenant.max_priority() <= kTopPriority,
                path + ".max_priority", absl::StrCat("must be from ", -kTopPriority, " to ", kTopPriority));
}

void ValidateApi(const v1::ApiSection::Tls& tls, Checker& check) {
  check.Require(tls.cert().empty() == tls.key().empty(), "api.tls", "TLS needs both of cert and key");
  check.Require(!tls.client_certificates() || (!tls.cert().empty() && !tls.ca().empty()),
                "api.tls.client_certificates", "needs cert, key and the clients' authorities in ca");
  check.Require(tls.server_name().empty() || !tls.ca().empty(), "api.tls.server_name",
                "needs the workers' authorities in ca");
  check.Require(!tls.insecure() || tls.cert().empty(), "api.tls.insecure",
                "is for plain text; leave it out, or cert and key");
}

absl::Status Validate(const v1::Config& config, const KeyOrigins& origins) {
  Checker check(origins);
  check.RequireAddress(config.listen(), "listen");
  if (!config.metrics_listen().empty()) check.RequireAddress(config.metrics_listen(), "metrics_listen");

  ValidatePool(config.pool(), origins, check);
  ValidateApi(config.api().tls(), check);
  const auto& embedded = config.pool().embedded();
  check.RequireRange(embedded.ranks(), 1, kMaxHostRanks, "pool.embedded.ranks");
  check.RequireDevice(embedded.device(), "pool.embedded.device");
  check.RequireRange(embedded.threads(), 0, kMaxThreads, "pool.embedded.threads");
  check.RequireMemory(embedded.memory_bytes(), "pool.embedded.memory_bytes");
  check.Require(embedded.peak_flops() >= 0, "pool.embedded.peak_flops", "must not be below 0");

  check.RequireRange(config.queue().max_requests(), 1, UINT32_MAX, "queue.max_requests");
  check.RequireRange(config.queue().max_tokens(), 1, INT64_MAX, "queue.max_tokens");
  check.RequirePositive(config.queue().max_wait(), "queue.max_wait");
  check.RequirePositive(config.queue().max_age(), "queue.max_age");
  ValidateTenant(config.tenant_limits(), "tenant_limits", check);
  for (const auto& [name, tenant] : config.tenants()) {
    const absl::Status good = CheckTenantName(name);
    check.Require(good.ok(), absl::StrCat("tenants.", name), std::string(good.message()));
    ValidateTenant(tenant, absl::StrCat("tenants.", name), check);
  }
  check.RequirePositive(config.trace().timeout(), "trace.timeout");
  check.RequireRange(config.plan().stripe(), 1, kMaxStripe, "plan.stripe");
  const bool has_dtype = config.model().dtype() != v1::ModelSection::DTYPE_AUTO;
  check.Require(has_dtype || config.plan().partial_dtype() != v1::PlanSection::PARTIAL_DTYPE_MODEL,
                "plan.partial_dtype", "model needs a model.dtype of bf16 or f32 instead of auto");
  check.RequirePositive(config.limits().upload_timeout(), "limits.upload_timeout");
  check.RequireRange(config.limits().max_streams(), 1, INT32_MAX, "limits.max_streams");
  check.RequireRange(config.limits().max_message_bytes(), kMinMessageBytes, kMaxMessageBytes,
                     "limits.max_message_bytes");
  check.RequirePositive(config.limits().result_timeout(), "limits.result_timeout");
  check.RequireRange(config.limits().max_top_k(), 1, INT32_MAX, "limits.max_top_k");
  check.RequireRange(config.limits().max_connections(), 1, INT32_MAX, "limits.max_connections");
  check.RequireRange(config.limits().channel_memory_bytes(), kMinChannelBytes, INT64_MAX,
                     "limits.channel_memory_bytes");
  check.RequirePositive(config.kv().lease(), "kv.lease");
  check.Require(ToDuration(config.kv().max_lease()) >= ToDuration(config.kv().lease()), "kv.max_lease",
                "must not be below kv.lease");
  check.RequireRange(config.kv().block_tokens(), 1, kMaxBlockTokens, "kv.block_tokens");
  if (!config.kv().listen().empty()) check.RequireAddress(config.kv().listen(), "kv.listen");
  return check.status();
}

std::optional<DType> DTypeOf(v1::ModelSection::Dtype dtype) {
  switch (dtype) {
    case v1::ModelSection::DTYPE_BF16:
      return DType::kBf16;
    case v1::ModelSection::DTYPE_F32:
      return DType::kF32;
    default:
      return std::nullopt;
  }
}

std::optional<WeightMode> WeightsOf(v1::ModelSection::Weights weights) {
  switch (weights) {
    case v1::ModelSection::WEIGHTS_RESIDENT:
      return WeightMode::kResident;
    case v1::ModelSection::WEIGHTS_STREAMED:
      return WeightMode::kStreamed;
    case v1::ModelSection::WEIGHTS_SHARDED:
      return WeightMode::kSharded;
    default:
      return std::nullopt;
  }
}

std::optional<LayoutKind> LayoutOf(v1::PlanSection::Layout layout) {
  switch (layout) {
    case v1::PlanSection::LAYOUT_STRIPED:
      return LayoutKind::kStriped;
    case v1::PlanSection::LAYOUT_ZIGZAG:
      return LayoutKind::kZigzag;
    case v1::PlanSection::LAYOUT_CONTIGUOUS:
      return LayoutKind::kContiguous;
    default:
      return std::nullopt;
  }
}

// Validate: the model's dtype is set where partial outputs travel in it.
std::optional<DType> PartialDTypeOf(v1::PlanSection::PartialDtype dtype, std::optional<DType> model_dtype) {
  switch (dtype) {
    case v1::PlanSection::PARTIAL_DTYPE_MODEL:
      return model_dtype;
    case v1::PlanSection::PARTIAL_DTYPE_AUTO:
      return std::nullopt;
    default:
      return DType::kF32;
  }
}

ScheduleChoice ScheduleOf(v1::PlanSection::Schedule schedule) {
  return schedule == v1::PlanSection::SCHEDULE_GREEDY ? ScheduleChoice::kGreedy : ScheduleChoice::kAuto;
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::error_code error;
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path, error)) {
    return absl::NotFoundError(
        absl::StrCat(path, ": cannot be read; name a configuration file, e.g. configs/local.yaml"));
  }
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

absl::StatusOr<v1::Config> LoadConfig(const std::string& path, std::span<const std::string> overrides,
                                      std::optional<ConfigReader> reader) {
  v1::Config config;
  KeyOrigins origins;
  if (!path.empty()) {
    ASSIGN_OR_RETURN(const auto text, ReadFile(path));
    RETURN_IF_ERROR(ReadYaml(path, text, &config, &origins));
  }
  for (const std::string& assignment : overrides) {
    RETURN_IF_ERROR(ReadOverride(assignment, &config, &origins));
  }
  if (reader.has_value()) {
    RETURN_IF_ERROR(CheckReader(origins, *reader));
  }
  FillDefaults(config);
  RETURN_IF_ERROR(Validate(config, origins));
  return config;
}

absl::StatusOr<std::vector<int>> ParseDeviceNumbers(const std::string& list) {
  std::vector<int> numbers;
  if (list.empty()) return numbers;
  for (const absl::string_view text : absl::StrSplit(list, ',')) {
    int number = 0;
    if (!absl::SimpleAtoi(text, &number) || number < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", list, "\" is no list of devices; write their numbers, e.g. 2,3"));
    }
    if (std::find(numbers.begin(), numbers.end(), number) != numbers.end()) {
      return absl::InvalidArgumentError(absl::StrCat("device ", number, " is in \"", list, "\" twice"));
    }
    numbers.push_back(number);
  }
  return numbers;
}

absl::Status CheckModelFolder(const v1::Config& config) {
  const std::filesystem::path path = config.model().path();
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return absl::OkStatus();
  if (std::filesystem::exists(path, ignored)) {
    const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
    return absl::InvalidArgumentError(
        absl::StrCat("model.path: ", path.string(), " is a file; give its folder, ", folder.string()));
  }
  return absl::NotFoundError(
      absl::StrCat("model.path: ", path.string(), ": no such folder; name a Hugging Face model folder"));
}

EngineOptions ToEngineOptions(const v1::Config& config) {
  const auto& embedded = config.pool().embedded();
  EngineOptions options;
  options.model_path = config.model().path();
  options.ranks = static_cast<int>(embedded.ranks());
  options.device = embedded.device();
  options.dtype = DTypeOf(config.model().dtype());
  options.weights = WeightsOf(config.model().weights());
  options.layout = LayoutOf(config.plan().layout());
  options.stripe = config.plan().stripe();
  options.partial_dtype = PartialDTypeOf(config.plan().partial_dtype(), options.dtype);
  options.schedule = ScheduleOf(config.plan().schedule());
  options.whole_exchanges = config.plan().exchange() == v1::PlanSection::EXCHANGE_WHOLE;
  options.speed_profile_path =
      config.plan().has_profile_path() ? config.plan().profile_path() : DefaultPoolProfilePath();
  options.measure_speed = config.plan().measure();
  options.peak_flops = embedded.peak_flops();
  options.memory_budget_bytes = static_cast<int64_t>(embedded.memory_bytes());
  options.threads = static_cast<int>(embedded.threads());
  const auto& kv = config.kv();
  if (kv.has_memory_bytes()) options.kv_memory_bytes = static_cast<int64_t>(kv.memory_bytes());
  if (kv.has_host_memory_bytes()) options.kv_host_memory_bytes = static_cast<int64_t>(kv.host_memory_bytes());
  if (kv.has_cache()) options.kv_cache = kv.cache();
  return options;
}

}  // namespace meshfill
