#include "kernels/cpu/cpu_stream.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/layer_ops.h"
#include "kernels/cpu/router.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Bytes of a task of an element-wise operation: long beside the cost of dealing it out, short beside a
// cancel.
constexpr int64_t kTaskBytes = 256 << 10;

}  // namespace

CpuStream::CpuStream(Device& device, const StopToken* stop, std::string attention_target,
                     std::unique_ptr<CpuTeam> team, std::function<void(std::unique_ptr<CpuTeam>)> done)
    : HostStream(device),
      dtype_(device.dtype()),
      stop_(stop),
      attention_target_(std::move(attention_target)),
      team_(std::move(team)),
      done_(std::move(done)) {}

CpuStream::~CpuStream() { done_(std::move(team_)); }

absl::Status CpuStream::Embed(std::span<const uint32_t> ids, const void* table, DType table_dtype,
                              int64_t width, float* x) {
  const auto* rows = static_cast<const std::byte*>(table);
  const int64_t row_bytes = width * DTypeBytes(table_dtype);
  return Share("embed", std::ssize(ids), width * sizeof(float), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      ConvertValues(rows + ids[t] * row_bytes, table_dtype, width, DType::kF32, x + t * width);
    }
  });
}

absl::Status CpuStream::RmsNorm(const float* x, const float* weight, int64_t tokens, int64_t width, float eps,
                                void* y) {
  return Share("rms norm", tokens, width * sizeof(float), [&](int64_t begin, int64_t end) {
    RmsNormRows(x + begin * width, weight, end - begin, width, eps, dtype_, At(y, begin * width));
  });
}

absl::Status CpuStream::AddRmsNorm(const float* y, const float* weight, int64_t tokens, int64_t width,
                                   float eps, float* x) {
  return Share("add rms norm", tokens, 2 * width * sizeof(float), [&](int64_t begin, int64_t end) {
    AddRmsNormRows(y + begin * width, weight, end - begin, width, eps, x + begin * width);
  });
}

absl::Status CpuStream::Scale(float* x, int64_t count, float factor) {
  return Share("scale", count, sizeof(float),
               [&](int64_t begin, int64_t end) { ScaleValues(x + begin, end - begin, factor); });
}

absl::Status CpuStream::Gemm(const GemmArgs& args) { return team_->gemm.Run(args, stop_); }

absl::Status CpuStream::SplitQkv(const SplitQkvArgs& args) {
  const int64_t token_width = int64_t{args.q_heads + 2 * args.kv_heads} * args.head_dim;
  return Share("split qkv", args.tokens, token_width * DTypeBytes(dtype_),
               [&](int64_t begin, int64_t end) { SplitQkvTokens(args, dtype_, begin, end); });
}

absl::Status CpuStream::AttentionBlock(const AttentionBlockArgs& args) {
  return CpuAttentionBlock(args, dtype_, attention_target_, team_->pool, stop_);
}

absl::Status CpuStream::MergePartial(const MergePartialArgs& args) {
  return Share("merge partial", args.rows, args.head_dim * sizeof(float),
               [&](int64_t begin, int64_t end) { MergePartialRows(args, begin, end); });
}

absl::Status CpuStream::ApplySinks(const ApplySinksArgs& args) {
  return Share("apply sinks", args.heads * args.tokens, args.head_dim * sizeof(float),
               [&](int64_t begin, int64_t end) { ApplySinksRows(args, begin, end); });
}

absl::Status CpuStream::CopyHeads(const CopyHeadsArgs& args) {
  const int64_t slot_bytes = int64_t{args.heads} * args.head_dim * DTypeBytes(args.from_rows.dtype);
  return Share("copy heads", args.tokens, slot_bytes,
               [&](int64_t begin, int64_t end) { CopyHeadsSlots(args, begin, end); });
}

absl::Status CpuStream::Activate(const ActivateArgs& args) {
  const auto* const x = static_cast<const std::byte*>(args.x);
  const int64_t token_bytes = 2 * args.width * DTypeBytes(dtype_);
  return Share("activation", args.tokens, token_bytes, [&](int64_t begin, int64_t end) {
    ActivateArgs part = args;
    part.x = x + begin * token_bytes;
    part.tokens = end - begin;
    part.y = At(args.y, begin * args.width);
    ActivateTokens(part, dtype_);
  });
}

absl::Status CpuStream::Route(const RouteArgs& args) {
  // A score takes about as long as an element of a row elsewhere takes with its memory.
  const int64_t token_bytes = args.rule.experts * static_cast<int64_t>(8 * sizeof(float));
  RETURN_IF_ERROR(Share("route", args.tokens, token_bytes,
                        [&](int64_t begin, int64_t end) { ChooseExperts(args, begin, end); }));
  SortRowsByExpert(args);
  return absl::OkStatus();
}

absl::Status CpuStream::ExpertMlp(const ExpertMlpArgs& args) {
  if (team_->gemm.MayRunExpertMlps(args)) return team_->gemm.RunExpertMlps(args, stop_);
  RETURN_IF_ERROR(team_->gemm.RunExperts(GateUpProductOf(args), stop_));
  RETURN_IF_ERROR(Activate(ActivationOf(args)));
  return team_->gemm.RunExperts(DownProductOf(args), stop_);
}

absl::Status CpuStream::AddExperts(const AddExpertsArgs& args) {
  const int64_t token_bytes = args.width * (sizeof(float) + args.used * DTypeBytes(dtype_));
  return Share("add experts", args.tokens, token_bytes,
               [&](int64_t begin, int64_t end) { AddExpertsTokens(args, dtype_, begin, end); });
}

absl::Status CpuStream::Convert(const float* from, int64_t count, DType to_dtype, void* to) {
  return Share("convert", count, sizeof(float), [&](int64_t begin, int64_t end) {
    ConvertValues(from + begin, DType::kF32, end - begin, to_dtype,
                  static_cast<std::byte*>(to) + begin * DTypeBytes(to_dtype));
  });
}

void* CpuStream::At(void* tensor, int64_t index) const {
  return static_cast<std::byte*>(tensor) + index * DTypeBytes(dtype_);
}

absl::Status CpuStream::Share(const char* operation, int64_t rows, int64_t row_bytes,
                              const std::function<void(int64_t, int64_t)>& body) {
  const int64_t task_rows = std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, row_bytes));
  team_->pool.ParallelFor((rows + task_rows - 1) / task_rows, [&](int64_t task, int) {
    if (stop_ != nullptr && !stop_->Proceed()) return;
    body(task * task_rows, std::min(rows, (task + 1) * task_rows));
  });
  return Stopped() ? absl::CancelledError(absl::StrCat(operation, ": stopped")) : absl::OkStatus();
}

}  // namespace meshfill
