// What a run's ranks count while the run stands still, and when its weights begin to travel. The rest of a
// run's life: rank_host_test.
#include "server/pool/worker/active_run.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/comm/data_plane.h"
#include "engine/embedded_pool.h"
#include "engine/run/local_ranks.h"
#include "kernels/monotonic_time.h"
#include "tests/server/eventually.h"
#include "tests/server/pool/worker/rank_host_fixture.h"

namespace meshfill {
namespace {

class ActiveRunTest : public RankHostFixture {
 protected:
  void SetUp() override {
    MakeTestModel("active_run_model", DType::kF32);
    options_.device = "cpu";
    options_.threads = 2;
    options_.memory_bytes = 1 << 28;
  }
  // Whether the run's ranks on that host come to wait for their peers: none of them calls anything more.
  static bool ComeToWait(const RankHost& host, uint64_t run) {
    uint64_t operations = 0;
    int looks = 0;
    return Eventually([&] {
      const auto ranks = host.progress().at(run);
      const bool waits = std::all_of(ranks.begin(), ranks.end(),
                                     [](const auto& rank) { return rank.has_computed && !rank.computing; });
      uint64_t called = 0;
      for (const auto& rank : ranks) called += rank.operations;
      looks = !ranks.empty() && waits && called == operations ? looks + 1 : 0;
      operations = called;
      return looks == 10;
    });
  }
  static void RunOther(RankHost& host, HostListener& listener, WorkerMachine::RunPart part) {
    const uint64_t run = part.number;
    host.Prepare(std::move(part));
    host.Start(run, listener.Addresses(run), {});
    EXPECT_TRUE(listener.Ended(run, kRanks).ok()) << listener.Ended(run, kRanks);
    host.Release(run);
  }
};

// The ranks of the second host wait for those of the first when all stand still, for longer than a peer is
// waited for. Where the machine was too slow for that time, once more with more of it.
TEST_F(ActiveRunTest, AWaitForPeersGoesOnAfterAPauseAsIfThereWereNone) {
  HostListener one, two;
  const auto first = RankHost::Load(options_, one), second = RankHost::Load(options_, two);
  ASSERT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
  bool in_time = false;
  for (int attempt = 1; !in_time && attempt <= 5; ++attempt) {
    std::vector<WorkerMachine::RunPart> parts = {Part(2 * kRanks), Part(2 * kRanks, kRanks)};
    const uint64_t run = parts[1].number = parts[0].number;
    // Less than nothing, so that it does not take minutes.
    for (auto& part : parts) part.plan.predicted.seconds = -3 + 0.025 * attempt * attempt;
    const absl::Duration timeout = PeerWaitTimeout(parts[0].plan);
    ASSERT_GT(timeout, absl::ZeroDuration());
    (*first)->Prepare(parts[0]);
    (*second)->Prepare(parts[1]);
    std::vector<std::string> addresses = one.Addresses(run);
    for (std::string& address : two.Addresses(run)) addresses.push_back(std::move(address));
    (*first)->Pause(run, 0);
    const absl::Time started = MonotonicNow();
    for (const auto& host : {&first, &second}) (**host)->Start(run, addresses, {});
    EXPECT_TRUE(ComeToWait(**second, run));
    (*second)->Pause(run, 0);
    const absl::Time paused = MonotonicNow();
    while (MonotonicNow() < paused + 2 * timeout) RunOther(**second, two, Part());
    const absl::Duration pause = MonotonicNow() - paused;
    for (const auto& host : {&first, &second}) (**host)->Resume(run);
    const auto outputs = two.Outputs(run, kRanks);
    in_time = MonotonicNow() - started - pause < timeout;
    for (const auto& output : outputs) {
      if (!in_time) break;
      ASSERT_TRUE(output.ok()) << output.status();
      EXPECT_LE(output->stats.comm_wait_seconds(), output->stats.total_seconds + 1e-6);
    }
    for (const auto& host : {&first, &second}) (**host)->Stop(run, "over");
    one.Stopped(run);
    two.Stopped(run);
  }
  EXPECT_TRUE(in_time);
}

// Its endpoints' aborts take until Release: NCCL's may wait for others.
class SlowToAbort final : public DataPlane {
 public:
  std::string kind() const override { return "slow"; }
  absl::StatusOr<std::unique_ptr<Endpoint>> Listen(const Seat& seat) override {
    return std::make_unique<SlowEndpoint>(*this, absl::StrCat("rank ", seat.rank));
  }
  void End(uint64_t) override {}
  absl::Duration connect_timeout() const override { return absl::Seconds(1); }
  bool connects_slowly() const override { return true; }
  bool messages_mix() const override { return true; }
  bool many_messages() const override { return false; }

  void Release() { released_ = true; }
  int aborted() const { return aborted_; }

 private:
  class SlowEndpoint final : public Endpoint {
   public:
    SlowEndpoint(SlowToAbort& plane, std::string address) : plane_(plane), address_(std::move(address)) {}
    const std::string& address() const override { return address_; }
    absl::StatusOr<std::unique_ptr<Communicator>> Connect(std::span<const std::string>, Stream&,
                                                          absl::Time) override {
      return absl::UnimplementedError("nobody is there");
    }
    void Abort(absl::Status) override {
      EXPECT_TRUE(Eventually([&] { return plane_.released_.load(); }));
      ++plane_.aborted_;
    }

   private:
    SlowToAbort& plane_;
    const std::string address_;
  };

  std::atomic<bool> released_{false};
  std::atomic<int> aborted_{0};
};

// The worker says meanwhile that it lives, and stops its other runs.
TEST_F(ActiveRunTest, AnAbortWaitsForNoConnection) {
  const auto pool = LoadEmbeddedPool({.model_path = options_.model_path,
                                      .ranks = kRanks,
                                      .device = "cpu",
                                      .peak_flops = 1e12,
                                      .threads = 1});
  ASSERT_TRUE(pool.ok()) << pool.status();
  SlowToAbort plane;
  HeldKv kv(KvShapeOf(shape_), 1 << 20);
  std::atomic<bool> lost{false};
  WorkerMachine::RunPart part = Part();
  part.weights = {.share = {.index = 0, .of = 2}, .head = 0};  // it gathers the others' of peers, too
  ActiveRun run(std::move(part),
                {.pool = *pool, .sharded = nullptr, .data_plane = plane, .kv = kv, .lost = lost}, {},
                /*pack=*/nullptr);
  ASSERT_TRUE(run.Listen().ok());
  run.Abort(absl::AbortedError("a peer is gone"));
  run.Abort(absl::CancelledError("the worker exits"));
  EXPECT_EQ(plane.aborted(), 0);
  plane.Release();
  run.Join();
  run.End();
  EXPECT_EQ(plane.aborted(), kRanks + 1);
}

// A prompt may break its ranks in their first operation.
TEST_F(ActiveRunTest, ARankInItsFirstOperationHasComputed) {
  HostListener listener;
  const auto host = RankHost::Load(options_, listener);
  ASSERT_TRUE(host.ok()) << host.status();
  (*host)->Prepare(Part());
  const std::vector<std::string> addresses = listener.Addresses(run_);
  (*host)->Pause(run_, 0);
  (*host)->Start(run_, addresses, {});
  std::vector<WorkerMachine::RankProgress> ranks;
  EXPECT_TRUE(Eventually([&] {
    ranks = (*host)->progress().at(run_);
    return !ranks.empty() &&
           std::all_of(ranks.begin(), ranks.end(), [](const auto& rank) { return rank.computing; });
  }));
  for (const WorkerMachine::RankProgress& rank : ranks) {
    EXPECT_EQ(rank.operations, 1u);
    EXPECT_TRUE(rank.has_computed);
  }
  (*host)->Stop(run_, "over");
  listener.Stopped(run_);
}

// The ranks of the first run come to no peer, and so to no layer. One that measures nothing gets its weights
// at once, for the same long.
TEST_F(ActiveRunTest, NoWeightsTravelBeforeLinksAreMeasured) {
  options_.weights = WeightMode::kSharded;
  HostListener listener, of_peers;
  const auto host = RankHost::Load(options_, listener), peers = RankHost::Load(options_, of_peers);
  ASSERT_TRUE(host.ok() && peers.ok()) << host.status() << peers.status();
  const auto start = [&](int share, std::vector<LinkProbe> probes) {
    std::vector<std::string> by_share[2];
    for (const int i : {share, 1 - share}) {
      WorkerMachine::RunPart part = Part(2 * kRanks, i * kRanks);
      if (i != share) part.number = --run_;
      part.weights = {.share = {.index = i, .of = 2}, .head = 0};
      (i == share ? *host : *peers)->Prepare(std::move(part));
      by_share[i] = (i == share ? listener : of_peers).Addresses(run_);
    }
    std::vector<std::string> addresses;
    for (const auto& each : by_share) addresses.insert(addresses.end(), each.begin(), each.end() - 1);
    for (const auto& each : by_share) addresses.push_back(each.back());
    (*host)->Start(run_, addresses, std::move(probes));
    return run_;
  };
  const auto begun = [&](uint64_t run) {
    const auto ranks = (*host)->progress().at(run);
    return !ranks.empty() && ranks.front().operations > 0;
  };
  const uint64_t measures = start(0, {{.peer_of_rank = {2, 3, 0, 1}}});
  const uint64_t other = start(1, {});
  EXPECT_TRUE(Eventually([&] { return begun(other); }));
  EXPECT_FALSE(begun(measures));
}

}  // namespace
}  // namespace meshfill
