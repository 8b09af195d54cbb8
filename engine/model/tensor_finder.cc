#include "engine/model/tensor_finder.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/model/strict_json.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Compares two tensors as their files have them, a part at a time.
absl::StatusOr<bool> HaveSameBytes(const SafetensorsFolder::Entry& x, const SafetensorsFolder::Entry& y) {
  constexpr size_t kPartBytes = size_t{1} << 20;
  const size_t size = x.tensor.bytes.size();
  if (y.tensor.bytes.size() != size) return false;
  std::vector<std::byte> of_x(std::min(size, kPartBytes)), of_y(of_x.size());
  for (size_t begin = 0; begin < size; begin += kPartBytes) {
    const size_t count = std::min(kPartBytes, size - begin);
    RETURN_IF_ERROR(x.file->Read(x.tensor.bytes.subspan(begin, count), PageCache::kFill, of_x.data()));
    RETURN_IF_ERROR(y.file->Read(y.tensor.bytes.subspan(begin, count), PageCache::kFill, of_y.data()));
    if (!std::equal(of_x.data(), of_x.data() + count, of_y.data())) return false;
  }
  return true;
}

}  // namespace

TensorFinder::TensorFinder(const SafetensorsFolder& folder, const ModelConfig& config,
                           std::deque<SafetensorsFolder::Entry>& parts, bool check_values)
    : folder_(folder),
      config_(config),
      parts_(parts),
      check_values_(check_values),
      names_(config.inside_another ? LanguageTensorNames::In(folder) : LanguageTensorNames()) {
  for (const std::string& part : names_.left_out()) Ignore(part);
}

FoundWeight TensorFinder::Find(const std::string& language_name, const std::vector<int64_t>& shape,
                               bool may_be_fp8) {
  const std::string name = names_.InFolder(language_name);
  const SafetensorsFolder::Entry* entry = FindShaped(name, shape);
  if (entry == nullptr) return {};
  FoundWeight weight{entry};
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
    case ElementType::kF8E4M3:
      weight.dtype = DType::kF8E4M3;
      if (may_be_fp8) break;
      [[fallthrough]];
    default:
      Fail(entry->file->path(), name,
           absl::StrCat("is of dtype ", ElementTypeName(entry->tensor.type),
                        "; implemented are F32, BF16 and F16, and F8_E4M3 for a layer's matrices"));
  }
  if (shape.size() >= 2 && weight.dtype != DType::kF32) all_f32_ = false;
  return weight;
}

FoundLinear TensorFinder::Find(const LayerTensor& tensor, int layer, int copy) {
  std::vector<int64_t> shape = {tensor.out_features};
  if (!tensor.is_vector()) shape.push_back(tensor.in_features);
  FoundLinear linear = {.matrix = Find(tensor.WeightName(layer, copy), std::move(shape), tensor.may_be_fp8()),
                        .bias = {},
                        .scales = {}};
  if (linear.matrix.dtype == DType::kF8E4M3) linear.scales = FindScales(tensor, layer, copy);
  if (tensor.bias) linear.bias = Find(tensor.BiasName(layer, copy), {tensor.out_features});
  if (tensor.part == LayerPart::kSinks) CheckFinite(linear.matrix, tensor.WeightName(layer, copy), "sink");
  return linear;
}

FoundLayer TensorFinder::FindLayer(int layer) {
  FoundLayer found;
  for (const LayerTensor& tensor : LayerTensors(LayerShapeOf(config_, layer))) {
    std::vector<std::vector<FoundLinear>>& copies = found[tensor.part];
    copies.resize(tensor.copies);
    const std::vector<FoundLinear> stacked =
        tensor.stacked ? FindStacked(tensor, layer) : std::vector<FoundLinear>();
    for (int copy = 0; copy < tensor.copies; ++copy) {
      copies[copy].push_back(tensor.stacked ? stacked[copy] : Find(tensor, layer, copy));
    }
  }
  for (const auto& [part, copies] : found) {
    for (const std::vector<FoundLinear>& linears : copies) CheckProduct(linears);
  }
  return found;
}

absl::StatusOr<FoundWeight> TensorFinder::FindLmHead(const FoundWeight& embedding) {
  static constexpr char kName[] = "lm_head.weight";
  const std::vector<int64_t> shape = {config_.shape.vocab, config_.shape.hidden};
  if (!config_.tied_embeddings) return Find(kName, shape);
  if (embedding.entry == nullptr || FindEntry(kName) == nullptr) return embedding;
  const FoundWeight copy = Find(kName, shape);
  if (!check_values_) return embedding;
  ASSIGN_OR_RETURN(const bool same_bytes, HaveSameBytes(*embedding.entry, *copy.entry));
  if (embedding.entry->tensor.type != copy.entry->tensor.type || !same_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        copy.entry->file->path(), ": tensor \"", kName,
        "\" differs from the embedding, although config.json says tie_word_embeddings; correct one of them"));
  }
  return embedding;
}

absl::Status TensorFinder::Finish() {
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

const SafetensorsFolder::Entry* TensorFinder::FindEntry(const std::string& name) const {
  return folder_.Find(names_.InFolder(name));
}

const SafetensorsFolder::Entry* TensorFinder::FindShaped(const std::string& name,
                                                         const std::vector<int64_t>& shape) {
  found_.insert(name);
  const SafetensorsFolder::Entry* entry = folder_.Find(name);
  if (entry == nullptr) {
    Fail(folder_.path(), name,
         absl::StrCat("is missing; config.json asks for it, with the shape ", ShapeString(shape)));
  } else if (entry->tensor.shape != shape) {
    Fail(entry->file->path(), name,
         absl::StrCat("has the shape ", ShapeString(entry->tensor.shape), ", but config.json asks for ",
                      ShapeString(shape)));
  }
  return entry;
}

std::vector<FoundLinear> TensorFinder::FindStacked(const LayerTensor& tensor, int layer) {
  if (config_.shape.fp4_experts) return FindFp4(tensor, layer);
  std::vector<FoundLinear> linears(tensor.copies);
  const FoundWeight matrices =
      Find(tensor.WeightName(layer, 0), {tensor.copies, tensor.in_features, tensor.out_features});
  const FoundWeight biases =
      tensor.bias ? Find(tensor.BiasName(layer, 0), {tensor.copies, tensor.out_features}) : FoundWeight();
  if (!status_.ok()) return linears;
  for (int copy = 0; copy < tensor.copies; ++copy) {
    linears[copy].matrix = StackedPart(matrices, copy, {tensor.out_features, tensor.in_features});
    linears[copy].matrix.transposed = true;
    if (tensor.bias) linears[copy].bias = StackedPart(biases, copy, {tensor.out_features});
  }
  return linears;
}

std::vector<FoundLinear> TensorFinder::FindFp4(const LayerTensor& tensor, int layer) {
  std::vector<FoundLinear> linears(tensor.copies);
  const int64_t copies = tensor.copies, out = tensor.out_features, in = tensor.in_features;
  const std::string name = tensor.WeightName(layer, 0);
  const FoundWeight blocks = FindBytes(name + "_blocks", {copies, out, in / kMxBlock, kMxBlock / 2}),
                    scales = FindBytes(name + "_scales", {copies, out, in / kMxBlock}),
                    biases = Find(tensor.BiasName(layer, 0), {copies, out});
  all_f32_ = false;
  CheckExponents(scales, name + "_scales");
  if (!status_.ok()) return linears;
  for (int copy = 0; copy < copies; ++copy) {
    linears[copy] = {.matrix = StackedPart(blocks, copy, {out, in}),
                     .bias = StackedPart(biases, copy, {out}),
                     .scales = StackedPart(scales, copy, {out, in / kMxBlock})};
  }
  return linears;
}

FoundWeight TensorFinder::FindBytes(const std::string& name, const std::vector<int64_t>& shape) {
  const SafetensorsFolder::Entry* entry = FindShaped(name, shape);
  if (entry != nullptr && entry->tensor.type != ElementType::kU8) {
    Fail(entry->file->path(), name,
         absl::StrCat("is of dtype ", ElementTypeName(entry->tensor.type), "; of mxfp4 it must be U8"));
  }
  return {entry, DType::kF4E2M1};
}

FoundWeight TensorFinder::FindScales(const LayerTensor& tensor, int layer, int copy) {
  const std::string name = tensor.WeightName(layer, copy);
  if (config_.fp8.scales == nullptr) {
    Fail(FindEntry(name)->file->path(), name,
         "is of dtype F8_E4M3, but config.json has no quantization_config, which says where its scales are");
    return {};
  }
  std::vector<int64_t> shape = {config_.fp8.blocks.ScaleRows(tensor.out_features)};
  if (config_.fp8.blocks.rows != Fp8Blocks::kAll)
    shape.push_back(config_.fp8.blocks.ScaleColumns(tensor.in_features));
  const std::string scales_name = tensor.ScalesName(layer, copy, config_.fp8.scales);
  const FoundWeight scales = Find(scales_name, std::move(shape));
  CheckFinite(scales, scales_name, "scale");
  return scales;
}

FoundWeight TensorFinder::StackedPart(const FoundWeight& whole, int64_t index, std::vector<int64_t> shape) {
  SafetensorsFolder::Entry part = *whole.entry;
  const size_t bytes = part.tensor.bytes.size() / static_cast<size_t>(part.tensor.shape[0]);
  part.tensor.bytes = part.tensor.bytes.subspan(static_cast<size_t>(index) * bytes, bytes);
  part.tensor.shape = std::move(shape);
  parts_.push_back(std::move(part));
  return {&parts_.back(), whole.dtype};
}

void TensorFinder::CheckProduct(const std::vector<FoundLinear>& linears) {
  const auto in_fp8 = [](const FoundLinear& linear) { return linear.matrix.dtype == DType::kF8E4M3; };
  const auto odd = std::find_if(linears.begin(), linears.end(), [&](const FoundLinear& linear) {
    return in_fp8(linear) != in_fp8(linears.front());
  });
  if (!status_.ok() || odd == linears.end()) return;
  const TensorView& tensor = odd->matrix.entry->tensor;
  const auto is_odd = [&](const auto& entry) {
    return entry.second.tensor.bytes.data() == tensor.bytes.data();
  };
  Fail(odd->matrix.entry->file->path(),
       std::find_if(folder_.entries().begin(), folder_.entries().end(), is_odd)->first,
       absl::StrCat("is of dtype ", ElementTypeName(tensor.type), " and ",
                    ElementTypeName(linears.front().matrix.entry->tensor.type),
                    " is what it is multiplied with; all of q, k and v, or of gate and up, may be in FP8"));
}

void TensorFinder::CheckExponents(const FoundWeight& scales, const std::string& name) {
  constexpr std::byte kMost{125 + 127}, kNan{255};  // times 2^126, the largest element, 6, is beyond f32
  if (!status_.ok() || !check_values_) return;
  std::vector<std::byte> bytes(scales.entry->tensor.bytes.size());
  status_ = CopyElements(scales, FillPageCache, bytes.data());
  const auto bad = std::find_if(bytes.begin(), bytes.end(), [](std::byte bits) { return bits > kMost; });
  if (bad == bytes.end()) return;
  const std::string value = *bad == kNan ? "nan" : absl::StrCat("2^", std::to_integer<int>(*bad) - 127);
  Fail(scales.entry->file->path(), name,
       absl::StrCat("has ", value, " for a scale, at ", bad - bytes.begin(),
                    "; scales are finite numbers up to 2^125"));
}

void TensorFinder::CheckFinite(const FoundWeight& vector, const std::string& name, const char* what) {
  if (!status_.ok() || !check_values_) return;
  const absl::StatusOr<std::vector<float>> values = ToFloats(vector, FillPageCache);
  if (!values.ok()) {
    status_ = values.status();
    return;
  }
  const auto bad =
      std::find_if(values->begin(), values->end(), [](float value) { return !std::isfinite(value); });
  if (bad == values->end()) return;
  Fail(vector.entry->file->path(), name,
       absl::StrCat("has ", *bad, " for a ", what, ", at ", bad - values->begin(), "; ", what,
                    "s are finite numbers"));
}

void TensorFinder::Fail(const std::string& path, const std::string& name, const std::string& what) {
  if (status_.ok()) {
    status_ = absl::InvalidArgumentError(absl::StrCat(path, ": tensor ", Excerpt(name), " ", what));
  }
}

}  // namespace meshfill
