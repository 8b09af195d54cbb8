// Brings K and V of a cached prefix to where a rank's attention reads them, a layer at a time: from its
// device where they are there, else from the host.
#ifndef MESHFILL_ENGINE_RUN_PREFIX_READER_H_
#define MESHFILL_ENGINE_RUN_PREFIX_READER_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/kv/kv_slabs.h"
#include "engine/mesh/layout.h"
#include "engine/model/model_shape.h"
#include "kernels/stream.h"

namespace meshfill {

// Of K or of V, as the chunks are: [heads, slots, head_dim].
HeadRows HeadsOutermost(const ModelShape& shape, int64_t slots, int64_t first_slot = 0);
// K (half 0) or V.
std::byte* HalfOf(const BufferRef& kv, int half);

class PrefixReader {
 public:
  // `layout` deals the prefix's tokens and those behind it; the rank's first `slots` are the prefix's.
  // `staging` has room for K and V of `staging_tokens` tokens, and nobody else uses it during Read. All but
  // these outlive the reader.
  PrefixReader(const KvSlabs& prefix, const ModelShape& shape, const TokenLayout& layout, int rank,
               int64_t slots, Stream& stream, BufferRef staging, int64_t staging_tokens);

  // Reads a layer's into the first slots of K and of V, each [kv_heads, all_slots, head_dim].
  absl::Status Read(int layer, const BufferRef& kv, int64_t all_slots);

 private:
  class Slabs;
  // Brings tokens that are on the host, at most as many as the staging holds, [tokens, kv_heads, head_dim] of
  // K and of V, into it. How many: up to the first that are on the device.
  absl::StatusOr<int64_t> Upload(int layer, int64_t begin, Slabs& slabs);
  std::byte* StagedHalf(int half) const;

  const KvSlabs& prefix_;
  const ModelShape& shape_;
  const TokenLayout layout_;
  const int rank_;
  const int64_t slots_;
  Stream& stream_;
  const BufferRef staging_;
  const int64_t staging_tokens_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_PREFIX_READER_H_
