// oneDNN as this folder uses it: one engine, one thread a call, exceptions turned into statuses at the seam.
#ifndef MESHFILL_KERNELS_CPU_ONEDNN_H_
#define MESHFILL_KERNELS_CPU_ONEDNN_H_

#include <omp.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/dtype.h"
#include "oneapi/dnnl/dnnl.hpp"

namespace meshfill {

// The process's; engines are immutable and safe to share.
inline const dnnl::engine& CpuEngine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

// oneDNN sizes its own OpenMP team by this setting of the calling thread; our team is the ThreadPool. Before
// every use of oneDNN, on the thread that uses it.
inline void KeepOneDnnSingleThreaded() { omp_set_num_threads(1); }

// Whether oneDNN sums a row's products in one order, however many rows there are: with AVX-512, of bf16 where
// that has its own instructions. DNNL_MAX_CPU_ISA may forbid them.
inline bool OneDnnSumsRowsAlike(DType dtype) {
  const int needs = dtype == DType::kF32 ? dnnl_cpu_isa_avx512_core : dnnl_cpu_isa_avx512_core_bf16;
  static const int has = static_cast<int>(dnnl::get_effective_cpu_isa());
  return (has & needs) == needs;  // a bit for each extension
}

// Whether oneDNN multiplies bf16 in AMX's tiles here: the machine has them, and DNNL_MAX_CPU_ISA allows them.
inline bool OneDnnUsesTiles() {
  static const bool uses = dnnl::get_effective_cpu_isa() == dnnl::cpu_isa::avx512_core_amx;
  return uses;
}

// f32 or bf16.
inline dnnl::memory::data_type OneDnnType(DType dtype) {
  return dtype == DType::kF32 ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;
}

inline dnnl::memory::desc RowMajor(int64_t rows, int64_t columns, DType dtype) {
  return dnnl::memory::desc({rows, columns}, OneDnnType(dtype), dnnl::memory::dims{columns, 1});
}

// `what` was being done when `error` was thrown.
inline absl::Status OneDnnError(const char* what, const dnnl::error& error) {
  const std::string message = absl::StrCat("oneDNN: ", what, ": ", error.what());
  return error.status == dnnl_out_of_memory ? absl::ResourceExhaustedError(message)
                                            : absl::InternalError(message);
}

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_ONEDNN_H_
