// Weights that the workers of a pool share: each keeps its share of every part, packed, and gathers the
// others' a part ahead of its use (weight_feed.h).
//
//     part         0     1     2     3       of 4 workers, the shares of each part (weight_image.h)
//     worker 0    [0··· [0··· [0··· [0···    kept, packed from the files when it is first sent
//     rank        computes                   layer 0: whole
//     thread            gathers              layer 1: in step s of 1 … n−1 worker i sends share i − s + 1 to
//                                            worker i + 1: (n−1)/n of the part's bytes, in and out
//
// The workers of a host are neighbours in this ring, so that a layer comes to each host once.
//
// A run gathers for itself: two runs that live at once have two layers each. The LM head goes to the worker
// alone that reads it, from each of the others.
#ifndef MESHFILL_ENGINE_RUN_SHARDED_WEIGHTS_H_
#define MESHFILL_ENGINE_RUN_SHARDED_WEIGHTS_H_

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "engine/model/model_tensors.h"
#include "engine/model/weight_feed.h"
#include "engine/run/weight_parts.h"
#include "kernels/mutex.h"
#include "kernels/stop_token.h"

namespace meshfill {

// Packed bytes in memory.
struct WeightMemory {
  int64_t bytes = 0;
  int64_t most_bytes = 0;  // the most so far
};

// Thread-safe. The device's memory is the host's; it and the tensors outlive all feeds.
class ShardedWeights {
 public:
  // UNIMPLEMENTED: the device's weights cannot be divided.
  static absl::StatusOr<std::unique_ptr<ShardedWeights>> Make(const ModelTensors& tensors, Device& device);
  ~ShardedWeights();

  int parts() const { return parts_->parts(); }
  uint64_t layout() const { return parts_->layout(); }  // workers share weights with those of the same
  // Begins to gather for so many readers, which read the LM head where the gathering says so. The share stays
  // in memory, until another is asked for and no run has this one any more.
  std::unique_ptr<WeightFeed> Open(Gathering gathering, int readers, const StopToken* stop);
  // Drops the share, unless a run has it.
  void DropUnused();
  WeightMemory memory() const;

 private:
  class Maker;
  class Share;
  class Tally;

  explicit ShardedWeights(std::unique_ptr<const WeightParts> parts);
  std::shared_ptr<Share> ShareOf(const WeightShare& share);

  const std::unique_ptr<const WeightParts> parts_;
  const std::shared_ptr<Tally> tally_;  // shared with the buffers, which may outlive the rest
  Mutex mu_;
  std::shared_ptr<Share> share_ ABSL_GUARDED_BY(mu_);  // the newest; null: none was asked for
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_SHARDED_WEIGHTS_H_
