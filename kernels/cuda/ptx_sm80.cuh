// The primitives of compute capability 8.0 as PTX: what attention_sm80.cuh calls a Machine. Shared memory is
// named by its address in the shared window.
#ifndef MESHFILL_KERNELS_CUDA_PTX_SM80_CUH_
#define MESHFILL_KERNELS_CUDA_PTX_SM80_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/fragments.h"

namespace meshfill {

struct PtxSm80 {
  static MESHFILL_DEVICE uint32_t Thread() { return threadIdx.x; }
  static MESHFILL_DEVICE uint32_t Block() { return blockIdx.x; }
  // A value that is one for the whole warp: the compiler, told so, keeps what follows from it in uniform
  // registers.
  static MESHFILL_DEVICE uint32_t Uniform(uint32_t value) { return __shfl_sync(0xffffffffu, value, 0); }
  static MESHFILL_DEVICE void SyncThreads() { __syncthreads(); }
  static MESHFILL_DEVICE float ShuffleXor(float value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
  }

  // Whether it holds for a thread of the warp.
  static MESHFILL_DEVICE bool Any(bool holds) { return __any_sync(0xffffffffu, holds); }
  static MESHFILL_DEVICE float Shuffle(float value, uint32_t lane) {
    return __shfl_sync(0xffffffffu, value, static_cast<int>(lane));
  }

  static MESHFILL_DEVICE float Exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  // Two values rounded to nearest even, the first in the lower half.
  template <class T>
  static MESHFILL_DEVICE uint32_t Pack(float first, float second) {
    uint32_t packed;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    }
    return packed;
  }
  static MESHFILL_DEVICE void LoadPair(float* pair, const float* from) {
    const float2 loaded = *reinterpret_cast<const float2*>(from);
    pair[0] = loaded.x, pair[1] = loaded.y;
  }
  static MESHFILL_DEVICE void Prefetch(const float* from) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(from)));
  }
  static MESHFILL_DEVICE void StorePair(float* to, float first, float second) {
    *reinterpret_cast<float2*>(to) = make_float2(first, second);
  }

  // 16 bytes from global to shared memory, or zeros.
  static MESHFILL_DEVICE void Copy16(uint32_t shared, const void* global, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared),
                 "l"(__cvta_generic_to_global(global)), "r"(inside ? 16 : 0)
                 : "memory");
  }
  static MESHFILL_DEVICE void CopyCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  static MESHFILL_DEVICE void CopyWait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

  // Four 8 × 8 matrices of 16-bit elements; `shared` is this thread's row (fragments.h).
  static MESHFILL_DEVICE void LoadMatrices(uint32_t (&m)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared)
                 : "memory");
  }
  static MESHFILL_DEVICE void LoadMatricesTransposed(uint32_t (&m)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared)
                 : "memory");
  }
  // d[0 … 3] += A (16 × 16) · B (16 × 8).
  template <class T>
  static MESHFILL_DEVICE void Multiply(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
  }
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_PTX_SM80_CUH_
