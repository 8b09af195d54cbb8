// The plan of a run as it comes over the control stream: its layout, its tile, and the chunks that its
// schedule moves.
#include "server/pool/run_plan.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/good_plans.h"
#include "tests/fuzz/quiet_protobuf.h"

namespace meshfill {
namespace {

// What ranks and workers do with a plan that was taken.
void Check(const Plan& plan, const v1::RunPlan& message) {
  FUZZ_CHECK(plan.ranks() >= 1 && plan.ranks() <= kMaxPlanRanks);
  FUZZ_CHECK(plan.heads * plan.tile.ranks() == plan.ranks());
  FUZZ_CHECK(CheckSchedule(plan.schedule).ok());
  int64_t tokens = 0;
  std::vector<int> ranks;
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    tokens += plan.layout.ChunkTokens(rank);
    ranks.push_back(plan.RankAt(plan.SeatOf(rank)));
  }
  FUZZ_CHECK(tokens == plan.layout.tokens());
  for (int rank = 0; rank < plan.ranks(); ++rank) FUZZ_CHECK(ranks[rank] == rank);
  // Both sides mean the same run.
  const auto again = FromRunPlan(ToRunPlan(plan));
  FUZZ_CHECK(again.ok());
  FUZZ_CHECK(RunHash(*again, 0, {}) == RunHash(plan, 0, {}));
  FUZZ_CHECK(message.cached_tokens() == static_cast<uint64_t>(plan.cached_tokens));
}

}  // namespace

const int kFuzzRounds = 200'000;

std::vector<std::string> FuzzSeeds() {
  std::vector<std::string> seeds;
  for (const Plan& plan : GoodPlans()) seeds.push_back(ToRunPlan(plan).SerializeAsString());
  return seeds;
}

}  // namespace meshfill

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  [[maybe_unused]] const meshfill::QuietProtobuf quiet{};
  using namespace meshfill;
  v1::RunPlan message;
  if (!message.ParseFromArray(data, static_cast<int>(size))) return 0;
  const auto plan = FromRunPlan(message);
  if (plan.ok()) Check(*plan, message);
  return 0;
}
