#include "server/api/refusal.h"

#include <set>
#include <string>

#include "gtest/gtest.h"
#include "server/api/status_details.h"

namespace meshfill {
namespace {

TEST(RefusalTest, TheGivenReasonGoesBeforeTheCode) {
  for (int reason = 0; reason <= static_cast<int>(Refusal::kOther); ++reason) {
    const auto refusal = static_cast<Refusal>(reason);
    EXPECT_EQ(RefusalOf(WithRefusal(absl::InternalError("x"), refusal)), refusal);
  }
  EXPECT_EQ(RefusalOf(absl::InvalidArgumentError("x")), Refusal::kInvalid);
  EXPECT_EQ(RefusalOf(absl::UnavailableError("x")), Refusal::kNotReady);
  EXPECT_EQ(RefusalOf(absl::PermissionDeniedError("x")), Refusal::kCredentials);
  EXPECT_EQ(RefusalOf(absl::InternalError("x")), Refusal::kOther);
}

TEST(RefusalTest, ReasonsHaveNamesOfTheirOwn) {
  std::set<std::string> names;
  for (int reason = 0; reason <= static_cast<int>(Refusal::kOther); ++reason) {
    EXPECT_TRUE(names.insert(RefusalName(static_cast<Refusal>(reason))).second);
  }
  EXPECT_FALSE(names.contains("?"));
}

TEST(RefusalTest, ClientsDoNotSeeIt) {
  const absl::Status status = WithRefusal(
      WithRetryAfter(absl::ResourceExhaustedError("full"), absl::Seconds(3)), Refusal::kQueueWait);
  const absl::Status seen = FromGrpcStatus(ToGrpcStatus(status));
  EXPECT_EQ(RetryAfter(seen), absl::Seconds(3));
  EXPECT_FALSE(seen.GetPayload(kRefusalUrl).has_value());
  EXPECT_EQ(
      ToGrpcStatus(WithRefusal(absl::ResourceExhaustedError("full"), Refusal::kQueueWait)).error_details(),
      "");
}

}  // namespace
}  // namespace meshfill
