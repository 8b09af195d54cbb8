// The CPU backend: Highway and AVX-512 kernels, oneDNN for the linear layers.
#ifndef MESHFILL_KERNELS_CPU_CPU_BACKEND_H_
#define MESHFILL_KERNELS_CPU_CPU_BACKEND_H_

#include <memory>

#include "kernels/backend.h"

namespace meshfill {

// `threads` ≥ 1 threads compute, the caller's included. dtype: f32 or bf16.
std::unique_ptr<Backend> MakeCpuBackend(DType dtype, int threads);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_CPU_BACKEND_H_
