#include "server/observe/metric_families.h"

#include <sys/resource.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "engine/mesh/traffic.h"
#include "kernels/monotonic_time.h"
#include "server/observe/build_name.h"
#include "server/observe/process_metrics.h"

namespace meshfill {
namespace {

constexpr const char* kCallsButPrefill[] = {"FetchKv", "RenewKv", "ReleaseKv", "Cancel", "Plan", "GetPool"};
// Refusals of these calls that have a series from the start; others have one once they happen.
constexpr absl::StatusCode kUsualRefusals[] = {
    absl::StatusCode::kInvalidArgument, absl::StatusCode::kNotFound, absl::StatusCode::kUnauthenticated,
    absl::StatusCode::kPermissionDenied};
constexpr int kStatusCodes = 17;  // gRPC's codes, OK (0) to UNAUTHENTICATED (16)
// Classes of prompts by length: each has those that are longer than the class before.
constexpr std::array<int64_t, 3> kPromptClasses = {8192, 65536, 524288};  // and what is longer

std::string PromptClass(int64_t tokens) {
  const auto found = std::lower_bound(kPromptClasses.begin(), kPromptClasses.end(), tokens);
  return found == kPromptClasses.end() ? "+Inf" : std::to_string(*found);
}

double PeakResidentBytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024;
}

}  // namespace

const prometheus::Histogram::BucketBoundaries MetricFamilies::kWaitBuckets = {
    0.001, 0.01, 0.1, 0.5,  1,    2.5,  5,    10,   30,   60,    120,
    300,   600,  900, 1200, 1800, 2400, 3600, 5400, 7200, 10800, 14400};
// Long prompts take minutes, and may wait an hour (queue.max_wait) before: the last bucket is four hours.
const prometheus::Histogram::BucketBoundaries MetricFamilies::kPrefillBuckets = {
    0.1, 0.25, 0.5, 1,    2.5,  5,    10,   20,   30,   60,    120,
    300, 600,  900, 1200, 1800, 2400, 3600, 5400, 7200, 10800, 14400};
const prometheus::Histogram::BucketBoundaries MetricFamilies::kPromptBuckets = {
    256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216};
const prometheus::Histogram::BucketBoundaries MetricFamilies::kSlowdownBuckets = {1.1, 1.25, 1.5, 2,   3,   5,
                                                                                  10,  20,   50,  100, 1000};
// At most experts / used: 16 of Qwen3-MoE, 20 of GLM-4.6, 32 of MiniMax-M2 and gpt-oss-120b.
const prometheus::Histogram::BucketBoundaries MetricFamilies::kImbalanceBuckets = {
    1.1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8, 12, 16, 24, 32};
const prometheus::Histogram::BucketBoundaries MetricFamilies::kIdleBuckets = {0,    0.01, 0.05, 0.1,
                                                                              0.25, 0.5,  0.75, 0.9};

MetricFamilies::MetricFamilies() {
  const auto add_class = [&](int64_t tokens) {
    ttft_by_prompt.Add({{"up_to", PromptClass(tokens)}}, kPrefillBuckets);
    slowdown.Add({{"up_to", PromptClass(tokens)}}, kSlowdownBuckets);
  };
  for (const int64_t tokens : kPromptClasses) add_class(tokens);
  add_class(kPromptClasses.back() + 1);
  const int top = static_cast<int>(queue_class_requests.size()) / 2;
  for (int priority = -top; priority <= top; ++priority) {
    queue_class_requests[priority + top] = &queue_classes.Add({{"class", std::to_string(priority)}});
  }
  build_info.Add({{"version", MESHFILL_VERSION}, {"commit", kBuildCommit}}).Set(1);
  for (int code = 0; code < kStatusCodes; ++code) {
    requests.Add({{"code", absl::StatusCodeToString(static_cast<absl::StatusCode>(code))}});
  }
  for (int reason = 0; reason <= static_cast<int>(Refusal::kOther); ++reason) {
    refusals.Add({{"reason", RefusalName(static_cast<Refusal>(reason))}});
  }
  for (const char* call : kCallsButPrefill) {
    for (absl::StatusCode code : kUsualRefusals) {
      call_refusals.Add({{"call", call}, {"code", absl::StatusCodeToString(code)}});
    }
  }
  for (Traffic traffic : kPrefillTraffics) {
    for (Family<Counter>* family : {&comm_bytes, &rank_comm_bytes, &predicted_comm_bytes}) {
      family->Add({{"op", TrafficName(traffic)}});
    }
  }
  for (PoolState state : kPoolStates) ranks.Add({{"state", PoolStateName(state)}});
}

std::vector<prometheus::MetricFamily> MetricFamilies::Collect() {
  peak_memory_bytes.Set(PeakResidentBytes());
  queue_oldest.Set(std::max(0.0, absl::ToDoubleSeconds(MonotonicNow() - OldestInQueue())));
  std::vector<prometheus::MetricFamily> families = registry_.Collect();
  std::ranges::move(CollectProcessMetrics(), std::back_inserter(families));
  return families;
}

void MetricFamilies::AddRank(int rank) {
  const std::string label = std::to_string(rank);
  for (Family<Counter>* family : {&attention, &attention_compute, &busy, &mesh_busy})
    family->Add({{"rank", label}});
  for (Traffic traffic : kPrefillTraffics) {
    comm_wait.Add({{"rank", label}, {"op", OperationName(traffic)}});
  }
}

prometheus::Histogram& MetricFamilies::TtftOfPrompt(int64_t tokens) {
  return ttft_by_prompt.Add({{"up_to", PromptClass(tokens)}}, kPrefillBuckets);
}

prometheus::Histogram& MetricFamilies::SlowdownOfPrompt(int64_t tokens) {
  return slowdown.Add({{"up_to", PromptClass(tokens)}}, kSlowdownBuckets);
}

double MetricFamilies::TtftBucket(double seconds) {
  const auto bucket = std::lower_bound(kPrefillBuckets.begin(), kPrefillBuckets.end(), seconds);
  return bucket == kPrefillBuckets.end() ? std::numeric_limits<double>::infinity() : *bucket;
}

prometheus::Family<prometheus::Counter>& MetricFamilies::AddCounter(const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry_);
}

prometheus::Family<prometheus::Gauge>& MetricFamilies::AddGauge(const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry_);
}

prometheus::Family<prometheus::Histogram>& MetricFamilies::AddHistograms(const char* name, const char* help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry_);
}

}  // namespace meshfill
