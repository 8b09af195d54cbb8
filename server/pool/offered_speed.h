// How fast a rank is, and what a worker's weights take, as workers offer it.
#ifndef MESHFILL_SERVER_POOL_OFFERED_SPEED_H_
#define MESHFILL_SERVER_POOL_OFFERED_SPEED_H_

#include "engine/plan/plan_weights.h"
#include "engine/plan/rank_speed.h"
#include "meshfill/v1/control.pb.h"

namespace meshfill {

// Speeds travel without the links, which are the leader's to know. What comes from outside is for
// CheckPoolSpeed to judge.
v1::Speed ToProto(const PoolSpeed& speed);
PoolSpeed FromProto(const v1::Speed& message);

// ToProto and FromProto for weights. What comes from outside is for CheckPlanWeights to judge.
v1::Weights ToProto(const PlanWeights& weights);
PlanWeights FromProto(const v1::Weights& message);

// The speed of a pool of both, whose ranks run in lockstep: each part as slow as the slower one. Ranks of two
// processes are taken to share no cores.
PoolSpeed SlowerOf(const PoolSpeed& left, const PoolSpeed& right);

// By which ranks are compared: seconds of a rank for a FLOP of products and one of attention.
double SecondsPerFlop(const PoolSpeed& speed);
// From how many times as many seconds on a rank is slower: measurements of machines of one kind differ, too.
inline constexpr double kSlower = 1.25;

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_OFFERED_SPEED_H_
