// sm90_{bf16,f16}_attention_block: persistent CTAs, warp-specialised (FlashAttention-3, §3.1 and §3.2). One
// thread of the producer warpgroup copies tiles by TMA into rings of K and V; each consumer warpgroup owns 64
// rows of the query tile and multiplies by wgmma. Two things run while the tensor cores multiply: a
// warpgroup's own softmax (of key tile j, under P V of tile j+1), and that of its neighbours, which nothing
// keeps in step with it. (FlashAttention-3 lets warpgroups issue their products in turn. On an H200 that
// costs up to 4 % here: docs/tuning.md.)
//
//     producer     Q  K₃ | K₂ V₃ | K₁ V₂ | K₀ V₁ | V₀  next tile's Q …
//     consumer     QK₃ S₃ | QK₂ PV₃ S₂ | QK₁ PV₂ S₁ | QK₀ PV₁ S₀ | PV₀  store
//
// Written against a Machine (ptx_sm90.cuh, or the tests' emulator); shared memory is named by its byte
// address.
#ifndef MESHFILL_KERNELS_CUDA_ATTENTION_SM90_CUH_
#define MESHFILL_KERNELS_CUDA_ATTENTION_SM90_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/attention_softmax.cuh"
#include "kernels/cuda/attention_tiles.h"
#include "kernels/cuda/fragments.h"

namespace meshfill {

template <int kDim>
struct Sm90Config {
  static_assert(kDim == 64 || kDim == 96 || kDim == 128 || kDim == 256);
  // A consumer thread holds O (kDim / 2 registers), scores (kKeys / 2) and probabilities (kKeys / 4), and Q
  // (kDim / 4) where there is room. Three consumers have 160 registers each, two have 240.
  static constexpr uint32_t kConsumers = kDim <= 96 ? 3 : 2;
  static constexpr uint32_t kKeys = kDim == 256 ? 80 : kDim == 96 ? 96 : 128;
  // Then a product reads kKeys rows of K from shared memory, and not 64 of Q as well: a third less.
  static constexpr bool kQueriesInRegisters = kDim == 128;
  static constexpr uint32_t kStages = 2;
  static constexpr uint32_t kRows = 64 * kConsumers;
  static constexpr uint32_t kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static_assert(128 * (kProducerRegisters + kConsumers * kConsumerRegisters) <= 65536);
  static_assert(kDim / 2 + kKeys / 2 + kKeys / 4 + (kQueriesInRegisters ? kDim / 4 : 0) <=
                kConsumerRegisters - 28);
  // P V takes whole slabs of V. (96 columns in two slabs of 64 would also be copied with 32 of zeros.)
  static constexpr uint32_t kColumnsOfSlab = kDim % kSlabColumns == 0 ? kSlabColumns : kSlabColumns / 2;
  static_assert(kDim % kColumnsOfSlab == 0);
  static_assert(!kQueriesInRegisters || kColumnsOfSlab == kSlabColumns);  // which ChunkOffset describes
  static constexpr uint32_t kQSlabBytes = SlabBytes(kRows, kColumnsOfSlab);
  static constexpr uint32_t kKvSlabBytes = SlabBytes(kKeys, kColumnsOfSlab);
  static constexpr uint32_t kQBytes = TileBytes(kRows, kDim, kColumnsOfSlab);
  static constexpr uint32_t kKvBytes = TileBytes(kKeys, kDim, kColumnsOfSlab);
  static_assert(kQSlabBytes % kSwizzleBytes == 0 && kKvSlabBytes % kSwizzleBytes == 0);

  static constexpr uint32_t kK = kQBytes;  // offsets in shared memory
  static constexpr uint32_t kV = kK + kStages * kKvBytes;
  static constexpr uint32_t kBarriers = kV + kStages * kKvBytes;
  static constexpr uint32_t kSharedBytes = kBarriers + 8 * (2 + 4 * kStages);
  static_assert(kSharedBytes + kSwizzleBytes <= 227 * 1024);  // a launch adds what aligns it
};

template <class Machine, class T, int kDim>
class Sm90Attention {
 public:
  using Config = Sm90Config<kDim>;
  using TensorMap = typename Machine::TensorMap;

  // Maps of [head, token, column] with boxes of one slab: kRows queries, or kKeys keys; swizzled, zeros
  // outside.
  struct Maps {
    const TensorMap* q;
    const TensorMap* k;
    const TensorMap* v;
  };

  // `shared`: address of Config::kSharedBytes, a multiple of kSwizzleBytes.
  static MESHFILL_DEVICE void Run(const AttentionParams& params, const QueryTiles<Config::kRows>& tiles,
                                  const Maps& maps, uint32_t shared) {
    if (Machine::Thread() == 0) {
      for (uint32_t barrier = 0; barrier < 2 + 4 * kStages; ++barrier) {
        Machine::BarrierInit(shared + Config::kBarriers + 8 * barrier, barrier % 2 == 0 ? 1 : kEmptyArrivals);
      }
      Machine::BarrierInitFence();
    }
    Machine::SyncThreads();
    if (Machine::Thread() < 128) {
      Machine::template ReleaseRegisters<Config::kProducerRegisters>();
      if (Machine::Thread() == 0) Produce(params, tiles, maps, shared);
    } else {
      Machine::template ClaimRegisters<Config::kConsumerRegisters>();
      Consume(params, tiles, shared);
    }
  }

 private:
  static constexpr uint32_t kConsumers = Config::kConsumers, kRows = Config::kRows, kKeys = Config::kKeys;
  static constexpr uint32_t kStages = Config::kStages, kColumnsOfSlab = Config::kColumnsOfSlab;
  static constexpr bool kQueriesInRegisters = Config::kQueriesInRegisters;
  static constexpr uint32_t kEmptyArrivals = 4 * kConsumers;  // one for each consumer warp
  // A product takes at most 128 columns of V: A from registers, and as many accumulators.
  static constexpr uint32_t kColumns = kDim < 128 ? kDim : 128;

  enum class Buffer : uint32_t { kQ = 0, kK = 1, kV = 1 + kStages };

  // A stage's mbarriers: `full` (even numbers) completes when the copy's bytes are there, `empty` (odd ones)
  // when all consumer warps are done. The n-th use of a buffer waits for the n-th full and the (n − 1)-th
  // empty phase.
  struct Stage {
    uint32_t full;
    uint32_t empty;
    uint32_t index;
    uint32_t parity;
  };
  template <Buffer kBuffer>
  static MESHFILL_DEVICE Stage StageOf(uint32_t shared, uint32_t use) {
    constexpr uint32_t kCount = kBuffer == Buffer::kQ ? 1 : kStages;
    const uint32_t index = use % kCount;
    const uint32_t full = shared + Config::kBarriers + 16 * (static_cast<uint32_t>(kBuffer) + index);
    return {full, full + 8, index, use / kCount % 2};
  }
  static MESHFILL_DEVICE void Release(const Stage& stage, uint32_t lane) {
    if (lane == 0) Machine::BarrierArrive(stage.empty);
  }

  // ---- Producer: one thread.
  template <Buffer kBuffer, uint32_t kCount>
  static MESHFILL_DEVICE void CopyTile(const TensorMap* map, uint32_t shared, uint32_t tile, uint32_t use,
                                       uint32_t row, uint32_t head) {
    constexpr uint32_t kBytes = TileBytes(kCount, kDim, kColumnsOfSlab);
    const Stage stage = StageOf<kBuffer>(shared, use);
    Machine::BarrierWait(stage.empty, stage.parity ^ 1);
    Machine::BarrierExpectBytes(stage.full, kBytes);
    MESHFILL_UNROLL
    for (uint32_t slab = 0; slab < Slabs(kDim, kColumnsOfSlab); ++slab) {
      Machine::CopyBox(tile + stage.index * kBytes + slab * SlabBytes(kCount, kColumnsOfSlab), map,
                       stage.full, slab * kColumnsOfSlab, row, head);
    }
  }

  static MESHFILL_DEVICE void Produce(const AttentionParams& params, const QueryTiles<kRows>& tiles,
                                      const Maps& maps, uint32_t shared) {
    uint32_t q_use = 0, k_use = 0, v_use = 0;
    for (uint32_t round = 0; round * Machine::Blocks() < tiles.count(); ++round) {
      const uint32_t index = TileOfRound(round, Machine::Block(), Machine::Blocks());
      if (index >= tiles.count()) continue;
      const QueryTile tile = tiles.At(index);
      const KeyTiles<kRows, kKeys> keys(params.shape, tile);
      if (keys.Empty()) continue;
      const uint32_t kv_head = params.shape.KvHead(tile.head);
      CopyTile<Buffer::kQ, kRows>(maps.q, shared, shared, q_use++, tile.begin, tile.head);
      CopyTile<Buffer::kK, kKeys>(maps.k, shared, shared + Config::kK, k_use++, (keys.end - 1) * kKeys,
                                  kv_head);
      for (uint32_t key_tile = keys.end - 1; key_tile > keys.begin; --key_tile) {
        CopyTile<Buffer::kK, kKeys>(maps.k, shared, shared + Config::kK, k_use++, (key_tile - 1) * kKeys,
                                    kv_head);
        CopyTile<Buffer::kV, kKeys>(maps.v, shared, shared + Config::kV, v_use++, key_tile * kKeys, kv_head);
      }
      CopyTile<Buffer::kV, kKeys>(maps.v, shared, shared + Config::kV, v_use++, keys.begin * kKeys, kv_head);
    }
  }

  // ---- Consumers: warpgroups 0 … kConsumers − 1, counted without the producer.

  // A descriptor that is one for the whole warp, and whose parts the compiler no longer knows: with what it
  // knows of them, it would mask every sum again.
  static MESHFILL_DEVICE uint64_t Whole(uint64_t descriptor) {
    return (descriptor & 0xffffffff00000000u) | Machine::Uniform(static_cast<uint32_t>(descriptor));
  }

  // Q as Q Kᵀ takes it: the warp's 16 rows in registers, or a descriptor of the warpgroup's 64 in shared
  // memory.
  using Queries = std::conditional_t<kQueriesInRegisters, uint32_t[kDim / 16][4], uint64_t>;

  static MESHFILL_DEVICE void LoadQueries(Queries& queries, uint32_t shared, uint32_t warp_row,
                                          uint32_t lane) {
    const MatrixChunk from = RowsFirst(lane);
    MESHFILL_UNROLL
    for (uint32_t step = 0; step < kDim / 16; ++step) {
      Machine::LoadMatrices(queries[step],
                            shared + ChunkOffset(kRows, warp_row + from.row, 2 * step + from.chunk));
    }
  }
  static MESHFILL_DEVICE void IssueQK(float (&scores)[kKeys / 2], const Queries& queries, uint64_t k_tile) {
    Machine::FenceProducts();
    MESHFILL_UNROLL
    for (uint32_t step = 0; step < kDim / 16; ++step) {
      const uint64_t k_columns =
          DescriptorAt(k_tile, ColumnStepBytes(Config::kKvSlabBytes, kColumnsOfSlab, step));
      if constexpr (kQueriesInRegisters) {
        Machine::template MultiplyRegistersTransposed<T, kKeys>(scores, queries[step], k_columns, step > 0);
      } else {
        Machine::template MultiplyShared<T, kKeys>(
            scores, DescriptorAt(queries, ColumnStepBytes(Config::kQSlabBytes, kColumnsOfSlab, step)),
            k_columns, step > 0);
      }
    }
    Machine::CommitProducts();
  }
  static MESHFILL_DEVICE void IssuePV(float (&output)[kDim / 2], const uint32_t (&packed)[kKeys / 16][4],
                                      uint64_t v_tile) {
    Machine::FenceProducts();
    MESHFILL_UNROLL
    for (uint32_t step = 0; step < kKeys / 16; ++step) {
      MESHFILL_UNROLL
      for (uint32_t column = 0; column < kDim; column += kColumns) {
        const uint32_t slabs = column / kColumnsOfSlab * Config::kKvSlabBytes;
        Machine::template MultiplyRegisters<T, kColumns>(
            &output[column / 2], packed[step],
            DescriptorAt(v_tile, slabs + RowStepBytes(kColumnsOfSlab, step)));
      }
    }
    Machine::CommitProducts();
  }

  static MESHFILL_DEVICE void Consume(const AttentionParams& params, const QueryTiles<kRows>& tiles,
                                      uint32_t shared) {
    const BlockShape& shape = params.shape;
    const uint32_t group = Machine::Uniform(Machine::Thread() / 128 - 1);
    const uint32_t lane = Machine::Thread() % 32;
    const uint32_t group_row = 64 * group;
    const uint32_t warp_row = group_row + Machine::Uniform(Machine::Thread() % 128 / 32 * 16);
    Queries queries;
    if constexpr (!kQueriesInRegisters) {
      queries = Whole(WgmmaDescriptor(shared + SlabBytes(group_row, kColumnsOfSlab), 16, kColumnsOfSlab));
    }
    const uint64_t k_tiles = Whole(WgmmaDescriptor(shared + Config::kK, 16, kColumnsOfSlab));
    const uint64_t v_tiles =
        Whole(WgmmaDescriptor(shared + Config::kV, Config::kKvSlabBytes, kColumnsOfSlab));
    uint32_t q_use = 0, use = 0;  // uses so far: of Q's buffer; of K's and V's, which take turns in step
    for (uint32_t round = 0; round * Machine::Blocks() < tiles.count(); ++round) {
      const uint32_t index = TileOfRound(round, Machine::Block(), Machine::Blocks());
      if (index >= tiles.count()) continue;
      const QueryTile tile = tiles.At(index);
      const KeyTiles<kRows, kKeys> keys(shape, tile);
      RowPair rows;
      float output[kDim / 2] = {};
      if (!keys.Empty()) {
        const uint32_t first_row = tile.begin + warp_row;
        const KeySlots visible[2] = {shape.VisibleKeysOrNone(first_row + AccumulatorRow(lane, 0)),
                                     shape.VisibleKeysOrNone(first_row + AccumulatorRow(lane, 2))};
        float scores[kKeys / 2], rescale[2];
        uint32_t packed[kKeys / 16][4];
        const Stage q = StageOf<Buffer::kQ>(shared, q_use++);
        Machine::BarrierWait(q.full, q.parity);
        if constexpr (kQueriesInRegisters) LoadQueries(queries, shared, warp_row, lane);
        const Stage first_k = StageOf<Buffer::kK>(shared, use);
        Machine::BarrierWait(first_k.full, first_k.parity);
        IssueQK(scores, queries, DescriptorAt(k_tiles, first_k.index * Config::kKvBytes));
        Machine::template WaitProducts<0>();
        Machine::Pin(scores);
        if constexpr (kQueriesInRegisters) Release(q, lane);  // a product has used what all lanes read
        Release(first_k, lane);
        if (!keys.Whole(keys.end - 1)) MaskScores(scores, (keys.end - 1) * kKeys, lane, visible);
        UpdateSoftmax<Machine>(scores, params.scale_log2, rows, rescale);
        PackProbabilities<Machine, T>(scores, packed);
        const Stage first_v = StageOf<Buffer::kV>(shared, use);
        Machine::BarrierWait(first_v.full, first_v.parity);

        // Q Kᵀ of a key tile, and P V of the one after it, whose probabilities are packed.
        const auto multiply = [&](uint32_t key_tile, auto masked) {
          const Stage k = StageOf<Buffer::kK>(shared, use + 1), v = StageOf<Buffer::kV>(shared, use);
          Machine::BarrierWait(k.full, k.parity);
          IssueQK(scores, queries, DescriptorAt(k_tiles, k.index * Config::kKvBytes));
          IssuePV(output, packed, DescriptorAt(v_tiles, v.index * Config::kKvBytes));
          Machine::template WaitProducts<1>();
          Machine::Pin(scores);
          Release(k, lane);
          if constexpr (masked) MaskScores(scores, key_tile * kKeys, lane, visible);
          const bool rescales = UpdateSoftmax<Machine>(scores, params.scale_log2, rows, rescale);
          // The exponentials run under P V. Left alone, the compiler puts them off until P V has ended; it
          // does not move them across the wait for the next V.
          Machine::Pin(scores);
          const Stage next_v = StageOf<Buffer::kV>(shared, ++use);
          Machine::BarrierWait(next_v.full, next_v.parity);
          Machine::template WaitProducts<0>();
          Machine::Pin(output);
          Release(v, lane);
          if (rescales) RescaleRows(output, rescale);
          PackProbabilities<Machine, T>(scores, packed);
        };
        // Whole tiles, which are most, have a loop of their own.
        const uint32_t first_whole = keys.FirstWhole();
        for (uint32_t key_tile = keys.end - 1; key_tile > keys.begin;) {
          if (!keys.Whole(key_tile - 1)) {
            multiply(--key_tile, std::true_type());
            continue;
          }
          do multiply(--key_tile, std::false_type());
          while (key_tile > first_whole);
        }

        if constexpr (!kQueriesInRegisters) Release(q, lane);
        const Stage v = StageOf<Buffer::kV>(shared, use++);
        IssuePV(output, packed, DescriptorAt(v_tiles, v.index * Config::kKvBytes));
        Machine::template WaitProducts<0>();
        Machine::Pin(output);
        Release(v, lane);
      }
      StoreRows<Machine>(params, tile.head, tile.begin + warp_row, lane, rows, output);
    }
  }
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_ATTENTION_SM90_CUH_
