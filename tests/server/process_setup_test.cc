#include "server/process_setup.h"

#include <sys/resource.h>

#include "gtest/gtest.h"

namespace meshfill {
namespace {

// As gRPC's may be. Ends the process where absl looks at orders.
TEST(ProcessSetup, LocksMayBeTakenInBothOrders) {
  TrustLockOrders();
  absl::Mutex one, other;
  {
    const absl::MutexLock first(&one);
    const absl::MutexLock second(&other);
  }
  {
    const absl::MutexLock first(&other);
    const absl::MutexLock second(&one);
  }
}

TEST(ProcessSetup, TakesAllDescriptorsThatTheSystemAllows) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = 256;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  SetUpProcess({});
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(limit.rlim_cur, limit.rlim_max);
}

}  // namespace
}  // namespace meshfill
