// What a prefill leaves in files: --logits-out and --kv-out, both safetensors.
#ifndef MESHFILL_SERVER_CLI_TENSOR_OUTPUT_H_
#define MESHFILL_SERVER_CLI_TENSOR_OUTPUT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "engine/kv/kv_shape.h"

namespace meshfill {

// `logits` [vocab], f32.
absl::Status WriteLogits(const std::string& path, std::span<const float> logits);

// Fills K and V of a layer: [tokens, kv_heads, head_dim] each, in token order.
using ReadKvLayer = std::function<absl::Status(int layer, std::span<std::byte> k, std::span<std::byte> v)>;

// `layers.L.k` and `layers.L.v` for each layer L, as `read` fills them, in the order of the layers. One layer
// is in memory at a time.
absl::Status WriteKv(const std::string& path, const KvShape& shape, int64_t tokens, const ReadKvLayer& read);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_TENSOR_OUTPUT_H_
