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
  const WideStrip* wide;  // null: a narrow weight, of which so many columns are widened at a time
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

// How a product is divided: into tiles of tokens, and each of those into groups of columns.
struct Cut {
  int64_t tile_tokens = 0;  // with those that fill it up
  int64_t groups = 1;
};

// Tokens of the largest tile. `amx`: AMX multiplies.
int64_t MostTileTokens(bool amx);

// The fastest for `threads` threads. Strips: of one weight, for the same tokens, all of them wide.
Cut BestCut(std::span<const Strip> strips, bool amx, int threads);

// Adds the pieces of such a cut, first token to last.
void CutProduct(std::span<const Strip> strips, const Cut& cut, std::vector<Piece>& pieces);

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_PRODUCT_PIECES_H_
