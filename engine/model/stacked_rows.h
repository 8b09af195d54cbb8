// The rows of linear layers that are one product, as a device packs them.
#ifndef MESHFILL_ENGINE_MODEL_STACKED_ROWS_H_
#define MESHFILL_ENGINE_MODEL_STACKED_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/found_weight.h"
#include "engine/model/model_config.h"
#include "engine/model/weight_feed.h"
#include "kernels/device.h"

namespace meshfill {

int64_t WidthOf(std::span<const FoundLinear> linears);             // the layers' common in_features
int64_t StackedOutFeatures(std::span<const FoundLinear> linears);  // sum over all layers

// The biases of the layers, one after the other, 0 where one has none; empty where none has.
absl::StatusOr<std::vector<float>> StackedBias(std::span<const FoundLinear> linears,
                                               const BeforeRead& before_read);

// Reads the rows from their files when they are packed. Copies only what is transposed.
class StackedRows {
 public:
  // `before_read` outlives the object.
  static absl::StatusOr<std::unique_ptr<StackedRows>> Of(std::span<const FoundLinear> linears,
                                                         const Fp8Blocks& blocks,
                                                         const BeforeRead& before_read);
  StackedRows(const StackedRows&) = delete;
  StackedRows& operator=(const StackedRows&) = delete;

  std::span<const WeightRows> rows() const { return rows_; }

 private:
  StackedRows() = default;

  absl::Status Add(const FoundLinear& linear, const Fp8Blocks& blocks, const BeforeRead& before_read);

  std::vector<WeightRows> rows_;
  // What the rows point to.
  std::vector<std::unique_ptr<RowSource>> sources_;
  std::vector<std::vector<float>> biases_, scales_;
  std::vector<std::vector<std::byte>> copies_, exponents_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_STACKED_ROWS_H_
