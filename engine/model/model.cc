#include "engine/model/model.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <new>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/model/model_tensors.h"
#include "engine/model/streamed_weights.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Tokens whose rows of the table are read at a time.
constexpr size_t kEmbeddedAtATime = 256;

}  // namespace

// The table's rows are read from the file: a mapping that is used for life would end the process by a signal
// once the file has shrunk. On a device with memory of its own the table is placed, since there each row
// would be a small copy.
class EmbeddingTable {
 public:
  EmbeddingTable(const FoundWeight& weight, int64_t width)
      : file_(weight.entry->file), bytes_(weight.entry->tensor.bytes), dtype_(weight.dtype), width_(width) {}

  absl::Status PlaceOn(Device& device) {
    table_.reset(new (std::nothrow) std::byte[bytes_.size()]);
    if (table_ == nullptr) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "no memory for the embedding table on its way to the device (", bytes_.size(), " bytes)"));
    }
    RETURN_IF_ERROR(file_->Read(bytes_, PageCache::kFill, table_.get()));
    ASSIGN_OR_RETURN(placed_, device.Place(table_.get(), bytes_.size()));
    if (placed_->data() != table_.get()) table_.reset();
    return absl::OkStatus();
  }

  absl::Status Embed(Stream& stream, std::span<const uint32_t> ids, float* x) const {
    if (placed_ == nullptr) return EmbedRead(stream, ids, x);
    return stream.Embed(ids, placed_->data(), dtype_, width_, x);
  }

 private:
  // Reads the rows of the ids alone.
  absl::Status EmbedRead(Stream& stream, std::span<const uint32_t> ids, float* x) const {
    const size_t row_bytes = static_cast<size_t>(width_) * DTypeBytes(dtype_);
    std::vector<std::byte> rows(std::min(ids.size(), kEmbeddedAtATime) * row_bytes);
    std::vector<uint32_t> row_of(std::min(ids.size(), kEmbeddedAtATime));
    std::iota(row_of.begin(), row_of.end(), 0u);
    for (size_t begin = 0; begin < ids.size(); begin += kEmbeddedAtATime) {
      const size_t count = std::min(kEmbeddedAtATime, ids.size() - begin);
      for (size_t i = 0; i < count; ++i) {
        RETURN_IF_ERROR(file_->Read(bytes_.subspan(ids[begin + i] * row_bytes, row_bytes), PageCache::kFill,
                                    rows.data() + i * row_bytes));
      }
      RETURN_IF_ERROR(stream.Embed(std::span(row_of).first(count), rows.data(), dtype_, width_,
                                   x + static_cast<int64_t>(begin) * width_));
    }
    return absl::OkStatus();
  }

  std::shared_ptr<const SafetensorsFile> file_;
  std::span<const std::byte> bytes_;  // the tensor's bytes in the mapping
  DType dtype_;
  int64_t width_;
  std::unique_ptr<std::byte[]> table_;  // that the device reads where it is; null: it has a copy, or none
  BufferRef placed_;                    // null: rows are read from the file
};

namespace {

class ResidentFeed final : public WeightFeed {
 public:
  explicit ResidentFeed(const std::vector<WeightPart>& parts) : parts_(parts) {}
  absl::StatusOr<const WeightPart*> Take(int, int part, absl::Duration) override { return &parts_[part]; }
  void Leave(int) override {}
  uint64_t reads() const override { return 0; }
  WeightMode mode() const override { return WeightMode::kResident; }

 private:
  const std::vector<WeightPart>& parts_;
};

}  // namespace

Model::Model() = default;
Model::~Model() = default;

absl::StatusOr<std::unique_ptr<Model>> Model::Load(
    const std::string& folder, std::optional<DType> dtype,
    const std::function<absl::StatusOr<WeightPlace>(const ModelShape&)>& place_for) {
  ASSIGN_OR_RETURN(std::unique_ptr<const ModelTensors> tensors, ModelTensors::Find(folder));
  std::unique_ptr<Model> model(new Model);
  model->config_ = tensors->config();
  ModelShape& shape = model->config_.shape;
  shape.dtype = dtype.value_or(AutoDType(tensors->all_f32()));
  ASSIGN_OR_RETURN(const WeightPlace place, place_for(shape));
  Device& device = *place.device;
  ASSIGN_OR_RETURN(model->final_norm_, tensors->PlaceFinalNorm(device));
  model->embedding_ = std::make_unique<EmbeddingTable>(tensors->embedding(), shape.hidden);
  if (!place.in_host_memory) RETURN_IF_ERROR(model->embedding_->PlaceOn(device));
  if (place.mode != WeightMode::kResident) {
    if (place.mode == WeightMode::kStreamed) {
      model->streamed_ = std::make_unique<StreamedWeights>(std::move(tensors), device);
    } else {
      model->sharded_ = std::move(tensors);
    }
    return model;
  }
  for (int layer = 0; layer < shape.layers; ++layer) {
    ASSIGN_OR_RETURN(LayerWeights packed, tensors->PackLayer(device, layer, FillPageCache));
    model->resident_.push_back({.layer = std::move(packed), .head = nullptr});
  }
  // In the parts in which it streams: a device may add up the products of a wide matrix in another order.
  const int64_t head_rows = RowsOfHeadPart(shape);
  for (int64_t first = 0; first < shape.vocab; first += head_rows) {
    ASSIGN_OR_RETURN(
        std::unique_ptr<PackedWeight> head,
        tensors->PackHead(device, first, std::min(head_rows, shape.vocab - first), FillPageCache));
    model->resident_.push_back({.layer = {}, .head = std::move(head)});
  }
  return model;
}

WeightMode Model::weight_mode() const {
  if (sharded_ != nullptr) return WeightMode::kSharded;
  return streamed_ == nullptr ? WeightMode::kResident : WeightMode::kStreamed;
}

absl::Status Model::Embed(Stream& stream, std::span<const uint32_t> ids, float* x) const {
  RETURN_IF_ERROR(embedding_->Embed(stream, ids, x));
  if (config_.embedding_scale == 1) return absl::OkStatus();
  const auto scale = static_cast<float>(config_.embedding_scale);
  return stream.Scale(x, std::ssize(ids) * shape().hidden,
                      shape().dtype == DType::kF32 ? scale : BFloat16::FromFloat(scale).ToFloat());
}

int Model::parts() const {
  if (sharded_ != nullptr) return shape().layers + HeadParts(shape());
  return streamed_ == nullptr ? static_cast<int>(resident_.size()) : shape().layers + streamed_->head_parts();
}

const ModelTensors* Model::tensors() const {
  return streamed_ == nullptr ? sharded_.get() : &streamed_->tensors();
}

std::unique_ptr<WeightFeed> Model::OpenFeed(int readers, bool with_head, const StopToken* stop) const {
  if (streamed_ == nullptr) return std::make_unique<ResidentFeed>(resident_);
  return streamed_->Open(readers, with_head ? parts() : shape().layers, stop);
}

}  // namespace meshfill
