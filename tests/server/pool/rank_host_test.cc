// A worker's ranks on GPUs that the host plays (fake_cuda.h), over NCCL as it plays it.
#include "server/pool/rank_host.h"

#include <condition_variable>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "engine/model/make_model.h"
#include "engine/plan/planner.h"
#include "gtest/gtest.h"
#include "tests/fake_cuda/fake_cuda.h"

namespace meshfill {
namespace {

constexpr int kRanks = 2;

// Waits for what the host tells.
class Ear final : public RankHost::Listener {
 public:
  std::vector<std::string> Addresses(uint64_t run) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return addresses_.count(run) != 0; });
    return addresses_[run];
  }
  // The first failure of the run's ranks, once all have ended.
  absl::Status Ended(uint64_t run) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return ended_[run].size() == kRanks; });
    for (const absl::Status& status : ended_[run]) {
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  void Stopped(uint64_t run) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return stopped_ == run; });
  }

 private:
  void OnRunPrepared(uint64_t run, absl::StatusOr<std::vector<std::string>> addresses) override {
    EXPECT_TRUE(addresses.ok()) << addresses.status();
    const std::lock_guard<std::mutex> lock(mutex_);
    addresses_[run] = *std::move(addresses);
    changed_.notify_all();
  }
  void OnRankDone(uint64_t run, int, absl::StatusOr<RankOutput> output) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_[run].push_back(output.status());
    changed_.notify_all();
  }
  void OnRunStopped(uint64_t run) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = run;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, std::vector<std::string>> addresses_;
  std::map<uint64_t, std::vector<absl::Status>> ended_;
  uint64_t stopped_ = 0;
};

class RankHostTest : public testing::Test {
 protected:
  void SetUp() override {
    FakeCuda::set_devices(kRanks);
    FakeCuda::set_memory_bytes(size_t{1} << 30);
    options_.model_path = testing::TempDir() + "/rank_host_model";
    std::filesystem::remove_all(options_.model_path);
    const absl::Status made = MakeModel({.layers = 2,
                                         .hidden = 64,
                                         .intermediate = 64,
                                         .q_heads = 4,
                                         .kv_heads = 2,
                                         .head_dim = 16,
                                         .vocab = 100,
                                         .context_tokens = 4096,
                                         .dtype = DType::kBf16},
                                        options_.model_path);
    ASSERT_TRUE(made.ok()) << made;
    options_.device = DeviceChoice::kCuda;
    options_.ranks = kRanks;
    options_.peak_flops = 1e12;
    options_.attention_sm_margin = 1;
  }

  WorkerMachine::RunPart Part(int ranks = kRanks) {
    const ModelShape shape = {.layers = 2,
                              .hidden = 64,
                              .intermediate = 64,
                              .q_heads = 4,
                              .kv_heads = 2,
                              .head_dim = 16,
                              .vocab = 100,
                              .context_tokens = 4096,
                              .dtype = DType::kBf16};
    const auto choice = MakePlan(shape, PoolSpeed{}, {.tokens = 300, .ranks = ranks, .tile = Tile{1, ranks}});
    EXPECT_TRUE(choice.ok()) << choice.status();
    WorkerMachine::RunPart part{
        .number = ++run_, .epoch = epoch_, .plan = choice->plan, .reserve_bytes = 1000, .shards = {}};
    for (int rank = 0; rank < ranks; ++rank) {
      part.shards.emplace_back(part.plan.layout.ChunkTokens(rank), 7u);
    }
    return part;
  }

  RankHost::Options options_;
  uint64_t run_ = 0;
  uint64_t epoch_ = 1;
};

TEST_F(RankHostTest, KeepsItsCommunicatorsUntilARunIsStopped) {
  Ear ear;
  const auto host = RankHost::Load(options_, ear);
  ASSERT_TRUE(host.ok()) << host.status();
  const auto run_well = [&] {
    (*host)->Prepare(Part());
    (*host)->Start(run_, ear.Addresses(run_), {});
    const absl::Status ended = ear.Ended(run_);
    EXPECT_TRUE(ended.ok()) << ended;
    (*host)->Release(run_);
  };
  run_well();
  EXPECT_EQ(FakeCuda::nccl_communicators(), kRanks);
  run_well();
  run_well();
  EXPECT_EQ(FakeCuda::nccl_communicators(), kRanks);
  (*host)->Prepare(Part());  // cancelled before it starts
  ear.Addresses(run_);
  (*host)->Stop(run_, "the request was cancelled");
  ear.Stopped(run_);
  run_well();
  EXPECT_EQ(FakeCuda::nccl_communicators(), 2 * kRanks);
  ++epoch_;
  run_well();
  run_well();
  EXPECT_EQ(FakeCuda::nccl_communicators(), 3 * kRanks);
}

// The leader takes ranks that do not get on to hang, in less time than NCCL may take to connect.
TEST_F(RankHostTest, GetsOnWhileItConnects) {
  Ear ear;
  const auto host = RankHost::Load(options_, ear);
  ASSERT_TRUE(host.ok()) << host.status();
  WorkerMachine::RunPart part = Part(2 * kRanks);  // of which others never come
  part.shards.resize(kRanks);
  (*host)->Prepare(std::move(part));
  std::vector<std::string> addresses = ear.Addresses(run_);
  addresses.resize(2 * kRanks, addresses.back());
  (*host)->Start(run_, addresses, {});
  std::vector<WorkerMachine::RankProgress> last;
  for (int reports = 0; reports < 5;) {
    const auto progress = (*host)->progress();
    if (progress.empty()) continue;  // it has not started
    for (size_t rank = 0; rank < last.size(); ++rank) {
      EXPECT_FALSE(progress[rank].computing);
      reports += progress[rank].operations > last[rank].operations ? 1 : 0;
    }
    last = progress;
  }
  (*host)->Stop(run_, "no more ranks came");
  EXPECT_TRUE(absl::IsAborted(ear.Ended(run_)));
  ear.Stopped(run_);
}

TEST_F(RankHostTest, RefusesAMarginThatLeavesNothingToAttention) {
  Ear ear;
  options_.attention_sm_margin = 4;  // all that the fake has
  const absl::Status status = RankHost::Load(options_, ear).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_NE(status.message().find("pool.worker.attention_sm_margin"), std::string::npos) << status;
}

// Last: the device stays lost, as a real one does.
TEST_F(RankHostTest, ZzSaysThatADeviceIsLost) {
  Ear ear;
  const auto host = RankHost::Load(options_, ear);
  ASSERT_TRUE(host.ok()) << host.status();
  (*host)->Prepare(Part());
  const std::vector<std::string> addresses = ear.Addresses(run_);
  EXPECT_FALSE((*host)->lost());
  FakeCuda::BreakDevice();
  (*host)->Start(run_, addresses, {});
  EXPECT_TRUE(absl::IsUnavailable(ear.Ended(run_)));
  EXPECT_TRUE((*host)->lost());
  (*host)->Stop(run_, "a rank has failed");
  ear.Stopped(run_);
}

}  // namespace
}  // namespace meshfill
