// A linear layer's weight in the layout that oneDNN's matmul reads fastest.
//
// The layout is that of Wᵀ, [in_features, out_features]. It is cut into panels of output features, the unit
// in which weights are packed and divided, and in which one token alone is multiplied:
//
//        out →  panel 0   panel 1   …   last (short)
//     in  [    512      |   512    | … |            ]
//     ↓
//
// Each panel's bytes are in one piece. On AVX-512 oneDNN's own blocked layout has them so, and all panels are
// one product. Elsewhere oneDNN wants rows as long as the matrix is wide; each panel is then a matrix of
// its own, which stays in the cache while one tile of tokens after the other is multiplied with it.
//
// AMX multiplies so fast that a panel has to be in the second-level cache, with its tokens and its sums: each
// is cut into blocks of up to 512 input features, matrices of their own, whose products are added in f32.
#ifndef MESHFILL_KERNELS_CPU_PACKED_MATRIX_H_
#define MESHFILL_KERNELS_CPU_PACKED_MATRIX_H_

#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kernels/cpu/thread_pool.h"
#include "kernels/cpu/wide_block.h"
#include "kernels/stream.h"

namespace meshfill {

inline constexpr int64_t kPanelFeatures = 512;  // a multiple of kGroupColumns

// The dtype in which this machine multiplies for a compute dtype: bf16 needs AVX-512 (oneDNN emulates the
// products where BF16 instructions are missing); below that, bf16 is widened to f32, which loses speed and
// nothing else.
DType MultiplyDType(DType compute_dtype);

// Some columns of a weight, with all their input features: blocks, first to last. Views.
using WideStrip = std::vector<WideBlock>;

// Whether a strip of so many input features has several blocks, whose products are added.
bool AddsBlocks(int64_t in_features, DType dtype);

// How a strip of this size lies in memory.
class StripForm {
 public:
  // `dtype` is that of the multiplication. Throws dnnl::error where the machine multiplies no such dtype.
  StripForm(int64_t in_features, int64_t columns, DType dtype);

  int64_t bytes() const { return bytes_; }
  WideStrip At(void* elements) const;  // the strip whose bytes begin there

 private:
  WideStrip blocks_;              // as if its bytes began at null
  std::vector<int64_t> offsets_;  // bytes before each block
  int64_t bytes_ = 0;
};

// How a whole matrix of this size lies in memory.
class MatrixForm {
 public:
  // Throws as StripForm does.
  MatrixForm(int64_t in_features, int64_t out_features, DType dtype);

  int64_t strips() const { return (out_features_ + strip_columns_ - 1) / strip_columns_; }
  PackedForm panels() const { return panels_; }
  WideStrip StripAt(int64_t strip, void* elements) const;  // of the matrix whose bytes begin there
  // A panel of that matrix: which columns of which strip.
  struct Panel {
    WideStrip strip;
    int64_t column, columns;
  };
  Panel PanelAt(int64_t panel, void* elements) const;

 private:
  // `one_product`: the form, where all columns are one product.
  MatrixForm(int64_t in_features, int64_t out_features, DType dtype,
             const std::optional<PackedForm>& one_product);

  const int64_t out_features_;
  const int64_t strip_columns_;         // columns of a product, a whole number of panels
  const StripForm strip_, last_strip_;  // each strip but the last, and that
  PackedForm panels_;
};

// A weight of this device, of either kind.
class CpuWeight : public PackedWeight {
 public:
  // Its strips (MatrixForm), first to last; none: its elements are narrow (narrow_matrix.h).
  virtual std::span<const WideStrip> wide() const = 0;
  bool has_bias() const { return !bias_.empty(); }
  float* bias(int64_t column) const { return const_cast<float*>(bias_.data()) + column; }

 protected:
  CpuWeight(int64_t out_features, int64_t in_features, std::vector<float> bias)
      : PackedWeight(out_features, in_features), bias_(std::move(bias)) {}

 private:
  std::vector<float> bias_;  // [out_features] or empty
};

int64_t RowsOf(std::span<const WeightRows> rows);
// The rows' biases; empty where none has one.
std::vector<float> StackBias(std::span<const WeightRows> rows);

// Immutable. All but the constructor may be called from any thread.
class PackedMatrix final : public CpuWeight {
 public:
  PackedMatrix(int64_t in_features, int64_t out_features, const MatrixForm& form, BufferRef elements,
               std::vector<float> bias);

  std::span<const WideStrip> wide() const override { return strips_; }

 private:
  const BufferRef elements_;
  std::vector<WideStrip> strips_;
};

// Threads that pack one weight after the other.
struct PackTeam {
  explicit PackTeam(int threads) : pool(threads) {}
  ThreadPool pool;
  BufferRef staging = nullptr;  // the rows that the threads are at
};

// Stacks the rows, none of them of FP8 or MXFP4, rounds them to `compute_dtype` and packs them, panel by
// panel on the team: no second copy of the whole matrix. At least one row and one input feature.
// RESOURCE_EXHAUSTED where memory is short.
absl::StatusOr<std::unique_ptr<PackedMatrix>> PackMatrix(std::span<const WeightRows> rows,
                                                         int64_t in_features, DType compute_dtype,
                                                         PackTeam& team);

// The bytes of such a matrix.
absl::StatusOr<PackedForm> PackedFormOf(int64_t in_features, int64_t out_features, DType compute_dtype);

// The bytes of panels [first, first + panels) alone. Errors: PackMatrix's.
absl::StatusOr<BufferRef> PackMatrixPanels(std::span<const WeightRows> rows, int64_t in_features,
                                           DType compute_dtype, int64_t first, int64_t panels,
                                           PackTeam& team);

// A matrix of all its bytes.
absl::StatusOr<std::unique_ptr<PackedMatrix>> MatrixOfPanels(int64_t in_features, int64_t out_features,
                                                             DType compute_dtype, BufferRef elements,
                                                             std::vector<float> bias);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_PACKED_MATRIX_H_
