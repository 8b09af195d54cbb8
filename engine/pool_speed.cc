#include "engine/pool_speed.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <vector>

namespace meshfill {
namespace {

constexpr int kRepeats = 3;  // the first warms caches and code; the best counts
constexpr int64_t kGemmTokens = 512;
constexpr int64_t kGemmWidthLimit = 2048;
constexpr int64_t kBlockTokens = 1024;

// In-process hand-over: one mutex and one wake-up, no bytes.
constexpr double kHandoverSeconds = 20e-6;
constexpr double kHandoverBytesPerSecond = 1e13;

// A device buffer of values in ±1, without structure.
absl::StatusOr<BufferRef> RandomTensor(Backend& backend, int64_t elements) {
  absl::StatusOr<BufferRef> buffer = backend.Allocate(elements * DTypeBytes(backend.dtype()));
  if (!buffer.ok()) return buffer;
  std::minstd_rand random(1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(elements);
  for (float& value : values) value = uniform(random);
  const absl::Status status = backend.Convert(values.data(), elements, backend.dtype(), (*buffer)->data());
  if (!status.ok()) return status;
  return buffer;
}

// FLOP/s of the best of a few runs of `operation`.
template <typename Operation>
absl::StatusOr<double> BestFlopsPerSecond(double flops, Operation operation) {
  double best_seconds = INFINITY;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    if (absl::Status status = operation(); !status.ok()) return status;
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    best_seconds = std::min(best_seconds, elapsed.count());
  }
  return flops / std::max(best_seconds, 1e-9);
}

absl::StatusOr<double> GemmFlopsPerSecond(const ModelShape& model, Backend& backend) {
  const int64_t in = std::min(model.hidden, kGemmWidthLimit);
  const int64_t out = std::min(model.intermediate, kGemmWidthLimit);
  absl::StatusOr<BufferRef> rows = RandomTensor(backend, out * in);
  if (!rows.ok()) return rows.status();
  const WeightRows matrix{.data = (*rows)->data(), .dtype = backend.dtype(), .rows = out};
  absl::StatusOr<std::unique_ptr<PackedWeight>> weight = backend.PackWeight({&matrix, 1}, in);
  if (!weight.ok()) return weight.status();
  absl::StatusOr<BufferRef> x = RandomTensor(backend, kGemmTokens * in);
  if (!x.ok()) return x.status();
  absl::StatusOr<BufferRef> y = backend.Allocate(kGemmTokens * out * DTypeBytes(backend.dtype()));
  if (!y.ok()) return y.status();
  return BestFlopsPerSecond(2.0 * kGemmTokens * in * out, [&] {
    return backend.Gemm({.weight = weight->get(),
                         .x = (*x)->data(),
                         .tokens = kGemmTokens,
                         .y = (*y)->data(),
                         .y_dtype = backend.dtype()});
  });
}

absl::StatusOr<double> AttentionFlopsPerSecond(const ModelShape& model, Backend& backend) {
  // Two KV heads' groups at most: speed does not depend on more, measuring time does.
  const int kv_heads = std::min(model.kv_heads, 2);
  const int q_heads = kv_heads * (model.q_heads / model.kv_heads);
  const int64_t q_elements = kBlockTokens * q_heads * model.head_dim;
  const int64_t k_elements = kBlockTokens * kv_heads * model.head_dim;
  absl::StatusOr<BufferRef> q = RandomTensor(backend, q_elements);
  if (!q.ok()) return q.status();
  absl::StatusOr<BufferRef> kv = RandomTensor(backend, 2 * k_elements);
  if (!kv.ok()) return kv.status();
  absl::StatusOr<BufferRef> o = backend.Allocate(q_elements * sizeof(float));
  if (!o.ok()) return o.status();
  absl::StatusOr<BufferRef> lse = backend.Allocate(kBlockTokens * q_heads * sizeof(float));
  if (!lse.ok()) return lse.status();
  const AttentionBlockArgs block{
      .q = (*q)->data(),
      .k = (*kv)->data(),
      .v = (*kv)->data<std::byte>() + (*kv)->size_bytes() / 2,
      .q_tokens = kBlockTokens,
      .k_tokens = kBlockTokens,
      .q_heads = q_heads,
      .kv_heads = kv_heads,
      .head_dim = model.head_dim,
      .band = {.q = {.base = 0, .stride = 1, .width = 64}, .k = {.base = 0, .stride = 1, .width = 64}},
      .scale = 1 / std::sqrt(static_cast<float>(model.head_dim)),
      .carry_in = false,
      .o = (*o)->data<float>(),
      .lse = (*lse)->data<float>(),
  };
  return BestFlopsPerSecond(4.0 * model.head_dim * q_heads * VisiblePairs(kBlockTokens, 0),
                            [&] { return backend.AttentionBlock(block); });
}

}  // namespace

absl::StatusOr<PoolSpeed> MeasurePoolSpeed(const ModelShape& model, Backend& backend, int ranks) {
  absl::StatusOr<double> gemm = GemmFlopsPerSecond(model, backend);
  if (!gemm.ok()) return gemm.status();
  absl::StatusOr<double> attention = AttentionFlopsPerSecond(model, backend);
  if (!attention.ok()) return attention.status();
  return PoolSpeed{.gemm_flops_per_second = *gemm / ranks,
                   .attention_flops_per_second = *attention / ranks,
                   .link_bytes_per_second = kHandoverBytesPerSecond,
                   .link_latency_seconds = kHandoverSeconds};
}

}  // namespace meshfill
