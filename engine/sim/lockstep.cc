#include "engine/sim/lockstep.h"

#include <algorithm>
#include <deque>

#include "engine/mesh/flows.h"

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
  const auto node_of = [&](int rank) { return placement.seat_of_rank[rank] / cluster.gpus_per_node; };
  Flows flows(ranks);  // no more nodes than ranks
  for (int rank = 0; rank < ranks; ++rank) {
    if (from[rank] != rank) flows.Add(node_of(from[rank]), node_of(rank));
  }
  ChannelSpeed speed;
  if (flows.inside()) speed.same_node_bytes_per_second = cluster.same_node.bytes_per_second;
  if (flows.most() > 0) {
    speed.port_bytes_per_second = cluster.node_bytes_per_second / flows.most();
    speed.between_nodes_bytes_per_second =
        std::min(cluster.between_nodes.bytes_per_second, speed.port_bytes_per_second);
  }
  return speed;
}

namespace {

// Messages that use the same links share them: as a whole they end as if they went one after the other.
class LockstepClock {
 public:
  LockstepClock(const RankProgram& program, const Placement& placement, const Cluster& cluster)
      : cluster_(cluster) {
    channels_.reserve(program.channels.size());
    for (const Channel& channel : program.channels) {
      channels_.push_back({.speed = SpeedOf(channel.from, placement, cluster), .arrivals = {}});
    }
  }

  double now() const { return now_; }

  void Start(const Action& action) {
    ChannelState& channel = channels_[action.channel];
    const double leaves = std::max(now_, channel.last_arrival);
    double arrives = leaves;
    if (channel.speed.same_node_bytes_per_second > 0) {
      same_node_free_ = std::max(same_node_free_, leaves + cluster_.same_node.latency_seconds) +
                        action.bytes / channel.speed.same_node_bytes_per_second;
      arrives = same_node_free_;
    }
    if (channel.speed.between_nodes_bytes_per_second > 0) {
      const double moves = leaves + cluster_.between_nodes.latency_seconds;
      port_free_ = std::max(port_free_, moves) + action.bytes / channel.speed.port_bytes_per_second;
      arrives = std::max(
          {arrives, port_free_, moves + action.bytes / channel.speed.between_nodes_bytes_per_second});
    }
    channel.last_arrival = arrives;
    channel.arrivals.push_back(arrives);
  }

  void Wait(int channel) {
    now_ = std::max(now_, channels_[channel].arrivals.front());
    channels_[channel].arrivals.pop_front();
  }

  void Compute(const Action& action) {
    now_ +=
        action.flops / cluster_.attention_flops_per_second + action.blocks * cluster_.block_overhead_seconds;
  }

 private:
  struct ChannelState {
    ChannelSpeed speed;
    std::deque<double> arrivals;  // arrival times of messages not yet waited for
    double last_arrival = 0;
  };

  const Cluster& cluster_;
  std::vector<ChannelState> channels_;
  double same_node_free_ = 0;  // from when on the links carry nothing
  double port_free_ = 0;
  double now_ = 0;
};

}  // namespace

double LockstepSeconds(const RankProgram& program, const Placement& placement, const Cluster& cluster) {
  LockstepClock clock(program, placement, cluster);
  for (const Action& action : program.actions) {
    switch (action.kind) {
      case ActionKind::kStart:
        clock.Start(action);
        break;
      case ActionKind::kWait:
        clock.Wait(action.channel);
        break;
      case ActionKind::kCompute:
        clock.Compute(action);
        break;
    }
  }
  return clock.now();
}

}  // namespace meshfill::sim
