#include "engine/model/model.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/model/safetensors_folder.h"
#include "engine/model/strict_json.h"
#include "kernels/return_if_error.h"

namespace meshfill {

// The table as the file holds it; `file` keeps it mapped. A copy only where the file has it unaligned, and on
// a device with memory of its own.
class EmbeddingTable {
 public:
  EmbeddingTable(const SafetensorsFolder::Entry& entry, DType dtype) : file_(entry.file), dtype_(dtype) {
    if (reinterpret_cast<uintptr_t>(entry.tensor.bytes.data()) % DTypeBytes(dtype) != 0) {
      copy_.assign(entry.tensor.bytes.begin(), entry.tensor.bytes.end());
    }
  }
  absl::Status PlaceOn(Device& device, std::span<const std::byte> bytes) {
    ASSIGN_OR_RETURN(BufferRef placed,
                     device.Place(copy_.empty() ? bytes.data() : copy_.data(), bytes.size()));
    placed_ = std::move(placed);
    return absl::OkStatus();
  }
  const void* data() const { return placed_->data(); }
  DType dtype() const { return dtype_; }
  void DropResidentPages() const { file_->DropResidentPages(); }

 private:
  std::shared_ptr<const SafetensorsFile> file_;
  std::vector<std::byte> copy_;
  DType dtype_;
  BufferRef placed_;
};

namespace {

// A weight that has been found in the folder, of the expected shape.
struct Weight {
  const SafetensorsFolder::Entry* entry = nullptr;
  DType dtype = DType::kF32;
};

// A linear layer's matrix and, where the model has one, its bias (else entry is null).
struct Linear {
  Weight matrix;
  Weight bias;
};

// What the folder has of one layer: by part, by expert, the linear layers that are stacked. A vector is a
// linear layer without a bias.
using FoundLayer = std::map<LayerPart, std::vector<std::vector<Linear>>>;

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
      const auto ignores = [&name = name](const std::string& prefix) { return absl::StartsWith(name, prefix); };
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

FoundLayer FindLayer(TensorFinder& finder, const ModelConfig& config, int layer) {
  FoundLayer found;
  for (const LayerTensor& tensor : LayerTensors(LayerShapeOf(config, layer))) {
    std::vector<std::vector<Linear>>& copies = found[tensor.part];
    copies.resize(tensor.copies);
    for (int copy = 0; copy < tensor.copies; ++copy) {
      copies[copy].push_back(finder.Find(tensor, layer, copy));
    }
  }
  return found;
}

// A vector of the model (norm weight, bias) in f32; empty where the model has none.
std::vector<float> ToFloats(const Weight& weight) {
  if (weight.entry == nullptr) return {};
  const std::span<const std::byte> bytes = weight.entry->tensor.bytes;
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

// Stacks the layers' rows into one packed weight. The device's copy is the only one, but for what a file has
// unaligned.
absl::StatusOr<std::unique_ptr<PackedWeight>> Pack(Device& device, std::span<const Linear> linears) {
  std::vector<WeightRows> rows;
  std::vector<std::vector<float>> biases(linears.size());
  std::vector<std::vector<std::byte>> aligned(linears.size());
  for (size_t i = 0; i < linears.size(); ++i) {
    const Weight& matrix = linears[i].matrix;
    const std::span<const std::byte> bytes = matrix.entry->tensor.bytes;
    const void* data = bytes.data();
    if (reinterpret_cast<uintptr_t>(data) % DTypeBytes(matrix.dtype) != 0) {
      aligned[i].assign(bytes.begin(), bytes.end());
      data = aligned[i].data();
    }
    biases[i] = ToFloats(linears[i].bias);
    rows.push_back(
        {data, matrix.dtype, matrix.entry->tensor.shape[0], biases[i].empty() ? nullptr : biases[i].data()});
  }
  return device.PackWeight(rows, linears[0].matrix.entry->tensor.shape[1]);
}

absl::StatusOr<LayerWeights> PackLayer(Device& device, const FoundLayer& found) {
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
    ASSIGN_OR_RETURN(*vector, PlacedVector::Make(device, ToFloats(copies->second[0][0].matrix)));
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
    ASSIGN_OR_RETURN(*packed, Pack(device, copies->second[0]));
  }
  const std::pair<LayerPart, std::vector<std::unique_ptr<PackedWeight>>*> by_expert[] = {
      {LayerPart::kExpertGateUp, &experts.gate_up}, {LayerPart::kExpertDown, &experts.down}};
  for (const auto& [part, packed] : by_expert) {
    const auto copies = found.find(part);
    if (copies == found.end()) continue;
    for (const std::vector<Linear>& linears : copies->second) {
      ASSIGN_OR_RETURN(std::unique_ptr<PackedWeight> expert, Pack(device, linears));
      packed->push_back(std::move(expert));
    }
  }
  return weights;
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

}  // namespace

Model::Model() = default;
Model::~Model() = default;

const void* Model::embedding() const { return embedding_->data(); }
DType Model::embedding_dtype() const { return embedding_->dtype(); }

absl::StatusOr<std::unique_ptr<Model>> Model::Load(
    const std::string& folder, std::optional<DType> dtype,
    const std::function<absl::StatusOr<Device*>(const ModelShape&)>& device_for) {
  ASSIGN_OR_RETURN(const SafetensorsFolder weights, SafetensorsFolder::Open(folder));
  const std::string config_path = (std::filesystem::path(folder) / "config.json").string();
  ASSIGN_OR_RETURN(const std::string config_text, ReadJsonText(config_path));
  ASSIGN_OR_RETURN(ModelConfig config, ModelConfig::Parse(config_text, config_path));

  // Everything is found and checked before the first byte is packed.
  TensorFinder finder(weights);
  const Weight embedding =
      finder.Find("model.embed_tokens.weight", {config.shape.vocab, config.shape.hidden});
  std::vector<FoundLayer> layers;
  layers.reserve(static_cast<size_t>(config.shape.layers));
  for (int layer = 0; layer < config.shape.layers; ++layer) {
    layers.push_back(FindLayer(finder, config, layer));
  }
  for (int layer = 0; layer < config.unused_layers; ++layer) {
    finder.Ignore(absl::StrCat("model.layers.", config.shape.layers + layer, "."));
  }
  const Weight final_norm = finder.Find("model.norm.weight", {config.shape.hidden});
  const absl::StatusOr<Weight> lm_head = FindLmHead(finder, weights, config, embedding);
  RETURN_IF_ERROR(finder.Finish());
  if (!lm_head.ok()) return lm_head.status();

  std::unique_ptr<Model> model(new Model);
  model->config_ = std::move(config);
  model->config_.shape.dtype = dtype.value_or(finder.all_f32() ? DType::kF32 : DType::kBf16);
  ASSIGN_OR_RETURN(Device* const device, device_for(model->config_.shape));
  for (const FoundLayer& found : layers) {
    ASSIGN_OR_RETURN(LayerWeights layer, PackLayer(*device, found));
    model->layers_.push_back(std::move(layer));
  }
  const Linear head[] = {{*lm_head, {}}};
  ASSIGN_OR_RETURN(std::unique_ptr<PackedWeight> packed_head, Pack(*device, head));
  model->lm_head_ = std::move(packed_head);
  ASSIGN_OR_RETURN(PlacedVector placed_norm, PlacedVector::Make(*device, ToFloats(final_norm)));
  model->final_norm_ = std::move(placed_norm);
  model->embedding_ = std::make_unique<EmbeddingTable>(*embedding.entry, embedding.dtype);
  RETURN_IF_ERROR(model->embedding_->PlaceOn(*device, embedding.entry->tensor.bytes));
  model->embedding_->DropResidentPages();  // of the packed tensors beside it, too
  return model;
}

}  // namespace meshfill
