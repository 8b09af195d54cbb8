// What commands can be asked for, what they take otherwise, and that each option reaches what it is for.
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/make_model.h"
#include "server/cli/commands/cancel.h"
#include "server/cli/commands/flags.h"
#include "server/cli/commands/make_model.h"
#include "server/cli/commands/plan.h"
#include "server/cli/commands/prefill.h"
#include "server/cli/commands/serve.h"
#include "server/cli/commands/simulate.h"
#include "server/cli/commands/status.h"
#include "server/cli/commands/worker.h"
#include "tests/engine/temp_folder.h"
#include "tests/server/cli/command_line.h"

namespace meshfill {
namespace {

TEST(Commands, OptionsOfAll) {
  std::string lines;
  for (const AddCommand add : {AddCancelCommand, AddMakeModelCommand, AddPlanCommand, AddPrefillCommand,
                               AddServeCommand, AddSimulateCommand, AddStatusCommand, AddWorkerCommand}) {
    CLI::App app;
    const std::unique_ptr<Command> command = add(app);
    lines += command->app().get_name() + "\n" + OptionsOf(command->app());
  }
  EXPECT_EQ(lines, R"(cancel
ID!
--server=127.0.0.1:50051
--cert needs --key
--key needs --cert
--tls
--ca
--server-name
--token-file
make-model
--arch excludes --config-json
--out!
--config-json excludes --arch excludes --context excludes --dense-layers excludes --dtype excludes --expert-width excludes --experts excludes --experts-used excludes --fp8-scales excludes --head-dim excludes --heads excludes --hidden excludes --intermediate excludes --kv-heads excludes --layers excludes --next-layers excludes --original-context excludes --rope-theta excludes --sliding-window excludes --tied excludes --vocab
--layers=2 excludes --config-json
--hidden=256 excludes --config-json
--intermediate excludes --config-json
--heads=4 excludes --config-json
--kv-heads=2 excludes --config-json
--head-dim excludes --config-json
--vocab=256 excludes --config-json
--context=4194304 excludes --config-json
--original-context excludes --config-json
--sliding-window excludes --config-json
--experts excludes --config-json
--experts-used excludes --config-json
--expert-width excludes --config-json
--dense-layers excludes --config-json
--next-layers excludes --config-json
--rope-theta=1e+06 excludes --config-json
--tied excludes --config-json
--dtype excludes --config-json
--fp8-scales excludes --config-json
--seed=1
--shard-bytes=2147483648
plan
--server excludes --cached excludes --cluster excludes --config excludes --context excludes --dtype excludes --model excludes --ranks excludes --ranks-per-host excludes --set excludes --svg
--cert needs --key needs --server
--key needs --cert needs --server
--tls needs --server
--ca needs --server
--server-name needs --server
--token-file needs --server
--config excludes --server
--set excludes --server
--model excludes --server
--cluster excludes --server
--tokens!
--context excludes --server
--cached=0 excludes --server
--ranks excludes --server
--ranks-per-host excludes --server
--tile
--heads
--layout
--stripe
--dtype excludes --server
--json
--svg excludes --server
prefill
--server excludes --config
--cert needs --key needs --server
--key needs --cert needs --server
--tls needs --server
--ca needs --server
--server-name needs --server
--token-file needs --server
--config excludes --server
--set needs --config
--model needs --config
--ranks needs --config
--dtype needs --config
--tokens!
--format
--tile
--heads
--layout
--stripe
--deadline
--request-id
--tenant needs --server
--priority needs --server
--top-k=1
--logits-out
--kv-out
--trace-out
--json
serve
--config
--set
--model
--listen
--measure
--metrics-listen
simulate
--scenario!
--json
--svg
status
--json
--server=127.0.0.1:50051
--cert needs --key
--key needs --cert
--tls
--ca
--server-name
--token-file
worker
--config!
--set
--join
)");
}

TEST(ParseTile, TakesTwoNumbersAboveZero) {
  EXPECT_EQ(ParseTile("2x4").value(), (Tile{2, 4}));
  EXPECT_EQ(ParseTile("1x1").value(), (Tile{1, 1}));
  for (const char* text : {"", "2", "x", "2x", "x4", "0x4", "4x0", "2x-1", "2x4x1", "axb"}) {
    EXPECT_EQ(ParseTile(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(ParseComputeDType, TakesTheTwoThatAreComputedIn) {
  EXPECT_EQ(ParseComputeDType("bf16").value(), DType::kBf16);
  EXPECT_EQ(ParseComputeDType("f32").value(), DType::kF32);
  EXPECT_EQ(ParseComputeDType("f16").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(WholeNumber, IsAtLeastTheLeast) {
  for (const char* text : {"3", "4", "9223372036854775807"}) EXPECT_EQ(WholeNumber(3)(text), "") << text;
  for (const char* text : {"2", "-3", "3.5", "", "three", "9223372036854775808"}) {
    EXPECT_EQ(WholeNumber(3)(text), "'" + std::string(text) + "' is no whole number of 3 or more");
  }
}

TEST(PositiveNumber, IsFiniteAndAboveZero) {
  for (const char* text : {"3", "0.001", "1e9"}) EXPECT_EQ(PositiveNumber()(text), "") << text;
  for (const char* text : {"0", "-1", "inf", "nan", "", "one"}) {
    EXPECT_EQ(PositiveNumber()(text), "'" + std::string(text) + "' is no number above 0");
  }
}

// Numbers out of their range, and options that another one needs or excludes.
TEST(Commands, RefuseWhatTheyCannotDo) {
  using Words = std::vector<std::string>;
  for (const auto& [add, words] : {
           std::pair<AddCommand, Words>(AddPlanCommand,
                                        {"plan", "--tokens", "1", "--ranks", "4097", "--config", "x"}),
           {AddPlanCommand, {"plan", "--tokens", "1", "--ranks", "0", "--config", "x"}},
           {AddPlanCommand, {"plan", "--tokens", "1", "--ranks-per-host", "65", "--config", "x"}},
           {AddPlanCommand, {"plan", "--tokens", "1", "--heads", "0", "--config", "x"}},
           {AddPlanCommand, {"plan", "--tokens", "1", "--stripe", "2147483648", "--config", "x"}},
           {AddPrefillCommand, {"prefill", "--tokens", "x", "--config", "x", "--ranks", "65"}},
           {AddPrefillCommand, {"prefill", "--tokens", "x", "--config", "x", "--ranks", "0"}},
           {AddPrefillCommand, {"prefill", "--tokens", "x", "--config", "x", "--deadline", "0"}},
           {AddStatusCommand, {"status", "--server", "nowhere"}},
           {AddStatusCommand, {"status", "--cert", "x"}},
           {AddStatusCommand, {"status", "--key", "x"}},
           {AddMakeModelCommand, {"make-model", "--arch", "llama", "--out", "x", "--rope-theta", "0"}},
           {AddMakeModelCommand, {"make-model", "--arch", "llama", "--out", "x", "--dtype", "f64"}},
       }) {
    CLI::App app;
    const std::unique_ptr<Command> command = add(app);
    Words reversed(words.rbegin(), words.rend());
    EXPECT_THROW(app.parse(std::move(reversed)), CLI::ParseError) << words.back();
  }
  for (const std::string& stripe : {"1", "2147483647"}) {
    CLI::App app;
    const std::unique_ptr<Command> command = AddPlanCommand(app);
    EXPECT_NO_THROW(app.parse({stripe, "--stripe", "1", "--tokens", "plan"}));
  }
}

// The folder is the one that the same options make.
TEST(MakeModelCommand, PassesEveryOptionOn) {
  using Words = std::vector<std::string>;
  const Words common = {"--layers", "3",   "--hidden",      "96",    "--intermediate", "80",
                        "--heads",  "6",   "--kv-heads",    "3",     "--head-dim",     "32",
                        "--vocab",  "320", "--context",     "4096",  "--rope-theta",   "5000",
                        "--seed",   "7",   "--shard-bytes", "150000"};
  MakeModelOptions options = {.layers = 3,
                              .hidden = 96,
                              .intermediate = 80,
                              .q_heads = 6,
                              .kv_heads = 3,
                              .head_dim = 32,
                              .vocab = 320,
                              .context_tokens = 4096,
                              .rope_theta = 5000,
                              .seed = 7,
                              .shard_bytes = 150'000};
  MakeModelOptions tied = options, windowed = options, experts = options, stretched = options;
  MakeModelOptions next = options, channels = options, matrices = options;
  tied.family = ModelFamily::kQwen3;
  tied.tied_embeddings = true;
  tied.dtype = DType::kF16;
  windowed.family = ModelFamily::kMistral;
  windowed.sliding_window = 77;
  windowed.dtype = DType::kF32;
  experts.family = ModelFamily::kQwen3Moe;
  experts.experts = 5;
  experts.experts_used = 3;
  experts.expert_width = 48;
  experts.dense_layers = 2;
  stretched.family = ModelFamily::kPhi3;
  stretched.original_context_tokens = 1024;
  next.family = ModelFamily::kGlm4Moe;
  next.dense_layers = 0;
  next.next_layers = 1;
  channels.dtype = matrices.dtype = DType::kF8E4M3;
  channels.fp8_scales = Fp8Scales::kChannel;
  matrices.fp8_scales = Fp8Scales::kTensor;
  for (const auto& [arch, own, made] :
       {std::tuple<std::string, Words, MakeModelOptions>("llama", {}, options),
        {"qwen3", {"--tied", "--dtype", "f16"}, tied},
        {"mistral", {"--sliding-window", "77", "--dtype", "f32"}, windowed},
        {"qwen3_moe",
         {"--experts", "5", "--experts-used", "3", "--expert-width", "48", "--dense-layers", "2"},
         experts},
        {"glm4_moe", {"--dense-layers", "0", "--next-layers", "1"}, next},
        {"llama", {"--dtype", "fp8", "--fp8-scales", "channel"}, channels},
        {"llama", {"--dtype", "fp8", "--fp8-scales", "tensor"}, matrices},
        {"phi3", {"--original-context", "1024"}, stretched}}) {
    const TempFolder folder;
    ASSERT_TRUE(MakeModel(made, folder / "expected").ok()) << arch;
    Words words = {"make-model", "--arch", arch, "--out", folder / "made"};
    words.insert(words.end(), common.begin(), common.end());
    words.insert(words.end(), own.begin(), own.end());
    const Ran ran = RunCommand(AddMakeModelCommand, words);
    ASSERT_TRUE(ran.status.ok()) << ran.status;
    EXPECT_EQ(ran.out, folder / "made" + "\n");
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder / "expected")) {
      const std::string name = entry.path().filename().string();
      EXPECT_TRUE(ReadWholeFile(folder / "made/" + name) == ReadWholeFile(entry.path().string()))
          << arch << name;
      ++files;
    }
    EXPECT_GT(files, 3) << "it is in shards";
  }
}

TEST(MakeModelCommand, KnowsEveryDType) {
  const TempFolder folder;
  for (const auto& [arch, dtype] :
       {std::pair("qwen3", "bf16"), std::pair("qwen3", "fp8"), std::pair("gpt_oss", "mxfp4")}) {
    const Ran ran = RunCommand(AddMakeModelCommand, {"make-model", "--arch", arch, "--out", folder / dtype,
                                                     "--layers", "1", "--hidden", "128", "--dtype", dtype});
    EXPECT_TRUE(ran.status.ok()) << ran.status;
  }
  EXPECT_EQ(RunCommand(AddMakeModelCommand, {"make-model", "--arch", "llama", "--out", "x", "--dtype", "f64"})
                .status.message(),
            "--dtype: 'f64' is no dtype of weights; use bf16, f16, f32, fp8 or mxfp4");
  EXPECT_EQ(
      RunCommand(AddMakeModelCommand, {"make-model", "--arch", "llama", "--out", "x", "--fp8-scales", "row"})
          .status.message(),
      "--fp8-scales: 'row' is nothing that shares a scale; use block, channel or tensor");
}

// The folder of a config.json that it made is made again, with another seed in other files.
TEST(MakeModelCommand, MakesTheModelOfAConfig) {
  const TempFolder folder;
  const MakeModelOptions options = {.hidden = 96, .seed = 7, .shard_bytes = 150'000};
  ASSERT_TRUE(MakeModel(options, folder / "expected").ok());
  const Ran ran =
      RunCommand(AddMakeModelCommand, {"make-model", "--config-json", folder / "expected/config.json",
                                       "--out", folder / "made", "--seed", "7", "--shard-bytes", "150000"});
  ASSERT_TRUE(ran.status.ok()) << ran.status;
  EXPECT_EQ(ran.out, folder / "made" + "\n");
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "expected")) {
    const std::string name = entry.path().filename().string();
    EXPECT_TRUE(ReadWholeFile(folder / "made/" + name) == ReadWholeFile(entry.path().string())) << name;
    ++files;
  }
  EXPECT_GT(files, 3) << "it is in shards";
  const absl::Status nothing = RunCommand(AddMakeModelCommand, {"make-model", "--out", "x"}).status;
  EXPECT_EQ(nothing.code(), absl::StatusCode::kInvalidArgument) << nothing;
  EXPECT_NE(nothing.message().find("--config-json FILE"), std::string::npos) << nothing;
}

TEST(ConfigFlags, NamesTheFileThatLacksAModel) {
  ConfigFlags flags;
  v1::Config config;
  EXPECT_EQ(flags.CheckModelPath(config).message(),
            "model.path: not set; name a Hugging Face folder, also with --set model.path=DIR");
  flags.path = "a.yaml";
  EXPECT_EQ(flags.CheckModelPath(config).message(),
            "a.yaml: model.path: not set; name a Hugging Face folder, also with --set model.path=DIR");
  config.mutable_model()->set_path("x");
  EXPECT_TRUE(flags.CheckModelPath(config).ok());
}

}  // namespace
}  // namespace meshfill
