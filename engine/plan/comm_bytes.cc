#include "engine/plan/comm_bytes.h"

#include <iterator>
#include <vector>

#include "engine/plan/layer_reach.h"
#include "engine/schedule/schedule.h"

namespace meshfill {
namespace {

// What a rank sends in one layer: its own tokens' Q and KV to every other member of its head group, and every
// other's O. `slice` has a member's heads.
int64_t AllToAllBytes(const ModelShape& slice, int heads, int64_t own_tokens, int64_t own_kv_tokens,
                      int64_t group_tokens) {
  return (heads - 1) * (slice.q_bytes(own_tokens) + slice.kv_bytes(own_kv_tokens)) +
         slice.q_bytes(group_tokens - own_tokens);
}

// How many queries of a Q group have partial outputs that go round.
int64_t ReturningTokens(const LayerReach& reach, int group) {
  const int a = reach.mesh().tile().a;
  int64_t tokens = 0;
  for (int chunk = a * group; chunk < a * (group + 1); ++chunk) {
    if (reach.OReturns(chunk)) tokens += reach.q_layout().ChunkTokens(chunk);
  }
  return tokens;
}

// What a mesh rank's rings carry in one layer: Q#0 … Q#a−2 and O#1 … O#a−1 leave, and b−1 KV chunks, each as
// far as it is seen. `returning_tokens`: of the rank's Q group.
CommBytes RingBytes(const ModelShape& slice, const LayerReach& reach, DType partial_dtype, int rank,
                    int64_t returning_tokens) {
  const Mesh& mesh = reach.mesh();
  const auto [a, b] = mesh.tile();
  int64_t q_tokens = 0, kv_tokens = 0;
  for (int hop = 1; hop < a && reach.LargestQ(hop) > 0; ++hop) {
    const int chunk = mesh.QChunk(rank, hop - 1);
    if (reach.QReaches(chunk, hop)) q_tokens += reach.q_layout().ChunkTokens(chunk);
  }
  const int64_t o_tokens = returning_tokens - (reach.OReturns(rank) ? reach.q_layout().ChunkTokens(rank) : 0);
  for (int number = 0; number < b - 1; ++number) {
    const KvHop hop = KvHopOf(mesh.tile(), mesh.kv_inner(), number);
    if (reach.LargestKv(hop.received) == 0) break;
    kv_tokens += reach.KvReach(mesh.KvChunk(rank, hop.sent), hop.received).slots();
  }
  return {{Traffic::kQ, slice.q_bytes(q_tokens)},
          {Traffic::kKv, slice.kv_bytes(kv_tokens)},
          {Traffic::kO, slice.partial_bytes(o_tokens, partial_dtype)}};
}

// RingBytes of all ranks of a layer whose chunks all ranks see. A rank sends its groups' chunks but one of
// each kind, so that the groups' sums give all ranks' bytes in time O(n). So they do with double rings, by
// the sums of places in inner rings.
class WholeRings {
 public:
  WholeRings(const ModelShape& slice, const LayerReach& reach, DType partial_dtype)
      : slice_(slice),
        reach_(reach),
        partial_dtype_(partial_dtype),
        a_(reach.mesh().tile().a),
        q_group_tokens_(reach.mesh().tile().b, 0),
        kv_group_tokens_(a_, 0),
        kv_place_tokens_(reach.mesh().kv_inner() * a_, 0) {
    for (int rank = 0; rank < reach.mesh().ranks(); ++rank) {
      q_group_tokens_[rank / a_] += reach.q_layout().ChunkTokens(rank);
      kv_group_tokens_[rank % a_] += reach.kv_layout().ChunkTokens(rank);
      if (!kv_place_tokens_.empty()) kv_place_tokens_[PlaceOf(rank)] += reach.kv_layout().ChunkTokens(rank);
    }
  }

  CommBytes Of(int rank) const {
    const Mesh& mesh = reach_.mesh();
    const int64_t q = q_group_tokens_[rank / a_];
    const int64_t last_q = reach_.q_layout().ChunkTokens(mesh.QChunk(rank, a_ - 1));
    const int64_t kv = kv_group_tokens_[rank % a_] + KvTokensSentTwice(rank) - KvTokensNotSent(rank);
    const int64_t own_o = reach_.q_layout().ChunkTokens(rank);
    return {{Traffic::kQ, slice_.q_bytes(q - last_q)},
            {Traffic::kKv, slice_.kv_bytes(kv)},
            {Traffic::kO, slice_.partial_bytes(q - own_o, partial_dtype_)}};
  }

 private:
  // Of a ring, the last chunk. Of a double ring, the last one of each round: those of the place before the
  // rank's own, in all inner rings.
  int64_t KvTokensNotSent(int rank) const {
    const Mesh& mesh = reach_.mesh();
    if (mesh.kv_inner() == 0) {
      return reach_.kv_layout().ChunkTokens(mesh.KvChunk(rank, mesh.tile().b - 1));
    }
    return kv_place_tokens_[PlaceOf(mesh.KvSendTo(rank))];
  }

  // Along both rings of a double ring: the first of each round but the last, those of the rank's own place.
  int64_t KvTokensSentTwice(int rank) const {
    const Mesh& mesh = reach_.mesh();
    if (mesh.kv_inner() == 0) return 0;
    return kv_place_tokens_[PlaceOf(rank)] - reach_.kv_layout().ChunkTokens(mesh.KvOuterSendTo(rank));
  }

  // Place in the inner rings of its KV group, one after the other for all KV groups.
  int PlaceOf(int rank) const { return rank % (reach_.mesh().kv_inner() * a_); }

  const ModelShape& slice_;
  const LayerReach& reach_;
  const DType partial_dtype_;
  const int a_;
  std::vector<int64_t> q_group_tokens_;   // [g]: tokens of mesh ranks a·g … a·g + a−1
  std::vector<int64_t> kv_group_tokens_;  // [g]: tokens of mesh ranks g, g + a, g + 2a …
  std::vector<int64_t> kv_place_tokens_;  // of a double ring; else empty
};

// The all-to-alls of the ranks of a shape.
class AllToAlls {
 public:
  AllToAlls(const ModelShape& slice, const PlanShape& shape)
      : slice_(slice),
        heads_(shape.heads),
        layout_(shape.layout),
        kv_layout_(shape.kv_layout()),
        groups_(shape.layout.Groups(shape.heads)) {}

  int64_t Bytes(int rank) const {
    if (heads_ == 1) return 0;
    return AllToAllBytes(slice_, heads_, layout_.ChunkTokens(rank), kv_layout_.ChunkTokens(rank),
                         groups_.ChunkTokens(rank / heads_));
  }

 private:
  const ModelShape& slice_;
  const int heads_;
  const TokenLayout layout_;
  const TokenLayout kv_layout_;
  const TokenLayout groups_;
};

CommBytes Times(int layers, CommBytes bytes) {
  for (Traffic traffic : kPrefillTraffics) bytes[traffic] *= layers;
  return bytes;
}

}  // namespace

CommBytes LayerCommBytes(const ModelShape& model, const PlanShape& shape, int64_t window, int rank) {
  const ModelShape slice = model.HeadSlice(shape.heads);
  const LayerReach reach(shape, window);
  const int mesh_rank = rank / shape.heads;
  CommBytes bytes = RingBytes(slice, reach, shape.partial_dtype, mesh_rank,
                              ReturningTokens(reach, mesh_rank / shape.tile.a));
  bytes[Traffic::kAllToAll] = AllToAlls(slice, shape).Bytes(rank);
  return bytes;
}

CommBytes RankCommBytes(const ModelShape& model, const PlanShape& shape, int rank) {
  CommBytes bytes;
  model.ForEachWindow([&](int64_t window, int layers) {
    bytes += Times(layers, LayerCommBytes(model, shape, window, rank));
  });
  return bytes;
}

CommBytes PrefillCommBytes(const ModelShape& model, const PlanShape& shape) {
  const ModelShape slice = model.HeadSlice(shape.heads);
  std::vector<CommBytes> rings(shape.ranks() / shape.heads);  // by mesh rank, over all layers
  model.ForEachWindow([&](int64_t window, int layers) {
    const LayerReach reach(shape, window);
    const auto add = [&](const auto& of) {
      for (int rank = 0; rank < std::ssize(rings); ++rank) rings[rank] += Times(layers, of(rank));
    };
    if (reach.sees_all()) {
      const WholeRings whole(slice, reach, shape.partial_dtype);
      add([&](int rank) { return whole.Of(rank); });
    } else {
      const int a = shape.tile.a;
      std::vector<int64_t> returning_tokens(shape.tile.b);
      for (int group = 0; group < shape.tile.b; ++group) {
        returning_tokens[group] = ReturningTokens(reach, group);
      }
      add([&](int rank) {
        return RingBytes(slice, reach, shape.partial_dtype, rank, returning_tokens[rank / a]);
      });
    }
  });
  const AllToAlls all_to_alls(slice, shape);
  CommBytes largest;
  for (int rank = 0; rank < shape.ranks(); ++rank) {
    CommBytes bytes = rings[rank / shape.heads];
    bytes[Traffic::kAllToAll] = model.layers * all_to_alls.Bytes(rank);
    if (bytes.total() > largest.total()) largest = bytes;
  }
  return largest;
}

}  // namespace meshfill
