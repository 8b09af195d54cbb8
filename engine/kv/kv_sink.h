// Where a run's K and V go, layer by layer, besides its own attention. Without a sink they are dropped as
// soon as attention no longer needs them.
//
//     Begin ──► for each layer, on each rank's thread: Keep ──► KvKeeping::Finish, a layer later
//
// Implementation: KvPrompt (engine/kv/kv_prompt.h), which keeps them.
#ifndef MESHFILL_ENGINE_KV_KV_SINK_H_
#define MESHFILL_ENGINE_KV_KV_SINK_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/mesh/layout.h"
#include "kernels/stream.h"

namespace meshfill {

struct KvSlabs;  // engine/kv/kv_slabs.h

// What goes on beside a rank's operations, of its stream. When this goes unfinished, it is given up.
class KvKeeping {
 public:
  virtual ~KvKeeping() = default;
  // Returns when it is done; the error of a copy.
  virtual absl::Status Finish() = 0;
};

class KvSink {
 public:
  virtual ~KvSink() = default;

  // A run begins; its ranks hold the prompt's tokens behind those of `before` as `layout` deals them. Nobody
  // brings the tokens of `before`: they came from a cached prefix, or from the run before (null: there are
  // none). A run that begins again brings all layers again, perhaps by another layout. Never while a rank of
  // the run before is still computing.
  virtual void Begin(const TokenLayout& layout, std::shared_ptr<const KvSlabs> before) = 0;
  void Begin(const TokenLayout& layout) { Begin(layout, nullptr); }

  // Keeps K and V of one rank's tokens in one layer: K, then V, each [kv_heads, chunk_tokens, head_dim] in
  // the model's dtype, by slot, RoPE applied. They are what earlier operations of `stream` left in `kv`, and
  // nobody writes them from now on. What goes on beside; null: nothing does. RESOURCE_EXHAUSTED: there is no
  // memory. Thread-safe; returns quickly.
  virtual absl::StatusOr<std::unique_ptr<KvKeeping>> Keep(int rank, int layer, const BufferRef& kv,
                                                          Stream& stream) = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_KV_SINK_H_
