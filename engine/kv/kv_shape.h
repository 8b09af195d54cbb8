// The numbers of a model's K and V.
#ifndef MESHFILL_ENGINE_KV_KV_SHAPE_H_
#define MESHFILL_ENGINE_KV_KV_SHAPE_H_

#include <cstdint>

#include "engine/model/model_shape.h"
#include "kernels/dtype.h"

namespace meshfill {

struct KvShape {
  int layers = 0;
  int kv_heads = 0;
  int head_dim = 0;
  DType dtype = DType::kF32;

  // K, or V, of one head of one token.
  int64_t head_bytes() const { return head_dim * static_cast<int64_t>(DTypeBytes(dtype)); }
  // K and V of one layer.
  int64_t LayerBytes(int64_t tokens) const { return 2 * tokens * kv_heads * head_bytes(); }
  bool operator==(const KvShape&) const = default;
};

inline KvShape KvShapeOf(const ModelShape& model) {
  return {
      .layers = model.layers, .kv_heads = model.kv_heads, .head_dim = model.head_dim, .dtype = model.dtype};
}

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_KV_SHAPE_H_
