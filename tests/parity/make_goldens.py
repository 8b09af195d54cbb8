#!/usr/bin/env python3
"""Makes the goldens of the parity test: tiny random models and what Hugging Face transformers computes with them.

    pip install torch transformers safetensors
    tests/parity/make_goldens.py [--only CASE] [--errors]

goldens/<case>/          a Hugging Face folder: config.json, weights in one file or in shards with an index
  prompt_<n>.safetensors n tokens through it, in float32 whatever the weights' dtype:
    tokens               [n] int32
    logits               [vocab] float32, of the last token
    rows                 [r] int64: tokens whose K and V are kept
    layers.<l>.k, .v     [r, kv_heads, head_dim] float32, K after RoPE
    k_norms, v_norms     [layers, kv_heads] float32: L2 norm over all tokens
rope/<case>/             config.json and rope.safetensors, with real models' parameters:
    inv_freq             [head_dim / 2] float32
    positions            [p] int64
    cos, sin             [p, head_dim / 2] float32, times the attention factor

bf16_errors.json         by case and number of tokens: the error of the logits where transformers computes in bfloat16,
                         ‖bfloat16 − float32‖ / ‖float32‖. --errors measures it of the goldens that are there.

Of a model in FP8 or MXFP4, transformers computes what the elements times their scales are, in float32.

Before a golden is written, the script makes sure that it can tell a wrong model from a right one: another RoPE and
another mask must each move the logits by far more than the test's tolerance.
"""

import argparse
import contextlib
import json
import pathlib
import shutil
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = pathlib.Path(__file__).resolve().parent
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
                 "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM",
                 "glm4_moe": "Glm4MoeForCausalLM", "minimax_m2": "MiniMaxM2ForCausalLM",
                 "phi3": "Phi3ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
                 "gemma3": "Gemma3ForConditionalGeneration", "gpt_oss": "GptOssForCausalLM"}
MAX_FILE_BYTES = 1_000_000
VISIBLE_CHANGE = 1e-2  # of the logits' standard deviation; the test allows 1e-3
KEPT_ROWS = 12

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 256}


def longrope(half, type_key):
    """Short factors near 1, long ones far from them, for so many pairs of dimensions."""
    return {type_key: "longrope", "short_factor": [round(1 + 0.05 * i, 2) for i in range(half)],
            "long_factor": [round(1.5 * 40 ** (i / half), 3) for i in range(half)]}


# `config` holds config.json's own keys, on top of SMALL. The rope keys are spelled as transformers 5 does where
# "rope_parameters" is used, and as the versions before it do elsewhere.
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
         "hidden_act": "silu", "tie_word_embeddings": False}
CASES = {
    "llama_default": dict(model="llama", dtype="float32", prompts=[1, 2, 63, 64, 65, 777],
                          config={"num_key_value_heads": 4, "rope_theta": 10000.0}),
    "llama_linear": dict(model="llama", dtype="bfloat16", prompts=[65, 777],
                         config={"num_hidden_layers": 3, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama_llama3_gqa4": dict(model="llama", dtype="bfloat16", prompts=[64, 4096],
                              config={"num_attention_heads": 8, "rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama_llama3_sharded_mqa": dict(model="llama", dtype="float32", prompts=[64, 777], shards="150KB",
                                     config={"num_key_value_heads": 1, "tie_word_embeddings": True,
                                             "rope_parameters": {"rope_theta": 500000.0, **LLAMA3}}),
    "llama_yarn": dict(model="llama", dtype="float32", prompts=[63, 777],
                       config={"rope_theta": 10000.0, "max_position_embeddings": 1024,
                               "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                                "original_max_position_embeddings": 256}}),
    "llama_biases_mqa": dict(model="llama", dtype="float16", prompts=[2, 65],
                             config={"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama_head_dim_80": dict(model="llama", dtype="bfloat16", prompts=[65, 777],
                              config={"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
                                      "head_dim": 80}),
    "mistral_window": dict(model="mistral", dtype="bfloat16", prompts=[1, 63, 65, 777, 4096],
                           config={"sliding_window": 48, "rope_theta": 10000.0}),
    "mistral_sharded_head_dim_32": dict(model="mistral", dtype="float16", prompts=[64, 777], shards="60KB",
                                        config={"sliding_window": None, "head_dim": 32,
                                                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_tied_gqa8": dict(model="qwen2", dtype="bfloat16", prompts=[65, 777],
                            config={"num_attention_heads": 16, "num_key_value_heads": 2, "hidden_size": 128,
                                    "vocab_size": 512, "tie_word_embeddings": True, "rope_theta": 1e6,
                                    "use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1}),
    "qwen2_window": dict(model="qwen2", dtype="float32", prompts=[2, 64, 777],
                         config={"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 33,
                                 "max_window_layers": 1, "rope_theta": 1e6}),
    "qwen2_yarn": dict(model="qwen2", dtype="bfloat16", prompts=[65, 4096],
                       config={"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                                                   "original_max_position_embeddings": 1024,
                                                   "attention_factor": 1.2, "truncate": False}}),
    "qwen3_tied": dict(model="qwen3", dtype="bfloat16", prompts=[1, 65, 777],
                       config={"head_dim": 32, "tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen3_bias_layer_types": dict(model="qwen3", dtype="float32", prompts=[63, 777],
                                   config={"head_dim": 16, "num_hidden_layers": 3, "attention_bias": True,
                                           "use_sliding_window": True, "sliding_window": 40,
                                           "layer_types": ["sliding_attention", "full_attention",
                                                           "sliding_attention"]}),
    "qwen3_yarn_mscale": dict(model="qwen3", dtype="float16", prompts=[2, 65, 4096],
                              config={"head_dim": 16, "num_key_value_heads": 4,
                                      "rope_scaling": {"rope_type": "yarn", "factor": 16.0, "mscale": 1.0,
                                                       "mscale_all_dim": 0.7, "beta_fast": 24, "beta_slow": 2,
                                                       "original_max_position_embeddings": 512}}),
    # 5 experts of which 3 are used; with "starved", the last one never gets a token.
    "qwen3_moe_5_of_3": dict(model="qwen3_moe", dtype="float32", prompts=[1, 65, 777], starved=True,
                             config={"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 3,
                                     "moe_intermediate_size": 24, "norm_topk_prob": True, "rope_theta": 1e6}),
    "qwen3_moe_dense_layers_tied": dict(model="qwen3_moe", dtype="bfloat16", prompts=[2, 63, 4096],
                                        config={"head_dim": 32, "num_hidden_layers": 4, "num_experts": 7,
                                                "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                                                "norm_topk_prob": False, "decoder_sparse_step": 2,
                                                "mlp_only_layers": [3], "tie_word_embeddings": True,
                                                "num_key_value_heads": 1}),
    "qwen3_moe_window_sharded": dict(model="qwen3_moe", dtype="float16", prompts=[64, 777], shards="100KB",
                                     config={"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 1,
                                             "moe_intermediate_size": 32, "norm_topk_prob": False,
                                             "attention_bias": True, "use_sliding_window": True,
                                             "sliding_window": 50, "rope_scaling": {
                                                 "rope_type": "yarn", "factor": 4.0,
                                                 "original_max_position_embeddings": 2048}}),
    "mixtral_5_of_3": dict(model="mixtral", dtype="bfloat16", prompts=[1, 64, 777], starved=True,
                           config={"intermediate_size": 33, "num_local_experts": 5, "num_experts_per_tok": 3,
                                   "rope_theta": 1e6}),
    "mixtral_window_tied": dict(model="mixtral", dtype="float32", prompts=[2, 65, 4096],
                                config={"intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2,
                                        "sliding_window": 70, "tie_word_embeddings": True,
                                        "num_key_value_heads": 4}),
    "mixtral_all_experts": dict(model="mixtral", dtype="float16", prompts=[63, 777],
                                config={"intermediate_size": 40, "num_local_experts": 3, "num_experts_per_tok": 3,
                                        "head_dim": 32, "num_key_value_heads": 1}),
    "glm4_moe_5_of_3": dict(model="glm4_moe", dtype="float32", prompts=[1, 65, 777], starved=True,
                            config={"head_dim": 24, "n_routed_experts": 5, "num_experts_per_tok": 3,
                                    "moe_intermediate_size": 24, "first_k_dense_replace": 1,
                                    "num_hidden_layers": 3, "use_qk_norm": True, "attention_bias": True,
                                    "partial_rotary_factor": 0.5, "routed_scaling_factor": 2.5}),
    "glm4_moe_groups_tied": dict(model="glm4_moe", dtype="bfloat16", prompts=[2, 63, 4096],
                                 config={"head_dim": 16, "n_routed_experts": 12, "num_experts_per_tok": 4,
                                         "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
                                         "moe_intermediate_size": 16, "first_k_dense_replace": 0,
                                         "tie_word_embeddings": True, "norm_topk_prob": False}),
    "glm4_moe_full_rotary": dict(model="glm4_moe", dtype="float16", prompts=[64, 777],
                                 config={"head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2,
                                         "moe_intermediate_size": 40, "first_k_dense_replace": 1,
                                         "partial_rotary_factor": 1.0, "num_key_value_heads": 1}),
    "minimax_m2_5_of_3": dict(model="minimax_m2", dtype="float32", prompts=[1, 65, 777], starved=True,
                              config={"head_dim": 24, "rotary_dim": 12, "intermediate_size": 24,
                                      "num_local_experts": 5, "num_experts_per_tok": 3, "rope_theta": 5e6}),
    "minimax_m2_tied": dict(model="minimax_m2", dtype="bfloat16", prompts=[2, 63, 4096],
                            config={"head_dim": 32, "rotary_dim": 16, "intermediate_size": 40,
                                    "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": True,
                                    "num_attention_heads": 6, "num_key_value_heads": 2}),
    "minimax_m2_rope_parameters": dict(model="minimax_m2", dtype="float16", prompts=[64, 777],
                                       config={"head_dim": 16, "intermediate_size": 32, "num_local_experts": 4,
                                               "num_experts_per_tok": 1, "num_key_value_heads": 1,
                                               "rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                                                                   "partial_rotary_factor": 0.75}}),
    "phi3_mha": dict(model="phi3", dtype="float32", prompts=[1, 65, 777],
                     config={"pad_token_id": None, "num_key_value_heads": 4, "vocab_size": 128, "rope_theta": 10000.0,
                             "original_max_position_embeddings": 8192, "rope_scaling": None}),
    "phi3_window_tied": dict(model="phi3", dtype="bfloat16", prompts=[2, 65, 4096],
                             config={"pad_token_id": None, "sliding_window": 47, "tie_word_embeddings": True,
                                     "partial_rotary_factor": 0.75}),
    "phi3_mqa_sharded": dict(model="phi3", dtype="float16", prompts=[63, 777], shards="60KB",
                             config={"pad_token_id": None, "num_key_value_heads": 1, "hidden_size": 96,
                                     "vocab_size": 128,
                                     "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0,
                                                         "partial_rotary_factor": 0.5}}),
    # Prompts to the original context have the short factors, longer ones the long factors.
    "phi3_longrope_mha": dict(model="phi3", dtype="float32", prompts=[1, 2, 255, 256, 257, 777],
                              config={"pad_token_id": None, "num_key_value_heads": 4, "vocab_size": 128,
                                      "original_max_position_embeddings": 256, "max_position_embeddings": 4096,
                                      "rope_scaling": longrope(8, "type")}),
    "phi3_longrope_partial_tied": dict(model="phi3", dtype="bfloat16", prompts=[63, 64, 65, 400],
                                       config={"pad_token_id": None, "hidden_size": 96, "num_attention_heads": 6,
                                               "num_key_value_heads": 1, "vocab_size": 128,
                                               "sliding_window": 300, "tie_word_embeddings": True,
                                               "max_position_embeddings": 1024,
                                               "partial_rotary_factor": 0.75,
                                               "original_max_position_embeddings": 64,
                                               "rope_scaling": {**longrope(6, "type"),
                                                                "attention_factor": 1.05}}),
    "phi3_longrope_sharded": dict(model="phi3", dtype="float16", prompts=[500, 501], shards="60KB",
                                  config={"pad_token_id": None, "num_attention_heads": 6, "num_key_value_heads": 2,
                                          "hidden_size": 60, "vocab_size": 128,
                                          "original_max_position_embeddings": 500,
                                          "rope_parameters": {**longrope(5, "rope_type"), "rope_theta": 5000.0,
                                                              "attention_factor": 1.3, "factor": 40.0}}),
    # In FP8: [rows, columns] of the elements that share a scale, or each row by itself.
    "llama_fp8_blocks": dict(model="llama", dtype="bfloat16", prompts=[1, 65, 777], fp8=[16, 32],
                             config={"hidden_size": 72, "head_dim": 20, "vocab_size": 128,
                                     "intermediate_size": 90}),
    "qwen2_fp8_channels_tied": dict(model="qwen2", dtype="bfloat16", prompts=[2, 64, 777], fp8=None,
                                    config={"tie_word_embeddings": True, "use_sliding_window": False,
                                            "rope_theta": 1e6}),
    "qwen3_moe_fp8_blocks": dict(model="qwen3_moe", dtype="bfloat16", prompts=[2, 63, 1500], fp8=[24, 16],
                                 config={"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 3,
                                         "moe_intermediate_size": 40, "norm_topk_prob": True,
                                         "vocab_size": 128, "rope_theta": 1e6}),
    # Five layers of six with a window, and a RoPE of their own; the keys as transformers 4 spells them.
    "gemma3_tied_linear": dict(model="gemma3_text", dtype="bfloat16", prompts=[1, 65, 777, 4096],
                               config={"head_dim": 24, "num_hidden_layers": 7, "sliding_window": 50,
                                       "sliding_window_pattern": 6, "query_pre_attn_scalar": 40,
                                       "rope_theta": 30000.0, "rope_local_base_freq": 5000.0,
                                       "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                                       "tie_word_embeddings": True, "vocab_size": 128}),
    "gemma3_layer_types_bias_mqa": dict(model="gemma3_text", dtype="float32", prompts=[2, 63, 777],
                                        config={"hidden_size": 48, "num_attention_heads": 6, "head_dim": 18,
                                                "num_key_value_heads": 1, "num_hidden_layers": 3,
                                                "attention_bias": True, "sliding_window": 17,
                                                "query_pre_attn_scalar": 18,
                                                "layer_types": ["full_attention", "sliding_attention",
                                                                "full_attention"],
                                                "rope_parameters": {
                                                    "full_attention": {"rope_type": "linear", "factor": 4.0,
                                                                       "rope_theta": 500000.0},
                                                    "sliding_attention": {"rope_type": "default",
                                                                          "rope_theta": 100.0}}}),
    "gemma3_head_dim_256_sharded": dict(model="gemma3_text", dtype="float16", prompts=[64, 777], shards="200KB",
                                        config={"num_attention_heads": 2, "num_key_value_heads": 1,
                                                "head_dim": 256, "num_hidden_layers": 2, "sliding_window": 100,
                                                "sliding_window_pattern": 2}),
    # A language model inside one that reads images, too.
    "gemma3_with_images": dict(model="gemma3", dtype="bfloat16", prompts=[3, 65, 777],
                               vision={"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                                       "num_attention_heads": 1, "image_size": 28, "patch_size": 14,
                                       "model_type": "siglip_vision_model"},
                               config={"head_dim": 20, "num_hidden_layers": 3, "sliding_window": 30,
                                       "sliding_window_pattern": 3, "query_pre_attn_scalar": 25,
                                       "rope_local_base_freq": 300.0, "tie_word_embeddings": True,
                                       "vocab_size": 128}),
    # Gates reach limits of less than 7.
    "gpt_oss_5_of_3": dict(model="gpt_oss", dtype="float32", prompts=[1, 2, 65, 777], starved=True,
                           config={"head_dim": 16, "intermediate_size": 24, "num_local_experts": 5,
                                   "num_experts_per_tok": 3, "sliding_window": 33, "num_hidden_layers": 3,
                                   "swiglu_limit": 1.5, "rope_theta": 150000.0,
                                   "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
                                                    "beta_slow": 1.0, "truncate": False,
                                                    "original_max_position_embeddings": 256}}),
    "gpt_oss_window_tied": dict(model="gpt_oss", dtype="bfloat16", prompts=[1, 64, 777, 4096],
                                config={"head_dim": 24, "hidden_size": 56, "intermediate_size": 40,
                                        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40,
                                        "num_attention_heads": 6, "num_key_value_heads": 2,
                                        "tie_word_embeddings": True, "rope_theta": 150000.0, "swiglu_limit": 2.0,
                                        "layer_types": ["full_attention", "sliding_attention"],
                                        "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                                         "truncate": False,
                                                         "original_max_position_embeddings": 2048}}),
    "gpt_oss_all_experts_sharded": dict(model="gpt_oss", dtype="float16", prompts=[63, 777], shards="100KB",
                                        config={"head_dim": 32, "intermediate_size": 33, "num_local_experts": 3,
                                                "num_experts_per_tok": 3, "num_key_value_heads": 1,
                                                "attention_bias": False, "sliding_window": 70, "swiglu_limit": 2.5,
                                                "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0,
                                                                    "factor": 8.0, "truncate": False,
                                                                    "original_max_position_embeddings": 1024}}),
    "gpt_oss_mxfp4": dict(model="gpt_oss", dtype="bfloat16", prompts=[2, 65, 777], mxfp4=True,
                          config={"head_dim": 16, "intermediate_size": 96, "num_local_experts": 4,
                                  "num_experts_per_tok": 2, "sliding_window": 50, "vocab_size": 128,
                                  "rope_theta": 150000.0, "swiglu_limit": 3.0,
                                  "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
                                                   "beta_slow": 1.0, "truncate": False,
                                                   "original_max_position_embeddings": 256}}),
}
ROPES = {
    "llama2": {"head_dim": 128, "rope_theta": 10000.0},
    "llama2_linear": {"head_dim": 128, "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "llama31": {"head_dim": 128, "rope_theta": 500000.0, "max_position_embeddings": 131072,
                "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}},
    "llama32": {"head_dim": 64, "rope_theta": 500000.0, "max_position_embeddings": 131072,
                "rope_scaling": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}},
    "qwen25_yarn": {"head_dim": 128, "rope_theta": 1e6, "max_position_embeddings": 32768,
                    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    "longrope_short": {"head_dim": 96, "rope_theta": 10000.0, "max_position_embeddings": 131072,
                       "original_max_position_embeddings": 4096, "rope_scaling": longrope(48, "rope_type")},
    "longrope_long": {"head_dim": 96, "rope_theta": 10000.0, "max_position_embeddings": 131072,
                      "original_max_position_embeddings": 4096, "rope_scaling": longrope(48, "type")},
    "yarn_untruncated": {"head_dim": 80, "rope_theta": 150000.0, "max_position_embeddings": 131072,
                         "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                          "truncate": False, "original_max_position_embeddings": 4096}},
}
ROPE_POSITIONS = [0, 1, 2, 63, 64, 1000, 4095, 32767, 131071, 1000003, 4194303]
SHORT_POSITIONS = ROPE_POSITIONS[:7]  # of longrope's short factors


def config_json(case):
    names = {"architectures": [ARCHITECTURES[case["model"]]], "model_type": case["model"],
             "torch_dtype": case["dtype"]}
    if "vision" not in case:
        return {**names, **SMALL, **case["config"]}
    return {**names, "text_config": {"model_type": case["model"] + "_text", **SMALL, **case["config"]},
            "mm_tokens_per_image": 4, "vision_config": case["vision"]}


def starve(model):
    """Makes every router's last expert one that no token chooses: by a channel that is the same in all tokens."""
    for name, parameter in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            parameter.data[:, 0] = 4
        elif name.endswith(("o_proj.weight", "experts.down_proj", "mlp.down_proj.weight",
                            "shared_experts.down_proj.weight")):
            parameter.data[..., 0, :] = 0  # of the residual stream's channels, the first stays
        elif name.endswith("post_attention_layernorm.weight"):
            parameter.data[0] = 1
        elif name.endswith("mlp.router.bias"):
            parameter.data[-1] = -60
        elif name.endswith("mlp.gate.weight"):
            parameter.data[:, 0] = 0
            parameter.data[-1] = 0
            parameter.data[-1, 0] = -40
    # What a sigmoid scores near 0, a correction must not lift.
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data[-1] = -1


def randomise(model, generator):
    """Weights under which attention is far from uniform, norms and biases matter, and logits stay of order 1."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    config = model.config.get_text_config()
    gemma = config.model_type == "gemma3_text"  # norms multiply with 1 + weight, the embedding with √hidden
    gain = {"qkv_proj": 1.4, "q_proj": 1.4, "k_proj": 1.4, "o_proj": 1.5, "lm_head": 1.0}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        module = name.split(".")[-2]
        if "norm" in name:
            value = (0 if gemma else 1) + 0.3 * noise
        elif name.endswith("sinks"):
            value = 3 + 2 * noise
        elif name.endswith("bias"):
            value = 0.5 * noise
        elif parameter.ndim == 3 and module == "experts" and model.config.model_type == "gpt_oss":
            value = noise / parameter.shape[1] ** 0.5  # [experts, in, out]
        elif module == "embed_tokens":
            value = noise / (parameter.shape[1] ** 0.5 if config.tie_word_embeddings or gemma else 1)
        else:
            value = gain.get(module, 1.0) * noise / parameter.shape[-1] ** 0.5
        parameter.data.copy_(value)


def load(folder, attention="eager", dtype=torch.float32, **overrides):
    config = AutoConfig.from_pretrained(folder)
    for key, value in overrides.items():
        setattr(config.get_text_config(), key, value)
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype,
                                                attn_implementation=attention,
                                                experts_implementation="eager").eval()


@torch.no_grad()
def prefill(model, tokens):
    cache = DynamicCache()  # without the config: keeps all tokens of windowed layers, too
    logits = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0, -1]
    kv = [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]
    return logits, kv


def change(logits, other):
    return ((logits - other).abs().max() / logits.std()).item()


def experts_of(model):
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


@torch.no_grad()
def firmly_routed(model, tokens, generator):
    """[tokens] bool: whose experts, in every layer, are the same where what the router sees is off by bf16's errors.

    Elsewhere a rounding decides which experts a token goes to, and two right answers differ.
    """
    firm = torch.ones(len(tokens), dtype=torch.bool)

    def compare(gate, inputs, outputs):
        chosen = outputs[2].sort(-1).values
        for _ in range(20):
            noise = 1 + 0.02 * torch.randn(inputs[0].shape, generator=generator)
            again = gate.forward(inputs[0] * noise, *inputs[1:])[2].sort(-1).values
            firm.logical_and_((again == chosen).all(-1).reshape(-1))

    gates = [module for name, module in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]
    hooks = [gate.register_forward_hook(compare) for gate in gates]
    prefill(model, tokens)
    for hook in hooks:
        hook.remove()
    return firm


def draw_prompt(model, count, generator):
    """A prompt whose last token is firmly routed, and which tokens are."""
    for _ in range(100):
        tokens = torch.randint(model.config.get_text_config().vocab_size, (count,), generator=generator).tolist()
        if not experts_of(model):
            return tokens, None
        firm = firmly_routed(model, tokens, generator)
        if firm[-1]:
            return tokens, firm
    raise AssertionError("no prompt is firmly routed")


@torch.no_grad()
def check_experts(model, prompts, starved):
    """In the longest prompt, every expert gets tokens, but for the one that is starved."""
    seen = []
    hooks = [experts.register_forward_hook(lambda module, inputs, _: seen.append((module, inputs[1])))
             for experts in experts_of(model)]
    prefill(model, max(prompts, key=len))
    for hook in hooks:
        hook.remove()
    for module, chosen in seen:
        loads = torch.bincount(chosen.flatten(), minlength=module.num_experts).tolist()
        assert all(loads[:-1]) and bool(loads[-1]) != starved, loads


def wrong_ropes(config):
    """(what is wrong, rope_parameters): another base, and no scaling; of each kind of layers that has its own."""
    parameters = dict(config.rope_parameters)
    kinds = [kind for kind in ("full_attention", "sliding_attention") if kind in parameters]
    for kind in kinds or [None]:
        right = parameters[kind] if kind else parameters
        with_rope = lambda rope: {**parameters, kind: rope} if kind else rope
        yield f"theta {kind or ''}", with_rope({**right, "rope_theta": right["rope_theta"] * 1.3})
        if right["rope_type"] != "default":
            yield f"scaling {kind or ''}", with_rope({"rope_type": "default", "rope_theta": right["rope_theta"]})
        if right["rope_type"] == "longrope":
            yield "factors", {**right, "short_factor": right["long_factor"], "long_factor": right["short_factor"]}
            yield "attention factor", {**right, "attention_factor": 1.0}


def check_sensitivity(folder, model, prompts):
    """A wrong RoPE and a wrong mask must show in the prompts that are long enough for them."""
    config = model.config.get_text_config()
    prompt = max((tokens for tokens in prompts if len(tokens) <= 1000), key=len)
    logits = prefill(model, prompt)[0]
    moved = {what: change(logits, prefill(load(folder, rope_parameters=parameters), prompt)[0])
             for what, parameters in wrong_ropes(config) if len(prompt) > 2 or "theta" in what}
    if config.rope_parameters.get("rope_type") == "longrope":
        short = max((tokens for tokens in prompts if len(tokens) <= config.original_max_position_embeddings), key=len)
        swapped = load(folder, rope_parameters=dict(wrong_ropes(config))["factors"])
        moved["factors of a short prompt"] = change(prefill(model, short)[0], prefill(swapped, short)[0])
    window = getattr(config, "sliding_window", None)
    if window and len(prompt) > window:
        for wrong in (window - 1, window + 1):
            moved[f"window {wrong}"] = change(logits, prefill(load(folder, sliding_window=wrong), prompt)[0])
    if hasattr(config, "query_pre_attn_scalar"):
        wrong_scale = load(folder, query_pre_attn_scalar=config.query_pre_attn_scalar + 7)
        moved["query_pre_attn_scalar"] = change(logits, prefill(wrong_scale, prompt)[0])
    routers = {"num_experts_per_tok": config.num_experts_per_tok % 2 + 1} if experts_of(model) else {}
    for key in ("norm_topk_prob", "routed_scaling_factor"):
        if hasattr(config, key):
            routers[key] = not getattr(config, key) if key.startswith("norm") else 0.7
    for key, value in routers.items():
        if key == "norm_topk_prob" and config.num_experts_per_tok == 1 and config.norm_topk_prob:
            continue
        moved[key] = change(logits, prefill(load(folder, **{key: value}), prompt)[0])
    if hasattr(model.config, "swiglu_limit"):
        moved["limit"] = change(logits, prefill(load(folder, swiglu_limit=model.config.swiglu_limit * 0.7), prompt)[0])
        other_sinks = load(folder)
        for name, parameter in other_sinks.named_parameters():
            if name.endswith("sinks"):
                parameter.data.copy_(parameter.data.roll(1))  # each head has another's
        moved["sinks"] = change(logits, prefill(other_sinks, prompt)[0])
    # The last query's nearest key, among few: a causal mask that is off by one would lose it.
    short = min((tokens for tokens in prompts if len(tokens) > 1), key=len)
    other = short.copy()
    other[-2] = (other[-2] + 1) % config.vocab_size
    moved["key"] = change(prefill(model, short)[0], prefill(model, other)[0])
    print("   ", ", ".join(f"{what} moves logits by {by:.3f} std" for what, by in moved.items()))
    assert min(moved.values()) > VISIBLE_CHANGE, moved


def kept_rows(tokens, firm, generator):
    fixed = {0, 1, 63, 64, tokens // 2, tokens - 1}
    drawn = torch.randint(tokens, (KEPT_ROWS,), generator=generator).tolist()
    rows = [row for row in [*sorted(fixed), *drawn] if row < tokens and (firm is None or firm[row])]
    return sorted(list(dict.fromkeys(rows))[:KEPT_ROWS])


def write_prompt(path, tokens, firm, logits, kv, generator):
    rows = torch.tensor(kept_rows(len(tokens), firm, generator))
    tensors = {"tokens": torch.tensor(tokens, dtype=torch.int32), "logits": logits, "rows": rows,
               "k_norms": torch.stack([k.double().pow(2).sum((0, 2)).sqrt().float() for k, _ in kv]),
               "v_norms": torch.stack([v.double().pow(2).sum((0, 2)).sqrt().float() for _, v in kv])}
    for layer, (k, v) in enumerate(kv):
        tensors[f"layers.{layer}.k"] = k[rows].contiguous()
        tensors[f"layers.{layer}.v"] = v[rows].contiguous()
    save_file(tensors, path)


def spread(scales, shape, block):
    """A scale for each element of a matrix of `shape`. `block`: [rows, columns] with a scale each, or None: rows."""
    rows, columns = block or (1, shape[1])
    return scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:shape[0], :shape[1]]


def quantise(folder, block):
    """Turns the folder's projections into FP8.

    `block`: [rows, columns] with a scale each, as Qwen3-FP8 has them; None: a scale for each row, as
    compressed-tensors does.
    """
    narrow = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        narrow[name] = tensor
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = block or (1, tensor.shape[1])
        scales = torch.stack([torch.stack([part.abs().max() / 448 for part in strip.split(columns, 1)])
                              for strip in tensor.float().split(rows, 0)])
        scales = scales if block else scales.to(torch.bfloat16)
        elements = tensor.float() / spread(scales, tensor.shape, block)
        narrow[name] = elements.clamp(-448, 448).to(torch.float8_e4m3fn)
        narrow[name + ("_scale_inv" if block else "_scale")] = scales
    save_file(narrow, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block,
        "modules_to_not_convert": ["lm_head"],
    } if block else {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "quantization_status": "compressed", "kv_cache_scheme": None,
        "config_groups": {"group_0": {
            "targets": ["Linear"], "output_activations": None,
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}}}}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def quantise_experts(folder):
    """Turns gpt-oss's experts into MXFP4.

    A block of 32 elements of a row shares a power of two: the one that brings its largest within 4 to 8.
    """
    narrow = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            narrow[name] = tensor
            continue
        rows = tensor.float().transpose(1, 2).contiguous()  # [experts, out, in]
        blocks = rows.unflatten(2, (-1, 32))
        exponents = blocks.abs().amax(-1, keepdim=True).log2().floor() - 2
        scaled = blocks / exponents.exp2()
        codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
        codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
        narrow[name + "_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        narrow[name + "_scales"] = (exponents[..., 0] + 127).to(torch.uint8)
    save_file(narrow, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    del config["torch_dtype"]  # as published
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                   "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def widen(folder, to):
    """Writes a model in FP8 or MXFP4 as float32: elements times their scales."""
    config = json.loads((folder / "config.json").read_text())
    block = config.pop("quantization_config").get("weight_block_size")
    (to / "config.json").write_text(json.dumps(config))
    narrow = load_file(folder / "model.safetensors")
    wide = {}
    for name, tensor in narrow.items():
        if name.endswith(("_scale", "_scale_inv", "_scales")):
            continue
        if name.endswith("_blocks"):
            name = name.removesuffix("_blocks")
            codes = torch.stack([tensor & 15, tensor >> 4], -1).flatten(-2).long()
            values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
            scales = (narrow[name + "_scales"].float() - 127).exp2()
            wide[name] = (values * scales[..., None]).flatten(2).transpose(1, 2).contiguous()
        elif tensor.dtype == torch.float8_e4m3fn:
            scales = narrow[name + ("_scale_inv" if block else "_scale")]
            wide[name] = tensor.float() * spread(scales, tensor.shape, block)
        else:
            wide[name] = tensor.float()
    save_file(wide, to / "model.safetensors", metadata={"format": "pt"})


@contextlib.contextmanager
def computable(folder):
    """A folder that transformers computes in floats: a golden's own, or of a narrow one's values."""
    if "quantization_config" not in json.loads((folder / "config.json").read_text()):
        yield folder
        return
    with tempfile.TemporaryDirectory() as wide:
        widen(folder, pathlib.Path(wide))
        yield pathlib.Path(wide)


def note_errors(name, case):
    """Writes what errors transformers' bfloat16 has in a golden that is there."""
    folder = HERE / "goldens" / name
    errors = {}
    with computable(folder) as computed:
        for count in case["prompts"]:
            golden = load_file(folder / f"prompt_{count}.safetensors")
            model = load(computed, attention_for(case, count), dtype=torch.bfloat16)
            logits = prefill(model, golden["tokens"].tolist())[0].float()
            error = (logits - golden["logits"]).norm() / golden["logits"].norm()
            errors[str(count)] = float(f"{error:.3g}")
    path = HERE / "bf16_errors.json"
    all_errors = json.loads(path.read_text()) if path.exists() else {}
    all_errors[name] = errors
    kept = {case: all_errors[case] for case in sorted(all_errors) if case in CASES}
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{name}: bfloat16's errors {errors}")


def attention_for(case, tokens):
    """What computes so many tokens without holding all scores, where it can (sinks are eager alone)."""
    return "sdpa" if tokens > 1000 and case["model"] != "gpt_oss" else "eager"


def make_case(name, case, seed):
    folder = HERE / "goldens" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    config_path = folder / "config.json"
    config_path.write_text(json.dumps(config_json(case), indent=2) + "\n")

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    randomise(model, generator)
    if case.get("starved"):
        starve(model)
    model.to(getattr(torch, case["dtype"])).save_pretrained(folder, max_shard_size=case.get("shards", "1GB"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if "rope_parameters" not in case["config"]:  # else the file stays as transformers 5 writes it
        config_path.write_text(json.dumps(config_json(case), indent=2) + "\n")

    if "fp8" in case:
        quantise(folder, case["fp8"])
    if "mxfp4" in case:
        quantise_experts(folder)
    with computable(folder) as computed:
        write_answers(case, folder, computed, generator)
    for file in folder.iterdir():
        assert file.stat().st_size < MAX_FILE_BYTES, file


def write_answers(case, folder, computed, generator):
    """Draws the prompts of a golden, and writes what transformers computes of what is on disk, in float32."""
    model = load(computed)
    drawn = [draw_prompt(model, n, generator) for n in case["prompts"]]
    prompts = [tokens for tokens, _ in drawn]
    answers = []
    for tokens, firm in drawn:
        attention = attention_for(case, len(tokens))
        logits, kv = prefill(load(computed, attention) if attention != "eager" else model, tokens)
        answers.append((logits, kv))
        write_prompt(folder / f"prompt_{len(tokens)}.safetensors", tokens, firm, logits, kv, generator)
    print(f"{folder.name}: {case['model']} {case['dtype']}, prompts {case['prompts']}, logits' std "
          f"{answers[-1][0].std():.2f}, {sum(f.stat().st_size for f in folder.iterdir()):,} bytes")
    check_experts(model, prompts, case.get("starved", False))
    check_sensitivity(computed, model, prompts)


def make_rope(name, parameters):
    folder = HERE / "rope" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = config_json(dict(model="llama", dtype="float32", config=parameters))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    rope = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))
    positions = torch.tensor(SHORT_POSITIONS if name == "longrope_short" else ROPE_POSITIONS)
    cos, sin = rope(torch.zeros(1), positions[None])
    half = config["head_dim"] // 2
    save_file({"inv_freq": rope.inv_freq.clone(), "positions": positions, "cos": cos[0, :, :half].contiguous(),
               "sin": sin[0, :, :half].contiguous()}, folder / "rope.safetensors")
    print(f"rope {name}: attention factor {rope.attention_scaling:.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="CASE", help="make this case alone")
    parser.add_argument("--errors", action="store_true", help="measure bfloat16's errors of what is there, alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name, parameters in ROPES.items():
        if options.only in (None, name) and not options.errors:
            make_rope(name, parameters)
    for seed, (name, case) in enumerate(CASES.items()):
        if options.only not in (None, name):
            continue
        if not options.errors:
            make_case(name, case, seed)
        note_errors(name, case)


if __name__ == "__main__":
    main()
