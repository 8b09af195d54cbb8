#include "engine/speed/pool_speed.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "engine/speed/layer_probe.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

constexpr int kRepeats = 3;  // timed runs of each operation, after one that warms caches and code

// In-process hand-over: one mutex and one wake-up, no bytes.
constexpr double kHandoverSeconds = 20e-6;
constexpr double kHandoverBytesPerSecond = 1e13;

// Above 0, as it is divided by.
double SecondsOf(std::chrono::steady_clock::time_point start) { return std::max(1e-9, SecondsSince(start)); }

using Probes = std::span<const std::unique_ptr<LayerProbe>>;
using Operation = absl::Status (LayerProbe::*)(int64_t tokens);

// Median seconds of an operation that all probes run at once.
absl::StatusOr<double> SecondsTogether(Probes probes, Operation operation, int64_t tokens) {
  std::vector<absl::Status> statuses(probes.size());
  std::vector<double> seconds(probes.size() * kRepeats);
  const auto run = [&](size_t i) {
    absl::Status status = (probes[i].get()->*operation)(tokens);
    return status.ok() ? probes[i]->Finish() : status;
  };
  const auto measure = [&](size_t i) {
    statuses[i] = run(i);
    for (int repeat = 0; repeat < kRepeats && statuses[i].ok(); ++repeat) {
      const auto start = std::chrono::steady_clock::now();
      statuses[i] = run(i);
      seconds[i * kRepeats + repeat] = SecondsOf(start);
    }
  };
  std::vector<std::thread> threads;
  for (size_t i = 1; i < probes.size(); ++i) threads.emplace_back(measure, i);
  measure(0);
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

// A line through an operation's seconds at some sizes, the largest last, on devices that have settled at it.
// With `per`, both are divided by it.
absl::StatusOr<CostLine> MeasureLine(Probes probes, Operation operation, std::span<const int64_t> sizes,
                                     double (LayerProbe::*units)(int64_t) const,
                                     double (LayerProbe::*per)(int64_t) const = nullptr) {
  std::vector<CostSample> samples;
  const LayerProbe& probe = *probes.front();
  for (const auto start = std::chrono::steady_clock::now(); SecondsSince(start) < probe.settle_seconds();) {
    RETURN_IF_ERROR(SecondsTogether(probes, operation, sizes.back()).status());
  }
  for (const int64_t tokens : sizes) {
    ASSIGN_OR_RETURN(double seconds, SecondsTogether(probes, operation, tokens));
    const double divisor = per == nullptr ? 1 : (probe.*per)(tokens);
    samples.push_back({.units = (probe.*units)(tokens) / divisor, .seconds = seconds / divisor});
  }
  return FitCostLine(samples);
}

double RateOf(const CostLine& line) { return 1 / std::max(line.per_unit, 1e-18); }

// What it takes to begin the ranks' threads and to see them end: the least, which nothing else disturbed.
double StartSeconds(int ranks) {
  double least = std::numeric_limits<double>::infinity();
  for (int repeat = 0; repeat <= kRepeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) threads.emplace_back([] {});
    for (std::thread& thread : threads) thread.join();
    least = std::min(least, SecondsOf(start));
  }
  return least;
}

// The speed of one stream among those that run at once.
absl::StatusOr<PoolSpeed> MeasureProbes(Probes probes) {
  const LayerProbe& probe = *probes.front();
  const int64_t slice = probe.slice_tokens();
  const int64_t block = probe.block_tokens();
  ASSIGN_OR_RETURN(CostLine token_work,
                   MeasureLine(probes, &LayerProbe::TokenWork,
                               std::vector<int64_t>{slice / 8, slice / 2, slice}, &LayerProbe::TokenFlops));
  ASSIGN_OR_RETURN(CostLine attention,
                   MeasureLine(probes, &LayerProbe::Block, std::vector<int64_t>{block / 4, block / 2, block},
                               &LayerProbe::BlockFlops, &LayerProbe::BlockRows));
  ASSIGN_OR_RETURN(double merge, SecondsTogether(probes, &LayerProbe::Merge, block));
  ASSIGN_OR_RETURN(double begin, SecondsTogether(probes, &LayerProbe::Begin, slice));
  ASSIGN_OR_RETURN(double lm_head, SecondsTogether(probes.first(1), &LayerProbe::LmHead, 1));
  return PoolSpeed{.gemm_flops_per_second = RateOf(token_work),
                   .attention_flops_per_second = RateOf(attention),
                   .merge_bytes_per_second = probe.MergeBytes(block) / merge,
                   .link_bytes_per_second = kHandoverBytesPerSecond,
                   .link_latency_seconds = kHandoverSeconds,
                   .slice_seconds = token_work.fixed * probe.layer_scale(),
                   .block_row_seconds = attention.fixed,
                   .token_seconds = begin / static_cast<double>(slice),
                   .lm_head_bytes_per_second = probe.LmHeadBytes() / lm_head};
}

}  // namespace

PoolSpeed ShareOf(double share, PoolSpeed speed) {
  speed.gemm_flops_per_second *= share;
  speed.attention_flops_per_second *= share;
  speed.merge_bytes_per_second *= share;
  speed.slice_seconds /= share;
  speed.block_row_seconds /= share;
  speed.token_seconds /= share;
  speed.lone_rank_speedup = 1 / share;
  return speed;
}

CostLine FitCostLine(std::span<const CostSample> samples) {
  // Σ (fixed·x + per_unit·y − 1)² with x = 1/seconds and y = units/seconds.
  double xx = 0, xy = 0, yy = 0, x_sum = 0, y_sum = 0;
  for (const CostSample& sample : samples) {
    const double x = 1 / sample.seconds;
    const double y = sample.units / sample.seconds;
    xx += x * x;
    xy += x * y;
    yy += y * y;
    x_sum += x;
    y_sum += y;
  }
  const double determinant = xx * yy - xy * xy;
  const CostLine line = {.fixed = (x_sum * yy - y_sum * xy) / determinant,
                         .per_unit = (y_sum * xx - x_sum * xy) / determinant};
  const bool singular = determinant <= 1e-12 * xx * yy;
  if (singular || line.fixed < 0) return {.fixed = 0, .per_unit = y_sum / yy};
  if (line.per_unit < 0) return {.fixed = x_sum / xx, .per_unit = 0};
  return line;
}

absl::StatusOr<PoolSpeed> MeasurePoolSpeed(const ModelShape& model, std::span<Stream* const> streams,
                                           int ranks) {
  ASSIGN_OR_RETURN(std::shared_ptr<const ProbeWeights> weights, MakeProbeWeights(model, *streams.front()));
  std::vector<std::unique_ptr<LayerProbe>> probes;
  for (Stream* stream : streams) {
    ASSIGN_OR_RETURN(std::unique_ptr<LayerProbe> probe, LayerProbe::Make(weights, *stream));
    probes.push_back(std::move(probe));
  }
  ASSIGN_OR_RETURN(PoolSpeed speed, MeasureProbes(probes));
  speed.slice_tokens = SliceTokensOf(model, streams.front()->device().grain());
  speed = ShareOf(std::min(1.0, static_cast<double>(streams.size()) / ranks), speed);
  speed.start_seconds = StartSeconds(ranks);
  return speed;
}

absl::Status RunEachOperation(const ModelShape& model, Stream& stream) {
  ASSIGN_OR_RETURN(std::shared_ptr<const ProbeWeights> weights, MakeProbeWeights(model, stream));
  ASSIGN_OR_RETURN(std::unique_ptr<LayerProbe> probe, LayerProbe::Make(weights, stream));
  const int64_t slice = probe->slice_tokens(), block = probe->block_tokens();
  for (const auto& [operation, tokens] :
       {std::pair{&LayerProbe::Begin, slice}, std::pair{&LayerProbe::TokenWork, slice},
        std::pair{&LayerProbe::Block, block}, std::pair{&LayerProbe::Merge, block},
        std::pair{&LayerProbe::LmHead, int64_t{1}}}) {
    RETURN_IF_ERROR((probe.get()->*operation)(tokens));
  }
  return probe->Finish();
}

absl::StatusOr<PoolSpeed> MeasurePoolSpeed(const ModelShape& model, Device& device, int streams, int ranks) {
  std::vector<std::unique_ptr<Stream>> owned;
  std::vector<Stream*> pointers;
  for (int i = 0; i < streams; ++i) {
    ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device.NewStream(nullptr));
    pointers.push_back(stream.get());
    owned.push_back(std::move(stream));
  }
  return MeasurePoolSpeed(model, pointers, ranks);
}

}  // namespace meshfill
