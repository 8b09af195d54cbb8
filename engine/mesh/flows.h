// Messages that all ranks send at once, seen from the nodes: how many share a node's links.
#ifndef MESHFILL_ENGINE_MESH_FLOWS_H_
#define MESHFILL_ENGINE_MESH_FLOWS_H_

#include <algorithm>
#include <vector>

namespace meshfill {

class Flows {
 public:
  explicit Flows(int nodes) : out_(nodes, 0), in_(nodes, 0) {}

  void Add(int from_node, int to_node) {
    if (from_node == to_node) {
      inside_ = true;
    } else {
      most_ = std::max({most_, ++out_[from_node], ++in_[to_node]});
    }
  }

  int most() const { return most_; }       // out of a node, or into it; 0: none leaves its node
  bool inside() const { return inside_; }  // some stay in their node

 private:
  std::vector<int> out_;  // flows, by node
  std::vector<int> in_;
  int most_ = 0;
  bool inside_ = false;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MESH_FLOWS_H_
