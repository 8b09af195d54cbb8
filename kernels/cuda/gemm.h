// Linear layers on a CUDA device: cuBLASLt's matmul, bf16 in, f32 sums, the bias in its epilogue.
//
// cuBLASLt thinks in columns: row-major y = x Wᵀ is its D = Aᵀ B with A = W, [in, out], and B = x, [in,
// tokens].
//
// Which algorithm multiplies a shape is decided once for each device, when the shape is first met: the first
// few that its heuristic names are timed where the product is long and of a round length, else its first is
// taken. So all ranks on a device multiply alike, and a process answers a request with the same bits however
// often it comes.
#ifndef MESHFILL_KERNELS_CUDA_GEMM_H_
#define MESHFILL_KERNELS_CUDA_GEMM_H_

#include <memory>
#include <span>

#include "kernels/backend.h"
#include "kernels/cuda/stream.h"

namespace meshfill {

// Of one rank.
class CudaGemm {
 public:
  static absl::StatusOr<std::unique_ptr<CudaGemm>> Make(Backend& backend, std::shared_ptr<CudaStream> stream);
  virtual ~CudaGemm() = default;

  // Backend::PackWeight. bf16 as the file has it, rounded where it has another dtype; biases in f32 and in
  // bf16, of which the one in y's dtype is added.
  virtual absl::StatusOr<std::unique_ptr<PackedWeight>> Pack(std::span<const WeightRows> rows,
                                                             int64_t in_features) = 0;

  // Backend::Gemm, for weights that Pack made on this device: enqueued.
  virtual absl::Status Run(const GemmArgs& args) = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_GEMM_H_
