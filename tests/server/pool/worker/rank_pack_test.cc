// Runs that share a pass of a worker's rank: each has the bits of a run of its own there, they stand still
// together, and what ends one of them ends all.
#include "server/pool/worker/rank_pack.h"

#include <atomic>
#include <cmath>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "engine/platforms.h"
#include "kernels/monotonic_time.h"
#include "tests/engine/devices/toy/toy_platform.h"
#include "tests/engine/random_seed.h"
#include "tests/server/eventually.h"
#include "tests/server/pool/worker/rank_host_fixture.h"

namespace meshfill {
namespace {

class RankPackTest : public RankHostFixture {
 protected:
  void SetUp() override {
    static const bool registered = [] {
      RegisterPlatform(MakeToyPlatform());
      return true;
    }();
    ASSERT_TRUE(registered);
    MakeTestModel("rank_pack_model", DType::kF32);
    options_.device = "toy";  // its rows are independent
    options_.memory_bytes = 1 << 28;
    Load();
  }
  void Load() {
    auto host = RankHost::Load(options_, listener_);
    ASSERT_TRUE(host.ok()) << host.status();
    host_ = *std::move(host);
  }

  std::vector<uint32_t> RandomPrompt(int64_t tokens) {
    std::vector<uint32_t> prompt(static_cast<size_t>(tokens));
    for (uint32_t& id : prompt) id = Draw<uint32_t>(random_, 0, 99);
    return prompt;
  }
  // A run of its own on that rank of the host; `runs` above 0: so many share the pass of that number.
  uint64_t Prepare(const std::vector<uint32_t>& prompt, int local_rank, uint64_t pack = 0, int runs = 0) {
    const auto choice = MakePlan(shape_, PoolSpeed{}, {.tokens = std::ssize(prompt), .ranks = 1});
    EXPECT_TRUE(choice.ok()) << choice.status();
    WorkerMachine::RunPart part{.number = ++run_,
                                .epoch = epoch_,
                                .plan = choice->plan,
                                .reserve_bytes = 1000,
                                .local_rank = local_rank,
                                .shards = {prompt}};
    if (pack > 0) part.pack = {.number = pack, .runs = runs};
    host_->Prepare(std::move(part));
    return run_;
  }
  void Start(uint64_t run) { host_->Start(run, listener_.Addresses(run), {}); }
  std::vector<float> LogitsAlone(const std::vector<uint32_t>& prompt, int local_rank) {
    const uint64_t run = Prepare(prompt, local_rank);
    Start(run);
    const auto outputs = listener_.Outputs(run, 1);
    host_->Release(run);
    EXPECT_TRUE(outputs[0].ok()) << outputs[0].status();
    return outputs[0].ok() ? outputs[0]->logits : std::vector<float>();
  }
  void ExpectBits(uint64_t run, const std::vector<uint32_t>& prompt, int local_rank) {
    const auto outputs = listener_.Outputs(run, 1);
    ASSERT_TRUE(outputs[0].ok()) << outputs[0].status();
    EXPECT_EQ(outputs[0]->logits, LogitsAlone(prompt, local_rank)) << "run " << run;
  }
  uint64_t operations(uint64_t run) {
    const WorkerMachine::ProgressOfRuns progress = host_->progress();
    const auto of = progress.find(run);
    return of == progress.end() || of->second.empty() ? 0 : of->second.front().operations;
  }

  std::mt19937_64 random_{TestSeed()};
  HostListener listener_;
  std::unique_ptr<RankHost> host_;
};

TEST_F(RankPackTest, OffersIt) {
  v1::Join offer;
  host_->Describe(offer);
  EXPECT_TRUE(offer.rows_independent());
}

// On both ranks at once, also of weights that stream.
TEST_F(RankPackTest, EachHasTheBitsOfARunOfItsOwn) {
  for (const WeightMode mode : {WeightMode::kResident, WeightMode::kStreamed}) {
    host_.reset();
    options_.weights = mode;
    Load();
    for (uint64_t pack = 1; pack <= 4; ++pack) {
      std::vector<std::vector<uint32_t>> prompts;
      std::vector<uint64_t> runs;
      const int on_rank[kRanks] = {Draw(random_, 1, 5), Draw(random_, 1, 3)};
      for (int local_rank = 0; local_rank < kRanks; ++local_rank) {
        for (int i = 0; i < on_rank[local_rank]; ++i) {
          prompts.push_back(RandomPrompt(Draw<int64_t>(random_, 1, 60)));
          runs.push_back(Prepare(prompts.back(), local_rank, pack, on_rank[local_rank]));
        }
      }
      for (const uint64_t run : runs) Start(run);
      std::vector<double> seconds;
      for (size_t i = 0; i < runs.size(); ++i) {
        const int local_rank = static_cast<int>(i) < on_rank[0] ? 0 : 1;
        ExpectBits(runs[i], prompts[i], local_rank);
        EXPECT_EQ(listener_.Outputs(runs[i], 1)[0]->stats.sent.total(), 0);
        seconds.push_back(listener_.Outputs(runs[i], 1)[0]->stats.total_seconds /
                          static_cast<double>(prompts[i].size()));
      }
      for (int i = 1; i < on_rank[0]; ++i) {
        EXPECT_NEAR(seconds[static_cast<size_t>(i)] / seconds[0], 1, 1e-9) << "a share by tokens";
      }
      for (const uint64_t run : runs) host_->Release(run);
    }
  }
}

TEST_F(RankPackTest, FollowsWhatIsCached) {
  constexpr int64_t kCached = 48;
  host_.reset();
  options_.kv_memory_bytes = 1 << 24;
  Load();
  const auto prepare = [&](const std::vector<uint32_t>& prompt, std::vector<HeldKv::RunTokens> prefix,
                           int pack_runs = 0) {
    const int64_t cached = prefix.empty() ? 0 : kCached;
    const auto choice =
        MakePlan(shape_, PoolSpeed{},
                 {.tokens = std::ssize(prompt), .cached_tokens = cached, .ranks = 1, .stripe = 16});
    EXPECT_TRUE(choice.ok()) << choice.status();
    WorkerMachine::RunPart part{.number = ++run_,
                                .epoch = epoch_,
                                .plan = choice->plan,
                                .reserve_bytes = 1000,
                                .prefix = std::move(prefix),
                                .local_rank = 0,
                                .shards = {prompt}};
    if (cached == 0) part.keep_kv = {.lease = "", .tenant = "", .lasts = absl::Hours(1), .cache = true};
    if (pack_runs > 0) part.pack = {.number = 7, .runs = pack_runs};
    host_->Prepare(std::move(part));
    return run_;
  };
  const auto logits = [&](uint64_t run) {
    const auto output = listener_.Outputs(run, 1)[0];
    EXPECT_TRUE(output.ok()) << output.status();
    host_->Release(run);
    return output.ok() ? output->logits : std::vector<float>();
  };
  const uint64_t before = prepare(RandomPrompt(kCached), {});
  Start(before);
  logits(before);
  const std::vector<uint32_t> prompts[] = {RandomPrompt(20), RandomPrompt(30)};
  std::vector<std::vector<float>> alone;
  for (const auto& prompt : prompts) {
    const uint64_t run = prepare(prompt, {{.run = before, .tokens = kCached}});
    Start(run);
    alone.push_back(logits(run));
  }
  const uint64_t with_prefix = prepare(prompts[0], {{.run = before, .tokens = kCached}}, 2);
  const uint64_t also = prepare(prompts[1], {{.run = before, .tokens = kCached}}, 2);
  Start(with_prefix);
  Start(also);
  EXPECT_EQ(logits(with_prefix), alone[0]);
  EXPECT_EQ(logits(also), alone[1]);
}

// Which prompt's tokens an expert had is not known: those of a pass count once.
TEST_F(RankPackTest, CountsTheTokensOfExpertsOnce) {
  host_.reset();
  MakeTestModel("rank_pack_experts", DType::kF32, ModelFamily::kQwen3Moe);
  Load();
  const std::vector<uint32_t> prompts[] = {RandomPrompt(20), RandomPrompt(30)};
  const auto count = [&](const std::vector<uint64_t>& runs) {
    int64_t tokens = 0;
    for (const uint64_t run : runs) Start(run);
    for (const uint64_t run : runs) {
      const auto output = listener_.Outputs(run, 1)[0];
      EXPECT_TRUE(output.ok()) << output.status();
      if (!output.ok()) continue;
      for (const int64_t of_expert : output->stats.tokens_per_expert) tokens += of_expert;
      host_->Release(run);
    }
    return tokens;
  };
  const int64_t alone = count({Prepare(prompts[0], 0)}) + count({Prepare(prompts[1], 0)});
  EXPECT_GT(alone, 0);
  EXPECT_EQ(count({Prepare(prompts[0], 0, 7, 2), Prepare(prompts[1], 0, 7, 2)}), alone);
}

TEST_F(RankPackTest, BeginsWhenAllHaveCome) {
  const std::vector<uint32_t> prompt = RandomPrompt(20);
  const uint64_t first = Prepare(prompt, 1, 7, 2), second = Prepare(prompt, 1, 7, 2);
  Start(first);
  ASSERT_TRUE(Eventually([&] { return !host_->progress()[first].empty(); }));
  EXPECT_EQ(listener_.EndedRanks(first), 0u);
  EXPECT_EQ(operations(first), 0u);
  EXPECT_FALSE(host_->progress()[first].front().has_computed);
  Start(second);
  ExpectBits(first, prompt, 1);
  ExpectBits(second, prompt, 1);
  EXPECT_EQ(host_->progress()[first].front().layers_done, shape_.layers);
  EXPECT_EQ(host_->progress()[second].front().layers_done, shape_.layers);
  EXPECT_GT(operations(first), 0u);
  EXPECT_EQ(operations(first), operations(second));
  host_->Release(first);
  host_->Release(second);
}

TEST_F(RankPackTest, StandsStillWhileOneOfItDoes) {
  const std::vector<uint32_t> prompt = RandomPrompt(60);
  std::vector<uint64_t> runs;
  for (int i = 0; i < 3; ++i) runs.push_back(Prepare(prompt, 0, 7, 3));
  listener_.Addresses(runs.back());
  host_->Pause(runs[0], 0);
  host_->Pause(runs[1], 0);
  for (const uint64_t run : runs) Start(run);
  host_->Resume(runs[0]);
  for (int i = 0; i < 3; ++i) LogitsAlone(prompt, 1);  // what does not stand still ends meanwhile
  for (const uint64_t run : runs) EXPECT_EQ(listener_.EndedRanks(run), 0u);
  host_->Resume(runs[1]);
  for (const uint64_t run : runs) {
    ExpectBits(run, prompt, 0);
    host_->Release(run);
  }
}

// Whether the pass stands still before it begins, or from then on.
TEST_F(RankPackTest, CountsNoPause) {
  constexpr absl::Duration kPause = absl::Milliseconds(300);
  const std::vector<uint32_t> prompt = RandomPrompt(20);
  for (const bool begun : {false, true}) {
    const uint64_t pack = run_ + 1;
    const uint64_t first = Prepare(prompt, 0, pack, 2), second = Prepare(prompt, 0, pack, 2);
    listener_.Addresses(second);
    Start(first);
    host_->Pause(first, 0);
    absl::Time begin = MonotonicNow();
    if (begun) Start(second);
    for (const absl::Time end = begin + kPause; MonotonicNow() < end;) LogitsAlone(prompt, 1);
    const absl::Duration paused = begun ? kPause : absl::ZeroDuration();
    if (!begun) begin = MonotonicNow();
    host_->Resume(first);
    if (!begun) Start(second);
    double seconds = 0;
    for (const uint64_t run : {first, second}) {
      seconds += listener_.Outputs(run, 1)[0]->stats.total_seconds;
      host_->Release(run);
    }
    EXPECT_GT(seconds, 0);
    EXPECT_LT(absl::Seconds(seconds), MonotonicNow() - begin - paused);
  }
}

// Before the others have come, and while all are computed.
TEST_F(RankPackTest, WhatEndsOneEndsAll) {
  const std::vector<uint32_t> prompt = RandomPrompt(60);
  for (const bool computes : {false, true}) {
    const uint64_t pack = run_ + 1;
    std::vector<uint64_t> runs;
    for (int i = 0; i < 3; ++i) runs.push_back(Prepare(prompt, 0, pack, 3));
    listener_.Addresses(runs.back());
    host_->Pause(runs[0], 0);
    Start(runs[0]);
    Start(runs[1]);
    ASSERT_TRUE(Eventually([&] { return !host_->progress()[runs[1]].empty(); }));
    if (computes) {
      Start(runs[2]);
      ASSERT_TRUE(Eventually([&] { return operations(runs[0]) > 0; }));
    }
    host_->Stop(runs[0], "somebody left");
    const absl::Status ended = listener_.Ended(runs[1], 1);
    EXPECT_TRUE(absl::IsAborted(ended)) << ended;
    // Who waits for a pass that computes stays until it has ended: it uses its prompt.
    EXPECT_EQ(ended.message(), computes ? "the pass that it shares with 2 other prompts failed: somebody left"
                                        : "somebody left");
    if (!computes) Start(runs[2]);  // too late
    const absl::Status last = listener_.Ended(runs[2], 1);
    EXPECT_TRUE(absl::IsAborted(last)) << last;
    if (!computes) EXPECT_EQ(last.message(), "somebody left");
    for (const uint64_t run : {runs[1], runs[2]}) host_->Stop(run, "its pass is over");
    for (const uint64_t run : runs) listener_.Stopped(run);
    const uint64_t next = Prepare(prompt, 0, pack, 1);
    Start(next);
    ExpectBits(next, prompt, 0);
  }
}

TEST_F(RankPackTest, WhoWaitsStaysUntilThePassHasEnded) {
  const auto pool = LoadEmbeddedPool(
      {.model_path = options_.model_path, .ranks = kRanks, .device = "toy", .peak_flops = 1e12});
  ASSERT_TRUE(pool.ok()) << pool.status();
  const std::vector<uint32_t> ids = RandomPrompt(20);
  const auto choice = MakePlan(shape_, PoolSpeed{}, {.tokens = std::ssize(ids), .ranks = 1});
  ASSERT_TRUE(choice.ok()) << choice.status();
  const RankPrompt prompt = {.plan = choice->plan, .ids = ids};
  RankPack pack(*pool, /*rank=*/0, /*runs=*/2);
  std::atomic<int> left{0};
  // One of the two waits, and the other's thread computes both.
  const auto compute = [&] {
    const auto output = pack.Compute(prompt, [&](int) {
      pack.Abort(absl::AbortedError("somebody left"));
      for (int i = 0; i < 3; ++i) {  // meanwhile
        EXPECT_TRUE(RankPack(*pool, /*rank=*/1, /*runs=*/1).Compute(prompt, [](int) {}).ok());
      }
      EXPECT_EQ(left, 0);
    });
    ++left;
    EXPECT_EQ(output.status().message(),
              "the pass that it shares with 1 other prompts failed: somebody left");
  };
  std::thread one(compute), other(compute);
  one.join();
  other.join();
}

// The last of them comes to a pass that is over: it stops as one does that runs.
TEST_F(RankPackTest, StopsWhatHasNotStarted) {
  const std::vector<uint32_t> prompt = RandomPrompt(10);
  const uint64_t first = Prepare(prompt, 0, 7, 2), second = Prepare(prompt, 0, 7, 2);
  listener_.Addresses(second);
  host_->Stop(second, "it was cancelled");
  listener_.Stopped(second);
  Start(first);
  EXPECT_TRUE(absl::IsAborted(listener_.Ended(first, 1)));
  host_->Stop(first, "its pass is over");
  listener_.Stopped(first);
  LogitsAlone(prompt, 0);
}

// Those that come late are of no pass.
TEST_F(RankPackTest, RefusesMoreRunsThanItIsOf) {
  const std::vector<uint32_t> prompt = RandomPrompt(60);
  const uint64_t first = Prepare(prompt, 0, 7, 1), late = Prepare(prompt, 0, 7, 1);
  listener_.Addresses(late);
  host_->Pause(first, 0);
  Start(first);
  ASSERT_TRUE(Eventually([&] { return operations(first) > 0; }));
  Start(late);
  EXPECT_TRUE(absl::IsInternal(listener_.Ended(late, 1))) << "while it computes";
  host_->Resume(first);
  ExpectBits(first, prompt, 0);
}

// A leader that was started again counts anew.
TEST_F(RankPackTest, IsOfOneEpoch) {
  const std::vector<uint32_t> prompt = RandomPrompt(10);
  const uint64_t of_old = Prepare(prompt, 0, 7, 2);
  ++epoch_;
  const uint64_t first = Prepare(prompt, 0, 7, 3);
  listener_.Addresses(of_old);
  listener_.Addresses(first);
}

TEST_F(RankPackTest, RefusesAnotherNumberOfRuns) {
  const std::vector<uint32_t> prompt = RandomPrompt(10);
  const uint64_t first = Prepare(prompt, 0, 7, 2), wrong = Prepare(prompt, 0, 7, 3);
  listener_.Addresses(first);
  const absl::Status refused = listener_.Prepared(wrong).status();
  EXPECT_TRUE(absl::IsInternal(refused)) << refused;
  EXPECT_EQ(refused.message(), "the leader lets 3 runs share pass 7, and said 2 before");
  host_->Stop(wrong, "");
  const uint64_t fewer = Prepare(prompt, 0, 7, 1);
  EXPECT_TRUE(absl::IsInternal(listener_.Prepared(fewer).status())) << listener_.Prepared(fewer).status();
  host_->Stop(fewer, "");
  const uint64_t other_rank = Prepare(prompt, 1, 7, 1), second = Prepare(prompt, 0, 7, 2);
  for (const uint64_t run : {first, other_rank, second}) Start(run);
  for (const uint64_t run : {first, second}) ExpectBits(run, prompt, 0);
  ExpectBits(other_rank, prompt, 1);
}

}  // namespace
}  // namespace meshfill
