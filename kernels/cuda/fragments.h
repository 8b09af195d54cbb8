// Where the tensor cores expect elements: in registers (PTX ISA, "Matrix Fragments for mma.m16n8k16", and for
// wgmma.m64nNk16, which agree within a warp's 16 rows) and in shared memory (128-byte swizzle).
//
// An accumulator of 16 rows is float[4 · groups], a group being 8 columns; thread `lane` of the warp holds
//
//     [4g], [4g+1]        row lane/4,       columns 8g + 2·(lane mod 4), and the next
//     [4g+2], [4g+3]      row lane/4 + 8,   the same columns
//
// and the probabilities of 16 keys in that form, packed two by two, are the next product's A operand as they
// are.
#ifndef MESHFILL_KERNELS_CUDA_FRAGMENTS_H_
#define MESHFILL_KERNELS_CUDA_FRAGMENTS_H_

#include <cstdint>

#ifdef __CUDACC__
#define MESHFILL_DEVICE __device__ __forceinline__
#define MESHFILL_UNROLL _Pragma("unroll")
#else  // the host runs the kernels, too: tests/kernels/cuda_emulator.h
#define MESHFILL_DEVICE inline
#define MESHFILL_UNROLL
#endif

namespace meshfill {

// The row of accumulator element i, and its column.
constexpr uint32_t AccumulatorRow(uint32_t lane, uint32_t i) { return lane / 4 + (i % 4 / 2) * 8; }
constexpr uint32_t AccumulatorColumn(uint32_t lane, uint32_t i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

// A tile of 16-bit elements in shared memory is slabs of 64 columns; a slab's rows are 128 bytes, and within
// eight rows the 16-byte chunks are exchanged so that the same chunk of eight rows lies in different banks:
//
//     row 0   0 1 2 3 4 5 6 7
//     row 1   1 0 3 2 5 4 7 6        position of chunk c in row r: c xor (r mod 8)
//     row 2   2 3 0 1 6 7 4 5
//
// This is the tensor maps' SWIZZLE_128B for tiles that begin at multiples of 1,024 bytes. For wgmma, tiles
// whose columns are no multiple of 64 have slabs of 32 columns instead: rows of 64 bytes, and SWIZZLE_64B,
// which exchanges a row's four chunks, every two rows.
inline constexpr uint32_t kSlabColumns = 64;
inline constexpr uint32_t kSlabRowBytes = 128;
inline constexpr uint32_t kSwizzleBytes = 8 * kSlabRowBytes;

constexpr uint32_t Slabs(uint32_t columns, uint32_t slab_columns = kSlabColumns) {
  return (columns + slab_columns - 1) / slab_columns;
}
constexpr uint32_t SlabBytes(uint32_t rows, uint32_t slab_columns = kSlabColumns) {
  return rows * slab_columns * 2;
}
constexpr uint32_t TileBytes(uint32_t rows, uint32_t columns, uint32_t slab_columns = kSlabColumns) {
  return Slabs(columns, slab_columns) * SlabBytes(rows, slab_columns);
}

// Byte offset of the chunk-th 16 bytes of a row, in a tile of `rows` rows.
constexpr uint32_t ChunkOffset(uint32_t rows, uint32_t row, uint32_t chunk) {
  return chunk / 8 * SlabBytes(rows) + row * kSlabRowBytes + ((chunk % 8) ^ (row % 8)) * 16;
}

// The chunk that thread `lane` names to ldmatrix.x4: matrix lane/8 of the four, its row lane mod 8.
struct MatrixChunk {
  uint32_t row;
  uint32_t chunk;
};
// A of 16 rows × 16 columns: (rows 0–7, columns 0–7), (8–15, 0–7), (0–7, 8–15), (8–15, 8–15).
// Transposed, the same four are B of 16 keys × 16 columns of V: b0 and b1 of columns 0–7, then of 8–15.
constexpr MatrixChunk RowsFirst(uint32_t lane) { return {lane % 16, lane / 16}; }
// B of 16 columns × 16 rows, stored as 16 keys: b0 and b1 of keys 0–7, then of 8–15.
constexpr MatrixChunk ColumnsFirst(uint32_t lane) { return {lane % 8 + lane / 16 * 8, lane / 8 % 2}; }

// wgmma's matrix descriptor (PTX ISA, "Matrix Descriptor Format"): address, leading and stride byte offsets
// in units of 16 bytes, and the swizzle. Tiles begin at multiples of kSwizzleBytes, so that the base offset
// is 0. The stride is what eight rows of a slab take.
constexpr uint64_t WgmmaDescriptor(uint32_t address, uint32_t leading_bytes, uint32_t slab_columns) {
  const uint64_t swizzle = uint64_t{slab_columns == kSlabColumns ? 1u : 2u} << 62;
  constexpr auto field = [](uint32_t bytes) { return uint64_t{(bytes & 0x3ffff) >> 4}; };
  return field(address) | field(leading_bytes) << 16 | field(SlabBytes(8, slab_columns)) << 32 | swizzle;
}
// The descriptor of what lies `bytes` further on, a multiple of 16. An addition, and no more: shared memory
// ends before the address's field does.
constexpr uint64_t DescriptorAt(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & 0xffffffff00000000u) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}
// Q and K: where their columns 16·step to 16·step + 15 begin. Rows in groups of eight follow one another; a
// step of 16 columns is 32 bytes along the slab's row. The descriptor's leading offset is not used with a
// swizzle.
constexpr uint32_t ColumnStepBytes(uint32_t slab_bytes, uint32_t slab_columns, uint32_t step) {
  const uint32_t steps = slab_columns / 16;
  return step / steps * slab_bytes + step % steps * 32;
}
// V: where its keys 16·step to 16·step + 15 begin: eight rows follow eight rows. The leading offset is what a
// slab takes: all columns, slab follows slab.
constexpr uint32_t RowStepBytes(uint32_t slab_columns, uint32_t step) {
  return SlabBytes(16 * step, slab_columns);
}

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CUDA_FRAGMENTS_H_
