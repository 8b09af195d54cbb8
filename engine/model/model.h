// A loaded model: its config and its weights, shared by the ranks that compute on a device.
#ifndef MESHFILL_ENGINE_MODEL_MODEL_H_
#define MESHFILL_ENGINE_MODEL_MODEL_H_

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/layer.h"
#include "engine/model/model_config.h"
#include "engine/model/weight_feed.h"
#include "kernels/device.h"
#include "kernels/stop_token.h"
#include "kernels/stream.h"

namespace meshfill {

class EmbeddingTable;
class ModelTensors;
class StreamedWeights;

// Where a model's weights go.
struct WeightPlace {
  WeightPlace(Device* on, WeightMode as = WeightMode::kResident, bool in_host_memory = true)
      : device(on), mode(as), in_host_memory(in_host_memory) {}
  Device* device;
  WeightMode mode;
  bool in_host_memory;  // true: the embedding's rows are read from the file; false: it is on the device
};

class Model {
 public:
  // Reads config.json, then decides the compute dtype (`dtype`, or f32 for f32 weights and bf16 otherwise)
  // and asks `place_for` where the weights of it go, when all else has been checked; an error of it is this
  // one's. The device outlives the model where they do not stay. NOT_FOUND: no such folder or file.
  // INVALID_ARGUMENT: anything in it is broken or not implemented; the message names the file, the tensor or
  // key, and what to do.
  static absl::StatusOr<std::unique_ptr<Model>> Load(
      const std::string& folder, std::optional<DType> dtype,
      const std::function<absl::StatusOr<WeightPlace>(const ModelShape&)>& place_for);
  ~Model();

  const ModelConfig& config() const { return config_; }
  const ModelShape& shape() const { return config_.shape; }  // with the compute dtype
  WeightMode weight_mode() const;

  // x[t] = the embedding of ids[t] times the model's scale, [ids, hidden], f32.
  absl::Status Embed(Stream& stream, std::span<const uint32_t> ids, float* x) const;
  const PlacedVector& final_norm() const { return final_norm_; }  // [hidden]

  // Parts of the weights: the layers, and behind them those of the LM head, [vocab, hidden], in the order of
  // its rows.
  int parts() const;
  // Opens a feed for `readers` ranks of one run. `with_head`: they also read the LM head. `stop` may be null,
  // and outlives the feed; so does the model.
  std::unique_ptr<WeightFeed> OpenFeed(int readers, bool with_head, const StopToken* stop) const;
  // The tensors of weights that are not resident; else null. A feed of weights that workers or devices share
  // comes from what is made of these (engine/run/sharded_weights.h, peer_weights.h). Where weights are
  // sharded, every feed does.
  const ModelTensors* tensors() const;

 private:
  Model();
  ModelConfig config_;
  std::unique_ptr<EmbeddingTable> embedding_;
  std::vector<WeightPart> resident_;             // empty: they are not
  std::unique_ptr<StreamedWeights> streamed_;    // null: they are not
  std::unique_ptr<const ModelTensors> sharded_;  // null: they are not
  PlacedVector final_norm_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_MODEL_H_
