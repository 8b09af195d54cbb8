// The parts of a model's weights as bytes of a device: how each lies in memory, shares of it, and the part
// that is made of all its bytes. For weights that processes or devices share.
#ifndef MESHFILL_ENGINE_RUN_WEIGHT_PARTS_H_
#define MESHFILL_ENGINE_RUN_WEIGHT_PARTS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/model_tensors.h"
#include "engine/model/weight_feed.h"
#include "engine/model/weight_image.h"
#include "kernels/device.h"

namespace meshfill {

// Immutable; any thread may use it. The tensors and the device outlive it.
class WeightParts {
 public:
  // UNIMPLEMENTED: the device's weights cannot be divided.
  static absl::StatusOr<std::unique_ptr<const WeightParts>> Make(const ModelTensors& tensors, Device& device);

  const ModelTensors& tensors() const { return tensors_; }
  Device& device() const { return device_; }
  int layers() const { return tensors_.config().shape.layers; }
  int parts() const { return static_cast<int>(images_.size()); }  // the layers, then the LM head's
  const WeightImage& image(int part) const { return images_[part]; }
  int64_t most_bytes() const;                                 // of a part
  int64_t BytesOf(int part, const WeightShare& share) const;  // of the share of it
  int64_t BeginOf(int part, const WeightShare& share) const;  // byte of the part where the share begins
  BufferRef ShareOf(int part, const BufferRef& whole, const WeightShare& share) const;  // without a copy
  std::string PartName(int part) const;                                                 // "layer 3"
  // A hash of how the bytes lie: those who share weights have the same.
  uint64_t layout() const;

  // The share's bytes of the part, packed from the files; it has some.
  absl::StatusOr<BufferRef> PackShare(int part, const WeightShare& share,
                                      const BeforeRead& before_read) const;
  // The part whose bytes are `whole`, all of them, which stay where they are.
  absl::StatusOr<std::shared_ptr<const WeightPart>> PartOfBytes(int part, const BufferRef& whole,
                                                                const BeforeRead& before_read) const;

 private:
  WeightParts(const ModelTensors& tensors, Device& device);

  const ModelTensors& tensors_;
  Device& device_;
  const int64_t head_rows_;
  std::vector<WeightImage> images_;  // by part
};

// Memory for parts that one thread makes and frees: it is written again and again, not allocated anew for
// each.
class PartRooms {
 public:
  // `allocate` gives room for any part.
  explicit PartRooms(std::function<absl::StatusOr<BufferRef>()> allocate) : allocate_(std::move(allocate)) {}
  // Room that no part has. Kept until this goes: kPartsAhead of them take turns.
  absl::StatusOr<BufferRef> Take();

 private:
  const std::function<absl::StatusOr<BufferRef>()> allocate_;
  std::vector<BufferRef> rooms_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_WEIGHT_PARTS_H_
