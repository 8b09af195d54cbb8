// A device whose operations are the reference's, under another name.
#ifndef MESHFILL_TESTS_ENGINE_DEVICES_TOY_TOY_DEVICE_H_
#define MESHFILL_TESTS_ENGINE_DEVICES_TOY_TOY_DEVICE_H_

#include <memory>
#include <string>

#include "kernels/device.h"
#include "kernels/reference/reference_device.h"

namespace meshfill {

class ToyDevice final : public Device {
 public:
  explicit ToyDevice(DType dtype) : reference_(MakeReferenceDevice(dtype)) {}

  std::string name() const override { return "toy/loops"; }
  DType dtype() const override { return reference_->dtype(); }
  Grain grain() const override { return {.slice_tokens = 64}; }
  bool rows_are_independent() const override { return reference_->rows_are_independent(); }
  bool lost() const override { return false; }
  absl::StatusOr<BufferRef> Allocate(size_t size_bytes) override { return reference_->Allocate(size_bytes); }
  absl::StatusOr<BufferRef> Place(const void* host, size_t size_bytes) override {
    return reference_->Place(host, size_bytes);
  }
  absl::Status Copy(std::span<const BufferCopy> copies) override { return reference_->Copy(copies); }
  absl::StatusOr<std::unique_ptr<PackedWeight>> PackWeight(std::span<const WeightRows> rows,
                                                           int64_t in_features) override {
    return reference_->PackWeight(rows, in_features);
  }
  absl::StatusOr<PackedForm> FormOf(int64_t out_features, int64_t in_features,
                                    const ElementKind& kind) override {
    return reference_->FormOf(out_features, in_features, kind);
  }
  absl::StatusOr<BufferRef> PackPanels(std::span<const WeightRows> rows, int64_t in_features, int64_t first,
                                       int64_t panels) override {
    return reference_->PackPanels(rows, in_features, first, panels);
  }
  absl::StatusOr<std::unique_ptr<PackedWeight>> WeightOf(int64_t out_features, int64_t in_features,
                                                         const ElementKind& kind, BufferRef packed,
                                                         std::vector<float> bias) override {
    return reference_->WeightOf(out_features, in_features, kind, std::move(packed), std::move(bias));
  }
  absl::StatusOr<std::unique_ptr<Stream>> NewStream(const StopToken* stop) override {
    return reference_->NewStream(stop);
  }

 private:
  const std::unique_ptr<Device> reference_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_DEVICES_TOY_TOY_DEVICE_H_
