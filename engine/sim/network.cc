#include "engine/sim/network.h"

#include <algorithm>
#include <cmath>

namespace meshfill::sim {

Network::Network(const Cluster& cluster, int gpus)
    : cluster_(cluster),
      nodes_((gpus + cluster.gpus_per_node - 1) / cluster.gpus_per_node),
      links_(nodes_ + gpus) {}

void Network::Begin(int id, int from_gpu, int to_gpu, double bytes, Nanos now) {
  if (id >= static_cast<int>(flows_.size())) flows_.resize(id + 1);
  Flow& flow = flows_[id];
  flow.bytes_left = bytes;
  flow.rate = 0;
  flow.since = now;
  flow.out = from_gpu / cluster_.gpus_per_node;
  flow.in = to_gpu / cluster_.gpus_per_node;
  if (flow.out == flow.in) {
    flow.out = nodes_ + from_gpu;
    flow.in = nodes_ + to_gpu;
  }
  flow.out_place = static_cast<int>(links_[flow.out].out.size());
  flow.in_place = static_cast<int>(links_[flow.in].in.size());
  links_[flow.out].out.push_back(id);
  links_[flow.in].in.push_back(id);
  MarkDirty(flow.out);
  MarkDirty(flow.in);
}

void Network::Settle(Nanos now) {
  for (int link : dirty_) {
    for (int id : links_[link].out) SetRate(id, ShareOf(flows_[id]), now);
    for (int id : links_[link].in) SetRate(id, ShareOf(flows_[id]), now);
    links_[link].dirty = false;
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
  Remove(links_[flow.out].out, flow.out_place, &Flow::out_place);
  Remove(links_[flow.in].in, flow.in_place, &Flow::in_place);
  MarkDirty(flow.out);
  MarkDirty(flow.in);
}

void Network::MarkDirty(int link) {
  if (links_[link].dirty) return;
  links_[link].dirty = true;
  dirty_.push_back(link);
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
  const double flows = static_cast<double>(std::max(links_[flow.out].out.size(), links_[flow.in].in.size()));
  if (flow.out >= nodes_) return cluster_.same_node.bytes_per_second / flows;
  return std::min(cluster_.between_nodes.bytes_per_second, cluster_.node_bytes_per_second / flows);
}

}  // namespace meshfill::sim
