#include "server/cli/gpu_plan.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/model/layer_shape.h"
#include "engine/plan/pieces.h"
#include "kernels/gpu_defaults.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// FLOPs of one token in the experts that it uses, in all layers.
double ExpertFlopsPerToken(const ModelShape& model) {
  double flops = 0;
  model.ForEachKind([&](const LayerForm& form, int layers) {
    for (const LayerTensor& tensor : LayerTensors(LayerShapeOf(model, form))) {
      if (tensor.part != LayerPart::kExpertGateUp && tensor.part != LayerPart::kExpertDown) continue;
      flops +=
          2.0 * layers * static_cast<double>(tensor.used_copies * tensor.out_features * tensor.in_features);
    }
  });
  return flops;
}

// Of a token's products in all layers.
double GemmFlopsPerSecond(const ModelShape& model, const GpuCluster& gpus) {
  const double all = ProjectionFlopsPerToken(model), experts = ExpertFlopsPerToken(model);
  return gpus.gemm_flops_per_second * (all / (all - experts + experts / gpus.experts_gemm_share));
}

PoolSpeed SpeedOf(const ModelShape& model, const GpuCluster& gpus) {
  PoolSpeed speed;
  speed.gemm_flops_per_second = GemmFlopsPerSecond(model, gpus);
  speed.attention_flops_per_second = gpus.cluster.attention_flops_per_second;
  speed.merge_bytes_per_second = gpus.memory_bytes_per_second;
  speed.lm_head_bytes_per_second = gpus.memory_bytes_per_second;
  speed.slice_tokens = kGpuSliceTokens;
  return speed;
}

// Weights of all GPUs together, and what one keeps of them.
struct Held {
  PlanWeights weights;
  int64_t kept_bytes = 0;     // bytes on one GPU, whether something runs or not
  int64_t passing_bytes = 0;  // bytes on one GPU, for each run
  int64_t host_bytes = 0;     // bytes on a node's host, which its GPUs share
  const char* not_yet = "";   // why Meshfill does not do it so far
};

// Each layer divided among the GPUs of a node, if all nodes have as many and, where there are several, the
// parts leave room; else among all GPUs.
Held Shared(const WeightBytes& bytes, int64_t for_a_run, const GpuCluster& gpus, const PlanRequest& request) {
  const PlanWeights one = {.mode = WeightMode::kSharded,
                           .loaded_bytes = bytes.layers + bytes.head,
                           .run_bytes = for_a_run,
                           .layer_bytes = bytes.most_layer,
                           .head_bytes = bytes.head};
  const auto among = [&](int count) {
    const std::vector<int> nodes(request.topology.node_of_seat.begin(),
                                 request.topology.node_of_seat.begin() + count);
    return SharedAmong(one, count, RingLink(request.topology, nodes));
  };
  const auto kept = [&](int count) { return ShareBytes(one, count) + bytes.embedding; };
  const int ranks = request.ranks, of_node = std::min(ranks, gpus.cluster.gpus_per_node);
  const bool has_room = ranks == of_node || kept(of_node) + for_a_run < gpus.memory_bytes;
  const bool by_node = of_node > 1 && ranks % of_node == 0 && has_room;
  const int count = by_node ? of_node : ranks;
  Held held = {.weights = among(count), .kept_bytes = kept(count), .passing_bytes = for_a_run};
  held.weights.loaded_bytes = ranks * held.kept_bytes;
  held.weights.run_bytes = ranks * for_a_run;
  if (by_node) {
    held.weights.sent_bytes = held.weights.sent_head_bytes = 0;  // none leave a process
  } else {
    held.not_yet = "weights that several nodes share";
  }
  return held;
}

std::vector<Held> WaysToHold(const ModelShape& model, const GpuCluster& gpus, const PlanRequest& request) {
  const WeightBytes bytes = WeightBytesOf(model, DType::kBf16);
  const int64_t widened = MostWidenedProductBytes(model, DType::kBf16);
  const int64_t for_a_run = kPartsAhead * bytes.most_layer + widened;
  const int ranks = request.ranks;
  std::vector<Held> ways;
  const int64_t all = bytes.layers + bytes.head + bytes.embedding;
  ways.push_back({.weights = {.loaded_bytes = ranks * all, .run_bytes = ranks * widened},
                  .kept_bytes = all,
                  .passing_bytes = widened});
  if (ranks > 1) ways.push_back(Shared(bytes, for_a_run, gpus, request));
  if (gpus.host_bytes_per_second > 0) {
    const auto seconds = [&](int64_t moved) {
      return static_cast<double>(moved) / gpus.host_bytes_per_second;
    };
    ways.push_back({.weights = {.mode = WeightMode::kStreamed,
                                .loaded_bytes = ranks * bytes.embedding,
                                .run_bytes = ranks * for_a_run,
                                .layer_seconds = seconds(bytes.most_layer),
                                .head_seconds = seconds(bytes.head)},
                    .kept_bytes = bytes.embedding,
                    .passing_bytes = for_a_run,
                    .host_bytes = bytes.layers + bytes.head});
  }
  return ways;
}

// Bytes of K and V that stay on the host of a full node: what is cached, and of a prompt in pieces all.
int64_t HostKvBytes(const ModelShape& model, const GpuCluster& gpus, const PlanRequest& request,
                    const PlanChoice& choice) {
  const int64_t tokens = request.cached_tokens + (choice.pieces.empty() ? 0 : request.tokens);
  const int64_t of_node = std::min(request.ranks, gpus.cluster.gpus_per_node);
  return model.layers * model.kv_bytes((tokens * of_node + request.ranks - 1) / request.ranks);
}

// What all modes would need, for an error.
std::string NeedsOf(std::span<const WeightModeBytes> modes) {
  const auto gigabytes = [](int64_t bytes) {
    return absl::StrFormat("%.1f GB", static_cast<double>(bytes) / 1e9);
  };
  std::string needs;
  bool hosts = false;
  for (const WeightModeBytes& mode : modes) {
    absl::StrAppend(&needs, needs.empty() ? " " : ", ", WeightModeName(mode.mode), " ",
                    gigabytes(mode.bytes));
    if (mode.fits_host()) continue;
    absl::StrAppend(&needs, " and ", gigabytes(mode.host_bytes), " of a node's host, which has ",
                    gigabytes(mode.host_memory_bytes));
    hosts = true;
  }
  return absl::StrCat("; of a GPU, weights take", needs, ": give --ranks more, or GPUs",
                      hosts ? " and hosts" : "", " with more memory");
}

}  // namespace

absl::StatusOr<GpuPlan> PlanOnGpus(const ModelShape& model, const GpuCluster& gpus, PlanRequest request,
                                   int64_t granule_tokens) {
  const PoolSpeed speed = SpeedOf(model, gpus);
  request.one_memory = false;
  request.kv_on_host = true;
  request.topology = sim::TopologyOf(gpus.cluster, request.ranks);
  absl::Status status = absl::FailedPreconditionError(
      absl::StrFormat("the weights do not fit %d GPU%s of %.1f GB", request.ranks,
                      request.ranks == 1 ? "" : "s", static_cast<double>(gpus.memory_bytes) / 1e9));
  std::optional<PlanChoice> best;
  std::vector<std::string> not_yet;  // of the best
  std::vector<WeightModeBytes> modes;
  for (const Held& way : WaysToHold(model, gpus, request)) {
    WeightModeBytes& mode = modes.emplace_back(WeightModeBytes{.mode = way.weights.mode,
                                                               .bytes = way.kept_bytes + way.passing_bytes,
                                                               .fits = false,
                                                               .host_bytes = way.host_bytes,
                                                               .host_memory_bytes = gpus.host_memory_bytes});
    const int64_t left = (gpus.memory_bytes - way.kept_bytes) / 100 * kGpuUsablePercent;
    if (left <= way.passing_bytes || !mode.fits_host()) continue;
    mode.fits = true;
    request.weights = way.weights;
    request.memory_budget_bytes = left * request.ranks;
    absl::StatusOr<PlanChoice> choice = MakePlanInPieces(model, speed, request, granule_tokens);
    if (!choice.ok()) {
      if (!absl::IsFailedPrecondition(choice.status())) return choice.status();
      status = choice.status();
      continue;
    }
    mode.host_bytes += HostKvBytes(model, gpus, request, *choice);
    if (!mode.fits_host()) {
      mode.fits = false;
      status = absl::FailedPreconditionError(absl::StrCat(
          "the K and V of ", request.cached_tokens + request.tokens, " tokens do not fit the nodes' hosts"));
      continue;
    }
    mode.seconds = choice->plan.predicted.seconds;
    if (best.has_value() && mode.seconds >= best->plan.predicted.seconds) continue;
    best = *std::move(choice);
    not_yet.clear();
    if (*way.not_yet != '\0') not_yet.push_back(way.not_yet);
  }
  if (best.has_value()) {
    return GpuPlan{
        .choice = *std::move(best), .speed = speed, .modes = std::move(modes), .not_yet = std::move(not_yet)};
  }
  return absl::FailedPreconditionError(absl::StrCat(status.message(), NeedsOf(modes)));
}

}  // namespace meshfill
