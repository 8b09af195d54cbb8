#include "server/cli/commands/make_model.h"

#include <cstdio>

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

class MakeModelCommand : public Command {
 public:
  explicit MakeModelCommand(CLI::App& parent)
      : Command(
            parent.add_subcommand("make-model", "Write a model of random weights as a Hugging Face folder")) {
    AddParsedOption(*app_, "--arch", options_.family, ParseFamily, "NAME", FamilyNames())->required();
    app_->add_option("--out", folder_, "Folder to create")->type_name("DIR")->required();
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
    app_->add_option("--rope-theta", options_.rope_theta, "Base of the rotary embedding")
        ->check(PositiveNumber())
        ->capture_default_str();
    app_->add_flag("--tied", options_.tied_embeddings, "The LM head shares the embedding table");
    AddParsedOption(
        *app_, "--dtype", options_.dtype, ParseWeightDType, "NAME",
        "Of the weights: bf16 (default), f16, f32, fp8 (in blocks of 128 x 128) or mxfp4 (gpt_oss's "
        "experts); the rest is then in bf16");
    app_->add_option("--seed", options_.seed, "Same options and seed: same bytes")->capture_default_str();
    AddCount(*app_, "--shard-bytes", options_.shard_bytes,
             "Largest file; a larger model is split, with an index");
  }

  absl::Status Run() override {
    RETURN_IF_ERROR(MakeModel(options_, folder_));
    std::printf("%s\n", folder_.c_str());
    return absl::OkStatus();
  }

 private:
  MakeModelOptions options_;
  std::string folder_;
};

}  // namespace

std::unique_ptr<Command> AddMakeModelCommand(CLI::App& parent) {
  return std::make_unique<MakeModelCommand>(parent);
}

}  // namespace meshfill
