// What a client is told of a result.
#include "server/api/result_proto.h"

#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "grpcpp/support/slice.h"
#include "gtest/gtest.h"
#include "tests/server/fake_engine.h"

namespace meshfill {
namespace {

TEST(ResultProtoTest, AttemptsThatWereLostAreInTheSeconds) {
  FakeEngine engine;
  const std::vector<uint32_t> ids(10, 1);
  auto result = RunPrefill(engine, {ids, {.top_k = 2}});
  ASSERT_TRUE(result.ok()) << result.status();
  result->prefill_seconds = 3;
  result->lost_seconds = 40;
  result->paused_seconds = 500;
  result->attempts = 2;
  result->pack_prompts = 7;
  result->cached_tokens = 4;
  result->pieces = 3;
  result->piece_tokens = 5;
  result->mfu = 0.25;
  const v1::PrefillResult message = ToProto(*result, "r");
  EXPECT_EQ(message.request_id(), "r");
  EXPECT_EQ(message.seconds().prefill(), 43) << "a pause is queueing, and not in it";
  EXPECT_EQ(message.seconds().attention(), result->attention_seconds);
  EXPECT_EQ(message.seconds().comm_wait(), result->comm_wait_seconds);
  EXPECT_EQ(message.attempts(), 2u);
  EXPECT_EQ(message.pack_prompts(), 7u);
  EXPECT_EQ(message.tokens(), 10u);
  EXPECT_EQ(message.cached_tokens(), 4u);
  EXPECT_EQ(message.plan().pieces(), 3u);
  EXPECT_EQ(message.plan().piece_tokens(), 5u);
  EXPECT_EQ(message.mfu(), 0.25);
  ASSERT_EQ(message.top_size(), 2);
  EXPECT_EQ(message.first_token(), message.top(0).token());
  EXPECT_EQ(message.comm_bytes().q(), 1u);
  EXPECT_EQ(message.top(1).token(), result->top[1].token);
  EXPECT_EQ(message.top(1).logit(), result->top[1].logit);
  EXPECT_EQ(message.comm_bytes().all_to_all(), 4u);
}

TEST(ResultProtoTest, AManifestSaysWhatIsKept) {
  const KvPrompt kept({.layers = 3, .kv_heads = 2, .head_dim = 8, .dtype = DType::kBf16}, /*tokens=*/10);
  const v1::KvManifest manifest = ToProto(kept, "lease", absl::Milliseconds(1500));
  EXPECT_EQ(manifest.lease(), "lease");
  EXPECT_EQ(manifest.expires_in_seconds(), 1.5);
  EXPECT_EQ(manifest.tokens(), 10u);
  EXPECT_EQ(manifest.layers(), 3u);
  EXPECT_EQ(manifest.kv_heads(), 2u);
  EXPECT_EQ(manifest.head_dim(), 8u);
  EXPECT_EQ(manifest.dtype(), "bf16");
  EXPECT_EQ(manifest.bytes(), 2u * 2 * 10 * 3 * 2 * 8);
}

// Whether the logits are none, few, or so many that they have pages of their own.
TEST(ResultProtoTest, AnEventIsReadAsItWasWritten) {
  v1::PrefillResult result;
  result.set_request_id("r");
  result.set_tokens(10);
  for (const size_t count : {0u, 1u, 1000u, 65'000u, 66'000u, 200'000u}) {
    std::vector<float> logits(count);
    for (size_t i = 0; i < count; ++i) logits[i] = 0.5f * static_cast<float>(i);
    grpc::ByteBuffer bytes = ResultEvent(result, logits);
    grpc::Slice slice;
    ASSERT_TRUE(bytes.DumpToSingleSlice(&slice).ok());
    v1::PrefillEvent event;
    ASSERT_TRUE(event.ParseFromArray(slice.begin(), static_cast<int>(slice.size()))) << count;
    EXPECT_EQ(event.result().request_id(), "r");
    EXPECT_EQ(event.result().tokens(), 10u);
    EXPECT_TRUE(std::equal(logits.begin(), logits.end(), event.result().logits().begin(),
                           event.result().logits().end()))
        << count;
  }
}

TEST(ResultProtoTest, PagesAreGivenBackOnceAllIsSent) {
  grpc::ByteBuffer bytes = ResultEvent({}, std::vector<float>(1 << 20));
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(bytes.Dump(&slices).ok());
  ASSERT_EQ(slices.size(), 1u);
  auto* const at = const_cast<uint8_t*>(slices[0].begin());
  unsigned char in_memory = 0;
  EXPECT_EQ(mincore(at, 1, &in_memory), 0);
  slices.clear();
  bytes.Clear();
  EXPECT_EQ(mincore(at, 1, &in_memory), -1) << "nothing is mapped there any more";
}

}  // namespace
}  // namespace meshfill
