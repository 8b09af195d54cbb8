// Linear layers on the CPU: oneDNN's matmul, one thread a call, shared out over the rank's own team.
//
// Tokens are cut into tiles of one of a few sizes, so that a handful of compiled primitives serves every
// token count, and few tokens (the LM head's one) over the output features instead, where those lie in
// strips. On AVX-512, in bf16 with AVX512_BF16, every tile size sums a row's products in the same order: a
// row's bits then depend neither on its neighbours nor on the number of threads.
#ifndef MESHFILL_KERNELS_CPU_GEMM_H_
#define MESHFILL_KERNELS_CPU_GEMM_H_

#include <cstdint>
#include <memory>

#include "kernels/cpu/thread_pool.h"
#include "kernels/stream.h"

namespace meshfill {

// One team's, called by one thread at a time. Weights are shared with the instances of other teams of the
// same dtype.
class CpuGemm {
 public:
  // What weights in FP8 and MXFP4 are widened into at a time; a panel of a layer that is very wide may be
  // more.
  static constexpr int64_t kWidenedBytes = int64_t{32} << 20;

  CpuGemm(DType dtype, ThreadPool& pool);  // f32 or bf16; `pool` must outlive this
  ~CpuGemm();
  CpuGemm(const CpuGemm&) = delete;
  CpuGemm& operator=(const CpuGemm&) = delete;

  // Stream::Gemm, for weights of PackMatrix (packed_matrix.h). CANCELLED when `stop` (may be null) is raised;
  // looked at for each part of a tile's columns, where a pause begins, too.
  absl::Status Run(const GemmArgs& args, const StopToken* stop);
  // Stream::ExpertMlp, likewise: a tile of rows goes through both products before the next begins, so that
  // what lies between them stays in the cache.
  absl::Status RunExpertMlps(const ExpertMlpArgs& args, const StopToken* stop);
  // Whether that may be called: the weights are wide (packed_matrix.h), and a tile, of which each thread has
  // one, is small. Of Mixtral's experts, with 14,336 features, it is not.
  bool MayRunExpertMlps(const ExpertMlpArgs& args) const;
  // One of its products, of weights of any kind.
  absl::Status RunExperts(const ExpertGemmArgs& args, const StopToken* stop);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_GEMM_H_
