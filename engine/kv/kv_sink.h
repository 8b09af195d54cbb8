// Where a run's K and V go, layer by layer, besides its own attention. Without a sink they are dropped as
// soon as attention no longer needs them.
//
//     Begin ──► for each layer, on each rank's thread: Place, the rank copies, OnLayerKept
//
// Implementation: KvPrompt (engine/kv/kv_prompt.h), which keeps them.
#ifndef MESHFILL_ENGINE_KV_KV_SINK_H_
#define MESHFILL_ENGINE_KV_KV_SINK_H_

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "engine/mesh/layout.h"

namespace meshfill {

struct KvSlabs;  // engine/kv/kv_slabs.h

class KvSink {
 public:
  virtual ~KvSink() = default;

  // A run begins; its ranks hold the prompt's tokens behind those of `before` as `layout` deals them. Nobody
  // brings the tokens of `before`: they came from a cached prefix, or from the run before (null: there are
  // none). A run that begins again brings all layers again, perhaps by another layout. Never while a rank of
  // the run before is still computing.
  virtual void Begin(const TokenLayout& layout, std::shared_ptr<const KvSlabs> before) = 0;
  void Begin(const TokenLayout& layout) { Begin(layout, nullptr); }

  // Host memory for the K and V of one rank's tokens in one layer: K, then V, each
  // [chunk_tokens, kv_heads, head_dim] in the model's dtype, by slot, RoPE applied. Null: nothing is wanted.
  // RESOURCE_EXHAUSTED: there is no memory. Thread-safe.
  virtual absl::StatusOr<std::byte*> Place(int rank, int layer) = 0;

  // What Place gave is filled. Thread-safe; must return quickly.
  virtual void OnLayerKept(int rank, int layer) = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_KV_SINK_H_
