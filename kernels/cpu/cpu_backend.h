// The CPU backend: Highway and AVX-512 kernels, oneDNN for the linear layers.
#ifndef MESHFILL_KERNELS_CPU_CPU_BACKEND_H_
#define MESHFILL_KERNELS_CPU_CPU_BACKEND_H_

#include <memory>

#include "kernels/backend.h"

namespace meshfill {

// `threads` ≥ 1 threads compute, the caller's included. dtype: f32 or bf16. Its buffers and weights may
// outlive it; a weight serves every CPU backend of its dtype, on several threads at once. On AVX-512 a Gemm's
// row depends on that row alone, so neither the number of threads nor the slicing of tokens changes a bit.
std::unique_ptr<Backend> MakeCpuBackend(DType dtype, int threads);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_CPU_BACKEND_H_
