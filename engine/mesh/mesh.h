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

// The rings of a mesh. Along each, chunks go in order.
//
// KV goes round one ring, or round a double ring (LoongTrain, arXiv 2406.18485): the b ranks of a KV group
// form inner rings of `kv_inner` side by side. Chunks go round each inner ring; meanwhile each rank hands the
// first one of this round to its place in the inner ring before, and goes on with the one that comes from the
// ring behind. Of b = 6, kv_inner = 3, what a rank has as KV#0 … KV#5:
//
//     inner ring    0         1                kv_inner = 2    0     1     2
//     place 0       0 1 2     3 4 5            place 0         0 1   2 3   4 5
//     place 1       1 2 0     4 5 3            place 1         1 0   3 2   5 4
//     place 3       3 4 5     0 1 2            place 4         4 5   0 1   2 3
//
// Inner rings inside a node send on its links while the outer one is under way between nodes.
enum class Ring {
  kQ,        // Q chunks, and back along it partial outputs
  kKv,       // KV chunks; of a double ring, inside the inner rings
  kKvOuter,  // KV chunks, from one inner ring to the next
};
inline constexpr int kRings = 3;

// Whether the b ranks of a KV group may form inner rings of `kv_inner`; 0: they form one ring.
inline bool CanSplitKvRing(Tile tile, int kv_inner) {
  return kv_inner == 0 || (kv_inner > 1 && kv_inner < tile.b && tile.b % kv_inner == 0);
}

class Mesh {
 public:
  // Inner rings are of the rising order. CanSplitKvRing has passed.
  explicit Mesh(Tile tile, KvOrder kv_order = KvOrder::kRising, int kv_inner = 0)
      : tile_(tile), kv_order_(kv_order), kv_inner_(kv_inner) {}
  Tile tile() const { return tile_; }
  int kv_inner() const { return kv_inner_; }  // ranks of an inner ring; 0: KV goes round one ring
  int ranks() const { return tile_.ranks(); }

  // Global index of Q#u and O#u, 0 ≤ u < a: a⌊rank/a⌋ + (rank + u) mod a.
  int QChunk(int rank, int u) const { return rank + u - (rank % tile_.a + u < tile_.a ? 0 : tile_.a); }

  // Global index of KV#v, 0 ≤ v < b: (rank + a·v) mod n; falling: (rank − a·v) mod n. Of a double ring: v div
  // kv_inner inner rings on, v mod kv_inner places on in it.
  int KvChunk(int rank, int v) const {
    if (kv_inner_ != 0) return KvChunkOfDoubleRing(rank, v);
    const int places = kv_order_ == KvOrder::kRising || v == 0 ? v : tile_.b - v;
    const int ahead = rank + tile_.a * places;
    return ahead < ranks() ? ahead : ahead - ranks();
  }

  int Owner(int q_chunk, int kv_chunk) const;  // the assignment matrix: who computes the block

  // Chunks flow from `from` to `to`: Recv Q and Send O within the Q group, Recv KV within the KV group.
  int QReceiveFrom(int rank) const { return QChunk(rank, 1 % tile_.a); }
  int QSendTo(int rank) const { return QChunk(rank, (tile_.a - 1) % tile_.a); }
  int KvReceiveFrom(int rank) const {
    if (kv_inner_ == 0) return KvChunk(rank, 1 % tile_.b);
    const bool last = rank / tile_.a % kv_inner_ == kv_inner_ - 1;
    return rank + (last ? 1 - kv_inner_ : 1) * tile_.a;
  }
  int KvSendTo(int rank) const {
    return KvChunk(rank, ((kv_inner_ != 0 ? kv_inner_ : tile_.b) - 1) % tile_.b);
  }
  // Of a double ring alone.
  int KvOuterReceiveFrom(int rank) const {
    const int ahead = rank + kv_inner_ * tile_.a;
    return ahead < ranks() ? ahead : ahead - ranks();
  }
  int KvOuterSendTo(int rank) const { return KvChunk(rank, tile_.b - kv_inner_); }

  bool operator==(const Mesh&) const = default;

 private:
  int KvChunkOfDoubleRing(int rank, int v) const;

  Tile tile_;
  KvOrder kv_order_;
  int kv_inner_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MESH_MESH_H_
