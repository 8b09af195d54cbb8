// K and V of a prompt in token order, layer by layer: what a decoder takes over.
#ifndef MESHFILL_ENGINE_KV_KV_CACHE_H_
#define MESHFILL_ENGINE_KV_KV_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/dtype.h"

namespace meshfill {

struct KvCache {
  struct Layer {
    std::vector<std::byte> k;  // [tokens, kv_heads, head_dim], dtype, RoPE applied
    std::vector<std::byte> v;  // [tokens, kv_heads, head_dim], dtype
  };
  int kv_heads = 0;
  int head_dim = 0;
  int64_t tokens = 0;
  DType dtype = DType::kF32;
  std::vector<Layer> layers;

  KvCache(int layer_count, int kv_heads, int head_dim, int64_t tokens, DType dtype)
      : kv_heads(kv_heads), head_dim(head_dim), tokens(tokens), dtype(dtype), layers(layer_count) {
    for (Layer& layer : layers) {
      layer.k.resize(LayerBytes() / 2);
      layer.v.resize(LayerBytes() / 2);
    }
  }

  size_t LayerBytes() const {
    return 2 * static_cast<size_t>(tokens) * kv_heads * head_dim * DTypeBytes(dtype);
  }
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_KV_CACHE_H_
