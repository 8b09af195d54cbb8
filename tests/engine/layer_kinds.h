// Models whose layers differ.
#ifndef MESHFILL_TESTS_ENGINE_LAYER_KINDS_H_
#define MESHFILL_TESTS_ENGINE_LAYER_KINDS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/model/model_shape.h"

namespace meshfill {

// Gives the last `layers` layers a window.
inline void SetWindow(ModelShape& model, int64_t window, int layers) {
  std::vector<LayerForm> forms(model.layers);
  std::fill(forms.end() - layers, forms.end(), LayerForm{.window = window});
  model.kinds = LayerKindsOf(forms);
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_LAYER_KINDS_H_
