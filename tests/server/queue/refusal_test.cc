#include "server/queue/refusal.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

TEST(RefusalTest, TheGivenReasonGoesBeforeTheCode) {
  for (int reason = 0; reason <= static_cast<int>(Refusal::kOther); ++reason) {
    const auto refusal = static_cast<Refusal>(reason);
    EXPECT_EQ(RefusalOf(WithRefusal(absl::InternalError("x"), refusal)), refusal);
  }
  EXPECT_EQ(RefusalOf(absl::InvalidArgumentError("x")), Refusal::kInvalid);
  EXPECT_EQ(RefusalOf(absl::NotFoundError("x")), Refusal::kUnknownModel);
  EXPECT_EQ(RefusalOf(absl::OutOfRangeError("x")), Refusal::kTooLong);
  EXPECT_EQ(RefusalOf(absl::FailedPreconditionError("x")), Refusal::kPoolTooSmall);
  EXPECT_EQ(RefusalOf(absl::AlreadyExistsError("x")), Refusal::kDuplicate);
  EXPECT_EQ(RefusalOf(absl::DeadlineExceededError("x")), Refusal::kDeadline);
  EXPECT_EQ(RefusalOf(absl::ResourceExhaustedError("x")), Refusal::kMemory);
  EXPECT_EQ(RefusalOf(absl::UnauthenticatedError("x")), Refusal::kCredentials);
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

TEST(RefusalTest, TheAdviceToComeAgainIsKept) {
  const absl::Status full = absl::ResourceExhaustedError("full");
  EXPECT_EQ(RetryAfter(full), std::nullopt);
  EXPECT_EQ(RetryAfter(WithRefusal(WithRetryAfter(full, absl::Milliseconds(3250)), Refusal::kQueueWait)),
            absl::Milliseconds(3250));
}

TEST(RetryLine, EachComesAfterThoseToldBefore) {
  std::mt19937_64 random(TestSeed());
  RetryLine line(absl::Hours(10));
  double now = 0, end = 0;
  for (int i = 0; i < 1000; ++i) {
    now += static_cast<double>(Draw(random, 0, 100)) / 100;
    const double work = static_cast<double>(Draw(random, 1, 100)) / 100;
    const double place = std::max(now, end);
    ASSERT_NEAR(line.Join("a", work, At(now)), place - now, 1e-6);
    end = place + RetryLine::kPace * work;
  }
}

TEST(RetryLine, TheLineIsBoundedAndTheTenantsOwn) {
  RetryLine line(absl::Minutes(10));
  EXPECT_EQ(line.Join("flood", 1e9, At(0)), 0);
  EXPECT_EQ(line.Join("flood", 1e9, At(0)), 600);
  EXPECT_EQ(line.Join("flood", 1e9, At(0)), 600);
  EXPECT_EQ(line.Join("other", 2, At(0)), 0);
  EXPECT_NEAR(line.Join("other", 2, At(0)), 2 * RetryLine::kPace, 1e-6);
  EXPECT_EQ(line.Join("flood", 1, At(0)), 600) << "it is not the shorter for another's";
  EXPECT_EQ(line.Join("flood", 1, At(1000)), 0);
}

// The number of lines is bounded, and one that is over makes room.
TEST(RetryLine, LinesThatAreOverAreForgotten) {
  RetryLine line(absl::Minutes(10));
  const auto fill = [&](const std::string& name, absl::Time now) {
    for (int i = 0; i < 4096; ++i) line.Join(absl::StrCat(name, i), 1, now);
  };
  fill("early", At(0));
  line.Join("more", 2, At(0));
  EXPECT_EQ(line.Join("more", 2, At(0)), 0) << "there is no room for a line";
  fill("late", At(100));
  EXPECT_NEAR(line.Join("late7", 1, At(100)), RetryLine::kPace, 1e-6);
}

// Ten times what a pool can do comes for some seconds; its queue has few places; predictions err by up to a
// tenth. Who is refused comes when told, at the earliest after a second, until it is served.
TEST(RetryLine, WhoObeysIsServedSoonAndThePoolIsNeverIdle) {
  std::mt19937_64 random(TestSeed());
  constexpr double kWork = 0.05, kSeconds = 10;
  constexpr size_t kPlaces = 64;
  RetryLine line(absl::Hours(1));
  struct Try {
    double at;
    int client;
    bool operator>(const Try& other) const { return at > other.at; }
  };
  std::priority_queue<Try, std::vector<Try>, std::greater<>> tries;
  const int clients = static_cast<int>(10 * kSeconds / kWork);
  for (int client = 0; client < clients; ++client) {
    tries.push({kSeconds * static_cast<double>(Draw(random, 0, 999)) / 1000, client});
  }
  std::deque<double> begins;  // of those that wait, rising
  std::vector<int> refusals(clients, 0);
  double free_at = 0, idle = 0;
  while (!tries.empty()) {
    const Try next = tries.top();
    tries.pop();
    while (!begins.empty() && begins.front() <= next.at) begins.pop_front();
    if (begins.size() < kPlaces) {
      if (next.at > free_at) idle += next.at - free_at;
      const double begin = std::max(next.at, free_at);
      begins.push_back(begin);
      free_at = begin + kWork;
      continue;
    }
    ++refusals[next.client];
    const double predicted = kWork * static_cast<double>(Draw(random, 90, 110)) / 100;
    const double room = begins.front() - next.at;
    tries.push({next.at + std::max(1.0, room + line.Join("a", predicted, At(next.at))), next.client});
  }
  EXPECT_LE(idle, 0.05 * clients * kWork);
  EXPECT_LE(*std::max_element(refusals.begin(), refusals.end()), 12);
}

}  // namespace
}  // namespace meshfill
