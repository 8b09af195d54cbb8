#include "server/api/status_details.h"

#include <string>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "server/queue/refusal.h"

namespace meshfill {
namespace {

TEST(StatusDetailsTest, EveryCodeSurvivesThereAndBack) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "what, where, what to do");
    const grpc::Status wire = ToGrpcStatus(status);
    EXPECT_EQ(wire.error_code(), code);
    EXPECT_EQ(wire.error_details(), "");
    EXPECT_EQ(FromGrpcStatus(wire), status);
  }
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  EXPECT_TRUE(FromGrpcStatus(grpc::Status::OK).ok());
}

TEST(StatusDetailsTest, RetryInfoIsInThePublicErrorModel) {
  const absl::Duration delay = absl::Seconds(3) + absl::Milliseconds(250);
  const absl::Status status = WithRetryAfter(absl::ResourceExhaustedError("full"), delay);
  EXPECT_EQ(RetryAfter(status), delay);
  const grpc::Status wire = ToGrpcStatus(status);

  google::rpc::Status model;
  ASSERT_TRUE(model.ParseFromString(wire.error_details()));
  EXPECT_EQ(model.code(), 8);
  EXPECT_EQ(model.message(), "full");
  ASSERT_EQ(model.details_size(), 1);
  EXPECT_EQ(model.details(0).type_url(), "type.googleapis.com/google.rpc.RetryInfo");
  google::rpc::RetryInfo info;
  ASSERT_TRUE(model.details(0).UnpackTo(&info));
  EXPECT_EQ(info.retry_delay().seconds(), 3);
  EXPECT_EQ(info.retry_delay().nanos(), 250000000);

  EXPECT_EQ(RetryAfter(FromGrpcStatus(wire)), delay);
  EXPECT_EQ(RetryAfter(absl::ResourceExhaustedError("full")), std::nullopt);
}

TEST(StatusDetailsTest, ClientsDoNotSeeWhyTheyWereRefused) {
  const absl::Status status = WithRefusal(
      WithRetryAfter(absl::ResourceExhaustedError("full"), absl::Seconds(3)), Refusal::kQueueWait);
  const absl::Status seen = FromGrpcStatus(ToGrpcStatus(status));
  EXPECT_EQ(RetryAfter(seen), absl::Seconds(3));
  EXPECT_FALSE(seen.GetPayload(kRefusalUrl).has_value());
  EXPECT_EQ(
      ToGrpcStatus(WithRefusal(absl::ResourceExhaustedError("full"), Refusal::kQueueWait)).error_details(),
      "");
}

TEST(StatusDetailsTest, LongMessagesAreCutBetweenCharacters) {
  for (size_t before = 0; before < 3; ++before) {  // the limit is in each place of a character
    std::string message(before, 'x');
    while (message.size() < 3000) message += "\u20ac";  // three bytes each
    const std::string cut = ToGrpcStatus(absl::InternalError(message)).error_message();
    EXPECT_LE(cut.size(), 1024u);
    EXPECT_GT(cut.size(), 1021u);
    EXPECT_EQ(cut.size() % 3, before);
    EXPECT_EQ(message.compare(0, cut.size(), cut), 0);
  }
}

TEST(StatusDetailsTest, ForeignDetailsThatAreNoStatusAreIgnored) {
  const absl::Status status =
      FromGrpcStatus(grpc::Status(grpc::StatusCode::ABORTED, "why", "\xff\xff not a message"));
  EXPECT_EQ(status, absl::AbortedError("why"));
}

}  // namespace
}  // namespace meshfill
