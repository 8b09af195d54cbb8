#include "engine/plan/comm_bytes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <vector>

#include "engine/plan/layer_reach.h"
#include "tests/engine/layer_kinds.h"
#include "tests/engine/plan/visible_blocks.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/schedule/random_schedule.h"

namespace meshfill {
namespace {

ModelShape Llama(int q_heads, int kv_heads, DType dtype) {
  return {.layers = 4, .q_heads = q_heads, .kv_heads = kv_heads, .head_dim = 64, .dtype = dtype};
}

TEST(LayerCommBytes, OfEqualChunksIsTheFormula) {  // Mesh-Attention, Table 2
  for (int n = 1; n <= 36; ++n) {
    for (DType wire : {DType::kF32, DType::kBf16}) {
      const ModelShape model = Llama(8, 2, DType::kBf16);
      const int64_t chunk = 32;
      const auto layout = TokenLayout::Make(LayoutKind::kStriped, n, chunk * n, 16);
      for (auto [a, b] : TilesOf(n)) {
        const int64_t q_elements = chunk * 8 * 64;
        const int64_t rho = wire == DType::kF32 ? 2 : 1;  // wire bytes over Q's 2
        for (int rank = 0; rank < n; ++rank) {
          const CommBytes bytes = LayerCommBytes(
              model, {.layout = *layout, .tile = {.a = a, .b = b}, .partial_dtype = wire}, 0, rank);
          ASSERT_EQ(bytes[Traffic::kQ], (a - 1) * q_elements * 2);
          ASSERT_EQ(bytes[Traffic::kKv], (b - 1) * q_elements * 2 * 2 / 4);  // (2/g)(b−1), g = 4
          ASSERT_EQ(bytes[Traffic::kO], (a - 1) * (rho * q_elements * 2 + 4 * chunk * 8));
          ASSERT_EQ(bytes[Traffic::kAllToAll], 0);
        }
      }
    }
  }
}

// Heads that member k of a head group of h computes, straight from attention's definition: query head q
// attends KV head q / (q_heads / kv_heads).
std::set<int> QueryHeads(const ModelShape& model, int h, int member) {
  std::set<int> heads;
  for (int head = 0; head < model.q_heads; ++head) {
    if (head / (model.q_heads / h) == member) heads.insert(head);
  }
  return heads;
}

std::set<int> KvHeads(const ModelShape& model, int h, int member) {
  std::set<int> heads;
  for (int head : QueryHeads(model, h, member)) heads.insert(head / (model.q_heads / model.kv_heads));
  return heads;
}

// All that is sent must be what all need: each member of a head group gets its heads of the others' tokens
// and all heads of its own; in its mesh, each rank gets the other Q, KV chunks of its tile, and each of its
// rows' partials leaves it once. Where there is a window: as far as someone sees any of it.
TEST(LayerCommBytes, OfRaggedChunksIsWhatTheTilesNeed) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  int64_t saved = 0;
  for (int i = 0; i < 200; ++i) {
    const ModelShape model = Llama(12, std::array{1, 2, 3, 6, 12}[Draw(random, 0, 4)], DType::kF32);
    const int n = Draw(random, 1, 24);
    std::vector<int> possible;
    for (int h = 1; h <= n; ++h) {
      if (n % h == 0 && model.CanSplitHeads(h)) possible.push_back(h);
    }
    const int h = possible[Draw<size_t>(random, 0, possible.size() - 1)];
    const auto layout = TokenLayout::Make(static_cast<LayoutKind>(Draw(random, 0, 2)), n,
                                          Draw<int64_t>(random, 1, 300), Draw<int64_t>(random, 1, 20));
    const int64_t window = Draw(random, 0, 1) ? 0 : Draw<int64_t>(random, 1, 100);
    const auto mesh_tokens = [&](int mesh_rank) {
      int64_t tokens = 0;
      for (int member = 0; member < h; ++member) tokens += layout->ChunkTokens(mesh_rank * h + member);
      return tokens;
    };
    const auto visible = VisibleBlocksOf({.layout = *layout, .heads = h, .tile = {1, n / h}}, window);
    for (Tile tile : TilesOf(n / h)) {
      const PlanShape shape = {.layout = *layout, .heads = h, .tile = tile, .partial_dtype = DType::kBf16};
      const LayerReach reach(shape, window);
      const Mesh& mesh = reach.mesh();
      // By the seen keys of a rank's KV#v, or of its row Q#u.
      const auto first_key = [&](int mesh_rank, int v) {
        const int chunk = mesh.KvChunk(mesh_rank, v);
        int64_t first = mesh_tokens(chunk);
        for (int u = 0; u < tile.a; ++u) {
          first = std::min(first, visible[mesh.QChunk(mesh_rank, u)][chunk].first_key);
        }
        return first;
      };
      const auto row_sees = [&](int mesh_rank, int u) {
        bool sees = reach.sees_all();
        for (int v = 0; v < tile.b; ++v) {
          sees |= visible[mesh.QChunk(mesh_rank, u)][mesh.KvChunk(mesh_rank, v)].pairs > 0;
        }
        return sees;
      };
      CommBytes sent;
      CommBytes needed;
      for (int rank = 0; rank < n; ++rank) {
        const CommBytes bytes = LayerCommBytes(model, shape, window, rank);
        for (Traffic traffic : kPrefillTraffics) sent[traffic] += bytes[traffic];
        const int64_t q_heads = std::ssize(QueryHeads(model, h, rank % h));
        const int64_t kv_heads = std::ssize(KvHeads(model, h, rank % h));
        // This rank's own chunks, at those who get them: hop by hop the next rank of the ring.
        const int own = rank / h;
        int at = own;
        bool o_begun = false;
        std::vector<bool> q_sees(tile.a + 1, false);
        for (int u = 1; u < tile.a; ++u) q_sees[u] = row_sees(at = mesh.QSendTo(at), u);
        for (int u = 1; u < tile.a; ++u) {
          const bool someone = std::any_of(q_sees.begin() + u, q_sees.end(), [](bool sees) { return sees; });
          o_begun = o_begun || q_sees[u];
          if (someone) needed[Traffic::kQ] += mesh_tokens(own) * q_heads * 64 * 4;
          if (o_begun) needed[Traffic::kO] += mesh_tokens(own) * q_heads * (64 * 2 + 4);
        }
        std::vector<int64_t> first(tile.b + 1, mesh_tokens(own));
        at = own;
        for (int v = 1; v < tile.b; ++v) {
          at = mesh.KvSendTo(at);
          first[v] = first_key(at, v);
        }
        for (int v = 1; v < tile.b; ++v) {
          int64_t keys = mesh_tokens(own) - *std::min_element(first.begin() + v, first.end());
          const bool in_part = layout->kind() == LayoutKind::kContiguous && !reach.sees_all();
          if (reach.sees_all() || (keys > 0 && !in_part)) keys = mesh_tokens(own);
          needed[Traffic::kKv] += keys * kv_heads * 64 * 2 * 4;
          saved += mesh_tokens(own) - keys;
        }
        const int64_t own_tokens = layout->ChunkTokens(rank);
        const int64_t other_tokens = mesh_tokens(rank / h) - own_tokens;
        needed[Traffic::kAllToAll] += other_tokens * (q_heads + 2 * kv_heads) * 64 * 4;  // before the mesh
        needed[Traffic::kAllToAll] += own_tokens * (model.q_heads - q_heads) * 64 * 4;   // after it
      }
      ASSERT_EQ(sent, needed) << "seed " << seed << ": " << layout->DebugString() << ", " << h << " · "
                              << tile.DebugString() << ", window " << window << ", " << model.kv_heads
                              << " KV heads";
    }
  }
  EXPECT_GT(saved, 0);
}

TEST(LayerCommBytes, OfACachedPrefixMoveWithTheKeysAlone) {
  const ModelShape model = Llama(8, 8, DType::kBf16);
  const auto layout = TokenLayout::Make(LayoutKind::kStriped, 4, 4 * 64, 64);
  PlanShape shape = {.layout = *layout, .tile = {2, 2}};
  const CommBytes cold = LayerCommBytes(model, shape, 0, 0);
  shape.cached_tokens = 4 * 64 * 9;
  const CommBytes warm = LayerCommBytes(model, shape, 0, 0);
  EXPECT_EQ(warm[Traffic::kKv], 10 * cold[Traffic::kKv]);
  EXPECT_EQ(warm[Traffic::kQ], cold[Traffic::kQ]);
  EXPECT_EQ(warm[Traffic::kO], cold[Traffic::kO]);
}

// Each chunk goes once to every other rank of its KV group, along whichever ring; which rank sends it where
// is written here from mesh.h's picture.
TEST(LayerCommBytes, OfADoubleRingAreAsManyAsOfARing) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  int doubled = 0;
  for (int i = 0; i < 200; ++i) {
    const Tile tile = {.a = Draw(random, 1, 3), .b = Draw(random, 4, 12)};
    const int kv_inner = DrawKvInner(random, tile);
    if (kv_inner == 0) continue;
    ++doubled;
    const int heads = Draw(random, 1, 2), ranks = heads * tile.ranks();
    const ModelShape model = Llama(8, 4, DType::kBf16);
    const auto layout = TokenLayout::Make(static_cast<LayoutKind>(Draw(random, 0, 2)), ranks,
                                          Draw<int64_t>(random, 1, 500), Draw<int64_t>(random, 1, 20));
    PlanShape shape = {.layout = *layout, .heads = heads, .tile = tile, .kv_inner = kv_inner};
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << shape.DebugString());
    PlanShape ring = shape;
    ring.kv_inner = 0;
    const int64_t window = Draw(random, 0, 1) * Draw<int64_t>(random, 1, 100);  // spares nothing here
    CommBytes sent, of_ring;
    for (int rank = 0; rank < ranks; ++rank) {
      const CommBytes bytes = LayerCommBytes(model, shape, window, rank);
      sent += bytes;
      of_ring += LayerCommBytes(model, ring, 0, rank);
      // Inside its inner ring a rank sends the chunks of all rounds but the last of each, and ahead the first
      // of all rounds but the last.
      const int mesh_rank = rank / heads, place = mesh_rank / tile.a;
      const auto tokens = [&](int round, int hop) {
        const int rings = tile.b / kv_inner;
        const int at = (place / kv_inner + round) % rings * kv_inner + (place % kv_inner + hop) % kv_inner;
        return layout->Groups(heads).ChunkTokens(at * tile.a + mesh_rank % tile.a);
      };
      int64_t kv_tokens = 0;
      for (int round = 0; round < tile.b / kv_inner; ++round) {
        for (int hop = 0; hop < kv_inner - 1; ++hop) kv_tokens += tokens(round, hop);
        if (round < tile.b / kv_inner - 1) kv_tokens += tokens(round, 0);
      }
      ASSERT_EQ(bytes[Traffic::kKv], kv_tokens * (4 / heads) * 64 * 2 * 2);
    }
    ASSERT_EQ(sent, of_ring);
  }
  EXPECT_GT(doubled, 50);
}

// Of ragged chunks the rank that sends most is not the first one.
TEST(PrefillCommBytes, AreThoseOfTheRankThatSendsMost) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200; ++i) {
    const int h = Draw(random, 1, 2), a = Draw(random, 1, 4), b = Draw(random, 1, 6);
    ModelShape model = Llama(8, std::array{1, 2, 4, 8}[Draw(random, 0, 3)], DType::kBf16);
    const auto layout = TokenLayout::Make(static_cast<LayoutKind>(Draw(random, 0, 2)), h * a * b,
                                          Draw<int64_t>(random, 1, 400), Draw<int64_t>(random, 1, 20));
    const PlanShape shape = {.layout = *layout,
                             .heads = h,
                             .tile = {.a = a, .b = b},
                             .kv_inner = DrawKvInner(random, {.a = a, .b = b}),
                             .partial_dtype = DType::kF32,
                             .cached_tokens = Draw<int64_t>(random, 0, 100)};
    if (Draw(random, 0, 1) == 1) {
      SetWindow(model, Draw<int64_t>(random, 1, 100), Draw(random, 1, model.layers));
    }
    int64_t most = 0;
    for (int rank = 0; rank < h * a * b; ++rank) {
      int64_t sent = 0;
      model.ForEachWindow([&](int64_t window, int layers) {
        sent += layers * LayerCommBytes(model, shape, window, rank).total();
      });
      EXPECT_EQ(RankCommBytes(model, shape, rank).total(), sent);
      most = std::max(most, sent);
    }
    ASSERT_EQ(PrefillCommBytes(model, shape).total(), most)
        << "seed " << seed << ": " << layout->DebugString() << ", " << h << " · " << shape.tile.DebugString();
  }
}

}  // namespace
}  // namespace meshfill
