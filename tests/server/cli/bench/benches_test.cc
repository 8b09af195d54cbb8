// Benchmarks on tiny inputs: what they print is what was asked for, and figures that follow from each other
// do.
#include "tests/server/cli/bench/benches.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <string>
#include <vector>

#include "server/cli/bench/bench_attention.h"
#include "server/cli/bench/bench_comm.h"
#include "server/cli/bench/bench_experts.h"
#include "server/cli/bench/bench_gemm.h"
#include "server/cli/bench/bench_kv.h"
#include "server/cli/bench/bench_layer.h"
#include "server/cli/bench/bench_mix.h"
#include "server/cli/bench/bench_pieces.h"
#include "server/cli/bench/bench_prefill.h"
#include "server/cli/bench/bench_prefix.h"
#include "server/cli/bench/bench_weights.h"
#include "server/cli/result_text.h"

namespace meshfill {
namespace {

using nlohmann::json;
using testing::MatchesRegex;

TEST_F(Benches, AttentionCountsVisiblePairs) {
  const std::vector<std::string> words = {"attention", "--dtype",   "f32",       "--head-dim", "16",
                                          "--tokens",  "300",       "--q-heads", "4",          "--kv-heads",
                                          "2",         "--threads", "1",         "--repeats",  "1",
                                          "--target",  "portable"};
  const json said = PrintJson(AddBenchAttentionCommand, words);
  EXPECT_EQ(said["dtype"], "f32");
  EXPECT_EQ(said["head_dim"], 16);
  EXPECT_EQ(said["tokens"], 300);
  EXPECT_EQ(said["q_heads"], 4);
  EXPECT_EQ(said["kv_heads"], 2);
  EXPECT_EQ(said["threads"], 1);
  EXPECT_EQ(said["target"], "portable");
  EXPECT_NEAR(
      said["seconds"].get<double>() * said["flops_per_second"].get<double>() / (4 * 16 * 4 * 300 * 301 / 2),
      1, 1e-6);
  EXPECT_THAT(Print(AddBenchAttentionCommand, words),
              MatchesRegex("portable, f32, head_dim 16, 300 tokens, 4 query and 2 KV heads, 1 thread\n"
                           "attention       [0-9.]+ GFLOP/s .*\n.*\n.*\n"));
}

TEST_F(Benches, GemmCountsProducts) {
  const std::vector<std::string> words = {
      "gemm", "--dtype",   "f32", "--tokens",  "1000", "--in-features", "96", "--out-features",
      "64",   "--threads", "1",   "--repeats", "1"};
  const json said = PrintJson(AddBenchGemmCommand, words);
  EXPECT_EQ(said["dtype"], "f32");
  EXPECT_EQ(said["tokens"], 1000);
  EXPECT_EQ(said["in_features"], 96);
  EXPECT_EQ(said["out_features"], 64);
  EXPECT_EQ(said["threads"], 1);
  EXPECT_NEAR(said["seconds"].get<double>() * said["flops_per_second"].get<double>() / (2.0 * 1000 * 96 * 64),
              1, 1e-6);
  EXPECT_THAT(
      Print(AddBenchGemmCommand, words),
      MatchesRegex(
          ".*, f32, 1,000 tokens, 96 to 64 features, 1 thread\nlinear layer    [0-9.]+ GFLOP/s .*\n.*\n"
          ".*\n"));
}

TEST_F(Benches, CommGoesRoundWithAndWithoutChecksums) {
  const std::vector<std::string> words = {"comm",     "--ranks", "3",         "--bytes", "4MiB",
                                          "--rounds", "4",       "--repeats", "3"};
  const json said = PrintJson(AddBenchCommCommand, words);
  EXPECT_EQ(said["ranks"], 3);
  EXPECT_EQ(said["message_bytes"], 4 << 20);
  EXPECT_EQ(said["rounds"], 4);
  ExpectRatio(said["ratio"], said["bytes_per_second"], said["bytes_per_second_without_checksum"]);
  const std::string text = Print(AddBenchCommCommand, words);
  EXPECT_EQ(text.substr(0, text.find('\n')), "ring of 3 ranks over 127.0.0.1, 4.0 MiB a message");
  ExpectSameSize(Number(text, "with checksums    ") * 1e9, said["bytes_per_second"]);
  ExpectSameSize(Number(text, "without           ") * 1e9, said["bytes_per_second_without_checksum"]);
  ExpectSameSize(Number(text, "checksum alone    ") * 1e9, said["checksum_bytes_per_second"]);
  const double without = Number(text, "without           ");
  EXPECT_NEAR(Number(text, "ratio             "), Number(text, "with checksums    ") / without,
              0.001 + 0.01 / without);
}

TEST_F(Benches, KvComparesEachLayoutWithARawStream) {
  const std::vector<std::string> words = {"kv", "--tokens",   "300", "--layers", "2", "--kv-heads",
                                          "2",  "--head-dim", "16",  "--ranks",  "3"};
  const json said = PrintJson(AddBenchKvCommand, words);
  std::vector<std::string> names;
  for (const auto& [name, row] : said.items()) {
    names.push_back(name);
    ExpectRatio(row["of_raw"], row["bytes_per_second"], said["raw stream"]["bytes_per_second"]);
  }
  EXPECT_THAT(names, testing::UnorderedElementsAre("raw stream", "tokens", "pages HND", "pages NHD"));
  const std::string text = Print(AddBenchKvCommand, words);
  EXPECT_THAT(
      text,
      MatchesRegex("raw stream +[0-9.]+ GB/s  1.00 of raw\ntokens +[0-9.]+ GB/s  [0-9.]+ of raw\n"
                   "pages HND +[0-9.]+ GB/s  [0-9.]+ of raw\npages NHD +[0-9.]+ GB/s  [0-9.]+ of raw\n"));
}

TEST_F(Benches, LayerSaysItsShare) {
  const std::vector<std::string> words = {"layer", "--dtype",   "f32", "--tokens",   "300", "--hidden",
                                          "64",    "--q-heads", "4",   "--kv-heads", "2",   "--head-dim",
                                          "16",    "--repeats", "2",   "--threads",  "1",   "--intermediate",
                                          "96"};
  const json said = PrintJson(AddBenchLayerCommand, words);
  EXPECT_EQ(said["hidden"], 64);
  EXPECT_EQ(said["intermediate"], 96);
  EXPECT_EQ(said["q_heads"], 4);
  EXPECT_EQ(said["kv_heads"], 2);
  EXPECT_EQ(said["head_dim"], 16);
  EXPECT_GT(said["attention_seconds"], 0);
  ExpectRatio(said["mfu"], said["flops_per_second"], said["peak_flops_per_second"]);
  const std::string text = Print(AddBenchLayerCommand, words);
  EXPECT_THAT(
      text, MatchesRegex("cpu.*, f32, 300 tokens, hidden 64, intermediate 96, 4 query and 2 KV heads of 16\n"
                         "layer           .* m?s, of which attention .* m?s\n"
                         "MFU             [0-9.]+ % of [0-9.]+ TFLOP/s\n"));
}

TEST_F(Benches, ExpertsSaysBothModels) {
  const std::string text =
      Print(AddBenchExpertsCommand,
            {"experts", "--dtype",    "f32", "--tokens",       "1000", "--layers",       "2",  "--hidden",
             "64",      "--experts",  "5",   "--experts-used", "3",    "--expert-width", "32", "--q-heads",
             "4",       "--kv-heads", "2",   "--head-dim",     "16",   "--repeats",      "1",  "--threads",
             "1"});
  EXPECT_THAT(text, MatchesRegex("cpu.*, f32, 1,000 tokens, 2 layers, hidden 64, 3 of 5 experts of 32\n"
                                 "experts   layers .* m?s, of which MLPs .* m?s: [0-9.]+ GFLOP/s\n"
                                 "dense     layers .* m?s, of which MLPs .* m?s: [0-9.]+ GFLOP/s\n"
                                 "experts over dense, FLOP/s: MLPs [0-9.]+, layers [0-9.]+\n"));
}

TEST_F(Benches, MixSaysWhatShortPromptsWaitFor) {
  const std::vector<std::string> words = {"mix", "--config", Config(), "--long",   "3000", "--short",
                                          "20",  "--count",  "5",      "--rounds", "2"};
  const json said = PrintJson(AddBenchMixCommand, words);
  EXPECT_EQ(said["long_tokens"], 3000);
  EXPECT_EQ(said["short_tokens"], 20);
  EXPECT_EQ(said["count"], 5);
  EXPECT_EQ(said["workers"], 0);
  EXPECT_GT(said["short_alone_seconds"], 0);
  EXPECT_LE(said["short_behind_seconds"]["median"], said["short_behind_seconds"]["p95"]);
  EXPECT_GT(said["long_alone_seconds"], said["short_alone_seconds"]);
  EXPECT_LE(said["long_loss"].get<double>(),
            said["long_mixed_seconds"].get<double>() / said["long_alone_seconds"].get<double>() - 1);
  EXPECT_THAT(
      Print(AddBenchMixCommand, words),
      MatchesRegex(
          "20 tokens alone: .* m?s\n"
          "20 tokens behind 3000, at 5 random moments: median .* m?s, 95th percentile .* m?s\n"
          "3000 tokens alone: .* m?s, with the short ones: .* m?s, which is .* % beyond their own time\n"));
}

TEST_F(Benches, PiecesTakeAPartOfTheMemory) {
  const std::vector<std::string> words = {"pieces", "--config", Config(),   "--tokens", "4096",
                                          "--part", "3",        "--rounds", "1"};
  const json said = PrintJson(AddBenchPiecesCommand, words);
  EXPECT_EQ(said["tokens"], 4096);
  const int64_t pieces = said["pieces"], piece_tokens = said["piece_tokens"];
  EXPECT_GT(pieces, 1);
  EXPECT_LT((pieces - 1) * piece_tokens, 4096);
  EXPECT_GE(pieces * piece_tokens, 4096);
  EXPECT_EQ(said["kept_bytes"], 2 * 2 * 2 * 16 * 4096 * 2)
      << "layers, K and V, heads, head_dim, tokens, bf16";
  EXPECT_LE(said["piece_bytes"].get<int64_t>() + said["kept_bytes"].get<int64_t>(),
            said["whole_bytes"].get<int64_t>() / 3);
  ExpectRatio(said["seconds_of_whole"], said["pieces_seconds"], said["whole_seconds"]);
  EXPECT_LT(said["worst_logit"], 0.1);
  const std::string text = Print(AddBenchPiecesCommand, words);
  EXPECT_THAT(text,
              MatchesRegex("whole +[0-9.]+ s +[0-9.]+ MiB of activations\n"
                           " *[0-9]+ pieces +[0-9.]+ s +[0-9.]+ MiB, and [0-9.]+ MiB of K and V that stay\n"
                           "of whole +[0-9.]+ +[0-9.]+, with K and V [0-9.]+\n"
                           "logits differ by .* of the largest\n"));
  EXPECT_NEAR(Number(text, ", and ") * (1 << 20), said["kept_bytes"].get<double>(), 0.1 * (1 << 20));
  EXPECT_NEAR(Number(text, "with K and V ") * said["whole_bytes"].get<double>(),
              said["piece_bytes"].get<double>() + said["kept_bytes"].get<double>(),
              0.001 * said["whole_bytes"].get<double>());

  const Ran too_many = RunCommand(AddBenchPiecesCommand,
                                  {"pieces", "--config", Config(), "--tokens", "4096", "--part", "1000"});
  EXPECT_THAT(std::string(too_many.status.message()),
              MatchesRegex("K and V of 4096 tokens, which stay, take 1048576 bytes, and a part of 1000 is "
                           "[0-9]+; lower --part"));
}

TEST_F(Benches, PrefillComparesPlansTurnByTurn) {
  const std::vector<std::string> words = {"prefill", "--model",   Model(), "--tokens",  "1200", "--tile",
                                          "1x2",     "--compare", "1x1",   "--repeats", "1",    "--device",
                                          "cpu",     "--threads", "1",     "--stripe",  "16",   "--idle"};
  const json said = PrintJson(AddBenchPrefillCommand, words);
  EXPECT_EQ(said["tokens"], 1200);
  EXPECT_EQ(said["repeats"], 1);
  ASSERT_EQ(said["runs"].size(), 2u);
  for (const json& run : said["runs"]) {
    EXPECT_NEAR(run["tokens_per_second"].get<double>() * run["seconds"].get<double>(), 1200, 1e-6);
    EXPECT_GE(run["idle_share"], 0);
    EXPECT_GT(run["mfu"], 0);
    EXPECT_LT(run["mfu"], 1);
    EXPECT_EQ(run["a"], 1);
    EXPECT_EQ(run["heads"], 1);
    EXPECT_EQ(run["b"], run["ranks"]);
  }
  EXPECT_EQ(said["runs"][0]["ranks"], 2);
  EXPECT_EQ(said["runs"][1]["ranks"], 1);
  EXPECT_GT(said["runs"][0]["comm_wait_share"], 0);
  EXPECT_LT(said["runs"][0]["comm_wait_share"], 1);
  EXPECT_EQ(said["runs"][1]["comm_wait_share"], 0);
  ExpectRatio(said["tokens_per_second_ratio"], said["runs"][1]["seconds"], said["runs"][0]["seconds"]);
  const std::string text = Print(AddBenchPrefillCommand, words);
  EXPECT_THAT(text, MatchesRegex("1,200 tokens, 1 run each, cpu.*\n\n"
                                 "tile   heads ranks     seconds    tokens/s   comm wait     MFU\n"
                                 "1x2        1     2 +.* m?s +[0-9,]+ +[0-9.]+ % +[0-9.]+ %\n"
                                 "1x1        1     1 +.* m?s +[0-9,]+ +0.0 % +[0-9.]+ %\n"
                                 "\n1x2: nothing to do for [0-9.]+ % of the layers' time\n"
                                 "\n1x1: nothing to do for [0-9.]+ % of the layers' time\n"
                                 "\nfirst over second: [0-9.]+ of its tokens/s\n"
                                 "\npeak resident memory: [0-9.]+ [MG]iB\n"));
}

TEST_F(Benches, PrefixTakesWhatIsCached) {
  const std::vector<std::string> words = {"prefix",   "--config", Config(),   "--tokens", "400",
                                          "--cached", "256",      "--rounds", "2"};
  const json said = PrintJson(AddBenchPrefixCommand, words);
  EXPECT_EQ(said["tokens"], 400);
  EXPECT_EQ(said["cached_tokens"], 256);
  ExpectRatio(said["miss_of_cold"], said["miss_seconds"], said["cold_seconds"]);
  ExpectRatio(said["hit_of_cold"], said["hit_seconds"], said["cold_seconds"]);
  EXPECT_EQ(PrintJson(AddBenchPrefixCommand,
                      {"prefix", "--config", Config(), "--tokens", "1280", "--rounds", "1"})["cached_tokens"],
            256)
      << "all but 1,024";
  EXPECT_THAT(Print(AddBenchPrefixCommand, words),
              MatchesRegex("cold, no cache  +[0-9.]+ s\nmiss, kept +[0-9.]+ s +[0-9.]+ of cold\n"
                           "hit, 256 of 400 +[0-9.]+ s +[0-9.]+ of cold\n"));
  const auto refused = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = {"prefix", "--config", Config(), "--tokens"};
    all.insert(all.end(), more.begin(), more.end());
    return std::string(RunCommand(AddBenchPrefixCommand, all).status.message());
  };
  EXPECT_EQ(refused({"80", "--cached", "80"}),
            "--cached 80 of --tokens 80: leave at least one token to compute");
  EXPECT_EQ(refused({"1024"}), "--cached 0 of --tokens 1024: leave at least one token to compute");
}

TEST_F(Benches, WeightsSharedByWorkersStandBesideResidentOnes) {
  const std::vector<std::string> words = {"weights",  "--config", Config(),    "--tokens", "50",
                                          "--rounds", "1",        "--workers", "2"};
  const json said = PrintJson(AddBenchWeightsCommand, words);
  EXPECT_EQ(said["tokens"], 50);
  EXPECT_EQ(said["rounds"], 1);
  EXPECT_EQ(said["workers"], 2);
  for (const char* mode : {"resident", "sharded"}) {
    EXPECT_NEAR(said[mode]["tokens_per_second"].get<double>() * said[mode]["seconds"].get<double>(), 50,
                1e-6);
    EXPECT_GT(said[mode]["anonymous_bytes"], 1 << 20);
  }
  EXPECT_EQ(said["resident"]["weight_seconds"], 0);
  ExpectRatio(said["sharded_over_resident"], said["resident"]["seconds"], said["sharded"]["seconds"]);
  EXPECT_FALSE(said.contains("disk"));
}

TEST_F(Benches, WeightsThatStreamStandBesideResidentOnes) {
  const std::string text =
      Print(AddBenchWeightsCommand, {"weights", "--config", Config(), "--tokens", "50", "--rounds", "1"});
  EXPECT_THAT(
      text,
      MatchesRegex("50 tokens, median of 1\n"
                   "resident   .* m?s  [0-9.]+ tokens/s  weights [0-9.]+ KiB  most anonymous memory .*iB\n"
                   "streamed   .* m?s  [0-9.]+ tokens/s  weights [0-9.]+ KiB  most anonymous memory .*iB\n"
                   "streamed over resident, tokens/s: [0-9.]+\n"));
}

TEST_F(Benches, WeightsFromTheDiskStandBesideTheDisk) {
  const std::string model = *folder_ / "one_file";  // of small shards, pages stay that the engine has mapped
  ASSERT_TRUE(MakeModel({.layers = 2, .hidden = 64}, model).ok());
  const Ran cold =
      RunCommand(AddBenchWeightsCommand, {"weights", "--config", Config(), "--set", "model.path=" + model,
                                          "--tokens", "50", "--rounds", "1", "--cold"});
  if (absl::IsFailedPrecondition(cold.status)) GTEST_SKIP() << cold.status;  // a temporary folder in memory
  ASSERT_TRUE(cold.status.ok()) << cold.status;
  const auto bytes = static_cast<double>(std::filesystem::file_size(model + "/model.safetensors"));
  EXPECT_THAT(cold.out,
              testing::ContainsRegex(
                  "streamed over resident, tokens/s: [0-9.]+\ndisk +[0-9.]+ m?s for " + FormatBytes(bytes) +
                  "\nstreamed from the disk over the longer of both, seconds: [0-9.]+\n$"));
}

}  // namespace
}  // namespace meshfill
