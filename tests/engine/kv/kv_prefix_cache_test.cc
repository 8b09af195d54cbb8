// Random histories of a cache beside its definition: the longest prefix of whole blocks that any prompt of
// the same tenant, salt and size of blocks has left, and what it holds by counting.
#include "engine/kv/kv_prefix_cache.h"

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "engine/kv/block_hash.h"
#include "engine/kv/kv_prompt.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

const KvShape kShape = {.layers = 1, .kv_heads = 1, .head_dim = 2, .dtype = DType::kF32};

KvBlockNames NamesOf(const std::vector<uint32_t>& tokens, int block_tokens, const std::string& tenant,
                     const std::string& salt, bool long_rope = false) {
  BlockHasher hasher(block_tokens, salt);
  hasher.Append(tokens);
  return {.tenant = tenant, .block_tokens = block_tokens, .hashes = hasher.hashes(), .long_rope = long_rope};
}

// What a run behind `before` would leave.
KvSlabs Computed(int64_t tokens, KvSlabs before, const std::shared_ptr<KvBytes>& sum) {
  const int64_t first = before.tokens();
  const int64_t bytes = kShape.LayerBytes(tokens - first);
  sum->Add(bytes);
  auto run = std::make_shared<KvRunSlabs>(
      KvRunSlabs{.layout = TokenLayout::Make(LayoutKind::kStriped, 1, tokens - first, 4).value(),
                 .slabs = {},
                 .charges = {std::make_shared<KvCharge>(sum, bytes)}});
  before.shape = kShape;
  before.pieces.push_back({.first_token = first, .tokens = tokens - first, .run = std::move(run)});
  return before;
}

int64_t TokensInCommon(const std::vector<uint32_t>& left, const std::vector<uint32_t>& right) {
  const auto most = std::min(left.size(), right.size());
  return std::mismatch(left.begin(), left.begin() + static_cast<std::ptrdiff_t>(most), right.begin()).first -
         left.begin();
}

TEST(KvPrefixCacheTest, FindsTheLongestPrefixThatIsThere) {
  std::mt19937_64 random(TestSeed());
  struct Prompt {
    std::vector<uint32_t> tokens;
    std::string tenant, salt;
    int block_tokens;
    bool long_rope;
  };
  for (int round = 0; round < 30; ++round) {
    const int sizes[] = {Draw<int>(random, 1, 5), Draw<int>(random, 1, 5)};
    const auto sum = std::make_shared<KvBytes>();
    KvPrefixCache cache;
    std::vector<Prompt> entered;
    for (int step = 0; step < 60; ++step) {
      Prompt prompt = {.tokens = {},
                       .tenant = Draw<int>(random, 0, 2) == 0 ? "a" : "b",
                       .salt = Draw<int>(random, 0, 2) == 0 ? "" : "salt",
                       .block_tokens = sizes[Draw<int>(random, 0, 3) / 3],
                       .long_rope = Draw<int>(random, 0, 2) == 0};
      const int block_tokens = prompt.block_tokens;
      if (!entered.empty() && Draw<int>(random, 0, 3) > 0) {  // as one before it, for a while
        const Prompt& other = entered[Draw<size_t>(random, 0, entered.size() - 1)];
        prompt.tokens.assign(
            other.tokens.begin(),
            other.tokens.begin() + Draw<int>(random, 0, static_cast<int>(other.tokens.size())));
      }
      for (int more = Draw<int>(random, 1, 12); more > 0; --more)
        prompt.tokens.push_back(Draw<uint32_t>(random, 0, 2));
      const KvBlockNames names =
          NamesOf(prompt.tokens, block_tokens, prompt.tenant, prompt.salt, prompt.long_rope);
      int64_t expected = 0;
      for (const Prompt& other : entered) {
        if (other.tenant != prompt.tenant || other.salt != prompt.salt ||
            other.block_tokens != block_tokens || other.long_rope != prompt.long_rope) {
          continue;
        }
        expected =
            std::max(expected, TokensInCommon(other.tokens, prompt.tokens) / block_tokens * block_tokens);
      }
      EXPECT_EQ(cache.Look(names).tokens(), expected);
      const KvSlabs found = cache.Find(names);
      ASSERT_EQ(found.tokens(), expected);
      // A run may follow fewer of them.
      const int64_t used = Draw<int64_t>(random, 0, expected / block_tokens) * block_tokens;
      const auto tokens = std::ssize(prompt.tokens);
      if (used == tokens) continue;
      cache.Enter(names, Computed(tokens, FirstTokens(found, used), sum));
      entered.push_back(std::move(prompt));
    }
    EXPECT_EQ(cache.bytes(), cache.EvictableBytes());
    EXPECT_EQ(cache.bytes(), sum->charged());
    while (!cache.Evict().empty()) EXPECT_EQ(cache.bytes(), sum->charged());
    EXPECT_EQ(sum->charged(), 0);
  }
}

TEST(KvPrefixCacheTest, EvictsWhatWasNotUsedForLongestAndFreesSomething) {
  const auto sum = std::make_shared<KvBytes>();
  KvPrefixCache cache;
  const auto enter = [&](const std::vector<uint32_t>& tokens) {
    const KvBlockNames names = NamesOf(tokens, 2, "", "");
    cache.Enter(names, Computed(std::ssize(tokens), cache.Find(names), sum));
  };
  const auto length = [&](const std::vector<uint32_t>& tokens) {
    return cache.Look(NamesOf(tokens, 2, "", "")).tokens();
  };
  enter({1, 1, 1, 1});
  enter({1, 1, 1, 1, 5, 5});  // behind the first one
  enter({2, 2, 2});
  EXPECT_EQ(cache.bytes(), kShape.LayerBytes(4 + 2 + 3));
  EXPECT_EQ(cache.EvictableBytes(), cache.bytes());

  cache.Evict();  // the first one is the oldest, but the second one holds what it has
  EXPECT_EQ(length({1, 1, 1, 1, 5, 5}), 4);
  EXPECT_EQ(length({2, 2, 2}), 2);
  const KvSlabs reader = cache.Find(NamesOf({1, 1, 1, 1}, 2, "", ""));
  EXPECT_EQ(cache.EvictableBytes(), kShape.LayerBytes(3));
  cache.Evict();
  EXPECT_EQ(length({2, 2, 2}), 0);
  EXPECT_TRUE(cache.Evict().empty());  // what is left is being read
  EXPECT_EQ(length({1, 1, 1, 1}), 4);
  EXPECT_EQ(reader.tokens(), 4);
  EXPECT_EQ(sum->charged(), kShape.LayerBytes(4));
}

// What two prompts begin with is a use of that which was used last: the other one goes first.
TEST(KvPrefixCacheTest, OfEqualPrefixesTheLastUsedIsUsed) {
  const std::vector<uint32_t> common = {1, 1}, first = {1, 1, 2, 2}, second = {1, 1, 3, 3};
  for (const bool use_first : {false, true}) {
    SCOPED_TRACE(use_first);
    const auto sum = std::make_shared<KvBytes>();
    KvPrefixCache cache;
    const auto find = [&](const std::vector<uint32_t>& tokens) {
      return cache.Find(NamesOf(tokens, 2, "", "")).tokens();
    };
    for (const auto& tokens : {first, second}) cache.Enter(NamesOf(tokens, 2, "", ""), Computed(4, {}, sum));
    if (use_first) {
      EXPECT_EQ(find(first), 4);
    }
    EXPECT_EQ(find(common), 2);
    cache.Evict();
    EXPECT_EQ(find(first), use_first ? 4 : 2);
    EXPECT_EQ(find(second), use_first ? 2 : 4);
    EXPECT_EQ(cache.bytes(), kShape.LayerBytes(4));
    cache.Evict();
    EXPECT_EQ(cache.bytes(), 0);
  }
}

TEST(KvPrefixCacheTest, APromptThatIsThereAlreadyIsNotEnteredAgain) {
  const auto sum = std::make_shared<KvBytes>();
  KvPrefixCache cache;
  const KvBlockNames names = NamesOf({1, 2, 3, 4, 5}, 2, "", "");
  for (int time = 0; time < 3; ++time) cache.Enter(names, Computed(5, {}, sum));
  EXPECT_EQ(sum->charged(), kShape.LayerBytes(5));
  cache.Enter(NamesOf({1}, 2, "", ""), Computed(1, {}, sum));  // no whole block
  EXPECT_EQ(sum->charged(), kShape.LayerBytes(5));

  const KvBlockNames later = NamesOf({7, 7}, 2, "", "");
  cache.Enter(later, Computed(2, {}, sum));
  cache.Enter(names, Computed(5, {}, sum));  // a use of what is there
  cache.Evict();
  EXPECT_EQ(cache.Look(names).tokens(), 4);
  EXPECT_EQ(cache.Look(later).tokens(), 0);
}

// Two prompts behind one run, of which the second one holds more: all of that is found.
TEST(KvPrefixCacheTest, ALongerPieceOfARunIsKnownWhole) {
  const auto sum = std::make_shared<KvBytes>();
  KvPrefixCache cache;
  const KvSlabs run = Computed(6, {}, sum);  // tokens of 1, which nobody entered
  cache.Enter(NamesOf({1, 1, 2, 2}, 2, "", ""), Computed(4, FirstTokens(run, 2), sum));
  const KvBlockNames longer = NamesOf({1, 1, 1, 1, 3, 3}, 2, "", "");
  cache.Enter(longer, Computed(6, FirstTokens(run, 4), sum));
  EXPECT_EQ(cache.Look(longer).tokens(), 6);
}

TEST(KvPrefixCacheTest, EntriesWithALostRunGo) {
  const auto sum = std::make_shared<KvBytes>();
  KvPrefixCache cache;
  const KvSlabs first = Computed(4, {}, sum);
  const KvSlabs behind = Computed(6, first, sum);
  const KvBlockNames names = NamesOf({1, 1, 1, 1, 5, 5}, 2, "", "");
  cache.Enter(NamesOf({1, 1, 1, 1}, 2, "", ""), first);
  cache.Enter(names, behind);
  cache.Enter(NamesOf({2, 2}, 2, "", ""), Computed(2, {}, sum));
  EXPECT_EQ(cache.EvictableBytes(), kShape.LayerBytes(2));  // the others are held here
  const KvRunSlabs* const lost = behind.pieces.back().run.get();
  EXPECT_EQ(cache.EraseIf([&](const KvRunSlabs& run) { return &run == lost; }).size(), 2u);
  EXPECT_EQ(cache.Look(names).tokens(), 4);
  EXPECT_EQ(cache.EraseIf([](const KvRunSlabs&) { return true; }).size(), 2u);
  EXPECT_EQ(cache.Look(names).tokens(), 0);
  EXPECT_EQ(cache.bytes(), 0);
}

}  // namespace
}  // namespace meshfill
