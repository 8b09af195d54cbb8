// When the leader's account of K and V has room for all of them, and when the cache gives way.
#include "server/pool/held_runs.h"

#include <memory>
#include <vector>

#include "engine/kv/block_hash.h"
#include "tests/server/pool/leader_fixture.h"

namespace meshfill {
namespace {

TEST(HeldRunsTest, ACachedPrefixStaysWhereAllFits) {
  constexpr int64_t kTokens = 64;
  LeaderActions actions;
  HeldRuns held(KvShapeOf(Shape()), actions);
  const auto choice =
      PlanForPool(Shape(), EngineOptions(), {.ranks = 1}, kTokens, {.layout = LayoutKind::kStriped});
  ASSERT_TRUE(choice.ok()) << choice.status();
  const TokenLayout& layout = choice->plan.layout;
  Membership::Worker worker = {.connection = 1, .offer = Offer("w")};
  const HeldRuns::Workers workers = {&worker};
  const std::vector<HeldRuns::Holder> holders = held.HoldersOf(choice->plan, layout, workers);
  ASSERT_EQ(holders.size(), 1u);
  const int64_t bytes = holders[0].bytes;

  BlockHasher hasher(/*block_tokens=*/16, "");
  hasher.Append(std::vector<uint32_t>(kTokens, 1));
  held.Enter(
      {.tenant = "t", .hashes = hasher.hashes()},
      {.shape = KvShapeOf(Shape()), .pieces = {{.tokens = kTokens, .run = held.Hold(1, layout, holders)}}},
      workers);
  const std::shared_ptr<const KvRunSlabs> leased = held.Hold(2, layout, holders);
  worker.offer.set_kv_memory_bytes(static_cast<uint64_t>(2 * bytes));
  held.MakeRoom(workers);
  EXPECT_EQ(held.cached_bytes(), bytes);
  EXPECT_EQ(held.evictions(), 0u);
  worker.offer.set_kv_memory_bytes(static_cast<uint64_t>(2 * bytes - 1));
  held.MakeRoom(workers);
  EXPECT_EQ(held.cached_bytes(), 0);
  EXPECT_EQ(held.evictions(), 1u);
}

}  // namespace
}  // namespace meshfill
