// A run from Prepare to its end: what workers are sent, how long they have, and what their answers mean.
#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/comm/gloo/gloo_rendezvous.h"
#include "engine/kv/block_hash.h"
#include "tests/server/pool/leader_fixture.h"

namespace meshfill {
namespace {

class LeaderRunsTest : public LeaderFixture {
 protected:
  explicit LeaderRunsTest(const Leader::Options& options = Options()) : LeaderFixture(options) {}

  // Time passes; the ranks of the workers get on.
  void Compute(absl::Duration time, const std::vector<Leader::Connection>& workers) {
    for (const absl::Time end = now_ + time; now_ < end; now_ += absl::Milliseconds(50)) {
      for (const Leader::Connection worker : workers) Report(worker, static_cast<int>(worker) - 1, 0);
      leader_.OnTick(now_);
      Do();
    }
  }
  void Report(Leader::Connection worker, int rank, int layers_done) {
    v1::WorkerMessage message = OfRun();
    message.mutable_progress()->set_run(run_);
    v1::WorkerProgress::Rank& of_rank = *message.mutable_progress()->add_ranks();
    of_rank.set_rank(static_cast<uint32_t>(rank));
    of_rank.set_layers_done(static_cast<uint32_t>(layers_done));
    of_rank.set_operations(++operations_);
    of_rank.set_has_computed(true);
    Say(worker, message);
  }
  void Fail(Leader::Connection worker, uint32_t rank, const absl::Status& status) {
    v1::WorkerMessage message = OfRun();
    message.mutable_rank_done()->set_run(run_);
    message.mutable_rank_done()->set_rank(rank);
    *message.mutable_rank_done()->mutable_outcome() = ToOutcome(status);
    Say(worker, message);
  }
  bool IsThere(Leader::Connection worker) const {
    return std::find(closed_.begin(), closed_.end(), worker) == closed_.end();
  }
  // The newest Run that the worker has heard.
  v1::Run RunOf(Leader::Connection worker) {
    v1::Run run;
    for (const v1::LeaderMessage& message : sent_[worker]) {
      if (message.has_run()) run = message.run();
    }
    return run;
  }

  uint64_t operations_ = 0;
};

// ---- What is sent.

TEST_F(LeaderRunsTest, ALongPromptIsSentInPiecesThatFollowEachOther) {
  Join(1, Offer("a"));
  std::vector<uint32_t> tokens(600'000);
  std::iota(tokens.begin(), tokens.end(), 0u);
  Submit(tokens);
  std::vector<uint32_t> sent;
  int messages = 0;
  for (const v1::LeaderMessage& message : sent_[1]) {
    if (!message.has_shard()) continue;
    ++messages;
    EXPECT_EQ(message.shard().begin(), sent.size());
    EXPECT_LE(message.ByteSizeLong(), size_t{4} << 20);
    sent.insert(sent.end(), message.shard().ids().begin(), message.shard().ids().end());
  }
  EXPECT_GT(messages, 1);
  EXPECT_EQ(sent, tokens);
}

TEST_F(LeaderRunsTest, RanksHearTheAddressesInTheirOwnOrder) {
  Join(1, Offer("a"));
  Join(2, Offer("b", 2));
  placement_ = {.seat_of_rank = {2, 0, 1}, .name = "turned"};
  Submit(std::vector<uint32_t>(300, 1));
  Prepare({1, 2});
  for (const Leader::Connection worker : {1, 2}) {
    const v1::Run run = RunOf(worker);
    const auto& addresses = run.addresses();
    EXPECT_EQ(std::vector<std::string>(addresses.begin(), addresses.end()),
              (std::vector<std::string>{"seat 2", "seat 0", "seat 1"}));
  }
}

TEST(ReservedBytesTest, ThePartsAreNoLessThanTheWhole) {
  Plan plan = MakePlan(Shape(), PoolSpeed{}, {.tokens = 100, .ranks = 4}).value().plan;
  plan.predicted.run_bytes = 10;
  EXPECT_EQ(ReservedBytes(plan, 1), 3);
  EXPECT_EQ(ReservedBytes(plan, 2), 6);
  plan.predicted.run_bytes = 12;
  EXPECT_EQ(ReservedBytes(plan, 3), 9);
}

// ---- What is answered.

TEST_F(LeaderRunsTest, WhoPreparesAnotherRunIsKeptOut) {
  Join(1, Offer("a"));
  Leader::Connection other = 1;
  for (const bool of_hash : {true, false}) {
    const std::string name = absl::StrCat("b", other);
    ASSERT_EQ(Join(++other, Offer(name)), "");
    answers_.clear();
    Submit(std::vector<uint32_t>(200, 1));
    v1::WorkerMessage wrong = GoodAnswer(*PrepareOf(other));
    if (of_hash) {
      wrong.mutable_prepared()->set_hash(wrong.prepared().hash() + 1);
    } else {
      wrong.mutable_prepared()->add_addresses("one too many");
    }
    Say(other, wrong);
    EXPECT_FALSE(IsThere(other));
    EXPECT_NE(log_[log_.size() - 2].find("it prepared another run"), std::string::npos)
        << log_[log_.size() - 2];
    run_ = leader_.run_of(newest_);
    if (run_ == 0) run_ = PrepareOf(1)->run();
    Stopped(1);
    Prepare({1});
    RankDone(1, 0, kVocab);
    ASSERT_EQ(answers_.size(), 1u);
    EXPECT_TRUE(answers_[0].ok()) << answers_[0].status();
    EXPECT_NE(Join(++other, Offer(name)), "");
  }
}

TEST_F(LeaderRunsTest, AddressesOfWeightsAreChecked) {
  for (const auto& [connection, name] :
       std::vector<std::pair<Leader::Connection, std::string>>{{1, "a"}, {2, "b"}}) {
    v1::Join offer = SharingOffer(name);
    offer.set_data_plane("gloo");
    ASSERT_EQ(Join(connection, offer), "");
  }
  Submit(std::vector<uint32_t>(200, 1));
  const v1::Prepare* const prepare = PrepareOf(2);
  ASSERT_NE(prepare, nullptr);
  const int rank = FromRunPlan(prepare->plan())->RankAt(static_cast<int>(prepare->first_rank()));
  const auto rendezvous =
      GlooRendezvous::Listen({.listen = "127.0.0.1",
                              .rank = rank,
                              .ranks = 2,
                              .run = DataPlaneRun(leader_.epoch(), prepare->run(), Traffic::kQ)});
  ASSERT_TRUE(rendezvous.ok()) << rendezvous.status();
  v1::WorkerMessage message = GoodAnswer(*prepare);
  message.mutable_prepared()->set_addresses(0, (*rendezvous)->address());
  message.mutable_prepared()->add_addresses("nowhere");
  Say(2, message);
  EXPECT_FALSE(IsThere(2));
}

TEST_F(LeaderRunsTest, StatusesOfRanksMeanWhatTheySay) {
  using absl::StatusCode;
  const std::set<StatusCode> again = {StatusCode::kUnavailable, StatusCode::kAborted,
                                      StatusCode::kCancelled,   StatusCode::kDeadlineExceeded,
                                      StatusCode::kDataLoss,    StatusCode::kUnknown};
  const std::set<StatusCode> blaming = {StatusCode::kInvalidArgument, StatusCode::kNotFound,
                                        StatusCode::kAlreadyExists,   StatusCode::kPermissionDenied,
                                        StatusCode::kUnauthenticated, StatusCode::kOutOfRange};
  Join(1, Offer("a"));
  for (int number = 1; number <= 16; ++number) {
    const auto code = static_cast<StatusCode>(number);
    SCOPED_TRACE(absl::StatusCodeToString(code));
    answers_.clear();
    Submit({1, 2, 3});
    Prepare({1});
    Fail(1, 0, absl::Status(code, "why"));
    Stopped(1);
    if (again.contains(code)) {
      EXPECT_TRUE(answers_.empty()) << "it runs again";
      Prepare({1});
      RankDone(1, 0, kVocab);
      ASSERT_EQ(answers_.size(), 1u);
      EXPECT_TRUE(answers_[0].ok()) << answers_[0].status();
      EXPECT_EQ(answers_[0]->attempts, 2);
    } else {
      ASSERT_EQ(answers_.size(), 1u);
      EXPECT_EQ(answers_[0].status(),
                absl::Status(blaming.contains(code) ? StatusCode::kInternal : code, "worker a: rank 0: why"));
    }
    EXPECT_EQ(leader_.capacity().ranks, 1);
    ASSERT_TRUE(leader_.idle());
  }
}

TEST_F(LeaderRunsTest, LayersAreDoneWhenAllRanksHaveThem) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  Submit(std::vector<uint32_t>(200, 1));
  Prepare({1, 2});
  Report(1, 0, 1);
  EXPECT_TRUE(layers_done_.empty());
  Report(1, 1, 2);  // of another's rank
  EXPECT_TRUE(layers_done_.empty());
  Report(2, 1, 1);
  EXPECT_EQ(layers_done_, std::vector<int>{1});
  Report(2, 1, 99);  // more than there are
  Report(2, 1, 1);   // late
  Report(1, 0, 99);
  EXPECT_EQ(layers_done_, (std::vector<int>{1, 2}));
  RankDone(1, 0, 0);
  RankDone(2, 1, kVocab);
  EXPECT_EQ(layers_done_, (std::vector<int>{1, 2}));
}

TEST_F(LeaderRunsTest, TheFirstAnswerOfARankCounts) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  Submit(std::vector<uint32_t>(200, 1));
  Prepare({1, 2});
  for (const double seconds : {3.0, 4.0}) {
    v1::WorkerMessage message = OfRun();
    message.mutable_rank_done()->set_run(run_);
    message.mutable_rank_done()->mutable_stats()->set_attention_seconds(seconds);
    Say(1, message);
  }
  RankDone(2, 1, kVocab);
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_EQ(answers_[0]->ranks[0].attention_seconds, 3);
}

TEST_F(LeaderRunsTest, AnAnswerHasAllLogits) {
  Join(1, Offer("a"));
  Submit({1, 2, 3});
  Prepare({1});
  RankDone(1, 0, kVocab - 1);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_EQ(answers_[0].status(), absl::InternalError("the run ended with 4 logits instead of 5; this is a "
                                                      "bug of Meshfill: please report it"));
}

TEST_F(LeaderRunsTest, PeakFlopsAreThoseOfTheRanksThatRan) {
  Join(1, Offer("a", 2));
  Join(2, Offer("b"));
  Submit(std::vector<uint32_t>(300, 1));
  Prepare({1, 2});
  RankDone(1, 0, 0);
  RankDone(1, 1, 0);
  RankDone(2, 2, kVocab);
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_EQ(answers_[0]->peak_flops, 2e12) << "half of the first worker's for each of its ranks";
}

// ---- How long it may take.

TEST_F(LeaderRunsTest, ARunInWhichAllWaitIsEnded) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  Submit(std::vector<uint32_t>(200, 1));
  Prepare({1, 2});
  Pass(absl::Milliseconds(3900), {1, 2});
  EXPECT_TRUE(sent_[1].back().has_run());
  Pass(absl::Milliseconds(200), {1, 2});
  EXPECT_EQ(sent_[1].back().abort().reason(), "no rank makes progress");
  EXPECT_EQ(leader_.capacity().ranks, 2) << "nobody is to blame";
  EXPECT_TRUE(answers_.empty());
}

TEST_F(LeaderRunsTest, LongPromptsHaveLongerToPrepare) {
  Join(1, Offer("a"));
  Submit(std::vector<uint32_t>(1'000'000, 1));
  Pass(Options().prepare_timeout + absl::Milliseconds(900), {1});
  EXPECT_TRUE(IsThere(1));
  Pass(absl::Milliseconds(200), {1});
  EXPECT_FALSE(IsThere(1));
}

TEST_F(LeaderRunsTest, ASlowBlockIsNoHang) {
  v1::Join offer = Offer("a");
  offer.mutable_speed()->set_gemm_flops_per_second(1e7);
  Join(1, offer);
  const auto choice = PlanForPool(Shape(), EngineOptions(), leader_.capacity(), 300, {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  const double block_seconds = choice->plan.predicted.compute_seconds / Shape().layers;
  const absl::Duration most = absl::Seconds(10 * block_seconds);
  ASSERT_GT(most, Options().hang_timeout + absl::Seconds(1));
  Submit(std::vector<uint32_t>(300, 1));
  Prepare({1});
  Pass(most - absl::Milliseconds(200), {1}, /*computing=*/true);
  EXPECT_TRUE(IsThere(1));
  Pass(absl::Milliseconds(400), {1}, /*computing=*/true);
  EXPECT_FALSE(IsThere(1));
}

TEST_F(LeaderRunsTest, WhoDoesNotStopIsLost) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  Submit(std::vector<uint32_t>(200, 1));
  Prepare({1, 2});
  leader_.CancelRequest(newest_, absl::CancelledError("enough"), now_);
  Do();
  EXPECT_TRUE(sent_[1].back().has_cancel()) << "nothing has failed";
  Stopped(1);
  Pass(Options().stop_timeout - absl::Milliseconds(100), {1, 2});
  EXPECT_TRUE(IsThere(2));
  Pass(absl::Milliseconds(200), {1, 2});
  EXPECT_FALSE(IsThere(2));
  EXPECT_TRUE(IsThere(1));
  EXPECT_TRUE(leader_.idle());
  EXPECT_EQ(Join(3, Offer("b")), "") << "it may come back";
}

// ---- Attempts.

TEST_F(LeaderRunsTest, ARequestHasSixAttempts) {
  Submit({1, 2, 3});
  for (Leader::Connection worker = 1; worker <= 6; ++worker) {
    EXPECT_TRUE(answers_.empty());
    ASSERT_EQ(Join(worker, Offer(absl::StrCat("w", worker))), "");
    v1::WorkerMessage failed = OfRun();
    failed.mutable_prepared()->set_run(PrepareOf(worker)->run());
    *failed.mutable_prepared()->mutable_outcome() = ToOutcome(absl::UnavailableError("no port"));
    Say(worker, failed);
    EXPECT_FALSE(IsThere(worker));
  }
  EXPECT_TRUE(answers_.empty()) << "until a worker is there";
  Join(7, Offer("w7"));
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_EQ(
      answers_[0].status(),
      absl::UnavailableError("the pool lost workers in each of 6 attempts at this request; try again later"));
  EXPECT_EQ(leader_.counters().retries, 5u);
  EXPECT_EQ(PrepareOf(7), nullptr);
}

// Workers that computed for longer than requests wait for the first one: whoever comes next goes on.
TEST_F(LeaderRunsTest, AfterALossARequestWaitsAnew) {
  Join(1, Offer("a"));
  Submit({1, 2, 3});
  Prepare({1});
  Compute(absl::Seconds(30), {1});
  leader_.OnDisconnected(1, now_);
  Pass(Options().empty_timeout - absl::Milliseconds(100), {});
  EXPECT_TRUE(answers_.empty());
  Join(2, Offer("b"));
  Prepare({2});
  Pass(absl::Seconds(1), {2});
  RankDone(2, 0, kVocab);
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_EQ(answers_[0]->attempts, 2);
  EXPECT_NEAR(answers_[0]->lost_seconds, 39.9, 0.1);
  EXPECT_NEAR(answers_[0]->seconds, 1, 0.1);
  EXPECT_EQ(leader_.counters().retries, 1u);
}

TEST_F(LeaderRunsTest, ARequestWaitsForTheFirstWorkerFromItsBegin) {
  now_ += absl::Hours(1);
  Submit({1, 2, 3});
  Pass(Options().empty_timeout - absl::Milliseconds(100), {});
  EXPECT_TRUE(answers_.empty());
  Pass(absl::Milliseconds(200), {});
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsUnavailable(answers_[0].status()));
}

TEST_F(LeaderRunsTest, AfterAPauseARequestWaitsAnew) {
  Submit({1, 2, 3});
  leader_.SetPaused(newest_, true, now_);
  Pass(absl::Seconds(30), {});
  EXPECT_TRUE(answers_.empty()) << "it is not its turn";
  leader_.SetPaused(newest_, false, now_);
  Pass(Options().empty_timeout - absl::Milliseconds(100), {});
  EXPECT_TRUE(answers_.empty());
  Pass(absl::Milliseconds(200), {});
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsUnavailable(answers_[0].status()));
}

TEST_F(LeaderRunsTest, PausesAreNeitherLostNorPrefill) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  Submit(std::vector<uint32_t>(200, 1));
  Prepare({1, 2});
  Compute(absl::Seconds(1), {1, 2});
  leader_.SetPaused(newest_, true, now_);
  Pass(absl::Seconds(10), {1, 2});
  leader_.SetPaused(newest_, false, now_);
  Compute(absl::Seconds(1), {1, 2});
  leader_.OnDisconnected(2, now_);
  Do();
  Stopped(1);
  Prepare({1});
  Compute(absl::Seconds(3), {1});
  RankDone(1, 0, kVocab);
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_NEAR(answers_[0]->lost_seconds, 2, 0.1);
  EXPECT_NEAR(answers_[0]->seconds, 3, 0.1);
  EXPECT_NEAR(answers_[0]->paused_seconds, 10, 0.1);
}

TEST_F(LeaderRunsTest, APoolThatShrankIsNotTheClientsFault) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  PrefillOptions options;
  options.tile = Tile{1, 2};
  Submit(std::vector<uint32_t>(200, 1), options);
  Prepare({1, 2});
  leader_.OnDisconnected(2, now_);
  Do();
  EXPECT_TRUE(answers_.empty());
  Stopped(1);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsUnavailable(answers_[0].status())) << answers_[0].status();
  EXPECT_EQ(answers_[0].status().message().find("the pool lost workers and now "), 0u)
      << answers_[0].status();
  Submit(std::vector<uint32_t>(200, 1), options);
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_TRUE(absl::IsInvalidArgument(answers_[1].status())) << "this one asks too much of it";
}

// ---- Leases on the K and V of a run.

class LeasesTest : public LeaderRunsTest {
 protected:
  static constexpr int64_t kTokens = 200;

  void JoinWithKv(int64_t bytes) {
    v1::Join offer = Offer("a");
    offer.set_kv_memory_bytes(static_cast<uint64_t>(bytes));
    Join(1, offer);
  }
  absl::Status Admit(const std::string& lease, absl::Duration lasts = absl::Hours(1)) {
    const auto choice = PlanForPool(Shape(), EngineOptions(), leader_.capacity(), kTokens, {});
    if (!choice.ok()) return choice.status();
    return leader_.AdmitKv({.lease = lease, .tenant = "t", .tokens = kTokens, .lasts = lasts}, choice->plan);
  }
  void PrepareRunOf(const std::string& lease) {
    Submit(std::vector<uint32_t>(kTokens, 1), {.kv_lease = lease});
    Prepare({1});
  }
};

TEST_F(LeasesTest, ALeaseIsOfItsTenantAndFollowsItsRun) {
  JoinWithKv(1 << 20);
  ASSERT_TRUE(Admit("x").ok());
  PrepareRunOf("x");
  EXPECT_EQ(leader_.kv().Find("x", "t", now_)->run, run_);
  EXPECT_EQ(leader_.kv().Find("x", "t", now_)->layers_done, 0);
  Report(1, 0, 1);
  EXPECT_EQ(leader_.kv().Find("x", "t", now_)->layers_done, 1);
  EXPECT_TRUE(absl::IsNotFound(leader_.kv().Find("x", "other", now_).status()));
  EXPECT_TRUE(absl::IsNotFound(leader_.kv().Renew("x", "other", absl::Hours(2), now_).status()));
  ASSERT_TRUE(leader_.kv().Renew("x", "t", absl::Minutes(5), now_).ok());
  Do();
  EXPECT_EQ(sent_[1].back().kv_lasts().lease(), "x");
  EXPECT_EQ(sent_[1].back().kv_lasts().seconds(), 300);
  RankDone(1, 0, kVocab);
  ASSERT_TRUE(leader_.kv().Keep("x", now_).ok());
  Do();
  EXPECT_EQ(sent_[1].back().kv_lasts().seconds(), 3600) << "as long as it was asked for, from its end on";
  EXPECT_EQ(leader_.kv_counts().lapsed, 0u);
  now_ += absl::Hours(1);
  leader_.kv().EndLapsed(now_);
  Do();
  EXPECT_EQ(leader_.kv_counts().lapsed, 1u);
  EXPECT_EQ(leader_.kv_counts().leases, 0);
  EXPECT_EQ(leader_.kv_counts().bytes, 0);
  EXPECT_EQ(sent_[1].back().kv_ends().lease(), "x");
}

TEST_F(LeasesTest, WorkersKeepWhatWasRenewedForAsLong) {
  JoinWithKv(1 << 20);
  ASSERT_TRUE(Admit("x").ok());
  PrepareRunOf("x");
  ASSERT_TRUE(leader_.kv().Renew("x", "t", absl::Hours(5), now_).ok());
  RankDone(1, 0, kVocab);
  ASSERT_TRUE(leader_.kv().Keep("x", now_).ok());
  Do();
  ASSERT_TRUE(sent_[1].back().has_kv_lasts());
  EXPECT_EQ(sent_[1].back().kv_lasts().seconds(), 5 * 3600);
}

// A worker that took part and has none of the tokens takes nothing with it.
TEST_F(LeasesTest, ALeaseOutlivesAWorkerThatHoldsNothingOfIt) {
  for (const Leader::Connection worker : {1, 2}) {
    v1::Join offer = Offer(absl::StrCat("w", worker));
    offer.set_kv_memory_bytes(1 << 20);
    ASSERT_EQ(Join(worker, offer), "");
  }
  constexpr int64_t kFew = 40;  // less than a stripe
  const auto choice = PlanForPool(Shape(), EngineOptions(), leader_.capacity(), kFew, {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  ASSERT_EQ(choice->plan.layout.ChunkTokens(1), 0);
  ASSERT_TRUE(
      leader_.AdmitKv({.lease = "x", .tenant = "t", .tokens = kFew, .lasts = absl::Hours(1)}, choice->plan)
          .ok());
  Submit(std::vector<uint32_t>(kFew, 1), {.kv_lease = "x"});
  Prepare({1, 2});
  RankDone(1, 0, kVocab);
  RankDone(2, 1, 0);
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_TRUE(leader_.kv().Keep("x", now_).ok());
  leader_.OnDisconnected(2, now_);
  EXPECT_TRUE(leader_.kv().Find("x", "t", now_).ok()) << leader_.kv().Find("x", "t", now_).status();
  leader_.OnDisconnected(1, now_);
  EXPECT_TRUE(absl::IsUnavailable(leader_.kv().Find("x", "t", now_).status()));
}

TEST_F(LeasesTest, LeasesThatLapseAtOnceAllEnd) {
  JoinWithKv(1 << 20);
  for (const auto& [lease, hours] : {std::pair("x", 1), {"y", 1}, {"z", 2}}) {
    ASSERT_TRUE(Admit(lease, absl::Hours(hours)).ok());
    PrepareRunOf(lease);
    RankDone(1, 0, kVocab);
    ASSERT_TRUE(leader_.kv().Keep(lease, now_).ok());
  }
  const absl::Time begin = now_;
  now_ += absl::Hours(1);
  EXPECT_EQ(leader_.kv().EndLapsed(now_), begin + absl::Hours(2));
  EXPECT_EQ(leader_.kv_counts().lapsed, 2u);
  EXPECT_EQ(leader_.kv_counts().leases, 1);
  now_ += absl::Hours(1);
  EXPECT_EQ(leader_.kv().EndLapsed(now_), absl::InfiniteFuture());
  EXPECT_EQ(leader_.kv_counts().leases, 0);
}

TEST_F(LeasesTest, ALeaseWithoutRoomIsRefusedAndCounted) {
  const int64_t bytes = KvShapeOf(Shape()).LayerBytes(kTokens) * Shape().layers;
  JoinWithKv(bytes);
  EXPECT_TRUE(Admit("x").ok());
  EXPECT_EQ(leader_.kv_counts().bytes, bytes);
  EXPECT_TRUE(absl::IsResourceExhausted(Admit("y")));
  EXPECT_EQ(leader_.kv_counts().refused, 1u);
  EXPECT_EQ(leader_.kv_counts().leases, 1);
  // The run of a lease takes the room that was held for it, and no more.
  PrepareRunOf("x");
  EXPECT_EQ(leader_.kv_counts().bytes, bytes);
  EXPECT_TRUE(sent_[1].back().has_run());
}

// Until it goes again nobody else is admitted to its room.
TEST_F(LeasesTest, ALeaseKeepsItsRoomWhenItsRunFails) {
  const int64_t bytes = KvShapeOf(Shape()).LayerBytes(kTokens) * Shape().layers;
  JoinWithKv(bytes);
  ASSERT_TRUE(Admit("x").ok());
  PrepareRunOf("x");
  Report(1, 0, 1);
  EXPECT_EQ(leader_.kv().Find("x", "t", now_)->layers_done, 1);
  Fail(1, 0, absl::UnavailableError("a peer is gone"));
  EXPECT_EQ(leader_.kv().Find("x", "t", now_)->layers_done, 0) << "all is computed again";
  EXPECT_EQ(leader_.kv_counts().bytes, bytes);
  EXPECT_TRUE(absl::IsResourceExhausted(Admit("y")));
  Stopped(1);
  Prepare({1});
  EXPECT_EQ(PrepareOf(1)->keep_kv().lease(), "x");
  RankDone(1, 0, kVocab);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_EQ(leader_.kv_counts().bytes, bytes);
}

TEST_F(LeasesTest, ALeaseWhoseRunIsCancelledLeavesItsRoom) {
  JoinWithKv(KvShapeOf(Shape()).LayerBytes(kTokens) * Shape().layers);
  ASSERT_TRUE(Admit("x").ok());
  PrepareRunOf("x");
  leader_.CancelRequest(newest_, absl::CancelledError("enough"), now_);
  EXPECT_EQ(leader_.kv_counts().bytes, 0);
  EXPECT_TRUE(Admit("y").ok());
}

// As if it had ended after its run: later prompts begin with what it has.
TEST_F(LeasesTest, ALeaseThatEndsBeforeItsRunLeavesAPrefix) {
  const int64_t bytes = KvShapeOf(Shape()).LayerBytes(kTokens) * Shape().layers;
  v1::Join offer = Offer("a");
  offer.set_kv_memory_bytes(static_cast<uint64_t>(3 * bytes));
  offer.set_kv_on_host(true);  // what no client wants kept is not cached
  Join(1, offer);
  const auto options_of = [](const std::string& lease, uint32_t id) {
    BlockHasher hasher(/*block_tokens=*/8, "");
    hasher.Append(std::vector<uint32_t>(kTokens, id));
    PrefillOptions options = {.layout = LayoutKind::kStriped};
    options.kv_lease = lease;
    options.block_names =
        std::make_shared<const KvBlockNames>(KvBlockNames{.block_tokens = 8, .hashes = hasher.hashes()});
    return options;
  };
  // The first one's ends while it runs, the second one's while it waits.
  for (const char* lease : {"x", "y"}) ASSERT_TRUE(Admit(lease).ok());
  Submit(std::vector<uint32_t>(kTokens, 1), options_of("x", 1));
  Prepare({1});
  EXPECT_EQ(PrepareOf(1)->keep_kv().lease(), "x");
  for (const char* lease : {"x", "y"}) leader_.kv().Release(lease, "t", now_);
  Do();
  EXPECT_EQ(sent_[1].back().kv_ends().lease(), "x");
  EXPECT_EQ(leader_.kv_counts().leases, 0);
  EXPECT_EQ(leader_.kv_counts().bytes, bytes) << "its run still has them";
  RankDone(1, 0, kVocab);
  Submit(std::vector<uint32_t>(kTokens, 2), options_of("y", 2));
  Prepare({1});
  EXPECT_EQ(PrepareOf(1)->keep_kv().lease(), "");
  EXPECT_TRUE(PrepareOf(1)->keep_kv().cache());
  RankDone(1, 0, kVocab);
  for (const uint32_t id : {1, 2})
    EXPECT_EQ(leader_.kv().LookUpPrefix(options_of("", id)).tokens(), kTokens) << id;
  EXPECT_EQ(leader_.kv_counts().cached_bytes, 2 * bytes);
  Submit(std::vector<uint32_t>(kTokens, 3), options_of("", 3));
  Prepare({1});
  EXPECT_FALSE(PrepareOf(1)->has_keep_kv()) << "nobody wanted it";
}

// ---- What dashboards see.

TEST_F(LeaderRunsTest, WorkersAreShownWithWhatTheyDo) {
  using State = Leader::WorkerState;
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  const auto expect = [this](const std::vector<std::pair<State, int>>& expected) {
    std::vector<std::pair<State, int>> shown;
    for (const Leader::WorkerView& view : leader_.workers()) shown.emplace_back(view.state, view.first_rank);
    EXPECT_EQ(shown, expected);
  };
  expect({{State::kReady, -1}, {State::kReady, -1}});
  Submit(std::vector<uint32_t>(200, 1));
  expect({{State::kPreparing, 0}, {State::kPreparing, 1}});
  Prepare({1, 2});
  expect({{State::kRunning, 0}, {State::kRunning, 1}});
  Join(3, Offer("c"));
  expect({{State::kRunning, 0}, {State::kRunning, 1}, {State::kReady, -1}});
  v1::WorkerMessage leave = OfRun();
  leave.mutable_leave();
  Say(1, leave);
  expect({{State::kRunning, 1}, {State::kReady, -1}, {State::kDraining, 0}});
  leader_.CancelRequest(newest_, absl::CancelledError("enough"), now_);
  expect({{State::kStopping, 1}, {State::kReady, -1}, {State::kDraining, 0}});
  EXPECT_STREQ(WorkerStateName(State::kStopping), "stopping");
}

TEST_F(LeaderRunsTest, IdleWorkersHearThatTheLeaderLives) {
  Join(1, Offer("a"));
  Pass(absl::Seconds(2), {1});
  EXPECT_NEAR(heartbeats_[1], 10, 1);
}

TEST_F(LeaderRunsTest, AllWorkersHearThatSpeedsAreWrong) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  leader_.ForgetSpeeds();
  Do();
  for (const Leader::Connection worker : {1, 2}) EXPECT_TRUE(sent_[worker].back().has_forget_speed());
}

class PlacedProbesTest : public LeaderRunsTest {
 protected:
  PlacedProbesTest() : LeaderRunsTest(Measuring()) {}
  static Leader::Options Measuring() {
    Leader::Options options = Options();
    v1::PoolSection pool;
    pool.set_measure_links(true);
    pool.set_link_bytes_per_second(1e9);
    pool.set_host_bytes_per_second(0);
    options.links = ConfiguredLinksOf(pool);
    return options;
  }
};

// Links on a host are measured between ranks that are there, wherever a placement has put them.
TEST_F(PlacedProbesTest, RanksOfAHostMeasureItsLinks) {
  for (const auto& [connection, name] :
       std::vector<std::pair<Leader::Connection, std::string>>{{1, "a"}, {2, "b"}}) {
    v1::Join offer = Offer(name, 2);
    offer.set_host(absl::StrCat("host ", name));
    ASSERT_EQ(Join(connection, offer), "");
  }
  placement_ = {.seat_of_rank = {0, 2, 1, 3}, .name = "turned"};
  PrefillOptions options;
  options.tile = Tile{2, 2};
  Submit(std::vector<uint32_t>(400, 1), options);
  Prepare({1, 2});
  const v1::Run run = RunOf(1);
  ASSERT_EQ(run.probes_size(), 1);
  const auto& peers = run.probes(0).peers();
  EXPECT_EQ(std::vector<int>(peers.begin(), peers.end()), (std::vector<int>{2, 3, 0, 1}));
}

}  // namespace
}  // namespace meshfill
