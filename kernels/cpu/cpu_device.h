// The CPU as a device: Highway and AVX-512 kernels, oneDNN for the linear layers.
#ifndef MESHFILL_KERNELS_CPU_CPU_DEVICE_H_
#define MESHFILL_KERNELS_CPU_CPU_DEVICE_H_

#include <memory>

#include "kernels/device.h"

namespace meshfill {

// `threads` ≥ 1 threads pack weights; `streams` ≥ 1 streams, as many as are to run at once, share them
// evenly: each has threads / streams of its own, at least one, the caller's included; what more streams have
// is made when they are. dtype: f32 or bf16. A weight serves every CPU device of its dtype. Where a
// Gemm's row depends on that row alone (rows_are_independent: AVX-512, in bf16 with AVX512_BF16), neither the
// number of threads nor the slicing of tokens changes a bit.
std::unique_ptr<Device> MakeCpuDevice(DType dtype, int threads, int streams = 1);

// What such a device of `dtype` holds packed weights in.
DType CpuWeightDType(DType dtype);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_CPU_DEVICE_H_
