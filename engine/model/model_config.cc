#include "engine/model/model_config.h"

#include <algorithm>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/model/config_sizes.h"
#include "engine/model/family.h"
#include "engine/model/language_model.h"
#include "engine/model/strict_json.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

using nlohmann::json;

// Bounds of each size, far above any model that exists. config_sizes.h bounds what they make together.
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxHidden = int64_t{1} << 20;
constexpr int64_t kMaxIntermediate = int64_t{1} << 22;
constexpr int64_t kMaxHeads = 4096;
constexpr int64_t kMaxHeadDim = 256;  // the attention kernels'
constexpr int64_t kMaxVocab = int64_t{1} << 24;

// Keys that cannot change what a prefill computes: training, generation, bookkeeping.
constexpr const char* kIgnoredKeys[] = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "attention_dropout",
    "attn_implementation",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "eos_token_id",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "initializer_range",
    "is_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "max_sequence_length",
    "min_length",
    "model_max_length",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "suppress_tokens",
    "target_lookbehind",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
};

std::string ArchitectureNames() {
  std::string names;
  for (const Family* family : Families()) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", family->architecture);
  }
  return names;
}

// The family that `architectures` and `model_type` agree on; null after an error.
const Family* ParseFamily(JsonKeys& keys) {
  const json* architectures = keys.FindValue("architectures");
  const json* model_type = keys.FindValue("model_type");
  if (architectures == nullptr && model_type == nullptr) {
    keys.RejectMissing("architectures", absl::StrCat("it must be one of ", ArchitectureNames()));
    return nullptr;
  }
  for (const Family* family : Families()) {
    const bool named = architectures == nullptr ? *model_type == family->config_name()
                                                : *architectures == json::array({family->architecture});
    if (!named) continue;
    keys.Expect("model_type", family->config_name());
    return family;
  }
  keys.Reject(architectures == nullptr ? "model_type" : "architectures",
              absl::StrCat("implemented are ", ArchitectureNames()));
  return nullptr;
}

DType ParseDType(JsonKeys& keys) {
  const char* key = keys.FindValue("dtype") != nullptr ? "dtype" : "torch_dtype";
  const json* value = keys.FindValue(key);
  keys.Find("torch_dtype");  // where both are there, `dtype` counts
  if (value == nullptr || *value == "float32") return DType::kF32;
  if (*value == "bfloat16") return DType::kBf16;
  if (*value == "float16") return DType::kF16;
  keys.Reject(key, "implemented are float32, bfloat16 and float16");
  return DType::kF32;
}

void ParseShape(JsonKeys& keys, const Family& family, ModelShape& shape) {
  shape.layers = static_cast<int>(keys.Integer("num_hidden_layers", family.layers, 1, kMaxLayers));
  shape.hidden = keys.Integer("hidden_size", family.hidden, 1, kMaxHidden);
  shape.intermediate = keys.Integer("intermediate_size", family.intermediate, 1, kMaxIntermediate);
  shape.vocab = keys.Integer("vocab_size", family.vocab, 1, kMaxVocab);
  shape.context_tokens = keys.Integer("max_position_embeddings", family.context_tokens, 1, kMaxPosition);
  shape.dtype = ParseDType(keys);

  shape.q_heads = static_cast<int>(keys.Integer("num_attention_heads", family.q_heads, 1, kMaxHeads));
  shape.kv_heads = static_cast<int>(
      keys.OptionalInteger("num_key_value_heads", family.kv_heads, 1, kMaxHeads).value_or(shape.q_heads));
  if (shape.q_heads % shape.kv_heads != 0) {
    keys.Reject("num_key_value_heads",
                absl::StrCat("it must divide the ", shape.q_heads, " num_attention_heads"));
  }
  const std::optional<int64_t> head_dim = keys.OptionalInteger("head_dim", family.head_dim, 2, kMaxHeadDim);
  if (!head_dim && shape.hidden % shape.q_heads != 0) {
    keys.Reject("head_dim", absl::StrCat("it must be stated, since hidden_size ", shape.hidden,
                                         " is no multiple of the ", shape.q_heads, " num_attention_heads"));
  }
  shape.head_dim = static_cast<int>(head_dim.value_or(shape.hidden / shape.q_heads));
  if (shape.head_dim % 2 != 0 || shape.head_dim < 2 || shape.head_dim > kMaxHeadDim) {
    keys.Reject("head_dim", absl::StrCat("the heads have ", shape.head_dim,
                                         " dimensions; implemented are even numbers to ", kMaxHeadDim));
  }
}

// What all families have. What the family fixes may be stated in the config, but not otherwise.
void ParseFlags(JsonKeys& keys, const Family& family, ModelConfig& config) {
  keys.Expect("mlp_bias", config.mlp_bias);
  config.tied_embeddings = keys.Flag("tie_word_embeddings", family.tied_embeddings);
  config.norm_eps = static_cast<float>(keys.Number("rms_norm_eps", family.norm_eps, 1e-30, 1));
  keys.Expect(family.activation_key, family.activation);
  keys.Expect("pretraining_tp", 1);
  keys.Expect("is_encoder_decoder", false);
  keys.Expect("add_cross_attention", false);
  keys.Expect("tie_encoder_decoder", false);
  keys.Expect("pruned_heads", json::object());
  keys.Expect("use_mrope", false);
}

// How many dimensions of a head are rotated, as transformers rounds it; 0: all.
int RopeDim(JsonKeys& keys, const ModelConfig& config) {
  const int dim = static_cast<int>(config.shape.head_dim * config.rope.share);
  if (dim < 2 || dim % 2 != 0) {
    keys.Reject("partial_rotary_factor",
                absl::StrCat("of the ", config.shape.head_dim, " dimensions of a head it leaves ", dim,
                             "; implemented are even numbers"));
  }
  return dim == config.shape.head_dim ? 0 : dim;
}

// ---- Weights in FP8: which elements share a scale, and where the scales are. Which matrices are in FP8,
// their tensors' own dtypes say.
//
//     quant_method         as                                 scales of <name>.weight
//     fp8                  Qwen3-FP8, MiniMax-M2 ship         <name>.weight_scale_inv, one for a block
//     compressed-tensors   GLM-FP8, llm-compressor write      <name>.weight_scale, one for a block, a row
//                                                             (channel) or a tensor

constexpr int64_t kMaxBlock = int64_t{1} << 20;

const json& NoObject() {
  static const json no_object = json::object();
  return no_object;
}

// The object at `key`; an error where it is none.
const json& ObjectAt(JsonKeys& keys, const char* key) {
  const json* value = keys.FindValue(key);
  if (value == nullptr) return NoObject();
  if (value->is_object()) return *value;
  keys.Reject(key, "it must be an object");
  return NoObject();
}

// [rows, columns].
Fp8Blocks ReadBlocks(JsonKeys& keys, const char* key) {
  const json* value = keys.FindValue(key);
  if (value == nullptr) {
    keys.RejectMissing(key, "it says which elements share a scale, as [128, 128]");
    return {};
  }
  const auto is_size = [](const json& size) {
    return size.is_number_integer() && size >= 1 && size <= kMaxBlock;
  };
  if (value->is_array() && value->size() == 2 && is_size((*value)[0]) && is_size((*value)[1])) {
    return {.rows = (*value)[0].get<int64_t>(), .columns = (*value)[1].get<int64_t>()};
  }
  keys.Reject(key, "it must be two numbers, as [128, 128]");
  return {};
}

// The list of what is not in FP8. True: it names matrices of a layer that are counted as in FP8 otherwise.
bool NamesProjections(JsonKeys& keys, const char* key) {
  const json* names = keys.FindValue(key);
  if (names == nullptr) return false;
  bool projections = false;
  for (const json& name : *names) {
    if (!names->is_array() || !name.is_string()) {
      keys.Reject(key, "it must be a list of names");
      return false;
    }
    const auto& text = name.get_ref<const std::string&>();
    const bool of_next_tokens = absl::StrContains(text, "eh_proj");
    projections = projections || (absl::StrContains(text, "_proj") && !of_next_tokens) ||
                  absl::EndsWith(text, "mlp") || absl::EndsWith(text, "self_attn");
  }
  return projections;
}

void ReadCompressedWeights(JsonKeys& keys, Fp8Config& fp8) {
  keys.Expect("num_bits", 8);
  keys.Expect("type", "float");
  keys.Expect("symmetric", true);
  keys.Expect("dynamic", false);
  keys.Expect("group_size", nullptr);
  for (const char* key : {"observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype"})
    keys.Find(key);
  const json* strategy = keys.FindValue("strategy");
  if (strategy != nullptr && *strategy == "block") {
    fp8.blocks = ReadBlocks(keys, "block_structure");
    return;
  }
  keys.Expect("block_structure", nullptr);
  if (strategy != nullptr && *strategy == "channel") {
    fp8.blocks = {.rows = 1, .columns = Fp8Blocks::kAll};
  } else if (strategy != nullptr && *strategy == "tensor") {
    fp8.blocks = {.rows = Fp8Blocks::kAll, .columns = Fp8Blocks::kAll};
  } else {
    keys.Reject("strategy", "implemented are block, channel and tensor");
  }
}

// Activations stay in the compute dtype, which is more than FP8 asks for. What is measured ahead for them is
// in tensors of their own.
absl::Status ReadCompressedGroup(const json& group, const std::string& path, Fp8Config& fp8) {
  const std::string prefix = "quantization_config.config_groups.";
  JsonKeys keys(group, path, prefix);
  keys.Find("targets");
  keys.Find("format");
  keys.Expect("output_activations", nullptr);
  JsonKeys inputs(ObjectAt(keys, "input_activations"), path, prefix + "input_activations.");
  inputs.Expect("dynamic", true);
  RETURN_IF_ERROR(inputs.status());
  if (keys.FindValue("weights") == nullptr) keys.RejectMissing("weights", "it says how they are in FP8");
  JsonKeys weights(ObjectAt(keys, "weights"), path, prefix + "weights.");
  RETURN_IF_ERROR(keys.Finish());
  ReadCompressedWeights(weights, fp8);
  return weights.Finish();
}

absl::Status ReadCompressed(JsonKeys& keys, const std::string& path, Fp8Config& fp8) {
  fp8.scales = "weight_scale";
  const json* format = keys.FindValue("format");
  if (format == nullptr || (*format != "float-quantized" && *format != "naive-quantized")) {
    keys.Reject("format", "implemented are float-quantized and naive-quantized");
  }
  keys.Expect("kv_cache_scheme", nullptr);
  for (const char* key : {"sparsity_config", "transform_config"}) {
    const json& object = ObjectAt(keys, key);
    if (!object.empty() && object != json{{"format", "dense"}}) keys.Reject(key, "it is not implemented");
  }
  const json& groups = ObjectAt(keys, "config_groups");
  if (groups.size() != 1 || !groups.begin()->is_object()) {
    keys.Reject("config_groups", "it must have one group");
  }
  RETURN_IF_ERROR(keys.status());
  return ReadCompressedGroup(*groups.begin(), path, fp8);
}

void ReadBlockwise(JsonKeys& keys, Fp8Config& fp8) {
  fp8.scales = "weight_scale_inv";
  const json* format = keys.FindValue("fmt");
  if (format != nullptr && *format != "e4m3" && *format != "float8_e4m3fn") {
    keys.Reject("fmt", "implemented is e4m3, which float8_e4m3fn is by torch's name");
  }
  keys.Expect("activation_scheme", "dynamic");
  fp8.blocks = ReadBlocks(keys, "weight_block_size");
}

// gpt-oss's: the experts' matrices alone, with a scale for each 32 elements of a row. The list of what is not
// in it says nothing that the tensors' names do not.
void ReadMxfp4(JsonKeys& keys, JsonKeys& top, ModelConfig& config) {
  NamesProjections(keys, "modules_to_not_convert");
  keys.Find("dequantize");
  for (const auto& [key, value] :
       {std::pair("hidden_size", config.shape.hidden), {"intermediate_size", config.shape.experts.width}}) {
    if (value % kMxBlock != 0) {
      top.Reject(key, absl::StrCat("weights in mxfp4 need a multiple of ", kMxBlock));
    }
  }
  config.shape.fp4_experts = true;
  const bool says_dtype = top.FindValue("dtype") != nullptr || top.FindValue("torch_dtype") != nullptr;
  if (!says_dtype) config.shape.dtype = DType::kBf16;  // all other tensors, as published
}

// Reads `quantization_config`.
absl::Status ParseFp8(JsonKeys& top, const std::string& path, ModelConfig& config) {
  static constexpr const char* kIgnored[] = {"quantization_status", "global_compression_ratio", "version"};
  const json& object = ObjectAt(top, "quantization_config");
  if (top.FindValue("quantization_config") == nullptr || !top.status().ok()) return top.status();
  JsonKeys keys(object, path, "quantization_config.");
  const json* method = keys.FindValue("quant_method");
  bool projections = false;
  if (method != nullptr && *method == "fp8") {
    projections = NamesProjections(keys, "modules_to_not_convert");
    ReadBlockwise(keys, config.fp8);
  } else if (method != nullptr && *method == "compressed-tensors") {
    projections = NamesProjections(keys, "ignore");
    RETURN_IF_ERROR(ReadCompressed(keys, path, config.fp8));
  } else if (method != nullptr && *method == "mxfp4" && config.expert_names.gate_up != nullptr) {
    ReadMxfp4(keys, top, config);
    RETURN_IF_ERROR(top.status());
    return keys.Finish(kIgnored);
  } else {
    keys.Reject("quant_method", "implemented are fp8 and compressed-tensors, and mxfp4 of gpt_oss");
  }
  // Experts that are one tensor are not in FP8: memory is then counted as if nothing was.
  if (!projections && config.expert_names.gate_up == nullptr) config.shape.fp8 = config.fp8.blocks;
  return keys.Finish(kIgnored);
}

absl::StatusOr<ModelConfig> ParseLanguageModel(const json& object, const std::string& file) {
  JsonKeys keys(object, file);
  const Family* family = ParseFamily(keys);
  if (family == nullptr) return keys.Finish();

  ModelConfig config;
  config.family = family->family;
  ParseShape(keys, *family, config.shape);
  config.layers.resize(config.shape.layers);
  family->read(keys, config);
  RETURN_IF_ERROR(keys.status());
  config.shape.kinds = LayerKindsOf(config.layers);
  ParseFlags(keys, *family, config);
  RETURN_IF_ERROR(ParseRope(keys, file, family->partial_rotary, config.shape.head_dim,
                            config.shape.context_tokens, config.rope,
                            family->local_rope ? &config.local_rope : nullptr));
  if (config.rope.scaling == RopeScaling::kLongRope) {
    config.shape.long_rope_after = static_cast<int64_t>(config.rope.original_context_tokens);
  }
  config.shape.rope_dim = RopeDim(keys, config);
  RETURN_IF_ERROR(ParseFp8(keys, file, config));
  RETURN_IF_ERROR(keys.Finish(kIgnoredKeys));
  RETURN_IF_ERROR(CheckSizes(config.shape, file));
  return config;
}

}  // namespace

absl::StatusOr<ModelConfig> ModelConfig::Parse(std::string_view text, std::string_view path) {
  const std::string file(path);
  ASSIGN_OR_RETURN(const json object, ParseJsonObject(text, file));
  ASSIGN_OR_RETURN(const std::optional<json> inside, FindLanguageConfig(object, file, kIgnoredKeys));
  if (!inside.has_value()) return ParseLanguageModel(object, file);
  ASSIGN_OR_RETURN(ModelConfig config, ParseLanguageModel(*inside, absl::StrCat(file, ": text_config")));
  config.inside_another = true;
  return config;
}

}  // namespace meshfill
