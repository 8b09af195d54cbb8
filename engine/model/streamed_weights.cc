#include "engine/model/streamed_weights.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/model/layer_shape.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// A device may multiply a row by so many features at a time (kPanelFeatures, kernels/cpu/packed_matrix.h):
// cut there, each has the bits that it has in the whole matrix.
constexpr int64_t kHeadGranule = 512;

}  // namespace

int64_t RowsOfHeadPart(const ModelShape& shape) {
  // The rows take a layer's bytes, or half of that where the layer is in FP8 and the head in bf16.
  const int64_t row_bytes = shape.hidden * static_cast<int64_t>(sizeof(float));
  const int64_t rows = WeightBytesOf(shape, DType::kF32).most_layer / row_bytes / kHeadGranule * kHeadGranule;
  return std::clamp(rows, std::min(kHeadGranule, shape.vocab), shape.vocab);
}

int HeadParts(const ModelShape& shape) {
  const int64_t rows = RowsOfHeadPart(shape);
  return static_cast<int>((shape.vocab + rows - 1) / rows);
}

class StreamedWeights::Maker final : public PartMaker {
 public:
  explicit Maker(StreamedWeights& weights) : weights_(weights) {}

  absl::StatusOr<std::shared_ptr<const WeightPart>> Load(int part, const BeforeRead& before_read) override {
    return weights_.Load(part, before_read);
  }
  void Quit() override {}
  bool serves_others() const override { return false; }
  WeightMode mode() const override { return WeightMode::kStreamed; }
  int64_t sent_bytes() const override { return 0; }
  std::string PartName(int part) const override {
    const int layers = weights_.tensors().config().shape.layers;
    return absl::StrCat(weights_.tensors().path(), ": ",
                        part < layers ? absl::StrCat("layer ", part) : "the LM head");
  }
  const char* advice() const override { return "check the disk"; }

 private:
  StreamedWeights& weights_;
};

StreamedWeights::StreamedWeights(std::unique_ptr<const ModelTensors> tensors, Device& device)
    : tensors_(std::move(tensors)),
      device_(device),
      head_rows_(RowsOfHeadPart(tensors_->config().shape)),
      shared_(static_cast<size_t>(tensors_->config().shape.layers + head_parts())) {}

absl::StatusOr<std::shared_ptr<const WeightPart>> StreamedWeights::Load(int part,
                                                                        const BeforeRead& before_read) {
  Shared& shared = shared_[part];
  {
    MutexLock lock(shared.mu);
    for (uint64_t seen = 0; shared.reading;) {
      if (std::exchange(seen, shared.reads) != shared.reads) {
        RETURN_IF_ERROR(before_read().status());
      } else {
        shared.changed.Wait(shared.mu);
      }
    }
    if (std::shared_ptr<const WeightPart> there = shared.part.lock()) return there;
    shared.reading = true;
    shared.reads = 0;
  }
  const auto counted = [&]() -> absl::StatusOr<PageCache> {
    {
      const MutexLock lock(shared.mu);
      ++shared.reads;
      shared.changed.NotifyAll();
    }
    return before_read();
  };
  absl::StatusOr<std::shared_ptr<const WeightPart>> packed = Pack(part, counted);
  const MutexLock lock(shared.mu);
  if (packed.ok()) shared.part = *packed;
  shared.reading = false;
  shared.changed.NotifyAll();
  return packed;
}

absl::StatusOr<std::shared_ptr<const WeightPart>> StreamedWeights::Pack(int part,
                                                                        const BeforeRead& before_read) const {
  const ModelShape& shape = tensors_->config().shape;
  ++*held_;
  const std::shared_ptr<WeightPart> packed(new WeightPart, [held = held_](WeightPart* gone) {
    delete gone;
    --*held;
  });
  if (part < shape.layers) {
    ASSIGN_OR_RETURN(packed->layer, tensors_->PackLayer(device_, part, before_read));
  } else {
    const int64_t first = (part - shape.layers) * head_rows_;
    const int64_t rows = std::min(head_rows_, shape.vocab - first);
    ASSIGN_OR_RETURN(packed->head, tensors_->PackHead(device_, first, rows, before_read));
  }
  return packed;
}

std::unique_ptr<WeightFeed> StreamedWeights::Open(int readers, int parts, const StopToken* stop) {
  return MakeAhead(std::make_unique<Maker>(*this), readers, parts, /*at_once=*/true, stop);
}

}  // namespace meshfill
