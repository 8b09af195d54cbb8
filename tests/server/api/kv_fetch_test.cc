#include "server/api/kv_fetch.h"

#include <functional>
#include <string>
#include <vector>

#include "engine/kv/crc32c.h"
#include "gtest/gtest.h"
#include "tests/engine/kv/kv_values.h"

namespace meshfill {
namespace {

const KvShape kShape = {.layers = 4, .kv_heads = 8, .head_dim = 128, .dtype = DType::kBf16};
constexpr int64_t kTokens = 1000;
constexpr int64_t kMessageBytes = 4 << 20;

v1::FetchKvRequest Request(const std::function<void(v1::FetchKvRequest&)>& change) {
  v1::FetchKvRequest request;
  change(request);
  return request;
}

TEST(KvFetchTest, CountsOfZeroGoToTheEnd) {
  const auto all = CheckFetch({}, kShape, kTokens, kMessageBytes);
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->range.tokens, kTokens);
  EXPECT_EQ(all->layers, 4);
  EXPECT_EQ(all->range.heads, 8);
  const auto rest = CheckFetch(Request([](auto& r) {
                                 r.set_first_token(999);
                                 r.set_first_layer(1);
                                 r.set_first_head(6);
                               }),
                               kShape, kTokens, kMessageBytes);
  ASSERT_TRUE(rest.ok()) << rest.status();
  EXPECT_EQ(rest->range.tokens, 1);
  EXPECT_EQ(rest->layers, 3);
  EXPECT_EQ(rest->range.heads, 2);
}

TEST(KvFetchTest, RefusesWhatIsNotThere) {
  const struct {
    const char* message;
    std::function<void(v1::FetchKvRequest&)> change;
  } cases[] = {
      {"first_token is 1000, but the tokens that are kept go from 0 to 999",
       [](auto& r) { r.set_first_token(1000); }},
      {"first_token is 18446744073709551615", [](auto& r) { r.set_first_token(UINT64_MAX); }},
      {"tokens 1 to 1 + 1000 - 1",
       [](auto& r) {
         r.set_first_token(1);
         r.set_tokens(1000);
       }},
      {"tokens 1 to 1 + 18446744073709551615 - 1",
       [](auto& r) {
         r.set_first_token(1);
         r.set_tokens(UINT64_MAX);
       }},
      {"first_layer is 4", [](auto& r) { r.set_first_layer(4); }},
      {"layers 0 to 0 + 5 - 1", [](auto& r) { r.set_layers(5); }},
      {"first_head is 8", [](auto& r) { r.set_first_head(8); }},
      {"heads 3 to 3 + 6 - 1",
       [](auto& r) {
         r.set_first_head(3);
         r.set_heads(6);
       }},
      {"layout is 17", [](auto& r) { r.set_layout(static_cast<v1::KvLayout>(17)); }},
      {"page_tokens is 16, but KV_LAYOUT_TOKENS", [](auto& r) { r.set_page_tokens(16); }},
      {"page_tokens is 0", [](auto& r) { r.set_layout(v1::KV_LAYOUT_PAGES_HND); }},
      {"first_token is 8, no multiple of page_tokens, 16",
       [](auto& r) {
         r.set_layout(v1::KV_LAYOUT_PAGES_NHD);
         r.set_page_tokens(16);
         r.set_first_token(8);
       }},
      {"tokens is 24, no multiple of page_tokens, 16",
       [](auto& r) {
         r.set_layout(v1::KV_LAYOUT_PAGES_HND);
         r.set_page_tokens(16);
         r.set_tokens(24);
       }},
      {"a page has 8388608 bytes",
       [](auto& r) {
         r.set_layout(v1::KV_LAYOUT_PAGES_HND);
         r.set_page_tokens(2048);
       }},
      {"a page has 17592186040320 bytes",
       [](auto& r) {
         r.set_layout(v1::KV_LAYOUT_PAGES_HND);
         r.set_page_tokens(UINT32_MAX);
       }},
  };
  for (const auto& [message, change] : cases) {
    const auto fetch = CheckFetch(Request(change), kShape, kTokens, kMessageBytes);
    EXPECT_TRUE(absl::IsInvalidArgument(fetch.status())) << message << ": " << fetch.status();
    EXPECT_NE(std::string(fetch.status().message()).find(message), std::string::npos) << fetch.status();
  }
}

// A kilobyte of a message is left for what is around a token's K and V.
TEST(KvFetchTest, RefusesATokenThatIsLongerThanAMessage) {
  const KvShape shape = {.layers = 1, .kv_heads = 64, .head_dim = 256};
  const int64_t token_bytes = 2 * shape.kv_heads * shape.head_bytes();
  const auto fetch = CheckFetch({}, shape, kTokens, token_bytes + 1023);
  EXPECT_TRUE(absl::IsInvalidArgument(fetch.status())) << fetch.status();
  EXPECT_TRUE(CheckFetch({}, shape, kTokens, token_bytes + 1024).ok());
}

// Any fetch, part by part, is the range as it is defined; no part is too long.
TEST(KvFetchTest, PartsMakeUpTheRange) {
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 100; ++round) {
    const KvShape shape = DrawKvShape(random);
    const int64_t tokens = Draw<int>(random, 1, 400);
    const TokenLayout layout = DrawTokenLayout(random, tokens);
    KvPrompt prompt(shape, tokens);
    KeepAllValues(prompt, layout);
    v1::FetchKvRequest request;
    const int64_t page_tokens = Draw<int>(random, 1, 20);
    const auto format = static_cast<KvFormat>(Draw<int>(random, 0, 2));
    request.set_layout(static_cast<v1::KvLayout>(format));
    int64_t first = Draw<int64_t>(random, 0, tokens - 1);
    if (format != KvFormat::kTokens) {
      request.set_page_tokens(static_cast<uint32_t>(page_tokens));
      first -= first % page_tokens;
    }
    request.set_first_token(static_cast<uint64_t>(first));
    // Small messages, so that there are many parts.
    const int64_t page_bytes = 2 * page_tokens * shape.kv_heads * shape.head_bytes();
    const int64_t message_bytes = 1024 + page_bytes + Draw<int>(random, 0, 5000);
    const auto fetch = CheckFetch(request, shape, tokens, message_bytes);
    ASSERT_TRUE(fetch.ok()) << fetch.status();
    std::string k, v, pages;
    for (int64_t token = first; token < tokens; token += fetch->part_tokens) {
      v1::KvPart part;
      const int64_t count = std::min(fetch->part_tokens, tokens - token);
      ASSERT_TRUE(FillPart(*fetch, *prompt.Layer(0), 0, token, count, part).ok());
      EXPECT_LE(static_cast<int64_t>(part.ByteSizeLong()), message_bytes);
      EXPECT_EQ(part.first_token(), static_cast<uint64_t>(token));
      EXPECT_EQ(part.tokens(), static_cast<uint64_t>(std::min(fetch->part_tokens, tokens - token)));
      EXPECT_EQ(part.crc32c(), Crc32c(part.k() + part.v() + part.pages()));
      k += part.k();
      v += part.v();
      pages += part.pages();
    }
    const std::vector<std::byte> expected = KvBytes(shape, 0, fetch->range, format, page_tokens);
    const std::string all = k + v + pages;
    ASSERT_EQ(all.size(), expected.size());
    ASSERT_EQ(std::memcmp(all.data(), expected.data(), all.size()), 0) << "round " << round;
  }
}

}  // namespace
}  // namespace meshfill
