#include "server/cli/commands/make_model.h"

#include <cstdio>
#include <optional>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "engine/model/family.h"
#include "engine/model/make_model.h"
#include "kernels/return_if_error.h"
#include "server/cli/commands/flags.h"

namespace meshfill {
namespace {

absl::StatusOr<ModelFamily> ParseFamily(const std::string& name) {
  for (const Family* family : Families()) {
    if (name == family->name) return family->family;
  }
  return absl::InvalidArgumentError(absl::StrCat("'", name, "' is no architecture; use ", FamilyNames()));
}

absl::StatusOr<DType> ParseWeightDType(const std::string& name) {
  for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32, DType::kF8E4M3, DType::kF4E2M1}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("'", name, "' is no dtype of weights; use bf16, f16, f32, fp8 or mxfp4"));
}

absl::StatusOr<Fp8Scales> ParseFp8Scales(const std::string& name) {
  if (name == "block") return Fp8Scales::kBlock;
  if (name == "channel") return Fp8Scales::kChannel;
  if (name == "tensor") return Fp8Scales::kTensor;
  return absl::InvalidArgumentError(
      absl::StrCat("'", name, "' is nothing that shares a scale; use block, channel or tensor"));
}

class MakeModelCommand : public Command {
 public:
  explicit MakeModelCommand(CLI::App& parent)
      : Command(
            parent.add_subcommand("make-model", "Write a model of random weights as a Hugging Face folder")) {
    AddParsedOption(*app_, "--arch", family_, ParseFamily, "NAME",
                    FamilyNames() + "; needed without --config-json");
    app_->add_option("--out", folder_, "Folder to create")->type_name("DIR")->required();
    CLI::Option* config =
        app_->add_option(
                "--config-json", config_path_,
                "Make the model of this config.json, any that a server loads; the folder gets a copy")
            ->type_name("FILE");
    AddCount(*app_, "--layers", options_.layers, "Layers");
    AddCount(*app_, "--hidden", options_.hidden, "Width of the residual stream");
    AddCount(*app_, "--intermediate", options_.intermediate,
             "Width of the MLP (default: 8/3 of hidden, in multiples of 64)");
    AddCount(*app_, "--heads", options_.q_heads, "Query heads");
    AddCount(*app_, "--kv-heads", options_.kv_heads, "Key and value heads; divides --heads");
    AddCount(*app_, "--head-dim", options_.head_dim, "Width of a head (default: hidden / heads)");
    AddCount(*app_, "--vocab", options_.vocab, "Token ids");
    AddCount(*app_, "--context", options_.context_tokens, "Longest prompt, in tokens");
    AddCount(*app_, "--original-context", options_.original_context_tokens,
             "Longest prompt of longrope's short factors, of phi3 alone (default: no longrope)");
    AddCount(*app_, "--sliding-window", options_.sliding_window,
             "Keys that a query sees, of mistral (default: all), gemma3 (1024) and gpt_oss (128) alone");
    AddCount(*app_, "--experts", options_.experts, "Experts, of an architecture that has them (default: 8)");
    AddCount(*app_, "--experts-used", options_.experts_used,
             "Experts that each token goes through (default: 2)");
    AddCount(*app_, "--expert-width", options_.expert_width,
             "Width of an expert (default: as --intermediate)");
    app_->add_option("--dense-layers", options_.dense_layers,
                     "First layers without experts, of qwen3_moe (default: 0) and glm4_moe (1) alone")
        ->type_name("N")
        ->check(WholeNumber(0));
    AddCount(
        *app_, "--next-layers", options_.next_layers,
        "Layers that predict further tokens, which a prefill leaves out, of glm4_moe and minimax_m2 alone");
    app_->add_option("--rope-theta", options_.rope_theta, "Base of the rotary embedding")
        ->check(PositiveNumber())
        ->capture_default_str();
    app_->add_flag("--tied", options_.tied_embeddings, "The LM head shares the embedding table");
    AddParsedOption(*app_, "--dtype", options_.dtype, ParseWeightDType, "NAME",
                    "Of the weights: bf16 (default), f16, f32, fp8 (see --fp8-scales) or mxfp4 (gpt_oss's "
                    "experts); the rest is then in bf16");
    AddParsedOption(
        *app_, "--fp8-scales", options_.fp8_scales, ParseFp8Scales, "NAME",
        "What shares a scale of --dtype fp8: block (default: of 128 x 128), or channel (a row) or "
        "tensor, both in the form of compressed-tensors");
    app_->add_option("--seed", options_.seed, "Same options and seed: same bytes")->capture_default_str();
    AddCount(*app_, "--shard-bytes", options_.shard_bytes,
             "Largest file; a larger model is split, with an index");
    const std::set<std::string> with_config = {"--help", "--config-json", "--out", "--seed", "--shard-bytes"};
    for (CLI::Option* option : app_->get_options()) {
      if (!with_config.contains(option->get_name())) config->excludes(option);
    }
  }

  absl::Status Run() override {
    RETURN_IF_ERROR(Make());
    std::printf("%s\n", folder_.c_str());
    return absl::OkStatus();
  }

 private:
  absl::Status Make() {
    if (!config_path_.empty()) {
      return MakeModelOf(config_path_, options_.seed, options_.shard_bytes, folder_);
    }
    if (!family_.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("nothing to make; give --arch ", FamilyNames(), ", or --config-json FILE"));
    }
    options_.family = *family_;
    return MakeModel(options_, folder_);
  }

  std::optional<ModelFamily> family_;
  std::string config_path_;
  MakeModelOptions options_;
  std::string folder_;
};

}  // namespace

std::unique_ptr<Command> AddMakeModelCommand(CLI::App& parent) {
  return std::make_unique<MakeModelCommand>(parent);
}

}  // namespace meshfill
