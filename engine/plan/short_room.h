// Memory that long prompts leave free, so that a short one may begin beside them at any moment:
//
//     of a rank    ├──────────────── any prompt ────────────────┤─ short ones ─┤
//
// Short is a run that takes no more of a rank than a slice of tokens does that one rank computes and whose K
// and V are kept, and no more than an eighth of its memory. A long prompt is planned with what is left beside
// that: with less memory it runs in more pieces, or by another plan. Where it finds none, it has all of the
// memory, and short prompts wait for its end. A short question behind a long cached prefix is long.
#ifndef MESHFILL_ENGINE_PLAN_SHORT_ROOM_H_
#define MESHFILL_ENGINE_PLAN_SHORT_ROOM_H_

#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "engine/model/model_shape.h"
#include "engine/plan/plan.h"
#include "engine/plan/plan_request.h"
#include "engine/plan/rank_speed.h"

namespace meshfill {

// Bytes of each rank that are left to short prompts. `on_rank` has the weights and the memory of one rank;
// its tokens, ranks and mesh are not looked at. 0: there is no limit to the memory.
int64_t ShortRoomBytes(const ModelShape& model, const PoolSpeed& speed, PlanRequest on_rank);

// What is taken of a rank's memory, or of a worker's.
struct TakenBytes {
  int64_t all = 0;
  int64_t by_long = 0;  // by long runs
};
// What one more run may take beside those that have `taken` of `memory_bytes`. Below 0: nothing.
int64_t RoomBeside(int64_t memory_bytes, int64_t short_bytes, const TakenBytes& taken, bool is_short);
// The most that one more run may take, whichever it is then.
int64_t MostBeside(int64_t memory_bytes, int64_t short_bytes, const TakenBytes& taken);

// What `plan` finds with `memory_bytes` without `short_bytes`, or else with all of them. Its error is then
// the last one's.
absl::StatusOr<PlanChoice> PlanBesideShort(
    int64_t memory_bytes, int64_t short_bytes,
    const std::function<absl::StatusOr<PlanChoice>(int64_t memory_bytes)>& plan);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_SHORT_ROOM_H_
