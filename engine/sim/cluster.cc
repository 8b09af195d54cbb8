#include "engine/sim/cluster.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace meshfill::sim {
namespace {

absl::Status Refuse(const char* field, double value, const char* rule) {
  return absl::InvalidArgumentError(absl::StrCat("cluster: ", field, " is ", value, "; it must be ", rule));
}

}  // namespace

Topology TopologyOf(const Cluster& cluster, int gpus) {
  Topology topology = {.node_of_seat = {},
                       .same_node = cluster.same_node,
                       .between_nodes = cluster.between_nodes,
                       .node_bytes_per_second = cluster.node_bytes_per_second};
  for (int gpu = 0; gpu < gpus; ++gpu) topology.node_of_seat.push_back(gpu / cluster.gpus_per_node);
  return topology;
}

Cluster WithoutSharing(Cluster cluster) {
  cluster.node_bytes_per_second = Cluster::kUnshared;
  return cluster;
}

absl::Status CheckCluster(const Cluster& cluster) {
  if (cluster.gpus_per_node < 1) return Refuse("gpus_per_node", cluster.gpus_per_node, "at least 1");
  const auto positive = [](double value) { return value > 0; };  // false for NaN too
  if (!positive(cluster.same_node.bytes_per_second)) {
    return Refuse("same_node's flow bandwidth", cluster.same_node.bytes_per_second, "above 0");
  }
  if (!positive(cluster.between_nodes.bytes_per_second)) {
    return Refuse("between_nodes' flow bandwidth", cluster.between_nodes.bytes_per_second, "above 0");
  }
  if (!positive(cluster.node_bytes_per_second)) {
    return Refuse("the node's shared bandwidth", cluster.node_bytes_per_second, "above 0");
  }
  if (!positive(cluster.attention_flops_per_second) || std::isinf(cluster.attention_flops_per_second)) {
    return Refuse("the attention FLOP/s", cluster.attention_flops_per_second, "above 0 and finite");
  }
  const auto duration = [](double value) { return value >= 0 && std::isfinite(value); };
  if (!duration(cluster.same_node.latency_seconds)) {
    return Refuse("same_node's latency", cluster.same_node.latency_seconds, "a duration");
  }
  if (!duration(cluster.between_nodes.latency_seconds)) {
    return Refuse("between_nodes' latency", cluster.between_nodes.latency_seconds, "a duration");
  }
  if (!duration(cluster.block_overhead_seconds)) {
    return Refuse("block_overhead", cluster.block_overhead_seconds, "a duration");
  }
  const Variation& variation = cluster.variation;
  if (!(variation.straggler_share >= 0 && variation.straggler_share <= 1)) {
    return Refuse("straggler_share", variation.straggler_share, "from 0 to 1");
  }
  if (!(variation.straggler_slowdown >= 1) || std::isinf(variation.straggler_slowdown)) {
    return Refuse("straggler_slowdown", variation.straggler_slowdown, "at least 1");
  }
  if (!duration(variation.jitter)) return Refuse("jitter", variation.jitter, "at least 0");
  return absl::OkStatus();
}

}  // namespace meshfill::sim
