#include "engine/model/model_tensors.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>
#include <span>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/model/layer_shape.h"
#include "engine/model/strict_json.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

using Weight = ModelTensors::Weight;
using Linear = ModelTensors::Linear;

// Finds the model's tensors one by one, checks their shapes, and remembers what nobody asked for. The first
// error is kept, so that a caller asks once.
class TensorFinder {
 public:
  explicit TensorFinder(const SafetensorsFolder& folder) : folder_(folder) {}

  Weight Find(const std::string& name, std::vector<int64_t> shape) {
    found_.insert(name);
    const SafetensorsFolder::Entry* entry = folder_.Find(name);
    if (entry == nullptr) {
      Fail(folder_.path(), name,
           absl::StrCat("is missing; config.json asks for it, with the shape ", ShapeString(shape)));
      return {};
    }
    if (entry->tensor.shape != shape) {
      Fail(entry->file->path(), name,
           absl::StrCat("has the shape ", ShapeString(entry->tensor.shape), ", but config.json asks for ",
                        ShapeString(shape)));
    }
    Weight weight{entry};
    switch (entry->tensor.type) {
      case ElementType::kF32:
        weight.dtype = DType::kF32;
        break;
      case ElementType::kBf16:
        weight.dtype = DType::kBf16;
        break;
      case ElementType::kF16:
        weight.dtype = DType::kF16;
        break;
      default:
        Fail(entry->file->path(), name,
             absl::StrCat("is of dtype ", ElementTypeName(entry->tensor.type),
                          "; implemented are F32, BF16 and F16"));
    }
    if (shape.size() == 2 && weight.dtype != DType::kF32) all_f32_ = false;
    return weight;
  }

  Linear Find(const LayerTensor& tensor, int layer, int copy) {
    std::vector<int64_t> shape = {tensor.out_features};
    if (!tensor.is_vector()) shape.push_back(tensor.in_features);
    Linear linear = {.matrix = Find(tensor.WeightName(layer, copy), std::move(shape)), .bias = {}};
    if (tensor.bias) linear.bias = Find(tensor.BiasName(layer, copy), {tensor.out_features});
    return linear;
  }

  // Tensors whose names begin so may be there, and are of no use.
  void Ignore(std::string prefix) { ignored_.push_back(std::move(prefix)); }

  // Tensors that nobody asked for are an error: the config and the weights are not of one model.
  absl::Status Finish() {
    for (const auto& [name, entry] : folder_.entries()) {
      // Some exports hold the RoPE frequencies, which the config gives as well.
      if (found_.contains(name) || absl::EndsWith(name, "rotary_emb.inv_freq")) continue;
      const auto ignores = [&name = name](const std::string& prefix) {
        return absl::StartsWith(name, prefix);
      };
      if (std::any_of(ignored_.begin(), ignored_.end(), ignores)) continue;
      Fail(entry.file->path(), name,
           "is not in the model that config.json describes; the two do not belong together");
    }
    return status_;
  }

  bool all_f32() const { return all_f32_; }  // of all matrices

 private:
  void Fail(const std::string& path, const std::string& name, const std::string& what) {
    if (status_.ok()) {
      status_ = absl::InvalidArgumentError(absl::StrCat(path, ": tensor ", Excerpt(name), " ", what));
    }
  }

  const SafetensorsFolder& folder_;
  std::set<std::string, std::less<>> found_;
  std::vector<std::string> ignored_;
  bool all_f32_ = true;
  absl::Status status_;
};

std::map<LayerPart, std::vector<std::vector<Linear>>> FindLayer(TensorFinder& finder,
                                                                const ModelConfig& config, int layer) {
  std::map<LayerPart, std::vector<std::vector<Linear>>> found;
  for (const LayerTensor& tensor : LayerTensors(LayerShapeOf(config, layer))) {
    std::vector<std::vector<Linear>>& copies = found[tensor.part];
    copies.resize(tensor.copies);
    for (int copy = 0; copy < tensor.copies; ++copy) {
      copies[copy].push_back(finder.Find(tensor, layer, copy));
    }
  }
  return found;
}

// The LM head's matrix: lm_head.weight, or the embedding where the two are tied (a copy in the file must then
// agree).
absl::StatusOr<Weight> FindLmHead(TensorFinder& finder, const SafetensorsFolder& folder,
                                  const ModelConfig& config, const Weight& embedding) {
  static constexpr char kName[] = "lm_head.weight";
  const std::vector<int64_t> shape = {config.shape.vocab, config.shape.hidden};
  if (!config.tied_embeddings) return finder.Find(kName, shape);
  if (embedding.entry == nullptr || folder.Find(kName) == nullptr) return embedding;
  const Weight copy = finder.Find(kName, shape);
  const TensorView& x = embedding.entry->tensor;
  const TensorView& y = copy.entry->tensor;
  if (x.type != y.type || !std::equal(x.bytes.begin(), x.bytes.end(), y.bytes.begin(), y.bytes.end())) {
    return absl::InvalidArgumentError(absl::StrCat(
        copy.entry->file->path(), ": tensor \"", kName,
        "\" differs from the embedding, although config.json says tie_word_embeddings; correct one of them"));
  }
  return embedding;
}

// A tensor's elements from the file; `before_read` null: from the mapping.
absl::Status CopyElements(const Weight& weight, const BeforeRead& before_read, void* to) {
  const std::span<const std::byte> bytes = weight.entry->tensor.bytes;
  if (before_read == nullptr) {
    std::copy(bytes.begin(), bytes.end(), static_cast<std::byte*>(to));
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(before_read());
  return weight.entry->file->Read(bytes, to);
}

// A vector of the model (norm weight, bias) in f32; empty where the model has none.
absl::StatusOr<std::vector<float>> ToFloats(const Weight& weight, const BeforeRead& before_read) {
  if (weight.entry == nullptr) return std::vector<float>();
  std::vector<std::byte> bytes(weight.entry->tensor.bytes.size());
  RETURN_IF_ERROR(CopyElements(weight, before_read, bytes.data()));
  std::vector<float> floats(bytes.size() / DTypeBytes(weight.dtype));
  for (size_t i = 0; i < floats.size(); ++i) {
    const std::byte* element = bytes.data() + i * DTypeBytes(weight.dtype);
    uint16_t half;
    switch (weight.dtype) {
      case DType::kF32:
        std::memcpy(&floats[i], element, sizeof(float));
        break;
      case DType::kBf16:
        std::memcpy(&half, element, sizeof(half));
        floats[i] = BFloat16{half}.ToFloat();
        break;
      case DType::kF16:
        std::memcpy(&half, element, sizeof(half));
        floats[i] = HalfToFloat(half);
        break;
    }
  }
  return floats;
}

// Rows of a tensor as its file has them.
class TensorRows final : public RowSource {
 public:
  TensorRows(const Weight& weight, const BeforeRead& before_read)
      : entry_(*weight.entry),
        row_bytes_(static_cast<size_t>(entry_.tensor.shape[1]) * DTypeBytes(weight.dtype)),
        before_read_(before_read) {}

  absl::Status Read(int64_t first, int64_t count, std::byte* to) const override {
    RETURN_IF_ERROR(before_read_());
    return entry_.file->Read(entry_.tensor.bytes.subspan(first * row_bytes_, count * row_bytes_), to);
  }

 private:
  const SafetensorsFolder::Entry& entry_;
  const size_t row_bytes_;
  const BeforeRead& before_read_;
};

// Stacks the layers' rows into one packed weight. The device's copy is the only one, but for what a mapped
// file has unaligned.
absl::StatusOr<std::unique_ptr<PackedWeight>> Pack(Device& device, std::span<const Linear> linears,
                                                   const BeforeRead& before_read) {
  std::vector<WeightRows> rows;
  std::vector<TensorRows> sources;
  sources.reserve(linears.size());
  std::vector<std::vector<float>> biases(linears.size());
  std::vector<std::vector<std::byte>> aligned(linears.size());
  for (size_t i = 0; i < linears.size(); ++i) {
    const Weight& matrix = linears[i].matrix;
    ASSIGN_OR_RETURN(biases[i], ToFloats(linears[i].bias, before_read));
    const float* const bias = biases[i].empty() ? nullptr : biases[i].data();
    const int64_t row_count = matrix.entry->tensor.shape[0];
    if (before_read != nullptr) {
      sources.emplace_back(matrix, before_read);
      rows.push_back({nullptr, matrix.dtype, row_count, bias, &sources.back()});
      continue;
    }
    const std::span<const std::byte> bytes = matrix.entry->tensor.bytes;
    const void* data = bytes.data();
    if (reinterpret_cast<uintptr_t>(data) % DTypeBytes(matrix.dtype) != 0) {
      aligned[i].assign(bytes.begin(), bytes.end());
      data = aligned[i].data();
    }
    rows.push_back({data, matrix.dtype, row_count, bias});
  }
  return device.PackWeight(rows, linears[0].matrix.entry->tensor.shape[1]);
}

}  // namespace

absl::StatusOr<std::unique_ptr<const ModelTensors>> ModelTensors::Find(const std::string& folder) {
  ASSIGN_OR_RETURN(SafetensorsFolder weights, SafetensorsFolder::Open(folder));
  const std::string config_path = (std::filesystem::path(folder) / "config.json").string();
  ASSIGN_OR_RETURN(const std::string config_text, ReadJsonText(config_path));
  ASSIGN_OR_RETURN(ModelConfig config, ModelConfig::Parse(config_text, config_path));

  std::unique_ptr<ModelTensors> found(new ModelTensors(std::move(weights)));
  TensorFinder finder(found->folder_);
  found->embedding_ = finder.Find("model.embed_tokens.weight", {config.shape.vocab, config.shape.hidden});
  found->layers_.reserve(static_cast<size_t>(config.shape.layers));
  for (int layer = 0; layer < config.shape.layers; ++layer) {
    found->layers_.push_back(FindLayer(finder, config, layer));
  }
  for (int layer = 0; layer < config.unused_layers; ++layer) {
    finder.Ignore(absl::StrCat("model.layers.", config.shape.layers + layer, "."));
  }
  found->final_norm_ = finder.Find("model.norm.weight", {config.shape.hidden});
  const absl::StatusOr<Weight> lm_head = FindLmHead(finder, found->folder_, config, found->embedding_);
  RETURN_IF_ERROR(finder.Finish());
  if (!lm_head.ok()) return lm_head.status();
  found->lm_head_ = *lm_head;
  found->all_f32_ = finder.all_f32();
  found->config_ = std::move(config);
  return found;
}

absl::StatusOr<LayerWeights> ModelTensors::PackLayer(Device& device, int layer,
                                                     const BeforeRead& before_read) const {
  const FoundLayer& found = layers_[layer];
  LayerWeights weights;
  ExpertWeights& experts = weights.experts;
  const std::pair<LayerPart, PlacedVector*> vectors[] = {{LayerPart::kAttentionNorm, &weights.attention_norm},
                                                         {LayerPart::kMlpNorm, &weights.mlp_norm},
                                                         {LayerPart::kQNorm, &weights.q_norm},
                                                         {LayerPart::kKNorm, &weights.k_norm},
                                                         {LayerPart::kRouterCorrection, &experts.correction}};
  for (const auto& [part, vector] : vectors) {
    const auto copies = found.find(part);
    if (copies == found.end()) continue;
    ASSIGN_OR_RETURN(std::vector<float> values, ToFloats(copies->second[0][0].matrix, before_read));
    ASSIGN_OR_RETURN(*vector, PlacedVector::Make(device, std::move(values)));
  }
  const std::pair<LayerPart, std::unique_ptr<PackedWeight>*> products[] = {
      {LayerPart::kQkv, &weights.qkv},
      {LayerPart::kO, &weights.o},
      {LayerPart::kGateUp, &weights.gate_up},
      {LayerPart::kDown, &weights.down},
      {LayerPart::kRouter, &experts.router},
      {LayerPart::kSharedGateUp, &experts.shared_gate_up},
      {LayerPart::kSharedDown, &experts.shared_down}};
  for (const auto& [part, packed] : products) {
    const auto copies = found.find(part);
    if (copies == found.end()) continue;
    ASSIGN_OR_RETURN(*packed, Pack(device, copies->second[0], before_read));
  }
  const std::pair<LayerPart, std::vector<std::unique_ptr<PackedWeight>>*> by_expert[] = {
      {LayerPart::kExpertGateUp, &experts.gate_up}, {LayerPart::kExpertDown, &experts.down}};
  for (const auto& [part, packed] : by_expert) {
    const auto copies = found.find(part);
    if (copies == found.end()) continue;
    for (const std::vector<Linear>& linears : copies->second) {
      ASSIGN_OR_RETURN(std::unique_ptr<PackedWeight> expert, Pack(device, linears, before_read));
      packed->push_back(std::move(expert));
    }
  }
  return weights;
}

absl::StatusOr<std::unique_ptr<PackedWeight>> ModelTensors::PackHead(Device& device, int64_t first,
                                                                     int64_t rows,
                                                                     const BeforeRead& before_read) const {
  SafetensorsFolder::Entry part = *lm_head_.entry;
  const size_t row_bytes = static_cast<size_t>(config_.shape.hidden) * DTypeBytes(lm_head_.dtype);
  part.tensor.shape[0] = rows;
  part.tensor.bytes = part.tensor.bytes.subspan(first * row_bytes, rows * row_bytes);
  const Linear head[] = {{{&part, lm_head_.dtype}, {}}};
  return Pack(device, head, before_read);
}

absl::StatusOr<PlacedVector> ModelTensors::PlaceFinalNorm(Device& device) const {
  ASSIGN_OR_RETURN(std::vector<float> values, ToFloats(final_norm_, nullptr));
  return PlacedVector::Make(device, std::move(values));
}

}  // namespace meshfill
