// Weights of a model that stay in its files: each run packs them a part ahead of their use (weight_feed.h).
//
// Runs share what they have in memory at the same time: a part is packed for the first that wants it, and
// goes with the last that holds it.
#ifndef MESHFILL_ENGINE_MODEL_STREAMED_WEIGHTS_H_
#define MESHFILL_ENGINE_MODEL_STREAMED_WEIGHTS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "engine/model/model_tensors.h"
#include "engine/model/weight_feed.h"
#include "kernels/mutex.h"
#include "kernels/stop_token.h"

namespace meshfill {

// Rows of the LM head in each part but the last, where it comes in parts: about a layer's bytes.
int64_t RowsOfHeadPart(const ModelShape& shape);
int HeadParts(const ModelShape& shape);

// Thread-safe. The device outlives all feeds.
class StreamedWeights {
 public:
  StreamedWeights(std::unique_ptr<const ModelTensors> tensors, Device& device);

  const ModelTensors& tensors() const { return *tensors_; }
  int64_t head_rows() const { return head_rows_; }  // RowsOfHeadPart
  int head_parts() const { return HeadParts(tensors_->config().shape); }
  int held_parts() const { return *held_; }  // parts that are in memory now, over all runs

  // Packs the part, or shares what another run has of it. `before_read` as ModelTensors has it; where another
  // run reads the part, it is called for that one's reads.
  absl::StatusOr<std::shared_ptr<const WeightPart>> Load(int part, const BeforeRead& before_read);

  // Opens a feed of the first `parts` parts for `readers` readers. Reading begins at once. `stop` may be
  // null.
  std::unique_ptr<WeightFeed> Open(int readers, int parts, const StopToken* stop);

 private:
  class Maker;

  // A part that runs share while they have it.
  struct Shared {
    Mutex mu;
    CondVar changed;
    bool reading ABSL_GUARDED_BY(mu) = false;  // a run reads and packs it: who wants the same one waits
    uint64_t reads ABSL_GUARDED_BY(mu) = 0;    // that it has begun
    std::weak_ptr<const WeightPart> part ABSL_GUARDED_BY(mu);
  };

  absl::StatusOr<std::shared_ptr<const WeightPart>> Pack(int part, const BeforeRead& before_read) const;

  const std::unique_ptr<const ModelTensors> tensors_;
  Device& device_;
  const int64_t head_rows_;
  // Parts that are in memory; shared with them, which may outlive the rest.
  const std::shared_ptr<std::atomic<int>> held_ = std::make_shared<std::atomic<int>>(0);
  std::vector<Shared> shared_;  // by part
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_STREAMED_WEIGHTS_H_
