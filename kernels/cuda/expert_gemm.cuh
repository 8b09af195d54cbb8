// sm80_bf16_expert_gemm: the products of all experts in one launch (Stream::ExpertGemm). A CTA computes a
// tile of one expert's rows and columns; which, it finds in `begin`, where the router left it on the device:
// the host never waits for the router, and no expert waits for another.
//
//     expert       0           2     3
//     rows         0 … 199     … 210 … 511       tiles of 128: two, one, three; the last of each is ragged
//
// Rows of x are read where they are, through the row's token: nothing is gathered before. Tiles of x and W
// come through a ring of stages, kStages − 1 of them ahead; every fragment is read by ldmatrix from swizzled
// tiles, without bank conflicts.
//
// Written against a Machine (ptx_sm80.cuh with what expert_ops.cu adds, or the tests' emulator).
#ifndef MESHFILL_KERNELS_CUDA_EXPERT_GEMM_CUH_
#define MESHFILL_KERNELS_CUDA_EXPERT_GEMM_CUH_

#include <cstdint>

#include "kernels/cuda/fragments.h"
#include "kernels/cuda/layer_kernels.cuh"
#include "kernels/dtype.h"

namespace meshfill {

struct ExpertMatrix {
  const BFloat16* matrix;  // [out_features, in_features]
  const float* bias;       // [out_features] or null
};

// One launch, as it is copied to the device.
struct ExpertProducts {
  const ExpertMatrix* experts;  // [count], on the device
  int count;
  int64_t in_features;
  int64_t out_features;
  const int32_t* begin;  // [count + 1]
  const int32_t* token;  // [rows]: the row of x that each row reads; null: its own
  const BFloat16* x;
  BFloat16* y;  // [rows, out_features]
};

struct ExpertGemmConfig {
  static constexpr uint32_t kThreads = 256;
  static constexpr uint32_t kRows = 128;            // rows of a tile
  static constexpr uint32_t kColumns = 128;         // output features of a tile
  static constexpr uint32_t kDepth = kSlabColumns;  // input features of a stage
  // A warp has 64 × 32 of the tile: 64 registers of sums, so that two CTAs share a multiprocessor of 9.0.
  static constexpr uint32_t kWarpRows = 64, kWarpColumns = 32;
  static_assert(kRows / kWarpRows * (kColumns / kWarpColumns) == kThreads / 32);
  // Three stages keep two CTAs within the 227 KiB of 9.0, and one within the 99 KiB of 8.6, 8.9 and 12.0.
  static constexpr uint32_t kStages = 3;
  static constexpr uint32_t kXBytes = TileBytes(kRows, kDepth), kWeightBytes = TileBytes(kColumns, kDepth);
  static constexpr uint32_t kStageBytes = kXBytes + kWeightBytes;
  static constexpr uint32_t kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes <= 99 * 1024);

  static constexpr int64_t ColumnTiles(int64_t out_features) {
    return (out_features + kColumns - 1) / kColumns;
  }
  // A bound on the row tiles: a ragged one for each expert that has rows. CTAs without a tile end at once.
  static constexpr int64_t MostRowTiles(int64_t rows, int experts) {
    return rows / kRows + (rows < experts ? rows : experts);
  }
};

// kVectors: x and the matrices begin at multiples of 16 bytes, and in_features is a multiple of 8.
template <class Machine, class T, bool kVectors>
class Sm80ExpertGemm {
 public:
  using Config = ExpertGemmConfig;

  // `shared`: address of Config::kSharedBytes, a multiple of 128.
  static MESHFILL_DEVICE void Run(const ExpertProducts& products, uint32_t shared) {
    const Tile tile = TileAt(products, Machine::Block());
    if (tile.expert < 0) return;
    const ExpertMatrix expert = products.experts[tile.expert];
    const Sources sources(products, expert, tile);
    const auto steps = static_cast<uint32_t>((products.in_features + kDepth - 1) / kDepth);
    const uint32_t warp = Machine::Uniform(Machine::Thread() / 32), lane = Machine::Thread() % 32;
    constexpr uint32_t kWarpsAcross = kColumns / Config::kWarpColumns;
    const uint32_t row = warp / kWarpsAcross * Config::kWarpRows;
    const uint32_t column = warp % kWarpsAcross * Config::kWarpColumns;

    float sums[kSlices][kGroups * 4] = {};
    for (uint32_t step = 0; step < kStages - 1; ++step) {
      if (step < steps) sources.Copy(step, shared + step * Config::kStageBytes);
      Machine::CopyCommit();
    }
    for (uint32_t step = 0; step < steps; ++step) {
      Machine::template CopyWaitBut<kStages - 2>();
      Machine::SyncThreads();  // this stage is here for all; all are done with the one before
      const uint32_t next = step + kStages - 1;
      if (next < steps) sources.Copy(next, shared + next % kStages * Config::kStageBytes);
      Machine::CopyCommit();
      Multiply(shared + step % kStages * Config::kStageBytes, row, column, lane, sums);
    }
    Store(products, expert, tile, row, column, lane, sums);
  }

 private:
  static constexpr uint32_t kRows = Config::kRows, kColumns = Config::kColumns, kDepth = Config::kDepth,
                            kStages = Config::kStages;
  static constexpr uint32_t kSlices = Config::kWarpRows / 16,
                            kGroups = Config::kWarpColumns / 8;  // 16 × 8 tiles of a warp
  static constexpr uint32_t kChunks = kDepth / 8;                // chunks of 16 bytes in a row of a stage

  struct Tile {
    int expert;     // -1: there is no such tile
    int32_t begin;  // the tile's first row
    int32_t end;    // end of the expert's rows; may lie beyond the tile
    int64_t column;
  };

  // Column tiles of the same rows are neighbours, so that the rows, and the expert's matrix, are read from
  // memory once. Every warp searches for itself, 32 experts at a time.
  static MESHFILL_DEVICE Tile TileAt(const ExpertProducts& products, uint32_t block) {
    const auto column_tiles = static_cast<uint32_t>(Config::ColumnTiles(products.out_features));
    const uint32_t row_tile = block / column_tiles, lane = Machine::Thread() % 32;
    uint32_t before = 0;
    for (int first = 0; first < products.count; first += 32) {
      const int expert = first + static_cast<int>(lane);
      const bool exists = expert < products.count;
      const int32_t begin = exists ? products.begin[expert] : 0,
                    end = exists ? products.begin[expert + 1] : 0;
      const uint32_t tiles = (static_cast<uint32_t>(end - begin) + kRows - 1) / kRows;
      uint32_t last = tiles;  // behind the last of this lane's
      for (uint32_t distance = 1; distance < 32; distance *= 2) {
        const uint32_t lower = Machine::Shuffle(last, lane < distance ? lane : lane - distance);
        if (lane >= distance) last += lower;
      }
      last += before;
      const uint32_t passed = Machine::PopCount(Machine::Ballot(last <= row_tile));
      if (passed < 32) {
        const uint32_t tile = row_tile - Machine::Shuffle(last - tiles, passed);
        return {.expert = first + static_cast<int>(passed),
                .begin = Machine::Shuffle(begin, passed) + static_cast<int32_t>(tile * kRows),
                .end = Machine::Shuffle(end, passed),
                .column = int64_t{block % column_tiles} * kColumns};
      }
      before = Machine::Shuffle(last, 31);
    }
    return {.expert = -1, .begin = 0, .end = 0, .column = 0};
  }

  // Where this thread's chunks of every stage come from: one chunk of each kRowStride-th row.
  class Sources {
   public:
    MESHFILL_DEVICE Sources(const ExpertProducts& products, const ExpertMatrix& expert, const Tile& tile)
        : in_features_(products.in_features),
          row_(Machine::Thread() / kChunks),
          chunk_(Machine::Thread() % kChunks) {
      MESHFILL_UNROLL
      for (uint32_t i = 0; i < kEach; ++i) {
        const int32_t row = tile.begin + static_cast<int32_t>(row_ + i * kRowStride);
        const int64_t column = tile.column + row_ + i * kRowStride;
        x_[i] = products.x, weight_[i] = expert.matrix;
        x_inside_[i] = row < tile.end, weight_inside_[i] = column < products.out_features;
        if (x_inside_[i]) x_[i] += (products.token == nullptr ? row : products.token[row]) * in_features_;
        if (weight_inside_[i]) weight_[i] += column * in_features_;
      }
    }

    // What lies outside is zero.
    MESHFILL_DEVICE void Copy(uint32_t step, uint32_t stage) const {
      const int64_t feature = int64_t{step} * kDepth + chunk_ * 8;
      MESHFILL_UNROLL
      for (uint32_t i = 0; i < kEach; ++i) {
        const uint32_t row = row_ + i * kRowStride;
        CopyChunk(stage + ChunkOffset(kRows, row, chunk_), x_[i], x_inside_[i], feature);
        CopyChunk(stage + Config::kXBytes + ChunkOffset(kColumns, row, chunk_), weight_[i], weight_inside_[i],
                  feature);
      }
    }

   private:
    static constexpr uint32_t kRowStride = Config::kThreads / kChunks, kEach = kRows / kRowStride;
    static_assert(kRows == kColumns && kRows % kRowStride == 0);

    MESHFILL_DEVICE void CopyChunk(uint32_t to, const BFloat16* row, bool row_inside, int64_t feature) const {
      if constexpr (kVectors) {
        const bool inside = row_inside && feature < in_features_;
        Machine::Copy16(to, inside ? row + feature : row, inside);
      } else {
        const auto element = [&](int64_t i) {
          return row_inside && i < in_features_ ? uint32_t{row[i].bits} : 0;
        };
        uint32_t words[4];
        MESHFILL_UNROLL
        for (int word = 0; word < 4; ++word) {
          words[word] = element(feature + 2 * word) | element(feature + 2 * word + 1) << 16;
        }
        Machine::Store16(to, words);
      }
    }

    const int64_t in_features_;
    const uint32_t row_, chunk_;
    const BFloat16* x_[kEach];  // rows of the tile
    const BFloat16* weight_[kEach];
    bool x_inside_[kEach], weight_inside_[kEach];
  };

  static MESHFILL_DEVICE void Multiply(uint32_t stage, uint32_t row, uint32_t column, uint32_t lane,
                                       float (&sums)[kSlices][kGroups * 4]) {
    const MatrixChunk of_x = RowsFirst(lane), of_weight = ColumnsFirst(lane);
    const uint32_t weight_shared = stage + Config::kXBytes;
    MESHFILL_UNROLL
    for (uint32_t step = 0; step < kDepth / 16; ++step) {
      uint32_t x[kSlices][4];
      MESHFILL_UNROLL
      for (uint32_t slice = 0; slice < kSlices; ++slice) {
        Machine::LoadMatrices(x[slice],
                              stage + ChunkOffset(kRows, row + 16 * slice + of_x.row, 2 * step + of_x.chunk));
      }
      MESHFILL_UNROLL
      for (uint32_t pair = 0; pair < kGroups / 2; ++pair) {  // 16 columns
        uint32_t weight[4];
        Machine::LoadMatrices(weight,
                              weight_shared + ChunkOffset(kColumns, column + 16 * pair + of_weight.row,
                                                          2 * step + of_weight.chunk));
        MESHFILL_UNROLL
        for (uint32_t slice = 0; slice < kSlices; ++slice) {
          float* const at = &sums[slice][8 * pair];
          Machine::template Multiply<T>(at, x[slice], weight[0], weight[1]);
          Machine::template Multiply<T>(at + 4, x[slice], weight[2], weight[3]);
        }
      }
    }
  }

  static MESHFILL_DEVICE void Store(const ExpertProducts& products, const ExpertMatrix& expert,
                                    const Tile& tile, uint32_t warp_row, uint32_t warp_column, uint32_t lane,
                                    const float (&sums)[kSlices][kGroups * 4]) {
    const int64_t out_features = products.out_features;
    const bool pairs = out_features % 2 == 0;
    MESHFILL_UNROLL
    for (uint32_t group = 0; group < kGroups; ++group) {
      const int64_t column = tile.column + warp_column + AccumulatorColumn(lane, 4 * group);
      float bias[2] = {0, 0};
      for (int side = 0; side < 2 && expert.bias != nullptr; ++side) {
        if (column + side < out_features) bias[side] = expert.bias[column + side];
      }
      MESHFILL_UNROLL
      for (uint32_t i = 0; i < 2 * kSlices; ++i) {  // rows of 16, and their halves
        const uint32_t slice = i / 2, element = 4 * group + 2 * (i % 2);
        const int32_t row =
            tile.begin + static_cast<int32_t>(warp_row + 16 * slice + AccumulatorRow(lane, element));
        if (row >= tile.end || column >= out_features) continue;
        const float values[2] = {sums[slice][element] + bias[0], sums[slice][element + 1] + bias[1]};
        BFloat16* const y = products.y + row * out_features + column;
        if (pairs) {
          StoreVector(values, y);
        } else {
          FromFloat(values[0], y[0]);
          if (column + 1 < out_features) FromFloat(values[1], y[1]);
        }
      }
    }
  }
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_EXPERT_GEMM_CUH_
