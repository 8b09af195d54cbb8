// Flows under virtual time, by processor sharing: a share that a flow cannot use is not handed to others. A
// flow inside a node gets an equal share of its source GPU's outgoing and its target GPU's incoming port,
// each as fast as one flow. A flow between nodes runs at most at its own bandwidth, and at most at an equal
// share of its source node's outgoing and its target node's incoming link.
//
// Rates change only when a flow of the same node begins or ends. Begin and End may be called any number of
// times at one instant; Settle then brings the rates of the nodes they touched up to date.
#ifndef MESHFILL_ENGINE_SIM_NETWORK_H_
#define MESHFILL_ENGINE_SIM_NETWORK_H_

#include <cstdint>
#include <functional>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/sim/cluster.h"

namespace meshfill::sim {

// Nanoseconds of virtual time: whole numbers, so that equal instants are equal.
using Nanos = int64_t;
inline constexpr double kNanosPerSecond = 1e9;

class Network {
 public:
  // `gpus` in all; flows are named by small numbers from 0, which the caller may use again after a flow has
  // ended.
  Network(const Cluster& cluster, int gpus);

  void Begin(int flow, int from_gpu, int to_gpu, double bytes, Nanos now);

  // Call after Begin and End of this instant.
  void Settle(Nanos now);

  // The next flow to end and when; {-1, 0} if none is under way. Settle has been called.
  std::pair<int, Nanos> Next();

  // The flow that Next named has ended.
  void End(int flow);

 private:
  struct Flow {
    int out = -1;  // links_ that it shares, by index
    int in = -1;
    int out_place = 0;  // place in the list of its `out` link
    int in_place = 0;
    double bytes_left = 0;
    double rate = 0;  // bytes per second
    Nanos since = 0;  // when bytes_left was true
    uint32_t version = 0;
  };
  // What flows share: the links of each node, then the ports of each GPU.
  struct Link {
    std::vector<int> out;
    std::vector<int> in;
    bool dirty = false;
  };
  struct Finish {
    Nanos at;
    int flow;
    uint32_t version;
    bool operator>(const Finish& other) const { return std::tie(at, flow) > std::tie(other.at, other.flow); }
  };

  void MarkDirty(int link);
  void Remove(std::vector<int>& flows, int place, int Flow::*place_of);
  void SetRate(int flow, double rate, Nanos now);
  double ShareOf(const Flow& flow) const;

  const Cluster& cluster_;
  std::vector<Flow> flows_;
  const int nodes_;
  std::vector<Link> links_;
  std::vector<int> dirty_;
  std::priority_queue<Finish, std::vector<Finish>, std::greater<>> finishes_;
};

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_NETWORK_H_
