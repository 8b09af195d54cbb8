#include "engine/plan/comm_bytes.h"

#include <vector>

namespace meshfill {
namespace {

// What a rank sends in one layer: its own tokens' Q and KV to every other member of its head group, and every
// other's O. `slice` has a member's heads.
int64_t AllToAllBytes(const ModelShape& slice, int heads, int64_t own_tokens, int64_t own_kv_tokens,
                      int64_t group_tokens) {
  return (heads - 1) * (slice.q_bytes(own_tokens) + slice.kv_bytes(own_kv_tokens)) +
         slice.q_bytes(group_tokens - own_tokens);
}

// LayerCommBytes of the rank that sends most. A rank sends its groups' chunks but one of each kind, so that
// the groups' sums give all ranks' bytes in time O(n).
CommBytes LargestLayerCommBytes(const ModelShape& model, const PlanShape& shape) {
  const auto& [layout, heads, tile, partial_dtype, cached_tokens, links, keeps_kv, kv_on_host, one_memory] =
      shape;
  const Mesh mesh(tile);
  const ModelShape slice = model.HeadSlice(heads);
  const TokenLayout groups = layout.Groups(heads);
  const TokenLayout kv_layout = KvLayout(layout, cached_tokens);
  const TokenLayout kv_groups = kv_layout.Groups(heads);
  std::vector<int64_t> chunk_tokens(mesh.ranks());
  std::vector<int64_t> kv_chunk_tokens(mesh.ranks());
  std::vector<int64_t> q_group_tokens(tile.b, 0);   // of mesh ranks a·g … a·g + a−1
  std::vector<int64_t> kv_group_tokens(tile.a, 0);  // of mesh ranks g, g + a, g + 2a …
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    chunk_tokens[rank] = groups.ChunkTokens(rank);
    kv_chunk_tokens[rank] = kv_groups.ChunkTokens(rank);
    q_group_tokens[rank / tile.a] += chunk_tokens[rank];
    kv_group_tokens[rank % tile.a] += kv_chunk_tokens[rank];
  }
  CommBytes largest;
  for (int global_rank = 0; global_rank < layout.ranks(); ++global_rank) {
    const int rank = global_rank / heads;
    const int64_t q_tokens = q_group_tokens[rank / tile.a];
    const int64_t kv_tokens = kv_group_tokens[rank % tile.a];
    const int64_t last_q_tokens = chunk_tokens[mesh.QChunk(rank, tile.a - 1)];
    const int64_t last_kv_tokens = kv_chunk_tokens[mesh.KvChunk(rank, tile.b - 1)];
    const int64_t all_to_all = heads == 1
                                   ? 0
                                   : AllToAllBytes(slice, heads, layout.ChunkTokens(global_rank),
                                                   kv_layout.ChunkTokens(global_rank), chunk_tokens[rank]);
    const CommBytes bytes = {{Traffic::kQ, slice.q_bytes(q_tokens - last_q_tokens)},
                             {Traffic::kKv, slice.kv_bytes(kv_tokens - last_kv_tokens)},
                             {Traffic::kO, slice.partial_bytes(q_tokens - chunk_tokens[rank], partial_dtype)},
                             {Traffic::kAllToAll, all_to_all}};
    if (bytes.total() > largest.total()) largest = bytes;
  }
  return largest;
}

}  // namespace

CommBytes LayerCommBytes(const ModelShape& model, const TokenLayout& layout, int heads, Tile tile,
                         DType partial_dtype, int rank, int64_t cached_tokens) {
  const Mesh mesh(tile);
  const ModelShape slice = model.HeadSlice(heads);
  const TokenLayout groups = layout.Groups(heads);
  const TokenLayout kv_layout = KvLayout(layout, cached_tokens);
  const TokenLayout kv_groups = kv_layout.Groups(heads);
  const int mesh_rank = rank / heads;
  CommBytes bytes;
  for (int u = 0; u < tile.a - 1; ++u) {  // Q#0 … Q#a−2 and O#1 … O#a−1 leave
    bytes[Traffic::kQ] += slice.q_bytes(groups.ChunkTokens(mesh.QChunk(mesh_rank, u)));
    bytes[Traffic::kO] +=
        slice.partial_bytes(groups.ChunkTokens(mesh.QChunk(mesh_rank, u + 1)), partial_dtype);
  }
  for (int v = 0; v < tile.b - 1; ++v)
    bytes[Traffic::kKv] += slice.kv_bytes(kv_groups.ChunkTokens(mesh.KvChunk(mesh_rank, v)));
  bytes[Traffic::kAllToAll] = AllToAllBytes(slice, heads, layout.ChunkTokens(rank),
                                            kv_layout.ChunkTokens(rank), groups.ChunkTokens(mesh_rank));
  return bytes;
}

CommBytes PrefillCommBytes(const ModelShape& model, const PlanShape& shape) {
  CommBytes bytes = LargestLayerCommBytes(model, shape);
  for (Traffic traffic : kPrefillTraffics) bytes[traffic] *= model.layers;
  return bytes;
}

}  // namespace meshfill
