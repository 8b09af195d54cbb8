#include "kernels/cuda/attention.h"

#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/attention_params.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

constexpr int64_t kLargest = (int64_t{1} << 31) - 1;

bool Aligned(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

absl::Status CheckArgs(const AttentionBlockArgs& args, DType dtype) {
  const auto error = [](const auto&... parts) {
    return absl::InvalidArgumentError(absl::StrCat("cuda attention: ", parts...));
  };
  if (dtype == DType::kF32) return error("dtype is f32; use bf16 or f16");
  if (args.head_dim < 8 || args.head_dim > 256 || args.head_dim % 8 != 0) {
    return error("head_dim is ", args.head_dim, "; use a multiple of 8 up to 256");
  }
  if (args.q_tokens < 0 || args.q_tokens > kLargest)
    return error("q_tokens is ", args.q_tokens, "; use 0 to 2^31 - 1");
  if (args.k_tokens < 0 || args.k_tokens > kLargest)
    return error("k_tokens is ", args.k_tokens, "; use 0 to 2^31 - 1");
  if (args.kv_heads < 1 || args.q_heads < 1 || args.q_heads % args.kv_heads != 0) {
    return error("q_heads is ", args.q_heads, ", kv_heads ", args.kv_heads, "; use a divisor of q_heads");
  }
  if (!(args.scale > 0 && std::isfinite(args.scale)))
    return error("the scale must be positive, but is ", args.scale);
  for (const SlotPositions& slots : {args.band.q, args.band.k}) {
    if (slots.base < 0 || slots.stride < 1 || slots.width < 1) {
      return error("a chunk's positions are base ", slots.base, ", stride ", slots.stride, ", width ",
                   slots.width, "; use base >= 0, stride and width >= 1");
    }
  }
  if (args.band.first_q < 0 || args.band.first_q > kLargest)
    return error("the queries count from position ", args.band.first_q, "; use 0 to 2^31 - 1");
  if (!Aligned(args.q, 16) || !Aligned(args.k, 16) || !Aligned(args.v, 16) || !Aligned(args.o, 8)) {
    return error("q, k and v must begin at multiples of 16 bytes, o of 8");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CudaAttentionBlock(const AttentionBlockArgs& args, DType dtype, const CudaDeviceTraits& device,
                                CUstream_st* stream, CudaAttentionKernel kernel) {
  RETURN_IF_ERROR(CheckArgs(args, dtype));
  const bool has_sm90 = device.compute_major == 9 && device.compute_minor == 0;
  if (device.compute_major < 8 || (kernel == CudaAttentionKernel::kSm90 && !has_sm90)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "cuda attention: the device has compute capability ", device.compute_major, ".", device.compute_minor,
        "; use ", kernel == CudaAttentionKernel::kSm90 ? "9.0 for the sm90 kernel" : "8.0 or later"));
  }
  if (args.q_tokens == 0 || (args.k_tokens == 0 && args.carry_in)) return absl::OkStatus();
  const AttentionParams params = MakeAttentionParams(args, device.l2_bytes);
  if (has_sm90 && kernel != CudaAttentionKernel::kSm80) {
    if (args.head_dim <= 64) return LaunchAttentionSm90<64>(params, dtype, device, stream);
    if (args.head_dim <= 96) return LaunchAttentionSm90<96>(params, dtype, device, stream);
    if (args.head_dim <= 128) return LaunchAttentionSm90<128>(params, dtype, device, stream);
    return LaunchAttentionSm90<256>(params, dtype, device, stream);
  }
  if (args.head_dim <= 64) return LaunchAttentionSm80<64>(params, dtype, device, stream);
  if (args.head_dim <= 96) return LaunchAttentionSm80<96>(params, dtype, device, stream);
  if (args.head_dim <= 128) return LaunchAttentionSm80<128>(params, dtype, device, stream);
  return LaunchAttentionSm80<256>(params, dtype, device, stream);
}

}  // namespace meshfill
