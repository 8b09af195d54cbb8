#include "engine/mesh/mesh.h"

namespace meshfill {

std::vector<Tile> TilesOf(int ranks) {
  std::vector<Tile> tiles;
  for (int a = 1; a <= ranks; ++a) {
    if (ranks % a == 0) tiles.push_back({.a = a, .b = ranks / a});
  }
  return tiles;
}

// The Q chunk names the Q group, the KV chunk the place in it: Q groups are a consecutive ranks, KV groups
// residues modulo a.
int Mesh::Owner(int q_chunk, int kv_chunk) const {
  return tile_.a * (q_chunk / tile_.a) + kv_chunk % tile_.a;
}

int Mesh::KvChunkOfDoubleRing(int rank, int v) const {
  const int place = rank / tile_.a;  // in its KV group
  const int ring = place / kv_inner_ + v / kv_inner_, in_ring = place % kv_inner_ + v % kv_inner_;
  const int place_of_chunk = ring % (tile_.b / kv_inner_) * kv_inner_ + in_ring % kv_inner_;
  return place_of_chunk * tile_.a + rank % tile_.a;
}

}  // namespace meshfill
