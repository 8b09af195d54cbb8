// How products are cut into tasks for the threads of a team: tiles of tokens, each times groups of columns.
#ifndef MESHFILL_KERNELS_CPU_PRODUCT_PIECES_H_
#define MESHFILL_KERNELS_CPU_PRODUCT_PIECES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cpu/packed_matrix.h"

namespace meshfill {

struct TileProduct;  // gemm.cc: a tile of tokens times some columns of a weight, compiled

// Columns [column, column + columns) of a weight, for tokens (rows, of experts) [begin, end).
struct Strip {
  const CpuWeight* weight;
  const WideStrip* wide;  // null: the weight is narrow, and the columns are what is widened at a time
  int64_t column, columns;
  int64_t begin, end;
};

// A product that a part of a task adds up.
struct Addend {
  const TileProduct* product;
  void* elements;    // of the block, the first of the columns
  int64_t first_in;  // the block's first input feature
};

// Columns [column, column + columns) of one strip in a task.
struct Part {
  const WideStrip* strip;
  int64_t column, columns;
  int64_t y_column;
  std::vector<Addend> addends = {};  // by block

  bool adds() const { return strip->size() > 1; }
};

// One task: tokens [token, token + tokens) times columns of a weight, one part after the other.
struct Piece {
  const CpuWeight* weight;
  int64_t token, tokens;
  int64_t padded_tokens;  // what the kernels are compiled for; results beyond `tokens` are not used
  std::vector<Part> parts;

  bool padded() const { return padded_tokens > tokens; }
  bool adds() const { return parts.front().adds(); }
};

// The strips of one weight that are multiplied together, for the same tokens.
struct Strips {
  std::span<const Strip> strips;
  std::span<const WideStrip* const> wide;  // by strip

  const CpuWeight* weight() const { return strips.front().weight; }
  int64_t begin() const { return strips.front().begin; }
  int64_t end() const { return strips.front().end; }
};

// How a product is divided: into tiles of tokens, and each of those into groups of columns.
struct Cut {
  int64_t tile_tokens = 0;  // with those that fill it up
  int64_t groups = 1;
};

// The fastest for `threads` threads. `amx`: AMX multiplies.
Cut BestCut(const Strips& strips, bool amx, int threads);

// Adds the pieces of such a cut, first token to last.
void CutProduct(const Strips& strips, const Cut& cut, std::vector<Piece>& pieces);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_PRODUCT_PIECES_H_
