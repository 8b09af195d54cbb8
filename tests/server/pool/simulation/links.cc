// The links that ranks measure, and what the leader makes of them.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/pool/simulation/pool_simulation.h"
#include "tests/server/pool/simulation/simulated_pool.h"

namespace meshfill {

// Only what the leader does not know is measured, by ranks that have such a link.
void PoolSimulation::CheckProbes(const std::vector<LinkProbe>& probes, const WorkerMachine::RunPart& part) {
  const bool of_this_leader = part.epoch >= kEpochsOfALeader * leader_incarnation_;
  if (!probes.empty() && of_this_leader && !leader_measures_links_) Fail("links that are given are measured");
  const int ranks = part.plan.ranks();
  for (const LinkProbe& probe : probes) {
    int alone = 0;
    for (size_t rank = 0; rank < probe.peer_of_rank.size(); ++rank) {
      alone += probe.peer_of_rank[rank] == static_cast<int>(rank) ? 1 : 0;
    }
    if (!IsPairing(probe, ranks) || alone == ranks) Fail("a probe without pairs of ranks");
  }
}

// By the virtual network; or nonsense, as long as there are faults.
std::optional<meshfill::Link> PoolSimulation::MeasuredLink(const LinkProbe& probe, const Mesh& mesh,
                                                           int rank) {
  const auto leaves_host = [&](int of) {
    return HostOf(mesh.members[of].node) != HostOf(mesh.members[probe.peer_of_rank[of]].node);
  };
  if (probe.peer_of_rank[rank] == rank) return std::nullopt;
  if (!healed_ && Chance(0.1)) {
    constexpr double kNonsense[] = {0, -1, std::numeric_limits<double>::quiet_NaN(),
                                    std::numeric_limits<double>::infinity(), 1e300};
    return meshfill::Link{.latency_seconds = kNonsense[Draw(1, 4)],
                          .bytes_per_second = kNonsense[Draw(0, 4)]};
  }
  if (!leaves_host(rank)) return kOnHost;
  int flows = 0;
  for (size_t other = 0; other < mesh.members.size(); ++other) {
    const bool same_host = HostOf(mesh.members[other].node) == HostOf(mesh.members[rank].node);
    flows += same_host && leaves_host(static_cast<int>(other)) ? 1 : 0;
  }
  return meshfill::Link{.latency_seconds = kBetweenHosts.latency_seconds,
                        .bytes_per_second = std::min(kBetweenHosts.bytes_per_second, kOutOfHost / flows)};
}

// The leader plans with what is so, or with what it began with; with the former after a run on all ranks.
void PoolSimulation::CheckLinks(bool all_measured) {
  const Topology links = leader_->capacity().topology;
  const auto is = [](double value, double either, double other) {
    return value == other || std::abs(value / either - 1) < 1e-9;
  };
  constexpr double kNothingShared = std::numeric_limits<double>::infinity();
  if (!is(links.same_node.bytes_per_second, kOnHost.bytes_per_second, kAssumed.bytes_per_second) ||
      !is(links.same_node.latency_seconds, kOnHost.latency_seconds, kAssumed.latency_seconds) ||
      !is(links.between_nodes.bytes_per_second, kBetweenHosts.bytes_per_second, kAssumed.bytes_per_second) ||
      !is(links.between_nodes.latency_seconds, kBetweenHosts.latency_seconds, kAssumed.latency_seconds) ||
      !is(links.node_bytes_per_second, kOutOfHost, kNothingShared)) {
    Fail("plans with links that nobody has");
  }
  for (const PoolLink& link : leader_->links()) {
    const bool known = link.source == (leader_measures_links_ ? "measured" : "given");
    if (all_measured && !known) Fail(absl::StrCat("the link ", link.where, " is ", link.source));
  }
}

}  // namespace meshfill
