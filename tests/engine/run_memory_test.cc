#include "engine/run_memory.h"

#include <optional>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

// Random runs come and go; a plain count says which of them may.
TEST(RunMemory, AdmitsWhatFitsBesideTheOthers) {
  std::mt19937_64 random(TestSeed());
  constexpr int64_t kBudget = 1000;
  constexpr int kMostRuns = 4;
  RunMemory memory(kBudget, kMostRuns);
  struct Live {
    int64_t bytes;
    RunMemory::Share share;
  };
  std::vector<std::optional<Live>> slots(6);
  for (int step = 0; step < 5000; ++step) {
    std::optional<Live>& slot = slots[random() % slots.size()];
    if (slot.has_value()) {
      slot.reset();
      continue;
    }
    int64_t used = 0;
    int runs = 0;
    for (const auto& other : slots) {
      if (other.has_value()) ++runs, used += other->bytes;
    }
    const int64_t bytes = Draw<int64_t>(random, 0, step % 10 == 0 ? 2 * kBudget : kBudget / 2);
    auto share = memory.Take(bytes);
    const bool fits = runs < kMostRuns && (runs == 0 || used + bytes <= kBudget);
    ASSERT_EQ(share.ok(), fits) << bytes << " bytes beside " << used << " of " << runs << " runs";
    if (fits) {
      slot.emplace(Live{bytes, *std::move(share)});
    } else {
      EXPECT_EQ(share.status().code(), absl::StatusCode::kResourceExhausted);
    }
  }
}

}  // namespace
}  // namespace meshfill
