// K and V whose every element says whose it is, for tests of what keeps and copies them.
#ifndef MESHFILL_TESTS_ENGINE_KV_KV_VALUES_H_
#define MESHFILL_TESTS_ENGINE_KV_KV_VALUES_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "engine/kv/kv_prompt.h"
#include "engine/kv/kv_slabs.h"
#include "engine/mesh/layout.h"
#include "tests/engine/random_seed.h"

namespace meshfill {

// The first bytes of what K (half 0) or V (half 1) has at an element; never 0.
inline uint32_t KvValue(int layer, int half, int64_t token, int head, int element) {
  uint64_t x = (((layer * 2 + half) * int64_t{1000003} + token) * 257 + head) * 257 + element;
  x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9u;
  return static_cast<uint32_t>(x >> 32) | 0x10001u;
}

// What a rank computes of a layer, of the tokens from `first_token` on, put where the prompt wants it. False:
// it wants nothing.
inline bool KeepValues(KvPrompt& prompt, const TokenLayout& layout, int rank, int layer,
                       int64_t first_token = 0) {
  const KvShape& shape = prompt.shape();
  std::byte* const slab = prompt.Place(rank, layer).value();
  if (slab == nullptr) return false;
  const auto element_bytes = static_cast<int64_t>(DTypeBytes(shape.dtype));
  const int64_t chunk_tokens = layout.ChunkTokens(rank);
  std::byte* to = slab;
  for (int half = 0; half < 2; ++half) {
    for (int64_t slot = 0; slot < chunk_tokens; ++slot) {
      for (int head = 0; head < shape.kv_heads; ++head) {
        for (int element = 0; element < shape.head_dim; ++element, to += element_bytes) {
          const uint32_t value =
              KvValue(layer, half, first_token + layout.TokenAt(rank, slot), head, element);
          std::memcpy(to, &value, static_cast<size_t>(element_bytes));
        }
      }
    }
  }
  prompt.OnLayerKept(rank, layer);
  return true;
}

inline void KeepAllValues(KvPrompt& prompt, const TokenLayout& layout,
                          std::shared_ptr<const KvSlabs> before = nullptr) {
  const int64_t first_token = before == nullptr ? 0 : before->tokens();
  prompt.Begin(layout, std::move(before));
  for (int layer = 0; layer < prompt.shape().layers; ++layer) {
    for (int rank = 0; rank < layout.ranks(); ++rank) KeepValues(prompt, layout, rank, layer, first_token);
  }
}

// A range as its layout is defined, element by element.
inline std::vector<std::byte> KvBytes(const KvShape& shape, int layer, const KvRange& range, KvFormat layout,
                                      int64_t page_tokens) {
  const auto element_bytes = static_cast<int64_t>(DTypeBytes(shape.dtype));
  std::vector<std::byte> bytes(KvRangeBytes(shape, range, layout, page_tokens), std::byte{0});
  for (int half = 0; half < 2; ++half) {
    for (int64_t token = 0; token < range.tokens; ++token) {
      for (int64_t head = 0; head < range.heads; ++head) {
        for (int element = 0; element < shape.head_dim; ++element) {
          const int64_t page = token / page_tokens, in_page = token % page_tokens;
          int64_t row = 0;  // of head_dim elements
          if (layout == KvFormat::kTokens) row = (half * range.tokens + token) * range.heads + head;
          if (layout == KvFormat::kPagesHnd)
            row = ((page * range.heads + head) * page_tokens + in_page) * 2 + half;
          if (layout == KvFormat::kPagesNhd)
            row = ((page * page_tokens + in_page) * range.heads + head) * 2 + half;
          const uint32_t value = KvValue(layer, half, range.first_token + token,
                                         range.first_head + static_cast<int>(head), element);
          std::memcpy(&bytes[(row * shape.head_dim + element) * element_bytes], &value, element_bytes);
        }
      }
    }
  }
  return bytes;
}

inline KvShape DrawKvShape(std::mt19937_64& random) {
  return {.layers = Draw<int>(random, 1, 4),
          .kv_heads = Draw<int>(random, 1, 4),
          .head_dim = 2 * Draw<int>(random, 1, 8),
          .dtype = Draw<int>(random, 0, 1) == 0 ? DType::kF32 : DType::kBf16};
}

inline TokenLayout DrawTokenLayout(std::mt19937_64& random, int64_t tokens) {
  const auto kind = static_cast<LayoutKind>(Draw<int>(random, 0, 2));
  return TokenLayout::Make(kind, Draw<int>(random, 1, 16), tokens, Draw<int>(random, 1, 40)).value();
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_KV_KV_VALUES_H_
