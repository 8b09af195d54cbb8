#include "engine/mesh/mesh.h"

#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace meshfill {
namespace {

TEST(Mesh, AssignsAsThePaperDraws) {  // Figure 1 (c)
  const Mesh mesh(Tile{.a = 3, .b = 3});
  const int kv_order[] = {0, 3, 6, 1, 4, 7, 2, 5, 8};
  const int owners[3][9] = {
      {0, 0, 0, 1, 1, 1, 2, 2, 2}, {3, 3, 3, 4, 4, 4, 5, 5, 5}, {6, 6, 6, 7, 7, 7, 8, 8, 8}};
  for (int q = 0; q < 9; ++q) {
    for (int column = 0; column < 9; ++column) {
      EXPECT_EQ(mesh.Owner(q, kv_order[column]), owners[q / 3][column])
          << "Q " << q << ", KV " << kv_order[column];
    }
  }
}

// Table 1, and Figures 3 and 4: rank 4 of 15 as 3×5.
TEST(Mesh, MapsLocalToGlobalIndicesAsThePapersTable1) {
  const Mesh mesh(Tile{.a = 3, .b = 5});
  for (int i = 0; i < 15; ++i) {
    for (int u = 0; u < 3; ++u) EXPECT_EQ(mesh.QChunk(i, u), 3 * (i / 3) + (i + u) % 3);
    for (int u = 0; u < 5; ++u) EXPECT_EQ(mesh.KvChunk(i, u), (i + 3 * u) % 15);
  }
  const int q_chunks[] = {4, 5, 3}, kv_chunks[] = {4, 7, 10, 13, 1};
  for (int u = 0; u < 3; ++u) EXPECT_EQ(mesh.QChunk(4, u), q_chunks[u]);
  for (int v = 0; v < 5; ++v) EXPECT_EQ(mesh.KvChunk(4, v), kv_chunks[v]);
  EXPECT_EQ(mesh.QReceiveFrom(4), 5);
  EXPECT_EQ(mesh.QSendTo(4), 3);
  EXPECT_EQ(mesh.KvReceiveFrom(4), 7);
  EXPECT_EQ(mesh.KvSendTo(4), 1);
}

// Figure 7: 16 tokens in 4 striped chunks as 2×2. KV 1 and KV 2 are swapped, and of the 136 pairs that the
// causal mask leaves, each rank computes a quarter, but for the few on the diagonals of its blocks.
TEST(Mesh, BalancesTheCausalMaskOfFigure7) {
  const Mesh mesh(Tile{.a = 2, .b = 2});
  const int kv_order[] = {0, 2, 1, 3};
  const int owners[2][4] = {{0, 0, 1, 1}, {2, 2, 3, 3}};
  for (int q = 0; q < 4; ++q) {
    for (int column = 0; column < 4; ++column) {
      EXPECT_EQ(mesh.Owner(q, kv_order[column]), owners[q / 2][column]);
    }
  }
  std::vector<int> pairs(4, 0);
  for (int query = 0; query < 16; ++query) {
    for (int key = 0; key <= query; ++key) ++pairs[mesh.Owner(query % 4, key % 4)];
  }
  // A block has 10 pairs where its queries may see keys of their own stripe, else 6.
  EXPECT_EQ(pairs, (std::vector<int>{10 + 10 + 6 + 6, 6 + 6 + 10 + 6, 10 * 4, 10 + 10 + 10 + 6}));
}

// The picture of mesh.h.
TEST(Mesh, HandsKvRoundADoubleRing) {
  const auto chunks = [](int rank, int kv_inner) {
    const Mesh mesh(Tile{.a = 1, .b = 6}, KvOrder::kRising, kv_inner);
    std::vector<int> all;
    for (int v = 0; v < 6; ++v) all.push_back(mesh.KvChunk(rank, v));
    return all;
  };
  EXPECT_EQ(chunks(0, 3), (std::vector<int>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(chunks(1, 3), (std::vector<int>{1, 2, 0, 4, 5, 3}));
  EXPECT_EQ(chunks(3, 3), (std::vector<int>{3, 4, 5, 0, 1, 2}));
  EXPECT_EQ(chunks(1, 2), (std::vector<int>{1, 0, 3, 2, 5, 4}));
  EXPECT_EQ(chunks(4, 2), (std::vector<int>{4, 5, 0, 1, 2, 3}));
}

// What a rank has as KV#v comes from who has it one place of the inner ring, or one inner ring, further back.
TEST(Mesh, NeighboursOfADoubleRingHaveTheNextChunk) {
  for (int n = 4; n <= 64; ++n) {
    for (Tile tile : TilesOf(n)) {
      for (int kv_inner = 2; kv_inner < tile.b; ++kv_inner) {
        if (!CanSplitKvRing(tile, kv_inner)) continue;
        const Mesh mesh(tile, KvOrder::kRising, kv_inner);
        for (int rank = 0; rank < n; ++rank) {
          std::set<int> chunks;
          for (int v = 0; v < tile.b; ++v) {
            const int chunk = mesh.KvChunk(rank, v);
            chunks.insert(chunk);
            ASSERT_EQ(chunk % tile.a, rank % tile.a);
            if ((v + 1) % kv_inner != 0) {
              ASSERT_EQ(mesh.KvChunk(rank, v + 1), mesh.KvChunk(mesh.KvReceiveFrom(rank), v));
            }
            if (v + kv_inner < tile.b) {
              ASSERT_EQ(mesh.KvChunk(rank, v + kv_inner), mesh.KvChunk(mesh.KvOuterReceiveFrom(rank), v));
            }
          }
          ASSERT_EQ(std::ssize(chunks), tile.b);
          ASSERT_EQ(mesh.KvChunk(rank, 0), rank);
          ASSERT_EQ(mesh.KvReceiveFrom(mesh.KvSendTo(rank)), rank);
          ASSERT_EQ(mesh.KvOuterReceiveFrom(mesh.KvOuterSendTo(rank)), rank);
          ASSERT_NE(mesh.KvOuterSendTo(rank), mesh.KvSendTo(rank));
        }
      }
    }
  }
}

TEST(Mesh, TilesCoverTheMatrixAndStartWithTheLocalBlock) {
  for (int n = 1; n <= 64; ++n) {
    for (Tile tile : TilesOf(n)) {
      SCOPED_TRACE(tile.DebugString());
      const Mesh mesh(tile);
      std::set<std::pair<int, int>> computed;
      for (int rank = 0; rank < n; ++rank) {
        ASSERT_EQ(mesh.QChunk(rank, 0), rank);
        ASSERT_EQ(mesh.KvChunk(rank, 0), rank);
        for (int u = 0; u < tile.a; ++u) {
          for (int v = 0; v < tile.b; ++v) {
            const int q = mesh.QChunk(rank, u);
            const int kv = mesh.KvChunk(rank, v);
            ASSERT_EQ(mesh.Owner(q, kv), rank);
            ASSERT_TRUE(computed.emplace(q, kv).second) << "block (" << q << ", " << kv << ") has two owners";
          }
        }
      }
      ASSERT_EQ(computed.size(), static_cast<size_t>(n) * n);
    }
  }
}

TEST(Mesh, GroupsAreThePapers) {  // §3.2: {a⌊i/a⌋ + x} and {i mod a + a·x}
  for (int n = 1; n <= 64; ++n) {
    for (Tile tile : TilesOf(n)) {
      SCOPED_TRACE(tile.DebugString());
      const Mesh mesh(tile);
      for (int rank = 0; rank < n; ++rank) {
        std::set<int> q_group, q_chunks, kv_group, kv_chunks;
        for (int x = 0; x < tile.a; ++x) q_group.insert(tile.a * (rank / tile.a) + x);
        for (int u = 0; u < tile.a; ++u) q_chunks.insert(mesh.QChunk(rank, u));
        for (int x = 0; x < tile.b; ++x) kv_group.insert(rank % tile.a + tile.a * x);
        for (int v = 0; v < tile.b; ++v) kv_chunks.insert(mesh.KvChunk(rank, v));
        ASSERT_EQ(q_chunks, q_group);
        ASSERT_EQ(kv_chunks, kv_group);
      }
    }
  }
}

TEST(Mesh, NeighboursAgree) {
  for (int n = 1; n <= 64; ++n) {
    for (Tile tile : TilesOf(n)) {
      SCOPED_TRACE(tile.DebugString());
      for (const KvOrder order : {KvOrder::kRising, KvOrder::kFalling}) {
        const Mesh mesh(tile, order);
        for (int rank = 0; rank < n; ++rank) {
          ASSERT_EQ(mesh.KvChunk(rank, 1 % tile.b),
                    (rank + (order == KvOrder::kRising ? tile.a : n - tile.a)) % n);
          ASSERT_EQ(mesh.QSendTo(mesh.QReceiveFrom(rank)), rank);
          ASSERT_EQ(mesh.KvSendTo(mesh.KvReceiveFrom(rank)), rank);
          // What a rank receives is what its neighbour held one index earlier.
          for (int u = 0; u + 1 < tile.a; ++u) {
            ASSERT_EQ(mesh.QChunk(rank, u + 1), mesh.QChunk(mesh.QReceiveFrom(rank), u));
          }
          for (int v = 0; v + 1 < tile.b; ++v) {
            ASSERT_EQ(mesh.KvChunk(rank, v + 1), mesh.KvChunk(mesh.KvReceiveFrom(rank), v));
          }
        }
      }
    }
  }
}

TEST(TilesOf, ListsEveryFactorisation) {
  const std::vector<Tile> expected = {{1, 12}, {2, 6}, {3, 4}, {4, 3}, {6, 2}, {12, 1}};
  EXPECT_EQ(TilesOf(12), expected);
  EXPECT_EQ(TilesOf(7).size(), 2u);
  EXPECT_EQ(TilesOf(1).size(), 1u);
}

}  // namespace
}  // namespace meshfill
