#include "engine/sim/lockstep.h"

#include <algorithm>
#include <deque>

namespace meshfill::sim {

double ChannelSpeed::Seconds(const Cluster& cluster, double bytes) const {
  double seconds = 0;
  if (same_node_bytes_per_second > 0) {
    seconds = cluster.same_node.latency_seconds + bytes / same_node_bytes_per_second;
  }
  if (between_nodes_bytes_per_second > 0) {
    seconds =
        std::max(seconds, cluster.between_nodes.latency_seconds + bytes / between_nodes_bytes_per_second);
  }
  return seconds;
}

ChannelSpeed SpeedOf(const std::vector<int>& from, const Placement& placement, const Cluster& cluster) {
  const int ranks = static_cast<int>(from.size());
  const auto node_of = [&](int rank) { return placement.gpu_of_rank[rank] / cluster.gpus_per_node; };
  std::vector<int> out(ranks, 0);  // flows out of each node, and into it
  std::vector<int> in(ranks, 0);
  ChannelSpeed speed;
  int most_flows = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    if (from[rank] == rank) continue;
    if (node_of(rank) == node_of(from[rank])) {
      speed.same_node_bytes_per_second = cluster.same_node.flow_bytes_per_second;
      continue;
    }
    most_flows = std::max({most_flows, ++out[node_of(from[rank])], ++in[node_of(rank)]});
  }
  if (most_flows > 0) {
    speed.between_nodes_bytes_per_second =
        std::min(cluster.between_nodes.flow_bytes_per_second, cluster.node_bytes_per_second / most_flows);
  }
  return speed;
}

double LockstepSeconds(const RankProgram& program, const Placement& placement, const Cluster& cluster) {
  struct State {
    ChannelSpeed speed;
    std::deque<double> arrivals;
    double last_arrival = 0;
  };
  std::vector<State> channels;
  channels.reserve(program.channels.size());
  for (const Channel& channel : program.channels) {
    channels.push_back({.speed = SpeedOf(channel.from, placement, cluster), .arrivals = {}});
  }
  double now = 0;
  for (const Action& action : program.actions) {
    switch (action.kind) {
      case ActionKind::kStart: {
        State& channel = channels[action.channel];
        channel.last_arrival =
            std::max(now, channel.last_arrival) + channel.speed.Seconds(cluster, action.bytes);
        channel.arrivals.push_back(channel.last_arrival);
        break;
      }
      case ActionKind::kWait: {
        State& channel = channels[action.channel];
        now = std::max(now, channel.arrivals.front());
        channel.arrivals.pop_front();
        break;
      }
      case ActionKind::kCompute:
        now += action.flops / cluster.attention_flops_per_second +
               action.blocks * cluster.block_overhead_seconds;
        break;
    }
  }
  return now;
}

}  // namespace meshfill::sim
