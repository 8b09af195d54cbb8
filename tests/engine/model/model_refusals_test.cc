// Folders of which no model is loaded: one line names the folder, and what is wrong in it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/model/hf_folder.h"
#include "tests/engine/model/loaded_model.h"
#include "tests/engine/temp_folder.h"

namespace meshfill {
namespace {

using testing::HasSubstr;

std::vector<BadModel> BadModels() {
  const std::string layer = kLayer1;
  std::vector<BadModel> bad = {
      {"a tensor too many",
       [](HfFolder& f) {
         f.tensors["model.layers.2.mlp.up_proj.weight"] = {ElementType::kF32, {0}, {}};
       },
       {"\"model.layers.2.mlp.up_proj.weight\"", "not in the model"}},
      {"a bias that the config does not have",
       [layer](HfFolder& f) {
         f.tensors[layer + "self_attn.q_proj.bias"] = {ElementType::kF32, {24}, std::vector<std::byte>(96)};
       },
       {layer + "self_attn.q_proj.bias", "not in the model"}},
      {"K as wide as Q",
       [layer](HfFolder& f) {
         Reshape(f, layer + "self_attn.k_proj.weight", {24, 16});
       },
       {layer + "self_attn.k_proj.weight", "[24, 16]", "[12, 16]"}},
      {"a matrix on its side",
       [layer](HfFolder& f) {
         Reshape(f, layer + "mlp.down_proj.weight", {24, 16});
       },
       {layer + "mlp.down_proj.weight", "[24, 16]", "[16, 24]"}},
      {"a norm in two dimensions",
       [](HfFolder& f) {
         Reshape(f, "model.norm.weight", {16, 1});
       },
       {"\"model.norm.weight\"", "[16, 1]", "[16]"}},
      {"another vocabulary",
       [](HfFolder& f) { f.config["vocab_size"] = 12; },
       {"\"model.embed_tokens.weight\"", "[11, 16]", "[12, 16]"}},
      {"another head_dim",
       [](HfFolder& f) { f.config["head_dim"] = 4; },
       {"q_proj.weight", "[24, 16]", "[16, 16]"}},
      {"more layers",
       [](HfFolder& f) { f.config["num_hidden_layers"] = 3; },
       {"\"model.layers.2.input_layernorm.weight\"", "missing"}},
      {"fewer layers",
       [](HfFolder& f) { f.config["num_hidden_layers"] = 1; },
       {"\"model.layers.1.", "not in the model"}},
      {"biases that are not there",
       [](HfFolder& f) { f.config["mlp_bias"] = true; },
       {"gate_proj.bias", "missing"}},
      {"integers",
       [layer](HfFolder& f) { f.tensors.at(layer + "mlp.up_proj.weight").type = ElementType::kI32; },
       {layer + "mlp.up_proj.weight", "I32", "BF16"}},
      {"a tied head of its own",
       [](HfFolder& f) {
         f.config["tie_word_embeddings"] = true;
         f.tensors.at("lm_head.weight").bytes[3] ^= std::byte{1};
       },
       {"\"lm_head.weight\"", "tie_word_embeddings"}},
      {"a tied head of another dtype, though of the same bytes",
       [](HfFolder& f) {
         f.config["tie_word_embeddings"] = true;
         f.tensors.at("lm_head.weight") = f.tensors.at("model.embed_tokens.weight");
         for (const auto& [name, type] : {std::pair("lm_head.weight", ElementType::kF16),
                                          {"model.embed_tokens.weight", ElementType::kBf16}}) {
           f.tensors.at(name).type = type;
           Reshape(f, name, f.tensors.at(name).shape);
         }
       },
       {"\"lm_head.weight\"", "tie_word_embeddings"}},
      {"a tied head and no embedding",
       [](HfFolder& f) {
         f.config["tie_word_embeddings"] = true;
         f.tensors.erase("model.embed_tokens.weight");
       },
       {"\"model.embed_tokens.weight\"", "missing"}},
      {"an unknown config key",
       [](HfFolder& f) { f.config["logit_scale"] = 0.5; },
       {"config.json", "\"logit_scale\"", "0.5"}},
  };
  for (const std::string name :
       {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
        "model.layers.1.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight",
        "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.v_proj.weight", "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight"}) {
    bad.push_back(
        {"no " + name, [name](HfFolder& f) { f.tensors.erase(name); }, {"\"" + name + "\"", "missing"}});
  }
  return bad;
}

TEST(ModelTest, RefusesBrokenModelsByName) {
  const HfFolder good = Good();
  ExpectRefusedByName(good, BadModels());
}

TEST(ModelTest, MissingPartsAreNotFound) {
  const TempFolder folder;
  EXPECT_EQ(Load(folder / "none").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Load(folder.path()).status().code(), absl::StatusCode::kNotFound);
  Good().Write(folder.path());
  std::filesystem::remove(folder / "config.json");
  const auto model = Load(folder.path());
  EXPECT_EQ(model.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(model.status().message()), HasSubstr("config.json"));
}

TEST(ModelTest, RefusesCutWeightsAndBrokenConfigs) {
  const TempFolder folder;
  Good().Write(folder.path());
  const std::string weights = ReadWholeFile(folder / "model.safetensors");
  folder.Write("model.safetensors", weights.substr(0, weights.size() - 1));
  EXPECT_EQ(Load(folder.path()).status().code(), absl::StatusCode::kInvalidArgument);
  folder.Write("model.safetensors", weights);
  folder.Write("config.json", "{\"model_type\": ");
  const auto model = Load(folder.path());
  EXPECT_EQ(model.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(model.status().message()), HasSubstr("config.json"));
}

}  // namespace
}  // namespace meshfill
