#include "engine/devices/free_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>

#include "engine/devices/container_limits.h"

namespace meshfill {
namespace {

TEST(FreeMemory, IsInBytesAndWithinTheMachine) {
  const int64_t machine = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  const int64_t total = TotalMemoryBytes(), free = FreeMemoryBytes();
  EXPECT_LE(total, machine / 100 * 101);
  if (!ReadContainerLimits().memory_bytes.has_value()) {
    EXPECT_GE(total, machine / 100 * 99);
  }
  EXPECT_LE(free, total);
  EXPECT_GT(free, 1 << 20);
}

// Others take and free memory meanwhile: what the budget is of lies between two readings, or nearly.
TEST(DefaultMemoryBudget, IsFourFifthsOfWhatIsLeft) {
  for (const double share : {0.0, 0.5}) {
    bool found = false;
    for (int attempt = 0; attempt < 100 && !found; ++attempt) {
      const auto before = static_cast<double>(FreeMemoryBytes());
      const auto to_come = static_cast<int64_t>(share * before);
      const auto budget = static_cast<double>(DefaultMemoryBudgetBytes(to_come));
      found = budget > 0.75 * (1 - share) * before && budget < 0.85 * (1 - share) * before;
    }
    EXPECT_TRUE(found) << share;
  }
  EXPECT_EQ(DefaultMemoryBudgetBytes(INT64_MAX / 2), 1) << "0 stands for unknown";
}

TEST(GibText, HasOneDecimal) {
  EXPECT_EQ(GibText(int64_t{3} << 29), "1.5 GiB");
  EXPECT_EQ(GibText(0), "0.0 GiB");
  EXPECT_EQ(GibText(int64_t{80} << 30), "80.0 GiB");
}

}  // namespace
}  // namespace meshfill
