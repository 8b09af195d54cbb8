#include "engine/model/make_model.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/model/family.h"
#include "engine/model/layer_shape.h"
#include "engine/model/safetensors_writer.h"
#include "engine/model/strict_json.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

const char* TorchName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kBf16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kF8E4M3:  // dtype of the tensors that are not FP8 or MXFP4
    case DType::kF4E2M1:
      return "bfloat16";
  }
  return "?";
}

// config.json in the spelling that every version of transformers reads.
json ConfigJson(const MakeModelOptions& options) {
  constexpr int64_t kMultiple = 64;  // the derived intermediate size is a multiple of this
  const int64_t hidden =
      std::clamp<int64_t>(options.hidden, 0, INT32_MAX);  // the parser refuses what lies outside
  const int64_t derived = (hidden * 8 / 3 + kMultiple - 1) / kMultiple * kMultiple;
  const Family& family = FamilyOf(options.family);
  json config = {
      {"architectures", {family.architecture}},
      {"model_type", family.config_name()},
      {"torch_dtype", TorchName(options.dtype)},
      {"num_hidden_layers", options.layers},
      {"hidden_size", options.hidden},
      {"intermediate_size", options.intermediate != 0 ? options.intermediate : derived},
      {"num_attention_heads", options.q_heads},
      {"num_key_value_heads", options.kv_heads},
      {"head_dim", options.head_dim != 0 ? options.head_dim : options.hidden / std::max(options.q_heads, 1)},
      {"vocab_size", options.vocab},
      {"max_position_embeddings", options.context_tokens},
      {"rope_theta", options.rope_theta},
      {"rope_scaling", nullptr},
      {"rms_norm_eps", 1e-6},
      {family.activation_key, family.activation},
      {"tie_word_embeddings", options.tied_embeddings},
  };
  family.write(options, config);
  if (options.dtype == DType::kF8E4M3) {
    config["quantization_config"] = {{"quant_method", "fp8"},
                                     {"fmt", "e4m3"},
                                     {"activation_scheme", "dynamic"},
                                     {"weight_block_size", {128, 128}}};
  }
  if (options.dtype == DType::kF4E2M1) {
    config["quantization_config"] = {
        {"quant_method", "mxfp4"},
        {"modules_to_not_convert",
         {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"}}};
  }
  return config;
}

// A tensor to be filled with random values of this mean and standard deviation.
struct RandomTensor {
  TensorSpec spec;
  double mean;
  double deviation;
  bool bits = false;  // the elements are random bytes, all values alike
};

// Deviations keep the activations, and with them the logits, of order 1: a linear layer has 1/√in.
std::vector<RandomTensor> ListTensors(const ModelConfig& config, DType dtype) {
  constexpr double kNormDeviation = 0.1;
  constexpr double kBiasDeviation = 0.1;
  constexpr double kSinkDeviation = 1;     // scores have the same
  constexpr double kFp8Deviation = 112;    // a quarter of the largest
  constexpr double kScaleDeviation = 0.1;  // relative to the mean
  constexpr double kFp4Deviation = 2.93;   // where all 16 values are alike
  constexpr double kExponentDeviation = 0.5;
  const ModelShape& shape = config.shape;
  const ElementType type =
      ElementTypeOf(dtype == DType::kF8E4M3 || dtype == DType::kF4E2M1 ? DType::kBf16 : dtype);
  std::vector<RandomTensor> tensors;
  const auto norm = [&](const std::string& name, int64_t width) {
    tensors.push_back({{name, type, {width}}, 1 - config.norm_offset, kNormDeviation});
  };
  const auto matrix = [&](const std::string& name, std::vector<int64_t> extents, int64_t in) {
    tensors.push_back({{name, type, std::move(extents)}, 0, 1 / std::sqrt(static_cast<double>(in))});
  };
  const auto linear = [&](const std::string& name, int64_t out, int64_t in) { matrix(name, {out, in}, in); };
  const auto fp4 = [&](const LayerTensor& tensor, int layer) {
    const int64_t copies = tensor.copies, out = tensor.out_features, blocks = tensor.in_features / kMxBlock;
    const std::string name = tensor.WeightName(layer, 0);
    const double exponent =
        127 - std::log2(kFp4Deviation * std::sqrt(static_cast<double>(tensor.in_features)));
    tensors.push_back(
        {{name + "_blocks", ElementType::kU8, {copies, out, blocks, kMxBlock / 2}}, 0, 0, /*bits=*/true});
    tensors.push_back(
        {{name + "_scales", ElementType::kU8, {copies, out, blocks}}, exponent, kExponentDeviation});
  };
  const auto stacked = [&](const LayerTensor& tensor, int layer) {
    if (config.shape.fp4_experts) {
      fp4(tensor, layer);
    } else {
      matrix(tensor.WeightName(layer, 0), {tensor.copies, tensor.in_features, tensor.out_features},
             tensor.in_features);
    }
    if (!tensor.bias) return;
    tensors.push_back(
        {{tensor.BiasName(layer, 0), type, {tensor.copies, tensor.out_features}}, 0, kBiasDeviation});
  };
  const auto fp8 = [&](const LayerTensor& tensor, int layer, int copy) {
    const int64_t out = tensor.out_features, in = tensor.in_features;
    const double scale = 1 / (kFp8Deviation * std::sqrt(static_cast<double>(in)));
    tensors.push_back({{tensor.WeightName(layer, copy), ElementType::kF8E4M3, {out, in}}, 0, kFp8Deviation});
    tensors.push_back({{tensor.ScalesName(layer, copy, config.fp8.scales),
                        ElementType::kF32,
                        {config.fp8.blocks.ScaleRows(out), config.fp8.blocks.ScaleColumns(in)}},
                       scale,
                       kScaleDeviation * scale});
  };
  const double embedding =
      config.tied_embeddings ? 1 / std::sqrt(static_cast<double>(shape.hidden)) : 1 / config.embedding_scale;
  tensors.push_back({{"model.embed_tokens.weight", type, {shape.vocab, shape.hidden}}, 0, embedding});
  for (int layer = 0; layer < shape.layers; ++layer) {
    for (const LayerTensor& tensor : LayerTensors(LayerShapeOf(config, layer))) {
      if (tensor.stacked) {
        stacked(tensor, layer);
        continue;
      }
      for (int copy = 0; copy < tensor.copies; ++copy) {
        const std::string name = tensor.WeightName(layer, copy);
        if (tensor.is_norm()) {
          norm(name, tensor.out_features);
        } else if (tensor.is_vector()) {
          const bool sinks = tensor.part == LayerPart::kSinks;
          tensors.push_back(
              {{name, type, {tensor.out_features}}, 0, sinks ? kSinkDeviation : kBiasDeviation});
        } else if (config.fp8.scales != nullptr && tensor.may_be_fp8()) {
          fp8(tensor, layer, copy);
        } else {
          linear(name, tensor.out_features, tensor.in_features);
        }
        if (tensor.bias) {
          tensors.push_back({{tensor.BiasName(layer, copy), type, {tensor.out_features}}, 0, kBiasDeviation});
        }
      }
    }
  }
  norm("model.norm.weight", shape.hidden);
  if (!config.tied_embeddings) linear("lm_head.weight", shape.vocab, shape.hidden);
  return tensors;
}

// ---- Random values: a pure function of (stream, index), in integers up to the last, exact multiplication,
// so that every machine makes the same bytes.

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

absl::Status AppendTensor(const RandomTensor& tensor, uint64_t stream, SafetensorsWriter& writer) {
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

// ---- Files.

// Consecutive tensors that go into one file: [begin, end).
struct Shard {
  size_t begin;
  size_t end;
};

// Filled in order up to `shard_bytes`; a larger tensor has a shard of its own.
std::vector<Shard> DealShards(std::span<const RandomTensor> tensors, int64_t shard_bytes) {
  std::vector<Shard> shards;
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    bytes += tensors[i].spec.size_bytes();
    if (shards.empty() || bytes > shard_bytes) {
      shards.push_back({i, i});
      bytes = tensors[i].spec.size_bytes();
    }
    shards.back().end = i + 1;
  }
  return shards;
}

absl::Status WriteText(const fs::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (file) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(path.string(), ": cannot be written; make room on its disk"));
}

absl::Status WriteShard(const fs::path& path, std::span<const RandomTensor> tensors, size_t first_tensor,
                        const MakeModelOptions& options) {
  std::vector<TensorSpec> specs;
  for (const RandomTensor& tensor : tensors) specs.push_back(tensor.spec);
  ASSIGN_OR_RETURN(SafetensorsWriter writer, SafetensorsWriter::Create(path.string(), specs));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint64_t stream = Mix(Mix(options.seed) + first_tensor + i + 1);
    RETURN_IF_ERROR(AppendTensor(tensors[i], stream, writer));
  }
  return writer.Finish();
}

// The shards are independent of each other, and writing one is all arithmetic: a thread for each core takes
// them in turn. The first failure in their order; once a shard has failed, no other is begun.
absl::Status WriteShards(const fs::path& folder, std::span<const std::string> names,
                         std::span<const Shard> shards, std::span<const RandomTensor> tensors,
                         const MakeModelOptions& options) {
  std::vector<absl::Status> written(shards.size());
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  const auto write = [&] {
    for (size_t i = next++; i < shards.size() && !failed; i = next++) {
      const Shard& shard = shards[i];
      written[i] = WriteShard(folder / names[i], tensors.subspan(shard.begin, shard.end - shard.begin),
                              shard.begin, options);
      if (!written[i].ok()) failed = true;
    }
  };
  {
    std::vector<std::jthread> threads;
    try {
      for (size_t i = 1; i < std::min<size_t>(shards.size(), std::thread::hardware_concurrency()); ++i) {
        threads.emplace_back(write);
      }
    } catch (const std::system_error&) {  // no thread is to be had: those that are write the rest
    }
    write();
  }
  for (const absl::Status& status : written) RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::Status WriteWeights(const fs::path& folder, std::span<const RandomTensor> tensors,
                          const MakeModelOptions& options) {
  const std::vector<Shard> shards = DealShards(tensors, options.shard_bytes);
  if (shards.size() == 1) return WriteShard(folder / "model.safetensors", tensors, 0, options);
  std::vector<std::string> names;
  json weight_map = json::object();
  int64_t total_bytes = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    names.push_back(absl::StrFormat("model-%05d-of-%05d.safetensors", i + 1, shards.size()));
    for (const RandomTensor& tensor : tensors.subspan(shards[i].begin, shards[i].end - shards[i].begin)) {
      weight_map[tensor.spec.name] = names.back();
      total_bytes += tensor.spec.size_bytes();
    }
  }
  RETURN_IF_ERROR(WriteShards(folder, names, shards, tensors, options));
  const json index = {{"metadata", {{"total_size", total_bytes}}}, {"weight_map", weight_map}};
  return WriteText(folder / "model.safetensors.index.json", index.dump(2) + "\n");
}

absl::Status CheckOptions(const MakeModelOptions& options) {
  if (options.sliding_window != 0 && !FamilyOf(options.family).has_window) {
    return absl::InvalidArgumentError(
        "sliding_window is for mistral, gemma3 and gpt_oss alone; leave it out or make such a model");
  }
  if (options.original_context_tokens != 0 && !FamilyOf(options.family).long_rope) {
    return absl::InvalidArgumentError(
        "original_context is for phi3 alone; leave it out or make such a model");
  }
  if ((options.experts != 0 || options.experts_used != 0 || options.expert_width != 0) &&
      !FamilyOf(options.family).has_experts) {
    return absl::InvalidArgumentError(
        absl::StrCat("experts, experts_used and expert_width are for families with experts, which ",
                     FamilyOf(options.family).name, " is not; leave them out"));
  }
  if (options.dtype == DType::kF4E2M1 && options.family != ModelFamily::kGptOss) {
    return absl::InvalidArgumentError(
        "weights in mxfp4 are for gpt-oss alone; choose another dtype or make a gpt-oss model");
  }
  if (!std::isfinite(options.rope_theta)) {
    return absl::InvalidArgumentError("rope_theta must be a finite number");
  }
  if (options.shard_bytes < 1) return absl::InvalidArgumentError("shard_bytes must be at least 1");
  return absl::OkStatus();
}

absl::Status CreateFolder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  const bool empty = !error && fs::is_empty(folder, error);
  if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat(folder.string(), ": cannot be created"));
  if (empty) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(folder.string(), ": is not empty; name a new folder"));
}

}  // namespace

absl::Status MakeModel(const MakeModelOptions& options, const std::string& folder) {
  RETURN_IF_ERROR(CheckOptions(options));
  // Through the parser, so that what is made can be loaded.
  const std::string text = ConfigJson(options).dump(2) + "\n";
  ASSIGN_OR_RETURN(const ModelConfig config, ModelConfig::Parse(text, "the model to make"));

  RETURN_IF_ERROR(CreateFolder(folder));
  RETURN_IF_ERROR(WriteText(fs::path(folder) / "config.json", text));
  return WriteWeights(folder, ListTensors(config, options.dtype), options);
}

}  // namespace meshfill
