// Attention of one block on a CUDA device: AttentionBlockArgs with its semantics (kernels/stream.h), on
// device pointers.
//
// Two kernels (Mesh-Attention's blocks by FlashAttention's algorithm; scores never leave the chip):
//   sm90   compute capability 9.0: TMA, wgmma, warp-specialised, persistent (attention_sm90.cuh)
//   sm80   8.0 and later: cp.async, ldmatrix, mma.sync (attention_sm80.cuh); runs on 9.0 too
// Scores, softmax state and accumulators are f32; probabilities are rounded to the dtype of V before they are
// summed into O. The same arguments give the same bits on one kind of device with one margin or another: each
// row's keys are taken in one order, whichever CTA takes them.
#ifndef MESHFILL_KERNELS_CUDA_ATTENTION_H_
#define MESHFILL_KERNELS_CUDA_ATTENTION_H_

#include "absl/status/status.h"
#include "kernels/cuda/device_traits.h"
#include "kernels/dtype.h"
#include "kernels/stream.h"

struct CUstream_st;

namespace meshfill {

enum class CudaAttentionKernel { kFastest, kSm80, kSm90 };

// Enqueues one block on `stream` and returns at once; no host wait, no allocation. dtype: bf16 or f16.
// head_dim: a multiple of 8 up to 256 (computed as the next of 64, 96, 128, 256). q, k and v begin at
// multiples of 16 bytes, o at a multiple of 8. Any q_tokens and k_tokens below 2^31, 0 too.
// INVALID_ARGUMENT names the argument that is out of range; FAILED_PRECONDITION a device that the kernel does
// not run on; INTERNAL a launch that the driver refused.
absl::Status CudaAttentionBlock(const AttentionBlockArgs& args, DType dtype, const CudaDeviceTraits& device,
                                CUstream_st* stream,
                                CudaAttentionKernel kernel = CudaAttentionKernel::kFastest);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_ATTENTION_H_
