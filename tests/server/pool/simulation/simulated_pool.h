// What the pool of a story is made of: its model and speeds, its network, and how its prompts are planned.
#ifndef MESHFILL_TESTS_SERVER_POOL_SIMULATION_SIMULATED_POOL_H_
#define MESHFILL_TESTS_SERVER_POOL_SIMULATION_SIMULATED_POOL_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/pool/leader.h"
#include "server/pool/pool_planner.h"

namespace meshfill {

inline constexpr uint32_t kPoison = 666;            // an id that kills whoever computes with it
inline constexpr uint64_t kEpochsOfALeader = 1000;  // more than one has in a story
inline constexpr absl::Duration kHungBound =
    absl::Seconds(5);  // hang_timeout, stop_timeout and the way of the messages
inline constexpr absl::Duration kKeptOut = absl::Seconds(1);  // whoever did not prepare, at most
inline constexpr char kTenant[] = "tenant";
inline constexpr int kLongestPrompt = 72;
inline constexpr int64_t kTokenBytes = 3 * 2 * 2 * 16 * 4;  // of kept K and V: layers, K and V, heads, of f32

// The network: what a flow moves, and what the flows out of a host do together.
inline constexpr Link kOnHost = {.latency_seconds = 5e-5, .bytes_per_second = 2e9};
inline constexpr Link kBetweenHosts = {.latency_seconds = 1e-3, .bytes_per_second = 1e8};
inline constexpr double kOutOfHost = 1.5e8;
inline constexpr Link kAssumed = {.latency_seconds = 2e-4, .bytes_per_second = 1e9};

inline int HostOf(int node) { return node / 2; }

v1::ModelId SimulatedModel();
v1::Speed SimulatedSpeed();
const ModelShape& SimulatedShape();

// As PlanForPool of the simulated model. Planning is pure: what one story has planned, the next need not plan
// again. For any thread.
absl::StatusOr<PlanChoice> RememberedPlan(const PoolCapacity& capacity, int64_t tokens,
                                          const PrefillOptions& options, const CachedPrefix& cached);

// Bytes of a rank, where the longest prompt runs in a few pieces on so many. For any thread.
int64_t SmallRankBytes(int ranks);

// Bytes that the longest prompt takes on a rank that is alone. For any thread.
int64_t MostRunBytes();

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_POOL_SIMULATION_SIMULATED_POOL_H_
