// A reader of some ranks' tokens gives exactly those of a range, in order, as they are defined.
#include "server/api/slab_reader.h"

#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "engine/kv/crc32c.h"
#include "gtest/gtest.h"
#include "tests/engine/kv/kv_values.h"

namespace meshfill {
namespace {

constexpr int64_t kMessageBytes = 4 << 20;

std::string Bytes(const v1::KvPart& part) { return part.k() + part.v() + part.pages(); }

TEST(SlabReaderTest, HoldersTogetherGiveARangeOnce) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 200; ++round) {
    const KvShape shape = DrawKvShape(random);
    const int64_t tokens = Draw<int>(random, 1, 400);
    const TokenLayout layout = DrawTokenLayout(random, tokens);
    const auto prompt = std::make_shared<KvPrompt>(shape, tokens);
    KeepAllValues(*prompt, layout);
    v1::FetchKvRequest request;
    const int64_t first = Draw<int64_t>(random, 0, tokens - 1);
    const int64_t end = Draw<int64_t>(random, first + 1, tokens);
    request.set_first_token(static_cast<uint64_t>(first));
    request.set_tokens(static_cast<uint64_t>(end - first));
    request.set_first_head(Draw<uint32_t>(random, 0, static_cast<uint32_t>(shape.kv_heads) - 1));
    KvFetch fetch = CheckFetch(request, shape, tokens, kMessageBytes).value();
    fetch.part_tokens = Draw<int>(random, 1, 100);

    std::vector<int> holder_of_rank(layout.ranks());
    for (int& holder : holder_of_rank) holder = Draw<int>(random, 0, 2);
    std::set<std::pair<uint32_t, uint64_t>> seen;
    for (int holder = 0; holder < 3; ++holder) {
      std::vector<bool> here;
      for (const int of : holder_of_rank) here.push_back(of == holder);
      SlabReader reader(fetch, here, [&] { return std::shared_ptr<const KvPrompt>(prompt); });
      v1::KvPart part;
      std::pair<uint32_t, uint64_t> last = {0, 0};
      while (true) {
        const auto next = reader.Take(part);
        ASSERT_TRUE(next.ok()) << next.status();
        if (*next == KvReader::Next::kEnd) break;
        ASSERT_EQ(*next, KvReader::Next::kPart);
        const std::pair<uint32_t, uint64_t> begin = {part.layer(), part.first_token()};
        EXPECT_LE(last, begin);
        last = {part.layer(), part.first_token() + part.tokens()};
        for (uint64_t token = begin.second; token < last.second; ++token) {
          EXPECT_TRUE(here[layout.RankOf(static_cast<int64_t>(token))]) << layout.DebugString();
          EXPECT_TRUE(seen.emplace(part.layer(), token).second);
        }
        KvRange range = fetch.range;
        range.first_token = static_cast<int64_t>(begin.second);
        range.tokens = static_cast<int64_t>(part.tokens());
        const auto expected =
            KvBytes(shape, static_cast<int>(part.layer()), range, KvFormat::kTokens, /*page_tokens=*/1);
        const std::string bytes = Bytes(part);
        ASSERT_EQ(bytes.size(), expected.size());
        ASSERT_EQ(std::memcmp(bytes.data(), expected.data(), bytes.size()), 0);
        EXPECT_EQ(part.crc32c(), Crc32c(bytes));
      }
    }
    EXPECT_EQ(std::ssize(seen), (end - first) * shape.layers) << layout.DebugString();
  }
}

TEST(SlabReaderTest, GivesWholePagesAlone) {
  const KvShape shape = {.layers = 1, .kv_heads = 2, .head_dim = 4};
  const TokenLayout layout = TokenLayout::Make(LayoutKind::kStriped, 2, 100, 32).value();
  const auto prompt = std::make_shared<KvPrompt>(shape, 100);
  KeepAllValues(*prompt, layout);
  const auto take = [&](uint32_t page_tokens, int rank, v1::KvPart& part) {
    v1::FetchKvRequest request;
    request.set_layout(v1::KV_LAYOUT_PAGES_HND);
    request.set_page_tokens(page_tokens);
    const KvFetch fetch = CheckFetch(request, shape, 100, kMessageBytes).value();
    SlabReader reader(fetch, {rank == 0, rank == 1}, [&] { return std::shared_ptr<const KvPrompt>(prompt); });
    return reader.Take(part).status();
  };
  v1::KvPart part;
  ASSERT_TRUE(take(16, /*rank=*/1, part).ok());
  EXPECT_EQ(part.first_token(), 32u);
  EXPECT_EQ(part.tokens(), 32u);
  const KvRange range = {.first_token = 32, .tokens = 32, .first_head = 0, .heads = 2};
  const auto expected = KvBytes(shape, 0, range, KvFormat::kPagesHnd, 16);
  ASSERT_EQ(part.pages().size(), expected.size());
  EXPECT_EQ(std::memcmp(part.pages().data(), expected.data(), expected.size()), 0);
  const auto expect_refused = [&](uint32_t page_tokens, int rank, const std::string& page) {
    const absl::Status status = take(page_tokens, rank, part);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_TRUE(absl::StartsWith(status.message(), "the page of tokens " + page + " lies only in part here"))
        << status;
  };
  expect_refused(24, /*rank=*/1, "24 to 47");  // it begins on rank 0
  expect_refused(64, /*rank=*/0, "0 to 63");   // it ends on rank 1
}

TEST(SlabReaderTest, WaitsForALayerAndEndsWithTheLease) {
  const KvShape shape = {.layers = 2, .kv_heads = 1, .head_dim = 4};
  const TokenLayout layout = TokenLayout::Make(LayoutKind::kStriped, 1, 10, 8).value();
  KvPrompt prompt(shape, 10);
  absl::Status lease;
  const auto find = [&]() -> absl::StatusOr<std::shared_ptr<const KvPrompt>> {
    if (!lease.ok()) return lease;
    return std::shared_ptr<const KvPrompt>(std::shared_ptr<void>(), &prompt);
  };
  SlabReader reader(CheckFetch({}, shape, 10, kMessageBytes).value(), {}, find);
  v1::KvPart part;
  EXPECT_EQ(reader.Take(part).value(), KvReader::Next::kNotYet);
  prompt.Begin(layout);
  KeepValues(prompt, layout, 0, 0);
  EXPECT_EQ(reader.Take(part).value(), KvReader::Next::kPart);
  EXPECT_EQ(reader.Take(part).value(), KvReader::Next::kNotYet);
  KeepValues(prompt, layout, 0, 1);
  lease = absl::NotFoundError("ended");
  EXPECT_TRUE(absl::IsNotFound(reader.Take(part).status()));
  lease = absl::OkStatus();
  EXPECT_EQ(reader.Take(part).value(), KvReader::Next::kPart);
  lease = absl::NotFoundError("ended");
  EXPECT_EQ(reader.Take(part).value(), KvReader::Next::kEnd);  // all of it has been read
}

}  // namespace
}  // namespace meshfill
