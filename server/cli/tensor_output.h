// What a prefill leaves in files: --logits-out and --kv-out (DESIGN §9), both safetensors.
#ifndef MESHFILL_SERVER_CLI_TENSOR_OUTPUT_H_
#define MESHFILL_SERVER_CLI_TENSOR_OUTPUT_H_

#include <span>
#include <string>

#include "absl/status/status.h"
#include "engine/kv/kv_cache.h"

namespace meshfill {

// `logits` [vocab], f32.
absl::Status WriteLogits(const std::string& path, std::span<const float> logits);

// `layers.L.k` and `layers.L.v` for each layer L: [tokens, kv_heads, head_dim], the cache's dtype, in token
// order.
absl::Status WriteKv(const std::string& path, const KvCache& kv);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CLI_TENSOR_OUTPUT_H_
