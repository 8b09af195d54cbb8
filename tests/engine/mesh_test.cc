#include "engine/mesh.h"

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
      const Mesh mesh(tile);
      for (int rank = 0; rank < n; ++rank) {
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

TEST(TilesOf, ListsEveryFactorisation) {
  const std::vector<Tile> expected = {{1, 12}, {2, 6}, {3, 4}, {4, 3}, {6, 2}, {12, 1}};
  EXPECT_EQ(TilesOf(12), expected);
  EXPECT_EQ(TilesOf(7).size(), 2u);
  EXPECT_EQ(TilesOf(1).size(), 1u);
}

}  // namespace
}  // namespace meshfill
