#include "engine/mesh/layout.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

constexpr LayoutKind kKinds[] = {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous};

// Deals stripe by stripe, as the pictures in layout.h show it.
std::vector<std::vector<int64_t>> Deal(LayoutKind kind, int ranks, int64_t tokens, int64_t stripe) {
  const int64_t there_and_back = 2 * int64_t{ranks};
  if (kind == LayoutKind::kZigzag) stripe = (tokens + there_and_back - 1) / there_and_back;
  if (kind == LayoutKind::kContiguous) stripe = (tokens + ranks - 1) / ranks;
  std::vector<std::vector<int64_t>> chunks(ranks);
  int rank = 0;
  int direction = 1;
  for (int64_t begin = 0; begin < tokens; begin += stripe) {
    for (int64_t token = begin; token < std::min(tokens, begin + stripe); ++token)
      chunks[rank].push_back(token);
    if (kind != LayoutKind::kZigzag) {
      rank = (rank + 1) % ranks;
    } else if (rank + direction < 0 || rank + direction >= ranks) {
      direction = -direction;
    } else {
      rank += direction;
    }
  }
  return chunks;
}

void ExpectDealt(LayoutKind kind, int ranks, int64_t tokens, int64_t stripe) {
  const auto layout = TokenLayout::Make(kind, ranks, tokens, stripe);
  ASSERT_TRUE(layout.ok()) << layout.status();
  SCOPED_TRACE(layout->DebugString());
  const std::vector<std::vector<int64_t>> chunks = Deal(kind, ranks, tokens, stripe);
  int64_t largest = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const int64_t chunk_tokens = static_cast<int64_t>(chunks[rank].size());
    largest = std::max(largest, chunk_tokens);
    ASSERT_EQ(layout->ChunkTokens(rank), chunk_tokens) << "rank " << rank;
    for (int64_t slot = 0; slot < chunk_tokens; ++slot) {
      const int64_t token = chunks[rank][slot];
      ASSERT_EQ(layout->TokenAt(rank, slot), token) << "rank " << rank << " slot " << slot;
      ASSERT_EQ(layout->RankOf(token), rank) << "token " << token;
      ASSERT_EQ(layout->SlotOf(token), slot) << "token " << token;
    }
  }
  EXPECT_EQ(layout->LargestChunkTokens(), largest);
}

TEST(TokenLayout, DealsRandomPrompts) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 600; ++i) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << i);
    ExpectDealt(kKinds[i % 3], Draw(random, 1, 24), Draw<int64_t>(random, 1, i % 2 ? 40 : 2000),
                Draw<int64_t>(random, 1, 130));
    if (HasFailure()) return;
  }
}

TEST(TokenLayout, RunsOfRanksHaveAsManyTokens) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 3000; ++i) {
    const auto layout =
        TokenLayout::Make(kKinds[i % 3], Draw(random, 1, 40), Draw<int64_t>(random, 1, i % 2 ? 90 : 4000),
                          Draw<int64_t>(random, 1, 130));
    ASSERT_TRUE(layout.ok()) << layout.status();
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << i << ", " << layout->DebugString());
    int runs = 0;
    for (int first = 0; first < layout->ranks(); ++runs) {
      const int until = layout->AlikeUntil(first);
      ASSERT_GT(until, first);
      ASSERT_LE(until, layout->ranks());
      for (; first < until; ++first)
        ASSERT_EQ(layout->ChunkTokens(first), layout->ChunkTokens(until - 1)) << first;
    }
    EXPECT_LE(runs, 5);
  }
}

TEST(TokenLayout, StripesOfOneTokenArePaperStriping) {
  const auto layout = TokenLayout::Make(LayoutKind::kStriped, 4, 16, 1);
  ASSERT_TRUE(layout.ok());
  for (int64_t token = 0; token < 16; ++token) {
    EXPECT_EQ(layout->RankOf(token), token % 4);
    EXPECT_EQ(layout->SlotOf(token), token / 4);
  }
}

// The group's tokens in the order of their positions, and where each member's lie among them.
void ExpectGrouped(const TokenLayout& layout, int h) {
  SCOPED_TRACE(testing::Message() << layout.DebugString() << ", h = " << h);
  const TokenLayout groups = layout.Groups(h);
  ASSERT_EQ(groups.ranks(), layout.ranks() / h);
  ASSERT_EQ(groups.tokens(), layout.tokens());
  for (int group = 0; group < groups.ranks(); ++group) {
    std::vector<int64_t> tokens;
    for (int rank = group * h; rank < group * h + h; ++rank) {
      for (int64_t slot = 0; slot < layout.ChunkTokens(rank); ++slot)
        tokens.push_back(layout.TokenAt(rank, slot));
    }
    std::sort(tokens.begin(), tokens.end());
    ASSERT_EQ(groups.ChunkTokens(group), std::ssize(tokens)) << "group " << group;
    const TokenLayout members = layout.Members(group, h);
    ASSERT_EQ(members.tokens(), std::ssize(tokens)) << "group " << group;
    for (int64_t slot = 0; slot < std::ssize(tokens); ++slot) {
      const int64_t token = tokens[slot];
      ASSERT_EQ(groups.TokenAt(group, slot), token) << "group " << group << " slot " << slot;
      ASSERT_EQ(groups.RankOf(token), group) << "token " << token;
      ASSERT_EQ(groups.SlotOf(token), slot) << "token " << token;
      ASSERT_EQ(group * h + members.RankOf(slot), layout.RankOf(token)) << "token " << token;
      ASSERT_EQ(members.SlotOf(slot), layout.SlotOf(token)) << "token " << token;
    }
    for (int member = 0; member < h; ++member) {
      const int64_t chunk_tokens = layout.ChunkTokens(group * h + member);
      ASSERT_EQ(members.ChunkTokens(member), chunk_tokens) << "group " << group << " member " << member;
      for (int64_t slot = 0; slot < chunk_tokens; ++slot) {
        ASSERT_EQ(tokens[members.TokenAt(member, slot)], layout.TokenAt(group * h + member, slot));
      }
    }
  }
}

TEST(TokenLayout, GroupsOfRanksHoldTheirTokensInOrder) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 600; ++i) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << i);
    const int h = Draw(random, 1, 6);
    const auto layout =
        TokenLayout::Make(kKinds[i % 3], h * Draw(random, 1, 6), Draw<int64_t>(random, 1, i % 2 ? 40 : 2000),
                          Draw<int64_t>(random, 1, 130));
    ASSERT_TRUE(layout.ok()) << layout.status();
    ExpectGrouped(*layout, h);
    if (HasFailure()) return;
  }
}

TEST(TokenLayout, AGroupOfOneIsItsRank) {
  const auto layout = TokenLayout::Make(LayoutKind::kStriped, 6, 1000, 16);
  ASSERT_TRUE(layout.ok());
  EXPECT_EQ(layout->Groups(1), *layout);
}

TEST(TokenLayout, HugePromptsDoNotOverflow) {
  const int64_t tokens = (int64_t{1} << 31) - 1;
  for (LayoutKind kind : kKinds) {
    for (int64_t stripe : {int64_t{1}, int64_t{64}, int64_t{1} << 62}) {
      const auto layout = TokenLayout::Make(kind, 64, tokens, stripe);
      ASSERT_TRUE(layout.ok());
      SCOPED_TRACE(layout->DebugString());
      int64_t sum = 0;
      for (int rank = 0; rank < 64; ++rank) {
        const int64_t chunk_tokens = layout->ChunkTokens(rank);
        sum += chunk_tokens;
        if (chunk_tokens == 0) continue;
        const int64_t last = layout->TokenAt(rank, chunk_tokens - 1);
        ASSERT_LT(last, tokens);
        ASSERT_EQ(layout->RankOf(last), rank);
        ASSERT_EQ(layout->SlotOf(last), chunk_tokens - 1);
      }
      EXPECT_EQ(sum, tokens);
    }
  }
}

TEST(TokenLayout, DealsEveryTokenOnce) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int i = 0; i < 100; ++i) {
    const auto layout = TokenLayout::Make(kKinds[Draw<size_t>(random, 0, 2)], Draw(random, 1, 12),
                                          Draw<int64_t>(random, 1, 500), Draw<int64_t>(random, 1, 20));
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << layout->DebugString());
    std::vector<uint32_t> ids(layout->tokens());
    for (uint32_t& id : ids) id = Draw<uint32_t>(random, 0, 99);
    std::vector<int> seen(ids.size(), 0);
    for (int rank = 0; rank < layout->ranks(); ++rank) {
      const std::vector<uint32_t> own = layout->Deal(rank, std::span<const uint32_t>(ids));
      ASSERT_EQ(std::ssize(own), layout->ChunkTokens(rank));
      for (int64_t slot = 0; slot < std::ssize(own); ++slot) {
        EXPECT_EQ(own[slot], ids[layout->TokenAt(rank, slot)]);
        ++seen[layout->TokenAt(rank, slot)];
      }
    }
    EXPECT_EQ(seen, std::vector<int>(ids.size(), 1));
  }
}

TEST(TokenLayout, RefusesBadSizes) {
  const auto code = [](int ranks, int64_t tokens, int64_t stripe) {
    return TokenLayout::Make(LayoutKind::kStriped, ranks, tokens, stripe).status().code();
  };
  EXPECT_EQ(code(0, 10, 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(4, 0, 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(4, int64_t{1} << 31, 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(4, 10, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(4, 10, 1), absl::StatusCode::kOk);
}

TEST(ParseLayout, ReadsBackEveryName) {
  for (LayoutKind kind : kKinds) EXPECT_EQ(ParseLayout(LayoutName(kind)).value(), kind);
  const absl::Status unknown = ParseLayout("diagonal").status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(unknown.message().find("\"diagonal\""), std::string::npos) << unknown;
  EXPECT_NE(unknown.message().find("zigzag"), std::string::npos) << unknown;
}

}  // namespace
}  // namespace meshfill
