#include "engine/run_places.h"

#include <algorithm>
#include <optional>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

struct Live {
  int64_t rank_bytes;
  RunPlaces::Place place;
  bool computes = true;
};
using Slots = std::vector<std::optional<Live>>;

// What the runs in `slots` have on a rank: bytes, those of runs that take more than `short_bytes`, runs, and
// those that compute.
std::tuple<int64_t, int64_t, int, int> OnRank(const Slots& slots, int rank, int64_t short_bytes) {
  int64_t bytes = 0, by_long = 0;
  int runs = 0, computing = 0;
  for (const auto& live : slots) {
    if (!live.has_value()) continue;
    const int first = live->place.first_rank();
    if (rank < first || rank >= first + live->place.ranks()) continue;
    bytes += live->rank_bytes;
    by_long += live->rank_bytes > short_bytes ? live->rank_bytes : 0;
    ++runs;
    computing += live->computes ? 1 : 0;
  }
  return {bytes, by_long, runs, computing};
}

// Random runs come, stand still, go on and go, on pools of random size; a plain count of what is on each rank
// says which may come, and where.
TEST(RunPlaces, AdmitsWhatFitsWhereFewestCompute) {
  std::mt19937_64 random(TestSeed());
  for (int pool = 0; pool < 40; ++pool) {
    const int ranks = Draw(random, 1, 9);
    const int most_runs = Draw(random, 1, 6);
    constexpr int64_t kRankBudget = 1000;
    const int64_t short_bytes = 100 * Draw<int64_t>(random, 0, 3);
    RunPlaces places(kRankBudget * ranks, ranks, most_runs);
    places.LeaveToShort(short_bytes);
    Slots slots(8);
    EXPECT_EQ(places.MostRankBytes(), kRankBudget);
    for (int step = 0; step < 400; ++step) {
      std::optional<Live>& slot = slots[random() % slots.size()];
      if (slot.has_value()) {
        if (random() % 2 == 0) {
          slot.reset();
        } else {
          slot->computes = random() % 2 == 0;
          slot->place.SetComputes(slot->computes);
        }
        continue;
      }
      const int submeshes = Draw(random, 1, ranks + 2);
      const int meshes = std::min(submeshes, ranks);
      const int mesh_ranks = ranks / meshes;
      // Sums are often the budget, or a byte more.
      const int64_t rank_bytes = 100 * Draw<int64_t>(random, 0, step % 10 == 0 ? 20 : 5) + Draw(random, 0, 1);
      std::set<int> preferred;
      for (int rank = 0; rank < ranks; ++rank) {
        if (random() % 3 == 0) preferred.insert(rank);
      }
      const auto live =
          std::count_if(slots.begin(), slots.end(), [](const auto& each) { return each.has_value(); });
      std::optional<std::tuple<int, bool, int, int>> expected;  // the last is its first rank
      for (int mesh = 0; mesh < meshes && live < most_runs; ++mesh) {
        const int first = mesh * ranks / meshes;
        int64_t bytes = 0, by_long = 0;
        int runs = 0, computing = 0;
        for (int rank = first; rank < first + mesh_ranks; ++rank) {
          const auto [bytes_here, long_here, runs_here, computing_here] = OnRank(slots, rank, short_bytes);
          bytes = std::max(bytes, bytes_here);
          by_long = std::max(by_long, long_here);
          runs = std::max(runs, runs_here);
          computing = std::max(computing, computing_here);
        }
        const bool fits = bytes + rank_bytes <= kRankBudget &&
                          (rank_bytes <= short_bytes || by_long + rank_bytes <= kRankBudget - short_bytes);
        if (runs > 0 && !fits) continue;
        const std::tuple<int, bool, int, int> order = {computing, !preferred.contains(first), runs, first};
        if (!expected.has_value() || order < *expected) expected = order;
      }
      // A byte less than whole parts: an equal part is rounded up.
      const int64_t bytes = std::max<int64_t>(0, rank_bytes * mesh_ranks - Draw(random, 0, mesh_ranks - 1));
      auto place = places.Take(submeshes, bytes, [&](int first) { return preferred.contains(first); });
      ASSERT_EQ(place.ok(), expected.has_value())
          << place.status() << ", " << rank_bytes << " bytes on " << mesh_ranks;
      if (!place.ok()) {
        EXPECT_EQ(place.status().code(), absl::StatusCode::kResourceExhausted);
        continue;
      }
      EXPECT_EQ(place->first_rank(), std::get<3>(*expected));
      EXPECT_EQ(place->ranks(), mesh_ranks);
      slot.emplace(Live{rank_bytes, *std::move(place)});
      int64_t bytes_of_most = 0, long_of_most = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const auto [bytes_here, long_here, runs_here, computing_here] = OnRank(slots, rank, short_bytes);
        bytes_of_most = std::max(bytes_of_most, bytes_here);
        long_of_most = std::max(long_of_most, long_here);
      }
      const int64_t as_long = std::min(kRankBudget - bytes_of_most, kRankBudget - short_bytes - long_of_most);
      const int64_t as_short = std::min(kRankBudget - bytes_of_most, short_bytes);
      EXPECT_EQ(places.MostRankBytes(), std::max<int64_t>({0, as_long, as_short}));
    }
  }
}

TEST(RunPlaces, DividesRanksAndMemoryEvenly) {
  const RunPlaces places(/*budget_bytes=*/1003, /*ranks=*/8, /*most_runs=*/1);
  EXPECT_EQ(places.RanksOf(1), 8);
  EXPECT_EQ(places.RanksOf(3), 2);
  EXPECT_EQ(places.RanksOf(8), 1);
  EXPECT_EQ(places.RanksOf(100), 1);
  EXPECT_EQ(places.BudgetOf(1), 1003);
  EXPECT_EQ(places.BudgetOf(2), 500);
  EXPECT_EQ(places.BudgetOf(8), 125);
}

TEST(RunPlaces, TakesTheFirstWhereNothingIsPreferred) {
  RunPlaces places(/*budget_bytes=*/1000, /*ranks=*/2, /*most_runs=*/3);
  const auto first = places.Take(2, 100);
  const auto second = places.Take(2, 100);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->first_rank(), 0);
  EXPECT_EQ(second->first_rank(), 1);
}

}  // namespace
}  // namespace meshfill
