#include "kernels/cpu/product_pieces.h"

#include <algorithm>
#include <bit>

namespace meshfill {
namespace {

// Below this a tile is not made smaller so that another thread has one.
constexpr int64_t kSmallestSharedTile = 16;

// How many tokens a tile of `tokens` is filled up to: one of a few counts, so that few sizes are ever
// compiled.
int64_t PaddedTokens(int64_t tokens) {
  constexpr int64_t kLeastStep = 8, kMostStep = 32;
  const auto count = static_cast<uint64_t>(tokens);
  if (tokens < kLeastStep) return static_cast<int64_t>(std::bit_ceil(count));
  const int64_t step = std::clamp(static_cast<int64_t>(std::bit_floor(count)) / 8, kLeastStep, kMostStep);
  return (tokens + step - 1) / step * step;
}

// The fastest for `threads` threads. A part of the columns takes as long as its tokens, and as reading its
// weights takes; each group has its tile's tokens copied for it.
Cut FastestCut(int64_t tokens, int64_t parts, int threads, bool amx) {
  const double reading = amx ? 64 : 16, copying = 0.4;  // tokens' time; measured on AMX
  const int64_t most_tile_tokens = MostTileTokens(amx);
  const int64_t least_tiles = (tokens + most_tile_tokens - 1) / most_tile_tokens;
  const int64_t even_tiles = (least_tiles + threads - 1) / threads * threads;
  const int64_t most_tiles = std::max(least_tiles, std::min(even_tiles, tokens / kSmallestSharedTile));
  Cut best;
  double least = 0;
  for (int64_t tiles = least_tiles; tiles <= most_tiles; ++tiles) {
    for (int64_t groups = 1; groups <= std::min<int64_t>(threads, parts); ++groups) {
      const int64_t tile_tokens = PaddedTokens((tokens + tiles - 1) / tiles);
      const auto rows = static_cast<double>(tile_tokens);
      const auto rounds = static_cast<double>((tiles * groups + threads - 1) / threads);
      const auto of_group = static_cast<double>((parts + groups - 1) / groups);
      const double cost = rounds * (of_group * (rows + reading) + copying * rows);
      if (best.tile_tokens == 0 || cost < least) {
        best = {tile_tokens, groups};
        least = cost;
      }
    }
  }
  return best;
}

// The columns of the strips, each by itself; of one token, that of each panel.
std::vector<Part> PartsOf(std::span<const Strip> strips) {
  std::vector<Part> parts;
  for (const Strip& strip : strips) {
    const bool one_token = strip.end - strip.begin == 1;
    const int64_t most = one_token ? kPanelFeatures : strip.columns;
    for (int64_t column = 0; column < strip.columns; column += most) {
      const int64_t columns = std::min(most, strip.columns - column);
      parts.push_back({strip.wide, column, columns, strip.column + column});
    }
  }
  return parts;
}

// oneDNN multiplies one token by 256 features, and few tokens by few columns, without AMX (2.6's
// brgemm_matmul_utils.cpp), in another order: this many tokens it does not.
int64_t LeastTileTokens(std::span<const Part> parts) {
  int64_t columns = parts.front().columns;
  for (const Part& part : parts) columns = std::min(columns, part.columns);
  return std::clamp<int64_t>(256 / columns + 1, 2, 33);
}

}  // namespace

// The weights, which stream through the cache once for each tile, are then read at a few GB/s while a core
// computes at full speed. On AMX that speed is ten times as high.
int64_t MostTileTokens(bool amx) { return amx ? 768 : 128; }

Cut BestCut(std::span<const Strip> strips, bool amx, int threads) {
  const std::vector<Part> parts = PartsOf(strips);
  Cut cut = FastestCut(strips.front().end - strips.front().begin, std::ssize(parts), threads, amx);
  if (amx) cut.tile_tokens = std::max(cut.tile_tokens, LeastTileTokens(parts));
  return cut;
}

void CutProduct(std::span<const Strip> strips, const Cut& cut, std::vector<Piece>& pieces) {
  const std::vector<Part> parts = PartsOf(strips);
  const auto [tokens, groups] = cut;
  const Strip& strip = strips.front();
  for (int64_t token = strip.begin; token < strip.end; token += tokens) {
    for (int64_t group = 0; group < groups; ++group) {
      const auto first = parts.begin() + group * std::ssize(parts) / groups;
      const auto last = parts.begin() + (group + 1) * std::ssize(parts) / groups;
      pieces.push_back({.weight = strip.weight,
                        .token = token,
                        .tokens = std::min(tokens, strip.end - token),
                        .padded_tokens = tokens,
                        .parts = std::vector<Part>(first, last)});
    }
  }
}

}  // namespace meshfill
