// Linear layers on a CUDA device: cuBLASLt's matmul, bf16 in, f32 sums, the bias in its epilogue. Weights in
// FP8 and MXFP4 are widened to bf16 for each product.
//
// cuBLASLt thinks in columns: row-major y = x Wᵀ is its D = Aᵀ B with A = W, [in, out], and B = x, [in,
// tokens].
//
// Which algorithm multiplies a shape is decided once, when the shape is first met: the first few that its
// heuristic names are timed where the product is long and of a round length, else its first is taken. So all
// streams of a device multiply alike, and a process answers a request with the same bits however often it
// comes.
#ifndef MESHFILL_KERNELS_CUDA_GEMM_H_
#define MESHFILL_KERNELS_CUDA_GEMM_H_

#include <memory>
#include <span>

#include "kernels/cuda/cuda_lane.h"
#include "kernels/stream.h"

namespace meshfill {

// The products of one device. Thread-safe, but for the lanes: each is called with by one thread at a time.
class CudaGemm {
 public:
  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;  // what cuBLAS asks for on Hopper

  // A Gemm for the thread's current device. Making it takes long, and memory.
  static absl::StatusOr<std::unique_ptr<CudaGemm>> Make();
  virtual ~CudaGemm() = default;

  // Stream::Gemm, for a CudaWeight (cuda_weight.h): enqueued. Of its biases the one in y's dtype is added.
  virtual absl::Status Run(const GemmArgs& args, const CudaLane& lane) = 0;

  // One of Stream::ExpertMlp's products, likewise: by a kernel of ours (expert_gemm.cuh).
  virtual absl::Status RunExperts(const ExpertGemmArgs& args, const CudaLane& lane) = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_GEMM_H_
