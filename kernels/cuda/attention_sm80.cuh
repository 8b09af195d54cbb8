// sm80_{bf16,f16}_attention_block: one CTA computes one tile of queries (FlashAttention-2, §3). Each warp
// owns 16 or 32 of its rows; keys and values pass through one buffer each, so that the copy of V runs under Q
// Kᵀ, and the copy of the next K under softmax and P V. Every fragment is read by ldmatrix from swizzled
// tiles, without bank conflicts.
//
// Written against a Machine (ptx_sm80.cuh, or the tests' emulator); shared memory is named by its byte
// address.
#ifndef MESHFILL_KERNELS_CUDA_ATTENTION_SM80_CUH_
#define MESHFILL_KERNELS_CUDA_ATTENTION_SM80_CUH_

#include <cstdint>

#include "kernels/cuda/attention_softmax.cuh"
#include "kernels/cuda/attention_tiles.h"
#include "kernels/cuda/fragments.h"

namespace meshfill {

template <int kDim>
struct Sm80Config {
  static_assert(kDim % 32 == 0 && kDim <= 256);
  static constexpr uint32_t kWarps = 4;
  static constexpr uint32_t kThreads = 32 * kWarps;
  // O takes kDim / 2 registers for each 16 rows of a warp: 32 rows share each fragment of K and V while 128
  // registers hold them; head_dim 256 keeps 16, which also keeps it within the 99 KiB of shared memory
  // of 8.6, 8.9 and 12.0.
  static constexpr uint32_t kSlices = kDim <= 128 ? 2 : 1;  // slices of 16 rows in a warp
  static constexpr uint32_t kRows = 16 * kSlices * kWarps;
  static constexpr uint32_t kKeys = 64;
  static constexpr uint32_t kQBytes = TileBytes(kRows, kDim);
  static constexpr uint32_t kKvBytes = TileBytes(kKeys, kDim);
  static constexpr uint32_t kSharedBytes = kQBytes + 2 * kKvBytes;
  static_assert(kSharedBytes <= 99 * 1024);
};

template <class Machine, class T, int kDim>
class Sm80Attention {
 public:
  using Config = Sm80Config<kDim>;

  // `shared`: address of Config::kSharedBytes, a multiple of 128.
  static MESHFILL_DEVICE void Run(const AttentionParams& params, const QueryTiles<Config::kRows>& tiles,
                                  uint32_t shared) {
    const BlockShape& shape = params.shape;
    const uint32_t warp_row = Machine::Uniform(Machine::Thread() / 32 * (16 * kSlices));
    const uint32_t lane = Machine::Thread() % 32;
    const QueryTile tile = tiles.At(Machine::Block());
    const KeyTiles<kRows, kKeys> keys(shape, tile);
    const uint32_t q_shared = shared, k_shared = shared + Config::kQBytes,
                   v_shared = k_shared + Config::kKvBytes;
    const uint64_t kv_row = uint64_t{shape.KvHead(tile.head)} * shape.k_tokens;

    KeySlots visible[kSlices][2];
    RowPair rows[kSlices];
    float output[kSlices][kDim / 2] = {};
    MESHFILL_UNROLL
    for (int slice = 0; slice < kSlices; ++slice) {
      MESHFILL_UNROLL
      for (int row = 0; row < 2; ++row) {
        const uint32_t slot = tile.begin + warp_row + 16 * slice + AccumulatorRow(lane, 2 * row);
        visible[slice][row] = shape.VisibleKeysOrNone(slot);
      }
    }

    if (!keys.Empty()) {
      CopyRows<kRows>(q_shared, params.q, uint64_t{tile.head} * shape.q_tokens, tile.begin, shape.q_tokens,
                      shape.head_dim);
      CopyRows<kKeys>(k_shared, params.k, kv_row, (keys.end - 1) * kKeys, shape.k_tokens, shape.head_dim);
      Machine::CopyCommit();
    }
    for (uint32_t key_tile = keys.end; key_tile > keys.begin;) {
      --key_tile;
      const uint32_t first_key = key_tile * kKeys;
      Machine::CopyWait();
      Machine::SyncThreads();  // K is here for all; all are done with the V before
      CopyRows<kKeys>(v_shared, params.v, kv_row, first_key, shape.k_tokens, shape.head_dim);
      Machine::CopyCommit();
      float scores[kSlices][kKeys / 2] = {};
      MultiplyQK(q_shared, k_shared, warp_row, lane, scores);

      Machine::CopyWait();
      Machine::SyncThreads();  // V is here for all; all are done with this K
      if (key_tile > keys.begin) {
        CopyRows<kKeys>(k_shared, params.k, kv_row, first_key - kKeys, shape.k_tokens, shape.head_dim);
      }
      Machine::CopyCommit();
      const bool whole = keys.Whole(key_tile);
      uint32_t packed[kSlices][kKeys / 16][4];
      MESHFILL_UNROLL
      for (int slice = 0; slice < kSlices; ++slice) {
        if (!whole) MaskScores(scores[slice], first_key, lane, visible[slice]);
        float rescale[2];
        if (UpdateSoftmax<Machine>(scores[slice], params.scale_log2, rows[slice], rescale))
          RescaleRows(output[slice], rescale);
        PackProbabilities<Machine, T>(scores[slice], packed[slice]);
      }
      MultiplyPV(v_shared, lane, packed, output);
    }

    MESHFILL_UNROLL
    for (int slice = 0; slice < kSlices; ++slice) {
      StoreRows<Machine>(params, tile.head, tile.begin + warp_row + 16 * slice, lane, rows[slice],
                         output[slice]);
    }
  }

 private:
  static constexpr int kSlices = Config::kSlices;
  static constexpr uint32_t kRows = Config::kRows, kKeys = Config::kKeys;

  // Rows [begin, begin + kCount) of a head's [tokens, head_dim] into a tile; what lies outside is zero.
  template <uint32_t kCount>
  static MESHFILL_DEVICE void CopyRows(uint32_t shared, const void* tensor, uint64_t head_row, uint32_t begin,
                                       uint32_t tokens, uint32_t head_dim) {
    constexpr uint32_t kChunks = kDim / 8;
    static_assert(kCount * kChunks % Config::kThreads == 0);
    MESHFILL_UNROLL
    for (uint32_t i = Machine::Thread(); i < kCount * kChunks; i += Config::kThreads) {
      const uint32_t row = i / kChunks, chunk = i % kChunks;
      const bool inside = begin + row < tokens && chunk * 8 < head_dim;
      const uint64_t element = inside ? (head_row + begin + row) * head_dim + chunk * 8 : 0;
      Machine::Copy16(shared + ChunkOffset(kCount, row, chunk),
                      static_cast<const char*>(tensor) + 2 * element, inside);
    }
  }

  static MESHFILL_DEVICE void MultiplyQK(uint32_t q_shared, uint32_t k_shared, uint32_t warp_row,
                                         uint32_t lane, float (&scores)[kSlices][kKeys / 2]) {
    const MatrixChunk of_q = RowsFirst(lane), of_k = ColumnsFirst(lane);
    MESHFILL_UNROLL
    for (uint32_t step = 0; step < kDim / 16; ++step) {
      uint32_t q[kSlices][4];
      MESHFILL_UNROLL
      for (int slice = 0; slice < kSlices; ++slice) {
        const uint32_t row = warp_row + 16 * slice + of_q.row;
        Machine::LoadMatrices(q[slice], q_shared + ChunkOffset(kRows, row, 2 * step + of_q.chunk));
      }
      MESHFILL_UNROLL
      for (uint32_t keys = 0; keys < kKeys; keys += 16) {
        uint32_t k[4];
        Machine::LoadMatrices(k, k_shared + ChunkOffset(kKeys, keys + of_k.row, 2 * step + of_k.chunk));
        MESHFILL_UNROLL
        for (int slice = 0; slice < kSlices; ++slice) {
          float* at = &scores[slice][keys / 2];
          Machine::template Multiply<T>(at, q[slice], k[0], k[1]);
          Machine::template Multiply<T>(at + 4, q[slice], k[2], k[3]);
        }
      }
    }
  }

  static MESHFILL_DEVICE void MultiplyPV(uint32_t v_shared, uint32_t lane,
                                         const uint32_t (&packed)[kSlices][kKeys / 16][4],
                                         float (&output)[kSlices][kDim / 2]) {
    const MatrixChunk of_v = RowsFirst(lane);
    MESHFILL_UNROLL
    for (uint32_t step = 0; step < kKeys / 16; ++step) {
      MESHFILL_UNROLL
      for (uint32_t columns = 0; columns < kDim; columns += 16) {
        uint32_t v[4];
        Machine::LoadMatricesTransposed(
            v, v_shared + ChunkOffset(kKeys, 16 * step + of_v.row, columns / 8 + of_v.chunk));
        MESHFILL_UNROLL
        for (int slice = 0; slice < kSlices; ++slice) {
          float* at = &output[slice][columns / 2];
          Machine::template Multiply<T>(at, packed[slice][step], v[0], v[1]);
          Machine::template Multiply<T>(at + 4, packed[slice][step], v[2], v[3]);
        }
      }
    }
  }
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_ATTENTION_SM80_CUH_
