#include "engine/kv/kv_slabs.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/kv/kv_values.h"

namespace meshfill {
namespace {

// A prompt computed in runs of any lengths and layouts, some of whose last tokens the next one computes
// again.
std::shared_ptr<const KvSlabs> InRuns(const KvShape& shape, int64_t tokens, std::mt19937_64& random,
                                      std::string& what) {
  std::shared_ptr<const KvSlabs> slabs;
  while (slabs == nullptr || slabs->tokens() < tokens) {
    const int64_t first = slabs == nullptr ? 0 : slabs->tokens();
    const TokenLayout layout = DrawTokenLayout(random, Draw<int64_t>(random, 1, tokens - first));
    KvPrompt prompt(shape, first + layout.tokens());
    KeepAllValues(prompt, layout, slabs);
    what += " " + layout.DebugString();
    slabs = prompt.Layer(0);
    const int64_t most = slabs->tokens();
    if (most == tokens || Draw<int>(random, 0, 1) == 0) continue;
    slabs = std::make_shared<const KvSlabs>(FirstTokens(*slabs, Draw<int64_t>(random, 1, most)));
  }
  return slabs;
}

TEST(KvSlabsTest, AnyRangeOfAnyRunsIsCopiedAsDefined) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 400; ++round) {
    const KvShape shape = DrawKvShape(random);
    const int64_t tokens = Draw<int>(random, 1, 200);
    std::string runs;
    const std::shared_ptr<const KvSlabs> slabs = InRuns(shape, tokens, random, runs);
    ASSERT_EQ(slabs->tokens(), tokens);

    KvRange range;
    range.first_token = Draw<int64_t>(random, 0, tokens - 1);
    range.tokens = Draw<int64_t>(random, 1, tokens - range.first_token);
    range.first_head = Draw<int>(random, 0, shape.kv_heads - 1);
    range.heads = Draw<int>(random, 1, shape.kv_heads - range.first_head);
    const int layer = Draw<int>(random, 0, shape.layers - 1);
    const auto to = static_cast<KvFormat>(Draw<int>(random, 0, 2));
    const int64_t page_tokens = Draw<int>(random, 1, 40);

    // Poisoned, with a guard behind it.
    const int64_t count = KvRangeBytes(shape, range, to, page_tokens);
    std::vector<std::byte> copied(count + 64, std::byte{0xee});
    ASSERT_TRUE(CopyKv(*slabs, layer, range, to, page_tokens, copied.data()).ok());
    EXPECT_EQ(std::vector<std::byte>(copied.end() - 64, copied.end()),
              std::vector<std::byte>(64, std::byte{0xee}));
    copied.resize(count);
    ASSERT_EQ(copied, KvBytes(shape, layer, range, to, page_tokens))
        << "round " << round << "," << runs << ", tokens " << range.first_token << " + " << range.tokens
        << ", heads " << range.first_head << " + " << range.heads << ", layout " << static_cast<int>(to)
        << ", pages of " << page_tokens;
  }
}

// The rows of a chunk are found wherever the runs put them, as many at once as lie in one piece.
TEST(KvSlabsTest, RowsOfAChunkAreThoseOfItsTokens) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 200; ++round) {
    const KvShape shape = DrawKvShape(random);
    const int64_t tokens = Draw<int>(random, 1, 200);
    std::string runs;
    const std::shared_ptr<const KvSlabs> slabs = InRuns(shape, tokens, random, runs);
    const TokenLayout layout = DrawTokenLayout(random, tokens);
    const int layer = Draw<int>(random, 0, shape.layers - 1);
    const int64_t row_bytes = shape.kv_heads * shape.head_bytes();
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      for (int64_t slot = 0; slot < layout.ChunkTokens(rank);) {
        const int64_t most = Draw<int64_t>(random, 1, layout.ChunkTokens(rank) - slot);
        const KvRows rows = KvRowsOf(*slabs, layer, layout, rank, slot, most);
        ASSERT_GE(rows.slots, 1);
        ASSERT_LE(rows.slots, most);
        for (int64_t row = 0; row < rows.slots; ++row) {
          const KvRange token = {
              .first_token = layout.TokenAt(rank, slot + row), .tokens = 1, .heads = shape.kv_heads};
          const std::vector<std::byte> expected = KvBytes(shape, layer, token, KvFormat::kTokens, 1);
          const std::byte* const k = rows.slab->Row(0, rows.first_slot + row);
          const std::byte* const v = rows.slab->Row(1, rows.first_slot + row);
          ASSERT_EQ(std::memcmp(k, expected.data(), row_bytes), 0) << runs;
          ASSERT_EQ(std::memcmp(v, expected.data() + row_bytes, row_bytes), 0) << runs;
        }
        slot += rows.slots;
      }
    }
  }
}

TEST(KvSlabsTest, AChunkThatWasDealtAlikeIsOnePiece) {
  const KvShape shape = {.layers = 1, .kv_heads = 1, .head_dim = 4};
  const auto striped = [](int64_t tokens) {
    return TokenLayout::Make(LayoutKind::kStriped, 3, tokens, 4).value();
  };
  KvPrompt prompt(shape, 100);
  KeepAllValues(prompt, striped(100));
  const int64_t chunk = striped(300).ChunkTokens(1);
  EXPECT_EQ(KvRowsOf(*prompt.Layer(0), 0, striped(300), 1, 0, striped(96).ChunkTokens(1)).slots, 32);
  EXPECT_EQ(KvRowsOf(*prompt.Layer(0), 0, striped(300), 1, 5, 20).slots, 20);
  EXPECT_GT(chunk, 32);
}

}  // namespace
}  // namespace meshfill
