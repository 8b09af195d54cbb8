// A configuration: YAML, and --set for lines behind a line of "---".
#include <fstream>
#include <optional>
#include <sstream>

#include "absl/strings/str_split.h"
#include "server/config/config.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/memory_file.h"

namespace meshfill {
namespace {

std::optional<ConfigReader> ReaderOf(uint8_t byte) {
  if (byte == 's') return ConfigReader::kServe;
  if (byte == 'w') return ConfigReader::kWorker;
  return std::nullopt;
}

}  // namespace

const int kFuzzRounds = 3'000;

std::vector<std::string> FuzzSeeds() {
  std::vector<std::string> seeds = {"s\n---\nlisten=127.0.0.1:0\npool.embedded.ranks=4",
                                    "w\n---\npool.worker.ranks=2\nkv.memory_bytes=8GiB",
                                    "-listen: &a x\nmetrics_listen: *a\n---\nqueue.max_wait=30s"};
  for (const char* name : {"slocal.yaml", "spool.yaml", "wworker.yaml", "sh100x8.yaml"}) {
    std::ifstream file(std::string(MESHFILL_CONFIGS "/") + (name + 1));
    std::ostringstream text;
    text << name[0] << file.rdbuf();
    FUZZ_CHECK(file.good());
    seeds.push_back(text.str());
  }
  return seeds;
}

}  // namespace meshfill

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace meshfill;
  FuzzInput input(data, size);
  const auto reader = ReaderOf(input.Byte());
  const std::string text = input.Rest();
  const size_t end = text.find("\n---\n");
  std::vector<std::string> overrides;
  if (end != std::string::npos) overrides = absl::StrSplit(text.substr(end + 5), '\n', absl::SkipEmpty());
  const MemoryFile file(text.substr(0, end));
  const auto config = LoadConfig(file.path(), overrides, reader);
  if (config.ok()) {
    // What follows from a good one needs no checks of its own.
    ToEngineOptions(*config);
    FUZZ_CHECK(ParseDeviceNumbers(config->pool().worker().devices()).ok());
    FUZZ_CHECK(config->limits().max_message_bytes() > 0);
    FUZZ_CHECK(config->pool().embedded().ranks() > 0);
  } else {
    FUZZ_CHECK(absl::IsInvalidArgument(config.status()));
    FUZZ_CHECK(config.status().message().find('\n') == absl::string_view::npos);  // one line
  }
  return 0;
}
