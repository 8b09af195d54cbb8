#include "engine/model/weight_image.h"

#include <algorithm>
#include <iterator>

#include "kernels/return_if_error.h"

namespace meshfill {

absl::Status WeightImage::Add(Device& device, LayerPart part, int copy, int64_t out_features,
                              int64_t in_features, const ElementKind& kind) {
  constexpr int64_t kLineBytes = 64;  // one cache line
  ASSIGN_OR_RETURN(const PackedForm form, device.FormOf(out_features, in_features, kind));
  matrices.push_back({.part = part,
                      .copy = copy,
                      .out_features = out_features,
                      .in_features = in_features,
                      .kind = kind,
                      .form = form,
                      .begin = (bytes + kLineBytes - 1) / kLineBytes * kLineBytes});
  bytes = matrices.back().begin + form.bytes;
  return absl::OkStatus();
}

int64_t WeightImage::Cut(int index, int of) const {
  if (index == of) return bytes;
  const int64_t even = static_cast<int64_t>(static_cast<__int128>(bytes) * index / of);
  const auto behind =
      std::upper_bound(matrices.begin(), matrices.end(), even,
                       [](int64_t byte, const Matrix& matrix) { return byte < matrix.begin; });
  if (behind == matrices.begin()) return 0;
  const Matrix& matrix = *std::prev(behind);
  return matrix.begin + matrix.form.ByteOf((even - matrix.begin) / matrix.form.panel_bytes);
}

}  // namespace meshfill
