// Qwen3 with experts, as Qwen3-30B-A3B and 235B-A22B (transformers' configuration_qwen3_moe.py).
#include "absl/strings/str_cat.h"
#include "engine/model/family.h"

namespace meshfill {
namespace {

using nlohmann::json;

constexpr ExpertKeys kKeys = {.count = "num_experts",
                              .used = "num_experts_per_tok",
                              .width = "moe_intermediate_size",
                              .default_count = 128,
                              .default_used = 8,
                              .default_width = 768,
                              .other_count = "num_local_experts"};  // transformers 5 writes this

// Layers may be dense by their number, or by a list.
void ReadDenseLayers(JsonKeys& keys, ModelConfig& config) {
  const int64_t step = keys.Integer("decoder_sparse_step", 1, 1, INT32_MAX);
  for (size_t layer = 0; layer < config.layers.size(); ++layer) {
    if ((layer + 1) % step != 0) config.layers[layer].mlp = MlpKind::kDense;
  }
  const json* dense = keys.FindValue("mlp_only_layers");
  if (dense == nullptr) return;
  for (const json& layer : *dense) {
    if (!dense->is_array() || !layer.is_number_unsigned() || layer >= config.layers.size()) {
      keys.Reject("mlp_only_layers", absl::StrCat("it must be a list of numbers below the ",
                                                  config.shape.layers, " num_hidden_layers"));
      return;
    }
    config.layers[layer.get<size_t>()].mlp = MlpKind::kDense;
  }
}

// What the configs of Qwen3-Coder say beside: it must be what the family is.
void ExpectPublished(JsonKeys& keys) {
  keys.Expect("qkv_bias", false);
  keys.Expect("shared_expert_intermediate_size", 0);
  keys.Expect("use_qk_norm", true);
}

void Read(JsonKeys& keys, ModelConfig& config) {
  config.qkv_bias = config.o_bias = keys.Flag("attention_bias", false);
  config.qk_norm = QkNorm::kHead;
  ReadExperts(keys, kKeys, /*first=*/0, config);
  config.router.normalised = keys.Flag("norm_topk_prob", false);
  ReadDenseLayers(keys, config);

  // Here, unlike in the dense family, a window is of all layers.
  const bool use_window = keys.Flag("use_sliding_window", false);
  keys.Find("max_window_layers");
  keys.Find("sliding_window");
  std::optional<int64_t> window;
  if (use_window) window = keys.OptionalInteger("sliding_window", kDefaultWindow, 1, kMaxPosition);
  for (LayerForm& layer : config.layers) layer.window = window.value_or(0);
  ExpectPublished(keys);
}

void Write(const MakeModelOptions& options, json& config) {
  WriteExperts(options, kKeys, config);
  config["norm_topk_prob"] = true;
  for (int layer = 0; layer < options.dense_layers.value_or(0); ++layer) {
    config["mlp_only_layers"].push_back(layer);
  }
}

}  // namespace

const Family kQwen3MoeFamily = {.family = ModelFamily::kQwen3Moe,
                                .name = "qwen3_moe",
                                .architecture = "Qwen3MoeForCausalLM",
                                .hidden = 2048,
                                .intermediate = 6144,
                                .layers = 24,
                                .q_heads = 32,
                                .kv_heads = 4,
                                .head_dim = std::nullopt,
                                .vocab = 151936,
                                .context_tokens = 32768,
                                .has_experts = true,
                                .dense_layers = true,
                                .read = Read,
                                .write = Write};

}  // namespace meshfill
