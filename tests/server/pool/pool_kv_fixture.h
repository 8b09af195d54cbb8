// A real pool in one process, for tests of the K and V that it keeps: a front-end, and workers that come and
// go.
#ifndef MESHFILL_TESTS_SERVER_POOL_POOL_KV_FIXTURE_H_
#define MESHFILL_TESTS_SERVER_POOL_POOL_KV_FIXTURE_H_

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/model/make_model.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "server/api/front_end.h"
#include "server/config/config.h"
#include "server/pool/pool_engine.h"
#include "server/pool/worker/worker_process.h"
#include "tests/server/api/kv_client.h"
#include "tests/server/eventually.h"

namespace meshfill {

constexpr int kLayers = 3, kKvHeads = 2, kHeadDim = 16;

inline ModelFamily model_family =
    ModelFamily::kQwen3;  // of the model that pools have; Mistral: with a window

inline std::string MakeTestModel(ModelFamily family) {
  const std::string folder = absl::StrCat(testing::TempDir(), "/pool_kv_", program_invocation_short_name, "_",
                                          static_cast<int>(family));
  std::filesystem::remove_all(folder);
  const absl::Status status = MakeModel({.family = family,
                                         .layers = kLayers,
                                         .hidden = 64,
                                         .intermediate = 96,
                                         .q_heads = 4,
                                         .kv_heads = kKvHeads,
                                         .head_dim = kHeadDim,
                                         .vocab = 300,
                                         .context_tokens = 1 << 16,
                                         .sliding_window = family == ModelFamily::kMistral ? 500 : 0,
                                         .dtype = DType::kF32,
                                         .seed = 7},
                                        folder);
  EXPECT_TRUE(status.ok()) << status;
  return folder;
}

inline const std::string& Folder() {
  static std::map<ModelFamily, std::string> folders;
  std::string& folder = folders[model_family];
  if (folder.empty()) folder = MakeTestModel(model_family);
  return folder;
}

inline std::string SpeedProfile() {
  return absl::StrCat(testing::TempDir(), "/speed_of_", program_invocation_short_name, ".json");
}

// Workers are lost where a test ends them, and not where the machine stands still.
inline v1::Config Config(std::vector<std::string> overrides) {
  overrides.insert(overrides.begin(), {"pool.silence_timeout=20s", "pool.hang_timeout=20s"});
  overrides.push_back(absl::StrCat("model.path=", Folder()));
  overrides.push_back("model.dtype=f32");
  overrides.push_back(absl::StrCat("plan.profile_path=", SpeedProfile()));
  const auto config = LoadConfig("", overrides);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : v1::Config();
}

// A worker with a thread that ticks.
class TestWorker {
 public:
  TestWorker(const std::string& join, const std::string& name, int ranks,
             std::vector<std::string> overrides) {
    overrides.insert(overrides.begin(),
                     {absl::StrCat("pool.worker.name=", name), absl::StrCat("pool.worker.ranks=", ranks),
                      "pool.worker.device=cpu", "pool.worker.threads=1", "pool.worker.peak_flops=1e12"});
    auto process = WorkerProcess::Start(Config(overrides), join);
    EXPECT_TRUE(process.ok()) << process.status();
    process_ = *std::move(process);
    thread_ = std::thread([this] {
      while (!quit_ && !exit_.has_value()) {
        exit_ = process_->Tick();
        absl::SleepFor(absl::Milliseconds(10));
      }
      gone_ = true;
    });
  }
  ~TestWorker() {
    quit_ = true;
    thread_.join();
  }
  void Drain() { process_->Drain(); }
  KvStore::Counts kv() const { return process_->kv(); }
  WorkerLoad load() const { return process_->load(); }
  bool gone() const { return gone_; }

 private:
  std::unique_ptr<WorkerProcess> process_;
  std::atomic<bool> quit_{false};
  std::atomic<bool> gone_{false};
  std::optional<absl::Status> exit_;
  std::thread thread_;
};

class PoolKvTest : public testing::Test {
 protected:
  void StartPool(const std::vector<int>& ranks_of_workers, const std::vector<std::string>& of_workers = {}) {
    std::vector<std::string> overrides = of_leader_;
    overrides.insert(overrides.end(), {"listen=127.0.0.1:0", "pool.control_listen=127.0.0.1:0"});
    const v1::Config config = Config(std::move(overrides));
    auto front_end = FrontEnd::Start(config, metrics_);
    ASSERT_TRUE(front_end.ok()) << front_end.status();
    front_end_ = *std::move(front_end);
    auto engine = PoolEngine::Listen(config, metrics_);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = engine->get();
    KvLeases& leases = engine_->kv_leases();
    front_end_->Open(*std::move(engine), &leases);
    int all = 0;
    for (const int ranks : ranks_of_workers) {
      AddWorker(ranks, of_workers);
      all += ranks;
    }
    ASSERT_TRUE(Eventually([&] { return engine_->ranks() == all; }));
    client_ = std::make_unique<KvClient>(Channel(front_end_->address()));
  }
  void AddWorker(int ranks, const std::vector<std::string>& overrides = {}) {
    workers_.push_back(std::make_unique<TestWorker>(engine_->control_address(),
                                                    absl::StrCat("w", workers_.size()), ranks, overrides));
  }
  void StopPool() {
    if (front_end_ != nullptr) front_end_->Stop();
    workers_.clear();
    client_.reset();
    front_end_.reset();
  }
  void TearDown() override { StopPool(); }

  static std::shared_ptr<grpc::Channel> Channel(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  }

  // On all ranks: left to the planner, a short prompt may run on some of them.
  absl::StatusOr<v1::PrefillResult> Prefill(size_t tokens, uint32_t lease_seconds = 0) {
    v1::PrefillHeader header = client_->Header(tokens);
    header.mutable_plan()->mutable_tile()->set_a(1);
    header.mutable_plan()->mutable_tile()->set_b(static_cast<uint32_t>(engine_->ranks()));
    header.mutable_kv()->set_lease_seconds(lease_seconds);
    return client_->Prefill(header, std::vector<uint32_t>(tokens, 7));
  }
  static v1::FetchKvRequest Request(const std::string& lease) {
    v1::FetchKvRequest request;
    request.set_lease(lease);
    return request;
  }
  KvStore::Counts counts() { return engine_->kv_leases().counts(); }

  std::vector<std::string> of_leader_;  // settings
  Metrics metrics_;
  std::unique_ptr<FrontEnd> front_end_;
  PoolEngine* engine_ = nullptr;
  std::vector<std::unique_ptr<TestWorker>> workers_;
  std::unique_ptr<KvClient> client_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_POOL_POOL_KV_FIXTURE_H_
