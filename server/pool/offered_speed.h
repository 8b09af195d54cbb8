// How fast a rank is, as workers offer it.
#ifndef MESHFILL_SERVER_POOL_OFFERED_SPEED_H_
#define MESHFILL_SERVER_POOL_OFFERED_SPEED_H_

#include "engine/plan/rank_speed.h"
#include "meshfill/v1/control.pb.h"

namespace meshfill {

// Without the links, which are the leader's to know. What comes from outside is for CheckPoolSpeed to judge.
v1::Speed ToProto(const PoolSpeed& speed);
PoolSpeed FromProto(const v1::Speed& message);

// The speed of a pool of both, whose ranks run in lockstep: each part as slow as the slower one. Ranks of two
// processes are taken to share no cores.
PoolSpeed SlowerOf(const PoolSpeed& left, const PoolSpeed& right);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_OFFERED_SPEED_H_
