#include "engine/model/random_weights.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/model/language_model.h"
#include "engine/model/layer_shape.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

constexpr double kNormDeviation = 0.1;
constexpr double kBiasDeviation = 0.1;
constexpr double kSinkDeviation = 1;     // scores have the same
constexpr double kFp8Deviation = 112;    // a quarter of the largest
constexpr double kScaleDeviation = 0.1;  // relative to the mean
constexpr double kFp4Deviation = 2.93;   // where all 16 values are alike
constexpr double kExponentDeviation = 0.5;

// Deviations keep the activations, and with them the logits, of order 1: a linear layer has 1/√in.
class RandomWeights {
 public:
  explicit RandomWeights(const ModelConfig& config)
      : config_(config),
        type_(ElementTypeOf(config.shape.dtype)),
        names_(config.inside_another ? LanguageTensorNames::Published() : LanguageTensorNames()) {}

  std::vector<RandomTensor> List() && {
    const ModelShape& shape = config_.shape;
    const double embedding = config_.tied_embeddings ? 1 / std::sqrt(static_cast<double>(shape.hidden))
                                                     : 1 / config_.embedding_scale;
    Add("model.embed_tokens.weight", type_, {shape.vocab, shape.hidden}, 0, embedding);
    for (int layer = 0; layer < shape.layers; ++layer) AddLayer(layer, LayerShapeOf(config_, layer));
    AddNorm("model.norm.weight", shape.hidden);
    if (!config_.tied_embeddings) AddMatrix("lm_head.weight", {shape.vocab, shape.hidden}, shape.hidden);
    for (int layer = 0; layer < config_.unused_layers; ++layer) AddUnusedLayer(shape.layers + layer);
    return std::move(tensors_);
  }

 private:
  void Add(const std::string& name, ElementType type, std::vector<int64_t> extents, double mean,
           double deviation) {
    tensors_.push_back({{names_.InFolder(name), type, std::move(extents)}, mean, deviation});
  }

  void AddNorm(const std::string& name, int64_t width) {
    Add(name, type_, {width}, 1 - config_.norm_offset, kNormDeviation);
  }

  void AddMatrix(const std::string& name, std::vector<int64_t> extents, int64_t in_features) {
    Add(name, type_, std::move(extents), 0, 1 / std::sqrt(static_cast<double>(in_features)));
  }

  void AddLayer(int layer, const LayerShape& shape) {
    for (const LayerTensor& tensor : LayerTensors(shape)) {
      if (tensor.stacked) {
        AddStacked(tensor, layer);
        continue;
      }
      for (int copy = 0; copy < tensor.copies; ++copy) {
        AddCopy(tensor, layer, copy, InFp8(shape, tensor));
      }
    }
  }

  // A layer that predicts a further token from the last one's hidden state and the token's embedding, as
  // GLM-4.5 and DeepSeek-V3 publish theirs. It is of the last layer's form.
  void AddUnusedLayer(int layer) {
    const int64_t hidden = config_.shape.hidden;
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    AddNorm(prefix + "enorm.weight", hidden);
    AddNorm(prefix + "hnorm.weight", hidden);
    AddMatrix(prefix + "eh_proj.weight", {hidden, 2 * hidden}, 2 * hidden);
    AddLayer(layer, LayerShapeOf(config_, config_.shape.layers - 1));
    AddNorm(prefix + "shared_head.norm.weight", hidden);
  }

  void AddCopy(const LayerTensor& tensor, int layer, int copy, bool in_fp8) {
    const std::string name = tensor.WeightName(layer, copy);
    if (tensor.is_norm()) {
      AddNorm(name, tensor.out_features);
    } else if (tensor.is_vector()) {
      const bool sinks = tensor.part == LayerPart::kSinks;
      Add(name, type_, {tensor.out_features}, 0, sinks ? kSinkDeviation : kBiasDeviation);
    } else if (in_fp8) {
      AddFp8(tensor, layer, copy);
    } else {
      AddMatrix(name, {tensor.out_features, tensor.in_features}, tensor.in_features);
    }
    if (tensor.bias) Add(tensor.BiasName(layer, copy), type_, {tensor.out_features}, 0, kBiasDeviation);
  }

  // All copies in one tensor.
  void AddStacked(const LayerTensor& tensor, int layer) {
    if (config_.shape.fp4_experts) {
      AddFp4(tensor, layer);
    } else {
      AddMatrix(tensor.WeightName(layer, 0), {tensor.copies, tensor.in_features, tensor.out_features},
                tensor.in_features);
    }
    if (!tensor.bias) return;
    Add(tensor.BiasName(layer, 0), type_, {tensor.copies, tensor.out_features}, 0, kBiasDeviation);
  }

  // Scales are [rows of blocks, columns of blocks], and [1] where there is one for the matrix.
  void AddFp8(const LayerTensor& tensor, int layer, int copy) {
    const int64_t out = tensor.out_features, in = tensor.in_features;
    const Fp8Blocks& blocks = config_.fp8.blocks;
    std::vector<int64_t> scales = {blocks.ScaleRows(out)};
    if (blocks.rows != Fp8Blocks::kAll) scales.push_back(blocks.ScaleColumns(in));
    // compressed-tensors writes scales in the dtype that the weights had.
    const bool compressed = std::string_view(config_.fp8.scales) == "weight_scale";
    const double scale = 1 / (kFp8Deviation * std::sqrt(static_cast<double>(in)));
    Add(tensor.WeightName(layer, copy), ElementType::kF8E4M3, {out, in}, 0, kFp8Deviation);
    Add(tensor.ScalesName(layer, copy, config_.fp8.scales), compressed ? type_ : ElementType::kF32,
        std::move(scales), scale, kScaleDeviation * scale);
  }

  void AddFp4(const LayerTensor& tensor, int layer) {
    const int64_t copies = tensor.copies, out = tensor.out_features, blocks = tensor.in_features / kMxBlock;
    const std::string name = names_.InFolder(tensor.WeightName(layer, 0));
    const double exponent =
        127 - std::log2(kFp4Deviation * std::sqrt(static_cast<double>(tensor.in_features)));
    tensors_.push_back(
        {{name + "_blocks", ElementType::kU8, {copies, out, blocks, kMxBlock / 2}}, 0, 0, /*bits=*/true});
    tensors_.push_back(
        {{name + "_scales", ElementType::kU8, {copies, out, blocks}}, exponent, kExponentDeviation});
  }

  const ModelConfig& config_;
  const ElementType type_;  // of all that is not in FP8 or MXFP4
  const LanguageTensorNames names_;
  std::vector<RandomTensor> tensors_;
};

// Random values are a pure function of (stream, index), in integers up to the last, exact multiplication, so
// that every machine makes the same bytes.

constexpr uint64_t kGoldenRatio = 0x9e3779b97f4a7c15u;

constexpr uint64_t Mix(uint64_t x) {  // SplitMix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Close to normal: the sum of four uniform numbers (Irwin–Hall), mean 0, deviation 1.
constexpr double NearNormal(uint64_t stream, uint64_t index) {
  constexpr double kUnitsPerDeviation = 37837.22;  // √(4 · 2³² / 12)
  const uint64_t bits = Mix(stream + index * kGoldenRatio);
  const int64_t sum =
      static_cast<int64_t>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
  return static_cast<double>(sum - 2 * 0xffff) * (1 / kUnitsPerDeviation);
}

// Round to nearest even, subnormals included; for magnitudes below 65504.
uint16_t HalfFromFloat(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  const int unit = std::max(std::ilogb(magnitude), -14) - 10;  // the last mantissa bit's value is 2^unit
  const int steps =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, -unit)));  // exact but for the rounding
  // In a normal number, the leading bit of `steps` adds the one that is missing in the exponent's field.
  return static_cast<uint16_t>(sign + ((unit + 24) << 10) + steps);
}

// Rounds to E4M3 as HalfFromFloat does to f16. Magnitudes are up to 448.
uint8_t Fp8FromFloat(float value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::fabs(value);
  const int unit = std::max(std::ilogb(magnitude), -6) - 3;
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, -unit)));
  return static_cast<uint8_t>(sign + ((unit + 9) << 3) + steps);
}

template <typename Element, typename Convert>
absl::Status AppendRandom(const RandomTensor& tensor, uint64_t stream, Convert convert,
                          SafetensorsWriter& writer) {
  constexpr int64_t kSliceElements = 1 << 16;
  const int64_t elements = tensor.spec.size_bytes() / static_cast<int64_t>(sizeof(Element));
  std::vector<Element> slice(std::min(elements, kSliceElements));
  for (int64_t begin = 0; begin < elements; begin += kSliceElements) {
    const int64_t count = std::min(kSliceElements, elements - begin);
    for (int64_t i = 0; i < count; ++i) {
      const double value =
          tensor.mean + tensor.deviation * NearNormal(stream, static_cast<uint64_t>(begin + i));
      slice[i] = convert(static_cast<float>(value));
    }
    const std::span<const Element> written(slice.data(), count);
    RETURN_IF_ERROR(writer.Append(std::as_bytes(written)));
  }
  return absl::OkStatus();
}

absl::Status AppendRandomBits(const RandomTensor& tensor, uint64_t stream, SafetensorsWriter& writer) {
  constexpr int64_t kSliceBytes = 1 << 16;
  const int64_t size = tensor.spec.size_bytes();
  std::vector<std::byte> slice(std::min(size, kSliceBytes));
  for (int64_t begin = 0; begin < size; begin += kSliceBytes) {
    const int64_t count = std::min(kSliceBytes, size - begin);
    for (int64_t i = 0; i < count; ++i) {
      slice[i] = static_cast<std::byte>(Mix(stream + static_cast<uint64_t>(begin + i) * kGoldenRatio) >> 56);
    }
    RETURN_IF_ERROR(writer.Append(std::span(slice).first(static_cast<size_t>(count))));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<RandomTensor> RandomWeightsOf(const ModelConfig& config) { return RandomWeights(config).List(); }

absl::Status AppendRandomTensor(const RandomTensor& tensor, uint64_t seed, size_t index,
                                SafetensorsWriter& writer) {
  const uint64_t stream = Mix(Mix(seed) + index + 1);
  switch (tensor.spec.type) {
    case ElementType::kF32:
      return AppendRandom<float>(
          tensor, stream, [](float x) { return x; }, writer);
    case ElementType::kBf16:
      return AppendRandom<uint16_t>(
          tensor, stream, [](float x) { return BFloat16::FromFloat(x).bits; }, writer);
    case ElementType::kF16:
      return AppendRandom<uint16_t>(tensor, stream, HalfFromFloat, writer);
    case ElementType::kF8E4M3:
      return AppendRandom<uint8_t>(tensor, stream, Fp8FromFloat, writer);
    case ElementType::kU8:
      if (tensor.bits) return AppendRandomBits(tensor, stream, writer);
      return AppendRandom<uint8_t>(
          tensor, stream, [](float x) { return static_cast<uint8_t>(std::lround(x)); }, writer);
    default:
      return absl::InternalError(absl::StrCat(tensor.spec.name, ": of a dtype that is never made"));
  }
}

}  // namespace meshfill
