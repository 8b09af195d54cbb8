#include "engine/model/make_model.h"

#include <algorithm>
#include <atomic>
#include <cmath>
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
#include "engine/model/random_weights.h"
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

// FP8 by blocks as the `fp8` method has it, and by rows or matrices as compressed-tensors has it, which takes
// every linear layer that is not to be ignored.
json Fp8Json(Fp8Scales scales) {
  if (scales == Fp8Scales::kBlock) {
    return {{"quant_method", "fp8"},
            {"fmt", "e4m3"},
            {"activation_scheme", "dynamic"},
            {"weight_block_size", {128, 128}}};
  }
  const json weights = {{"num_bits", 8},
                        {"type", "float"},
                        {"strategy", scales == Fp8Scales::kChannel ? "channel" : "tensor"},
                        {"symmetric", true},
                        {"dynamic", false}};
  const json activations = {
      {"num_bits", 8}, {"type", "float"}, {"strategy", "token"}, {"symmetric", true}, {"dynamic", true}};
  const json group = {{"targets", {"Linear"}},
                      {"weights", weights},
                      {"input_activations", activations},
                      {"output_activations", nullptr}};
  return {{"quant_method", "compressed-tensors"},
          {"format", "float-quantized"},
          {"quantization_status", "compressed"},
          {"ignore", {"lm_head", "re:.*\\.gate$", "re:.*\\.router$"}},
          {"config_groups", {{"group_0", group}}}};
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
  if (options.next_layers != 0) {
    config[family.next_layers_key] = options.next_layers;
  }
  if (options.dtype == DType::kF8E4M3) {
    config["quantization_config"] = Fp8Json(options.fp8_scales);
  }
  if (options.dtype == DType::kF4E2M1) {
    config["quantization_config"] = {
        {"quant_method", "mxfp4"},
        {"modules_to_not_convert",
         {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"}}};
  }
  return config;
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
                        uint64_t seed) {
  std::vector<TensorSpec> specs;
  for (const RandomTensor& tensor : tensors) specs.push_back(tensor.spec);
  ASSIGN_OR_RETURN(SafetensorsWriter writer, SafetensorsWriter::Create(path.string(), specs));
  for (size_t i = 0; i < tensors.size(); ++i) {
    RETURN_IF_ERROR(AppendRandomTensor(tensors[i], seed, first_tensor + i, writer));
  }
  return writer.Finish();
}

// The shards are independent of each other, and writing one is all arithmetic: a thread for each core takes
// them in turn. The first failure in their order; once a shard has failed, no other is begun.
absl::Status WriteShards(const fs::path& folder, std::span<const std::string> names,
                         std::span<const Shard> shards, std::span<const RandomTensor> tensors,
                         uint64_t seed) {
  std::vector<absl::Status> written(shards.size());
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  const auto write = [&] {
    for (size_t i = next++; i < shards.size() && !failed; i = next++) {
      const Shard& shard = shards[i];
      written[i] = WriteShard(folder / names[i], tensors.subspan(shard.begin, shard.end - shard.begin),
                              shard.begin, seed);
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

absl::Status WriteWeights(const fs::path& folder, std::span<const RandomTensor> tensors, uint64_t seed,
                          int64_t shard_bytes) {
  const std::vector<Shard> shards = DealShards(tensors, shard_bytes);
  if (shards.size() == 1) return WriteShard(folder / "model.safetensors", tensors, 0, seed);
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
  RETURN_IF_ERROR(WriteShards(folder, names, shards, tensors, seed));
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
  if (options.dense_layers.has_value() && !FamilyOf(options.family).dense_layers) {
    return absl::InvalidArgumentError(
        "dense_layers is for qwen3_moe and glm4_moe alone; leave it out or make such a model");
  }
  if (const int dense = options.dense_layers.value_or(0); dense < 0 || dense > options.layers) {
    return absl::InvalidArgumentError(
        absl::StrCat("dense_layers must be from 0 to the ", options.layers, " layers"));
  }
  if (options.next_layers != 0 && FamilyOf(options.family).next_layers_key == nullptr) {
    return absl::InvalidArgumentError(
        "next_layers is for glm4_moe and minimax_m2 alone; leave it out or make such a model");
  }
  if (options.fp8_scales != Fp8Scales::kBlock && options.dtype != DType::kF8E4M3) {
    return absl::InvalidArgumentError("fp8_scales is for weights in fp8 alone; choose that dtype");
  }
  if (options.dtype == DType::kF4E2M1 && options.family != ModelFamily::kGptOss) {
    return absl::InvalidArgumentError(
        "weights in mxfp4 are for gpt-oss alone; choose another dtype or make a gpt-oss model");
  }
  if (!std::isfinite(options.rope_theta)) {
    return absl::InvalidArgumentError("rope_theta must be a finite number");
  }
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

// `text`: the config.json's, which `path` names. Through the parser, so that what is made can be loaded.
absl::Status MakeFolder(const std::string& text, const std::string& path, uint64_t seed, int64_t shard_bytes,
                        const fs::path& folder) {
  if (shard_bytes < 1) return absl::InvalidArgumentError("shard_bytes must be at least 1");
  ASSIGN_OR_RETURN(const ModelConfig config, ModelConfig::Parse(text, path));
  RETURN_IF_ERROR(CreateFolder(folder));
  RETURN_IF_ERROR(WriteText(folder / "config.json", text));
  return WriteWeights(folder, RandomWeightsOf(config), seed, shard_bytes);
}

}  // namespace

absl::Status MakeModel(const MakeModelOptions& options, const std::string& folder) {
  RETURN_IF_ERROR(CheckOptions(options));
  return MakeFolder(ConfigJson(options).dump(2) + "\n", "the model to make", options.seed,
                    options.shard_bytes, folder);
}

absl::Status MakeModelOf(const std::string& config_path, uint64_t seed, int64_t shard_bytes,
                         const std::string& folder) {
  ASSIGN_OR_RETURN(const std::string text, ReadJsonText(config_path));
  return MakeFolder(text, config_path, seed, shard_bytes, folder);
}

}  // namespace meshfill
