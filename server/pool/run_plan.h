// A plan on the control stream, and the hash by which leader and workers know that they mean the same run.
#ifndef MESHFILL_SERVER_POOL_RUN_PLAN_H_
#define MESHFILL_SERVER_POOL_RUN_PLAN_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/mesh/topology.h"
#include "engine/plan/plan.h"
#include "engine/run/rank_stats.h"
#include "meshfill/v1/control.pb.h"

namespace meshfill {

inline constexpr int kMaxPlanRanks = 4096;

// Only the seconds of the prediction travel: deadlines scale with them.
v1::RunPlan ToRunPlan(const Plan& plan);
// INVALID_ARGUMENT: no plan that could run; INTERNAL: a schedule that does not pass CheckSchedule.
absl::StatusOr<Plan> FromRunPlan(const v1::RunPlan& message);

// A hash of everything in the plan that ranks act on (no prediction), and of the tokens of ranks first_rank
// and on.
uint64_t RunHash(const Plan& plan, int first_rank, std::span<const std::vector<uint32_t>> shards);

// The number by which a run's data plane tells its messages from any other's. kQ: that of the ranks; kGather:
// that of the weights.
uint64_t DataPlaneRun(uint64_t epoch, uint64_t run, Traffic traffic);

v1::RankRunStats ToProto(const RankStats& stats);
RankStats FromProto(const v1::RankRunStats& message);

// By probe; none: the rank sat out. Nothing is checked: that is LinkSurvey's.
using MeasuredLinks = google::protobuf::RepeatedPtrField<v1::MeasuredLink>;
MeasuredLinks ToProto(std::span<const std::optional<Link>> links);
std::vector<std::optional<Link>> FromProto(const MeasuredLinks& messages);

v1::Outcome ToOutcome(const absl::Status& status);
absl::Status FromOutcome(const v1::Outcome& outcome);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_RUN_PLAN_H_
