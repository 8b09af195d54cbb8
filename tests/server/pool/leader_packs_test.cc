// Requests that share a pass: they begin together or not at all, each as a run of its own on one rank, and
// what ends one of them before its answer ends all of its pass, which are then tried by themselves.
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/pool/leader_fixture.h"

namespace meshfill {
namespace {

v1::Join PackOffer(const std::string& name, uint32_t ranks = 1) {
  v1::Join offer = Offer(name, ranks);
  offer.set_rows_independent(true);
  return offer;
}

// Two workers, of two ranks and of one.
class PacksLeaderTest : public LeaderFixture {
 protected:
  PacksLeaderTest() : LeaderFixture(Options(2)) { tokens_ = std::vector<uint32_t>(40, 1); }

  void JoinBoth() {
    ASSERT_EQ(Join(1, PackOffer("a", 2)), "");
    ASSERT_EQ(Join(2, PackOffer("b")), "");
  }
  // One request for each of these ranks of the pool; the runs, in this order. Empty: there is no room.
  std::vector<uint64_t> SubmitPack(const std::vector<int>& ranks, double seconds = 1) {
    std::vector<Leader::PackedRequest> requests;
    for (const int rank : ranks) {
      const double share = 1.0 / static_cast<double>(std::count(ranks.begin(), ranks.end(), rank));
      requests.push_back(
          {.request = {.id = absl::StrCat("p", requests.size()), .tokens = tokens_, .options = {}},
           .rank = rank,
           .share = share});
    }
    tickets_ = leader_.SubmitPack(requests, seconds, now_);
    std::vector<uint64_t> runs;
    for (const Leader::Ticket ticket : tickets_) runs.push_back(leader_.run_of(ticket));
    Do();
    pack_epoch_ = leader_.epoch();
    return runs;
  }
  v1::WorkerMessage OfPack() const {
    v1::WorkerMessage message;
    message.set_epoch(pack_epoch_);
    return message;
  }
  // The answer of a run that shares a pass: without addresses.
  void SayPrepared(Leader::Connection worker, uint64_t run) {
    v1::WorkerMessage message = GoodAnswer(*PrepareOf(worker, run));
    message.set_epoch(pack_epoch_);
    message.mutable_prepared()->clear_addresses();
    Say(worker, message);
  }
  void SayDone(Leader::Connection worker, uint64_t run, const absl::Status& status = absl::OkStatus()) {
    v1::WorkerMessage message = OfPack();
    v1::RankDone& done = *message.mutable_rank_done();
    done.set_run(run);
    *done.mutable_outcome() = ToOutcome(status);
    for (int i = 0; status.ok() && i < kVocab; ++i) done.add_logits(static_cast<float>(run));
    Say(worker, message);
  }
  void SayStopped(Leader::Connection worker, uint64_t run) {
    v1::WorkerMessage message = OfPack();
    message.mutable_stopped()->set_run(run);
    Say(worker, message);
  }
  // What the worker heard of the run, behind its tokens: "run finish", say.
  std::string Heard(Leader::Connection worker, uint64_t run) const {
    std::string heard;
    for (const v1::LeaderMessage& message : sent_.at(worker)) {
      if (message.has_run() && message.run().run() == run) heard += " run";
      if (message.has_pause() && message.pause().run() == run) heard += " pause";
      if (message.has_resume() && message.resume().run() == run) heard += " resume";
      if (message.has_finish() && message.finish().run() == run) heard += " finish";
      if (message.has_cancel() && message.cancel().run() == run) heard += " cancel";
      if (message.has_abort() && message.abort().run() == run) heard += " abort";
    }
    return heard;
  }

  std::vector<Leader::Ticket> tickets_;
  uint64_t pack_epoch_ = 0;
};

TEST_F(PacksLeaderTest, EachIsARunOnItsRank) {
  for (const Leader::Connection worker : {1, 2}) {
    v1::Join offer = worker == 1 ? PackOffer("a", 2) : PackOffer("b");
    offer.set_data_plane("gloo");  // its addresses are checked, where it has some
    ASSERT_EQ(Join(worker, offer), "");
  }
  EXPECT_EQ(leader_.RankCapacity()->ranks, 1);
  const std::vector<uint64_t> runs = SubmitPack({0, 1, 1, 2}, /*seconds=*/40);
  ASSERT_EQ(runs.size(), 4u);
  const v1::Prepare* first = PrepareOf(1, runs[0]);
  ASSERT_NE(first, nullptr);
  const Leader::Connection workers[] = {1, 1, 1, 2};
  const int pool_ranks[] = {0, 1, 1, 2};
  const uint32_t local_ranks[] = {0, 1, 1, 0}, on_rank[] = {1, 2, 2, 1};
  for (size_t i = 0; i < runs.size(); ++i) {
    const v1::Prepare* prepare = PrepareOf(workers[i], runs[i]);
    ASSERT_NE(prepare, nullptr) << i;
    EXPECT_EQ(prepare->plan().ranks(), 1u);
    EXPECT_EQ(prepare->ranks(), 1u);
    EXPECT_EQ(prepare->local_rank(), local_ranks[i]) << i;
    EXPECT_NE(prepare->pack(), 0u);
    EXPECT_EQ(prepare->pack(), first->pack());
    EXPECT_EQ(prepare->pack_runs(), on_rank[i]) << i;
    EXPECT_EQ(prepare->plan().predicted_seconds(), 40) << "of the pass";
    SayPrepared(workers[i], runs[i]);
    EXPECT_EQ(Heard(workers[i], runs[i]), " run");
  }
  for (size_t i = 0; i < runs.size(); ++i) {
    SayDone(workers[i], runs[i]);
    EXPECT_EQ(Heard(workers[i], runs[i]), " run finish");
    ASSERT_EQ(answers_.size(), i + 1);
    ASSERT_TRUE(answers_.back().ok()) << answers_.back().status();
    EXPECT_EQ(answers_.back()->logits[0], static_cast<float>(runs[i]));
    EXPECT_EQ(answers_.back()->pack_prompts, 4);
    EXPECT_EQ(answers_.back()->pack_share, i == 1 || i == 2 ? 0.5 : 1);
    EXPECT_EQ(answers_.back()->pool_ranks, std::vector<int>(1, pool_ranks[i]));
    EXPECT_EQ(answers_.back()->peak_flops, i == 3 ? 1e12 : 0.5e12) << "of its rank";
    EXPECT_EQ(answers_.back()->attempts, 1);
  }
  EXPECT_TRUE(leader_.idle());
  // A later run is in no pack.
  Submit(std::vector<uint32_t>(40, 1));
  EXPECT_EQ(PrepareOf(1)->pack(), 0u);
  EXPECT_EQ(PrepareOf(1)->pack_runs(), 0u);
}

// The pass of all on a rank takes longer than each of them would.
TEST_F(PacksLeaderTest, APassMayTakeAsLongAsIsPredicted) {
  JoinBoth();
  const std::vector<uint64_t> runs = SubmitPack({2, 2}, /*seconds=*/100);
  for (const uint64_t run : runs) SayPrepared(2, run);
  for (const uint64_t run : runs) {
    run_ = run;
    SayOperations(2, 1);
  }
  Pass(absl::Seconds(30), {1, 2});
  EXPECT_EQ(leader_.capacity().ranks, 3)
      << "a block of it takes half of that, and may take ten times as long";
}

TEST_F(PacksLeaderTest, SharesNoPassWhereRowsAreNotIndependent) {
  EXPECT_FALSE(leader_.RankCapacity().has_value()) << "nobody is here";
  JoinBoth();
  EXPECT_TRUE(leader_.RankCapacity().has_value());
  v1::Join mixes_not = PackOffer("d");
  mixes_not.set_messages_mix(false);
  v1::Join streams = StreamingOffer("e", 1 << 30);
  streams.set_rows_independent(true);
  for (const v1::Join& other : {Offer("c"), mixes_not, streams}) {
    ASSERT_EQ(Join(3, other), "");
    EXPECT_FALSE(leader_.RankCapacity().has_value()) << other.name();
    leader_.OnDisconnected(3, now_);
    Do();
    EXPECT_TRUE(leader_.RankCapacity().has_value());
  }
}

TEST_F(PacksLeaderTest, CountsAsOneThatLives) {
  JoinBoth();
  ASSERT_EQ(SubmitPack({0, 1, 2}).size(), 3u);
  ASSERT_EQ(SubmitPack({2, 2}).size(), 2u);
  EXPECT_TRUE(SubmitPack({0}).empty()) << "two live";
  Submit(std::vector<uint32_t>(40, 1));
  EXPECT_TRUE(leader_.CrowdedOut(newest_));
}

// What was begun of it is cancelled, and a pack that has room begins.
TEST_F(PacksLeaderTest, AllBeginOrNone) {
  v1::Join small = PackOffer("a", 2);
  small.set_memory_bytes(4'000'000);
  ASSERT_EQ(Join(1, small), "");
  const std::vector<uint64_t> good = SubmitPack({0, 1});
  ASSERT_EQ(good.size(), 2u);
  const uint64_t reserved = PrepareOf(1, good[0])->reserve_bytes();
  const int room = static_cast<int>(4'000'000 / reserved);
  ASSERT_GT(room, 3);
  ASSERT_LT(room, 1000);
  const uint64_t newest = good.back();
  EXPECT_TRUE(SubmitPack(std::vector<int>(static_cast<size_t>(room - 1), 0)).empty());
  int begun = 0;
  for (uint64_t run = newest + 1; PrepareOf(1, run) != nullptr; ++run, ++begun) {
    EXPECT_EQ(Heard(1, run), " cancel");
    SayStopped(1, run);
  }
  EXPECT_EQ(begun, room - 2);
  EXPECT_EQ(SubmitPack(std::vector<int>(static_cast<size_t>(room - 2), 0)).size(),
            static_cast<size_t>(room - 2));
  EXPECT_TRUE(SubmitPack({9}).empty()) << "there is no such rank";
}

// A prompt whose K and V have no room on the one rank keeps the room that its lease was promised on all.
TEST_F(PacksLeaderTest, LeasesKeepTheirRoomWhereAPackHasNone) {
  tokens_ = std::vector<uint32_t>(400, 1);
  for (const Leader::Connection worker : {1, 2}) {
    v1::Join offer = PackOffer(absl::StrCat("w", worker));
    offer.set_kv_memory_bytes(static_cast<uint64_t>(KvShapeOf(Shape()).layers *
                                                    KvShapeOf(Shape()).LayerBytes(std::ssize(tokens_) - 1)));
    ASSERT_EQ(Join(worker, offer), "");
  }
  const auto choice =
      PlanForPool(Shape(), EngineOptions(), leader_.capacity(), std::ssize(tokens_), {.tile = Tile{1, 2}});
  ASSERT_TRUE(choice.ok()) << choice.status();
  ASSERT_TRUE(
      leader_
          .AdmitKv({.lease = "long", .tenant = "", .tokens = std::ssize(tokens_), .lasts = absl::Hours(1)},
                   choice->plan)
          .ok());
  const int64_t promised = leader_.kv_counts().bytes;
  ASSERT_GT(promised, 0);
  const Leader::PackedRequest request = {
      .request = {.id = "p", .tokens = tokens_, .options = {.kv_lease = "long"}}, .rank = 0};
  EXPECT_TRUE(leader_.SubmitPack({request}, 1, now_).empty());
  EXPECT_EQ(leader_.kv_counts().bytes, promised);
  Do();
  EXPECT_EQ(PrepareOf(1), nullptr);
  EXPECT_TRUE(leader_.idle());
}

// What was begun of a pack without room gives back what it took, and its leases keep theirs.
TEST_F(PacksLeaderTest, LeasesOfWhatWasBegunKeepTheirRoom) {
  v1::Join offer = PackOffer("w");
  offer.set_kv_memory_bytes(1 << 20);
  ASSERT_EQ(Join(1, offer), "");
  const auto choice = PlanForPool(Shape(), EngineOptions(), leader_.capacity(), std::ssize(tokens_), {});
  ASSERT_TRUE(choice.ok()) << choice.status();
  ASSERT_TRUE(
      leader_
          .AdmitKv({.lease = "l", .tenant = "", .tokens = std::ssize(tokens_), .lasts = absl::Hours(1)},
                   choice->plan)
          .ok());
  const int64_t promised = leader_.kv_counts().bytes;
  const Leader::PackedRequest good = {.request = {.id = "p", .tokens = tokens_, .options = {.kv_lease = "l"}},
                                      .rank = 0};
  Leader::PackedRequest nowhere = good;
  nowhere.rank = 5;
  EXPECT_TRUE(leader_.SubmitPack({good, nowhere}, 1, now_).empty());
  Do();
  ASSERT_NE(PrepareOf(1), nullptr);
  EXPECT_EQ(Heard(1, PrepareOf(1)->run()), " cancel");
  EXPECT_EQ(leader_.kv_counts().bytes, promised);
  EXPECT_TRUE(answers_.empty()) << "nobody waits for one";
}

// Others of its pass need what it is computed with.
TEST_F(PacksLeaderTest, WhoIsCancelledComputesOnForTheOthers) {
  JoinBoth();
  const std::vector<uint64_t> runs = SubmitPack({1, 1, 1, 2});
  for (const uint64_t run : {runs[0], runs[1], runs[2]}) SayPrepared(1, run);
  leader_.CancelRequest(tickets_[3], absl::CancelledError("left"), now_);
  Do();
  EXPECT_EQ(Heard(2, runs[3]), " cancel") << "it is alone on its rank";
  SayStopped(2, runs[3]);
  leader_.CancelRequest(tickets_[0], absl::CancelledError("left"), now_);
  Do();
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_EQ(answers_.back().status(), absl::CancelledError("left"));
  EXPECT_EQ(Heard(1, runs[0]), " run");
  SayDone(1, runs[0]);
  EXPECT_EQ(Heard(1, runs[0]), " run cancel") << "what it has kept is dropped";
  SayStopped(1, runs[0]);
  SayDone(1, runs[1]);
  EXPECT_TRUE(answers_.back().ok());
  leader_.CancelRequest(tickets_[2], absl::CancelledError("left"), now_);
  Do();
  EXPECT_EQ(Heard(1, runs[2]), " run cancel") << "nobody is left in its pass";
  SayStopped(1, runs[2]);
  EXPECT_TRUE(leader_.idle());
}

TEST_F(PacksLeaderTest, TheLastThatIsCancelledEndsThePass) {
  JoinBoth();
  const std::vector<uint64_t> runs = SubmitPack({1, 1, 2});
  SayPrepared(1, runs[0]);
  for (const size_t i : {0, 1}) {
    EXPECT_EQ(Heard(1, runs[0]), " run");
    leader_.CancelRequest(tickets_[i], absl::CancelledError("left"), now_);
    Do();
  }
  EXPECT_EQ(Heard(1, runs[0]), " run cancel");
  EXPECT_EQ(Heard(1, runs[1]), " cancel");
  EXPECT_EQ(Heard(2, runs[2]), "");
}

// All stand still until the last of them has lost its turn, and who was cancelled does with them.
TEST_F(PacksLeaderTest, StandsStillAsOne) {
  JoinBoth();
  const std::vector<uint64_t> runs = SubmitPack({1, 1, 1});
  for (const uint64_t run : runs) SayPrepared(1, run);
  leader_.CancelRequest(tickets_[0], absl::CancelledError("left"), now_);
  const auto set_paused = [&](size_t i, bool paused) {
    leader_.SetPaused(tickets_[i], paused, now_);
    Do();
  };
  set_paused(1, true);
  for (const uint64_t run : runs) EXPECT_EQ(Heard(1, run), " run");
  set_paused(2, true);
  for (const uint64_t run : runs) EXPECT_EQ(Heard(1, run), " run pause");
  Pass(absl::Seconds(20), {1, 2});
  EXPECT_EQ(leader_.capacity().ranks, 3) << "what stands still does not hang";
  set_paused(1, false);
  for (const uint64_t run : runs) EXPECT_EQ(Heard(1, run), " run pause resume");
}

// Each is tried by itself, on all ranks; the other ranks' passes go on.
TEST_F(PacksLeaderTest, WhatFailsIsTriedByItself) {
  JoinBoth();
  const std::vector<uint64_t> runs = SubmitPack({1, 1, 1, 2});
  for (const uint64_t run : {runs[0], runs[1], runs[2]}) SayPrepared(1, run);
  SayPrepared(2, runs[3]);
  leader_.CancelRequest(tickets_[2], absl::CancelledError("left"), now_);
  Do();
  answers_.clear();
  SayDone(1, runs[0], absl::AbortedError("the pass failed"));
  for (const uint64_t run : {runs[0], runs[1], runs[2]}) EXPECT_EQ(Heard(1, run), " run abort");
  EXPECT_EQ(Heard(2, runs[3]), " run");
  for (const uint64_t run : {runs[0], runs[1], runs[2]}) SayStopped(1, run);
  SayDone(2, runs[3]);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_EQ(answers_[0]->attempts, 1);
  for (const size_t i : {0, 1}) {  // one after the other
    if (i == 0) EXPECT_EQ(leader_.run_of(tickets_[1]), 0u);
    const uint64_t again = leader_.run_of(tickets_[i]);
    ASSERT_GT(again, runs[3]) << i;
    EXPECT_EQ(PrepareOf(1, again)->pack(), 0u);
    EXPECT_EQ(PrepareOf(1, again)->plan().ranks(), 3u);
    PrepareRun(again, {1, 2});
    for (const uint32_t rank : {0, 1}) RankDone(1, rank, 0);
    RankDone(2, 2, kVocab);
    ASSERT_EQ(answers_.size(), i + 2);
    EXPECT_EQ(answers_.back()->attempts, 2);
    EXPECT_EQ(answers_.back()->pack_prompts, 1);
  }
  EXPECT_EQ(leader_.counters().retries, 2u);
  EXPECT_EQ(std::count_if(log_.begin(), log_.end(),
                          [](const std::string& line) { return line.find("ended in run") != line.npos; }),
            1);
}

// It may fail for what the others take: by itself, on all ranks, it has another try.
TEST_F(PacksLeaderTest, WhatIsRefusedInAPassIsTriedByItself) {
  JoinBoth();
  const std::vector<uint64_t> runs = SubmitPack({1, 1, 2});
  const auto refuse = [&](uint64_t run) {
    v1::WorkerMessage refused = OfRun();
    refused.mutable_prepared()->set_run(run);
    *refused.mutable_prepared()->mutable_outcome() = ToOutcome(absl::FailedPreconditionError("no memory"));
    Say(1, refused);
  };
  SayPrepared(1, runs[1]);
  refuse(runs[0]);
  EXPECT_TRUE(answers_.empty());
  EXPECT_EQ(Heard(1, runs[0]), " abort");
  EXPECT_EQ(Heard(1, runs[1]), " run abort");
  EXPECT_EQ(Heard(2, runs[2]), "");
  for (const uint64_t run : {runs[0], runs[1]}) SayStopped(1, run);
  const uint64_t again = leader_.run_of(tickets_[0]);
  EXPECT_GT(again, runs[2]);
  refuse(again);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsFailedPrecondition(answers_[0].status())) << answers_[0].status();
}

// No prompt of a pass is to blame alone for a worker that is lost. Tried one by one, the one that is to blame
// is found, and the others are answered.
TEST_F(PacksLeaderTest, APoisonousPromptOfAPassIsFound) {
  JoinBoth();
  std::vector<uint64_t> runs = SubmitPack({2, 2, 2, 0});
  for (size_t i = 0; i < 3; ++i) SayPrepared(2, runs[i]);
  SayPrepared(1, runs[3]);
  const auto lose_second = [&](Leader::Connection worker) {
    leader_.OnDisconnected(worker, now_);
    Do();
  };
  Join(3, PackOffer("c"));
  lose_second(2);
  EXPECT_TRUE(answers_.empty());
  EXPECT_EQ(Heard(1, runs[3]), " run") << "it is on another worker";
  SayDone(1, runs[3]);
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_EQ(leader_.run_of(tickets_[1]), 0u);
  // The first one ends the epoch again, and once more.
  for (Leader::Connection worker : {3, 4}) {
    const uint64_t again = leader_.run_of(tickets_[0]);
    ASSERT_NE(again, 0u) << worker;
    PrepareRun(again, {1, worker});
    Join(worker + 1, PackOffer(absl::StrCat("d", worker)));
    lose_second(worker);
    run_ = again;
    Stopped(1);
    if (answers_.size() > 1) break;
  }
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_TRUE(absl::IsInternal(answers_[1].status())) << answers_[1].status();
  for (const size_t i : {1, 2}) EXPECT_TRUE(leader_.run_of(tickets_[i]) != 0 || i == 2) << i;
}

// What its client has left computes on until the pass ends, and no longer: its room is free for the next.
TEST_F(PacksLeaderTest, NothingIsLeftOfAPassThatHasEnded) {
  JoinBoth();
  const std::vector<uint64_t> runs = SubmitPack({1, 1});
  for (const uint64_t run : runs) SayPrepared(1, run);
  leader_.CancelRequest(tickets_[0], absl::CancelledError("left"), now_);
  Do();
  SayDone(1, runs[1]);
  EXPECT_EQ(Heard(1, runs[0]), " run cancel");
  SayDone(1, runs[0]);  // it had ended, too
  SayStopped(1, runs[0]);
  EXPECT_TRUE(leader_.idle());
}

// Its worker prepares the others meanwhile, which may take long.
TEST_F(PacksLeaderTest, WaitsForTheOthersOfItsPass) {
  JoinBoth();
  const std::vector<uint64_t> runs = SubmitPack({2, 2}, /*seconds=*/0.01);
  SayPrepared(2, runs[0]);
  run_ = runs[0];
  Pass(absl::Milliseconds(4900), {1, 2});
  EXPECT_EQ(Heard(2, runs[0]), " run");
  SayPrepared(2, runs[1]);
  for (const uint64_t run : runs) SayDone(2, run);
  EXPECT_EQ(answers_.size(), 2u);
}

TEST_F(PacksLeaderTest, AnswersWithAddressesAreOfAnotherRun) {
  JoinBoth();
  const std::vector<uint64_t> runs = SubmitPack({1});
  Say(1, GoodAnswer(*PrepareOf(1, runs[0])));
  EXPECT_EQ(leader_.capacity().ranks, 1) << "it is out";
}

}  // namespace
}  // namespace meshfill
