#include "engine/model/weight_image.h"

#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

constexpr int64_t kAlignment = 256;  // as devices align memory: their products ask no more

}  // namespace

absl::Status WeightImage::Add(Device& device, LayerPart part, int copy, int64_t out_features,
                              int64_t in_features, const ElementKind& kind) {
  ASSIGN_OR_RETURN(const PackedForm form, device.FormOf(out_features, in_features, kind));
  matrices.push_back({.part = part,
                      .copy = copy,
                      .out_features = out_features,
                      .in_features = in_features,
                      .kind = kind,
                      .form = form,
                      .begin = (bytes + kAlignment - 1) / kAlignment * kAlignment});
  bytes = matrices.back().begin + form.bytes;
  return absl::OkStatus();
}

int64_t WeightImage::Cut(int index, int of) const {
  if (index == of) return bytes;
  return static_cast<int64_t>(static_cast<__int128>(bytes) * index / of) / kAlignment * kAlignment;
}

}  // namespace meshfill
