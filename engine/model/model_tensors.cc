#include "engine/model/model_tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <set>
#include <span>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/model/language_model.h"
#include "engine/model/layer_shape.h"
#include "engine/model/strict_json.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

using Weight = ModelTensors::Weight;
using Linear = ModelTensors::Linear;

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
      case DType::kF8E4M3:
      case DType::kF4E2M1:
        break;  // of no vector, and no scale
    }
  }
  return floats;
}

// Turns a matrix of rows · columns elements, row by row, into that of its columns, a block that stays in the
// cache at a time.
template <size_t kElementBytes>
void Transpose(const std::byte* from, int64_t rows, int64_t columns, std::byte* to) {
  constexpr int64_t kBlock = 64;
  for (int64_t row = 0; row < rows; row += kBlock) {
    const int64_t end_row = std::min(rows, row + kBlock);
    for (int64_t column = 0; column < columns; column += kBlock) {
      const int64_t end_column = std::min(columns, column + kBlock);
      for (int64_t c = column; c < end_column; ++c) {
        for (int64_t r = row; r < end_row; ++r) {
          std::memcpy(to + (c * rows + r) * kElementBytes, from + (r * columns + c) * kElementBytes,
                      kElementBytes);
        }
      }
    }
  }
}

// The elements of a transposed matrix as [out_features, in_features].
absl::StatusOr<std::vector<std::byte>> ToRows(const Weight& matrix, const BeforeRead& before_read) {
  const TensorView& tensor = matrix.entry->tensor;
  std::vector<std::byte> read;
  const std::byte* from = tensor.bytes.data();
  if (before_read != nullptr) {
    read.resize(tensor.bytes.size());
    RETURN_IF_ERROR(CopyElements(matrix, before_read, read.data()));
    from = read.data();
  }
  std::vector<std::byte> rows(tensor.bytes.size());
  const auto transpose = DTypeBytes(matrix.dtype) == sizeof(float) ? Transpose<4> : Transpose<2>;
  transpose(from, tensor.shape[1], tensor.shape[0], rows.data());
  return rows;
}

// Finds the model's tensors one by one, checks their shapes, and remembers what nobody asked for. The first
// error is kept, so that a caller asks once.
class TensorFinder {
 public:
  // `parts` gets those of tensors that stack experts.
  TensorFinder(const SafetensorsFolder& folder, const ModelConfig& config,
               std::deque<SafetensorsFolder::Entry>& parts)
      : folder_(folder),
        fp8_(config.fp8),
        fp4_experts_(config.shape.fp4_experts),
        parts_(parts),
        names_(config.inside_another ? LanguageTensorNames::In(folder) : LanguageTensorNames()) {
    for (const std::string& part : names_.left_out()) Ignore(part);
  }

  const SafetensorsFolder::Entry* FindEntry(const std::string& name) const {
    return folder_.Find(names_.InFolder(name));
  }

  // `language_name`: as a folder of a language model alone has it.
  Weight Find(const std::string& language_name, const std::vector<int64_t>& shape, bool may_be_fp8 = false) {
    const std::string name = names_.InFolder(language_name);
    const SafetensorsFolder::Entry* entry = FindShaped(name, shape);
    if (entry == nullptr) return {};
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

  Linear Find(const LayerTensor& tensor, int layer, int copy) {
    std::vector<int64_t> shape = {tensor.out_features};
    if (!tensor.is_vector()) shape.push_back(tensor.in_features);
    Linear linear = {.matrix = Find(tensor.WeightName(layer, copy), std::move(shape), tensor.may_be_fp8()),
                     .bias = {},
                     .scales = {}};
    if (tensor.may_be_fp8()) all_fp8_ = all_fp8_ && linear.matrix.dtype == DType::kF8E4M3;
    if (linear.matrix.dtype == DType::kF8E4M3) linear.scales = FindScales(tensor, layer, copy);
    if (tensor.bias) linear.bias = Find(tensor.BiasName(layer, copy), {tensor.out_features});
    if (tensor.part == LayerPart::kSinks) CheckFinite(linear.matrix, tensor.WeightName(layer, copy), "sink");
    return linear;
  }

  // All copies of a tensor that stacks them.
  std::vector<Linear> FindStacked(const LayerTensor& tensor, int layer) {
    if (fp4_experts_) return FindFp4(tensor, layer);
    std::vector<Linear> linears(tensor.copies);
    const Weight matrices =
        Find(tensor.WeightName(layer, 0), {tensor.copies, tensor.in_features, tensor.out_features});
    const Weight biases =
        tensor.bias ? Find(tensor.BiasName(layer, 0), {tensor.copies, tensor.out_features}) : Weight();
    if (!status_.ok()) return linears;
    for (int copy = 0; copy < tensor.copies; ++copy) {
      linears[copy].matrix = StackedPart(matrices, copy, {tensor.out_features, tensor.in_features});
      linears[copy].matrix.transposed = true;
      if (tensor.bias) linears[copy].bias = StackedPart(biases, copy, {tensor.out_features});
    }
    return linears;
  }

  // The matrices of one product are in FP8 all, or none is.
  void CheckProduct(const std::vector<Linear>& linears) {
    const auto in_fp8 = [](const Linear& linear) { return linear.matrix.dtype == DType::kF8E4M3; };
    const auto odd = std::find_if(linears.begin(), linears.end(), [&](const Linear& linear) {
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
  bool all_fp8() const { return all_fp8_; }  // of those that may be

 private:
  // By its name in the folder. Null: it is missing.
  const SafetensorsFolder::Entry* FindShaped(const std::string& name, const std::vector<int64_t>& shape) {
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

  // In MXFP4: two elements in a byte, and a scale for each block of them in another tensor.
  std::vector<Linear> FindFp4(const LayerTensor& tensor, int layer) {
    std::vector<Linear> linears(tensor.copies);
    const int64_t copies = tensor.copies, out = tensor.out_features, in = tensor.in_features;
    const std::string name = tensor.WeightName(layer, 0);
    const Weight blocks = FindBytes(name + "_blocks", {copies, out, in / kMxBlock, kMxBlock / 2}),
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

  Weight FindBytes(const std::string& name, const std::vector<int64_t>& shape) {
    const SafetensorsFolder::Entry* entry = FindShaped(name, shape);
    if (entry != nullptr && entry->tensor.type != ElementType::kU8) {
      Fail(entry->file->path(), name,
           absl::StrCat("is of dtype ", ElementTypeName(entry->tensor.type), "; of mxfp4 it must be U8"));
    }
    return {entry, DType::kF4E2M1};
  }

  // None of them says NaN.
  void CheckExponents(const Weight& scales, const std::string& name) {
    constexpr std::byte kNan{255};
    if (!status_.ok()) return;
    std::vector<std::byte> bytes(scales.entry->tensor.bytes.size());
    status_ = CopyElements(
        scales, [] { return absl::OkStatus(); }, bytes.data());
    const auto bad = std::find(bytes.begin(), bytes.end(), kNan);
    if (bad == bytes.end()) return;
    Fail(scales.entry->file->path(), name,
         absl::StrCat("has nan for a scale, at ", bad - bytes.begin(), "; scales are finite numbers"));
  }

  Weight FindScales(const LayerTensor& tensor, int layer, int copy) {
    const std::string name = tensor.WeightName(layer, copy);
    if (fp8_.scales == nullptr) {
      Fail(
          FindEntry(name)->file->path(), name,
          "is of dtype F8_E4M3, but config.json has no quantization_config, which says where its scales are");
      return {};
    }
    std::vector<int64_t> shape = {fp8_.blocks.ScaleRows(tensor.out_features)};
    if (fp8_.blocks.rows != Fp8Blocks::kAll) shape.push_back(fp8_.blocks.ScaleColumns(tensor.in_features));
    const std::string scales_name = tensor.ScalesName(layer, copy, fp8_.scales);
    const Weight scales = Find(scales_name, std::move(shape));
    CheckFinite(scales, scales_name, "scale");
    return scales;
  }

  // `what` is one of the vector's values: "scale".
  void CheckFinite(const Weight& vector, const std::string& name, const char* what) {
    if (!status_.ok()) return;
    const absl::StatusOr<std::vector<float>> values = ToFloats(vector, [] { return absl::OkStatus(); });
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

  // Part `index` of a tensor along its first extent, of this shape.
  Weight StackedPart(const Weight& whole, int64_t index, std::vector<int64_t> shape) {
    SafetensorsFolder::Entry part = *whole.entry;
    const size_t bytes = part.tensor.bytes.size() / static_cast<size_t>(part.tensor.shape[0]);
    part.tensor.bytes = part.tensor.bytes.subspan(static_cast<size_t>(index) * bytes, bytes);
    part.tensor.shape = std::move(shape);
    parts_.push_back(std::move(part));
    return {&parts_.back(), whole.dtype};
  }

  void Fail(const std::string& path, const std::string& name, const std::string& what) {
    if (status_.ok()) {
      status_ = absl::InvalidArgumentError(absl::StrCat(path, ": tensor ", Excerpt(name), " ", what));
    }
  }

  const SafetensorsFolder& folder_;
  const Fp8Config& fp8_;
  const bool fp4_experts_;
  std::deque<SafetensorsFolder::Entry>& parts_;
  const LanguageTensorNames names_;
  std::set<std::string, std::less<>> found_;
  std::vector<std::string> ignored_;
  bool all_f32_ = true;
  bool all_fp8_ = true;
  absl::Status status_;
};

std::map<LayerPart, std::vector<std::vector<Linear>>> FindLayer(TensorFinder& finder,
                                                                const ModelConfig& config, int layer) {
  std::map<LayerPart, std::vector<std::vector<Linear>>> found;
  for (const LayerTensor& tensor : LayerTensors(LayerShapeOf(config, layer))) {
    std::vector<std::vector<Linear>>& copies = found[tensor.part];
    copies.resize(tensor.copies);
    const std::vector<Linear> stacked =
        tensor.stacked ? finder.FindStacked(tensor, layer) : std::vector<Linear>();
    for (int copy = 0; copy < tensor.copies; ++copy) {
      copies[copy].push_back(tensor.stacked ? stacked[copy] : finder.Find(tensor, layer, copy));
    }
  }
  for (const auto& [part, copies] : found) {
    for (const std::vector<Linear>& linears : copies) finder.CheckProduct(linears);
  }
  return found;
}

// The LM head's matrix: lm_head.weight, or the embedding where the two are tied (a copy in the file must then
// agree).
absl::StatusOr<Weight> FindLmHead(TensorFinder& finder, const ModelConfig& config, const Weight& embedding) {
  static constexpr char kName[] = "lm_head.weight";
  const std::vector<int64_t> shape = {config.shape.vocab, config.shape.hidden};
  if (!config.tied_embeddings) return finder.Find(kName, shape);
  if (embedding.entry == nullptr || finder.FindEntry(kName) == nullptr) return embedding;
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

// Rows of a tensor as its file has them.
class TensorRows final : public RowSource {
 public:
  TensorRows(const Weight& weight, const BeforeRead& before_read)
      : entry_(*weight.entry),
        row_bytes_(static_cast<size_t>(ElementsBytes(weight.dtype, entry_.tensor.shape[1]))),
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

// The rows of stacked linear layers, as a device packs them. No copy, but for what a mapped file has
// unaligned.
class StackedRows {
 public:
  // `before_read` outlives the object.
  static absl::StatusOr<std::unique_ptr<StackedRows>> Of(std::span<const Linear> linears,
                                                         const Fp8Blocks& blocks,
                                                         const BeforeRead& before_read) {
    std::unique_ptr<StackedRows> stacked(new StackedRows(linears.size()));
    for (size_t i = 0; i < linears.size(); ++i) {
      RETURN_IF_ERROR(stacked->Add(linears[i], blocks, before_read));
    }
    return stacked;
  }
  StackedRows(const StackedRows&) = delete;
  StackedRows& operator=(const StackedRows&) = delete;

  std::span<const WeightRows> rows() const { return rows_; }

 private:
  explicit StackedRows(size_t linears) {
    sources_.reserve(linears);
    biases_.reserve(linears);
    scales_.reserve(linears);
    aligned_.reserve(linears);
  }

  absl::Status Add(const Linear& linear, const Fp8Blocks& blocks, const BeforeRead& before_read) {
    const Weight& matrix = linear.matrix;
    ASSIGN_OR_RETURN(std::vector<float> values, ToFloats(linear.bias, before_read));
    const std::vector<float>& bias = biases_.emplace_back(std::move(values));
    WeightRows rows = {.data = nullptr,
                       .dtype = matrix.dtype,
                       .rows = matrix.entry->tensor.shape[0],
                       .bias = bias.empty() ? nullptr : bias.data()};
    if (matrix.dtype == DType::kF4E2M1) {
      std::vector<std::byte>& exponents = exponents_.emplace_back(linear.scales.entry->tensor.bytes.size());
      RETURN_IF_ERROR(CopyElements(linear.scales, before_read, exponents.data()));
      rows.exponents = reinterpret_cast<const uint8_t*>(exponents.data());
    } else if (linear.scales.entry != nullptr) {
      ASSIGN_OR_RETURN(std::vector<float> factors, ToFloats(linear.scales, before_read));
      rows.scales = scales_.emplace_back(std::move(factors)).data();
      rows.scale_rows = std::min(blocks.rows, rows.rows);
      rows.scale_columns = std::min(blocks.columns, matrix.entry->tensor.shape[1]);
    }
    if (matrix.transposed) {
      ASSIGN_OR_RETURN(std::vector<std::byte> elements, ToRows(matrix, before_read));
      rows.data = aligned_.emplace_back(std::move(elements)).data();
    } else if (before_read != nullptr) {
      rows.source = &sources_.emplace_back(matrix, before_read);
    } else {
      const std::span<const std::byte> bytes = matrix.entry->tensor.bytes;
      rows.data = bytes.data();
      const size_t alignment = std::max<size_t>(1, DTypeBytes(matrix.dtype));
      if (reinterpret_cast<uintptr_t>(rows.data) % alignment != 0) {
        rows.data = aligned_.emplace_back(bytes.begin(), bytes.end()).data();
      }
    }
    rows_.push_back(rows);
    return absl::OkStatus();
  }

  std::vector<WeightRows> rows_;
  std::vector<TensorRows> sources_;
  std::vector<std::vector<float>> biases_, scales_;
  std::vector<std::vector<std::byte>> aligned_, exponents_;
};

int64_t WidthOf(std::span<const Linear> linears) { return linears[0].matrix.entry->tensor.shape[1]; }

int64_t StackedOutFeatures(std::span<const Linear> linears) {
  int64_t rows = 0;
  for (const Linear& linear : linears) rows += linear.matrix.entry->tensor.shape[0];
  return rows;
}

// Stacks the layers' rows into one packed weight.
absl::StatusOr<std::unique_ptr<PackedWeight>> Pack(Device& device, std::span<const Linear> linears,
                                                   const Fp8Blocks& blocks, const BeforeRead& before_read) {
  ASSIGN_OR_RETURN(const std::unique_ptr<StackedRows> stacked, StackedRows::Of(linears, blocks, before_read));
  return device.PackWeight(stacked->rows(), WidthOf(linears));
}

// The biases of stacked linear layers, 0 where one has none; empty where none has.
absl::StatusOr<std::vector<float>> StackedBias(std::span<const Linear> linears,
                                               const BeforeRead& before_read) {
  std::vector<float> stacked;
  bool any = false;
  for (const Linear& linear : linears) {
    ASSIGN_OR_RETURN(std::vector<float> bias, ToFloats(linear.bias, before_read));
    any = any || !bias.empty();
    bias.resize(linear.matrix.entry->tensor.shape[0], 0.0f);
    stacked.insert(stacked.end(), bias.begin(), bias.end());
  }
  if (!any) stacked.clear();
  return stacked;
}

// A matrix of so many features behind what the image has.
absl::Status AddMatrix(Device& device, LayerPart part, int copy, int64_t out_features, int64_t in_features,
                       const ElementKind& kind, WeightImage& image) {
  ASSIGN_OR_RETURN(const PackedForm form, device.FormOf(out_features, in_features, kind));
  image.Add({.part = part,
             .copy = copy,
             .out_features = out_features,
             .in_features = in_features,
             .kind = kind,
             .form = form});
  return absl::OkStatus();
}

ElementKind KindOf(const Weight& matrix, const Fp8Blocks& blocks) {
  switch (matrix.dtype) {
    case DType::kF8E4M3:
      return {.dtype = matrix.dtype,
              .scale_columns = std::min(blocks.columns, matrix.entry->tensor.shape[1])};
    case DType::kF4E2M1:
      return {.dtype = matrix.dtype, .scale_columns = kMxBlock};
    default:
      return {};
  }
}

// Bytes [begin, end) of the image, whose matrices are stacked from `linears_of`.
absl::StatusOr<BufferRef> PackBytes(
    Device& device, const WeightImage& image, int64_t begin, int64_t end, const Fp8Blocks& blocks,
    const BeforeRead& before_read,
    const std::function<std::span<const Linear>(const WeightImage::Matrix&)>& linears_of) {
  ASSIGN_OR_RETURN(BufferRef bytes, device.Allocate(static_cast<size_t>(end - begin)));
  for (const WeightImage::Matrix& matrix : image.matrices) {
    const int64_t from = std::max(begin, matrix.begin) - matrix.begin;
    const int64_t until = std::min(end, matrix.begin + matrix.form.bytes) - matrix.begin;
    if (from >= until) continue;
    const int64_t first = from / matrix.form.panel_bytes;
    const int64_t panels = (until + matrix.form.panel_bytes - 1) / matrix.form.panel_bytes - first;
    ASSIGN_OR_RETURN(const std::unique_ptr<StackedRows> stacked,
                     StackedRows::Of(linears_of(matrix), blocks, before_read));
    ASSIGN_OR_RETURN(const BufferRef packed,
                     device.PackPanels(stacked->rows(), matrix.in_features, first, panels));
    std::memcpy(bytes->data<std::byte>() + matrix.begin + from - begin, packed->data(), packed->size_bytes());
  }
  return bytes;
}

// Each element and `offset`.
absl::StatusOr<PlacedVector> PlaceVector(Device& device, const Weight& weight, float offset,
                                         const BeforeRead& before_read) {
  ASSIGN_OR_RETURN(std::vector<float> values, ToFloats(weight, before_read));
  for (float& value : values) value += offset;
  return PlacedVector::Make(device, std::move(values));
}

constexpr int64_t kLineBytes = 64;  // of a cache

}  // namespace

void WeightImage::Add(Matrix matrix) {
  matrix.begin = (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
  bytes = matrix.begin + matrix.form.bytes;
  matrices.push_back(matrix);
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

absl::StatusOr<std::unique_ptr<const ModelTensors>> ModelTensors::Find(const std::string& folder) {
  ASSIGN_OR_RETURN(SafetensorsFolder weights, SafetensorsFolder::Open(folder));
  const std::string config_path = (std::filesystem::path(folder) / "config.json").string();
  ASSIGN_OR_RETURN(const std::string config_text, ReadJsonText(config_path));
  ASSIGN_OR_RETURN(ModelConfig config, ModelConfig::Parse(config_text, config_path));

  std::unique_ptr<ModelTensors> found(new ModelTensors(std::move(weights)));
  TensorFinder finder(found->folder_, config, found->parts_);
  found->embedding_ = finder.Find("model.embed_tokens.weight", {config.shape.vocab, config.shape.hidden});
  found->layers_.reserve(static_cast<size_t>(config.shape.layers));
  for (int layer = 0; layer < config.shape.layers; ++layer) {
    found->layers_.push_back(FindLayer(finder, config, layer));
  }
  for (int layer = 0; layer < config.unused_layers; ++layer) {
    finder.Ignore(absl::StrCat("model.layers.", config.shape.layers + layer, "."));
  }
  found->final_norm_ = finder.Find("model.norm.weight", {config.shape.hidden});
  const absl::StatusOr<Weight> lm_head = FindLmHead(finder, config, found->embedding_);
  RETURN_IF_ERROR(finder.Finish());
  if (!lm_head.ok()) return lm_head.status();
  found->lm_head_ = *lm_head;
  found->all_f32_ = finder.all_f32();
  if (!finder.all_fp8()) config.shape.fp8 = {};  // counted as if all were wide
  found->config_ = std::move(config);
  return found;
}

absl::StatusOr<LayerWeights> ModelTensors::PackLayer(Device& device, int layer,
                                                     const BeforeRead& before_read) const {
  return MakeLayer(device, layer, before_read, [&](LayerPart, int, const std::vector<Linear>& linears) {
    return Pack(device, linears, config_.fp8.blocks, before_read);
  });
}

absl::StatusOr<LayerWeights> ModelTensors::MakeLayer(Device& device, int layer, const BeforeRead& before_read,
                                                     const Packer& pack) const {
  const FoundLayer& found = layers_[layer];
  LayerWeights weights;
  ExpertWeights& experts = weights.experts;
  const std::pair<LayerPart, PlacedVector*> vectors[] = {
      {LayerPart::kAttentionNorm, &weights.attention_norm},
      {LayerPart::kAttentionPostNorm, &weights.attention_post_norm},
      {LayerPart::kMlpNorm, &weights.mlp_norm},
      {LayerPart::kMlpPostNorm, &weights.mlp_post_norm},
      {LayerPart::kQNorm, &weights.q_norm},
      {LayerPart::kKNorm, &weights.k_norm},
      {LayerPart::kSinks, &weights.sinks},
      {LayerPart::kRouterCorrection, &experts.correction}};
  for (const auto& [part, vector] : vectors) {
    const auto copies = found.find(part);
    if (copies == found.end()) continue;
    const float offset = part == LayerPart::kRouterCorrection ? 0 : config_.norm_offset;
    ASSIGN_OR_RETURN(*vector, PlaceVector(device, copies->second[0][0].matrix, offset, before_read));
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
    ASSIGN_OR_RETURN(*packed, pack(part, 0, copies->second[0]));
  }
  const std::pair<LayerPart, std::vector<std::unique_ptr<PackedWeight>>*> by_expert[] = {
      {LayerPart::kExpertGateUp, &experts.gate_up}, {LayerPart::kExpertDown, &experts.down}};
  for (const auto& [part, packed] : by_expert) {
    const auto copies = found.find(part);
    if (copies == found.end()) continue;
    for (size_t copy = 0; copy < copies->second.size(); ++copy) {
      ASSIGN_OR_RETURN(std::unique_ptr<PackedWeight> expert,
                       pack(part, static_cast<int>(copy), copies->second[copy]));
      packed->push_back(std::move(expert));
    }
  }
  return weights;
}

SafetensorsFolder::Entry ModelTensors::HeadRows(int64_t first, int64_t rows) const {
  SafetensorsFolder::Entry part = *lm_head_.entry;
  const size_t row_bytes = static_cast<size_t>(config_.shape.hidden) * DTypeBytes(lm_head_.dtype);
  part.tensor.shape[0] = rows;
  part.tensor.bytes = part.tensor.bytes.subspan(first * row_bytes, rows * row_bytes);
  return part;
}

absl::StatusOr<std::unique_ptr<PackedWeight>> ModelTensors::PackHead(Device& device, int64_t first,
                                                                     int64_t rows,
                                                                     const BeforeRead& before_read) const {
  const SafetensorsFolder::Entry part = HeadRows(first, rows);
  const Linear head[] = {{{&part, lm_head_.dtype}, {}, {}}};
  return Pack(device, head, {}, before_read);
}

absl::StatusOr<WeightImage> ModelTensors::LayerImage(Device& device, int layer) const {
  WeightImage image;
  for (const auto& [part, copies] : layers_[layer]) {
    if (copies[0][0].matrix.entry->tensor.shape.size() != 2) continue;  // a vector
    for (size_t copy = 0; copy < copies.size(); ++copy) {
      RETURN_IF_ERROR(AddMatrix(device, part, static_cast<int>(copy), StackedOutFeatures(copies[copy]),
                                WidthOf(copies[copy]), KindOf(copies[copy][0].matrix, config_.fp8.blocks),
                                image));
    }
  }
  return image;
}

absl::StatusOr<WeightImage> ModelTensors::HeadImage(Device& device, int64_t rows) const {
  WeightImage image;
  RETURN_IF_ERROR(AddMatrix(device, LayerPart{}, 0, rows, config_.shape.hidden, {}, image));
  return image;
}

absl::StatusOr<BufferRef> ModelTensors::PackLayerBytes(Device& device, int layer, const WeightImage& image,
                                                       int64_t begin, int64_t end,
                                                       const BeforeRead& before_read) const {
  return PackBytes(device, image, begin, end, config_.fp8.blocks, before_read,
                   [&](const WeightImage::Matrix& matrix) {
                     return std::span<const Linear>(layers_[layer].at(matrix.part)[matrix.copy]);
                   });
}

absl::StatusOr<BufferRef> ModelTensors::PackHeadBytes(Device& device, int64_t first, const WeightImage& image,
                                                      int64_t begin, int64_t end,
                                                      const BeforeRead& before_read) const {
  const SafetensorsFolder::Entry part = HeadRows(first, image.matrices.front().out_features);
  const Linear head[] = {{{&part, lm_head_.dtype}, {}, {}}};
  return PackBytes(device, image, begin, end, {}, before_read,
                   [&](const WeightImage::Matrix&) { return std::span<const Linear>(head); });
}

absl::StatusOr<LayerWeights> ModelTensors::LayerOf(Device& device, int layer, const WeightImage& image,
                                                   const BufferRef& bytes,
                                                   const BeforeRead& before_read) const {
  auto next = image.matrices.begin();
  const auto pack = [&](LayerPart part, int copy,
                        const std::vector<Linear>& linears) -> absl::StatusOr<std::unique_ptr<PackedWeight>> {
    const auto is_it = [&](const WeightImage::Matrix& matrix) {
      return matrix.part == part && matrix.copy == copy;
    };
    // Mostly the next one: MakeLayer and the image have them in nearly the same order.
    if (next == image.matrices.end() || !is_it(*next)) {
      next = std::find_if(image.matrices.begin(), image.matrices.end(), is_it);
    }
    const WeightImage::Matrix& matrix = *next++;
    ASSIGN_OR_RETURN(std::vector<float> bias, StackedBias(linears, before_read));
    return device.WeightOf(
        matrix.out_features, matrix.in_features, matrix.kind,
        PartOf(bytes, static_cast<size_t>(matrix.begin), static_cast<size_t>(matrix.form.bytes)),
        std::move(bias));
  };
  return MakeLayer(device, layer, before_read, pack);
}

absl::StatusOr<PlacedVector> ModelTensors::PlaceFinalNorm(Device& device) const {
  return PlaceVector(device, final_norm_, config_.norm_offset, nullptr);
}

}  // namespace meshfill
