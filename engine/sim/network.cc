#include "engine/sim/network.h"

#include <algorithm>
#include <cmath>

namespace meshfill::sim {

Network::Network(const Cluster& cluster, int gpus)
    : cluster_(cluster), nodes_((gpus + cluster.gpus_per_node - 1) / cluster.gpus_per_node) {}

void Network::Begin(int id, int from_gpu, int to_gpu, double bytes, Nanos now) {
  if (id >= static_cast<int>(flows_.size())) flows_.resize(id + 1);
  Flow& flow = flows_[id];
  flow.bytes_left = bytes;
  flow.rate = 0;
  flow.since = now;
  flow.out_node = flow.in_node = -1;
  const int out_node = from_gpu / cluster_.gpus_per_node;
  const int in_node = to_gpu / cluster_.gpus_per_node;
  if (out_node == in_node) {
    SetRate(id, cluster_.same_node.flow_bytes_per_second, now);
    return;
  }
  flow.out_node = out_node;
  flow.in_node = in_node;
  flow.out_place = static_cast<int>(nodes_[out_node].out.size());
  flow.in_place = static_cast<int>(nodes_[in_node].in.size());
  nodes_[out_node].out.push_back(id);
  nodes_[in_node].in.push_back(id);
  MarkDirty(out_node);
  MarkDirty(in_node);
}

void Network::Settle(Nanos now) {
  for (int node : dirty_) {
    for (int id : nodes_[node].out) SetRate(id, ShareOf(flows_[id]), now);
    for (int id : nodes_[node].in) SetRate(id, ShareOf(flows_[id]), now);
    nodes_[node].dirty = false;
  }
  dirty_.clear();
}

std::pair<int, Nanos> Network::Next() {
  while (!finishes_.empty()) {
    const Finish& next = finishes_.top();
    if (next.version == flows_[next.flow].version) return {next.flow, next.at};
    finishes_.pop();
  }
  return {-1, 0};
}

void Network::End(int id) {
  Flow& flow = flows_[id];
  ++flow.version;
  if (flow.out_node < 0) return;
  Remove(nodes_[flow.out_node].out, flow.out_place, &Flow::out_place);
  Remove(nodes_[flow.in_node].in, flow.in_place, &Flow::in_place);
  MarkDirty(flow.out_node);
  MarkDirty(flow.in_node);
}

void Network::MarkDirty(int node) {
  if (nodes_[node].dirty) return;
  nodes_[node].dirty = true;
  dirty_.push_back(node);
}

void Network::Remove(std::vector<int>& flows, int place, int Flow::*place_of) {
  flows[place] = flows.back();
  flows_[flows[place]].*place_of = place;
  flows.pop_back();
}

void Network::SetRate(int id, double rate, Nanos now) {
  Flow& flow = flows_[id];
  if (rate == flow.rate) return;
  flow.bytes_left =
      std::max(0.0, flow.bytes_left - flow.rate * static_cast<double>(now - flow.since) / kNanosPerSecond);
  flow.since = now;
  flow.rate = rate;
  ++flow.version;
  const Nanos at = now + static_cast<Nanos>(std::ceil(flow.bytes_left / rate * kNanosPerSecond));
  finishes_.push({.at = at, .flow = id, .version = flow.version});
}

double Network::ShareOf(const Flow& flow) const {
  const double most_flows =
      static_cast<double>(std::max(nodes_[flow.out_node].out.size(), nodes_[flow.in_node].in.size()));
  return std::min(cluster_.between_nodes.flow_bytes_per_second, cluster_.node_bytes_per_second / most_flows);
}

}  // namespace meshfill::sim
