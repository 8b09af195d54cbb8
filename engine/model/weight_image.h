// The matrices of a part of the weights as bytes: packed, one after the other, panel by panel.
//
//     layer   | qkv 0 | qkv 1 | … | o 0 | o 1 | … | gate_up 0 | …
//     shares  |     0     |     1     |     2     |     3     |      cut evenly, at multiples of 256 bytes
//
// Processes, or devices, that share weights keep one share each. All bytes together are what PackWeight would
// have made, so that products have the same bits.
#ifndef MESHFILL_ENGINE_MODEL_WEIGHT_IMAGE_H_
#define MESHFILL_ENGINE_MODEL_WEIGHT_IMAGE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "engine/model/layer_shape.h"
#include "kernels/device.h"

namespace meshfill {

struct WeightImage {
  struct Matrix {
    LayerPart part;  // which matrix of the layer
    int copy = 0;    // the expert's
    int64_t out_features = 0;
    int64_t in_features = 0;
    ElementKind kind = {};
    PackedForm form;
    int64_t begin = 0;  // byte of the image
  };

  // Puts a matrix of so many features behind the others, at a multiple of 256 bytes. Errors: those of
  // Device::FormOf.
  absl::Status Add(Device& device, LayerPart part, int copy, int64_t out_features, int64_t in_features,
                   const ElementKind& kind);

  // Where share `index` of `of` begins; `index` may be `of`. Shares differ by 256 bytes at most: all wait
  // for the largest, and a layer may have fewer panels than there are shares.
  int64_t Cut(int index, int of) const;

  std::vector<Matrix> matrices;
  int64_t bytes = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_MODEL_WEIGHT_IMAGE_H_
