// Weights that the devices of one process share: each keeps its share of every part, and copies the others'
// out of their memory, a part ahead of its use (weight_feed.h).
//
//     part         0     1     2     3       of 4 devices, the shares of each part (weight_image.h)
//     device 0    [0··· [0··· [0··· [0···    kept, packed when the model is loaded
//     rank        computes                   layer 0: whole
//     thread            copies               shares 1, 2, 3 of layer 1, of device 1, 2, 3: (n−1)/n of the
//     bytes
//
// Device i begins with share i + 1, so that at equal paces no device is read by two at once. The shares stay
// as they are, so that nobody waits for another.
#ifndef MESHFILL_ENGINE_RUN_PEER_WEIGHTS_H_
#define MESHFILL_ENGINE_RUN_PEER_WEIGHTS_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/model_tensors.h"
#include "engine/model/weight_feed.h"
#include "engine/run/weight_parts.h"
#include "kernels/device.h"
#include "kernels/stop_token.h"

namespace meshfill {

// Immutable; any thread may open feeds. Tensors and devices outlive it, and it all feeds.
class PeerWeights {
 public:
  struct Place {
    const ModelTensors* tensors;
    Device* device;
  };

  // Packs the shares, those of all devices side by side. UNIMPLEMENTED: the devices' weights cannot be
  // divided. Other errors: what reading, packing or the device failed with.
  static absl::StatusOr<std::unique_ptr<const PeerWeights>> Load(const std::vector<Place>& places);

  // Begins to copy for so many readers on the device that has these tensors. `with_head`: they also read the
  // LM head. `stop` may be null, and outlives the feed.
  std::unique_ptr<WeightFeed> Open(const ModelTensors& tensors, int readers, bool with_head,
                                   const StopToken* stop) const;

 private:
  class Maker;

  // A device, and what it keeps.
  struct Peer {
    std::unique_ptr<const WeightParts> parts;
    std::vector<BufferRef> shares;  // by part; null: the share has nothing of it
  };

  absl::Status Pack(const StopToken& stop, int index);

  std::vector<Peer> peers_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_PEER_WEIGHTS_H_
