#include "engine/plan/comm_bytes.h"

#include <gtest/gtest.h>

#include <array>
#include <set>
#include <vector>

#include "tests/engine/random_seed.h"

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
          const CommBytes bytes = LayerCommBytes(model, *layout, 1, {.a = a, .b = b}, wire, rank);
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

// All that is sent must be what all receive: each member of a head group gets its heads of the others' tokens
// and all heads of its own; in its mesh, each rank gets the other Q, KV chunks of its tile, and each of its
// rows' partials leaves it once.
TEST(LayerCommBytes, OfRaggedChunksIsWhatTheTilesNeed) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200; ++i) {
    const ModelShape model = Llama(12, std::array{1, 2, 3, 6, 12}[Draw(random, 0, 4)], DType::kF32);
    const int n = Draw(random, 1, 24);
    std::vector<int> possible;
    for (int h = 1; h <= n; ++h) {
      if (n % h == 0 && model.CanSplitHeads(h)) possible.push_back(h);
    }
    const int h = possible[Draw<size_t>(random, 0, possible.size() - 1)];
    const auto layout = TokenLayout::Make(static_cast<LayoutKind>(Draw(random, 0, 2)), n,
                                          Draw<int64_t>(random, 1, 400), Draw<int64_t>(random, 1, 20));
    const auto mesh_tokens = [&](int mesh_rank) {
      int64_t tokens = 0;
      for (int member = 0; member < h; ++member) tokens += layout->ChunkTokens(mesh_rank * h + member);
      return tokens;
    };
    for (Tile tile : TilesOf(n / h)) {
      CommBytes sent;
      CommBytes needed;
      const Mesh mesh(tile);
      for (int rank = 0; rank < n; ++rank) {
        const CommBytes bytes = LayerCommBytes(model, *layout, h, tile, DType::kBf16, rank);
        for (Traffic traffic : kPrefillTraffics) sent[traffic] += bytes[traffic];
        const int64_t q_heads = std::ssize(QueryHeads(model, h, rank % h));
        const int64_t kv_heads = std::ssize(KvHeads(model, h, rank % h));
        for (int u = 1; u < tile.a; ++u) {
          const int64_t tokens = mesh_tokens(mesh.QChunk(rank / h, u));
          needed[Traffic::kQ] += tokens * q_heads * 64 * 4;
          needed[Traffic::kO] += tokens * q_heads * (64 * 2 + 4);
        }
        for (int v = 1; v < tile.b; ++v) {
          needed[Traffic::kKv] += mesh_tokens(mesh.KvChunk(rank / h, v)) * kv_heads * 64 * 2 * 4;
        }
        const int64_t own_tokens = layout->ChunkTokens(rank);
        const int64_t other_tokens = mesh_tokens(rank / h) - own_tokens;
        needed[Traffic::kAllToAll] += other_tokens * (q_heads + 2 * kv_heads) * 64 * 4;  // before the mesh
        needed[Traffic::kAllToAll] += own_tokens * (model.q_heads - q_heads) * 64 * 4;   // after it
      }
      ASSERT_EQ(sent, needed) << "seed " << seed << ": " << layout->DebugString() << ", " << h << " · "
                              << tile.DebugString() << ", " << model.kv_heads << " KV heads";
    }
  }
}

TEST(LayerCommBytes, OfACachedPrefixMoveWithTheKeysAlone) {
  const ModelShape model = Llama(8, 8, DType::kBf16);
  const auto layout = TokenLayout::Make(LayoutKind::kStriped, 4, 4 * 64, 64);
  const CommBytes cold = LayerCommBytes(model, *layout, 1, {2, 2}, DType::kF32, 0);
  const CommBytes warm = LayerCommBytes(model, *layout, 1, {2, 2}, DType::kF32, 0, 4 * 64 * 9);
  EXPECT_EQ(warm[Traffic::kKv], 10 * cold[Traffic::kKv]);
  EXPECT_EQ(warm[Traffic::kQ], cold[Traffic::kQ]);
  EXPECT_EQ(warm[Traffic::kO], cold[Traffic::kO]);
}

// Of ragged chunks the rank that sends most is not the first one.
TEST(PrefillCommBytes, AreThoseOfTheRankThatSendsMost) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200; ++i) {
    const int h = Draw(random, 1, 2), a = Draw(random, 1, 4), b = Draw(random, 1, 4);
    const ModelShape model = Llama(8, std::array{1, 2, 4, 8}[Draw(random, 0, 3)], DType::kBf16);
    const auto layout = TokenLayout::Make(static_cast<LayoutKind>(Draw(random, 0, 2)), h * a * b,
                                          Draw<int64_t>(random, 1, 400), Draw<int64_t>(random, 1, 20));
    const PlanShape shape = {.layout = *layout,
                             .heads = h,
                             .tile = {.a = a, .b = b},
                             .partial_dtype = DType::kF32,
                             .cached_tokens = Draw<int64_t>(random, 0, 100)};
    int64_t most = 0;
    for (int rank = 0; rank < h * a * b; ++rank) {
      const CommBytes sent =
          LayerCommBytes(model, *layout, h, shape.tile, DType::kF32, rank, shape.cached_tokens);
      most = std::max(most, sent.total());
    }
    ASSERT_EQ(PrefillCommBytes(model, shape).total(), model.layers * most)
        << "seed " << seed << ": " << layout->DebugString() << ", " << h << " · " << shape.tile.DebugString();
  }
}

}  // namespace
}  // namespace meshfill
