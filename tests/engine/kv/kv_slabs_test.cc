#include "engine/kv/kv_slabs.h"

#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/kv/kv_values.h"

namespace meshfill {
namespace {

TEST(KvSlabsTest, AnyRangeOfAnyLayoutIsCopiedAsDefined) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 400; ++round) {
    const KvShape shape = DrawKvShape(random);
    const int64_t tokens = Draw<int>(random, 1, 200);
    const TokenLayout layout = DrawTokenLayout(random, tokens);
    KvPrompt prompt(shape, tokens);
    KeepAllValues(prompt, layout);

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
    CopyKv(*prompt.Layer(layer), layer, range, to, page_tokens, copied.data());
    EXPECT_EQ(std::vector<std::byte>(copied.end() - 64, copied.end()),
              std::vector<std::byte>(64, std::byte{0xee}));
    copied.resize(count);
    ASSERT_EQ(copied, KvBytes(shape, layer, range, to, page_tokens))
        << "round " << round << ", " << layout.DebugString() << ", tokens " << range.first_token << " + "
        << range.tokens << ", heads " << range.first_head << " + " << range.heads << ", layout "
        << static_cast<int>(to) << ", pages of " << page_tokens;
  }
}

}  // namespace
}  // namespace meshfill
