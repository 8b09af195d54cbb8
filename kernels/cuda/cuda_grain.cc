#include "kernels/cuda/cuda_device.h"

namespace meshfill {

// In slices of 1024 tokens the first product of an 8B model's layer has 192 tiles of 256 × 128 for an H100's
// 132 multiprocessors, which is one wave and a half; in slices of 4096 it has 768, near six.
Grain CudaGrain() {
  return {
      .slice_tokens = 4096, .host_threads = 8, .probe_width = 4096, .probe_kv_heads = 8, .probe_flops = 2e12};
}

}  // namespace meshfill
