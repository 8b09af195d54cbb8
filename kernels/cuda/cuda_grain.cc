#include "kernels/cuda/cuda_device.h"
#include "kernels/gpu_defaults.h"

namespace meshfill {

Grain CudaGrain() {
  return {.slice_tokens = kGpuSliceTokens,
          .host_threads = 8,
          .probe_width = 4096,
          .probe_kv_heads = 8,
          .probe_flops = 2e12,
          .settle_seconds = 0.25};
}

}  // namespace meshfill
