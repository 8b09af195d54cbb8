#include <algorithm>

#include "kernels/cuda/launch_status.h"
#include "kernels/cuda/layer_kernels.cuh"
#include "kernels/cuda/layer_launch.h"
#include "kernels/cuda/layer_ops.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

struct DeviceMachine {
  static MESHFILL_DEVICE uint32_t Thread() { return threadIdx.x; }
  static MESHFILL_DEVICE uint32_t Block() { return blockIdx.x; }
  static MESHFILL_DEVICE uint32_t Blocks() { return gridDim.x; }
  static MESHFILL_DEVICE float ShuffleXor(float value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
  }
};
using Kernels = LayerKernels<DeviceMachine>;

template <int kVector, class T>
__global__ void __launch_bounds__(kLayerThreads)
    EmbedKernel(const uint32_t* ids, int64_t tokens, const void* table, int64_t width, float* x) {
  Kernels::Embed<kVector>(ids, tokens, static_cast<const T*>(table), width, x);
}

template <int kVector>
__global__ void __launch_bounds__(kLayerThreads)
    RmsNormKernel(const float* x, const float* weight, int64_t tokens, int64_t width, float eps,
                  BFloat16* y) {
  Kernels::RmsNorm<kVector>(x, weight, tokens, width, eps, y);
}

template <int kVector>
__global__ void __launch_bounds__(kLayerThreads)
    AddRmsNormKernel(const float* y, const float* weight, int64_t tokens, int64_t width, float eps,
                     float* x) {
  Kernels::AddRmsNorm<kVector>(y, weight, tokens, width, eps, x);
}

template <int kVector>
__global__ void __launch_bounds__(kLayerThreads) ScaleKernel(float* x, int64_t vectors, float factor) {
  Kernels::Scale<kVector>(x, vectors, factor);
}

__global__ void __launch_bounds__(kLayerThreads) SplitQkvKernel(const __grid_constant__ SplitQkvArgs args) {
  Kernels::SplitQkv(args);
}

template <int kVector, class T>
__global__ void __launch_bounds__(kLayerThreads)
    MergePartialKernel(const __grid_constant__ MergePartialArgs args) {
  Kernels::MergePartial<kVector, T>(args);
}

template <int kVector>
__global__ void __launch_bounds__(kLayerThreads)
    ApplySinksKernel(const __grid_constant__ ApplySinksArgs args, const __grid_constant__ Divisor tokens) {
  Kernels::ApplySinks<kVector>(args, tokens);
}

template <int kVector, class From, class To>
__global__ void __launch_bounds__(kLayerThreads)
    CopyHeadsKernel(const __grid_constant__ CopyHeadsArgs args,
                    const __grid_constant__ Kernels::CopyHeadsDivisors divisors) {
  Kernels::CopyHeads<kVector, From, To>(args, divisors);
}

template <int kVector>
__global__ void __launch_bounds__(kLayerThreads)
    SwiGluKernel(const BFloat16* x, int64_t tokens, int64_t width, BFloat16* y) {
  Kernels::SwiGlu<kVector>(x, tokens, width, y);
}

template <int kVector>
__global__ void __launch_bounds__(kLayerThreads)
    GeGluKernel(const BFloat16* x, int64_t tokens, int64_t width, BFloat16* y) {
  Kernels::GeGlu<kVector>(x, tokens, width, y);
}

template <int kVector>
__global__ void __launch_bounds__(kLayerThreads)
    ClampedSwiGluKernel(const __grid_constant__ ActivateArgs args, int64_t vectors) {
  Kernels::ClampedSwiGlu<kVector>(args, vectors);
}

template <int kVector, class From, class To>
__global__ void __launch_bounds__(kLayerThreads) ConvertKernel(const void* from, int64_t vectors, void* to) {
  Kernels::Convert<kVector>(static_cast<const From*>(from), vectors, static_cast<To*>(to));
}

template <int kVector>
__global__ void __launch_bounds__(kLayerThreads)
    WidenKernel(const NarrowMatrix* matrices, uint32_t all_rows, const __grid_constant__ Divisor rows,
                uint32_t width, BFloat16* to) {
  Kernels::Widen<kVector>(matrices, all_rows, rows, width, to);
}

constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;

// A CTA for each of `rows`, or for `rows_each` of them; no launch without rows.
template <typename... Parameters, typename... Arguments>
absl::Status Launch(const char* name, int64_t rows, int64_t rows_each, CUstream_st* stream,
                    void (*kernel)(Parameters...), const Arguments&... arguments) {
  if (rows <= 0) return absl::OkStatus();
  const int64_t blocks = std::min(kMostBlocks, (rows + rows_each - 1) / rows_each);
  kernel<<<static_cast<unsigned>(blocks), kLayerThreads, 0, stream>>>(arguments...);
  return LaunchStatus(name, cudaGetLastError());
}

template <int kVector>
auto EmbedOf(DType table) {
  switch (table) {
    case DType::kF32:
      return EmbedKernel<kVector, float>;
    case DType::kF16:
      return EmbedKernel<kVector, Float16>;
    default:
      return EmbedKernel<kVector, BFloat16>;
  }
}

template <int kVector>
auto CopyHeadsOf(DType from, DType to) {
  if (from == DType::kF32) {
    return to == DType::kF32 ? CopyHeadsKernel<kVector, float, float>
                             : CopyHeadsKernel<kVector, float, BFloat16>;
  }
  return to == DType::kF32 ? CopyHeadsKernel<kVector, BFloat16, float>
                           : CopyHeadsKernel<kVector, BFloat16, BFloat16>;
}

template <int kVector>
auto ConvertOf(DType from, DType to) {
  const bool to_f32 = to == DType::kF32;
  switch (from) {
    case DType::kF32:
      return to_f32 ? ConvertKernel<kVector, float, float> : ConvertKernel<kVector, float, BFloat16>;
    case DType::kF16:
      return to_f32 ? ConvertKernel<kVector, Float16, float> : ConvertKernel<kVector, Float16, BFloat16>;
    default:
      return to_f32 ? ConvertKernel<kVector, BFloat16, float> : ConvertKernel<kVector, BFloat16, BFloat16>;
  }
}

}  // namespace

absl::Status LaunchEmbed(const uint32_t* ids, int64_t tokens, const void* table, DType table_dtype,
                         int64_t width, float* x, CUstream_st* stream) {
  const bool vectors = FitsVectors(table, table_dtype, 4, {width}) && FitsVectors(x, DType::kF32, 4, {width});
  return Launch("embed", tokens, 1, stream, vectors ? EmbedOf<4>(table_dtype) : EmbedOf<1>(table_dtype), ids,
                tokens, table, width, x);
}

absl::Status LaunchRmsNorm(const float* x, const float* weight, int64_t tokens, int64_t width, float eps,
                           BFloat16* y, CUstream_st* stream) {
  const bool vectors = FitsVectors(x, DType::kF32, 4, {width}) && FitsVectors(weight, DType::kF32, 4, {}) &&
                       FitsVectors(y, DType::kBf16, 4, {width});
  return Launch("rms norm", tokens, kLayerWarps, stream, vectors ? RmsNormKernel<4> : RmsNormKernel<1>, x,
                weight, tokens, width, eps, y);
}

absl::Status LaunchAddRmsNorm(const float* y, const float* weight, int64_t tokens, int64_t width, float eps,
                              float* x, CUstream_st* stream) {
  const bool vectors = FitsVectors(y, DType::kF32, 4, {width}) && FitsVectors(weight, DType::kF32, 4, {}) &&
                       FitsVectors(x, DType::kF32, 4, {width});
  return Launch("add rms norm", tokens, kLayerWarps, stream,
                vectors ? AddRmsNormKernel<4> : AddRmsNormKernel<1>, y, weight, tokens, width, eps, x);
}

absl::Status LaunchScale(float* x, int64_t count, float factor, CUstream_st* stream) {
  const bool vectors = FitsVectors(x, DType::kF32, 4, {count});
  const int64_t rows = vectors ? count / 4 : count;
  return Launch("scale", rows, kLayerThreads, stream, vectors ? ScaleKernel<4> : ScaleKernel<1>, x, rows,
                factor);
}

absl::Status LaunchSplitQkv(const SplitQkvArgs& args, CUstream_st* stream) {
  return Launch("split qkv", args.tokens, 1, stream, SplitQkvKernel, args);
}

absl::Status LaunchMergePartial(const MergePartialArgs& args, CUstream_st* stream) {
  const bool vectors = FitsVectors(args.o, DType::kF32, 4, {args.head_dim}) &&
                       FitsVectors(args.other_o, args.other_dtype, 4, {args.head_dim});
  const bool f32 = args.other_dtype == DType::kF32;
  return Launch("merge partial", args.rows, kLayerWarps, stream,
                vectors ? (f32 ? MergePartialKernel<4, float> : MergePartialKernel<4, BFloat16>)
                        : (f32 ? MergePartialKernel<1, float> : MergePartialKernel<1, BFloat16>),
                args);
}

absl::Status LaunchApplySinks(const ApplySinksArgs& args, CUstream_st* stream) {
  const bool vectors = FitsVectors(args.o, DType::kF32, 4, {args.head_dim});
  const int64_t rows = args.heads * args.tokens;
  if (rows <= 0) return absl::OkStatus();
  RETURN_IF_ERROR(RowsFitDivisor("apply sinks", rows));
  return Launch("apply sinks", rows, kLayerWarps, stream, vectors ? ApplySinksKernel<4> : ApplySinksKernel<1>,
                args, Divisor(static_cast<uint32_t>(args.tokens)));
}

absl::Status LaunchCopyHeads(const CopyHeadsArgs& args, CUstream_st* stream) {
  const auto fits = [&](const void* pointer, const HeadRows& rows) {
    return FitsVectors(pointer, rows.dtype, 4, {args.head_dim, rows.head_stride, rows.slot_stride});
  };
  const bool vectors = fits(args.from, args.from_rows) && fits(args.to, args.to_rows);
  const DType from = args.from_rows.dtype, to = args.to_rows.dtype;
  const int64_t rows = args.tokens * args.heads;
  if (rows <= 0) return absl::OkStatus();
  RETURN_IF_ERROR(RowsFitDivisor("copy heads", rows));
  return Launch("copy heads", rows, kLayerWarps, stream,
                vectors ? CopyHeadsOf<4>(from, to) : CopyHeadsOf<1>(from, to), args,
                Kernels::CopyHeadsDivisors(args));
}

absl::Status LaunchActivate(const ActivateArgs& args, CUstream_st* stream) {
  if (args.activation.gating == Gating::kClampedSwiGlu) {
    const int64_t count = args.tokens * args.width;
    const bool vectors =
        FitsVectors(args.x, DType::kBf16, 8, {}) && FitsVectors(args.y, DType::kBf16, 4, {count});
    const int64_t rows = vectors ? count / 4 : count;
    return Launch("clamped swiglu", rows, kLayerThreads, stream,
                  vectors ? ClampedSwiGluKernel<4> : ClampedSwiGluKernel<1>, args, rows);
  }
  const bool vectors = FitsVectors(args.x, DType::kBf16, 8, {args.width}) &&
                       FitsVectors(args.y, DType::kBf16, 8, {args.width});
  const auto launch = [&](const char* name, auto kernel) {
    return Launch(name, args.tokens, 1, stream, kernel, static_cast<const BFloat16*>(args.x), args.tokens,
                  args.width, static_cast<BFloat16*>(args.y));
  };
  if (args.activation.gating == Gating::kGeGlu) {
    return launch("geglu", vectors ? GeGluKernel<8> : GeGluKernel<1>);
  }
  return launch("swiglu", vectors ? SwiGluKernel<8> : SwiGluKernel<1>);
}

absl::Status LaunchConvert(const void* from, DType from_dtype, int64_t count, DType to_dtype, void* to,
                           CUstream_st* stream) {
  const bool vectors = FitsVectors(from, from_dtype, 4, {count}) && FitsVectors(to, to_dtype, 4, {count});
  const int64_t rows = vectors ? count / 4 : count;
  return Launch("convert", rows, kLayerThreads, stream,
                vectors ? ConvertOf<4>(from_dtype, to_dtype) : ConvertOf<1>(from_dtype, to_dtype), from, rows,
                to);
}

absl::Status LaunchWiden(const WidenArgs& args, CUstream_st* stream) {
  const int64_t all_rows = args.rows * std::ssize(args.matrices);
  RETURN_IF_ERROR(RowsFitDivisor("widen", std::max(all_rows, args.width)));
  return Launch("widen", all_rows, 1, stream,
                WidensVectors(args.matrices, args.width, args.to) ? WidenKernel<8> : WidenKernel<1>,
                args.on_device, static_cast<uint32_t>(all_rows), Divisor(static_cast<uint32_t>(args.rows)),
                static_cast<uint32_t>(args.width), args.to);
}

}  // namespace meshfill
