// What a client is told of a result.
#include "server/api/result_proto.h"

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
  EXPECT_EQ(message.tokens(), 10u);
  EXPECT_EQ(message.cached_tokens(), 4u);
  EXPECT_EQ(message.plan().pieces(), 3u);
  EXPECT_EQ(message.plan().piece_tokens(), 5u);
  EXPECT_EQ(message.mfu(), 0.25);
  ASSERT_EQ(message.top_size(), 2);
  EXPECT_EQ(message.first_token(), message.top(0).token());
  EXPECT_EQ(message.comm_bytes().q(), 1u);
  EXPECT_EQ(message.comm_bytes().all_to_all(), 4u);
}

}  // namespace
}  // namespace meshfill
