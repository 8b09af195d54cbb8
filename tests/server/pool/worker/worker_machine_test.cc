// The worker's machine, event by event, in virtual time; what it does when everything fails at once is
// pool_simulation_test's.
#include "server/pool/worker/worker_machine.h"

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/pool/worker/worker_machine_fixture.h"

namespace meshfill {
namespace {

using WorkerMachineTest = WorkerMachineFixture;

TEST_F(WorkerMachineTest, JoinsWithItsOfferAndSaysThatItLives) {
  Tick();
  EXPECT_EQ(connects_, 1);
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(sent_.front().join().name(), "w");
  EXPECT_FALSE(machine_.member());
  Hear([](v1::LeaderMessage& message) { message.mutable_welcome(); });
  EXPECT_TRUE(machine_.member());
  Tick();
  ASSERT_EQ(sent_.size(), 2u);
  EXPECT_TRUE(sent_.back().has_progress());
  EXPECT_EQ(sent_.back().epoch(), kEpoch);
  EXPECT_EQ(sent_.back().progress().run(), 0u);
  Tick(absl::Milliseconds(100));
  EXPECT_EQ(sent_.size(), 2u) << "before progress_interval";
  Tick(absl::Milliseconds(100));
  EXPECT_EQ(sent_.size(), 3u);
}

TEST_F(WorkerMachineTest, TakesARunFromPrepareToFinish) {
  Join();
  HearPrepare(5);
  EXPECT_EQ(machine_.reserved_bytes(), 100);
  EXPECT_TRUE(prepared_.empty()) << "the tokens are not there";
  HearShard(5, 1);
  EXPECT_TRUE(prepared_.empty());
  HearShard(5, 2);
  ASSERT_EQ(prepared_.size(), 1u);
  ASSERT_EQ(prepared_[0].shards.size(), 2u);
  EXPECT_EQ(prepared_[0].first_rank, kFirstRank);
  for (int rank = 0; rank < kRanks; ++rank) {
    std::vector<uint32_t> ids(plan_.layout.ChunkTokens(plan_.RankAt(kFirstRank + rank)));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint32_t>(i % 90);
    EXPECT_EQ(prepared_[0].shards[rank], ids) << "of both messages, in their order";
  }
  EXPECT_TRUE(sent_.empty());

  machine_.OnRunPrepared(5, std::vector<std::string>{"b", "c"});
  Do();
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(sent_[0].epoch(), kEpoch);
  EXPECT_EQ(sent_[0].prepared().addresses_size(), 2);
  EXPECT_EQ(sent_[0].prepared().hash(), RunHash(plan_, kFirstRank, prepared_[0].shards));
  EXPECT_TRUE(started_.empty());

  HearRun(5);
  ASSERT_EQ(started_.size(), 1u);
  EXPECT_EQ(started_[0].addresses, (std::vector<std::string>{"a", "b", "c", "d"}));
  sent_.clear();
  progress_ = {{5, {{.rank = 1, .layers_done = 1, .operations = 9, .computing = true}}}, {4, {{.rank = 2}}}};
  Tick(absl::Milliseconds(200));
  ASSERT_EQ(sent_.size(), 1u) << "of a run that is not there, nothing is said";
  EXPECT_EQ(sent_[0].progress().run(), 5u);
  ASSERT_EQ(sent_[0].progress().ranks_size(), 1);
  EXPECT_EQ(sent_[0].progress().ranks(0).operations(), 9u);
  EXPECT_EQ(sent_[0].progress().ranks(0).layers_done(), 1u);
  EXPECT_TRUE(sent_[0].progress().ranks(0).computing());

  machine_.OnRankDone(5, 1, RankOutput{.logits = {1, 2, 3}});
  machine_.OnRankDone(5, 2, absl::InternalError("NaN"));
  Do();
  ASSERT_EQ(sent_.size(), 4u);
  EXPECT_EQ(sent_[1].rank_done().logits_size(), 3);
  EXPECT_TRUE(sent_[2].has_progress()) << "its last word before it fails";
  EXPECT_EQ(FromOutcome(sent_[3].rank_done().outcome()), absl::InternalError("NaN"));
  Hear([](v1::LeaderMessage& message) { message.mutable_finish()->set_run(5); });
  EXPECT_EQ(released_, std::vector<uint64_t>{5});
  EXPECT_EQ(machine_.reserved_bytes(), 0);
}

TEST_F(WorkerMachineTest, IgnoresWhatComesTwiceOrLate) {
  Join();
  HearPrepare(5);
  HearShard(5, 1);
  HearShard(5, 1);
  HearPrepare(5);
  HearRun(5);  // it is not prepared
  HearShard(4, 2);
  HearShard(5, 0);  // of another worker
  EXPECT_TRUE(prepared_.empty());
  EXPECT_TRUE(started_.empty());
  HearShard(5, 2);
  ASSERT_EQ(prepared_.size(), 1u);
  EXPECT_EQ(static_cast<int64_t>(prepared_[0].shards[0].size()),
            plan_.layout.ChunkTokens(plan_.RankAt(kFirstRank)));
  HearPrepare(3);
  EXPECT_EQ(machine_.reserved_bytes(), 100);
  v1::LeaderMessage other;
  other.mutable_cancel()->set_run(5);
  machine_.OnMessage(connection_ + 1, other, now_);
  Do();
  EXPECT_TRUE(stopped_.empty());
}

// A lease may end between the parts of its run's Prepare: nobody would end what is kept under it afterwards.
TEST_F(WorkerMachineTest, KeepsNothingUnderALeaseThatEndedMeanwhile) {
  Join();
  for (const uint64_t run : {5, 6}) {
    HearPrepare(run, 100, "lease");
    HearShard(run, 1);
    Hear([&](v1::LeaderMessage& message) {
      message.mutable_kv_ends()->set_lease(run == 5 ? "another" : "lease");
    });
    HearShard(run, 2);
    ASSERT_EQ(prepared_.size(), run - 4);
    EXPECT_EQ(prepared_.back().keep_kv.has_value(), run == 5);
  }
  HearPrepare(7, 100, "lease", /*cache=*/true);
  HearShard(7, 1);
  Hear([](v1::LeaderMessage& message) { message.mutable_kv_ends()->set_lease("lease"); });
  HearShard(7, 2);
  ASSERT_EQ(prepared_.size(), 3u);
  ASSERT_TRUE(prepared_.back().keep_kv.has_value()) << "for later prompts";
  EXPECT_EQ(prepared_.back().keep_kv->lease, "");
  EXPECT_TRUE(prepared_.back().keep_kv->cache);
}

TEST_F(WorkerMachineTest, ReservesNoMoreThanItOffers) {
  Join();
  HearPrepare(1, kMemory + 1);
  ASSERT_EQ(sent_.size(), 1u);
  const absl::Status status = FromOutcome(sent_[0].prepared().outcome());
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_EQ(machine_.reserved_bytes(), 0);
  HearPrepare(2, 600);
  EXPECT_EQ(machine_.reserved_bytes(), 600);
  sent_.clear();
  HearPrepare(3, 600);  // beside the other
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_TRUE(absl::IsFailedPrecondition(FromOutcome(sent_[0].prepared().outcome())));
  HearPrepare(4, 400);
  EXPECT_EQ(machine_.reserved_bytes(), 1000);
}

TEST_F(WorkerMachineTest, RefusesAPartThatIsNotOfItsPlan) {
  Join();
  Hear([&](v1::LeaderMessage& message) {
    v1::Prepare& prepare = *message.mutable_prepare();
    prepare.set_run(1);
    *prepare.mutable_plan() = ToRunPlan(plan_);
    prepare.set_first_rank(3);
    prepare.set_ranks(2);
  });
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_TRUE(absl::IsInternal(FromOutcome(sent_[0].prepared().outcome())));
}

// A run on any of the worker's ranks, alone or in a pack.
TEST_F(WorkerMachineTest, TellsTheHostWhichOfItsRanksAndWhosePass) {
  Join();
  const Plan whole = MakePlan({.layers = 2,
                               .hidden = 64,
                               .intermediate = 64,
                               .q_heads = 4,
                               .kv_heads = 2,
                               .head_dim = 16,
                               .vocab = 100,
                               .context_tokens = 4096},
                              PoolSpeed{}, {.tokens = 20, .ranks = 1})
                         .value()
                         .plan;
  uint64_t run = 0;
  const auto prepare = [&](const Plan& plan, const std::function<void(v1::Prepare&)>& change) {
    sent_.clear();
    prepared_.clear();
    Hear([&](v1::LeaderMessage& message) {
      v1::Prepare& filled = *message.mutable_prepare();
      filled.set_run(++run);
      *filled.mutable_plan() = ToRunPlan(plan);
      filled.set_ranks(1);
      filled.set_local_rank(kRanks - 1);
      filled.set_pack(9);
      filled.set_pack_runs(4);
      change(filled);
    });
    Hear([&](v1::LeaderMessage& message) {
      message.mutable_shard()->set_run(run);
      for (int i = 0; i < 20; ++i) message.mutable_shard()->add_ids(1);
    });
    return sent_.empty() ? absl::OkStatus() : FromOutcome(sent_[0].prepared().outcome());
  };
  EXPECT_TRUE(prepare(whole, [](v1::Prepare&) {}).ok());
  ASSERT_EQ(prepared_.size(), 1u);
  EXPECT_EQ(prepared_[0].local_rank, kRanks - 1);
  ASSERT_TRUE(prepared_[0].pack.has_value());
  EXPECT_EQ(prepared_[0].pack->number, 9u);
  EXPECT_EQ(prepared_[0].pack->runs, 4);
  EXPECT_TRUE(prepare(whole, [](v1::Prepare& of) { of.clear_pack(); }).ok());
  EXPECT_FALSE(prepared_.at(0).pack.has_value());
  EXPECT_TRUE(prepare(whole, [](v1::Prepare& of) { of.set_pack_runs(4096); }).ok());

  const absl::Status beyond = prepare(whole, [](v1::Prepare& of) { of.set_local_rank(kRanks); });
  EXPECT_EQ(beyond, absl::InternalError("the leader gave 1 ranks from its rank 2 to a worker of 2"));
  const absl::Status wraps = prepare(whole, [](v1::Prepare& of) { of.set_local_rank(UINT32_MAX); });
  EXPECT_TRUE(absl::IsInternal(wraps)) << wraps;
  const absl::Status ranks = prepare(plan_, [](v1::Prepare& of) { of.set_ranks(1); });
  EXPECT_EQ(ranks, absl::InternalError("the leader lets 4 runs of 4 ranks share a pass, which only whole "
                                       "prompts on one rank with all weights do"));
  for (const uint32_t runs : {0u, 4097u, UINT32_MAX}) {
    const absl::Status status = prepare(whole, [&](v1::Prepare& of) { of.set_pack_runs(runs); });
    EXPECT_TRUE(absl::IsInternal(status)) << runs;
  }
  EXPECT_TRUE(absl::IsInternal(prepare(whole, [](v1::Prepare& of) { of.set_weight_shares(1); })));
  EXPECT_TRUE(absl::IsInternal(prepare(whole, [](v1::Prepare& of) {
    of.set_more_pieces(true);
    of.set_tokens_ahead(5);
  })));
  EXPECT_TRUE(prepared_.empty());
}

TEST_F(WorkerMachineTest, RefusesMoreTokensThanARankHas) {
  Join();
  HearPrepare(1);
  HearShard(1, kFirstRank);
  sent_.clear();
  const int64_t tokens = plan_.layout.ChunkTokens(plan_.RankAt(kFirstRank + 1));
  for (const int64_t begin : {int64_t{0}, tokens - 1}) {
    Hear([&](v1::LeaderMessage& message) {
      v1::Shard& shard = *message.mutable_shard();
      shard.set_run(1);
      shard.set_rank(kFirstRank + 1);
      shard.set_begin(static_cast<uint64_t>(begin));
      for (int64_t i = begin; i < tokens - 1 || (begin > 0 && i <= tokens); ++i) shard.add_ids(1);
    });
    ASSERT_EQ(sent_.size(), begin == 0 ? 0u : 1u) << "both together are one too many";
  }
  EXPECT_TRUE(absl::IsInternal(FromOutcome(sent_[0].prepared().outcome())));
  EXPECT_EQ(machine_.reserved_bytes(), 0);
  HearShard(1, kFirstRank + 1);
  EXPECT_TRUE(prepared_.empty()) << "that run is over";
}

TEST_F(WorkerMachineTest, RefusesAPrefixWhoseTokensWrapAround) {
  Join();
  Hear([&](v1::LeaderMessage& message) {
    v1::Prepare& prepare = *message.mutable_prepare();
    prepare.set_run(1);
    *prepare.mutable_plan() = ToRunPlan(plan_);
    prepare.mutable_plan()->set_cached_tokens(64);
    prepare.set_ranks(1);
    prepare.add_prefix()->set_tokens(UINT64_MAX - 63);
    prepare.add_prefix()->set_tokens(128);
  });
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_TRUE(absl::IsInternal(FromOutcome(sent_[0].prepared().outcome())));
}

TEST_F(WorkerMachineTest, KeepsRunsApart) {
  Join();
  BeginRun(5);
  BeginRun(6);
  EXPECT_EQ(machine_.reserved_bytes(), 200);
  progress_ = {{5, {{.rank = 1}}}, {6, {{.rank = 1}, {.rank = 2}}}};
  Tick(absl::Milliseconds(200));
  ASSERT_EQ(sent_.size(), 2u);
  EXPECT_EQ(sent_[0].progress().run(), 5u);
  EXPECT_EQ(sent_[1].progress().run(), 6u);
  EXPECT_EQ(sent_[1].progress().ranks_size(), 2);

  HearCancel(5);
  EXPECT_EQ(stopped_, std::vector<uint64_t>{5});
  EXPECT_TRUE(ConfirmedStops().empty()) << "the host still stops";
  machine_.OnRunStopped(5, now_);
  Do();
  EXPECT_EQ(ConfirmedStops(), std::vector<uint64_t>{5});
  EXPECT_EQ(machine_.reserved_bytes(), 100);
  sent_.clear();
  machine_.OnRankDone(5, 1, RankOutput{});  // late
  machine_.OnRankDone(6, 1, RankOutput{});
  Do();
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(sent_[0].rank_done().run(), 6u);
}

TEST_F(WorkerMachineTest, LetsTheRunStandStillThatIsNamed) {
  const auto pause = [&](uint64_t run) {
    Hear([&](v1::LeaderMessage& message) { message.mutable_pause()->set_run(run); });
  };
  const auto resume = [&](uint64_t run) {
    Hear([&](v1::LeaderMessage& message) { message.mutable_resume()->set_run(run); });
  };
  Join();
  BeginRun(5);
  BeginRun(6);
  HearPrepare(7);
  pause(5);
  pause(7);  // not before Run
  pause(99);
  EXPECT_EQ(turns_, (std::vector<std::pair<uint64_t, bool>>{{5, false}}));
  EXPECT_EQ(machine_.reserved_bytes(), 300) << "with all it has";
  resume(5);
  pause(6);
  HearCancel(6);
  EXPECT_EQ(stopped_, std::vector<uint64_t>{6});
  resume(6);  // it is being stopped
  EXPECT_EQ(turns_, (std::vector<std::pair<uint64_t, bool>>{{5, false}, {5, true}, {6, false}}));
  Hear([](v1::LeaderMessage& message) { message.mutable_finish()->set_run(5); });
  pause(5);
  EXPECT_EQ(turns_.size(), 3u) << "it is over";
  EXPECT_EQ(pauses_, (std::vector<uint64_t>{0, 0}));
}

TEST_F(WorkerMachineTest, TellsWhereItsRanksStandStill) {
  const auto pause_at = [&](uint64_t run) {
    Hear([&](v1::LeaderMessage& message) {
      message.mutable_pause_at()->set_run(run);
      message.mutable_pause_at()->set_number(3);
      message.mutable_pause_at()->set_messages(17);
    });
  };
  Join();
  BeginRun(5);
  HearPrepare(6);
  sent_.clear();
  Hear([](v1::LeaderMessage& message) {
    message.mutable_pause()->set_run(5);
    message.mutable_pause()->set_number(3);
  });
  EXPECT_EQ(pauses_, std::vector<uint64_t>{3});
  machine_.OnRunPaused(5, 3, 16, /*still=*/false);
  pause_at(5);
  pause_at(6);  // it has not begun
  EXPECT_EQ(paused_at_, std::vector<std::string>{"run 5, pause 3, at 17"});
  machine_.OnRunPaused(5, 3, 0, /*still=*/true);
  machine_.OnRunPaused(6, 3, 0, /*still=*/true);
  Do();
  ASSERT_EQ(sent_.size(), 2u);
  for (const v1::WorkerMessage& message : sent_) {
    EXPECT_EQ(message.epoch(), kEpoch);
    EXPECT_EQ(message.paused().run(), 5u);
    EXPECT_EQ(message.paused().number(), 3u);
  }
  EXPECT_EQ(sent_[0].paused().messages(), 16u);
  EXPECT_FALSE(sent_[0].paused().still());
  EXPECT_TRUE(sent_[1].paused().still());
}

TEST_F(WorkerMachineTest, ConfirmsEveryCancel) {
  Join();
  HearCancel(3);  // it never began
  EXPECT_EQ(ConfirmedStops(), std::vector<uint64_t>{3});
  HearPrepare(3);
  EXPECT_EQ(machine_.reserved_bytes(), 0) << "a Prepare that comes after its Cancel is late";
  HearPrepare(4);
  HearCancel(4);  // its host knows nothing of it
  EXPECT_EQ(ConfirmedStops(), (std::vector<uint64_t>{3, 4}));
  EXPECT_TRUE(stopped_.empty());
  EXPECT_EQ(machine_.reserved_bytes(), 0);
}

TEST_F(WorkerMachineTest, AsksItsHostToStopOnce) {
  Join();
  BeginRun(5);
  HearCancel(5);
  Hear([](v1::LeaderMessage& message) { message.mutable_abort()->set_run(5); });
  machine_.OnDisconnected(connection_, absl::UnavailableError("reset"), now_);
  Do();
  EXPECT_EQ(stopped_, std::vector<uint64_t>{5});
}

TEST_F(WorkerMachineTest, StopsAllRunsWhenTheLeaderIsGoneAndJoinsOnceTheHostStandsStill) {
  Join();
  BeginRun(5);
  HearPrepare(6);
  machine_.OnDisconnected(connection_, absl::UnavailableError("reset"), now_);
  Do();
  EXPECT_FALSE(machine_.member());
  EXPECT_EQ(stopped_, std::vector<uint64_t>{5});
  EXPECT_EQ(machine_.reserved_bytes(), 100);
  Tick(absl::Seconds(10));
  EXPECT_EQ(connects_, 1) << "its ranks still compute";
  machine_.OnRunStopped(5, now_);
  Tick();
  EXPECT_EQ(connects_, 2);
  EXPECT_TRUE(ConfirmedStops().empty()) << "nobody waits for it";
  EXPECT_TRUE(sent_.back().has_join());
  EXPECT_EQ(sent_.back().epoch(), kEpoch) << "the newest that it has heard of";
}

TEST_F(WorkerMachineTest, SaysOnceWhyItCannotJoin) {
  // What a refused handshake looks like differs from try to try.
  const auto try_to_join = [this](const std::string& why) {
    Reconnect();
    machine_.OnDisconnected(connection_, absl::UnavailableError(why), now_);
    Do();
  };
  for (int round = 0; round < 3; ++round) {
    for (const char* why : {"reset", "closed"}) try_to_join(why);
  }
  ASSERT_EQ(lines_.size(), 2u);
  EXPECT_EQ(lines_[0], R"(cannot join yet: "the control stream ended: reset")");
  EXPECT_EQ(lines_[1], R"(cannot join yet: "the control stream ended: closed")");
  Reconnect();
  HearWelcome();
  machine_.OnDisconnected(connection_, absl::UnavailableError("reset"), now_);
  lines_.clear();
  Do();
  try_to_join("reset");
  ASSERT_FALSE(lines_.empty());
  EXPECT_EQ(lines_.back(), R"(cannot join yet: "the control stream ended: reset")") << "it had joined";

  // It does not remember for ever.
  const size_t before = lines_.size();
  for (int trouble = 0; trouble < 20; ++trouble) try_to_join(absl::StrCat("trouble ", trouble));
  EXPECT_EQ(lines_.size(), before + 20);
  try_to_join("reset");
  EXPECT_EQ(lines_.size(), before + 21);
}

TEST_F(WorkerMachineTest, TriesAgainOrExitsAsTheLeaderThatRefusesItSays) {
  Reconnect();
  HearRefused(/*retry=*/true);
  EXPECT_FALSE(exit_.has_value());
  EXPECT_EQ(disconnects_, 1);
  ASSERT_FALSE(lines_.empty());
  EXPECT_EQ(lines_.back(), R"(cannot join yet: "no")");
  Reconnect();
  HearRefused(/*retry=*/false);
  ASSERT_TRUE(exit_.has_value());
  EXPECT_EQ(*exit_, absl::FailedPreconditionError("the leader refused this worker: no"));
  EXPECT_EQ(disconnects_, 2);
}

TEST_F(WorkerMachineTest, WhoHasJoinedIsNotRefused) {
  Join();
  HearRefused(/*retry=*/false);
  EXPECT_FALSE(exit_.has_value());
  EXPECT_TRUE(machine_.member());
}

// A Prepare that contradicts itself or its plan is the leader's mistake: it is answered, and nothing stays of
// it.
TEST_F(WorkerMachineTest, RefusesAPrepareThatContradictsItself) {
  Join();
  using Change = std::function<void(v1::Prepare&)>;
  const std::vector<std::pair<std::string, Change>> bad = {
      {"0 ranks", [](v1::Prepare& prepare) { prepare.set_ranks(0); }},
      {"3 ranks", [](v1::Prepare& prepare) { prepare.set_ranks(kRanks + 1); }},
      {"5 tokens of earlier runs for 0", [](v1::Prepare& prepare) { prepare.add_prefix()->set_tokens(5); }},
      {"that there is none", [](v1::Prepare& prepare) { prepare.set_tokens_ahead(5); }},
      {"are such", [](v1::Prepare& prepare) { prepare.set_more_pieces(true); }},
      {"share 2 of 2",
       [](v1::Prepare& prepare) {
         prepare.set_weight_shares(2);
         prepare.set_weight_share(2);
       }},
      {"LM head to share 2",
       [](v1::Prepare& prepare) {
         prepare.set_weight_shares(2);
         prepare.set_weight_head_share(2);
       }},
      {"of 5 of the weights", [](v1::Prepare& prepare) { prepare.set_weight_shares(5); }},
      {"a plan", [](v1::Prepare& prepare) { prepare.mutable_plan()->set_a(3); }}};
  uint64_t run = 0;
  for (const auto& [reason, change] : bad) {
    SCOPED_TRACE(reason);
    sent_.clear();
    Hear([&, &change = change](v1::LeaderMessage& message) {
      v1::Prepare& prepare = *message.mutable_prepare();
      prepare.set_run(++run);
      *prepare.mutable_plan() = ToRunPlan(plan_);
      prepare.set_first_rank(kFirstRank);
      prepare.set_ranks(kRanks);
      prepare.set_reserve_bytes(100);
      change(prepare);
    });
    ASSERT_EQ(sent_.size(), 1u);
    const absl::Status refused = FromOutcome(sent_[0].prepared().outcome());
    EXPECT_FALSE(refused.ok());
    EXPECT_NE(refused.message().find(reason), absl::string_view::npos) << refused;
    EXPECT_EQ(sent_[0].prepared().run(), run);
    EXPECT_EQ(machine_.reserved_bytes(), 0);
  }
  HearPrepare(++run);
  EXPECT_EQ(machine_.reserved_bytes(), 100);
}

TEST_F(WorkerMachineTest, MeasuresOnlyWhereAllRanksArePaired) {
  Join();
  for (const int bad : {-1, 0, 1}) {  // which of the two is no pairing
    const uint64_t run = 6 + static_cast<uint64_t>(bad);
    HearPrepare(run);
    for (int seat = kFirstRank; seat < kFirstRank + kRanks; ++seat) HearShard(run, seat);
    machine_.OnRunPrepared(run, std::vector<std::string>{"b", "c"});
    Hear([&](v1::LeaderMessage& message) {
      message.mutable_run()->set_run(run);
      for (const std::vector<int>& peers :
           {std::vector<int>{bad == 0 ? 2 : 1, 0, 3, 2}, {bad == 1 ? 1 : 2, 3, 0, 1}}) {
        message.mutable_run()->add_probes()->mutable_peers()->Assign(peers.begin(), peers.end());
      }
    });
    ASSERT_EQ(started_.back().run, run);
    EXPECT_EQ(started_.back().probes.size(), bad < 0 ? 2u : 0u) << "all take part, or none";
  }
  RankOutput output;
  output.links = {Link{.latency_seconds = 1e-5, .bytes_per_second = 1e9}, std::nullopt};
  output.probe_seconds = 0.25;
  sent_.clear();
  machine_.OnRankDone(5, 1, std::move(output));
  Do();
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(sent_[0].rank_done().probe_seconds(), 0.25);
  const std::vector<std::optional<Link>> links = FromProto(sent_[0].rank_done().links());
  ASSERT_EQ(links.size(), 2u);
  EXPECT_EQ(links[0]->bytes_per_second, 1e9);
  EXPECT_FALSE(links[1].has_value());
}

// The offer of a worker whose memory nobody bounds has 0.
class UnboundedWorkerTest : public WorkerMachineFixture {
 protected:
  UnboundedWorkerTest() : WorkerMachineFixture(Unbounded()) {}
  static WorkerMachine::Options Unbounded() {
    WorkerMachine::Options options = Options();
    options.offer.set_memory_bytes(0);
    return options;
  }
};

TEST_F(UnboundedWorkerTest, TakesWhatItIsGiven) {
  Join();
  HearPrepare(1, uint64_t{1} << 40);
  EXPECT_EQ(machine_.reserved_bytes(), int64_t{1} << 40);
}

}  // namespace
}  // namespace meshfill
