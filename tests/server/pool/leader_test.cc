// The leader's words and times, event by event: who may join a pool, and whose words count. What it does when
// everything fails at once is pool_simulation_test's.
#include "server/pool/leader.h"

#include <functional>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/comm/gloo/gloo_rendezvous.h"
#include "tests/server/pool/leader_fixture.h"

namespace meshfill {
namespace {

using LeaderTest = LeaderFixture;

TEST_F(LeaderTest, RefusesWhatDoesNotFitAndSaysWhy) {
  ASSERT_EQ(Join(1, Offer("a")), "");
  auto refusal = [&, connection = Leader::Connection{10}](auto change) mutable {
    v1::Join offer = Offer("b");
    change(offer);
    const std::string reason = Join(++connection, offer);
    EXPECT_EQ(closed_.back(), connection);
    return reason;
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(refusal([](v1::Join& offer) { offer.set_protocol(kControlProtocol + 1); }),
                  absl::StrCat("protocol ", kControlProtocol + 1).c_str()));
  EXPECT_TRUE(has(refusal([](v1::Join& offer) { offer.set_build("b2"); }), "build is b2"));
  EXPECT_TRUE(
      has(refusal([](v1::Join& offer) { offer.mutable_model()->set_config_hash(9); }), "config.json"));
  EXPECT_TRUE(has(refusal([](v1::Join& offer) { offer.mutable_model()->set_weights_hash(9); }), "weights"));
  EXPECT_TRUE(has(refusal([](v1::Join& offer) { offer.mutable_model()->set_dtype("bf16"); }), "bf16"));
  EXPECT_TRUE(has(refusal([](v1::Join& offer) { offer.set_encrypt(true); }),
                  "encrypts its data plane, this pool does not: give both the same pool.encrypt"));
  EXPECT_TRUE(has(refusal([](v1::Join& offer) { offer.set_name(""); }), "name"));
  EXPECT_TRUE(has(refusal([](v1::Join& offer) { offer.set_ranks(0); }), "ranks"));
  EXPECT_TRUE(has(refusal([](v1::Join& offer) { offer.set_ranks(65); }), "ranks"));
  EXPECT_TRUE(has(refusal([](v1::Join& offer) { offer.clear_speed(); }), "fast"));
  EXPECT_TRUE(has(refusal([](v1::Join& offer) { offer.set_name("a"); }), "named a is in the pool"));
  const std::string endless(1 << 20, 'x');
  EXPECT_TRUE(has(refusal([&](v1::Join& offer) { offer.set_host(endless); }), "256 bytes"));
  EXPECT_TRUE(has(refusal([&](v1::Join& offer) { offer.set_backend(endless); }), "256 bytes"));
  EXPECT_TRUE(has(refusal([&](v1::Join& offer) { offer.add_devices(endless); }), "256 bytes"));
  EXPECT_TRUE(has(refusal([](v1::Join& offer) { offer.set_memory_bytes(UINT64_MAX); }), "as no machine has"));
  EXPECT_TRUE(has(refusal([](v1::Join& offer) { offer.set_memory_bytes(1); }), "in which no prompt runs"));
  EXPECT_TRUE(
      has(refusal([](v1::Join& offer) { offer.set_kv_memory_bytes(UINT64_MAX); }), "as no machine has"));
  EXPECT_TRUE(has(refusal([](v1::Join& offer) { offer.mutable_weights()->set_run_bytes(UINT64_MAX); }),
                  "what its weights take"));
  EXPECT_TRUE(has(refusal([](v1::Join& offer) { offer.mutable_weights()->set_layer_seconds(-1); }),
                  "what its weights take"));
  EXPECT_TRUE(has(refusal([](v1::Join& offer) { offer.mutable_weights()->set_head_seconds(1e300); }),
                  "as on no machine"));
  EXPECT_TRUE(has(refusal([](v1::Join& offer) { offer.mutable_speed()->set_gemm_flops_per_second(1e-300); }),
                  "gemm_flops_per_second is 1e-300"));
  EXPECT_TRUE(has(refusal([](v1::Join& offer) { offer.mutable_speed()->set_start_seconds(1e300); }),
                  "start_seconds is 1e+300"));
  for (const double flops :
       {-1.0, 1e300, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_TRUE(has(refusal([&](v1::Join& offer) { offer.set_peak_flops(flops); }), "as no machine has"))
        << flops;
  }
  EXPECT_TRUE(sent_[21].back().refused().retry()) << "the other one may be about to go";
  EXPECT_FALSE(sent_[11].back().refused().retry());
  EXPECT_EQ(leader_.capacity().ranks, 1);
  EXPECT_EQ(leader_.counters().refusals, 26u);
}

TEST_F(LeaderTest, WorkersReachEachOther) {
  v1::Join cpu = Offer("a"), other = Offer("b"), gpu = Offer("c");
  cpu.set_backend("cpu/avx2");
  other.set_backend("cpu/avx512_bf16");
  gpu.set_backend("cuda/sm90");
  for (v1::Join* const offer : {&cpu, &other}) offer->set_data_plane("gloo");
  gpu.set_data_plane("nccl");
  EXPECT_EQ(Join(1, cpu), "");
  EXPECT_EQ(Join(2, other), "");
  EXPECT_NE(Join(3, gpu).find("on cuda/sm90, those that are there on cpu/avx2"), std::string::npos);
  EXPECT_TRUE(sent_[3].back().refused().retry()) << "the others may go";
  leader_.OnDisconnected(1, now_);
  leader_.OnDisconnected(2, now_);
  EXPECT_EQ(Join(4, gpu), "");
}

TEST_F(LeaderTest, AWorkerWithABadDataAddressIsKeptOut) {
  const auto offer = [](const std::string& name) {
    v1::Join offer = Offer(name);
    offer.set_data_plane("gloo");
    return offer;
  };
  const auto address = [this](int rank, uint64_t run, bool encrypt) {
    const auto rendezvous = GlooRendezvous::Listen({.listen = "127.0.0.1",
                                                    .rank = rank,
                                                    .ranks = 2,
                                                    .run = DataPlaneRun(leader_.epoch(), run, Traffic::kQ),
                                                    .encrypt = encrypt});
    EXPECT_TRUE(rendezvous.ok()) << rendezvous.status();
    return (*rendezvous)->address();
  };
  using Bad = std::function<std::string(int rank, uint64_t run)>;
  const std::vector<std::pair<Bad, std::string>> bad = {
      {[](int, uint64_t) { return ""; }, "is none"},
      {[&](int rank, uint64_t run) { return address(rank, run, false) + "x"; }, "is none"},
      {[&](int rank, uint64_t run) { return std::string(address(rank, run, false).size(), 'x'); },
       "is none of this version"},
      {[&](int rank, uint64_t run) { return address(rank, run + 1, false); }, "is of run"},
      {[&](int rank, uint64_t run) { return address(rank + 1, run, false); }, "is of rank"},
      {[&](int rank, uint64_t run) { return address(rank, run, true); }, "is of a rank that encrypts"}};
  ASSERT_EQ(Join(1, offer("a")), "");
  Leader::Connection connection = 1;
  for (const auto& [bad_address, reason] : bad) {
    SCOPED_TRACE(reason);
    const std::string name = absl::StrCat("b", connection);
    ASSERT_EQ(Join(++connection, offer(name)), "");
    answers_.clear();
    Submit(std::vector<uint32_t>(200, 1));
    const auto prepare = [&](Leader::Connection of, const Bad& make_address) {
      const v1::Prepare sent = sent_[of].back().has_prepare() ? sent_[of].back().prepare()
                                                              : sent_[of][sent_[of].size() - 2].prepare();
      run_ = sent.run();
      const auto plan = FromRunPlan(sent.plan());
      ASSERT_TRUE(plan.ok()) << plan.status();
      const int seat = static_cast<int>(sent.first_rank());
      v1::WorkerMessage message = OfRun();
      message.mutable_prepared()->set_run(run_);
      message.mutable_prepared()->add_addresses(make_address(plan->RankAt(seat), run_));
      message.mutable_prepared()->set_hash(RunHash(
          *plan, seat, {{plan->layout.Deal(plan->RankAt(seat), std::span<const uint32_t>(tokens_))}}));
      Say(of, message);
    };
    const Bad good = [&](int rank, uint64_t run) { return address(rank, run, false); };
    prepare(connection, bad_address);
    EXPECT_EQ(closed_.back(), connection);
    EXPECT_NE(log_[log_.size() - 2].find(reason), std::string::npos) << log_[log_.size() - 2];
    Stopped(1);
    prepare(1, good);  // alone
    RankDone(1, 0, kVocab);
    ASSERT_EQ(answers_.size(), 1u);
    EXPECT_TRUE(answers_[0].ok()) << answers_[0].status();
    EXPECT_NE(Join(++connection, offer(name)), "");
    EXPECT_TRUE(sent_[connection].back().refused().retry());
  }
}

TEST_F(LeaderTest, APoolIsFullOnceItHasAsManyRanksAsAPlan) {
  Leader::Connection connection = 0;
  for (int ranks = 0; ranks < kMaxPlanRanks; ranks += 64) {
    ++connection;
    ASSERT_EQ(Join(connection, Offer(absl::StrCat("w", connection), 64)), "");
  }
  EXPECT_EQ(leader_.capacity().ranks, kMaxPlanRanks);
  const std::string reason = Join(connection + 1, Offer("one more"));
  EXPECT_EQ(reason, absl::StrCat("the pool is full: it takes ", kMaxPlanRanks, " ranks"));
  EXPECT_TRUE(sent_[connection + 1].back().refused().retry()) << "some may go";
}

TEST_F(LeaderTest, LogsARefusalOnceAndTakesNoWordFromStrangers) {
  v1::Join other = Offer("b");
  other.set_build("b2");
  for (Leader::Connection connection = 1; connection <= 5; ++connection) Join(connection, other);
  EXPECT_EQ(log_.size(), 1u);
  leader_.OnConnected(6, now_);
  v1::WorkerMessage junk;
  junk.mutable_stopped()->set_run(1);
  Say(6, junk);
  EXPECT_EQ(closed_.back(), 6u);
  leader_.OnConnected(7, now_);
  Pass(absl::Seconds(6), {});
  EXPECT_EQ(closed_.back(), 7u) << "a connection that never joins";
}

TEST_F(LeaderTest, AWorkerMayTakeLongerToJoinThanItMayBeSilent) {
  leader_.OnConnected(1, now_);
  Pass(2 * Leader::Options().silence_timeout, {});
  EXPECT_TRUE(closed_.empty());
  v1::WorkerMessage message;
  *message.mutable_join() = Offer("a");
  Say(1, message);
  EXPECT_TRUE(sent_[1].back().has_welcome());
}

TEST_F(LeaderTest, ACrowdThatIsRefusedAgainAndAgainIsLoggedOnce) {
  constexpr int kCrowd = 256;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < kCrowd; ++i) {
      v1::Join offer = Offer(absl::StrCat("w", i));
      offer.set_build("b2");
      EXPECT_NE(Join(static_cast<Leader::Connection>(1 + round * kCrowd + i), offer), "");
    }
    EXPECT_EQ(log_.size(), static_cast<size_t>(kCrowd));
  }
}

TEST_F(LeaderTest, StrangersHearWhyTheyGoAndAreLoggedOnce) {
  v1::WorkerMessage junk;
  junk.mutable_stopped()->set_run(1);
  for (Leader::Connection connection = 1; connection <= 5; ++connection) {
    leader_.OnConnected(connection, now_);
    Say(connection, junk);
    EXPECT_NE(sent_[connection].back().refused().reason(), "");
    leader_.OnConnected(connection + 10, now_);
  }
  EXPECT_EQ(log_.size(), 1u);
  Pass(absl::Seconds(6), {});
  EXPECT_NE(sent_[11].back().refused().reason().find("no Join"), std::string::npos);
  EXPECT_EQ(closed_.size(), 10u);
  EXPECT_EQ(log_.size(), 2u);
}

// A leader that was started anew, on a machine whose clock is behind: its workers know later epochs.
TEST_F(LeaderTest, EpochsGoOnBehindThoseThatWorkersHaveHeardOf) {
  v1::WorkerMessage message;
  for (const auto& [connection, ahead] : {std::pair<Leader::Connection, int>{1, 0}, {2, 5}, {3, 2}}) {
    const uint64_t epoch = leader_.epoch() + ahead;
    *message.mutable_join() = Offer(absl::StrCat("w", connection));
    message.set_epoch(epoch);
    leader_.OnConnected(connection, now_);
    Say(connection, message);
    EXPECT_TRUE(sent_[connection].back().has_welcome());
    EXPECT_EQ(sent_[connection].back().epoch(), epoch);
  }
  Submit(std::vector<uint32_t>(300, 1));
  EXPECT_EQ(leader_.epoch(), 1u + 5 + 2 + 1) << "a new one for the run";
  Prepare({1, 2, 3});
  for (const Leader::Connection worker : {1, 2, 3}) EXPECT_TRUE(sent_[worker].back().has_run());
}

TEST_F(LeaderTest, AnEpochThatNoPoolReachesIsRefused) {
  v1::WorkerMessage message;
  *message.mutable_join() = Offer("a");
  message.set_epoch(std::numeric_limits<uint64_t>::max());
  leader_.OnConnected(1, now_);
  Say(1, message);
  EXPECT_NE(sent_[1].back().refused().reason().find("this leader is in epoch 1,"), std::string::npos)
      << sent_[1].back().refused().reason();
  EXPECT_FALSE(sent_[1].back().refused().retry());
  EXPECT_EQ(Join(2, Offer("b")), "");
}

TEST_F(LeaderTest, WordsOfAnotherEpochOrRunCountForNothing) {
  Join(1, Offer("a"));
  Submit({1, 2, 3});
  Prepare({1});
  v1::WorkerMessage done = OfRun();
  done.mutable_rank_done()->set_run(run_);
  for (int i = 0; i < kVocab; ++i) done.mutable_rank_done()->add_logits(0);
  v1::WorkerMessage late = done;
  late.set_epoch(leader_.epoch() - 1);
  Say(1, late);
  late = done;
  late.mutable_rank_done()->set_run(run_ + 1);
  Say(1, late);
  EXPECT_TRUE(answers_.empty());
  EXPECT_EQ(leader_.capacity().ranks, 1) << "what is late is no offence";
  Say(1, done);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(answers_[0].ok());

  done.set_epoch(leader_.epoch() + 1);
  Say(1, done);
  EXPECT_EQ(leader_.capacity().ranks, 0) << "an epoch that is not yet: it is no worker of this pool";
  EXPECT_NE(log_.back().find("speaks of epoch"), std::string::npos) << log_.back();
}

TEST_F(LeaderTest, AnEmptyPoolForgetsItsWeights) {
  Join(1, Offer("a"));
  leader_.OnDisconnected(1, now_);
  v1::Join other = Offer("b");
  other.mutable_model()->set_weights_hash(9);
  EXPECT_EQ(Join(2, other), "");
  v1::WorkerMessage leave;
  leave.mutable_leave();
  Say(2, leave);
  EXPECT_TRUE(sent_[2].back().has_goodbye());
  EXPECT_EQ(Join(3, Offer("c")), "") << "all have drained";
}

// The leader of these tests has no weights: the first worker's may be the wrong ones, and the others wait.
TEST_F(LeaderTest, AWorkerWithOtherWeightsThanTheFirstTriesAgain) {
  v1::Join stranger = Offer("stranger");
  stranger.mutable_model()->set_weights_hash(9);
  EXPECT_EQ(Join(1, stranger), "");
  EXPECT_NE(Join(2, Offer("a")), "");
  EXPECT_TRUE(sent_[2].back().refused().retry());
  leader_.OnDisconnected(1, now_);
  EXPECT_EQ(Join(3, Offer("a")), "");
}

TEST(WorkerStateName, NamesEach) {
  using State = Leader::WorkerState;
  for (const auto& [state, name] :
       {std::pair(State::kReady, "ready"), std::pair(State::kPreparing, "preparing"),
        std::pair(State::kRunning, "running"), std::pair(State::kStopping, "stopping"),
        std::pair(State::kDraining, "draining")}) {
    EXPECT_STREQ(WorkerStateName(state), name);
  }
}

}  // namespace
}  // namespace meshfill
