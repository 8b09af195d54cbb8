// A linear layer's weight of elements in FP8 or MXFP4, which stay so in memory and are widened where they are
// multiplied: into scratch memory, a strip of columns at a time, in the layout that oneDNN's matmul reads
// fastest.
//
// The elements are in tiles of 64 output features, each [in_features, 64], so that a vector of them is
// contiguous whatever that layout; a tile's scales are [blocks of in_features, 64], one for each column. Of
// MXFP4, a byte has the elements of columns j and j + 32, the first in its low half.
//
//        out →  tile 0   tile 1   …   last (filled up with zeros)
//     in  [       64   |   64    | … |          ]
//     ↓
#ifndef MESHFILL_KERNELS_CPU_NARROW_MATRIX_H_
#define MESHFILL_KERNELS_CPU_NARROW_MATRIX_H_

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kernels/cpu/packed_matrix.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/stream.h"

namespace meshfill {

// Immutable. All but the constructor may be called from any thread.
class NarrowMatrix final : public CpuWeight {
 public:
  static constexpr int64_t kTileColumns = 64;

  static bool Holds(DType dtype) { return dtype == DType::kF8E4M3 || dtype == DType::kF4E2M1; }

  // Rows as device.h has them, all of FP8 or all of MXFP4. At least one row and one input feature.
  // RESOURCE_EXHAUSTED where memory is short.
  static absl::StatusOr<std::unique_ptr<NarrowMatrix>> Pack(std::span<const WeightRows> rows,
                                                            int64_t in_features, DType compute_dtype,
                                                            ThreadPool& pool);

  const WideMatrix* wide() const override { return nullptr; }

  // Where the elements of a wide matrix of some columns lie. Layouts in blocks keep the two apart: element
  // (in, out) is in[in] + out[out] elements from the first.
  struct Places {
    std::vector<int64_t> in;   // with those that fill up a block
    std::vector<int64_t> out;  // likewise
  };
  static Places PlacesIn(const WideMatrix& to);

  // Writes tile `tile` of the strip whose first column is `column`, a multiple of kTileColumns, with what
  // fills up its blocks. Elements are rounded to the compute dtype.
  void WidenTile(int64_t column, int64_t tile, const Places& places, const WideMatrix& to) const;

 private:
  NarrowMatrix(int64_t out_features, int64_t in_features, std::vector<float> bias, DType dtype,
               DType compute_dtype)
      : CpuWeight(out_features, in_features, std::move(bias)), dtype_(dtype), compute_dtype_(compute_dtype) {}
  bool fp4() const { return dtype_ == DType::kF4E2M1; }
  absl::Status PackTile(std::span<const WeightRows> rows, int64_t tile, std::vector<uint8_t>& staging);

  DType dtype_;
  DType compute_dtype_;
  int64_t block_ = 1;               // input features that share a scale
  int64_t blocks_ = 0;              // ⌈in_features / block_⌉
  BufferRef elements_;              // [tiles, in_features, kTileColumns]
  std::vector<float> scales_;       // of FP8: [tiles, blocks_, kTileColumns]
  std::vector<uint8_t> exponents_;  // of MXFP4, likewise
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_NARROW_MATRIX_H_
