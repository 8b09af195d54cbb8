#include "engine/model/model_config.h"

#include <algorithm>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/model/config_sizes.h"
#include "engine/model/family.h"
#include "engine/model/language_model.h"
#include "engine/model/quantization_config.h"
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

// Where no key says one: f32, as transformers has it, but of quantized models bf16, which all publish.
DType ParseDType(JsonKeys& keys) {
  const char* key = keys.FindValue("dtype") != nullptr ? "dtype" : "torch_dtype";
  const json* value = keys.FindValue(key);
  keys.Find("torch_dtype");  // where both are there, `dtype` counts
  const bool quantized = keys.FindValue("quantization_config") != nullptr;
  if (value == nullptr) return quantized ? DType::kBf16 : DType::kF32;
  if (*value == "float32") return DType::kF32;
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
  RETURN_IF_ERROR(ParseQuantization(keys, file, config));
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
