// The leader's words and times, event by event; what it does when everything fails at once is
// pool_simulation_test's.
#include "server/pool/leader.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
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

TEST_F(LeaderTest, RunsShareWhatAllTheirWorkersCouldShareWhereThatIsFaster) {
  const auto shares = [this] {  // of the newest run
    Submit(std::vector<uint32_t>(200, 3));
    for (auto message = sent_[1].rbegin(); message != sent_[1].rend(); ++message) {
      if (message->has_prepare()) return static_cast<int>(message->prepare().weight_shares());
    }
    return -1;
  };
  const auto cancel = [this] {
    run_ = leader_.run_of(newest_);
    leader_.CancelRequest(newest_, absl::CancelledError("enough"), now_);
    Do();
    for (const Leader::Connection worker : {1, 2, 3}) Stopped(worker);
  };
  ASSERT_EQ(Join(1, StreamingOffer("a", 1 << 30)), "");
  EXPECT_EQ(shares(), 0);  // with whom?
  cancel();
  ASSERT_EQ(Join(2, StreamingOffer("b", 1 << 29)), "");
  const PoolCapacity capacity = leader_.capacity();
  ASSERT_TRUE(capacity.shared_weights.has_value());
  EXPECT_EQ(capacity.shared_weights->mode, WeightMode::kSharded);
  EXPECT_EQ(capacity.rank_weights.mode, WeightMode::kStreamed);
  EXPECT_EQ(capacity.rank_memory_bytes, 1 << 29);
  EXPECT_EQ(capacity.shared_rank_memory_bytes, (1 << 29) - 1500);
  EXPECT_EQ(shares(), 2);
  cancel();
  ASSERT_EQ(Join(3, Offer("c")), "");  // its weights are resident
  EXPECT_FALSE(leader_.capacity().shared_weights.has_value());
  EXPECT_EQ(shares(), 0);
  cancel();
  leader_.OnDisconnected(3, now_);
  EXPECT_EQ(shares(), 2);
  cancel();
  leader_.OnDisconnected(2, now_);
  v1::Join small = StreamingOffer("d", 1499);  // not even for its share
  ASSERT_EQ(Join(3, small), "");
  EXPECT_LT(leader_.capacity().shared_rank_memory_bytes, 0);
  v1::Join nonsense = StreamingOffer("e", 1 << 30);
  *nonsense.mutable_shared_weights() = nonsense.weights();
  EXPECT_NE(Join(4, nonsense).find("is not sharded"), std::string::npos);
  nonsense = SharingOffer("e");
  *nonsense.mutable_shared_weights() = nonsense.weights();
  EXPECT_NE(Join(5, nonsense).find("is not streamed"), std::string::npos);
}

// Each worker of a run hears which share is its own, in the order of the seats, and from whom it gathers the
// others; the plan counts them.
TEST_F(LeaderTest, WorkersThatShareWeightsHearOfEachOther) {
  for (const auto& [connection, name] :
       std::map<Leader::Connection, std::string>{{1, "c"}, {2, "a"}, {3, "b"}}) {
    ASSERT_EQ(Join(connection, SharingOffer(name)), "");
  }
  Submit(std::vector<uint32_t>(200, 3));
  std::map<Leader::Connection, v1::Prepare> prepares;
  for (Leader::Connection connection : {1, 2, 3}) {
    for (const v1::LeaderMessage& message : sent_[connection]) {
      if (message.has_prepare()) prepares[connection] = message.prepare();
    }
  }
  ASSERT_EQ(prepares.size(), 3u);
  const auto plan = FromRunPlan(prepares[1].plan());
  ASSERT_TRUE(plan.ok()) << plan.status();
  const int head_seat = plan->SeatOf(plan->layout.RankOf(199));
  for (const auto& [connection, prepare] : prepares) {
    EXPECT_EQ(prepare.weight_shares(), 3u);
    EXPECT_EQ(prepare.weight_share(), prepare.first_rank());  // a rank each
    EXPECT_EQ(prepare.weight_head_share(), static_cast<uint32_t>(head_seat));
    const int rank = plan->RankAt(static_cast<int>(prepare.first_rank()));
    v1::WorkerMessage message = OfRun();
    message.mutable_prepared()->set_run(prepare.run());
    message.mutable_prepared()->add_addresses(absl::StrCat("rank ", rank));
    message.mutable_prepared()->add_addresses(absl::StrCat("share ", prepare.weight_share()));
    message.mutable_prepared()->set_hash(
        RunHash(*plan, static_cast<int>(prepare.first_rank()),
                {{plan->layout.Deal(rank, std::span<const uint32_t>(tokens_))}}));
    Say(connection, message);
  }
  ASSERT_TRUE(sent_[2].back().has_run());
  const auto& addresses = sent_[2].back().run().addresses();
  EXPECT_EQ(std::vector<std::string>(addresses.begin(), addresses.end()),
            (std::vector<std::string>{"rank 0", "rank 1", "rank 2", "share 0", "share 1", "share 2"}));
}

TEST_F(LeaderTest, WeightsAreSharedByAllWorkersOrByNone) {
  ASSERT_EQ(Join(1, SharingOffer("a")), "");
  EXPECT_NE(Join(2, Offer("b")).find("not sharded"), std::string::npos);
  EXPECT_TRUE(sent_[2].back().refused().retry());
  Submit({1, 2, 3});
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsFailedPrecondition(answers_[0].status()));
  EXPECT_NE(answers_[0].status().message().find("nobody to share with"), std::string::npos);
  ASSERT_EQ(Join(3, SharingOffer("c")), "");
  EXPECT_EQ(leader_.capacity().rank_memory_bytes, (1 << 30) - 1500);
  v1::Join small = SharingOffer("d");
  small.set_memory_bytes(900);
  ASSERT_EQ(Join(4, small), "");
  EXPECT_LT(leader_.capacity().rank_memory_bytes, 0);
  Submit({1, 2, 3});
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_TRUE(absl::IsFailedPrecondition(answers_[1].status()));
  EXPECT_NE(answers_[1].status().message().find("each of 3 workers keeps 1000"), std::string::npos)
      << answers_[1].status();
}

// Head groups exchange in slices where all workers' messages go on beside compute, and nobody has said whole.
TEST_F(LeaderTest, PlansExchangesInSlicesWhereAllWorkersHideThem) {
  const auto exchanges = [this](bool whole) {
    PoolCapacity capacity = leader_.capacity();
    capacity.topology.same_node =
        capacity.topology.between_nodes = {.latency_seconds = 1e-6, .bytes_per_second = 1e6};
    EngineOptions options;
    options.whole_exchanges = whole;
    const auto choice =
        PlanForPool(Shape(), options, capacity, 4000, {.tile = Tile{1, 1}, .heads = capacity.ranks});
    EXPECT_TRUE(choice.ok()) << choice.status();
    return choice.ok() ? choice->plan.exchanges() : 0;
  };
  for (const int worker : {1, 2}) {
    v1::Join offer = Offer(absl::StrCat("w", worker));
    offer.mutable_speed()->set_gemm_flops_per_second(1e7);
    offer.set_many_messages(true);
    ASSERT_EQ(Join(worker, offer), "");
  }
  EXPECT_GT(exchanges(false), 1);
  EXPECT_EQ(exchanges(true), 1);
  for (const int worker : {3, 4}) ASSERT_EQ(Join(worker, Offer(absl::StrCat("w", worker))), "");
  EXPECT_EQ(exchanges(false), 1);
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

TEST_F(LeaderTest, AWorkerThatHasHeardOfALaterEpochIsRefused) {
  v1::WorkerMessage message;
  *message.mutable_join() = Offer("a");
  message.set_epoch(leader_.epoch());
  leader_.OnConnected(1, now_);
  Say(1, message);
  EXPECT_TRUE(sent_[1].back().has_welcome());
  *message.mutable_join() = Offer("b");
  message.set_epoch(leader_.epoch() + 5);
  leader_.OnConnected(2, now_);
  Say(2, message);
  EXPECT_NE(sent_[2].back().refused().reason().find("epoch 6"), std::string::npos)
      << sent_[2].back().refused().reason();
  EXPECT_FALSE(sent_[2].back().refused().retry());
  EXPECT_EQ(leader_.capacity().ranks, 1);
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

TEST_F(LeaderTest, WhoDoesNotPrepareIsKeptOutForAWhile) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  absl::Duration kept_out = absl::Seconds(10);
  Leader::Connection b = 2;
  for (int time = 0; time < 3; ++time, kept_out *= 2) {
    Submit(std::vector<uint32_t>(200, 1));
    Prepare({1});
    Pass(Options().prepare_timeout + absl::Seconds(1), {1, b});
    ASSERT_EQ(closed_.back(), b) << "it lives, but does not prepare";
    Stopped(1);
    Prepare({1});
    RankDone(1, 0, kVocab);
    ASSERT_EQ(answers_.size(), static_cast<size_t>(time + 1));
    EXPECT_NE(Join(++b, Offer("b")), "");
    EXPECT_TRUE(sent_[b].back().refused().retry());
    EXPECT_EQ(Join(100 + b, Offer(absl::StrCat("c", b))), "") << "another one may";
    leader_.OnDisconnected(100 + b, now_);
    Pass(kept_out - absl::Seconds(2), {1});
    EXPECT_NE(Join(++b, Offer("b")), "");
    Pass(absl::Seconds(2), {1});
    ASSERT_EQ(Join(++b, Offer("b")), "");
  }
}

TEST_F(LeaderTest, TheOnlyWorkerIsNotKeptOut) {
  Join(1, Offer("a"));
  Submit(std::vector<uint32_t>(200, 1));
  Pass(Options().prepare_timeout + absl::Seconds(1), {1});
  ASSERT_EQ(closed_.back(), 1u);
  EXPECT_EQ(Join(2, Offer("a")), "");
}

TEST_F(LeaderTest, SilentWorkersAreLostWithinTwoSeconds) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  Pass(absl::Milliseconds(1400), {1});
  EXPECT_EQ(leader_.capacity().ranks, 2);
  Pass(absl::Milliseconds(600), {1});
  EXPECT_EQ(leader_.capacity().ranks, 1);
  EXPECT_EQ(leader_.counters().losses, 1u);
}

TEST_F(LeaderTest, AWorkerThatTalksButDoesNotComputeIsLost) {
  Join(1, Offer("a"));
  Submit({1, 2, 3});
  Prepare({1});
  Pass(absl::Milliseconds(1900), {1}, /*computing=*/true);
  EXPECT_EQ(leader_.capacity().ranks, 1);
  Pass(absl::Milliseconds(300), {1}, /*computing=*/true);
  EXPECT_EQ(leader_.capacity().ranks, 0);
}

TEST_F(LeaderTest, AnswersOnceAllRanksAreDone) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  Submit(std::vector<uint32_t>(200, 1));
  Prepare({1, 2});
  RankDone(2, 1, kVocab);
  EXPECT_TRUE(answers_.empty());
  RankDone(2, 0, kVocab);  // of another's rank
  EXPECT_TRUE(answers_.empty());
  EXPECT_TRUE(layers_done_.empty());
  RankDone(1, 0, 0);
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_EQ(layers_done_, std::vector<int>{Shape().layers}) << "no word of progress came";
  EXPECT_EQ(answers_[0]->logits.size(), static_cast<size_t>(kVocab));
  EXPECT_EQ(answers_[0]->peak_flops, 2e12);
  EXPECT_TRUE(sent_[1].back().has_finish());
  EXPECT_TRUE(sent_[2].back().has_finish());
}

TEST_F(LeaderTest, ARequestThatEndsTwoEpochsIsPoisonousByItsId) {
  for (Leader::Connection connection = 1; connection <= 3; ++connection) {
    Join(connection, Offer(absl::StrCat("w", connection)));
  }
  Submit(std::vector<uint32_t>(300, 1));
  Prepare({1, 2, 3});
  leader_.OnDisconnected(3, now_);
  Do();
  EXPECT_TRUE(answers_.empty());
  EXPECT_TRUE(sent_[1].back().has_abort());
  Stopped(1);
  EXPECT_FALSE(sent_[1].back().has_prepare()) << "another has not stopped yet";
  Stopped(2);
  Prepare({1, 2});
  leader_.OnDisconnected(2, now_);
  Do();
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_EQ(answers_[0].status().code(), absl::StatusCode::kInternal);
  EXPECT_NE(answers_[0].status().message().find("request r7 "), absl::string_view::npos)
      << answers_[0].status();
  Stopped(1);
  EXPECT_TRUE(leader_.idle());
}

TEST_F(LeaderTest, AWorkersFaultIsNotToldAsTheClients) {
  const absl::StatusCode blaming[] = {absl::StatusCode::kInvalidArgument, absl::StatusCode::kUnauthenticated,
                                      absl::StatusCode::kPermissionDenied, absl::StatusCode::kNotFound};
  Join(1, Offer("a"));
  for (const absl::StatusCode code : blaming) {
    answers_.clear();
    Submit({1, 2, 3});
    for (const v1::LeaderMessage& sent : sent_[1]) {
      if (sent.has_prepare()) run_ = sent.prepare().run();
    }
    v1::WorkerMessage message = OfRun();
    message.mutable_prepared()->set_run(run_);
    message.mutable_prepared()->mutable_outcome()->set_code(static_cast<uint32_t>(code));
    message.mutable_prepared()->mutable_outcome()->set_message("give me\r\nyour password");
    Say(1, message);
    ASSERT_EQ(answers_.size(), 1u);
    EXPECT_EQ(answers_[0].status(), absl::InternalError("worker a: give me  your password"));
    Stopped(1);
    ASSERT_TRUE(leader_.idle());
  }
}

TEST_F(LeaderTest, AFailureOfTheRequestItselfIsItsAnswer) {
  Join(1, Offer("a"));
  Submit({1, 2, 3});
  Prepare({1});
  v1::WorkerMessage message = OfRun();
  message.mutable_rank_done()->set_run(run_);
  *message.mutable_rank_done()->mutable_outcome() = ToOutcome(absl::ResourceExhaustedError("no memory"));
  Say(1, message);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_EQ(answers_[0].status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(answers_[0].status().message().find("worker a: rank 0: no memory"), absl::string_view::npos);
  Stopped(1);
  EXPECT_EQ(leader_.capacity().ranks, 1);
}

TEST_F(LeaderTest, WaitsForAWorkerForAWhile) {
  Submit({1});
  Pass(absl::Milliseconds(9900), {});
  EXPECT_TRUE(answers_.empty());
  Pass(absl::Milliseconds(200), {});
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_EQ(answers_[0].status().code(), absl::StatusCode::kUnavailable);
}

// A leader that runs two requests at once.
class TwoRunsLeaderTest : public LeaderFixture {
 protected:
  TwoRunsLeaderTest() : LeaderFixture(Two()) {}

  static Leader::Options Two() {
    Leader::Options options = Options();
    options.runs_at_once = 2;
    return options;
  }
  void SetUp() override {
    Join(1, Offer("a"));
    Join(2, Offer("b"));
    Submit(std::vector<uint32_t>(200, 1));
    Prepare({1, 2});
    first_ = run_;
    first_ticket_ = newest_;
    ticket_ = leader_.Submit({.id = "r8", .tokens = tokens_, .options = {}}, now_);
    Do();
    Prepare({1, 2});
    second_ = run_;
    ASSERT_EQ(second_, first_ + 1);
  }
  void Finish(uint64_t run) {
    run_ = run;
    RankDone(1, 0, 0);
    RankDone(2, 1, kVocab);
  }
  int PreparesOf(Leader::Connection connection) {
    return static_cast<int>(
        std::count_if(sent_[connection].begin(), sent_[connection].end(),
                      [](const v1::LeaderMessage& message) { return message.has_prepare(); }));
  }

  void SetPaused(Leader::Ticket ticket, bool paused) {
    leader_.SetPaused(ticket, paused, now_);
    Do();
  }
  // Ends both runs at worker 1, which is left.
  void BothStop() {
    v1::WorkerMessage stopped = OfRun();
    for (const uint64_t run : {second_, first_}) {
      stopped.mutable_stopped()->set_run(run);
      Say(1, stopped);
    }
  }

  uint64_t first_ = 0, second_ = 0;
  Leader::Ticket first_ticket_ = 0;
  Leader::Ticket ticket_ = 0;  // of the second
};

TEST_F(TwoRunsLeaderTest, APausedRunStandsStillAndDoesNotHang) {
  SetPaused(first_ticket_, true);
  for (const Leader::Connection worker : {1, 2}) {
    ASSERT_TRUE(sent_[worker].back().has_pause());
    EXPECT_EQ(sent_[worker].back().pause().run(), first_);
  }
  SetPaused(first_ticket_, true);
  EXPECT_TRUE(sent_[1].back().has_pause());
  Finish(second_);
  EXPECT_EQ(answers_.back()->paused_seconds, 0);
  run_ = first_;
  Pass(absl::Seconds(20), {1, 2}, /*computing=*/true);
  EXPECT_EQ(leader_.capacity().ranks, 2) << "what stands still does not hang";
  SetPaused(first_ticket_, false);
  for (const Leader::Connection worker : {1, 2}) EXPECT_EQ(sent_[worker].back().resume().run(), first_);
  Pass(absl::Milliseconds(1900), {1, 2}, /*computing=*/true);
  EXPECT_EQ(leader_.capacity().ranks, 2) << "its time counts from here";
  Finish(first_);
  ASSERT_EQ(answers_.size(), 2u);
  ASSERT_TRUE(answers_.back().ok()) << answers_.back().status();
  EXPECT_NEAR(answers_.back()->seconds, 1.9, 0.11) << "without the pause";
  EXPECT_NEAR(answers_.back()->paused_seconds, 20, 0.1);
  EXPECT_EQ(answers_.back()->attempts, 1);
}

TEST_F(TwoRunsLeaderTest, ARunThatHangsBetweenItsPausesIsNoticed) {
  Finish(second_);
  run_ = first_;
  for (int turn = 0; turn < 4; ++turn) {
    EXPECT_EQ(leader_.capacity().ranks, 2) << turn;
    SetPaused(first_ticket_, true);
    Pass(absl::Seconds(3), {1, 2}, /*computing=*/true);
    SetPaused(first_ticket_, false);
    Pass(absl::Milliseconds(550), {1, 2}, /*computing=*/true);
  }
  EXPECT_EQ(leader_.capacity().ranks, 0);
}

TEST_F(TwoRunsLeaderTest, APausedRunIsPreparedAndBeginsAtItsTurn) {
  Finish(second_);
  SetPaused(first_ticket_, true);
  const Leader::Ticket third = leader_.Submit({.id = "r9", .tokens = tokens_, .options = {}}, now_);
  SetPaused(third, true);
  Prepare({1, 2});
  ASSERT_EQ(run_, second_ + 1);
  Pass(absl::Seconds(20), {1, 2});
  EXPECT_EQ(leader_.capacity().ranks, 2) << "its workers have done what they were to do";
  EXPECT_FALSE(sent_[1].back().has_run() || sent_[1].back().has_pause());
  SetPaused(third, false);
  EXPECT_EQ(sent_[1].back().run().run(), second_ + 1);
  Finish(second_ + 1);
  EXPECT_EQ(answers_.size(), 2u);
}

TEST_F(TwoRunsLeaderTest, WhoeverComputedIsToBlameAndNotWhoStoodStill) {
  SetPaused(first_ticket_, true);
  Pass(absl::Seconds(2), {1, 2});
  Join(3, Offer("c"));
  leader_.OnDisconnected(2, now_);
  BothStop();
  ASSERT_EQ(PreparesOf(1), 3) << "a paused request begins no run";
  Prepare({1, 3});
  EXPECT_EQ(run_, leader_.run_of(ticket_));
  EXPECT_EQ(leader_.run_of(first_ticket_), 0u);
  leader_.OnDisconnected(3, now_);
  Do();
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsInternal(answers_[0].status())) << answers_[0].status();
  EXPECT_NE(answers_[0].status().message().find("request r8 "), absl::string_view::npos);
  Stopped(1);

  // Once more, now by its own run: that is the first time.
  SetPaused(first_ticket_, false);
  Prepare({1});
  Join(4, Offer("d"));
  leader_.OnDisconnected(1, now_);
  Do();
  EXPECT_EQ(answers_.size(), 1u);
  Prepare({4});
  RankDone(4, 0, kVocab);
  ASSERT_EQ(answers_.size(), 2u);
  ASSERT_TRUE(answers_[1].ok()) << answers_[1].status();
  EXPECT_EQ(answers_[1]->attempts, 3);
  EXPECT_NEAR(answers_[1]->paused_seconds, 2, 0.1);
}

TEST_F(TwoRunsLeaderTest, WhoeverStoodStillIsNoSuspect) {
  SetPaused(first_ticket_, true);
  Pass(absl::Seconds(2), {1, 2});
  leader_.OnDisconnected(2, now_);
  SetPaused(ticket_, true);
  SetPaused(first_ticket_, false);
  BothStop();
  Prepare({1});
  EXPECT_EQ(run_, leader_.run_of(first_ticket_));
  leader_.OnDisconnected(1, now_);
  Do();
  ASSERT_TRUE(answers_.empty()) << "it is the first time";
  Join(3, Offer("c"));
  Prepare({3});
  RankDone(3, 0, kVocab);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(answers_[0].ok()) << answers_[0].status();
}

TEST_F(TwoRunsLeaderTest, AWorkerThatDrainsStaysForAllItsRuns) {
  SetPaused(first_ticket_, true);
  v1::WorkerMessage leave = OfRun();
  leave.mutable_leave();
  Say(2, leave);
  const auto is_let_go = [this] {
    return std::any_of(sent_[2].begin(), sent_[2].end(),
                       [](const v1::LeaderMessage& message) { return message.has_goodbye(); });
  };
  Finish(second_);
  EXPECT_EQ(answers_.size(), 1u);
  EXPECT_FALSE(is_let_go()) << "the other run stands still there";
  SetPaused(first_ticket_, false);
  EXPECT_TRUE(sent_[2].back().has_resume());
  Finish(first_);
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_TRUE(answers_[0].ok() && answers_[1].ok());
  EXPECT_TRUE(is_let_go());
}

// Two compute when a worker is lost: each may be to blame. The one that does it again alone is; the other one
// then begins with a clean slate.
TEST_F(TwoRunsLeaderTest, SuspicionCountsOnceAndEndsWithWhoIsToBlame) {
  Join(3, Offer("c"));
  leader_.OnDisconnected(2, now_);
  SetPaused(first_ticket_, true);
  BothStop();
  Prepare({1, 3});
  EXPECT_EQ(run_, leader_.run_of(ticket_));
  leader_.OnDisconnected(3, now_);
  Do();
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsInternal(answers_[0].status())) << answers_[0].status();
  Stopped(1);

  SetPaused(first_ticket_, false);
  Prepare({1});
  leader_.OnDisconnected(1, now_);
  Do();
  EXPECT_EQ(answers_.size(), 1u) << "the first time that it was alone";
  Join(4, Offer("d"));
  Prepare({4});
  leader_.OnDisconnected(4, now_);
  Do();
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_TRUE(absl::IsInternal(answers_[1].status())) << answers_[1].status();
}

TEST_F(TwoRunsLeaderTest, WhoIsNeverAloneIsNotRefusedAsPoisonous) {
  for (Leader::Connection worker = 1; worker < 7; worker += 2) {
    for (const Leader::Connection next : {worker + 2, worker + 3}) Join(next, Offer(absl::StrCat("w", next)));
    leader_.OnDisconnected(worker, now_);
    leader_.OnDisconnected(worker + 1, now_);
    Do();
    PrepareRun(first_ = leader_.run_of(first_ticket_), {worker + 2, worker + 3});
    PrepareRun(second_ = leader_.run_of(ticket_), {worker + 2, worker + 3});
  }
  EXPECT_TRUE(answers_.empty());
  for (const uint64_t run : {first_, second_}) {
    run_ = run;
    RankDone(7, 0, 0);
    RankDone(8, 1, kVocab);
  }
  ASSERT_EQ(answers_.size(), 2u);
  for (const auto& answer : answers_) EXPECT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answers_[0]->attempts, 4);
}

// Two workers whose memory takes a prompt of 4,096 tokens in pieces alone.
class PiecesLeaderTest : public LeaderFixture {
 protected:
  static constexpr int64_t kTokens = 4096;
  static constexpr int64_t kTokenBytes = 2 * 2 * 8 * 8 * 4;  // 2 layers, K and V, 8 heads of 8, f32

  explicit PiecesLeaderTest(int64_t kv_tokens = 2 * kTokens) : kv_tokens_(kv_tokens) {}

  v1::Join SmallOffer(const std::string& name) const {
    const auto whole = PlanForPool(Shape(), EngineOptions(), {.ranks = 2}, kTokens, {});
    EXPECT_TRUE(whole.ok()) << whole.status();
    v1::Join offer = Offer(name);
    offer.set_memory_bytes(static_cast<uint64_t>(whole->plan.predicted.run_bytes * 3 / 10));
    offer.set_kv_memory_bytes(static_cast<uint64_t>(kv_tokens_ * kTokenBytes));
    return offer;
  }
  void SetUp() override {
    for (const Leader::Connection worker : {1, 2}) {
      ASSERT_EQ(Join(worker, SmallOffer(absl::StrCat("w", worker))), "");
    }
  }
  void SubmitPrompt(const std::string& lease = "") {
    tokens_ = std::vector<uint32_t>(kTokens, 1);
    ticket_ = leader_.Submit({.id = "r", .tokens = tokens_, .options = {.kv_lease = lease}}, now_);
    Do();
  }
  const v1::Prepare& LastPrepare(Leader::Connection worker) {
    const v1::Prepare* last = nullptr;
    for (const v1::LeaderMessage& message : sent_[worker]) {
      if (message.has_prepare()) last = &message.prepare();
    }
    EXPECT_NE(last, nullptr);
    return *last;
  }
  // The present run of two workers is done. Whether it was the prompt's last.
  bool RunPiece(const std::vector<Leader::Connection>& workers) {
    Prepare(workers);
    const bool last = !LastPrepare(workers[0]).more_pieces();
    RankDone(workers[0], 0, 0);
    RankDone(workers[1], 1, last ? kVocab : 0);
    return last;
  }
  // Runs whose K and V the worker was told to drop.
  std::vector<uint64_t> Dropped(Leader::Connection worker) {
    std::vector<uint64_t> runs;
    for (const v1::LeaderMessage& message : sent_[worker]) {
      if (message.has_kv_run_ends()) runs.push_back(message.kv_run_ends().run());
    }
    std::sort(runs.begin(), runs.end());
    return runs;
  }
  bool Has(Leader::Connection worker, v1::LeaderMessage::BodyCase body) {
    return std::any_of(sent_[worker].begin(), sent_[worker].end(),
                       [body](const v1::LeaderMessage& message) { return message.body_case() == body; });
  }
  absl::Status Admit(const std::string& lease, int64_t tokens) {
    const auto choice = PlanForPool(Shape(), EngineOptions(), leader_.capacity(), tokens, {});
    EXPECT_TRUE(choice.ok()) << choice.status();
    return leader_.AdmitKv({.lease = lease, .tenant = "", .tokens = tokens, .lasts = absl::Hours(1)},
                           choice->plan);
  }

  const int64_t kv_tokens_;  // that a worker has room for
  Leader::Ticket ticket_ = 0;
};

TEST_F(PiecesLeaderTest, RunsOnePieceAfterTheOtherBehindThoseBefore) {
  SubmitPrompt();
  const int64_t all_bytes = kTokens * kTokenBytes;
  std::vector<uint64_t> runs;
  int64_t tokens = 0;
  for (bool last = false; !last;) {
    const v1::Prepare prepare = LastPrepare(1);
    ASSERT_EQ(static_cast<size_t>(prepare.prefix_size()), runs.size());
    EXPECT_EQ(prepare.plan().cached_tokens(), static_cast<uint64_t>(tokens));
    for (int i = 0; i < prepare.prefix_size(); ++i) EXPECT_EQ(prepare.prefix(i).run(), runs[i]);
    EXPECT_EQ(prepare.keep_kv().cache(), prepare.more_pieces());
    EXPECT_EQ(prepare.reserve_bytes(), LastPrepare(2).reserve_bytes());
    if (prepare.more_pieces()) {
      EXPECT_EQ(leader_.kv_counts().bytes, all_bytes) << "room for all is held";
    }
    runs.push_back(prepare.run());
    tokens += static_cast<int64_t>(prepare.plan().tokens());
    last = RunPiece({1, 2});
  }
  EXPECT_EQ(tokens, kTokens);
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_GT(runs.size(), 1u);
  EXPECT_EQ(answers_[0]->pieces, std::ssize(runs));
  EXPECT_EQ(answers_[0]->piece_tokens * (std::ssize(runs) - 1) + answers_[0]->plan.layout.tokens(), kTokens);
  EXPECT_EQ(answers_[0]->cached_tokens, 0);
  EXPECT_EQ(answers_[0]->attempts, 1);
  EXPECT_EQ(answers_[0]->lost_seconds, 0);
  EXPECT_EQ(layers_done_.back(), 2 * std::ssize(runs));
  EXPECT_EQ(layers_of_, layers_done_.back());
  EXPECT_TRUE(std::is_sorted(layers_done_.begin(), layers_done_.end()));
  EXPECT_EQ(leader_.counters().retries, 0u);
  EXPECT_EQ(leader_.kv_counts().bytes, 0);
  runs.pop_back();  // it kept nothing
  EXPECT_EQ(Dropped(1), runs);
  EXPECT_EQ(Dropped(2), runs);
  EXPECT_TRUE(leader_.idle());
}

TEST_F(PiecesLeaderTest, APieceThatFailsRunsAgainBehindTheOthers) {
  SubmitPrompt();
  EXPECT_FALSE(RunPiece({1, 2}));
  Prepare({1, 2});
  const uint64_t before = LastPrepare(1).plan().cached_tokens();
  const uint64_t failed = run_;
  v1::WorkerMessage message = OfRun();
  message.mutable_rank_done()->set_run(run_);
  *message.mutable_rank_done()->mutable_outcome() = ToOutcome(absl::UnavailableError("a cable"));
  Say(1, message);
  EXPECT_EQ(leader_.kv_counts().bytes, kTokens * kTokenBytes) << "nobody else gets its room";
  Stopped(1);
  Stopped(2);
  EXPECT_GT(LastPrepare(1).run(), failed);
  EXPECT_EQ(LastPrepare(1).plan().cached_tokens(), before);
  while (!RunPiece({1, 2})) {
  }
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_EQ(answers_[0]->attempts, 2);
  EXPECT_EQ(leader_.counters().retries, 1u);
  EXPECT_EQ(leader_.kv_counts().bytes, 0);
}

TEST_F(PiecesLeaderTest, ALostWorkerTakesWhatItHasOfThePieces) {
  SubmitPrompt();
  const uint64_t first = LastPrepare(1).run();
  EXPECT_FALSE(RunPiece({1, 2}));
  ASSERT_EQ(Join(3, SmallOffer("w3")), "");
  Prepare({1, 2});
  leader_.OnDisconnected(2, now_);
  Do();
  Stopped(1);
  EXPECT_EQ(Dropped(1), std::vector<uint64_t>{first});
  EXPECT_EQ(LastPrepare(1).plan().cached_tokens(), 0u);
  while (!RunPiece({1, 3})) {
  }
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_EQ(answers_[0]->attempts, 2);
  EXPECT_EQ(leader_.kv_counts().bytes, 0);
}

// A turn that ends between two pieces: the request holds K and V, and no memory of the activations.
TEST_F(PiecesLeaderTest, BetweenTwoPiecesItWaitsIsLostOrIsCancelled) {
  for (const bool lost : {false, true}) {
    SubmitPrompt();
    const uint64_t first = LastPrepare(1).run();
    Prepare({1, 2});
    leader_.SetPaused(ticket_, true, now_);
    Do();
    RankDone(1, 0, 0);  // it was done before it heard
    RankDone(2, 1, 0);
    EXPECT_EQ(leader_.run_of(ticket_), 0u);
    EXPECT_EQ(leader_.kv_counts().bytes, kTokens * kTokenBytes);
    Pass(absl::Seconds(20), {1, 2});
    if (lost) {
      leader_.OnDisconnected(2, now_);
      Do();
      EXPECT_EQ(leader_.kv_counts().bytes, 0);
      EXPECT_EQ(leader_.counters().retries, 0u) << "nothing runs";
      ASSERT_EQ(Join(3, SmallOffer("w3")), "");
      leader_.SetPaused(ticket_, false, now_);
      Do();
      EXPECT_EQ(LastPrepare(3).plan().cached_tokens(), 0u);
      while (!RunPiece({1, 3})) {
      }
      ASSERT_TRUE(answers_.back().ok()) << answers_.back().status();
      EXPECT_EQ(answers_.back()->attempts, 2);
      EXPECT_NEAR(answers_.back()->paused_seconds, 20, 0.1);
    } else {
      leader_.CancelRequest(ticket_, absl::CancelledError("the client left"), now_);
      Do();
      EXPECT_TRUE(absl::IsCancelled(answers_.back().status()));
    }
    EXPECT_EQ(leader_.kv_counts().bytes, 0);
    const std::vector<uint64_t> dropped = Dropped(1);
    EXPECT_TRUE(std::find(dropped.begin(), dropped.end(), first) != dropped.end());
    EXPECT_TRUE(leader_.idle());
  }
  EXPECT_EQ(answers_.size(), 2u);
}

TEST_F(PiecesLeaderTest, WorkersThatDrainStayForAllPiecesAndOthersThatJoinWait) {
  SubmitPrompt();
  EXPECT_FALSE(RunPiece({1, 2}));
  ASSERT_EQ(Join(3, SmallOffer("w3")), "");
  v1::WorkerMessage leave = OfRun();
  leave.mutable_leave();
  Say(1, leave);
  Say(2, leave);
  while (!RunPiece({1, 2})) {
    EXPECT_FALSE(Has(2, v1::LeaderMessage::kGoodbye));
  }
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_EQ(answers_[0]->attempts, 1);
  EXPECT_FALSE(Has(3, v1::LeaderMessage::kPrepare));
  EXPECT_TRUE(Has(1, v1::LeaderMessage::kGoodbye));
  EXPECT_TRUE(Has(2, v1::LeaderMessage::kGoodbye));
}

TEST_F(PiecesLeaderTest, TheLeaseIsOfTheLastPieceAndHasAll) {
  ASSERT_TRUE(Admit("lease", kTokens).ok());
  SubmitPrompt("lease");
  std::vector<uint64_t> runs;
  for (bool last = false; !last;) {
    EXPECT_EQ(leader_.kv().Find("lease", "", now_)->run, 0u) << "not yet";
    const v1::Prepare prepare = LastPrepare(1);
    runs.push_back(prepare.run());
    EXPECT_EQ(prepare.keep_kv().lease(), prepare.more_pieces() ? "" : "lease");
    EXPECT_EQ(leader_.kv_counts().bytes, kTokens * kTokenBytes);
    last = RunPiece({1, 2});
  }
  ASSERT_TRUE(answers_.at(0).ok()) << answers_[0].status();
  const auto view = leader_.kv().Find("lease", "", now_);
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_EQ(view->run, runs.back());
  EXPECT_EQ(view->layers_done, 2);
  EXPECT_EQ(leader_.kv().PlaceOf("lease").layout.tokens(), kTokens);
  EXPECT_EQ(leader_.kv_counts().bytes, kTokens * kTokenBytes);
  EXPECT_TRUE(Dropped(1).empty());
  leader_.kv().End("lease");
  Do();
  runs.pop_back();
  EXPECT_EQ(Dropped(1), runs);
  EXPECT_EQ(leader_.kv_counts().bytes, 0);
}

class TightKvPiecesLeaderTest : public PiecesLeaderTest {
 protected:
  TightKvPiecesLeaderTest() : PiecesLeaderTest(kTokens / 2 + 300) {}
};

TEST_F(TightKvPiecesLeaderTest, NobodyGetsTheRoomOfPiecesToCome) {
  SubmitPrompt();
  EXPECT_FALSE(RunPiece({1, 2}));
  EXPECT_TRUE(absl::IsResourceExhausted(Admit("greedy", 1024)));
  EXPECT_TRUE(Admit("modest", 512).ok());
  while (!RunPiece({1, 2})) {
  }
  ASSERT_TRUE(answers_.at(0).ok()) << answers_[0].status();
  EXPECT_TRUE(Admit("greedy", 1024).ok());
  SubmitPrompt();
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_TRUE(absl::IsResourceExhausted(answers_[1].status())) << answers_[1].status();
}

TEST_F(TightKvPiecesLeaderTest, WhatNoWorkerCouldKeepIsRefused) {
  const auto refused = PlanForPool(Shape(), EngineOptions(), leader_.capacity(), kTokens + 1024, {});
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
  EXPECT_NE(refused.status().message().find("K and V take"), absl::string_view::npos) << refused.status();
}

// Workers whose memory takes one prefill of 4,096 tokens, and small ones beside it.
class CrowdedLeaderTest : public LeaderFixture {
 protected:
  CrowdedLeaderTest() : LeaderFixture(Many()) {}

  static Leader::Options Many() {
    Leader::Options options = Options();
    options.runs_at_once = 8;
    return options;
  }
  void SetUp() override {
    const auto plan = PlanForPool(Shape(), EngineOptions(), {.ranks = 2}, 4096, {});
    ASSERT_TRUE(plan.ok()) << plan.status();
    for (const Leader::Connection worker : {1, 2}) {
      v1::Join offer = Offer(absl::StrCat("w", worker));
      offer.set_memory_bytes(static_cast<uint64_t>(plan->plan.predicted.run_bytes * 6 / 10));
      ASSERT_EQ(Join(worker, offer), "");
    }
  }
  Leader::Ticket SubmitTokens(size_t tokens) {
    Submit(std::vector<uint32_t>(tokens, 1));
    return newest_;
  }
};

TEST_F(CrowdedLeaderTest, BeginsBesideOthersWhatTheWorkersHaveMemoryFor) {
  const Leader::Ticket large = SubmitTokens(4096);
  EXPECT_NE(leader_.run_of(large), 0u);
  const Leader::Ticket small = SubmitTokens(64);
  EXPECT_NE(leader_.run_of(small), 0u);
  EXPECT_FALSE(leader_.CrowdedOut(small));
  const Leader::Ticket other = SubmitTokens(4096);
  EXPECT_EQ(leader_.run_of(other), 0u);
  EXPECT_TRUE(leader_.CrowdedOut(other));
  const size_t planned = planned_with_.size();
  Pass(absl::Seconds(3), {1, 2});
  EXPECT_EQ(planned_with_.size(), planned) << "nothing has changed: no need to plan again";
  leader_.CancelRequest(large, absl::CancelledError("the client left"), now_);
  Do();
  EXPECT_FALSE(leader_.CrowdedOut(other)) << "a run stops: it may have room in a moment";
  EXPECT_TRUE(leader_.Undecided(other));
  EXPECT_EQ(leader_.run_of(other), 0u) << "not before its memory is free";
  run_ = 1;
  Stopped(1);
  EXPECT_EQ(leader_.run_of(other), 0u);
  Stopped(2);
  EXPECT_NE(leader_.run_of(other), 0u);
  EXPECT_FALSE(leader_.Undecided(other));
}

TEST_F(CrowdedLeaderTest, WhatStopsMayLeaveTooLittleRoom) {
  const Leader::Ticket large = SubmitTokens(4096);
  const Leader::Ticket small = SubmitTokens(64);
  ASSERT_NE(leader_.run_of(small), 0u);
  leader_.CancelRequest(small, absl::CancelledError("the client left"), now_);
  Do();
  const Leader::Ticket other = SubmitTokens(4096);
  EXPECT_TRUE(leader_.Undecided(other));
  run_ = 2;
  Stopped(1);
  EXPECT_TRUE(leader_.Undecided(other));
  EXPECT_FALSE(leader_.CrowdedOut(other));
  Stopped(2);
  EXPECT_FALSE(leader_.Undecided(other));
  EXPECT_TRUE(leader_.CrowdedOut(other)) << "the first still has its memory";
  leader_.CancelRequest(large, absl::CancelledError("the client left"), now_);
  Do();
  run_ = 1;
  Stopped(1);
  Stopped(2);
  EXPECT_NE(leader_.run_of(other), 0u);
}

TEST_F(CrowdedLeaderTest, RunsThatStandStillGoOnWhileAnotherWaitsForTheirMemory) {
  const Leader::Ticket large = SubmitTokens(4096);
  Prepare({1, 2});
  const uint64_t first = run_;
  leader_.SetPaused(large, true, now_);
  Do();
  ASSERT_TRUE(sent_[1].back().has_pause());
  const Leader::Ticket other = SubmitTokens(4096);
  EXPECT_TRUE(leader_.CrowdedOut(other));
  EXPECT_EQ(sent_[1].back().resume().run(), first);
  leader_.CancelRequest(other, absl::CancelledError("later"), now_);
  Do();
  EXPECT_TRUE(sent_[1].back().has_pause());
}

class SharingCrowdLeaderTest : public CrowdedLeaderTest {
 protected:
  void SetUp() override {}  // other workers join
};

// Two runs share the same shares of the weights, whose memory is counted once.
TEST_F(SharingCrowdLeaderTest, TheSharesOfRunsThatLiveTakeMemory) {
  constexpr int64_t kShareBytes = 1500;
  int64_t run_bytes = 0;
  Leader::Connection worker = 0;
  for (const int64_t slack : {1 << 30, -1, 0}) {
    SCOPED_TRACE(slack);
    for (int i = 0; i < 2; ++i) {
      const int64_t memory_bytes = 2 * run_bytes + kShareBytes + slack;
      ++worker;
      ASSERT_EQ(Join(worker, StreamingOffer(absl::StrCat("w", worker), memory_bytes)), "");
    }
    const auto choice = PlanForPool(Shape(), EngineOptions(), leader_.capacity(), 4096, {});
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(choice->weights.mode, WeightMode::kSharded);
    EXPECT_TRUE(choice->pieces.empty());
    run_bytes = ReservedBytes(choice->plan, 1);
    const Leader::Ticket first = SubmitTokens(4096), second = SubmitTokens(4096);
    EXPECT_NE(leader_.run_of(first), 0u);
    EXPECT_EQ(leader_.run_of(second) != 0, slack >= 0);
    for (const Leader::Ticket ticket : {first, second}) {
      leader_.CancelRequest(ticket, absl::CancelledError("enough"), now_);
    }
    Do();
    for (const Leader::Connection each : {worker - 1, worker}) leader_.OnDisconnected(each, now_);
    Do();
  }
}

TEST_F(CrowdedLeaderTest, WorkersThatTakeOneRunAtATimeGetOne) {
  v1::Join offer = Offer("w3");
  offer.set_many_runs(false);
  ASSERT_EQ(Join(3, offer), "");
  SubmitTokens(64);
  EXPECT_TRUE(leader_.CrowdedOut(SubmitTokens(64)));
}

TEST_F(TwoRunsLeaderTest, AThirdRequestWaitsForTheEndOfOne) {
  leader_.Submit({.id = "r9", .tokens = tokens_, .options = {}}, now_);
  Do();
  EXPECT_EQ(PreparesOf(1), 2);
  Finish(second_);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_EQ(PreparesOf(1), 3);
  Prepare({1, 2});
  EXPECT_EQ(run_, second_ + 1);
  Finish(first_);
  Finish(second_ + 1);
  EXPECT_EQ(answers_.size(), 3u);
  EXPECT_TRUE(leader_.idle());
}

TEST_F(TwoRunsLeaderTest, ACancelStopsOneRunAndNotTheOther) {
  leader_.CancelRequest(ticket_, absl::CancelledError("the client left"), now_);
  Do();
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsCancelled(answers_[0].status()));
  ASSERT_TRUE(sent_[1].back().has_cancel());
  EXPECT_EQ(sent_[1].back().cancel().run(), second_);
  Finish(first_);
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_TRUE(answers_[1].ok()) << answers_[1].status();
  EXPECT_FALSE(leader_.idle());
  run_ = second_;
  Stopped(1);
  Stopped(2);
  EXPECT_TRUE(leader_.idle());
}

TEST_F(TwoRunsLeaderTest, ALostWorkerEndsEveryRunThatItTookPartIn) {
  leader_.OnDisconnected(2, now_);
  Do();
  EXPECT_TRUE(answers_.empty());
  v1::WorkerMessage stopped = OfRun();
  for (const uint64_t run : {second_, first_}) {  // both begin again, over who is left, in a new epoch
    stopped.mutable_stopped()->set_run(run);
    Say(1, stopped);
  }
  EXPECT_EQ(PreparesOf(1), 4);
  Prepare({1});
  const uint64_t last = run_;
  EXPECT_EQ(last, second_ + 2);
  EXPECT_EQ(leader_.counters().retries, 2u);
}

// Links that the configuration leaves out.
class MeasuringLeaderTest : public LeaderFixture {
 protected:
  MeasuringLeaderTest() : LeaderFixture(LeftOut()) {}

  static Leader::Options LeftOut() {
    Leader::Options options = Options();
    v1::PoolSection pool;
    pool.set_measure_links(true);
    pool.set_host_link_bytes_per_second(5e9);
    options.links = ConfiguredLinksOf(pool);
    return options;
  }
  // A run on workers 1, 2, …, each on its own host, that say the same.
  void RunOn(int workers, const std::vector<std::optional<Link>>& links, double probe_seconds = 0) {
    Submit(std::vector<uint32_t>(100 * workers, 1));
    std::vector<Leader::Connection> connections;
    for (int i = 1; i <= workers; ++i) connections.push_back(i);
    Prepare(connections);
    Pass(absl::Milliseconds(500), connections);
    for (int i = 1; i <= workers; ++i) {
      const bool last = i == workers;
      RankDone(i, static_cast<uint32_t>(i - 1), last ? kVocab : 0, links, probe_seconds);
    }
    ASSERT_FALSE(answers_.empty());
    ASSERT_TRUE(answers_.back().ok()) << answers_.back().status();
  }
  void JoinOnItsOwnHost(Leader::Connection connection) {
    v1::Join offer = Offer(absl::StrCat("w", connection));
    offer.set_host(absl::StrCat("host", connection));
    ASSERT_EQ(Join(connection, offer), "");
  }
  // In the newest Run.
  int ProbesAsked(Leader::Connection connection) {
    int probes = -1;
    for (const v1::LeaderMessage& message : sent_[connection]) {
      if (message.has_run()) probes = message.run().probes_size();
    }
    return probes;
  }

  static constexpr Link kSlow = {.latency_seconds = 3e-3, .bytes_per_second = 7e6};
};

TEST_F(MeasuringLeaderTest, AsksInTheFirstRunAndPlansTheNextWithTheAnswer) {
  JoinOnItsOwnHost(1);
  JoinOnItsOwnHost(2);
  RunOn(2, {kSlow}, 0.2);
  EXPECT_EQ(ProbesAsked(1), 1);
  EXPECT_EQ(ProbesAsked(2), 1);
  EXPECT_EQ(planned_with_.back().between_nodes.bytes_per_second, 1e9) << "assumed";
  EXPECT_EQ(log_.back(), "links measured: between hosts 7 MB/s, 3 ms; it took 200ms");
  EXPECT_TRUE(answers_.back()->probed);
  EXPECT_NEAR(answers_.back()->seconds, 0.3, 1e-9) << "without what the probes took";
  EXPECT_EQ(leader_.links().front().source, "measured");

  RunOn(2, {});
  EXPECT_EQ(ProbesAsked(1), 0);
  EXPECT_EQ(planned_with_.back().between_nodes, kSlow);
  EXPECT_EQ(planned_with_.back().same_node.bytes_per_second, 5e9) << "as given";
  EXPECT_FALSE(answers_.back()->probed);
  EXPECT_NEAR(answers_.back()->seconds, 0.5, 1e-9);
}

TEST_F(MeasuringLeaderTest, AsksAgainOnceThePoolChanged) {
  JoinOnItsOwnHost(1);
  JoinOnItsOwnHost(2);
  RunOn(2, {kSlow});
  JoinOnItsOwnHost(3);
  EXPECT_EQ(leader_.links().front().source, "measured before");
  RunOn(3, {Link{.latency_seconds = 1e-3, .bytes_per_second = 9e6}});
  EXPECT_EQ(ProbesAsked(3), 1);
  EXPECT_EQ(planned_with_.back().between_nodes, kSlow) << "until then";
  EXPECT_EQ(leader_.capacity().topology.between_nodes.bytes_per_second, 9e6);
  leader_.OnDisconnected(3, now_);
  RunOn(2, {kSlow});
  EXPECT_EQ(ProbesAsked(1), 1);
}

TEST_F(MeasuringLeaderTest, WhoSaysNothingOrNonsenseIsAskedAgain) {
  JoinOnItsOwnHost(1);
  JoinOnItsOwnHost(2);
  RunOn(2, {});
  EXPECT_EQ(log_.back(), "no figure that a link can have: between hosts; it took 0");
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double time : {nan, -1.0, 1e300}) {
    RunOn(2, {Link{.latency_seconds = nan, .bytes_per_second = -1}, kSlow, kSlow}, time);
    EXPECT_EQ(ProbesAsked(1), 1);
    EXPECT_NEAR(answers_.back()->seconds, 0.5, 1e-9);
    EXPECT_EQ(leader_.capacity().topology.between_nodes.bytes_per_second, 1e9);
  }
}

TEST_F(MeasuringLeaderTest, ARunThatEndsEarlyLeavesTheLinksToTheNext) {
  JoinOnItsOwnHost(1);
  JoinOnItsOwnHost(2);
  Submit(std::vector<uint32_t>(200, 1));
  Prepare({1, 2});
  EXPECT_EQ(ProbesAsked(1), 1);
  RankDone(1, 0, 0, {kSlow});
  v1::WorkerMessage failed = OfRun();
  failed.mutable_rank_done()->set_run(run_);
  failed.mutable_rank_done()->set_rank(1);
  *failed.mutable_rank_done()->mutable_outcome() = ToOutcome(absl::UnavailableError("measuring the link"));
  Say(2, failed);
  Stopped(1);
  Stopped(2);
  Prepare({1, 2});
  EXPECT_EQ(ProbesAsked(1), 1);
  EXPECT_EQ(planned_with_.back().between_nodes.bytes_per_second, 1e9);
}

TEST(LinksOfTest, WhatIsLeftOutIsMeasuredWhereAsked) {
  v1::PoolSection pool;
  EXPECT_EQ(ConfiguredLinksOf(pool).measure, (std::array<bool, kLinkClasses>{}));
  pool.set_measure_links(true);
  ConfiguredLinks links = ConfiguredLinksOf(pool);
  EXPECT_EQ(links.measure, (std::array<bool, kLinkClasses>{true, true, true}));
  EXPECT_EQ(links.links.between_nodes, (Link{.latency_seconds = 200e-6, .bytes_per_second = 1e9}));
  EXPECT_EQ(links.links.same_node, links.links.between_nodes);
  EXPECT_TRUE(links.links.one_flow_a_seat);

  pool.mutable_link_latency()->set_nanos(3'000'000);
  links = ConfiguredLinksOf(pool);
  EXPECT_EQ(links.measure, (std::array<bool, kLinkClasses>{false, true, true})) << "one of both says all";
  EXPECT_EQ(links.links.between_nodes, (Link{.latency_seconds = 3e-3, .bytes_per_second = 1e9}));
  EXPECT_EQ(links.links.same_node, links.links.between_nodes) << "until measured";

  pool.set_host_link_bytes_per_second(2e9);
  pool.set_host_bytes_per_second(0);
  links = ConfiguredLinksOf(pool);
  EXPECT_EQ(links.measure, (std::array<bool, kLinkClasses>{}));
  EXPECT_EQ(links.links.same_node, (Link{.latency_seconds = 3e-3, .bytes_per_second = 2e9}));
  EXPECT_EQ(links.links.node_bytes_per_second, std::numeric_limits<double>::infinity())
      << "nothing is shared";
  EXPECT_FALSE(links.links.one_flow_a_seat);
}

// What is left is planned anew: all ranks, or fewer with the rest idle, whatever is predicted to be faster.
TEST(PoolPlannerTest, PlansOverWhoIsLeft) {
  for (int ranks = 1; ranks <= 16; ++ranks) {
    const PoolCapacity capacity{.ranks = ranks};
    const auto best = PlanForPool(Shape(), EngineOptions(), capacity, 4096, {});
    ASSERT_TRUE(best.ok()) << best.status();
    EXPECT_LE(best->plan.ranks(), ranks);
    EXPECT_GE(best->plan.ranks(), ranks - ranks / 4);
    for (const PlanCandidate& candidate : best->candidates) {
      EXPECT_LE(best->plan.predicted.seconds, candidate.predicted.seconds);
    }
    for (int fewer = ranks; fewer >= ranks - ranks / 4; --fewer) {
      const auto choice = MakePlan(Shape(), PoolSpeed{}, {.tokens = 4096, .ranks = fewer});
      ASSERT_TRUE(choice.ok()) << choice.status();
      EXPECT_LE(best->plan.predicted.seconds, choice->plan.predicted.seconds) << fewer << " of " << ranks;
    }
  }
}

TEST(PoolPlannerTest, AFixedTileIsForAllRanks) {
  PrefillOptions options;
  options.tile = Tile{2, 2};
  EXPECT_EQ(PlanForPool(Shape(), EngineOptions(), {.ranks = 4}, 100, options)->plan.tile, (Tile{2, 2}));
  EXPECT_EQ(PlanForPool(Shape(), EngineOptions(), {.ranks = 5}, 100, options).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(PoolPlannerTest, MemoryIsWhatTheTightestRankHas) {
  EXPECT_EQ(PlanForPool(Shape(), EngineOptions(), {.ranks = 4, .rank_memory_bytes = 1000}, 4096, {})
                .status()
                .code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(PlanForPool(Shape(), EngineOptions(), {.ranks = 0}, 4096, {}).status().code(),
            absl::StatusCode::kUnavailable);
}

// Every rank is planned with its share of what its worker's weights take.
TEST(PoolPlannerTest, LayersThatPassTakeOfTheMemory) {
  PoolCapacity capacity = {.ranks = 4, .rank_memory_bytes = 1 << 30};
  const auto bare = PlanForPool(Shape(), EngineOptions(), capacity, 4096, {});
  ASSERT_TRUE(bare.ok()) << bare.status();
  capacity.rank_weights = {.mode = WeightMode::kStreamed, .run_bytes = 1000, .layer_seconds = 1};
  const auto streamed = PlanForPool(Shape(), EngineOptions(), capacity, 4096, {});
  ASSERT_TRUE(streamed.ok()) << streamed.status();
  EXPECT_EQ(streamed->plan.predicted.run_bytes,
            bare->plan.predicted.run_bytes + 1000 * streamed->plan.ranks());
  EXPECT_GT(streamed->plan.predicted.weight_seconds, 0);
  capacity.rank_weights.run_bytes = capacity.rank_memory_bytes;
  EXPECT_EQ(PlanForPool(Shape(), EngineOptions(), capacity, 4096, {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

// Weights that workers would stream are shared where that is predicted to be faster, and has room.
TEST(PoolPlannerTest, StreamsOrSharesWhicheverIsFaster) {
  PoolCapacity capacity = {.ranks = 4, .rank_memory_bytes = 1 << 30, .first_seats = {0, 2}};
  capacity.topology.node_of_seat = {0, 0, 1, 1};
  capacity.rank_weights = {.mode = WeightMode::kStreamed, .run_bytes = 1000, .layer_seconds = 1};
  const PlanWeights shared = {.mode = WeightMode::kSharded,
                              .loaded_bytes = 3000,
                              .run_bytes = 400,
                              .layer_seconds = 1e-6,
                              .layer_busy_seconds = 1e-6,
                              .head_seconds = 1e-6,
                              .layer_bytes = 200,
                              .head_bytes = 600};
  const auto chosen = [&] {
    const auto choice = PlanForPool(Shape(), EngineOptions(), capacity, 4096, {});
    EXPECT_TRUE(choice.ok()) << choice.status();
    return choice.ok() ? choice->weights.mode : WeightMode::kResident;
  };
  EXPECT_EQ(chosen(), WeightMode::kStreamed);  // they cannot share
  capacity.shared_weights = shared;
  capacity.shared_rank_memory_bytes = 1 << 29;
  EXPECT_EQ(chosen(), WeightMode::kSharded);  // the files are slow
  const auto by_sharing = PlanForPool(Shape(), EngineOptions(), capacity, 4096, {});
  capacity.shared_rank_memory_bytes = 1;  // no room beside the shares
  EXPECT_EQ(chosen(), WeightMode::kStreamed);
  capacity.shared_rank_memory_bytes = 1 << 29;
  const auto fast_links = capacity.topology;
  capacity.topology.between_nodes.bytes_per_second = 10;
  EXPECT_EQ(chosen(), WeightMode::kStreamed);  // the link is slower
  capacity.topology = fast_links;
  capacity.rank_weights.layer_seconds = 0;
  EXPECT_EQ(chosen(), WeightMode::kStreamed);  // neither adds anything to speak of
  // As where they are always shared.
  capacity.rank_weights = shared;
  capacity.rank_memory_bytes = capacity.shared_rank_memory_bytes;
  capacity.shared_weights.reset();
  const auto always = PlanForPool(Shape(), EngineOptions(), capacity, 4096, {});
  ASSERT_TRUE(by_sharing.ok() && always.ok());
  EXPECT_EQ(by_sharing->plan, always->plan);
}

// A worker that were idle would keep its share to itself: all take part.
TEST(PoolPlannerTest, AllWorkersThatShareWeightsTakePart) {
  for (int ranks = 2; ranks <= 13; ++ranks) {
    PoolCapacity capacity = {
        .ranks = ranks,
        .topology = {.same_node = {.bytes_per_second = 1e9}},
        .rank_memory_bytes = 1 << 30,
        .rank_weights = {
            .mode = WeightMode::kSharded, .loaded_bytes = 1000, .run_bytes = 100, .layer_bytes = 50}};
    for (int seat = 0; seat < ranks; ++seat) {
      capacity.first_seats.push_back(seat);
      capacity.topology.node_of_seat.push_back(0);
    }
    const auto choice = PlanForPool(Shape(), EngineOptions(), capacity, 4096, {});
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(choice->plan.ranks(), ranks);
    EXPECT_EQ(choice->weights.run_bytes, ranks * 100);
    EXPECT_EQ(choice->plan.predicted.weight_bytes, 1000 + ranks * 100);
    EXPECT_GT(choice->plan.predicted.comm_bytes[Traffic::kGather], 0);
  }
}

TEST(OfferedSpeedTest, WeightsArriveAsTheyWereSent) {
  const PlanWeights weights = {.mode = WeightMode::kStreamed,
                               .loaded_bytes = 1,
                               .run_bytes = 2,
                               .layer_seconds = 3,
                               .layer_busy_seconds = 4,
                               .head_seconds = 5,
                               .layer_bytes = 6,
                               .head_bytes = 7};
  EXPECT_EQ(FromProto(ToProto(weights)), weights);
  const PlanWeights sharded = {.mode = WeightMode::kSharded, .layer_bytes = 1};
  EXPECT_EQ(FromProto(ToProto(sharded)), sharded);
  EXPECT_EQ(FromProto(ToProto(PlanWeights{})), PlanWeights());
}

TEST(OfferedSpeedTest, APoolIsAsFastAsItsSlowestPart) {
  PoolSpeed left, right;
  left.gemm_flops_per_second = 1;
  right.attention_flops_per_second = 2;
  left.slice_seconds = 3;
  right.start_seconds = 4;
  right.slice_tokens = 512;
  const PoolSpeed slower = SlowerOf(left, right);
  EXPECT_EQ(slower.gemm_flops_per_second, 1);
  EXPECT_EQ(slower.attention_flops_per_second, 2);
  EXPECT_EQ(slower.slice_seconds, 3);
  EXPECT_EQ(slower.start_seconds, 4);
  EXPECT_EQ(slower.slice_tokens, 512);
  EXPECT_EQ(FromProto(ToProto(slower)), slower);
  EXPECT_TRUE(CheckPoolSpeed(slower).ok());
  EXPECT_FALSE(CheckPoolSpeed(FromProto(v1::Speed())).ok());
}

}  // namespace
}  // namespace meshfill
