#include "engine/plan/short_room.h"

#include <algorithm>

#include "engine/plan/planner.h"

namespace meshfill {
namespace {

constexpr int64_t kMostOfMemory = 8;  // one part in so many

}  // namespace

int64_t ShortRoomBytes(const ModelShape& model, const PoolSpeed& speed, PlanRequest on_rank) {
  const int64_t memory_bytes = on_rank.memory_budget_bytes;
  if (memory_bytes <= 0) return 0;
  on_rank.tokens = std::clamp<int64_t>(speed.slice_tokens, 1, model.context_tokens);
  on_rank.cached_tokens = 0;
  on_rank.keeps_kv = true;
  on_rank.ranks = 1;
  on_rank.tile.reset();
  on_rank.heads.reset();
  on_rank.memory_budget_bytes = 0;
  const absl::StatusOr<PlanChoice> slice = MakePlan(model, speed, on_rank);
  if (!slice.ok()) return 0;
  return std::min(slice->plan.predicted.run_bytes, memory_bytes / kMostOfMemory);
}

int64_t RoomBeside(int64_t memory_bytes, int64_t short_bytes, const TakenBytes& taken, bool is_short) {
  const int64_t free_bytes = memory_bytes - taken.all;
  return is_short ? free_bytes : std::min(free_bytes, memory_bytes - short_bytes - taken.by_long);
}

int64_t MostBeside(int64_t memory_bytes, int64_t short_bytes, const TakenBytes& taken) {
  const int64_t as_short = std::min(short_bytes, RoomBeside(memory_bytes, short_bytes, taken, true));
  return std::max<int64_t>({0, as_short, RoomBeside(memory_bytes, short_bytes, taken, false)});
}

absl::StatusOr<PlanChoice> PlanBesideShort(
    int64_t memory_bytes, int64_t short_bytes,
    const std::function<absl::StatusOr<PlanChoice>(int64_t memory_bytes)>& plan) {
  if (short_bytes > 0 && short_bytes < memory_bytes) {
    absl::StatusOr<PlanChoice> choice = plan(memory_bytes - short_bytes);
    if (!absl::IsFailedPrecondition(choice.status())) return choice;
  }
  return plan(memory_bytes);
}

}  // namespace meshfill
