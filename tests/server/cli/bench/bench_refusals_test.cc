// What benchmarks refuse, and what they say then: nothing has been printed before.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/model/make_model.h"
#include "server/cli/bench/bench.h"
#include "tests/engine/temp_folder.h"
#include "tests/server/cli/command_line.h"

namespace meshfill {
namespace {

using testing::HasSubstr;
using testing::MatchesRegex;

class BenchRefusals : public testing::Test {
 protected:
  BenchRefusals() {
    setenv("XDG_CACHE_HOME", folder_.path().c_str(), /*overwrite=*/1);  // not the user's
    EXPECT_TRUE(MakeModel({.layers = 2, .hidden = 64, .context_tokens = 100}, Model()).ok());
    std::filesystem::create_directory(folder_ / "bare");
    std::filesystem::copy(Model() + "/config.json", folder_ / "bare");
  }

  std::string Model() const { return folder_ / "short"; }  // takes 100 tokens at most

  // A config of the model in `name`.
  std::string Config(const std::string& name, const std::string& pool) const {
    return folder_.Write("config.yaml",
                         absl::StrCat("model: {path: ", folder_ / name, "}\npool: ", pool,
                                      "\nplan: {profile_path: ", folder_ / "speed.json", "}\n"));
  }
  std::string Config(const std::string& name = "short") const {
    return Config(name, "{embedded: {ranks: 2, threads: 1, peak_flops: 1e11}}");
  }

  // What the benchmark says that `words` names.
  static std::string Refused(std::vector<std::string> words) {
    words.insert(words.begin(), "bench");
    const Ran ran = RunCommand(AddBenchCommand, words);
    EXPECT_FALSE(ran.status.ok()) << testing::PrintToString(words);
    EXPECT_EQ(ran.out, "") << testing::PrintToString(words);
    return std::string(ran.status.message());
  }
  static std::string Refused(std::vector<std::string> words, const std::vector<std::string>& more) {
    words.insert(words.end(), more.begin(), more.end());
    return Refused(std::move(words));
  }

  const TempFolder folder_;
};

// A layer that is made in no time.
const std::vector<std::string> kTiny = {"--hidden",   "64", "--q-heads",  "4",
                                        "--kv-heads", "2",  "--head-dim", "16"};

TEST_F(BenchRefusals, DevicesThatThereAreNot) {
  const std::string refused = "--device: 'tpu' is no device; choose one of auto, cpu, cuda";
  EXPECT_EQ(Refused({"attention", "--device", "tpu"}), refused);
  EXPECT_EQ(Refused({"gemm", "--device", "tpu"}), refused);
  EXPECT_EQ(Refused({"layer", "--device", "tpu"}, kTiny), refused);
  EXPECT_EQ(Refused({"experts", "--device", "tpu", "--experts", "8", "--expert-width", "32"}, kTiny),
            refused);
}

TEST_F(BenchRefusals, ShapesThatThereAreNot) {
  EXPECT_EQ(Refused({"attention", "--head-dim", "300"}), "bench attention: head_dim is 300; use 1 to 256");
  EXPECT_EQ(Refused({"attention", "--q-heads", "3", "--kv-heads", "2"}),
            "bench attention: q_heads is 3, kv_heads 2; use a divisor of q_heads");
  EXPECT_THAT(Refused({"attention", "--target", "arm"}),
              MatchesRegex("attention: no target 'arm' on this machine; use one of .*portable"));
  EXPECT_EQ(Refused({"layer", "--q-heads", "3", "--kv-heads", "2"}),
            "the model to make: key \"num_key_value_heads\" is 2; it must divide the 3 num_attention_heads");
  EXPECT_EQ(Refused({"experts", "--experts", "2", "--experts-used", "3"}),
            "the model to make: key \"num_experts_per_tok\" is 3; it must not be above the 2 experts of "
            "num_experts");
  EXPECT_EQ(Refused({"kv", "--tokens", "1", "--layers", "1", "--kv-heads", "100000", "--head-dim", "1000"}),
            "a token has 400000000 bytes, which no message of limits.max_message_bytes, 4194304, holds; ask "
            "for fewer heads");
}

TEST_F(BenchRefusals, WhatNoMemoryHolds) {
  EXPECT_THAT(Refused({"comm", "--ranks", "2", "--bytes", "100000TiB"}),
              HasSubstr("109951162777600000 bytes were refused by the system; use a shorter prompt"));
  EXPECT_THAT(Refused({"kv", "--tokens", "2000000000", "--layers", "1", "--kv-heads", "800", "--head-dim",
                       "12800", "--ranks", "2"}),
              HasSubstr("no memory for the 40960000000000000 bytes of K and V that a rank keeps of a layer"));
}

TEST_F(BenchRefusals, AddressesOfOtherMachines) {
  EXPECT_THAT(Refused({"comm", "--listen", "192.0.2.1"}),
              HasSubstr("cannot bind to 192.0.2.1: Cannot assign requested address"));
  const std::string config = Config("short", "{control_listen: '192.0.2.1:1'}");
  EXPECT_THAT(Refused({"mix", "--config", config}),
              HasSubstr("cannot listen on 192.0.2.1:1: Cannot assign requested address"));
}

TEST_F(BenchRefusals, ConfigsAndModelsThatCannotBeRead) {
  for (const char* bench : {"mix", "pieces", "prefix", "weights"}) {
    EXPECT_EQ(Refused({bench, "--config", "nothing.yaml"}),
              "nothing.yaml: cannot be read; name a configuration file, e.g. configs/local.yaml");
    EXPECT_THAT(Refused({bench, "--config", Config("nothing")}), HasSubstr(folder_ / "nothing")) << bench;
    EXPECT_EQ(Refused({bench, "--config", Config("bare")}),
              folder_ / "bare" +
                  ": neither model.safetensors nor model.safetensors.index.json is in it; "
                  "convert the weights to safetensors");
  }
  EXPECT_THAT(Refused({"weights", "--config", Config("bare"), "--workers", "2"}),
              HasSubstr("neither model.safetensors nor"));
  const std::string nothing = folder_ / "nothing";
  const std::string refused = nothing + ": no such folder; name a Hugging Face model folder";
  EXPECT_EQ(Refused({"plan", "--model", nothing}), refused);
  EXPECT_EQ(Refused({"prefill", "--model", nothing, "--tokens", "4"}), refused);
}

TEST_F(BenchRefusals, PromptsThatTheModelDoesNotTake) {
  const std::string refused = "the prompt has 101 tokens; model short is for 100 at most; shorten the prompt";
  EXPECT_EQ(Refused({"mix", "--config", Config(), "--short", "101"}), refused);
  EXPECT_EQ(Refused({"mix", "--config", Config(), "--short", "10", "--long", "101"}), refused);
  EXPECT_EQ(Refused({"pieces", "--config", Config(), "--tokens", "101"}), refused);
  EXPECT_EQ(Refused({"prefix", "--config", Config(), "--tokens", "101", "--cached", "16"}), refused);
  EXPECT_EQ(Refused({"prefill", "--model", Model(), "--tokens", "101"}), refused);
  EXPECT_EQ(Refused({"weights", "--config", Config(), "--tokens", "101"}), refused);
  EXPECT_THAT(Refused({"experts", "--experts", "8", "--expert-width", "32", "--tokens", "5000000"}, kTiny),
              MatchesRegex("the prompt has 5000000 tokens; model .* is for 4194304 at most; .*"));
  // No vector has so many: they are refused before there is a prompt.
  const std::string most = "9000000000000000000";
  const std::string no_prompt =
      absl::StrCat("the prompt has ", most, " tokens; model short is for 100 at most; shorten the prompt");
  EXPECT_EQ(Refused({"prefix", "--config", Config(), "--tokens", most}), no_prompt);
  EXPECT_EQ(Refused({"prefill", "--model", Model(), "--tokens", most}), no_prompt);
  EXPECT_EQ(Refused({"weights", "--config", Config(), "--tokens", most}), no_prompt);
  EXPECT_THAT(Refused({"experts", "--experts", "8", "--expert-width", "32", "--tokens", most}, kTiny),
              HasSubstr("is for 4194304 at most"));
}

TEST_F(BenchRefusals, PlansThatTheModelHasNot) {
  const std::vector<std::string> prefill = {"prefill", "--model", Model(), "--tokens", "64"};
  EXPECT_EQ(Refused(prefill, {"--compare", "2x70"}), "ranks is 140; an embedded pool has 1 to 64");
  EXPECT_EQ(Refused(prefill, {"--heads", "3"}),
            "3 head groups of 3 ranks cannot share 4 query heads and 2 KV heads; possible numbers of head "
            "groups: 1");
}

// It has nothing to compare pieces with.
TEST_F(BenchRefusals, PiecesOfAPromptThatDoesNotFitWhole) {
  ASSERT_TRUE(MakeModel({.layers = 2, .hidden = 64}, folder_ / "long").ok());
  EXPECT_EQ(Refused({"pieces", "--config", Config("long"), "--tokens", "8192"},
                    {"--set", "pool.embedded.memory_bytes=4MiB", "--set", "kv.memory_bytes=4MiB"}),
            "a prompt of 8192 tokens does not fit the memory whole; lower --tokens, or raise memory_bytes");
}

}  // namespace
}  // namespace meshfill
