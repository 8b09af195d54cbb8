// config.json of a model.
#include "engine/kv/kv_shape.h"
#include "engine/model/layer_shape.h"
#include "engine/model/model_config.h"
#include "engine/model/model_shape.h"
#include "tests/fuzz/fuzz_target.h"

namespace meshfill {
namespace {

void Check(const ModelConfig& config) {
  const ModelShape& shape = config.shape;
  FUZZ_CHECK(shape.layers > 0 && shape.hidden > 0 && shape.vocab > 0 && shape.context_tokens > 0);
  FUZZ_CHECK(shape.q_heads > 0 && shape.kv_heads > 0 && shape.head_dim > 0);
  FUZZ_CHECK(shape.q_heads % shape.kv_heads == 0);
  FUZZ_CHECK(shape.rotated_dim() > 0 && shape.rotated_dim() <= shape.head_dim);
  FUZZ_CHECK(config.norm_eps >= 0);
  FUZZ_CHECK(config.layers.size() == static_cast<size_t>(shape.layers));
  FUZZ_CHECK(shape.experts.used <= shape.experts.count);
  int layers = 0;
  shape.ForEachKind([&](const LayerForm& form, int count) {
    FUZZ_CHECK(form.window >= 0 && count > 0);
    layers += count;
  });
  FUZZ_CHECK(layers == shape.layers);
  // What a plan counts with first.
  FUZZ_CHECK(shape.q_elements(shape.context_tokens) > 0);
  FUZZ_CHECK(shape.kv_elements(shape.context_tokens) > 0);
  FUZZ_CHECK(shape.layers * KvShapeOf(shape).LayerBytes(shape.context_tokens) > 0);
  FUZZ_CHECK(WeightBytesOf(shape, DType::kF32).layers > 0);
  FUZZ_CHECK(SliceBytes(SliceWidthsOf(shape), shape.context_tokens, DType::kF32) > 0);
}

}  // namespace

const int kFuzzRounds = 60'000;

std::vector<std::string> FuzzSeeds() {
  const auto config = [](const std::string& more) {
    return "{" + more +
           R"(,"hidden_size":64,"intermediate_size":128,"num_hidden_layers":2,"num_attention_heads":4,)"
           R"("num_key_value_heads":2,"vocab_size":256,"max_position_embeddings":4096,"rms_norm_eps":1e-6,)"
           R"("hidden_act":"silu","torch_dtype":"bfloat16"})";
  };
  return {
      config(
          R"("model_type":"llama","rope_theta":500000.0,"rope_scaling":{"rope_type":"llama3","factor":8.0,)"
          R"("low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192})"),
      config(R"("model_type":"llama","tie_word_embeddings":true,"head_dim":16,"attention_bias":true,)"
             R"("rope_scaling":{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":1024}})"),
      config(R"("model_type":"mistral","sliding_window":32)"),
      config(R"("model_type":"qwen2","use_sliding_window":true,"sliding_window":32,"max_window_layers":1)"),
      config(R"("model_type":"qwen3","head_dim":16)"),
      config(R"("model_type":"gemma3_text","head_dim":16,"sliding_window":32,"sliding_window_pattern":2,)"
             R"("query_pre_attn_scalar":24,"rope_local_base_freq":10000.0,)"
             R"("rope_scaling":{"rope_type":"linear","factor":8.0})"),
      config(R"("model_type":"gemma3_text","layer_types":["full_attention","sliding_attention"],)"
             R"("rope_parameters":{"full_attention":{"rope_type":"linear","factor":8.0},)"
             R"("sliding_attention":{"rope_theta":10000.0}})"),
      R"({"model_type":"gemma3","torch_dtype":"bfloat16","vision_config":{},"text_config":)" +
          config(R"("model_type":"gemma3_text","head_dim":16)") + "}",
      config(
          R"("model_type":"qwen3_moe","head_dim":16,"num_experts":4,"num_experts_per_tok":2,)"
          R"("moe_intermediate_size":32,"norm_topk_prob":true,"mlp_only_layers":[0],"decoder_sparse_step":1)"),
      config(R"("model_type":"mixtral","num_local_experts":4,"num_experts_per_tok":2)"),
      config(R"("model_type":"glm4_moe","head_dim":16,"n_routed_experts":4,"num_experts_per_tok":2,)"
             R"("moe_intermediate_size":32,"n_shared_experts":1,"first_k_dense_replace":1,"n_group":1,)"
             R"("topk_group":1,"partial_rotary_factor":0.5,"use_qk_norm":true)"),
      config(R"("model_type":"minimax_m2","head_dim":16,"rotary_dim":8,"num_local_experts":4,)"
             R"("num_experts_per_tok":2,"use_qk_norm":true,"scoring_func":"sigmoid")"),
      config(R"("model_type":"gpt_oss","head_dim":16,"num_local_experts":4,"num_experts_per_tok":2,)"
             R"("swiglu_limit":7.0,"rope_scaling":{"rope_type":"yarn","factor":4.0,"truncate":false,)"
             R"("original_max_position_embeddings":1024}})"),
  };
}

}  // namespace meshfill

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace meshfill;
  const auto config = ModelConfig::Parse({reinterpret_cast<const char*>(data), size}, "config.json");
  if (config.ok()) {
    Check(*config);
  } else {
    FUZZ_CHECK(absl::IsInvalidArgument(config.status()));
  }
  return 0;
}
