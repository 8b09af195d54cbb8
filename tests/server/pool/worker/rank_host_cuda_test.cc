// A worker's ranks on GPUs that the host plays (fake_cuda.h), over NCCL as it plays it. On the CPU:
// rank_host_test.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "server/pool/worker/rank_host.h"
#include "tests/fake_cuda/fake_cuda.h"
#include "tests/server/captured_log.h"
#include "tests/server/eventually.h"
#include "tests/server/pool/worker/rank_host_fixture.h"

namespace meshfill {
namespace {

class RankHostCudaTest : public RankHostFixture {
 protected:
  void SetUp() override {
    FakeCuda::set_devices(kRanks);
    FakeCuda::set_memory_bytes(size_t{1} << 30);
    MakeTestModel("rank_host_cuda_model", DType::kBf16);
    options_.device = "cuda";
    options_.attention_sm_margin = 1;
  }
  void TearDown() override { FakeCuda::RepairDevice(); }
};

TEST_F(RankHostCudaTest, KeepsItsCommunicatorsUntilARunIsStopped) {
  HostListener listener;
  const auto host = RankHost::Load(options_, listener);
  ASSERT_TRUE(host.ok()) << host.status();
  const int before = FakeCuda::nccl_communicators();
  const auto run_well = [&] {
    (*host)->Prepare(Part());
    (*host)->Start(run_, listener.Addresses(run_), {});
    const absl::Status ended = listener.Ended(run_, kRanks);
    EXPECT_TRUE(ended.ok()) << ended;
    (*host)->Release(run_);
  };
  run_well();
  EXPECT_EQ(FakeCuda::nccl_communicators() - before, kRanks);
  run_well();
  run_well();
  EXPECT_EQ(FakeCuda::nccl_communicators() - before, kRanks);
  (*host)->Prepare(Part());  // cancelled before it starts
  listener.Addresses(run_);
  (*host)->Stop(run_, "the request was cancelled");
  listener.Stopped(run_);
  run_well();
  EXPECT_EQ(FakeCuda::nccl_communicators() - before, kRanks);
  (*host)->Prepare(Part());  // cancelled when it has
  (*host)->Start(run_, listener.Addresses(run_), {});
  listener.Outputs(run_, kRanks);
  (*host)->Stop(run_, "the request was cancelled");
  listener.Stopped(run_);
  run_well();
  EXPECT_EQ(FakeCuda::nccl_communicators() - before, 2 * kRanks);
  ++epoch_;
  run_well();
  run_well();
  EXPECT_EQ(FakeCuda::nccl_communicators() - before, 3 * kRanks);
}

// What the worker's devices share is theirs alone: to the pool its weights stream, and the bits are the same.
TEST_F(RankHostCudaTest, ItsDevicesShareWeights) {
  std::vector<std::vector<float>> logits;
  for (const WeightMode mode : {WeightMode::kResident, WeightMode::kSharded}) {
    options_.weights = mode;
    HostListener listener;
    const auto host = RankHost::Load(options_, listener);
    ASSERT_TRUE(host.ok()) << host.status();
    v1::Join offer;
    (*host)->Describe(offer);
    EXPECT_EQ(offer.weights().streamed(), mode == WeightMode::kSharded);
    EXPECT_EQ(offer.weights().layer_seconds() > 0, mode == WeightMode::kSharded);
    EXPECT_FALSE(offer.weights().sharded());
    EXPECT_FALSE(offer.has_shared_weights());
    EXPECT_EQ((*host)->shared_weights().bytes, 0);
    for (int run = 0; run < 2; ++run) {
      (*host)->Prepare(Part());
      (*host)->Start(run_, listener.Addresses(run_), {});
      for (const auto& output : listener.Outputs(run_, kRanks)) {
        ASSERT_TRUE(output.ok()) << output.status();
        if (!output->logits.empty()) logits.push_back(output->logits);
      }
      (*host)->Release(run_);
    }
  }
  ASSERT_EQ(logits.size(), 4u);
  for (const std::vector<float>& each : logits) EXPECT_EQ(each, logits.front());
  FakeCuda::set_devices(1);
  options_.ranks = 1;
  HostListener listener;
  const absl::Status status = RankHost::Load(options_, listener).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_NE(status.message().find("one Fake GPU, which has nobody to share with"), std::string::npos)
      << status;
}

// Two workers, and runs over both.
class RankHostsCudaTest : public RankHostCudaTest {
 protected:
  static constexpr int kHosts = 2;

  void SetUp() override {
    shape_.layers = 6;
    RankHostCudaTest::SetUp();
    FakeCuda::set_devices(kHosts * kRanks);
    for (int host = 0; host < kHosts; ++host) {
      options_.devices = {kRanks * host, kRanks * host + 1};
      auto loaded = RankHost::Load(options_, listeners_[host]);
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      hosts_[host] = *std::move(loaded);
    }
  }

  // Begins a run. Its number.
  uint64_t Begin() {
    std::vector<std::string> addresses;
    WorkerMachine::RunPart part = Part(kHosts * kRanks);
    for (int host = 0; host < kHosts; ++host) {
      if (host > 0) part.first_rank += kRanks;
      part.shards.clear();
      for (int seat = part.first_rank; seat < part.first_rank + kRanks; ++seat) {
        part.shards.emplace_back(part.plan.layout.ChunkTokens(part.plan.RankAt(seat)), 7u);
      }
      hosts_[host]->Prepare(part);
      for (std::string& address : listeners_[host].Addresses(run_)) addresses.push_back(std::move(address));
    }
    for (const auto& host : hosts_) host->Start(run_, addresses, {});
    return run_;
  }
  // Waits for the run's end. The logits.
  std::vector<float> End(uint64_t run) {
    std::vector<float> logits;
    for (HostListener& listener : listeners_) {
      for (const auto& output : listener.Outputs(run, kRanks)) {
        EXPECT_TRUE(output.ok()) << output.status();
        if (output.ok() && !output->logits.empty()) logits = output->logits;
      }
    }
    for (const auto& host : hosts_) host->Release(run);
    return logits;
  }
  int64_t Ask(uint64_t run, uint64_t pause) {
    int64_t most = 0;
    for (const auto& host : hosts_) host->Pause(run, pause);
    for (HostListener& listener : listeners_) most = std::max(most, listener.Messages(run, pause));
    return most;
  }
  bool Ended(uint64_t run) {
    return listeners_[0].EndedRanks(run) + listeners_[1].EndedRanks(run) == kHosts * kRanks;
  }
  // Whether they do so before they end.
  bool StandStill(uint64_t run, uint64_t pause) {
    const int64_t most = Ask(run, pause);
    for (const auto& host : hosts_) host->PauseAt(run, pause, most);
    const absl::Time deadline = MonotonicNow() + absl::Minutes(1);
    while (MonotonicNow() < deadline && !Ended(run)) {
      if (listeners_[0].IsStill(run, pause) && listeners_[1].IsStill(run, pause)) return true;
      absl::SleepFor(absl::Microseconds(100));
    }
    EXPECT_TRUE(Ended(run));
    return false;
  }

  HostListener listeners_[kHosts];
  std::unique_ptr<RankHost> hosts_[kHosts];
};

TEST_F(RankHostsCudaTest, ARunThatStandsStillHasNoMessageUnderWay) {
  const std::vector<float> alone = End(Begin());
  const int before = FakeCuda::nccl_mixes(), communicators = FakeCuda::nccl_communicators();
  int pauses = 0;
  for (int round = 0; pauses < 8 && round < 500; ++round) {
    const uint64_t first = Begin();
    absl::SleepFor(absl::Microseconds(round % 10 * 500));
    for (uint64_t pause = 1; pause < 3 && StandStill(first, pause); ++pause) {
      ++pauses;
      EXPECT_EQ(End(Begin()), alone) << "of one that has begun and ended meanwhile";
      EXPECT_FALSE(Ended(first));
      for (const auto& host : hosts_) host->Resume(first);
    }
    EXPECT_EQ(End(first), alone);
  }
  EXPECT_GE(pauses, 8);
  EXPECT_EQ(FakeCuda::nccl_mixes(), before);
  EXPECT_EQ(FakeCuda::nccl_communicators() - communicators, kHosts * kRanks) << "for one more run that lives";
}

// What the test before it looks at.
TEST_F(RankHostsCudaTest, MessagesOfRunsThatNobodyPausesMix) {
  const int before = FakeCuda::nccl_mixes();
  for (int round = 0; round < 100 && FakeCuda::nccl_mixes() == before; ++round) {
    const uint64_t first = Begin(), second = Begin();
    End(first);
    End(second);
  }
  EXPECT_GT(FakeCuda::nccl_mixes(), before);
}

TEST_F(RankHostsCudaTest, APauseThatIsTakenBackChangesNothing) {
  const std::vector<float> alone = End(Begin());
  for (int round = 0; round < 10; ++round) {
    const uint64_t run = Begin();
    const int64_t most = Ask(run, 1);
    for (const auto& host : hosts_) host->Resume(run);
    for (const auto& host : hosts_) host->PauseAt(run, 1, most);  // comes late
    EXPECT_EQ(End(run), alone);
    for (HostListener& listener : listeners_) EXPECT_FALSE(listener.IsStill(run, 1));
  }
}

TEST_F(RankHostsCudaTest, ARunThatStandsStillCanBeStopped) {
  uint64_t run = Begin();
  while (!StandStill(run, 1)) {
    End(run);
    run = Begin();
  }
  for (const auto& host : hosts_) host->Stop(run, "the request was cancelled");
  for (HostListener& listener : listeners_) {
    EXPECT_FALSE(listener.Ended(run, kRanks).ok());
    listener.Stopped(run);
  }
  EXPECT_FALSE(End(Begin()).empty());
}

// The leader takes ranks that do not get on to hang, in less time than NCCL may take to connect.
TEST_F(RankHostCudaTest, GetsOnWhileItConnects) {
  HostListener listener;
  const auto host = RankHost::Load(options_, listener);
  ASSERT_TRUE(host.ok()) << host.status();
  WorkerMachine::RunPart part = Part(2 * kRanks);  // of which others never come
  part.shards.resize(kRanks);
  (*host)->Prepare(std::move(part));
  std::vector<std::string> addresses = listener.Addresses(run_);
  addresses.resize(2 * kRanks, addresses.back());
  (*host)->Start(run_, addresses, {});
  std::vector<WorkerMachine::RankProgress> last;
  for (int reports = 0; reports < 5;) {
    const auto progress = (*host)->progress().at(run_);
    if (progress.empty()) continue;  // it has not started
    for (size_t rank = 0; rank < last.size(); ++rank) {
      EXPECT_FALSE(progress[rank].computing);
      reports += progress[rank].operations > last[rank].operations ? 1 : 0;
    }
    last = progress;
  }
  (*host)->Stop(run_, "no more ranks came");
  EXPECT_TRUE(absl::IsAborted(listener.Ended(run_, kRanks)));
  listener.Stopped(run_);
}

TEST_F(RankHostCudaTest, RefusesAMarginThatLeavesNothingToAttention) {
  HostListener listener;
  options_.attention_sm_margin = 4;  // all that the fake has
  const absl::Status status = RankHost::Load(options_, listener).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_NE(status.message().find("pool.worker.attention_sm_margin"), std::string::npos) << status;
}

TEST_F(RankHostCudaTest, RefusesMoreRanksThanGpus) {
  FakeCuda::set_devices(kRanks - 1);
  HostListener listener;
  const absl::Status status = RankHost::Load(options_, listener).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_NE(status.message().find("pool.worker.ranks is 2, more than this machine has GPUs"),
            std::string::npos)
      << status;
}

TEST_F(RankHostCudaTest, RefusesToEncrypt) {
  options_.encrypt = true;
  HostListener listener;
  const absl::Status status = RankHost::Load(options_, listener).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_NE(status.message().find("pool.encrypt is set, and NCCL"), std::string::npos) << status;
  EXPECT_NE(status.message().find("docs/security.md"), std::string::npos) << status;
}

// Rank by rank; the runtime would make a context on whatever device a thread happens to have.
TEST_F(RankHostCudaTest, UsesTheDevicesThatItsConfigNames) {
  FakeCuda::set_devices(6);
  options_.devices = {5, 3};
  const bool had_first = FakeCuda::has_context(0);
  HostListener listener;
  const auto host = RankHost::Load(options_, listener);
  ASSERT_TRUE(host.ok()) << host.status();
  (*host)->Prepare(Part());
  (*host)->Start(run_, listener.Addresses(run_), {});
  const absl::Status ended = listener.Ended(run_, kRanks);
  EXPECT_TRUE(ended.ok()) << ended;
  EXPECT_EQ(FakeCuda::has_context(0), had_first);
  for (const int device : {2, 4}) EXPECT_FALSE(FakeCuda::has_context(device)) << device;
  for (const int device : {3, 5}) EXPECT_TRUE(FakeCuda::has_context(device)) << device;
}

TEST_F(RankHostCudaTest, RefusesDevicesThatAreNotThere) {
  const auto refusal = [&](std::vector<int> devices) {
    options_.devices = std::move(devices);
    HostListener listener;
    const absl::Status status = RankHost::Load(options_, listener).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_EQ(
      refusal({0, kRanks}),
      "pool.worker.devices names GPU 2, which cannot be used here; choose of 0 (Fake GPU), 1 (Fake GPU)");
  EXPECT_EQ(refusal({1}), "pool.worker.devices names 1 GPUs for 2 ranks; name one for each");
}

// Once, in the log: the leader hears of it when the process ends.
TEST_F(RankHostCudaTest, SaysThatADeviceIsLost) {
  HostListener listener;
  const auto host = RankHost::Load(options_, listener);
  ASSERT_TRUE(host.ok()) << host.status();
  (*host)->Prepare(Part());
  const std::vector<std::string> addresses = listener.Addresses(run_);
  EXPECT_FALSE((*host)->lost());
  const CapturedLog log;
  FakeCuda::BreakDevice();
  (*host)->Start(run_, addresses, {});
  EXPECT_TRUE(Eventually([&] { return (*host)->lost(); }));
  (*host)->Stop(run_, "its worker is lost");
  listener.Stopped(run_);  // both ranks have ended
  EXPECT_EQ(log.CountOf("(Fake GPU) has failed under rank"), 1) << log.Text();
  EXPECT_EQ(listener.EndedRanks(run_), 0u);
}

// The run's only rank is the worker's second.
TEST_F(RankHostCudaTest, LooksAtTheDeviceThatARankRanOn) {
  HostListener listener;
  const auto host = RankHost::Load(options_, listener);
  ASSERT_TRUE(host.ok()) << host.status();
  WorkerMachine::RunPart part = Part(/*ranks=*/1);
  part.local_rank = 1;
  part.shards = {std::vector<uint32_t>(kTokens, 7)};
  (*host)->Prepare(std::move(part));
  const std::vector<std::string> addresses = listener.Addresses(run_);
  const CapturedLog log;
  FakeCuda::BreakDevice(1);
  (*host)->Start(run_, addresses, {});
  EXPECT_TRUE(Eventually([&] { return (*host)->lost(); }));
  (*host)->Stop(run_, "its worker is lost");
  listener.Stopped(run_);
  EXPECT_EQ(log.CountOf("device 1 (Fake GPU) has failed under rank 0 of run 1"), 1) << log.Text();
}

}  // namespace
}  // namespace meshfill
