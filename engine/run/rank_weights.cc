#include "engine/run/rank_weights.h"

#include <utility>

namespace meshfill {

RankWeights::RankWeights(std::span<const std::shared_ptr<const Model>> models, const PeerWeights* peers,
                         const std::vector<bool>& reads_head, const StopToken* stop) {
  for (size_t first = 0; first < reads_head.size();) {  // neighbours share a model
    const Model& model = *models[first];
    int readers = 0;
    bool head = false;
    for (; first < reads_head.size() && models[first].get() == &model; ++first) {
      seats_.push_back({.feed = feeds_.size(), .reader = readers++});
      head = head || reads_head[first];
    }
    feeds_.push_back(peers == nullptr ? model.OpenFeed(readers, head, stop)
                                      : peers->Open(*model.tensors(), readers, head, stop));
  }
}

RankWeights::RankWeights(ShardedWeights& weights, int ranks, Gathering gathering, const StopToken* stop) {
  for (int rank = 0; rank < ranks; ++rank) seats_.push_back({.feed = 0, .reader = rank});
  feeds_.push_back(weights.Open(std::move(gathering), ranks, stop));
}

}  // namespace meshfill
