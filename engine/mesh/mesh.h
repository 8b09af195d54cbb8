// The assignment matrix of Mesh-Attention and the neighbours of each rank (its §3.2, §3.4 and Table 1).
//
// n = a·b ranks. Rank i computes the a×b blocks of its Q group's Q chunks with its KV group's KV chunks,
// named by local indices (u, v), 0 ≤ u < a, 0 ≤ v < b; (0, 0) is its own Q–KV block. For n = 9, a = b = 3
// (paper, Figure 1c):
//
//            KV 0 3 6 1 4 7 2 5 8
//     Q 0–2     0 0 0 1 1 1 2 2 2       each entry: the rank that computes the block
//     Q 3–5     3 3 3 4 4 4 5 5 5
//     Q 6–8     6 6 6 7 7 7 8 8 8
#ifndef MESHFILL_ENGINE_MESH_MESH_H_
#define MESHFILL_ENGINE_MESH_MESH_H_

#include <string>
#include <vector>

namespace meshfill {

// Shape of a rank's tile: a rows (Q chunks) × b columns (KV chunks). a = 1 is Ring, b = 1 is pass-Q.
struct Tile {
  int a = 1;
  int b = 1;
  int ranks() const { return a * b; }
  std::string DebugString() const { return std::to_string(a) + "x" + std::to_string(b); }
  bool operator==(const Tile&) const = default;
};

std::vector<Tile> TilesOf(int ranks);  // every a·b = ranks, by rising a

// Which way KV chunks go in their groups. Rising, as in the paper: KV#v is v places further on, so that a
// chunk goes to the ranks before its own first. Falling: KV#v is v places back, and a chunk goes to the ranks
// behind its own first: where these hold the next tokens, it meets all queries that see it, and can stop.
enum class KvOrder { kRising, kFalling };

class Mesh {
 public:
  explicit Mesh(Tile tile, KvOrder kv_order = KvOrder::kRising) : tile_(tile), kv_order_(kv_order) {}
  Tile tile() const { return tile_; }
  int ranks() const { return tile_.ranks(); }

  // Global index of Q#u and O#u, 0 ≤ u < a: a⌊rank/a⌋ + (rank + u) mod a.
  int QChunk(int rank, int u) const { return rank + u - (rank % tile_.a + u < tile_.a ? 0 : tile_.a); }

  // Global index of KV#v, 0 ≤ v < b: (rank + a·v) mod n; falling: (rank − a·v) mod n.
  int KvChunk(int rank, int v) const {
    const int places = kv_order_ == KvOrder::kRising || v == 0 ? v : tile_.b - v;
    const int ahead = rank + tile_.a * places;
    return ahead < ranks() ? ahead : ahead - ranks();
  }

  int Owner(int q_chunk, int kv_chunk) const;  // the assignment matrix: who computes the block

  // Chunks flow from `from` to `to`: Recv Q and Send O within the Q group, Recv KV within the KV group.
  int QReceiveFrom(int rank) const { return QChunk(rank, 1 % tile_.a); }
  int QSendTo(int rank) const { return QChunk(rank, (tile_.a - 1) % tile_.a); }
  int KvReceiveFrom(int rank) const { return KvChunk(rank, 1 % tile_.b); }
  int KvSendTo(int rank) const { return KvChunk(rank, (tile_.b - 1) % tile_.b); }

  bool operator==(const Mesh&) const = default;

 private:
  Tile tile_;
  KvOrder kv_order_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MESH_MESH_H_
