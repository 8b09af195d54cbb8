// What a worker keeps for leases and as a prefix of later runs: beside each other, and as the leader says.
#include "server/pool/worker/held_kv.h"

#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/kv/kv_values.h"

namespace meshfill {
namespace {

const KvShape kShape = {.layers = 2, .kv_heads = 2, .head_dim = 4, .dtype = DType::kF32};
constexpr int64_t kTokenBytes = 2 * 2 * 2 * 4 * 4;
constexpr int64_t kBudget = 100 * kTokenBytes;

TokenLayout Striped(int64_t tokens) { return TokenLayout::Make(LayoutKind::kStriped, 2, tokens, 4).value(); }

class HeldKvTest : public testing::Test {
 protected:
  // Rank 1 of 2 computes its part, and perhaps keeps it.
  absl::Status Run(uint64_t run, const HeldKv::Keeping& keeping, int64_t tokens,
                   const std::vector<HeldKv::RunTokens>& prefix = {}, bool over = true) {
    auto before = kv_.PrefixOf(prefix);
    if (!before.ok()) return before.status();
    const int64_t first_token = *before == nullptr ? 0 : (*before)->tokens();
    auto sink = kv_.Begin(run, keeping, *before, Striped(tokens), {1});
    if (!sink.ok()) return sink.status();
    for (int layer = 0; layer < kShape.layers; ++layer) {
      KeepValues(static_cast<KvPrompt&>(**sink), Striped(tokens), 1, layer, first_token);
    }
    if (over) kv_.Keep(run);
    return absl::OkStatus();
  }
  static HeldKv::Keeping Keeping(const std::string& lease, bool cache) {
    return {.lease = lease, .tenant = "t", .lasts = absl::Seconds(10), .cache = cache};
  }
  // K of the tokens that a lease has here, which must be what the ranks computed; −1: it cannot be read.
  int64_t TokensRead(const std::string& lease) {
    v1::FetchKvRequest request;
    request.set_lease(lease);
    auto reader = kv_.Open(request, "t", 1 << 20, nullptr);
    if (!reader.ok()) return -1;
    int64_t tokens = 0;
    v1::KvPart part;
    while (*(*reader)->Take(part) == KvReader::Next::kPart) {
      for (uint64_t i = 0; i < part.tokens(); ++i) {
        uint32_t value = 0;
        std::memcpy(&value, part.k().data() + i * part.k().size() / part.tokens(), sizeof value);
        EXPECT_EQ(value, KvValue(static_cast<int>(part.layer()), 0,
                                 static_cast<int64_t>(part.first_token() + i), 0, 0));
      }
      tokens += static_cast<int64_t>(part.tokens());
    }
    return tokens / kShape.layers;
  }
  int64_t bytes() const { return kv_.counts().bytes; }

  absl::Time now_ = absl::UnixEpoch();
  HeldKv kv_{kShape, kBudget, [this] { return now_; }};
};

TEST_F(HeldKvTest, ALeaseHoldsThePrefixOfItsRun) {
  ASSERT_TRUE(Run(1, Keeping("", true), 40).ok());  // half of them are here
  EXPECT_EQ(bytes(), 20 * kTokenBytes);
  ASSERT_TRUE(Run(2, Keeping("b", true), 12, {{.run = 1, .tokens = 16}}).ok());
  EXPECT_EQ(bytes(), (20 + 4) * kTokenBytes);
  EXPECT_EQ(TokensRead("b"), 8 + 4);
  ASSERT_TRUE(Run(3, Keeping("c", false), 8, {{.run = 1, .tokens = 16}, {.run = 2, .tokens = 8}}).ok());
  EXPECT_EQ(TokensRead("c"), 8 + 4 + 4);
  kv_.RunEnds(1);
  kv_.RunEnds(2);
  EXPECT_EQ(TokensRead("b"), 12);
  EXPECT_EQ(TokensRead("c"), 16);
  EXPECT_TRUE(absl::IsUnavailable(kv_.PrefixOf({{.run = 1, .tokens = 16}}).status()));
  kv_.Ends("b");
  EXPECT_EQ(TokensRead("b"), -1);
  EXPECT_EQ(TokensRead("c"), 16);
  EXPECT_EQ(bytes(), (20 + 4 + 4) * kTokenBytes);
  now_ += absl::Seconds(11);
  kv_.EndLapsed();
  EXPECT_EQ(TokensRead("c"), -1);
  EXPECT_EQ(bytes(), 0);
}

// The store here has names of its own for leases, which no client has heard of.
TEST_F(HeldKvTest, AnErrorNamesTheLeaseThatWasAskedFor) {
  ASSERT_TRUE(Run(1, Keeping("lease-a", false), 8).ok());
  v1::FetchKvRequest request;
  request.set_lease("lease-a");
  const absl::Status of_another = kv_.Open(request, "u", 1 << 20, nullptr).status();
  now_ += absl::Seconds(11);
  for (const absl::Status& status : {of_another, kv_.Open(request, "t", 1 << 20, nullptr).status()}) {
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
    EXPECT_NE(status.message().find("lease lease-a"), absl::string_view::npos) << status;
  }
}

// A lease whose run failed is kept anew by the next one: a reader has parts of one of them.
TEST_F(HeldKvTest, AReaderReadsOneRunOfItsLease) {
  ASSERT_TRUE(Run(1, Keeping("a", false), 40).ok());
  v1::FetchKvRequest request;
  request.set_lease("a");
  const auto reader = kv_.Open(request, "t", 1 << 20, nullptr);
  ASSERT_TRUE(reader.ok()) << reader.status();
  v1::KvPart part;
  ASSERT_EQ(*(*reader)->Take(part), KvReader::Next::kPart);
  ASSERT_TRUE(Run(2, Keeping("a", false), 40).ok());
  EXPECT_TRUE(absl::IsUnavailable((*reader)->Take(part).status()));
  EXPECT_EQ(TokensRead("a"), 20);
}

TEST_F(HeldKvTest, ANewAttemptTakesTheRoomOfTheOneBefore) {
  for (uint64_t run = 1; run <= 3; ++run) {
    const absl::Status begun = Run(run, Keeping("a", false), 120);  // 60 of them are here, of room for 100
    ASSERT_TRUE(begun.ok()) << begun;
    EXPECT_EQ(bytes(), 60 * kTokenBytes);
  }
  EXPECT_EQ(TokensRead("a"), 60);
}

TEST_F(HeldKvTest, WhatALeaseLeavesServesLaterRuns) {
  ASSERT_TRUE(Run(1, Keeping("a", true), 40).ok());
  ASSERT_TRUE(Run(2, Keeping("b", false), 40).ok());
  kv_.Ends("a");
  kv_.Ends("b");
  EXPECT_EQ(bytes(), 20 * kTokenBytes);
  EXPECT_EQ((*kv_.PrefixOf({{.run = 1, .tokens = 40}}))->tokens(), 40);
  EXPECT_TRUE(absl::IsUnavailable(kv_.PrefixOf({{.run = 1, .tokens = 41}}).status()));
  EXPECT_TRUE(absl::IsUnavailable(kv_.PrefixOf({{.run = 2, .tokens = 40}}).status()));
  EXPECT_EQ(*kv_.PrefixOf({}), nullptr);
  kv_.EndAll();
  EXPECT_EQ(bytes(), 0);
}

TEST_F(HeldKvTest, WhatWasStoppedOrEndedIsNotCached) {
  ASSERT_TRUE(Run(1, Keeping("", true), 40, {}, /*over=*/false).ok());
  kv_.Drop(1);
  ASSERT_TRUE(Run(2, Keeping("b", false), 40, {}, /*over=*/false).ok());
  kv_.Ends("b");  // while it computes
  kv_.Keep(2);
  for (const uint64_t run : {1, 2}) EXPECT_FALSE(kv_.PrefixOf({{.run = run, .tokens = 8}}).ok());
  EXPECT_EQ(bytes(), 0);
  EXPECT_EQ(kv_.counts().leases, 0);
}

// As if its lease had ended after it: what is computed then, too, is there.
TEST_F(HeldKvTest, ALeaseThatEndsWhileItsRunComputesLeavesItToTheCache) {
  auto sink = kv_.Begin(1, Keeping("a", true), nullptr, Striped(40), {1});
  ASSERT_TRUE(sink.ok()) << sink.status();
  KeepValues(**sink, Striped(40), 1, 0);
  kv_.Ends("a");
  EXPECT_EQ(TokensRead("a"), -1);
  EXPECT_EQ(kv_.counts().leases, 0);
  EXPECT_EQ(bytes(), 20 * kTokenBytes);
  KeepValues(**sink, Striped(40), 1, 1);
  EXPECT_NE((*sink)->Layer(1), nullptr);
  kv_.Keep(1);
  sink->reset();
  EXPECT_EQ((*kv_.PrefixOf({{.run = 1, .tokens = 40}}))->tokens(), 40);
  kv_.RunEnds(1);
  EXPECT_EQ(bytes(), 0);
  // One that is begun again under its lease takes the room of the run before.
  for (const uint64_t run : {2, 3}) ASSERT_TRUE(Run(run, Keeping("b", true), 120, {}, /*over=*/false).ok());
  kv_.Drop(2);
  kv_.Keep(3);
  EXPECT_EQ(TokensRead("b"), 60);
}

// Slabs of gigabytes are freed meanwhile: what readers, runs and the leader's messages ask need not wait.
TEST_F(HeldKvTest, AnswersWhileItFrees) {
  std::vector<std::future<void>> asked;
  int frees = 0, waited = 0;
  const auto frees_while_it_answers = [&](const std::function<void()>& free) {
    frees = 0;
    const int64_t before = bytes();
    kv_.SetObserver([&] {  // called as bytes are freed
      ++frees;
      asked.push_back(std::async(std::launch::async, [this] { EXPECT_FALSE(kv_.PrefixOf({{99, 1}}).ok()); }));
      if (asked.back().wait_for(std::chrono::seconds(2)) != std::future_status::ready) ++waited;
    });
    free();
    kv_.SetObserver(nullptr);
    EXPECT_GT(frees, 0);
    EXPECT_LT(bytes(), before);
  };
  ASSERT_TRUE(Run(1, Keeping("a", false), 8).ok());
  frees_while_it_answers([&] { kv_.Ends("a"); });
  ASSERT_TRUE(Run(2, Keeping("b", false), 8, {}, /*over=*/false).ok());
  frees_while_it_answers([&] { kv_.Drop(2); });
  ASSERT_TRUE(Run(3, Keeping("", true), 8).ok());
  frees_while_it_answers([&] { kv_.RunEnds(3); });
  ASSERT_TRUE(Run(4, Keeping("", false), 8, {}, /*over=*/false).ok());
  frees_while_it_answers([&] { kv_.Keep(4); });
  for (uint64_t run = 5; run < 8; ++run) {
    ASSERT_TRUE(Run(run, Keeping(run == 5 ? "e" : "", run == 6), 8, {}, /*over=*/run < 7).ok());
    frees_while_it_answers([&] { kv_.EndAll(); });
  }
  EXPECT_EQ(waited, 0);
  EXPECT_EQ(bytes(), 0);
}

TEST_F(HeldKvTest, RefusesWhatItHasNoRoomFor) {
  ASSERT_TRUE(Run(1, Keeping("", true), 160).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(Run(2, Keeping("", true), 60)));
  EXPECT_TRUE(absl::IsResourceExhausted(Run(3, Keeping("c", true), 60)));
  EXPECT_TRUE(Run(4, Keeping("d", true), 40, {{.run = 1, .tokens = 80}}).ok());
  EXPECT_EQ(bytes(), kBudget);
  kv_.RunEnds(1);
  EXPECT_EQ(bytes(), kBudget);  // the lease has it
  kv_.Ends("d");
  EXPECT_EQ(bytes(), 20 * kTokenBytes);
}

}  // namespace
}  // namespace meshfill
