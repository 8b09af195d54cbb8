// A linear layer's weight of elements in FP8 or MXFP4, which stay so in memory and are widened where they are
// multiplied: into scratch memory, a strip of columns at a time, in the layout that oneDNN's matmul reads
// fastest.
//
// The elements are in tiles of 64 output features, each [in_features, 64], so that a vector of them is
// contiguous whatever that layout. Behind them are the tile's scales, [blocks of in_features, 64], one for
// each column: in f32 of FP8, in E8M0 of MXFP4. Of MXFP4, a byte has the elements of columns j and j + 32,
// the first in its low half. Tiles are the panels in which such a weight is divided.
//
//        out →   tile 0   tile 1   …   last (filled up with zeros)
//     in   [       64   |   64    | … |          ]
//     ↓
//     scales       64       64
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

  // The same in parts (PackedForm of device.h): its tiles, those from `first` on alone, and a matrix of all.
  static PackedForm FormOf(int64_t in_features, int64_t out_features, const ElementKind& kind);
  static absl::StatusOr<BufferRef> PackTiles(std::span<const WeightRows> rows, int64_t in_features,
                                             int64_t first, int64_t tiles, ThreadPool& pool);
  // INTERNAL: as many bytes are not those of such a matrix.
  static absl::StatusOr<std::unique_ptr<NarrowMatrix>> OfTiles(int64_t in_features, int64_t out_features,
                                                               const ElementKind& kind, DType compute_dtype,
                                                               BufferRef tiles, std::vector<float> bias);

  std::span<const WideStrip> wide() const override { return {}; }

  // Writes the block's features of tile `tile` of the strip whose first column is `column`, a multiple of
  // kTileColumns, with what fills up its layout. `places` are the block's. Elements are rounded to the
  // compute dtype.
  void WidenTile(int64_t column, int64_t tile, const BlockPlaces& places, const WideBlock& to) const;

 private:
  // How a tile's bytes lie.
  struct TileForm {
    TileForm(int64_t in_features, const ElementKind& kind);
    DType dtype;
    int64_t block;          // input features that share a scale
    int64_t blocks;         // ⌈in_features / block⌉
    int64_t element_bytes;  // bytes of a tile's elements, which come before its scales
    int64_t bytes;          // bytes of elements and scales
    bool fp4() const { return dtype == DType::kF4E2M1; }
  };

  NarrowMatrix(int64_t out_features, int64_t in_features, const TileForm& form, DType compute_dtype,
               BufferRef tiles, std::vector<float> bias)
      : CpuWeight(out_features, in_features, std::move(bias)),
        form_(form),
        compute_dtype_(compute_dtype),
        tiles_(std::move(tiles)) {}
  static ElementKind KindOf(const WeightRows& rows);
  // Tile `tile` of the stacked rows.
  static absl::Status PackTile(std::span<const WeightRows> rows, int64_t in_features, const TileForm& form,
                               int64_t tile, std::vector<uint8_t>& staging, uint8_t* to);

  const TileForm form_;
  const DType compute_dtype_;
  const BufferRef tiles_;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_NARROW_MATRIX_H_
