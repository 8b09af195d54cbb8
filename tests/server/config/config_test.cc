#include "server/config/config.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/engine_options.h"
#include "engine/speed/pool_profile.h"
#include "gtest/gtest.h"
#include "server/config/config_reader.h"
#include "server/config/config_units.h"
#include "server/config/tenants.h"

namespace meshfill {
namespace {

class ConfigTest : public testing::Test {
 protected:
  void SetUp() override {
    path_ = testing::TempDir() + "/config_test_" +
            testing::UnitTest::GetInstance()->current_test_info()->name() + ".yaml";
  }
  void TearDown() override { std::filesystem::remove(path_); }

  absl::StatusOr<v1::Config> Load(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
    std::ofstream(path_) << yaml;
    return LoadConfig(path_, overrides);
  }

  // The message of the refusal, without the file's folder.
  std::string Refusal(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
    const auto config = Load(yaml, overrides);
    if (config.ok()) return "accepted";
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument) << config.status();
    std::string message(config.status().message());
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    if (message.rfind(path_, 0) == 0) message = "FILE" + message.substr(path_.size());
    return message;
  }

  static std::string Docs() {
    std::ifstream file(std::string(MESHFILL_DOCS) + "/configuration.md");
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

  std::string path_;
};

TEST_F(ConfigTest, EveryExampleLoads) {
  int examples = 0;
  for (const auto& entry : std::filesystem::directory_iterator(MESHFILL_CONFIGS)) {
    if (entry.path().extension() != ".yaml") continue;
    const bool worker = entry.path().filename() == "worker.yaml";
    const auto config = LoadConfig(entry.path(), {}, worker ? ConfigReader::kWorker : ConfigReader::kServe);
    EXPECT_TRUE(config.ok()) << config.status();
    const auto swapped = LoadConfig(entry.path(), {}, worker ? ConfigReader::kServe : ConfigReader::kWorker);
    EXPECT_EQ(swapped.status().code(), absl::StatusCode::kInvalidArgument) << entry.path();
    ++examples;
  }
  EXPECT_GE(examples, 1);
}

TEST_F(ConfigTest, LocalExampleSaysWhatItSets) {
  const auto config = LoadConfig(std::string(MESHFILL_CONFIGS) + "/local.yaml");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->model().path(), "build/demo-model");
  EXPECT_EQ(config->pool().embedded().ranks(), 4u);
  EXPECT_EQ(config->limits().max_message_bytes(), 4u << 20);
  EXPECT_EQ(config->queue().max_wait().seconds(), 3600);
  EXPECT_EQ(config->queue().max_age().seconds(), 600);
}

// What one of the two processes would not read is refused there, wherever it was set.
TEST_F(ConfigTest, KeysOfTheOtherProcessAreRefused) {
  const std::vector<std::string> without_file = {"model.path=m", "pool.worker.ranks=4"};
  EXPECT_TRUE(LoadConfig("", without_file, ConfigReader::kWorker).ok());
  EXPECT_EQ(LoadConfig("", without_file, ConfigReader::kServe).status().code(),
            absl::StatusCode::kInvalidArgument);
  std::ofstream(path_) << "model: {path: m}\n";
  const auto refusal = [&](const std::string& assignment, ConfigReader reader) {
    const auto config = LoadConfig(path_, std::vector<std::string>{assignment}, reader);
    return config.ok() ? "accepted" : std::string(config.status().message());
  };
  for (const char* assignment : {"pool.worker.ranks=2", "kv.listen=127.0.0.1:0", "pool.worker.name=a"}) {
    EXPECT_EQ(refusal(assignment, ConfigReader::kWorker), "accepted");
    EXPECT_NE(refusal(assignment, ConfigReader::kServe)
                  .find("`meshfill worker` alone reads this key; take it out, or give a configuration as "
                        "configs/local.yaml or configs/pool.yaml"),
              std::string::npos);
  }
  for (const char* assignment : {"listen=127.0.0.1:0", "metrics_listen=127.0.0.1:0", "queue.max_tokens=5",
                                 "plan.stripe=8", "pool.control_listen=127.0.0.1:0", "pool.embedded.ranks=2",
                                 "pool.measure_links=true", "tenant_limits.weight=2", "tenants.a.weight=2"}) {
    EXPECT_EQ(refusal(assignment, ConfigReader::kServe), "accepted");
    EXPECT_NE(refusal(assignment, ConfigReader::kWorker)
                  .find("`meshfill serve` alone reads this key; take it out, or give a configuration as "
                        "configs/worker.yaml"),
              std::string::npos);
  }
  for (const char* assignment : {"model.dtype=f32", "pool.silence_timeout=3s", "limits.drain_timeout=5s",
                                 "plan.profile_path=x", "pool.tls.insecure=true", "api.tls.insecure=true"}) {
    EXPECT_EQ(refusal(assignment, ConfigReader::kServe), "accepted");
    EXPECT_EQ(refusal(assignment, ConfigReader::kWorker), "accepted");
  }
  EXPECT_EQ(refusal("pool.worker.ranks=2", ConfigReader::kServe).substr(0, 20), "--set: pool.worker: ");
}

// Each key of docs/configuration.md is refused by the process that does not read it, and by no other.
TEST_F(ConfigTest, TheDocsSayWhoReadsAKey) {
  const std::string text = Docs();
  const std::regex key(R"(- `([\w.]+)` \(([^)]*)\):)");
  int of_one = 0;
  for (std::sregex_iterator it(text.begin(), text.end(), key), end; it != end; ++it) {
    const std::string name = (*it)[1], about = (*it)[2];
    const bool serve = std::regex_search(about, std::regex(R"(of\s+`serve`)"));
    const bool worker = std::regex_search(about, std::regex(R"(of\s+`worker`)"));
    EXPECT_EQ(CheckReader({{name, "F:1"}}, ConfigReader::kServe).ok(), !worker) << name;
    EXPECT_EQ(CheckReader({{name, "F:1"}}, ConfigReader::kWorker).ok(), !serve) << name;
    of_one += serve || worker;
  }
  EXPECT_GT(of_one, 45);
}

// What is set is not replaced by its default.
TEST_F(ConfigTest, WhatIsSetStays) {
  const std::vector<std::string> values = {"1",    "7",     "7s",  "77m",         "77MiB",
                                           "true", "false", "cpu", "127.0.0.7:7", "f32"};
  const auto loaded = [](const std::vector<std::string>& overrides) {
    const auto config = LoadConfig("", overrides);
    return config.ok() ? config->ShortDebugString() : "";
  };
  const std::string text = Docs(), defaults = loaded({});
  const std::regex key(R"(- `([\w.]+)` \([a-z ]+; default: )");
  int checked = 0;
  for (std::sregex_iterator it(text.begin(), text.end(), key), end; it != end; ++it) {
    const std::string name = (*it)[1];
    if (name.starts_with("api.tls.") || name.starts_with("pool.tls.")) continue;  // they need each other
    if (name == "plan.layout" || name == "plan.schedule" || name == "plan.exchange" ||
        name == "plan.partial_dtype" || name == "model.weights" || name == "log.format") {
      continue;  // EveryNameOfAnEnumIsRead
    }
    const bool stays = std::any_of(values.begin(), values.end(), [&](const std::string& value) {
      const std::string config = loaded({absl::StrCat(name, "=", value)});
      return !config.empty() && config != defaults;
    });
    EXPECT_TRUE(stays) << name;
    ++checked;
  }
  EXPECT_GT(checked, 60);
}

TEST_F(ConfigTest, TenantsHaveSharesAndBounds) {
  const auto config = LoadConfig(
      [&] {
        std::ofstream(path_) << "tenant_limits: {max_requests: 4, weight: 2}\n"
                                "tenants:\n  batch: {weight: 0.5, max_kv_bytes: 1GiB, max_priority: 0}\n"
                                "  \"\": {max_tokens: 9, max_kv_bytes: 0}\n";
        return path_;
      }(),
      std::vector<std::string>{"tenants.batch.max_tokens=7", "tenants.new.weight=3",
                               "tenants.new.max_priority=-1"});
  ASSERT_TRUE(config.ok()) << config.status();
  const Tenants tenants(*config);
  EXPECT_EQ(tenants.LimitsOf("batch").weight, 0.5);
  EXPECT_EQ(tenants.LimitsOf("batch").max_requests, 4);
  EXPECT_EQ(tenants.LimitsOf("batch").max_tokens, 7);
  EXPECT_EQ(tenants.LimitsOf("batch").max_kv_bytes, 1 << 30);
  EXPECT_EQ(tenants.LimitsOf("").max_tokens, 9);
  EXPECT_EQ(tenants.LimitsOf("").max_kv_bytes, 0) << "no room is a bound, too";
  EXPECT_EQ(tenants.LimitsOf("new").weight, 3);
  EXPECT_EQ(tenants.LimitsOf("unnamed").weight, 2);
  EXPECT_EQ(tenants.LimitsOf("batch").max_priority, 0) << "0 is a bound, too";
  EXPECT_EQ(tenants.LimitsOf("new").max_priority, -1);
  EXPECT_GE(tenants.LimitsOf("unnamed").max_priority, 2);
  EXPECT_EQ(tenants.LimitsOf("unnamed").max_tokens, std::numeric_limits<int64_t>::max());

  std::ofstream(path_) << "model: {path: m}\ntenants: {only: {weight: 0.5}}\n";
  const auto of_one = LoadConfig(path_, std::vector<std::string>{"tenants.only.max_tokens=7"});
  ASSERT_TRUE(of_one.ok()) << of_one.status();
  EXPECT_EQ(Tenants(*of_one).LimitsOf("only").weight, 0.5);
  EXPECT_EQ(Tenants(*of_one).LimitsOf("only").max_tokens, 7);
}

TEST_F(ConfigTest, MistakesInTenantsAreRefused) {
  EXPECT_EQ(Refusal("tenants:\n  a: {weight: 0}"), "FILE:2: tenants.a.weight: must be from 0.001 to 1000");
  EXPECT_EQ(Refusal("tenant_limits: {max_requests: 0}").substr(0, 37),
            "FILE:1: tenant_limits.max_requests: 0");
  const std::string no_ascii = "FILE:2: tenants.caf\xc3\xa9: has a character that is not printable ASCII,";
  EXPECT_EQ(Refusal("tenants:\n  caf\xc3\xa9: {weight: 1}").substr(0, no_ascii.size()), no_ascii);
  for (const char* no_map : {"[a]", "a"}) {
    EXPECT_EQ(Refusal(absl::StrCat("tenants: ", no_map)),
              "FILE:1: tenants: must be a map of names, \"name: {key: value}\"");
  }
  EXPECT_EQ(Refusal("tenants: {a: 3}").substr(0, 19), "FILE:1: tenants.a: ");
  EXPECT_EQ(Refusal("tenants: {a: {}, a: {}}"), "FILE:1: tenants.a: duplicate name; keep one of them");
  EXPECT_NE(Refusal("tenants: {a: {wait: 3}}").find("tenants.a.wait: unknown key"), std::string::npos);
  for (const char* assignment : {"tenants=3", "tenants.a=3", "tenants.a.wait=3", "tenants.a.weight.b=3"}) {
    EXPECT_FALSE(LoadConfig("", std::vector<std::string>{assignment}).ok()) << assignment;
  }
}

TEST_F(ConfigTest, TooLittleMemoryIsRefused) {
  EXPECT_EQ(Refusal("pool: {embedded: {memory_bytes: 1KiB}}"),
            "FILE:1: pool.embedded.memory_bytes: 1024 bytes are too few; give 1MiB or more");
  EXPECT_NE(Refusal("pool: {worker: {memory_bytes: 5KiB}}").find("pool.worker.memory_bytes"),
            std::string::npos);
  EXPECT_TRUE(Load("pool: {embedded: {memory_bytes: 1MiB}}").ok());
  EXPECT_TRUE(Load("pool: {embedded: {memory_bytes: 0B}}").ok());
  EXPECT_TRUE(Load("pool: {embedded: {memory_bytes: 0}}").ok());
}

TEST_F(ConfigTest, DefaultsAreFilledIn) {
  const auto config = LoadConfig("");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->listen(), "127.0.0.1:50051");
  EXPECT_EQ(config->metrics_listen(), "127.0.0.1:9464");
  EXPECT_EQ(config->model().path(), "");
  EXPECT_EQ(config->pool().embedded().ranks(), 1u);
  EXPECT_EQ(config->pool().embedded().device(), "auto");
  EXPECT_EQ(config->queue().max_requests(), 64u);
  EXPECT_EQ(config->queue().max_tokens(), 16777216u);
  EXPECT_EQ(config->plan().layout(), v1::PlanSection::LAYOUT_AUTO);
  EXPECT_EQ(config->plan().partial_dtype(),
            v1::PlanSection::PARTIAL_DTYPE_F32);  // no accuracy is lost unasked
  EXPECT_EQ(config->plan().schedule(), v1::PlanSection::SCHEDULE_AUTO);
  EXPECT_EQ(config->model().dtype(), v1::ModelSection::DTYPE_AUTO);
  EXPECT_EQ(config->plan().stripe(), 64u);
  EXPECT_EQ(config->limits().upload_timeout().seconds(), 30);
  EXPECT_EQ(config->limits().drain_timeout().seconds(), 3600);
  EXPECT_EQ(config->limits().max_streams(), 128u);
  EXPECT_EQ(config->kv().lease().seconds(), 30);
  EXPECT_EQ(config->kv().max_lease().seconds(), 3600);
  EXPECT_EQ(config->kv().block_tokens(), 16u);
}

// What docs/configuration.md states as a default can be written, and changes nothing.
TEST_F(ConfigTest, DocumentedDefaultsAreTheRealOnes) {
  // A value of these is "given" where it is written.
  const std::set<std::string> unset = {"pool.link_bytes_per_second", "pool.link_latency",
                                       "pool.host_bytes_per_second", "tenant_limits.weight",
                                       "tenants.NAME.weight",        "tenant_limits.max_priority",
                                       "tenants.NAME.max_priority"};
  const auto loaded = [](const std::vector<std::string>& overrides) {
    const auto config = LoadConfig("", overrides);
    if (!config.ok()) return std::string(config.status().message());
    std::string text = config->ShortDebugString();
    for (int depth = 0; depth < 2; ++depth) {  // a section that holds nothing is as good as none
      text = std::regex_replace(text, std::regex(R"(\w+ \{ \} ?)"), "");
    }
    return text;
  };
  const std::string text = Docs();
  const std::regex key(R"(- `([\w.]+)` \([a-z ]+; default: ([^ ;)]+)[;)])");
  int checked = 0;
  for (std::sregex_iterator it(text.begin(), text.end(), key), end; it != end; ++it) {
    const std::string name = (*it)[1], value = (*it)[2];
    if (value == "none" || unset.count(name) > 0) continue;
    const std::string set = absl::StrCat(name, "=", value == "empty" ? "" : value);
    EXPECT_EQ(loaded({set}), loaded({})) << set;
    ++checked;
  }
  EXPECT_GT(checked, 45);
  EXPECT_NE(loaded({"plan.stripe=65"}), loaded({}));
}

TEST_F(ConfigTest, AttentionLeavesNcclWhatItMayTake) {
  const auto margin = [&](const std::string& yaml) {
    const auto config = Load(yaml);
    EXPECT_TRUE(config.ok()) << config.status();
    return config->pool().worker().attention_sm_margin();
  };
  EXPECT_EQ(margin(""), 8u);
  EXPECT_EQ(margin("pool: {worker: {nccl_ctas: 4}}"), 4u);
  EXPECT_EQ(margin("pool: {worker: {nccl_ctas: 0}}"), 0u);
  EXPECT_EQ(margin("pool: {worker: {nccl_ctas: 4, attention_sm_margin: 0}}"), 0u);
}

TEST_F(ConfigTest, AWorkerChoosesItsDevices) {
  const auto devices = [&](const std::string& yaml) {
    const auto config = Load(yaml);
    EXPECT_TRUE(config.ok()) << config.status();
    return ParseDeviceNumbers(config->pool().worker().devices()).value();
  };
  EXPECT_EQ(devices(""), std::vector<int>());
  EXPECT_EQ(devices("pool: {worker: {devices: 3}}"), std::vector<int>{3});
  EXPECT_EQ(devices("pool: {worker: {devices: '3, 0'}}"), (std::vector<int>{3, 0}));
  EXPECT_EQ(Refusal("pool:\n  worker:\n    devices: '0,x'\n"),
            "FILE:3: pool.worker.devices: \"0,x\" is no list of devices; write their numbers, e.g. 2,3");
  EXPECT_NE(Refusal("pool: {worker: {devices: '-1'}}").find("is no list of devices"), std::string::npos);
  EXPECT_NE(Refusal("pool: {worker: {devices: '1,'}}").find("is no list of devices"), std::string::npos);
  EXPECT_NE(Refusal("pool: {worker: {devices: '1,0,1'}}").find("device 1 is in \"1,0,1\" twice"),
            std::string::npos);
}

TEST_F(ConfigTest, EmptyFilesAndEmptySectionsAreDefaults) {
  for (const char* yaml :
       {"", "# nothing\n", "---\n", "pool:\n  embedded:\n", "pool: {}\n", "tenants:\n", "tenants:\n  a:\n"}) {
    const auto config = Load(yaml);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->pool().embedded().ranks(), 1u);
  }
}

TEST_F(ConfigTest, ExplicitEmptyMetricsListenTurnsMetricsOff) {
  EXPECT_EQ(Load("metrics_listen: \"\"\n")->metrics_listen(), "");
  EXPECT_EQ(Load("", {"metrics_listen="})->metrics_listen(), "");
}

TEST_F(ConfigTest, UnitsAreRead) {
  const auto config = Load(
      "pool: {embedded: {memory_bytes: 1.5GiB}}\n"
      "queue: {max_wait: 1h30m}\n"
      "limits: {upload_timeout: 250ms, max_message_bytes: 8MB}\n");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->pool().embedded().memory_bytes(), 3ull << 29);
  EXPECT_EQ(config->queue().max_wait().seconds(), 5400);
  EXPECT_EQ(config->limits().upload_timeout().seconds(), 0);
  EXPECT_EQ(config->limits().upload_timeout().nanos(), 250000000);
  EXPECT_EQ(config->limits().max_message_bytes(), 8000000u);
  EXPECT_EQ(ToDuration(config->limits().upload_timeout()), absl::Milliseconds(250));
  EXPECT_EQ(ToDuration(config->queue().max_wait()), absl::Minutes(90));
  const EngineOptions kept = ToEngineOptions(*Load("kv: {memory_bytes: 1GiB, host_memory_bytes: 2GiB}"));
  EXPECT_EQ(kept.kv_memory_bytes, 1ll << 30);
  EXPECT_EQ(kept.kv_host_memory_bytes, 2ll << 30);
}

TEST_F(ConfigTest, EveryUnitOfASizeIsRead) {
  const std::vector<std::pair<std::string, uint64_t>> sizes = {{"3B", 3},
                                                               {"3KB", 3'000},
                                                               {"3MB", 3'000'000},
                                                               {"3GB", 3'000'000'000},
                                                               {"2.5KiB", 2560},
                                                               {"3MiB", 3ull << 20},
                                                               {"3GiB", 3ull << 30},
                                                               {"3TiB", 3ull << 40},
                                                               {"3TB", 3'000'000'000'000},
                                                               {"1.5 KB", 1500},
                                                               {"0.7B", 0},
                                                               {"0", 0}};
  for (const auto& [text, bytes] : sizes) {
    const auto read = ParseByteSize(text);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(*read, bytes) << text;
  }
  for (const char* text : {"", "3", "B", "3kb", "-3B", "3 B 4", "1.2.3B", "3B ", "8388608TiB"}) {
    EXPECT_FALSE(ParseByteSize(text).ok()) << text;
  }
}

TEST_F(ConfigTest, AModelIsAFolder) {
  const auto checked = [](const std::string& path) {
    v1::Config config;
    config.mutable_model()->set_path(path);
    return CheckModelFolder(config);
  };
  EXPECT_TRUE(checked(testing::TempDir()).ok());
  std::ofstream(path_) << "x";
  const absl::Status file = checked(path_);
  EXPECT_EQ(file.code(), absl::StatusCode::kInvalidArgument);
  const std::string folder = std::filesystem::path(path_).parent_path();
  EXPECT_EQ(file.message(), absl::StrCat("model.path: ", path_, " is a file; give its folder, ", folder));
  EXPECT_EQ(checked(path_ + ".none").code(), absl::StatusCode::kNotFound);
}

TEST_F(ConfigTest, OverridesWinOverTheFileInOrder) {
  const auto config =
      Load("pool:\n  embedded:\n    ranks: 2\n",
           {"pool.embedded.ranks=3", "pool.embedded.ranks=5", "model.path=/a=b", "queue.max_wait=2m"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->pool().embedded().ranks(), 5u);
  EXPECT_EQ(config->model().path(), "/a=b");
  EXPECT_EQ(config->queue().max_wait().seconds(), 120);
}

TEST_F(ConfigTest, UnknownKeysAreRefusedWithLinePathAndHint) {
  EXPECT_EQ(
      Refusal("listen: 127.0.0.1:0\n\npool:\n  embeded:\n    ranks: 2\n"),
      "FILE:4: pool.embeded: unknown key; did you mean embedded? known keys here: control_listen, "
      "embedded, empty_timeout, encrypt, hang_timeout, host_bytes_per_second, host_link_bytes_per_second, "
      "host_link_latency, link_bytes_per_second, link_latency, measure_links, silence_timeout, tls, worker");
  EXPECT_EQ(Refusal("xyzzyplugh: 1\n"),
            "FILE:1: xyzzyplugh: unknown key; known keys here: api, kv, limits, listen, log, "
            "metrics_listen, model, plan, pool, queue, tenant_limits, tenants, trace");
  EXPECT_EQ(
      Refusal("", {"pool.embedded.rank=2"}),
      "--set: pool.embedded.rank: unknown key; did you mean ranks? known keys here: device, memory_bytes, "
      "peak_flops, ranks, threads");
}

TEST_F(ConfigTest, DuplicateKeysAreRefused) {
  EXPECT_EQ(Refusal("pool:\n  embedded:\n    ranks: 2\n    ranks: 2\n"),
            "FILE:4: pool.embedded.ranks: duplicate key; keep one of them");
  EXPECT_EQ(Refusal("plan: {stripe: 1}\nqueue:\nplan: {stripe: 1}\n"),
            "FILE:3: plan: duplicate key; keep one of them");
}

TEST_F(ConfigTest, BadlyTypedValuesAreRefused) {
  EXPECT_EQ(Refusal("pool: {embedded: {ranks: many}}"),
            "FILE:1: pool.embedded.ranks: \"many\" is no whole number from 0 to 4294967295");
  EXPECT_NE(Refusal("pool: {embedded: {ranks: \"4\"}}").find("is no whole number"), std::string::npos);
  EXPECT_NE(Refusal("pool: {embedded: {ranks: -1}}").find("is no whole number"), std::string::npos);
  EXPECT_NE(Refusal("pool: {embedded: {ranks: 4294967296}}").find("is no whole number"), std::string::npos);
  EXPECT_NE(Refusal("pool: {embedded: {ranks: 1.5}}").find("is no whole number"), std::string::npos);
  EXPECT_NE(Refusal("pool: {embedded: {ranks: [1]}}").find("must be a single value"), std::string::npos);
  EXPECT_NE(Refusal("pool: {embedded: {ranks: }}").find("must be a single value"), std::string::npos);
  EXPECT_NE(Refusal("pool: {embedded: {peak_flops: inf}}").find("is no number"), std::string::npos);
  EXPECT_NE(Refusal("pool: {embedded: {peak_flops: \"4\"}}").find("is no number"), std::string::npos);
  EXPECT_NE(Refusal("pool: {encrypt: \"true\"}").find("neither true nor false"), std::string::npos);
  EXPECT_NE(Refusal("queue: {max_tokens: \"4\"}").find("is no whole number"), std::string::npos);
  EXPECT_NE(Refusal("{[pool]: 3}").find("a key must be a single word"), std::string::npos);
  EXPECT_NE(Refusal("tenants: {[a]: {weight: 3}}").find("a name must be a single word"), std::string::npos);
  EXPECT_NE(Refusal("pool: 3").find("must be a map"), std::string::npos);
  EXPECT_NE(Refusal("- a\n- b\n").find("must be a map"), std::string::npos);
  EXPECT_NE(Refusal("queue: {max_wait: 30}").find("no duration with a unit"), std::string::npos);
  EXPECT_NE(Refusal("queue: {max_wait: -3s}").find("not between"), std::string::npos);
  EXPECT_NE(Refusal("queue: {max_wait: inf}").find("not between"), std::string::npos);
  EXPECT_NE(Refusal("limits: {max_message_bytes: 4194304}").find("no byte size with a unit"),
            std::string::npos);
  EXPECT_NE(Refusal("limits: {max_message_bytes: 9000000TiB}").find("8 EiB"), std::string::npos);
  EXPECT_NE(Refusal("", {"pool=3"}).find("is a section"), std::string::npos);
  EXPECT_NE(Refusal("", {"listen.port=3"}).find("is a single value"), std::string::npos);
  EXPECT_NE(Refusal("", {"listen"}).find("no value"), std::string::npos);
}

TEST_F(ConfigTest, ValuesOutOfRangeNameWhereTheyWereSet) {
  EXPECT_EQ(Refusal("pool:\n  embedded:\n    ranks: 65\n"),
            "FILE:3: pool.embedded.ranks: 65 is not between 1 and 64");
  EXPECT_EQ(Refusal("plan: {stripe: 0}\npool:\n  embedded: {ranks: 65}\n"),
            "FILE:3: pool.embedded.ranks: 65 is not between 1 and 64")
      << "the first one found";
  EXPECT_EQ(Refusal("pool:\n  embedded:\n    ranks: 4\n", {"pool.embedded.ranks=0"}),
            "--set: pool.embedded.ranks: 0 is not between 1 and 64");
  EXPECT_EQ(Refusal("pool:\n  worker:\n    nccl_ctas: 33\n"),
            "FILE:3: pool.worker.nccl_ctas: 33 is not between 0 and 32");
  EXPECT_NE(Refusal("pool: {worker: {attention_sm_margin: 65}}").find("65 is not between 0 and 64"),
            std::string::npos);
  EXPECT_EQ(Refusal("plan: {layout: spiral}"),
            "FILE:1: plan.layout: \"spiral\" is not known; choose one of auto, striped, zigzag, contiguous");
  EXPECT_NE(Refusal("plan: {stripe: 0}").find("not between"), std::string::npos);
  EXPECT_NE(Refusal("kv: {block_tokens: 0}").find("not between"), std::string::npos);
  EXPECT_NE(Refusal("kv: {lease: 0s}").find("must be above 0s"), std::string::npos);
  EXPECT_EQ(Refusal("kv: {lease: 10s, max_lease: 9s}"), "FILE:1: kv.max_lease: must not be below kv.lease");
  EXPECT_NE(Refusal("plan: {partial_dtype: model}").find("model.dtype"), std::string::npos);
  EXPECT_EQ(Refusal("plan: {schedule: fast}"),
            "FILE:1: plan.schedule: \"fast\" is not known; choose one of auto, greedy");
  EXPECT_EQ(Refusal("plan: {exchange: sliced}"),
            "FILE:1: plan.exchange: \"sliced\" is not known; choose one of auto, whole");
  EXPECT_EQ(Refusal("model:\n  dtype: fp8\n"),
            "FILE:2: model.dtype: \"fp8\" is not known; choose one of auto, bf16, f32");
  EXPECT_EQ(Refusal("", {"plan.partial_dtype=f16"}),
            "--set: plan.partial_dtype: \"f16\" is not known; choose one of f32, model, auto");
  for (const char* no_name : {"LAYOUT_STRIPED", "Striped", "1", "''"}) {
    EXPECT_NE(Refusal(absl::StrCat("plan: {layout: ", no_name, "}")).find("choose one of"), std::string::npos)
        << no_name;
  }
  EXPECT_EQ(Refusal("pool: {embedded: {device: tpu}}"),
            "FILE:1: pool.embedded.device: \"tpu\" is not known; choose one of auto, cpu, cuda");
  EXPECT_EQ(Refusal("pool: {worker: {device: CUDA}}"),
            "FILE:1: pool.worker.device: \"CUDA\" is not known; choose one of auto, cpu, cuda");
  EXPECT_EQ(Refusal("pool: {link_bytes_per_second: 0}"),
            "FILE:1: pool.link_bytes_per_second: must be above 0");
  EXPECT_EQ(Refusal("pool: {host_link_bytes_per_second: 0}"),
            "FILE:1: pool.host_link_bytes_per_second: must be above 0");
  EXPECT_EQ(Refusal("pool: {host_bytes_per_second: -1}"),
            "FILE:1: pool.host_bytes_per_second: must not be below 0");
  EXPECT_NE(Refusal("pool: {control_listen: nowhere}").find("no HOST:PORT"), std::string::npos);
  EXPECT_NE(Refusal("pool: {control_listen: \"0.0.0.0:1\", embedded: {ranks: 2}}").find("or embedded"),
            std::string::npos);
  for (const char* some :
       {"cert: a", "key: a", "ca: a", "cert: a, key: b", "cert: a, ca: b", "key: a, ca: b"}) {
    EXPECT_EQ(Refusal(absl::StrCat("pool: {tls: {", some, "}}")),
              "FILE:1: pool.tls: TLS needs all of cert, key and ca");
  }
  EXPECT_EQ(Refusal("pool: {tls: {cert: a, key: b, ca: c}}"), "accepted");
  for (const char* of_embedded : {"ranks: 2", "device: cpu", "memory_bytes: 1GiB"}) {
    EXPECT_NE(Refusal(absl::StrCat("pool: {control_listen: \"127.0.0.1:0\", embedded: {", of_embedded, "}}"))
                  .find("leave out control_listen or pool.embedded"),
              std::string::npos);
  }
  EXPECT_NE(Refusal("pool: {tls: {insecure: 1}}").find("neither true nor false"), std::string::npos);
  EXPECT_EQ(Refusal("api: {tls: {cert: a.pem}}"), "FILE:1: api.tls: TLS needs both of cert and key");
  EXPECT_EQ(Refusal("api: {tls: {key: a.key}}"), "FILE:1: api.tls: TLS needs both of cert and key");
  for (const char* no_ca : {"cert: a, key: b, ", "ca: a, ", ""}) {
    EXPECT_EQ(Refusal(absl::StrCat("api: {tls: {", no_ca, "client_certificates: true}}")),
              "FILE:1: api.tls.client_certificates: needs cert, key and the clients' authorities in ca");
  }
  for (const char* no_ca : {"", "cert: a, key: b, "}) {
    EXPECT_EQ(Refusal(absl::StrCat("api: {tls: {", no_ca, "server_name: worker}}")),
              "FILE:1: api.tls.server_name: needs the workers' authorities in ca");
  }
  EXPECT_EQ(Refusal("api: {tls: {ca: a, server_name: worker}}"), "accepted");
  EXPECT_EQ(Refusal("api: {tls: {cert: a, key: b, insecure: true}}"),
            "FILE:1: api.tls.insecure: is for plain text; leave it out, or cert and key");
  EXPECT_NE(Refusal("pool: {worker: {ranks: 65}}").find("between 1 and 64"), std::string::npos);
  EXPECT_NE(Refusal("queue: {max_requests: 0}").find("not between"), std::string::npos);
  EXPECT_NE(Refusal("limits: {upload_timeout: 0s}").find("above 0s"), std::string::npos);
  EXPECT_EQ(Load("limits: {upload_tokens_per_second: 0}")->limits().upload_tokens_per_second(), 0) << "any";
  EXPECT_NE(Refusal("limits: {max_message_bytes: 2GiB}").find("not between"), std::string::npos);
  for (const char* address :
       {"", "50051", "host", "host:", ":1", "host:65536", "host:-1", "::1:5", "host:1x"}) {
    EXPECT_NE(Refusal(std::string("listen: \"") + address + "\"\n").find("no HOST:PORT"), std::string::npos)
        << address;
  }
}

// The first and the last value that a key takes, and those beside them.
TEST_F(ConfigTest, BoundsAreTakenAndWhatIsBeyondThemIsRefused) {
  struct Bounds {
    std::string key;
    std::vector<std::string> taken, refused;
  };
  const std::vector<Bounds> all = {
      {"pool.embedded.ranks", {"1", "64"}, {"0", "65"}},
      {"pool.embedded.threads", {"0", "4096"}, {"4097"}},
      {"pool.embedded.memory_bytes", {"0", "1MiB"}, {"1048575B"}},
      {"pool.embedded.peak_flops", {"0"}, {"-1"}},
      {"pool.worker.ranks", {"1", "64"}, {"0", "65"}},
      {"pool.worker.threads", {"0", "4096"}, {"4097"}},
      {"pool.worker.nccl_ctas", {"0", "32"}, {"33"}},
      {"pool.worker.attention_sm_margin", {"0", "64"}, {"65"}},
      {"pool.worker.memory_bytes", {"0", "1MiB"}, {"1048575B"}},
      {"pool.worker.peak_flops", {"0"}, {"-1"}},
      {"pool.silence_timeout", {"1ns", "500ms"}, {"0s"}},
      {"pool.hang_timeout", {"1ns", "1s"}, {"0s"}},
      {"pool.empty_timeout", {"1ns", "1s"}, {"0s"}},
      {"pool.link_latency", {"1ns"}, {"0s"}},
      {"pool.host_link_latency", {"1ns"}, {"0s"}},
      {"queue.max_requests", {"1", "4294967295"}, {"0"}},
      {"queue.max_tokens", {"1", "9223372036854775807"}, {"0", "9223372036854775808"}},
      {"queue.max_wait", {"1ns", "876000h"}, {"0s", "876000h1ns"}},
      {"queue.max_age", {"1ns"}, {"0s"}},
      {"tenant_limits.weight", {"0.001", "1000"}, {"0.0009", "1001", "0"}},
      {"tenant_limits.max_requests", {"1"}, {"0"}},
      {"tenant_limits.max_tokens", {"1"}, {"0"}},
      {"tenants.a.weight", {"0.001", "1000"}, {"0.0009", "1001", "0"}},
      {"tenant_limits.max_priority", {"-2", "2"}, {"-3", "3", "-2147483648", "2147483648", "high"}},
      {"tenants.a.max_priority", {"-2", "0", "2"}, {"-3", "3"}},
      {"trace.timeout", {"1ns"}, {"0s"}},
      {"plan.stripe", {"1", "1048576"}, {"0", "1048577"}},
      {"limits.upload_timeout", {"1ns"}, {"0s"}},
      {"limits.result_timeout", {"1ns"}, {"0s"}},
      {"limits.max_streams", {"1", "2147483647"}, {"0", "2147483648"}},
      {"limits.max_message_bytes", {"64KiB", "1GiB"}, {"65535B", "1073741825B"}},
      {"limits.max_top_k", {"1", "2147483647"}, {"0", "2147483648"}},
      {"limits.max_connections", {"1", "2147483647"}, {"0", "2147483648"}},
      {"limits.channel_memory_bytes", {"16MiB"}, {"16777215B"}},
      {"limits.unread_bytes", {"0"}, {"8EiB"}},
      {"kv.lease", {"1ns"}, {"0s"}},
      {"kv.max_lease", {"30s"}, {"29s"}},
      {"kv.block_tokens", {"1", "65536"}, {"0", "65537"}},
      {"kv.memory_bytes", {"0"}, {"8388608TiB"}},
  };
  for (const Bounds& bounds : all) {
    for (const std::string& value : bounds.taken) {
      EXPECT_EQ(Refusal("", {absl::StrCat(bounds.key, "=", value)}), "accepted")
          << bounds.key << " " << value;
    }
    for (const std::string& value : bounds.refused) {
      EXPECT_EQ(Refusal("", {absl::StrCat(bounds.key, "=", value)}).find(absl::StrCat("--set: ", bounds.key)),
                0u)
          << bounds.key << " " << value << ": " << Refusal("", {absl::StrCat(bounds.key, "=", value)});
    }
  }
  for (const char* address : {"metrics_listen", "kv.listen", "pool.worker.metrics_listen"}) {
    EXPECT_NE(Refusal("", {absl::StrCat(address, "=nowhere")}).find("no HOST:PORT"), std::string::npos);
  }
}

TEST_F(ConfigTest, TextThatIsNotYamlIsRefusedWithItsLine) {
  EXPECT_EQ(Refusal("listen: a\npool: {embedded: \n").rfind("FILE:3: not YAML: ", 0), 0u);
  EXPECT_EQ(Refusal("\"a\\nb\": 1").find('\n'), std::string::npos) << "a refusal is one line";
  for (const char* comma : {",", "\n,--\n", "listen: 127.0.0.1:1\n,", "listen: 127.0.0.1:1\n---\n,"}) {
    EXPECT_NE(Refusal(comma), "") << "yaml-cpp finds documents without end in it: " << comma;
  }
  EXPECT_EQ(Refusal("listen: 127.0.0.1:1\n---\nlisten: 127.0.0.1:2\n"),
            "FILE:2: a second YAML document, or a character that begins none; keep one");
}

TEST_F(ConfigTest, MissingFileIsNamed) {
  const auto config = LoadConfig("/nonexistent/meshfill.yaml");
  EXPECT_EQ(config.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(config.status().message().find("/nonexistent/meshfill.yaml: "), 0u);
  EXPECT_EQ(LoadConfig(testing::TempDir()).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ConfigTest, EveryNameOfAnEnumIsRead) {
  const auto options = [&](const std::string& key, const std::string& name) {
    const auto config = Load(absl::StrCat(key, ": {", name, "}"));
    EXPECT_TRUE(config.ok()) << config.status();
    return ToEngineOptions(config.value_or(v1::Config()));
  };
  EXPECT_EQ(options("model", "dtype: auto").dtype, std::nullopt);
  EXPECT_EQ(options("model", "dtype: bf16").dtype, DType::kBf16);
  EXPECT_EQ(options("model", "dtype: f32").dtype, DType::kF32);
  EXPECT_EQ(options("model", "weights: auto").weights, std::nullopt);
  EXPECT_EQ(options("model", "weights: resident").weights, WeightMode::kResident);
  EXPECT_EQ(options("model", "weights: streamed").weights, WeightMode::kStreamed);
  EXPECT_EQ(options("model", "weights: sharded").weights, WeightMode::kSharded);
  EXPECT_EQ(options("plan", "layout: auto").layout, std::nullopt);
  EXPECT_EQ(options("plan", "layout: striped").layout, LayoutKind::kStriped);
  EXPECT_EQ(options("plan", "layout: zigzag").layout, LayoutKind::kZigzag);
  EXPECT_EQ(options("plan", "layout: \"contiguous\"").layout, LayoutKind::kContiguous);
  EXPECT_EQ(options("plan", "partial_dtype: f32").partial_dtype, DType::kF32);
  EXPECT_EQ(options("plan", "partial_dtype: auto").partial_dtype, std::nullopt);
  EXPECT_EQ(options("plan", "schedule: auto").schedule, ScheduleChoice::kAuto);
  EXPECT_EQ(options("plan", "schedule: greedy").schedule, ScheduleChoice::kGreedy);
  EXPECT_TRUE(options("plan", "exchange: whole").whole_exchanges);
  EXPECT_FALSE(options("plan", "exchange: auto").whole_exchanges);
}

TEST_F(ConfigTest, AutoLeavesTheChoiceToThePlanner) {
  const EngineOptions options = ToEngineOptions(*Load("plan: {layout: auto, partial_dtype: auto}"));
  EXPECT_EQ(options.layout, std::nullopt);
  EXPECT_EQ(options.partial_dtype, std::nullopt);
  EXPECT_EQ(ToEngineOptions(*Load("")).partial_dtype, DType::kF32);
  EXPECT_EQ(
      ToEngineOptions(*Load("model: {path: m, dtype: bf16}\nplan: {partial_dtype: auto}")).partial_dtype,
      std::nullopt)
      << "of whatever model";
}

TEST_F(ConfigTest, LinksThatAreLeftOutStayUnset) {
  const auto config = Load("pool: {host_bytes_per_second: 0}");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_TRUE(config->pool().has_host_bytes_per_second());
  EXPECT_FALSE(config->pool().has_link_bytes_per_second());
  EXPECT_FALSE(config->pool().has_link_latency());
  EXPECT_FALSE(config->pool().has_host_link_bytes_per_second());
  EXPECT_FALSE(config->pool().has_host_link_latency());
  EXPECT_EQ(Refusal("pool: {link_latency: 0s}"), "FILE:1: pool.link_latency: must be above 0s");
}

TEST_F(ConfigTest, EngineOptionsCarryEveryChoice) {
  const auto config = Load(
      "model: {path: m, dtype: bf16}\n"
      "pool: {embedded: {ranks: 6, device: cpu, threads: 3, peak_flops: 1e12, memory_bytes: 2GiB}}\n"
      "plan: {layout: zigzag, stripe: 16, partial_dtype: model, schedule: greedy, profile_path: p.json}\n");
  ASSERT_TRUE(config.ok()) << config.status();
  const EngineOptions options = ToEngineOptions(*config);
  EXPECT_EQ(options.model_path, "m");
  EXPECT_EQ(options.ranks, 6);
  EXPECT_EQ(options.device, "cpu");
  EXPECT_EQ(options.dtype, DType::kBf16);
  EXPECT_EQ(options.layout, LayoutKind::kZigzag);
  EXPECT_EQ(options.stripe, 16);
  EXPECT_EQ(options.partial_dtype, DType::kBf16);
  EXPECT_EQ(options.schedule, ScheduleChoice::kGreedy);
  EXPECT_EQ(options.peak_flops, 1e12);
  EXPECT_EQ(options.memory_budget_bytes, 2ll << 30);
  EXPECT_EQ(options.threads, 3);
  EXPECT_EQ(options.speed_profile_path, "p.json");
  EXPECT_FALSE(options.measure_speed);
  EXPECT_TRUE(ToEngineOptions(*Load("plan: {measure: true}")).measure_speed);
  EXPECT_EQ(ToEngineOptions(*Load("plan: {profile_path: \'\'}")).speed_profile_path, "");
  EXPECT_EQ(ToEngineOptions(*Load("")).speed_profile_path, DefaultPoolProfilePath());
  EXPECT_EQ(ToEngineOptions(*Load("")).dtype, std::nullopt);
  EXPECT_EQ(ToEngineOptions(*Load("")).kv_memory_bytes, std::nullopt);
  EXPECT_EQ(ToEngineOptions(*Load("")).kv_host_memory_bytes, std::nullopt);
  const EngineOptions none_kept = ToEngineOptions(*Load("kv: {memory_bytes: 0, host_memory_bytes: 0}"));
  EXPECT_EQ(none_kept.kv_memory_bytes, 0) << "no default: nothing is kept";
  EXPECT_EQ(none_kept.kv_host_memory_bytes, 0);
  EXPECT_EQ(ToEngineOptions(*Load("")).kv_cache, std::nullopt);
  EXPECT_EQ(ToEngineOptions(*Load("kv: {cache: false}")).kv_cache, false);
}

}  // namespace
}  // namespace meshfill
