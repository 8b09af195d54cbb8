// What one instruction set contributes to the attention block: packing, and one strip of queries against one
// block of keys. The driver (attention.cc) owns the loops, the masks and the memory, and is the same for
// every target.
//
//                      keys of a block, in panels
//                   ┌────────┬────────┬────────┬──
//     strip 0       │  tile  │  tile  │        │      a strip: strip_rows consecutive queries of one head
//     strip 1       │  tile  │  tile  │  tile  │      a panel: as many keys as a register tile is wide
//                   └────────┴────────┴────────┴──
//
// Packed operands are 32-bit words: one f32, or a pair of bf16 that one lane of dpbf16ps or one cell of
// tdpbf16ps multiplies. A pair holds two neighbours along the reduction: of the head dimension in Q and K, of
// the keys in V and in the probabilities.
#ifndef MESHFILL_KERNELS_CPU_ATTENTION_KERNEL_H_
#define MESHFILL_KERNELS_CPU_ATTENTION_KERNEL_H_

#include <cstdint>

#include "kernels/dtype.h"

namespace meshfill {

// The most queries in a strip.
inline constexpr int kMaxStripRows = 32;

// One strip against one block. Key numbers are relative to the block's first key. Row r sees the keys
// [row_begin[r], row_end[r]); panels that no row sees are not touched.
struct StripBlock {
  const uint32_t* queries;  // packed strip
  const uint32_t* keys;     // packed block
  const uint32_t* values;   // packed block
  int head_dim;
  int block_keys;                // the capacity that the block was packed for
  int row_begin[kMaxStripRows];  // first visible key of each row, within the block
  int row_end[kMaxStripRows];    // end of each row's visible keys; both rise with the row, at most block_keys
  float scale_log2e;             // scores · this = exponents of 2
  // The softmax state of FlashAttention's online form, not normalised, exponents of 2.
  float* output;  // [strip_rows, PaddedDim(head_dim)]
  float* max;     // [strip_rows]
  float* sum;     // [strip_rows]
};

struct AttentionKernel {
  int strip_rows;     // at most kMaxStripRows
  int block_keys;     // the most keys in a block: a strip's scores and probabilities stay in L1
  int word_elements;  // elements in a packed word: 1 (f32) or 2 (bf16)
  int lanes;          // words in a vector; output rows are padded to a multiple of it
  int task_rows;      // the most queries in a task, over all heads of a group: their outputs stay in L2

  // `count` consecutive rows [count, head_dim] of the input; zeros follow them up to the end of the strip or
  // panel.
  void (*pack_queries)(const void* rows, int count, int head_dim, uint32_t* packed);
  void (*pack_keys)(const void* rows, int count, int head_dim, uint32_t* packed);
  void (*pack_values)(const void* rows, int count, int head_dim, int block_keys, uint32_t* packed);
  // Strips against one block, at least one: their keys and values are the same. A kernel may have something
  // to set up for all of them.
  void (*attend)(const StripBlock* strips, int count);

  int PaddedDim(int head_dim) const { return (head_dim + lanes - 1) / lanes * lanes; }
  int QueryWords(int head_dim) const {  // in one packed row
    return PaddedDim((head_dim + word_elements - 1) / word_elements);
  }
  int64_t KeyBlockWords(int head_dim, int block_keys) const {
    return int64_t{block_keys} * QueryWords(head_dim);
  }
  int64_t ValueBlockWords(int head_dim, int block_keys) const {
    return int64_t{block_keys} / word_elements * PaddedDim(head_dim);
  }
};

// Kernels for f32 or bf16 inputs. Each is to be called on machines that have its instructions.
const AttentionKernel& PortableAttentionKernel(DType dtype);
const AttentionKernel& Avx2AttentionKernel(DType dtype);
const AttentionKernel& Avx512AttentionKernel(DType dtype);
const AttentionKernel& Avx512Bf16AttentionKernel();  // bf16 inputs only
const AttentionKernel& AmxBf16AttentionKernel();     // bf16 inputs only

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_ATTENTION_KERNEL_H_
