// What each benchmark can be asked for, and what it takes otherwise.
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "kernels/cpu/host_memory.h"
#include "server/cli/bench/bench.h"
#include "tests/server/cli/command_line.h"

namespace meshfill {
namespace {

TEST(Bench, OptionsOfAll) {
  CLI::App app;
  const std::unique_ptr<Command> bench = AddBenchCommand(app);
  std::string lines;
  for (const CLI::App* each : app.get_subcommand("bench")->get_subcommands(nullptr)) {
    lines += each->get_name() + "\n" + OptionsOf(*each);
  }
  EXPECT_EQ(lines, R"(attention
--device
--dtype
--head-dim=128
--tokens=16384
--q-heads=1
--kv-heads=1
--threads=1
--repeats=5
--target
--json
comm
--ranks=4
--bytes
--rounds=20
--repeats=5
--listen=127.0.0.1
--json
experts
--device
--dtype
--tokens=8192
--hidden=2048
--q-heads=32
--kv-heads=4
--head-dim=128
--threads
--repeats=3
--json
--layers=1
--experts=128
--experts-used=8
--expert-width=768
gemm
--device
--dtype
--tokens=1024
--in-features=4096
--out-features=4096
--threads=1
--repeats=5
--json
kv
--tokens=32768
--layers=4
--kv-heads=8
--head-dim=128
--ranks=4
--json
layer
--device
--dtype
--tokens=2048
--hidden=4096
--q-heads=32
--kv-heads=8
--head-dim=128
--threads
--repeats=3
--json
--intermediate=14336
mix
--config!
--set
--long=65536
--short=100
--count=50
--rounds=3
--workers=1
--seed=1
--json
pieces
--config!
--set
--tokens=32768
--part=4
--rounds=3
--json
plan
--model
--shapes=20
--choices=6
--repeats=5
--threads
--max-seconds=1
--seed=1
--json
prefix
--config!
--set
--tokens=32768
--cached
--rounds=5
--json
prefill
--model!
--tokens!
--ranks
--tile
--heads
--compare
--layout
--stripe
--dtype
--device
--threads
--repeats=3
--seed=1
--idle
--json
schedules
--side=6
--max-cost=8
--json
serve
--server=127.0.0.1:50051
--cert needs --key
--key needs --cert
--tls
--ca
--server-name
--token-file
--scenario!
--tokens=1024
--seconds=60
--load
--in-flight=64
--max-age=600
--rounds=3
--lone
--seed=1
--json
weights
--config!
--set
--tokens=16384
--rounds=3
--workers excludes --cold excludes --shared
--shared excludes --cold excludes --workers
--cold excludes --shared excludes --workers
--seed=1
--json
)");
}

TEST(Bench, RefusesNumbersOutOfTheirRange) {
  const auto refused = [](const std::vector<std::string>& words) {
    std::vector<std::string> all = {"bench"};
    all.insert(all.end(), words.begin(), words.end());
    const Ran ran = RunCommand(AddBenchCommand, all);
    EXPECT_EQ(ran.status.code(), absl::StatusCode::kInvalidArgument) << words.back();
    return std::string(ran.status.message());
  };
  EXPECT_NE(refused({"nothing"}), "");
  for (const char* ranks : {"1", "65"})
    EXPECT_NE(refused({"comm", "--ranks", ranks}).find("--ranks"), std::string::npos);
  for (const char* count : {"--rounds", "--repeats"}) {
    EXPECT_EQ(refused({"comm", count, "0"}), std::string(count) + ": '0' is no whole number of 1 or more");
  }
  EXPECT_EQ(refused({"comm", "--bytes", "0B"}), "--bytes: a message of no bytes has no speed");
  for (const char* side : {"0", "9"})
    EXPECT_NE(refused({"schedules", "--side", side}).find("--side"), std::string::npos);
  for (const char* cost : {"0", "33"}) {
    EXPECT_NE(refused({"schedules", "--max-cost", cost}).find("--max-cost"), std::string::npos);
  }
  for (const char* workers : {"1", "65"}) {
    EXPECT_NE(refused({"weights", "--config", "x", "--workers", workers}).find("--workers"),
              std::string::npos);
  }
  EXPECT_EQ(refused({"kv", "--tokens", "0"}), "--tokens: '0' is no whole number of 1 or more");
  EXPECT_EQ(refused({"plan", "--shapes", "0"}), "--shapes: '0' is no whole number of 1 or more");
  EXPECT_EQ(refused({"plan", "--max-seconds", "0"}), "--max-seconds: '0' is no number above 0");
  EXPECT_EQ(refused({"prefill", "--model", "x", "--tokens", "0"}),
            "--tokens: '0' is no whole number of 1 or more");
  EXPECT_EQ(refused({"prefill", "--model", "x", "--tokens", "1", "--threads", "0"}),
            "--threads: '0' is no whole number of 1 or more");
  EXPECT_EQ(refused({"prefill", "--model", "x", "--tokens", "1", "--repeats", "0"}),
            "--repeats: '0' is no whole number of 1 or more");
  EXPECT_EQ(refused({"layer", "--threads", "0"}), "--threads: '0' is no whole number of 1 or more");
  EXPECT_EQ(refused({"serve", "--scenario", "rest"}),
            "--scenario: 'rest' is none of mix, flight, overload, flood, classes and alone");
  EXPECT_EQ(refused({"serve", "--scenario", "mix", "--seconds", "0"}), "--seconds: '0' is no number above 0");
  EXPECT_EQ(refused({"serve", "--scenario", "mix", "--load", "-1"}), "--load: '-1' is no number above 0");
}

// Every command is made in every process, a server's, too.
TEST(Bench, KeepsNoMemoryBeforeItRuns) {
  CLI::App app;
  const std::unique_ptr<Command> bench = AddBenchCommand(app);
  EXPECT_TRUE(MapHostMemory(size_t{8} << 20).ok());
  EXPECT_EQ(SpareMappings::spare_bytes(), 0u);
}

}  // namespace
}  // namespace meshfill
