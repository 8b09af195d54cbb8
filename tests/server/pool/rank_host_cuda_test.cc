// A worker's ranks on GPUs that the host plays (fake_cuda.h), over NCCL as it plays it. On the CPU:
// rank_host_test.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/pool/rank_host.h"
#include "tests/fake_cuda/fake_cuda.h"
#include "tests/server/pool/rank_host_fixture.h"

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
  EXPECT_EQ(FakeCuda::nccl_communicators() - before, 2 * kRanks);
  ++epoch_;
  run_well();
  run_well();
  EXPECT_EQ(FakeCuda::nccl_communicators() - before, 3 * kRanks);
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

TEST_F(RankHostCudaTest, SaysThatADeviceIsLost) {
  HostListener listener;
  const auto host = RankHost::Load(options_, listener);
  ASSERT_TRUE(host.ok()) << host.status();
  (*host)->Prepare(Part());
  const std::vector<std::string> addresses = listener.Addresses(run_);
  EXPECT_FALSE((*host)->lost());
  FakeCuda::BreakDevice();
  (*host)->Start(run_, addresses, {});
  const absl::Status ended = listener.Ended(run_, kRanks);
  EXPECT_TRUE(absl::IsUnavailable(ended)) << ended;
  EXPECT_NE(ended.message().find("a device (Fake GPU) has failed under rank"), std::string::npos) << ended;
  EXPECT_TRUE((*host)->lost());
  (*host)->Stop(run_, "a rank has failed");
  listener.Stopped(run_);
}

}  // namespace
}  // namespace meshfill
