#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/cpu/layer_ops.h"
#include "kernels/cpu/thread_pool.h"

namespace meshfill {
namespace {

// Bytes of a task of an element-wise operation: long beside the cost of dealing it out, short beside a
// cancel.
constexpr int64_t kTaskBytes = 256 << 10;

class CpuBackend final : public Backend {
 public:
  CpuBackend(DType dtype, int threads)
      : dtype_(dtype), target_(SupportedAttentionTargets().front()), pool_(threads), gemm_(dtype, pool_) {}

  std::string name() const override { return absl::StrCat("cpu/", target_); }
  DType dtype() const override { return dtype_; }
  absl::StatusOr<BufferRef> Allocate(size_t size_bytes) override { return AllocateHostMemory(size_bytes); }
  void set_stop_token(const StopToken* stop) override { stop_ = stop; }

  absl::StatusOr<std::unique_ptr<PackedWeight>> PackWeight(std::span<const WeightRows> rows,
                                                           int64_t in_features) override {
    return gemm_.Pack(rows, in_features);
  }

  absl::Status Embed(std::span<const uint32_t> ids, const void* table, DType table_dtype, int64_t width,
                     float* x) override {
    const auto* rows = static_cast<const std::byte*>(table);
    const int64_t row_bytes = width * DTypeBytes(table_dtype);
    return Share("embed", std::ssize(ids), width * sizeof(float), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        ConvertValues(rows + ids[t] * row_bytes, table_dtype, width, DType::kF32, x + t * width);
      }
    });
  }

  absl::Status RmsNorm(const float* x, const float* weight, int64_t tokens, int64_t width, float eps,
                       void* y) override {
    return Share("rms norm", tokens, width * sizeof(float), [&](int64_t begin, int64_t end) {
      RmsNormRows(x + begin * width, weight, end - begin, width, eps, dtype_, At(y, begin * width));
    });
  }

  absl::Status Gemm(const GemmArgs& args) override { return gemm_.Run(args, stop_); }

  absl::Status SplitQkv(const SplitQkvArgs& args) override {
    const int64_t token_width = int64_t{args.q_heads + 2 * args.kv_heads} * args.head_dim;
    return Share("split qkv", args.tokens, token_width * DTypeBytes(dtype_),
                 [&](int64_t begin, int64_t end) { SplitQkvTokens(args, dtype_, begin, end); });
  }

  absl::Status AttentionBlock(const AttentionBlockArgs& args) override {
    return CpuAttentionBlock(args, dtype_, target_, pool_, stop_);
  }

  absl::Status MergePartial(const MergePartialArgs& args) override {
    return Share("merge partial", args.rows, args.head_dim * sizeof(float),
                 [&](int64_t begin, int64_t end) { MergePartialRows(args, begin, end); });
  }

  absl::Status CopyHeads(const CopyHeadsArgs& args) override {
    const int64_t slot_bytes = int64_t{args.heads} * args.head_dim * DTypeBytes(args.from_rows.dtype);
    return Share("copy heads", args.tokens, slot_bytes,
                 [&](int64_t begin, int64_t end) { CopyHeadsSlots(args, begin, end); });
  }

  absl::Status SwiGlu(const void* x, int64_t tokens, int64_t width, void* y) override {
    const auto* gate_up = static_cast<const std::byte*>(x);
    const int64_t token_bytes = 2 * width * DTypeBytes(dtype_);
    return Share("swiglu", tokens, token_bytes, [&](int64_t begin, int64_t end) {
      SwiGluTokens(gate_up + begin * token_bytes, end - begin, width, dtype_, At(y, begin * width));
    });
  }

  absl::Status Convert(const float* from, int64_t count, DType to_dtype, void* to) override {
    return Share("convert", count, sizeof(float), [&](int64_t begin, int64_t end) {
      ConvertValues(from + begin, DType::kF32, end - begin, to_dtype,
                    static_cast<std::byte*>(to) + begin * DTypeBytes(to_dtype));
    });
  }

 private:
  // Element `index` of a tensor in the compute dtype.
  void* At(void* tensor, int64_t index) const {
    return static_cast<std::byte*>(tensor) + index * DTypeBytes(dtype_);
  }

  // body(begin, end) over ranges of rows that make up [0, rows), on the team, until the stop token is raised.
  absl::Status Share(const char* operation, int64_t rows, int64_t row_bytes,
                     const std::function<void(int64_t, int64_t)>& body) {
    const int64_t task_rows = std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, row_bytes));
    pool_.ParallelFor((rows + task_rows - 1) / task_rows, [&](int64_t task, int) {
      if (Stopped()) return;
      body(task * task_rows, std::min(rows, (task + 1) * task_rows));
    });
    return Stopped() ? absl::CancelledError(absl::StrCat(operation, ": stopped")) : absl::OkStatus();
  }

  bool Stopped() const { return stop_ != nullptr && stop_->stopped(); }

  const DType dtype_;
  const std::string target_;
  const StopToken* stop_ = nullptr;
  ThreadPool pool_;
  CpuGemm gemm_;  // last: uses pool_
};

}  // namespace

std::unique_ptr<Backend> MakeCpuBackend(DType dtype, int threads) {
  return std::make_unique<CpuBackend>(dtype, threads);
}

}  // namespace meshfill
