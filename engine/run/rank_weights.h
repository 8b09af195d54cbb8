// The feeds of one run's ranks in this process: those of one model share one.
#ifndef MESHFILL_ENGINE_RUN_RANK_WEIGHTS_H_
#define MESHFILL_ENGINE_RUN_RANK_WEIGHTS_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/model/model.h"
#include "engine/run/peer_weights.h"
#include "engine/run/sharded_weights.h"
#include "kernels/stop_token.h"

namespace meshfill {

class RankWeights {
 public:
  // `models` and `reads_head` by rank. `peers`: what the models' devices share; null: nothing. Begins to read
  // at once. Models, peers and token outlive it.
  RankWeights(std::span<const std::shared_ptr<const Model>> models, const PeerWeights* peers,
              const std::vector<bool>& reads_head, const StopToken* stop);
  // The same of a model that is sharded, which all ranks share.
  RankWeights(ShardedWeights& weights, int ranks, Gathering gathering, const StopToken* stop);

  WeightFeed& feed(size_t rank) const { return *feeds_[seats_[rank].feed]; }
  int reader(size_t rank) const { return seats_[rank].reader; }
  uint64_t reads(size_t rank) const { return feed(rank).reads(); }

 private:
  struct Seat {
    size_t feed;
    int reader;
  };
  std::vector<std::unique_ptr<WeightFeed>> feeds_;
  std::vector<Seat> seats_;  // by rank
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_RANK_WEIGHTS_H_
