// A run's way through the weights of a model on one device: each layer in turn, then the LM head.
//
// The ranks of the run that compute on the device read the same feed, each at its own pace:
//
//     resident    every part is there
//     streamed    a thread packs parts from the model's files, one ahead of the rank that is furthest behind:
//
//                     layer      0   1   2   3   4
//                     rank 0         ●                       computes layer 1
//                     rank 1             ●                   computes layer 2
//                     in memory      x   x                   layer 3 waits until rank 0 gives layer 1 back
//
//                 so that two parts are in memory at most, however far apart the ranks are. A rank waits for
//                 ranks behind it alone, which wait for nothing of it.
#ifndef MESHFILL_ENGINE_MODEL_WEIGHT_FEED_H_
#define MESHFILL_ENGINE_MODEL_WEIGHT_FEED_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/model/layer.h"
#include "engine/model/layer_shape.h"
#include "kernels/device.h"

namespace meshfill {

// What is read at a time: a layer, or rows of the LM head. Parts are numbered, layers first.
struct WeightPart {
  LayerWeights layer;
  std::unique_ptr<PackedWeight> head;  // [rows, hidden]; null: a layer
};

// Thread-safe.
class WeightFeed {
 public:
  virtual ~WeightFeed() = default;  // no reader uses it any more

  // Part `part`, once it is there; readers ask for later and later ones. Until the reader asks again, or
  // leaves, the part stays. CANCELLED: the run was stopped. DEADLINE_EXCEEDED: for `timeout` nothing was
  // read. Else what reading or packing failed with.
  virtual absl::StatusOr<const WeightPart*> Take(int reader, int part, absl::Duration timeout) = 0;
  // The reader asks for nothing more.
  virtual void Leave(int reader) = 0;
  // How often the files were read, so that others see that a rank waits for something that goes on.
  virtual uint64_t reads() const = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_WEIGHT_FEED_H_
