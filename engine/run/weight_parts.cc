#include "engine/run/weight_parts.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/model/streamed_weights.h"
#include "kernels/return_if_error.h"
#include "kernels/word_hash.h"

namespace meshfill {

WeightParts::WeightParts(const ModelTensors& tensors, Device& device)
    : tensors_(tensors), device_(device), head_rows_(RowsOfHeadPart(tensors.config().shape)) {}

absl::StatusOr<std::unique_ptr<const WeightParts>> WeightParts::Make(const ModelTensors& tensors,
                                                                     Device& device) {
  std::unique_ptr<WeightParts> parts(new WeightParts(tensors, device));
  const ModelShape& shape = tensors.config().shape;
  for (int layer = 0; layer < shape.layers; ++layer) {
    ASSIGN_OR_RETURN(WeightImage image, tensors.LayerImage(device, layer));
    parts->images_.push_back(std::move(image));
  }
  for (int64_t first = 0; first < shape.vocab; first += parts->head_rows_) {
    ASSIGN_OR_RETURN(WeightImage image,
                     tensors.HeadImage(device, std::min(parts->head_rows_, shape.vocab - first)));
    parts->images_.push_back(std::move(image));
  }
  return parts;
}

int64_t WeightParts::most_bytes() const {
  int64_t most = 0;
  for (const WeightImage& image : images_) most = std::max(most, image.bytes);
  return most;
}

int64_t WeightParts::BeginOf(int part, const WeightShare& share) const {
  return images_[part].Cut(share.index, share.of);
}

int64_t WeightParts::BytesOf(int part, const WeightShare& share) const {
  return images_[part].Cut(share.index + 1, share.of) - BeginOf(part, share);
}

BufferRef WeightParts::ShareOf(int part, const BufferRef& whole, const WeightShare& share) const {
  return PartOf(whole, static_cast<size_t>(BeginOf(part, share)), static_cast<size_t>(BytesOf(part, share)));
}

std::string WeightParts::PartName(int part) const {
  return part < layers() ? absl::StrCat("layer ", part) : "the LM head";
}

uint64_t WeightParts::layout() const {
  WordHash hash;
  for (const WeightImage& image : images_) {
    for (const WeightImage::Matrix& matrix : image.matrices) {
      for (const auto word : {static_cast<uint64_t>(matrix.begin), static_cast<uint64_t>(matrix.form.bytes),
                              static_cast<uint64_t>(matrix.form.panel_bytes), matrix.form.layout}) {
        hash.Add(word);
      }
    }
  }
  return hash.Finish();
}

absl::StatusOr<BufferRef> WeightParts::PackShare(int part, const WeightShare& share,
                                                 const BeforeRead& before_read) const {
  const int64_t begin = BeginOf(part, share), end = begin + BytesOf(part, share);
  if (part < layers()) {
    return tensors_.PackLayerBytes(device_, part, images_[part], begin, end, before_read);
  }
  return tensors_.PackHeadBytes(device_, (part - layers()) * head_rows_, images_[part], begin, end,
                                before_read);
}

absl::StatusOr<std::shared_ptr<const WeightPart>> WeightParts::PartOfBytes(
    int part, const BufferRef& whole, const BeforeRead& before_read) const {
  const WeightImage& image = images_[part];
  auto made = std::make_shared<WeightPart>();
  if (part < layers()) {
    ASSIGN_OR_RETURN(made->layer, tensors_.LayerOf(device_, part, image, whole, before_read));
  } else {
    const WeightImage::Matrix& head = image.matrices.front();
    ASSIGN_OR_RETURN(made->head, device_.WeightOf(head.out_features, head.in_features, head.kind, whole, {}));
  }
  return made;
}

absl::StatusOr<BufferRef> PartRooms::Take() {
  for (const BufferRef& room : rooms_) {
    // Pieces of it have the buffer, or what it has (PartOf).
    const bool has_pieces = room->allocation() != nullptr && room->allocation().use_count() > 1;
    if (room.use_count() == 1 && !has_pieces) return room;
  }
  ASSIGN_OR_RETURN(BufferRef room, allocate_());
  return rooms_.emplace_back(std::move(room));
}

}  // namespace meshfill
