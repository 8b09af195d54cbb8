// K and V of a prompt in token order, for tests to compare.
#ifndef MESHFILL_TESTS_ENGINE_KEPT_KV_H_
#define MESHFILL_TESTS_ENGINE_KEPT_KV_H_

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/kv/kv_prompt.h"
#include "engine/prefill_engine.h"
#include "gtest/gtest.h"

namespace meshfill {

struct KeptKv {
  struct Layer {
    std::vector<std::byte> k;  // [tokens, kv_heads, head_dim]
    std::vector<std::byte> v;
  };
  KvShape shape;
  std::vector<Layer> layers;
};

inline KeptKv InTokenOrder(const KvPrompt& prompt) {
  const KvShape& shape = prompt.shape();
  KeptKv kept = {.shape = shape, .layers = std::vector<KeptKv::Layer>(shape.layers)};
  const KvRange all = {.tokens = prompt.tokens(), .heads = shape.kv_heads};
  for (int layer = 0; layer < shape.layers; ++layer) {
    auto& [k, v] = kept.layers[layer];
    k.resize(shape.LayerBytes(prompt.tokens()) / 2);
    v.resize(k.size());
    const std::shared_ptr<const KvSlabs> slabs = prompt.Layer(layer);
    EXPECT_NE(slabs, nullptr) << "layer " << layer << " is not kept";
    if (slabs == nullptr) continue;
    const absl::Status copied = CopyKvTokens(*slabs, layer, all, k.data(), v.data());
    EXPECT_TRUE(copied.ok()) << copied;
  }
  return kept;
}

struct KeptPrefill : PrefillResult {
  KeptKv kv;
};

inline absl::StatusOr<KeptPrefill> PrefillKeepingKv(PrefillEngine& engine, std::span<const uint32_t> tokens,
                                                    PrefillOptions options = {}) {
  const auto kv = std::make_shared<KvPrompt>(KvShapeOf(engine.model()), static_cast<int64_t>(tokens.size()));
  options.kv = kv;
  absl::StatusOr<PrefillResult> result = RunPrefill(engine, {tokens, options});
  if (!result.ok()) return result.status();
  return KeptPrefill{*std::move(result), InTokenOrder(*kv)};
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_KEPT_KV_H_
