#include "engine/model/model_config.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/model/json_keys.h"
#include "engine/model/strict_json.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

using nlohmann::json;

// Bounds within which no size computed from a config overflows; far above any model that exists.
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxHidden = int64_t{1} << 20;
constexpr int64_t kMaxIntermediate = int64_t{1} << 22;
constexpr int64_t kMaxHeads = 4096;
constexpr int64_t kMaxHeadDim = 256;  // the attention kernels'
constexpr int64_t kMaxVocab = int64_t{1} << 24;

// What a family is called, and what an absent key means in it (transformers' configuration_<family>.py).
struct Family {
  ModelFamily family;
  const char* model_type;
  const char* architecture;
  int64_t hidden, intermediate, layers, q_heads;
  std::optional<int64_t> kv_heads;  // nullopt: as many as q_heads
  std::optional<int64_t> head_dim;  // nullopt: hidden / q_heads
  int64_t vocab, context_tokens;
};
constexpr std::array kFamilies = {
    Family{ModelFamily::kLlama, "llama", "LlamaForCausalLM", 4096, 11008, 32, 32, std::nullopt, std::nullopt,
           32000, 2048},
    Family{ModelFamily::kMistral, "mistral", "MistralForCausalLM", 4096, 14336, 32, 32, 8, std::nullopt,
           32000, 131072},
    Family{ModelFamily::kQwen2, "qwen2", "Qwen2ForCausalLM", 4096, 22016, 32, 32, 32, std::nullopt, 151936,
           32768},
    Family{ModelFamily::kQwen3, "qwen3", "Qwen3ForCausalLM", 4096, 22016, 32, 32, 32, 128, 151936, 32768},
};

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
    "output_scores",
    "pad_token_id",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
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

std::string FamilyNames() {
  std::string names;
  for (const Family& family : kFamilies) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", family.architecture);
  }
  return names;
}

// The family that `architectures` and `model_type` agree on; null after an error.
const Family* ParseFamily(JsonKeys& keys) {
  const json* architectures = keys.FindValue("architectures");
  const json* model_type = keys.FindValue("model_type");
  if (architectures == nullptr && model_type == nullptr) {
    keys.RejectMissing("architectures", absl::StrCat("it must be one of ", FamilyNames()));
    return nullptr;
  }
  for (const Family& family : kFamilies) {
    const bool named = architectures == nullptr ? *model_type == family.model_type
                                                : *architectures == json::array({family.architecture});
    if (!named) continue;
    keys.Expect("model_type", family.model_type);
    return &family;
  }
  keys.Reject(architectures == nullptr ? "model_type" : "architectures",
              absl::StrCat("implemented are ", FamilyNames()));
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

// Biases and the norm of Q and K. What the family fixes may be stated in the config, but not otherwise.
void ParseFlags(JsonKeys& keys, ModelConfig& config) {
  switch (config.family) {
    case ModelFamily::kLlama:
      config.qkv_bias = config.o_bias = keys.Flag("attention_bias", false);
      config.mlp_bias = keys.Flag("mlp_bias", false);
      break;
    case ModelFamily::kMistral:
      keys.Expect("attention_bias", false);
      break;
    case ModelFamily::kQwen2:
      config.qkv_bias = true;
      keys.Expect("attention_bias", true);
      break;
    case ModelFamily::kQwen3:
      config.qkv_bias = config.o_bias = keys.Flag("attention_bias", false);
      config.qk_norm = true;
      break;
  }
  keys.Expect("mlp_bias", config.mlp_bias);
  config.tied_embeddings = keys.Flag("tie_word_embeddings", false);
  config.norm_eps = static_cast<float>(keys.Number("rms_norm_eps", 1e-6, 1e-30, 1));
  keys.Expect("hidden_act", "silu");
  keys.Expect("pretraining_tp", 1);
  keys.Expect("is_encoder_decoder", false);
  keys.Expect("add_cross_attention", false);
  keys.Expect("tie_encoder_decoder", false);
  keys.Expect("pruned_heads", json::object());
  keys.Expect("use_mrope", false);
}

// ---- Sliding windows.

// The window by layer as the family's own rule has it, before `layer_types`.
std::vector<int64_t> FamilyWindows(JsonKeys& keys, ModelFamily family, int layers,
                                   std::optional<int64_t>& window) {
  constexpr int64_t kDefaultWindow = 4096;
  switch (family) {
    case ModelFamily::kLlama:
      return std::vector<int64_t>(layers, 0);
    case ModelFamily::kMistral:
      window = keys.OptionalInteger("sliding_window", kDefaultWindow, 1, kMaxPosition);
      return std::vector<int64_t>(layers, window.value_or(0));
    case ModelFamily::kQwen2:
    case ModelFamily::kQwen3: {
      const bool use_window = keys.Flag("use_sliding_window", false);
      const int64_t full_layers = keys.Integer("max_window_layers", 28, 0, INT32_MAX);
      keys.Find("sliding_window");  // says nothing unless use_sliding_window
      if (use_window) window = keys.OptionalInteger("sliding_window", kDefaultWindow, 1, kMaxPosition);
      std::vector<int64_t> windows(layers, 0);
      for (int64_t layer = full_layers; layer < layers; ++layer) windows[layer] = window.value_or(0);
      return windows;
    }
  }
  return {};
}

void ParseWindows(JsonKeys& keys, ModelConfig& config) {
  std::optional<int64_t> window;
  config.layer_window = FamilyWindows(keys, config.family, config.shape.layers, window);

  if (const json* types = keys.FindValue("layer_types"); types != nullptr) {
    std::vector<int64_t> windows;
    for (const json& type : *types) {
      if (type == "sliding_attention" && window) windows.push_back(*window);
      if (type == "full_attention") windows.push_back(0);
    }
    if (!types->is_array() || windows.size() != types->size() ||
        windows.size() != config.layer_window.size()) {
      keys.Reject("layer_types",
                  absl::StrCat("it must name full_attention, or sliding_attention where there is a window, "
                               "for each of the ",
                               config.shape.layers, " layers"));
      return;
    }
    const bool by_layer = config.family == ModelFamily::kQwen2 || config.family == ModelFamily::kQwen3;
    if (!by_layer && windows != config.layer_window) {
      keys.Reject("layer_types",
                  "in this architecture all layers must be of the kind that sliding_window says");
      return;
    }
    config.layer_window = std::move(windows);
  }
  config.shape.windowed_layers =
      static_cast<int>(config.layer_window.size()) -
      static_cast<int>(std::count(config.layer_window.begin(), config.layer_window.end(), 0));
  config.shape.sliding_window = config.shape.windowed_layers > 0 ? *window : 0;
}

}  // namespace

absl::StatusOr<ModelConfig> ModelConfig::Parse(std::string_view text, std::string_view path) {
  const std::string file(path);
  ASSIGN_OR_RETURN(const json object, ParseJsonObject(text, file));
  JsonKeys keys(object, file);
  const Family* family = ParseFamily(keys);
  if (family == nullptr) return keys.Finish();

  ModelConfig config;
  config.family = family->family;
  ParseShape(keys, *family, config.shape);
  ParseFlags(keys, config);
  ParseWindows(keys, config);
  RETURN_IF_ERROR(ParseRope(keys, file, config.shape.context_tokens, config.rope));
  RETURN_IF_ERROR(keys.Finish(kIgnoredKeys));
  return config;
}

}  // namespace meshfill
