// The further primitives of compute capability 9.0 (compiled for sm_90a): what attention_sm90.cuh calls a
// Machine.
#ifndef MESHFILL_KERNELS_CUDA_PTX_SM90_CUH_
#define MESHFILL_KERNELS_CUDA_PTX_SM90_CUH_

#include <cuda.h>

#include "kernels/cuda/ptx_sm80.cuh"

namespace meshfill {

// Operands of asm: the first 8, 16, … accumulators from d[i] on.
#define MESHFILL_D8(i)                                                                                  \
  "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), "+f"(d[(i) + 5]), \
      "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define MESHFILL_D32(i) MESHFILL_D8(i), MESHFILL_D8((i) + 8), MESHFILL_D8((i) + 16), MESHFILL_D8((i) + 24)
#define MESHFILL_D40(i) MESHFILL_D32(i), MESHFILL_D8((i) + 32)
#define MESHFILL_D48(i) MESHFILL_D40(i), MESHFILL_D8((i) + 40)
#define MESHFILL_D64(i) MESHFILL_D32(i), MESHFILL_D32((i) + 32)

#define MESHFILL_NAMES_32                                                   \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define MESHFILL_NAMES_40                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39}"
#define MESHFILL_NAMES_48                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}"
#define MESHFILL_NAMES_64                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

struct PtxSm90 : PtxSm80 {
  using TensorMap = CUtensorMap;

  static MESHFILL_DEVICE uint32_t Blocks() { return gridDim.x; }
  template <int kRegisters>
  static MESHFILL_DEVICE void ReleaseRegisters() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
  template <int kRegisters>
  static MESHFILL_DEVICE void ClaimRegisters() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }

  // ---- mbarriers.
  static MESHFILL_DEVICE void BarrierInit(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
  }
  // Shows the initialised barriers to the copy engine.
  static MESHFILL_DEVICE void BarrierInitFence() {
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
  }
  static MESHFILL_DEVICE void BarrierArrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  }
  // Arrives, and lets the phase complete only when as many bytes have been copied.
  static MESHFILL_DEVICE void BarrierExpectBytes(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
  }
  // Returns once the phase of this parity has completed. The thread sleeps until then, for at most
  // kNanoseconds at a time: without that hint it asks every dozen cycles.
  static MESHFILL_DEVICE void BarrierWait(uint32_t barrier, uint32_t parity) {
    constexpr uint32_t kNanoseconds = 10'000'000;
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "wait_%=:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n\t"
        "@!done bra wait_%=;\n\t}" ::"r"(barrier),
        "r"(parity), "n"(kNanoseconds)
        : "memory");
  }

  // ---- TMA: one box of a map of [head, row, column], to shared memory.
  static MESHFILL_DEVICE void CopyBox(uint32_t shared, const CUtensorMap* map, uint32_t barrier,
                                      uint32_t column, uint32_t row, uint32_t head) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
        "%5}], [%2];" ::"r"(shared),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(column), "r"(row), "r"(head)
        : "memory");
  }

  // ---- wgmma: products of 64 rows, asynchronous. FenceProducts before the first of a batch, CommitProducts
  // behind its last; after WaitProducts<n> all but the last n batches are done, and Pin keeps the compiler
  // from reading their results earlier.
  static MESHFILL_DEVICE void FenceProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
  static MESHFILL_DEVICE void CommitProducts() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  template <int kInFlight>
  static MESHFILL_DEVICE void WaitProducts() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
  }
  template <int kElements>
  static MESHFILL_DEVICE void Pin(float (&values)[kElements]) {
    MESHFILL_UNROLL
    for (int i = 0; i < kElements; ++i) asm volatile("" : "+f"(values[i])::"memory");
  }

  // d = A · Bᵀ, or d += A · Bᵀ: A is 64 rows × 16, B kColumns rows × 16, both stored row by row.
  template <class T, int kColumns>
  static MESHFILL_DEVICE void MultiplyShared(float* d, uint64_t a, uint64_t b, bool accumulate) {
    if constexpr (kColumns == 80 && kBf16<T> == true) {
      asm volatile(
          "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %42, 0;\n\t"
          "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 " MESHFILL_NAMES_40
          ", %40, %41, add, 1, 1, 0, 0;\n\t}"
          : MESHFILL_D40(0)
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
    } else if constexpr (kColumns == 80 && kBf16<T> == false) {
      asm volatile(
          "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %42, 0;\n\t"
          "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 " MESHFILL_NAMES_40
          ", %40, %41, add, 1, 1, 0, 0;\n\t}"
          : MESHFILL_D40(0)
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
    } else if constexpr (kColumns == 96 && kBf16<T> == true) {
      asm volatile(
          "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %50, 0;\n\t"
          "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 " MESHFILL_NAMES_48
          ", %48, %49, add, 1, 1, 0, 0;\n\t}"
          : MESHFILL_D48(0)
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
    } else if constexpr (kColumns == 96 && kBf16<T> == false) {
      asm volatile(
          "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %50, 0;\n\t"
          "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 " MESHFILL_NAMES_48
          ", %48, %49, add, 1, 1, 0, 0;\n\t}"
          : MESHFILL_D48(0)
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
    } else if constexpr (kColumns == 128 && kBf16<T> == true) {
      asm volatile(
          "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %66, 0;\n\t"
          "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " MESHFILL_NAMES_64
          ", %64, %65, add, 1, 1, 0, 0;\n\t}"
          : MESHFILL_D64(0)
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
    } else if constexpr (kColumns == 128 && kBf16<T> == false) {
      asm volatile(
          "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %66, 0;\n\t"
          "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " MESHFILL_NAMES_64
          ", %64, %65, add, 1, 1, 0, 0;\n\t}"
          : MESHFILL_D64(0)
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
    } else {
      static_assert(kColumns == 0, "no such product");
    }
  }
  // d = A · Bᵀ, or d += A · Bᵀ: A is the warp's 16 rows × 16 in registers, B kColumns rows × 16, stored row
  // by row.
  template <class T, int kColumns>
  static MESHFILL_DEVICE void MultiplyRegistersTransposed(float* d, const uint32_t (&a)[4], uint64_t b,
                                                          bool accumulate) {
    if constexpr (kColumns == 128 && kBf16<T> == true) {
      asm volatile(
          "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %69, 0;\n\t"
          "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " MESHFILL_NAMES_64
          ", {%64, %65, %66, %67}, %68, add, 1, 1, 0;\n\t}"
          : MESHFILL_D64(0)
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
    } else if constexpr (kColumns == 128 && kBf16<T> == false) {
      asm volatile(
          "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %69, 0;\n\t"
          "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " MESHFILL_NAMES_64
          ", {%64, %65, %66, %67}, %68, add, 1, 1, 0;\n\t}"
          : MESHFILL_D64(0)
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
    } else {
      static_assert(kColumns == 0, "no such product");
    }
  }
  // d += A · B: A is the warp's 16 rows × 16 in registers, B 16 rows × kColumns, stored row by row.
  template <class T, int kColumns>
  static MESHFILL_DEVICE void MultiplyRegisters(float* d, const uint32_t (&a)[4], uint64_t b) {
    if constexpr (kColumns == 64 && kBf16<T> == true) {
      asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " MESHFILL_NAMES_32
                   ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                   : MESHFILL_D32(0)
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else if constexpr (kColumns == 64 && kBf16<T> == false) {
      asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " MESHFILL_NAMES_32
                   ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                   : MESHFILL_D32(0)
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else if constexpr (kColumns == 96 && kBf16<T> == true) {
      asm volatile("wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 " MESHFILL_NAMES_48
                   ", {%48, %49, %50, %51}, %52, 1, 1, 1, 1;"
                   : MESHFILL_D48(0)
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else if constexpr (kColumns == 96 && kBf16<T> == false) {
      asm volatile("wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 " MESHFILL_NAMES_48
                   ", {%48, %49, %50, %51}, %52, 1, 1, 1, 1;"
                   : MESHFILL_D48(0)
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else if constexpr (kColumns == 128 && kBf16<T> == true) {
      asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " MESHFILL_NAMES_64
                   ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                   : MESHFILL_D64(0)
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else if constexpr (kColumns == 128 && kBf16<T> == false) {
      asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " MESHFILL_NAMES_64
                   ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                   : MESHFILL_D64(0)
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else {
      static_assert(kColumns == 0, "no such product");
    }
  }

 private:
  template <class T>
  static constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
};

#undef MESHFILL_D8
#undef MESHFILL_D32
#undef MESHFILL_D40
#undef MESHFILL_D48
#undef MESHFILL_D64
#undef MESHFILL_NAMES_32
#undef MESHFILL_NAMES_40
#undef MESHFILL_NAMES_48
#undef MESHFILL_NAMES_64

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_PTX_SM90_CUH_
