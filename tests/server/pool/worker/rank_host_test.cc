// A worker's ranks on the CPU, over gloo on the loopback device. On GPUs: rank_host_cuda_test.
#include "server/pool/worker/rank_host.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/embedded_engine.h"
#include "engine/platforms.h"
#include "engine/prefill_engine.h"
#include "engine/run/rank_runner.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/monotonic_time.h"
#include "nlohmann/json.hpp"
#include "tests/engine/devices/toy/toy_platform.h"
#include "tests/server/captured_log.h"
#include "tests/server/eventually.h"
#include "tests/server/pool/worker/rank_host_fixture.h"

namespace meshfill {
namespace {

class RankHostTest : public RankHostFixture {
 protected:
  void SetUp() override {
    MakeTestModel("rank_host_model", DType::kF32);
    options_.device = "cpu";
    options_.threads = 2;
    options_.memory_bytes = 1 << 28;
  }
  // A run of both hosts' ranks; returns the addresses of all of them.
  std::vector<std::string> PrepareOnBoth(RankHost& first, HostListener& one, RankHost& second,
                                         HostListener& two) {
    first.Prepare(Part(2 * kRanks));
    WorkerMachine::RunPart rest = Part(2 * kRanks, kRanks);
    rest.number = --run_;
    second.Prepare(std::move(rest));
    std::vector<std::string> addresses = one.Addresses(run_);
    for (std::string& address : two.Addresses(run_)) addresses.push_back(std::move(address));
    return addresses;
  }
  std::unique_ptr<RankHost> Load(HostListener& listener) {
    auto host = RankHost::Load(options_, listener);
    EXPECT_TRUE(host.ok()) << host.status();
    return host.ok() ? *std::move(host) : nullptr;
  }
  void TestSharing();
  // The newest run, which is prepared, from Start to Release.
  void RunWell(RankHost& host, HostListener& listener, uint64_t run) {
    host.Start(run, listener.Addresses(run), {});
    const absl::Status ended = listener.Ended(run, kRanks);
    EXPECT_TRUE(ended.ok()) << ended;
    host.Release(run);
  }
};

TEST_F(RankHostTest, SaysWhatItOffers) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  v1::Join offer;
  host->Describe(offer);
  EXPECT_EQ(offer.ranks(), static_cast<uint32_t>(kRanks));
  ASSERT_EQ(offer.devices_size(), kRanks);
  EXPECT_EQ(offer.devices(0), "cpu");
  EXPECT_EQ(offer.memory_bytes(), uint64_t{1} << 28);
  EXPECT_EQ(offer.peak_flops(), 1e12);
  EXPECT_EQ(offer.model().name(), "rank_host_model");
  EXPECT_NE(offer.model().weights_hash(), 0u);
  EXPECT_GT(offer.speed().gemm_flops_per_second(), 0);
  EXPECT_GT(offer.kv_memory_bytes(), 0u);
  EXPECT_TRUE(offer.messages_mix());
  EXPECT_FALSE(offer.kv_on_host()) << "it is the devices' own memory";
  EXPECT_FALSE(host->lost());
}

TEST_F(RankHostTest, DropsTheSpeedThatItKeeps) {
  options_.speed_profile_path = testing::TempDir() + "/rank_host_speed.json";
  std::filesystem::remove(options_.speed_profile_path);
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  const auto kept = [&] {
    return nlohmann::json::parse(std::ifstream(options_.speed_profile_path))["pools"].size();
  };
  EXPECT_EQ(kept(), 1u);
  const CapturedLog log;
  host->ForgetSpeed();
  EXPECT_TRUE(Eventually([&] { return kept() == 0; }));
  EXPECT_TRUE(Eventually([&] { return log.CountOf("and its next start measures it") == 1; })) << log.Text();
  std::ofstream(options_.speed_profile_path) << "not a profile";
  host->ForgetSpeed();
  EXPECT_TRUE(Eventually([&] { return log.CountOf("start the worker with --set plan.measure=true") == 1; }))
      << log.Text();
}

TEST_F(RankHostTest, RunsOneRunAfterAnother) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  const CapturedLog log;
  for (int i = 0; i < 3; ++i) {
    host->Prepare(Part());
    RunWell(*host, listener, run_);
  }
  EXPECT_EQ(log.CountOf("connections to the data port"), 0) << "nobody else has knocked: " << log.Text();
}

TEST_F(RankHostTest, ASeatTellsOfTheRankThatSitsThere) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  for (const std::vector<int>& seat_of_rank : {std::vector<int>{0, 1}, std::vector<int>{1, 0}}) {
    WorkerMachine::RunPart part = Part();
    part.plan.placement.seat_of_rank = seat_of_rank;
    const Plan plan = part.plan;
    part.shards.clear();
    for (int seat = 0; seat < kRanks; ++seat) {
      part.shards.emplace_back(plan.layout.ChunkTokens(plan.RankAt(seat)), 7u);
    }
    host->Prepare(std::move(part));
    const std::vector<std::string> by_seat = listener.Addresses(run_);
    std::vector<std::string> by_rank;
    for (const int seat : seat_of_rank) by_rank.push_back(by_seat.at(static_cast<size_t>(seat)));
    host->Start(run_, by_rank, {});
    EXPECT_TRUE(listener.Ended(run_, kRanks).ok()) << listener.Ended(run_, kRanks);
    for (int seat = 0; seat < kRanks; ++seat) {
      const auto output = listener.OutputOf(run_, seat);
      ASSERT_TRUE(output.ok()) << output.status();
      EXPECT_EQ(output->logits.empty(), !ReadsHead(plan, plan.RankAt(seat))) << "seat " << seat;
    }
    host->Release(run_);
  }
}

// Rank 0 has more tokens than the others, and sits elsewhere.
TEST_F(RankHostTest, KeepsKvOfTheRanksThatSitHere) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  WorkerMachine::RunPart part = Part(2 * kRanks);
  part.plan.placement.seat_of_rank = {2, 3, 0, 1};
  part.keep_kv = {.lease = "lease", .tenant = "t", .lasts = absl::Hours(1)};
  const TokenLayout& layout = part.plan.layout;
  const int64_t here = layout.ChunkTokens(2) + layout.ChunkTokens(3);
  ASSERT_GT(layout.ChunkTokens(0) + layout.ChunkTokens(1), here);
  host->Prepare(std::move(part));
  listener.Addresses(run_);
  EXPECT_EQ(host->kv().counts().bytes, shape_.layers * shape_.kv_bytes(here));
  host->Stop(run_, "the request was cancelled");
  listener.Stopped(run_);
}

TEST_F(RankHostTest, TwoHostsComputeWhatOneProcessComputes) {
  HostListener one, two;
  const auto first = Load(one), second = Load(two);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  const std::vector<std::string> addresses = PrepareOnBoth(*first, one, *second, two);
  first->Start(run_, addresses, {});
  second->Start(run_, addresses, {});
  std::vector<float> logits;
  for (HostListener* listener : {&one, &two}) {
    for (const auto& output : listener->Outputs(run_, kRanks)) {
      ASSERT_TRUE(output.ok()) << output.status();
      EXPECT_GT(output->stats.sent.total(), 0);
      if (output->logits.empty()) continue;
      EXPECT_TRUE(logits.empty()) << "two ranks have the last token";
      logits = output->logits;
    }
  }
  first->Release(run_);
  second->Release(run_);

  const auto engine = LoadEmbeddedEngine(
      {.model_path = options_.model_path, .ranks = 2 * kRanks, .peak_flops = 1e12, .threads = 2});
  ASSERT_TRUE(engine.ok()) << engine.status();
  const std::vector<uint32_t> prompt(kTokens, 7);
  const auto expected = RunPrefill(**engine, {prompt, {.tile = Tile{1, 2 * kRanks}}});
  ASSERT_TRUE(expected.ok()) << expected.status();
  ASSERT_EQ(logits.size(), expected->logits.size());
  for (size_t i = 0; i < logits.size(); ++i) EXPECT_NEAR(logits[i], expected->logits[i], 1e-4) << i;
}

TEST_F(RankHostTest, ComputesOnWhatIsRegistered) {
  RegisterPlatform(MakeToyPlatform());
  options_.device = "toy";
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  v1::Join offer;
  host->Describe(offer);
  EXPECT_EQ(offer.backend(), "toy/loops");
  EXPECT_EQ(offer.data_plane(), "gloo");
  ASSERT_EQ(offer.devices_size(), kRanks);
  EXPECT_EQ(offer.devices(0), "toy 0");
  EXPECT_EQ(offer.devices(1), "toy 1");
  host->Prepare(Part());
  RunWell(*host, listener, run_);
}

// Ranks of one host share the layers that pass: the same bits, with what they take in the offer.
TEST_F(RankHostTest, StreamsItsWeights) {
  std::vector<float> resident;
  for (const WeightMode mode : {WeightMode::kResident, WeightMode::kStreamed}) {
    options_.weights = mode;
    HostListener listener;
    const auto host = Load(listener);
    ASSERT_NE(host, nullptr);
    v1::Join offer;
    host->Describe(offer);
    const bool streams = mode == WeightMode::kStreamed;
    EXPECT_EQ(offer.weights().streamed(), streams);
    EXPECT_EQ(offer.weights().run_bytes() > 0, streams);
    EXPECT_EQ(offer.weights().loaded_bytes() > 0, !streams);
    EXPECT_EQ(offer.weights().layer_seconds() > 0, streams);
    for (int i = 0; i < 3; ++i) {
      host->Prepare(Part());
      host->Start(run_, listener.Addresses(run_), {});
      for (const auto& output : listener.Outputs(run_, kRanks)) {
        ASSERT_TRUE(output.ok()) << output.status();
        if (output->logits.empty()) continue;
        if (resident.empty()) resident = output->logits;
        EXPECT_EQ(output->logits, resident);
      }
      host->Release(run_);
    }
  }
}

// Hosts that share their weights, over connections of their own: the same bits, a part of the weights each.
// Then one of them is gone, and the rest share all of it.
void RankHostTest::TestSharing() {
  const int most = 3;
  std::vector<std::unique_ptr<HostListener>> listeners;
  std::vector<std::unique_ptr<RankHost>> hosts;
  std::map<int, std::vector<float>> expected;  // by hosts
  for (const WeightMode mode : {WeightMode::kResident, WeightMode::kSharded}) {
    options_.weights = mode;
    hosts.clear();
    listeners.clear();
    for (int i = 0; i < most; ++i) {
      listeners.push_back(std::make_unique<HostListener>());
      hosts.push_back(Load(*listeners.back()));
      ASSERT_NE(hosts.back(), nullptr);
    }
    const bool shares = mode == WeightMode::kSharded;
    v1::Join offer;
    hosts[0]->Describe(offer);
    EXPECT_EQ(offer.weights().sharded(), shares);
    EXPECT_EQ(offer.weight_layout() != 0, shares);
    EXPECT_GT(offer.weights().loaded_bytes(), 0u);
    if (shares) {
      EXPECT_GT(offer.weights().layer_bytes(), 0u);
    }
    int64_t all = 0;
    for (const int count : {most, most, 2}) {
      ++run_;
      const Plan plan = PlanOver(count * kRanks);
      const int head_seat = plan.SeatOf(plan.layout.RankOf(kTokens - 1));
      for (int i = 0; i < count; ++i) {
        --run_;
        WorkerMachine::RunPart part = Part(count * kRanks, i * kRanks);
        if (shares) part.weights = {.share = {.index = i, .of = count}, .head = head_seat / kRanks};
        hosts[i]->Prepare(std::move(part));
      }
      std::vector<std::string> addresses, of_weights;
      for (int i = 0; i < count; ++i) {
        std::vector<std::string> mine = listeners[i]->Addresses(run_);
        ASSERT_EQ(mine.size(), kRanks + (shares ? 1u : 0u));
        if (shares) of_weights.push_back(mine.back());
        addresses.insert(addresses.end(), mine.begin(), mine.begin() + kRanks);
      }
      addresses.insert(addresses.end(), of_weights.begin(), of_weights.end());
      for (int i = 0; i < count; ++i) hosts[i]->Start(run_, addresses, {});
      for (int i = 0; i < count; ++i) {
        int64_t gathered = 0;
        for (const auto& output : listeners[i]->Outputs(run_, kRanks)) {
          ASSERT_TRUE(output.ok()) << output.status();
          gathered += output->stats.sent[Traffic::kGather];
          if (output->logits.empty()) continue;
          if (expected[count].empty()) expected[count] = output->logits;
          EXPECT_EQ(output->logits, expected[count]) << count << " hosts";
        }
        if (!shares) {
          EXPECT_EQ(gathered, 0);
        }
      }
      for (int i = 0; i < count; ++i) hosts[i]->Release(run_);
      if (!shares) continue;
      // Another run's Prepare is behind the Release: what was gathered is gone.
      int64_t kept = 0;
      for (int i = 0; i < count; ++i) {
        hosts[i]->Stop(run_, "over");
        listeners[i]->Stopped(run_);
        kept += hosts[i]->shared_weights().bytes;
      }
      if (all == 0) all = kept;
      EXPECT_EQ(kept, all) << count << " hosts";
    }
  }
}

TEST_F(RankHostTest, SharesItsWeights) { TestSharing(); }

// Runs that gather a share and runs that read the files, in turn, give the same bits. A share stays until a
// run needs its room.
TEST_F(RankHostTest, SharesWhatItWouldStreamWhereARunSaysSo) {
  constexpr int64_t kMemoryBytes = 64 << 20;
  options_.weights = WeightMode::kStreamed;
  HostListener silent;
  v1::Join offer;
  Load(silent)->Describe(offer);
  EXPECT_FALSE(offer.has_shared_weights());  // nobody has said that it may
  options_.may_share = true;
  options_.memory_bytes = kMemoryBytes;
  constexpr int kHosts = 2;
  HostListener listeners[kHosts];
  std::vector<std::unique_ptr<RankHost>> hosts;
  for (HostListener& listener : listeners) {
    hosts.push_back(Load(listener));
    ASSERT_NE(hosts.back(), nullptr);
  }
  hosts[0]->Describe(offer);
  EXPECT_TRUE(offer.weights().streamed());
  EXPECT_TRUE(offer.shared_weights().sharded());
  EXPECT_NE(offer.weight_layout(), 0u);
  EXPECT_EQ(offer.weights().loaded_bytes(), 0u);
  EXPECT_GT(offer.shared_weights().loaded_bytes(), 0u);
  std::vector<float> expected;
  struct Case {
    bool shares;
    int64_t reserve_bytes;  // none: there is room beside a share
    bool keeps;             // a share, from then on
  };
  for (const auto& [shares, reserve_bytes, keeps] :
       {Case{false, 0, false}, Case{true, 0, true}, Case{false, 0, true}, Case{true, kMemoryBytes, true},
        Case{false, kMemoryBytes, false}, Case{true, 0, true}}) {
    ++run_;
    const Plan plan = PlanOver(kHosts * kRanks);
    const int head_seat = plan.SeatOf(plan.layout.RankOf(kTokens - 1));
    for (int i = 0; i < kHosts; ++i) {
      --run_;
      WorkerMachine::RunPart part = Part(kHosts * kRanks, i * kRanks);
      if (shares) part.weights = {.share = {.index = i, .of = kHosts}, .head = head_seat / kRanks};
      part.reserve_bytes = reserve_bytes;
      hosts[i]->Prepare(std::move(part));
    }
    std::vector<std::string> addresses, of_weights;
    for (HostListener& listener : listeners) {
      std::vector<std::string> mine = listener.Addresses(run_);
      ASSERT_EQ(mine.size(), kRanks + (shares ? 1u : 0u));
      if (shares) of_weights.push_back(mine.back());
      addresses.insert(addresses.end(), mine.begin(), mine.begin() + kRanks);
    }
    addresses.insert(addresses.end(), of_weights.begin(), of_weights.end());
    for (const auto& host : hosts) host->Start(run_, addresses, {});
    int64_t gathered = 0;
    for (int i = 0; i < kHosts; ++i) {
      for (const auto& output : listeners[i].Outputs(run_, kRanks)) {
        ASSERT_TRUE(output.ok()) << output.status();
        gathered += output->stats.sent[Traffic::kGather];
        if (output->logits.empty()) continue;
        if (expected.empty()) expected = output->logits;
        EXPECT_EQ(output->logits, expected);
      }
    }
    EXPECT_EQ(gathered > 0, shares);
    for (int i = 0; i < kHosts; ++i) {
      hosts[i]->Release(run_);
      hosts[i]->Stop(run_, "over");
      listeners[i].Stopped(run_);
      EXPECT_EQ(hosts[i]->shared_weights().bytes > 0, keeps);
    }
  }
}

// These travel as they lie in memory.
TEST_F(RankHostTest, SharesItsWeightsInFp8AndMxfp4) {
  for (const auto& [family, dtype] :
       {std::pair(ModelFamily::kQwen3, DType::kF8E4M3), std::pair(ModelFamily::kGptOss, DType::kF4E2M1)}) {
    SCOPED_TRACE(DTypeName(dtype));
    MakeTestModel(absl::StrCat("rank_host_", DTypeName(dtype)), dtype, family);
    shape_.dtype = DType::kBf16;
    TestSharing();
  }
}

TEST_F(RankHostTest, RefusesARunWhoseWorkersHoldWeightsOtherwise) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  WorkerMachine::RunPart part = Part();
  part.weights.share = {.index = 0, .of = 2};
  host->Prepare(std::move(part));
  const auto prepared = listener.Prepared(run_);
  EXPECT_TRUE(absl::IsInternal(prepared.status())) << prepared.status();
}

// A file that ends early fails the ranks, not the process.
TEST_F(RankHostTest, AFileThatShrinksFailsTheRun) {
  options_.weights = WeightMode::kStreamed;
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  const std::string file = options_.model_path + "/model.safetensors";
  std::filesystem::resize_file(file, std::filesystem::file_size(file) / 2);
  host->Prepare(Part());
  host->Start(run_, listener.Addresses(run_), {});
  const absl::Status ended = listener.Ended(run_, kRanks);
  EXPECT_TRUE(absl::IsDataLoss(ended)) << ended;
  EXPECT_NE(ended.message().find(file), std::string::npos) << ended;
  host->Stop(run_, "it failed");
  listener.Stopped(run_);
}

TEST_F(RankHostTest, StopsRanksThatWaitForAPeerAndServesTheNextRun) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  host->Prepare(Part(2 * kRanks));  // the other half never comes
  std::vector<std::string> addresses = listener.Addresses(run_);
  ASSERT_EQ(addresses.size(), static_cast<size_t>(kRanks));
  addresses.resize(2 * kRanks, addresses.back());
  host->Start(run_, addresses, {});
  host->Stop(run_, "no more ranks came");
  listener.Stopped(run_);
  EXPECT_TRUE(host->progress().empty());
  host->Prepare(Part());
  RunWell(*host, listener, run_);
}

TEST_F(RankHostTest, StopsARunThatIsPreparedOrUnknown) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  host->Stop(99, "it never came");
  listener.Stopped(99);
  host->Prepare(Part());
  listener.Addresses(run_);
  host->Stop(run_, "the request was cancelled");
  host->Start(run_, {"a", "b"}, {});  // late
  listener.Stopped(run_);
  host->Prepare(Part());
  RunWell(*host, listener, run_);
  WorkerMachine::RunPart again = Part();  // of a leader that was started again, and counts anew
  again.number = 99;
  host->Prepare(std::move(again));
  RunWell(*host, listener, 99);
}

TEST_F(RankHostTest, KeepsRunsApart) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  host->Prepare(Part());
  const uint64_t first = run_;
  host->Prepare(Part());
  const uint64_t second = run_;
  listener.Addresses(first);
  listener.Addresses(second);
  EXPECT_EQ(host->progress().size(), 2u);
  host->Stop(first, "the request was cancelled");
  listener.Stopped(first);
  RunWell(*host, listener, second);
}

// What stands still keeps what it has computed, and lets others run beside it.
TEST_F(RankHostTest, ARunGivesWayToAnotherAndGoesOnWithTheSameBits) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  const auto logits = [&](uint64_t run) {
    std::vector<float> of_last;
    for (const auto& output : listener.Outputs(run, kRanks)) {
      EXPECT_TRUE(output.ok()) << output.status();
      if (output.ok() && !output->logits.empty()) of_last = output->logits;
    }
    return of_last;
  };
  host->Prepare(Part());
  RunWell(*host, listener, run_);
  const std::vector<float> calm = logits(run_);
  ASSERT_FALSE(calm.empty());

  for (const bool at_once : {true, false}) {
    host->Prepare(Part());
    const uint64_t first = run_;
    const std::vector<std::string> addresses = listener.Addresses(first);
    if (at_once) host->Pause(first, 0);
    host->Start(first, addresses, {});
    if (!at_once) host->Pause(first, 0);  // wherever its ranks are
    host->Prepare(Part());
    RunWell(*host, listener, run_);
    EXPECT_EQ(logits(run_), calm);
    if (at_once) {
      EXPECT_EQ(listener.EndedRanks(first), 0u);
    }
    for (int i = 0; i < 100; ++i) i % 2 == 0 ? host->Resume(first) : host->Pause(first, 0);
    host->Resume(first);
    EXPECT_EQ(logits(first), calm);
    host->Release(first);
  }
}

// The ranks of one host stand still first, and those of the other wait for them.
TEST_F(RankHostTest, RanksNeedNotStandStillAtTheSamePlace) {
  HostListener one, two;
  const auto first = Load(one), second = Load(two);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  std::vector<std::vector<float>> answers;
  for (const bool paused : {false, true}) {
    const std::vector<std::string> addresses = PrepareOnBoth(*first, one, *second, two);
    if (paused) first->Pause(run_, 0);
    first->Start(run_, addresses, {});
    second->Start(run_, addresses, {});
    if (paused) {
      second->Pause(run_, 0);
      EXPECT_EQ(one.EndedRanks(run_) + two.EndedRanks(run_), 0u);
      second->Resume(run_);
      first->Resume(run_);
    }
    for (HostListener* listener : {&one, &two}) {
      for (const auto& output : listener->Outputs(run_, kRanks)) {
        ASSERT_TRUE(output.ok()) << output.status();
        if (!output->logits.empty()) answers.push_back(output->logits);
      }
    }
    first->Release(run_);
    second->Release(run_);
  }
  ASSERT_EQ(answers.size(), 2u);
  EXPECT_EQ(answers[0], answers[1]);
}

// A PauseAt waits behind what the host does, and its run may have gone on by then.
TEST_F(RankHostTest, APauseIsOverWithItsResume) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  host->Prepare(Part());
  const uint64_t run = run_;
  const std::vector<std::string> addresses = listener.Addresses(run);
  host->Pause(run, 7);
  host->Resume(run);
  host->PauseAt(run, 7, 0);
  host->Pause(run, 0);
  host->Prepare(Part());  // behind it
  listener.Addresses(run_);
  EXPECT_FALSE(listener.IsStill(run, 7));
  EXPECT_TRUE(listener.HasAnswered(run, 7));
  EXPECT_FALSE(listener.HasAnswered(run, 0)) << "nobody asks";
  host->Stop(run, "the request was cancelled");
  host->Stop(run_, "the request was cancelled");
  listener.Stopped(run_);
}

TEST_F(RankHostTest, StopsARunThatStandsStill) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  host->Pause(99, 0);  // unknown
  host->Prepare(Part());
  const std::vector<std::string> addresses = listener.Addresses(run_);
  host->Pause(run_, 0);
  host->Start(run_, addresses, {});
  host->Stop(run_, "the request was cancelled");
  listener.Stopped(run_);
  host->Resume(run_);
  host->Prepare(Part());
  RunWell(*host, listener, run_);
}

TEST_F(RankHostTest, SaysWhatItsRanksAreAt) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  host->Prepare(Part());
  const std::vector<std::string> addresses = listener.Addresses(run_);
  EXPECT_TRUE(host->progress().at(run_).empty()) << "nothing has started";
  host->Start(run_, addresses, {});
  EXPECT_TRUE(listener.Ended(run_, kRanks).ok());
  const std::vector<WorkerMachine::RankProgress> progress = host->progress().at(run_);
  ASSERT_EQ(progress.size(), static_cast<size_t>(kRanks));
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(progress[rank].rank, rank);
    EXPECT_EQ(progress[rank].layers_done, 2);
    EXPECT_GT(progress[rank].operations, 0u);
    EXPECT_FALSE(progress[rank].computing);
    EXPECT_TRUE(progress[rank].has_computed);
  }
  host->Release(run_);
}

TEST_F(RankHostTest, WhoReadsWeightsAndHasNoPeersYetHasNotComputed) {
  options_.weights = WeightMode::kStreamed;
  HostListener one, two;
  const auto first = Load(one), second = Load(two);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  const std::vector<std::string> addresses = PrepareOnBoth(*first, one, *second, two);
  second->Start(run_, addresses, {});
  const auto rank = [&] {
    const auto runs = second->progress();
    const auto run = runs.find(run_);
    return run == runs.end() || run->second.empty() ? WorkerMachine::RankProgress() : run->second.front();
  };
  const absl::Time begin = MonotonicNow();
  while (rank().operations == 0 && MonotonicNow() - begin < absl::Seconds(20)) std::this_thread::yield();
  EXPECT_GT(rank().operations, 0u) << "it reads";
  EXPECT_FALSE(rank().has_computed);
  first->Start(run_, addresses, {});
  EXPECT_TRUE(one.Ended(run_, kRanks).ok());
  EXPECT_TRUE(two.Ended(run_, kRanks).ok());
  EXPECT_TRUE(rank().has_computed);
  first->Release(run_);
  second->Release(run_);
}

// A run that ends frees what it holds under the eyes of who asks how far its ranks are.
TEST_F(RankHostTest, SaysWhatItsRanksAreAtWhileTheyEnd) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  std::atomic<bool> quit{false};
  std::thread reader([&] {
    while (!quit) host->progress();
  });
  for (int i = 0; i < 30; ++i) {
    host->Prepare(Part());
    host->Start(run_, listener.Addresses(run_), {});
    EXPECT_TRUE(listener.Ended(run_, kRanks).ok());
    host->Stop(run_, "enough");
    listener.Stopped(run_);
  }
  quit = true;
  reader.join();
  EXPECT_TRUE(host->progress().empty());
}

TEST_F(RankHostTest, RefusesARunThatNeedsMoreMemoryThanIsFree) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  WorkerMachine::RunPart part = Part();
  part.reserve_bytes = int64_t{1} << 50;
  host->Prepare(std::move(part));
  const absl::Status refused = listener.Prepared(run_).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  host->Stop(run_, "it was not prepared");
  listener.Stopped(run_);
  host->Prepare(Part());
  RunWell(*host, listener, run_);
}

int64_t VirtualBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t pages = 0;
  file >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

// The memory of a run is held from its Prepare on, lies spare once its ranks begin to take it, and goes back
// with the run.
TEST_F(RankHostTest, HoldsTheMemoryOfARunUntilItsRanksTakeIt) {
  constexpr int64_t kReserved = int64_t{1} << 30;
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  host->Prepare(Part());  // the threads and connections of a run come once
  RunWell(*host, listener, run_);
  const int64_t before = VirtualBytes();
  WorkerMachine::RunPart part = Part();
  part.reserve_bytes = kReserved;
  host->Prepare(std::move(part));
  const std::vector<std::string> addresses = listener.Addresses(run_);
  EXPECT_GE(VirtualBytes() - before, kReserved * 9 / 10);
  EXPECT_LE(VirtualBytes() - before, kReserved * 3 / 2) << "all ranks together";
  host->Start(run_, addresses, {});
  EXPECT_TRUE(listener.Ended(run_, kRanks).ok());
  // It lies spare for whatever the run allocates.
  EXPECT_GE(SpareMappings::spare_bytes(), static_cast<size_t>(kReserved / 2));
  EXPECT_LE(VirtualBytes() - before, kReserved * 3 / 2);
  host->Release(run_);
  EXPECT_TRUE(Eventually([&] { return VirtualBytes() - before <= kReserved / 2; }));
}

TEST_F(RankHostTest, APeerThatNeverAnswersEndsTheConnect) {
  HostListener one, two;
  const auto first = Load(one), second = Load(two);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  first->Prepare(Part(2 * kRanks));  // its ranks listen, and never start
  WorkerMachine::RunPart rest = Part(2 * kRanks, kRanks);
  rest.number = --run_;
  second->Prepare(std::move(rest));
  std::vector<std::string> addresses = one.Addresses(run_);
  for (const std::string& address : two.Addresses(run_)) addresses.push_back(address);
  const CapturedLog log;
  second->Start(run_, addresses, {});
  sockaddr_in port;  // of its first rank; the address is opaque to everybody else
  std::memcpy(&port, addresses.at(kRanks).data() + 40, sizeof(port));
  const int stranger = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(connect(stranger, reinterpret_cast<const sockaddr*>(&port), sizeof(port)), 0);
  const std::string junk(64, 'x');
  EXPECT_EQ(send(stranger, junk.data(), junk.size(), MSG_NOSIGNAL), std::ssize(junk));
  EXPECT_FALSE(two.Ended(run_, kRanks).ok());
  EXPECT_EQ(log.CountOf("refused 1 connections to the data port"), 1) << log.Text();
  close(stranger);
  for (RankHost* host : {first.get(), second.get()}) host->Stop(run_, "it failed");
  one.Stopped(run_);
  two.Stopped(run_);
}

// The thread of the host is held up by a run whose K and V have no room until some reader lets go.
TEST_F(RankHostTest, WhatIsToStopIsNeitherPreparedNorStarted) {
  options_.kv_memory_bytes = 1;
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  host->Prepare(Part());
  const uint64_t prepared = run_;
  const std::vector<std::string> addresses = listener.Addresses(prepared);
  WorkerMachine::RunPart without_room = Part();
  without_room.keep_kv = {.lease = "lease", .tenant = "", .lasts = absl::Hours(1)};
  host->Prepare(std::move(without_room));
  const uint64_t waits = run_;
  host->Prepare(Part());
  const uint64_t next = run_;
  host->Start(prepared, addresses, {});
  for (const uint64_t run : {prepared, next}) host->Stop(run, "the request was cancelled");
  EXPECT_TRUE(absl::IsResourceExhausted(listener.Prepared(waits).status()));
  EXPECT_TRUE(absl::IsCancelled(listener.Prepared(next).status()));
  listener.Stopped(prepared);
  EXPECT_EQ(listener.EndedRanks(prepared), 0u) << "its ranks were never started";
  listener.Stopped(next);
}

TEST_F(RankHostTest, KeepsKvOfFinishedRunsForAsLongAsTheirLeases) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  const auto begin = [&](absl::Duration lasts) {
    WorkerMachine::RunPart part = Part();
    part.keep_kv = {.lease = "lease", .tenant = "t", .lasts = lasts};
    host->Prepare(std::move(part));
    listener.Addresses(run_);
    EXPECT_EQ(host->kv().counts().leases, 1);
    EXPECT_GT(host->kv().counts().bytes, 0);
  };
  begin(absl::Hours(1));
  host->Stop(run_, "the request was cancelled");
  listener.Stopped(run_);
  EXPECT_EQ(host->kv().counts().leases, 0);
  EXPECT_EQ(host->kv().counts().bytes, 0);

  begin(absl::Milliseconds(20));
  RunWell(*host, listener, run_);
  const absl::Time deadline = MonotonicNow() + absl::Seconds(20);
  while (host->kv().counts().leases > 0 && MonotonicNow() < deadline) host->kv().EndLapsed();
  EXPECT_EQ(host->kv().counts().leases, 0) << "its time counts from the end of the run";
}

// The leader has given up what the reader still holds.
TEST_F(RankHostTest, ARunWaitsForTheRoomThatAReaderLetsGo) {
  HostListener listener;
  auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  const auto prepare = [&](const std::string& lease) {
    WorkerMachine::RunPart part = Part();
    part.keep_kv = {.lease = lease, .tenant = "t", .lasts = absl::Hours(1), .cache = true};
    host->Prepare(std::move(part));
  };
  prepare("a");
  listener.Addresses(run_);
  options_.kv_memory_bytes = host->kv().counts().bytes * 3 / 2;
  host.reset();
  host = Load(listener);
  ASSERT_NE(host, nullptr);
  prepare("a");
  RunWell(*host, listener, run_);
  absl::StatusOr<std::shared_ptr<const KvSlabs>> reads;
  ASSERT_TRUE(Eventually([&] {
    reads = host->kv().PrefixOf({{.run = run_, .tokens = kTokens}});
    return reads.ok();
  })) << reads.status();
  host->EndKv("a");
  host->EndKvRun(run_);
  ASSERT_TRUE(Eventually([&] { return host->kv().counts().leases == 0; }));
  ASSERT_GT(host->kv().counts().bytes, 0) << "whoever reads holds nothing";
  prepare("b");
  absl::SleepFor(absl::Milliseconds(50));  // the run finds no room
  *reads = nullptr;
  const auto prepared = listener.Prepared(run_);
  EXPECT_TRUE(prepared.ok()) << prepared.status();
}

// What a leader gives up right after the run is gone, whatever the host has to do before.
TEST_F(RankHostTest, KvThatIsGivenUpAtOnceIsNotKept) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  WorkerMachine::RunPart part = Part();
  part.keep_kv = {.lease = "", .tenant = "t", .lasts = absl::Hours(1), .cache = true};
  host->Prepare(std::move(part));
  const uint64_t run = run_;
  host->Start(run, listener.Addresses(run), {});
  EXPECT_TRUE(listener.Ended(run, kRanks).ok()) << listener.Ended(run, kRanks);
  EXPECT_GT(host->kv().counts().bytes, 0);
  for (int i = 0; i < 5; ++i) host->Prepare(Part());
  host->Release(run);
  host->EndKvRun(run);
  host->Prepare(Part());
  listener.Addresses(run_);  // behind all of it
  EXPECT_EQ(host->kv().counts().bytes, 0);
}

// The end of a lease waits behind what comes before it.
TEST_F(RankHostTest, KvOfALeaseThatEndsAtOnceIsNotKept) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  for (int i = 0; i < 5; ++i) host->Prepare(Part());
  WorkerMachine::RunPart part = Part();
  part.keep_kv = {.lease = "lease", .tenant = "t", .lasts = absl::Hours(1)};
  host->Prepare(std::move(part));
  host->EndKv("lease");
  host->Prepare(Part());
  listener.Addresses(run_);  // behind all of it
  EXPECT_EQ(host->kv().counts().leases, 0);
}

// Nor is what it was told to prepare before a leader that knows of nothing let it in.
TEST_F(RankHostTest, KvOfAnEarlierLeaderIsNotKept) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  for (int i = 0; i < 5; ++i) host->Prepare(Part());
  WorkerMachine::RunPart part = Part();
  part.keep_kv = {.lease = "", .tenant = "t", .lasts = absl::Hours(1), .cache = true};
  host->Prepare(std::move(part));
  host->EndAllKv();
  const uint64_t run = run_;
  host->Start(run, listener.Addresses(run), {});
  EXPECT_TRUE(listener.Ended(run, kRanks).ok()) << listener.Ended(run, kRanks);
  host->Release(run);
  host->Prepare(Part());
  listener.Addresses(run_);  // behind all of it
  EXPECT_EQ(host->kv().counts().bytes, 0);
}

// Seconds of a rank are without those that it stood still.
TEST_F(RankHostTest, PausesAreNoSecondsOfTheRanks) {
  HostListener listener;
  const auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  // Seconds that were not since the resume, of an attempt in which the machine did not stand still.
  constexpr double kMost = 0.2;
  double beyond = kMost;
  for (int attempt = 0; attempt < 5 && beyond >= kMost; ++attempt) {
    host->Prepare(Part());
    const uint64_t paused = run_;
    const std::vector<std::string> addresses = listener.Addresses(paused);
    host->Pause(paused, 0);
    host->Start(paused, addresses, {});
    const absl::Time begin = MonotonicNow();
    while (MonotonicNow() < begin + absl::Milliseconds(400)) {
      host->Prepare(Part());
      RunWell(*host, listener, run_);
    }
    const absl::Time resumed = MonotonicNow();
    host->Resume(paused);
    beyond = 0;
    for (const auto& output : listener.Outputs(paused, kRanks)) {
      ASSERT_TRUE(output.ok()) << output.status();
      const double since = absl::ToDoubleSeconds(MonotonicNow() - resumed);
      beyond = std::max(beyond, output->stats.total_seconds - since);
    }
    host->Release(paused);
  }
  EXPECT_LT(beyond, kMost);
}

TEST_F(RankHostTest, EndsWithARunUnderWay) {
  HostListener listener;
  auto host = Load(listener);
  ASSERT_NE(host, nullptr);
  host->Prepare(Part(2 * kRanks));
  std::vector<std::string> addresses = listener.Addresses(run_);
  addresses.resize(2 * kRanks, addresses.back());
  host->Start(run_, addresses, {});
  host.reset();
}

}  // namespace
}  // namespace meshfill
