// Prompts of many layers whose workers die: at the same place of the prompt each time, or anywhere.
#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "tests/server/pool/leader_fixture.h"

namespace meshfill {
namespace {

class LeaderBlameTest : public LeaderFixture {
 protected:
  static constexpr int kLayers = 32;

  LeaderBlameTest() : LeaderFixture(ManyLayers()) {}

  static Leader::Options ManyLayers() {
    Leader::Options options = Options();
    options.kv.layers = kLayers;
    return options;
  }

  struct Death {
    double layer = 0;         // where it dies, of all that it computes
    double layers_per_s = 1;  // its pace
    absl::Duration word_every = absl::Milliseconds(200);
    absl::Duration words_take;
    absl::Duration pause;  // before it dies
    bool noticed_at_once = true;
  };

  // A worker joins, computes the prompt that waits, and dies in it.
  void RunAndDie(const Death& death) {
    const Leader::Connection worker = ++last_worker_;
    ASSERT_EQ(Join(worker, Offer(absl::StrCat("w", worker))), "");
    Prepare({worker});
    const absl::Duration computes = absl::Seconds(death.layer / death.layers_per_s);
    absl::Duration next_word = absl::Milliseconds(absl::Uniform(random_, 0, 200));
    bool pauses = death.pause > absl::ZeroDuration();
    for (absl::Duration passed; passed < computes; passed += absl::Milliseconds(50)) {
      now_ += absl::Milliseconds(50);
      if (passed >= next_word) {
        next_word += death.word_every;
        const double said = absl::ToDoubleSeconds(passed - death.words_take) * death.layers_per_s;
        SayLayersDone(worker, std::clamp(static_cast<int>(std::floor(said)), 0, kLayers));
      }
      leader_.OnTick(now_);
      if (pauses && passed >= computes / 3) {
        pauses = false;
        leader_.SetPaused(newest_, true, now_);
        Pass(death.pause, {worker});
        leader_.SetPaused(newest_, false, now_);
      }
    }
    if (death.noticed_at_once) {
      leader_.OnDisconnected(worker, now_);
    } else {
      Pass(absl::Seconds(2), {});
    }
    Do();
  }
  void SayLayersDone(Leader::Connection worker, int layers) {
    v1::WorkerMessage message = OfRun();
    v1::WorkerProgress& progress = *message.mutable_progress();
    progress.set_run(run_);
    progress.add_ranks()->set_layers_done(static_cast<uint32_t>(layers));
    progress.mutable_ranks(0)->set_operations(++operations_);
    progress.mutable_ranks(0)->set_has_computed(true);
    Say(worker, message);
  }
  void ExpectPoisonous() {
    ASSERT_EQ(answers_.size(), 1u) << "it is not refused";
    EXPECT_TRUE(absl::IsInternal(answers_[0].status())) << answers_[0].status();
    EXPECT_NE(answers_[0].status().message().find("at the same place of its prompt"), std::string::npos);
  }
  // One that lives computes what is left.
  void ExpectAnswer(int attempts) {
    EXPECT_TRUE(answers_.empty()) << answers_[0].status();
    const Leader::Connection worker = ++last_worker_;
    ASSERT_EQ(Join(worker, Offer(absl::StrCat("w", worker))), "");
    Prepare({worker});
    RankDone(worker, 0, kVocab);
    ASSERT_EQ(answers_.size(), 1u);
    ASSERT_TRUE(answers_[0].ok()) << answers_[0].status();
    EXPECT_EQ(answers_[0]->attempts, attempts);
  }

  absl::BitGen random_;
  Leader::Connection last_worker_ = 0;
  uint64_t operations_ = 0;
};

// What a run had said of itself when it died may be old, and be of more or fewer layers than in the last.
TEST_F(LeaderBlameTest, WhoDiesTwiceAtOnePlaceIsRefusedAtAnyPace) {
  for (int i = 0; i < 200; ++i) {
    answers_.clear();
    Submit({1, 2, 3});
    const double layer = absl::Uniform(random_, 0.0, static_cast<double>(kLayers));
    for (int time = 0; time < 2; ++time) {
      ASSERT_TRUE(answers_.empty()) << answers_[0].status();
      const Death death{
          .layer = layer,
          .layers_per_s = std::exp(absl::Uniform(random_, std::log(1.0), std::log(200.0))),
          .word_every = absl::Milliseconds(absl::Uniform(random_, 50, 700)),
          .words_take = absl::Milliseconds(absl::Uniform(random_, 0, 700)),
          .pause = absl::Bernoulli(random_, 0.3) ? absl::Seconds(10) : absl::ZeroDuration(),
          .noticed_at_once = absl::Bernoulli(random_, 0.5),
      };
      SCOPED_TRACE(absl::StrCat(time, ": layer ", layer, " at ", death.layers_per_s, " a second"));
      RunAndDie(death);
    }
    ExpectPoisonous();
    if (HasFailure()) return;
  }
}

TEST_F(LeaderBlameTest, LossesInOtherLayersBeginItAnew) {
  Submit({1, 2, 3});
  RunAndDie({.layer = 20, .layers_per_s = 0.5});
  RunAndDie({.layer = 4, .layers_per_s = 0.5, .noticed_at_once = false});
  RunAndDie({.layer = 11, .layers_per_s = 0.5});
  ExpectAnswer(/*attempts=*/4);
}

TEST_F(LeaderBlameTest, ALateLossIsOneOfThem) {
  Submit({1, 2, 3});
  for (const double layer : {4, 12, 25, 13}) {
    EXPECT_TRUE(answers_.empty());
    RunAndDie({.layer = layer, .layers_per_s = 0.5});
  }
  ExpectPoisonous();
}

TEST_F(LeaderBlameTest, LossesWhileItStoodStillDoNotCount) {
  Submit({1, 2, 3});
  for (int time = 0; time < 8; ++time) {
    const Leader::Connection worker = ++last_worker_;
    ASSERT_EQ(Join(worker, Offer(absl::StrCat("w", worker))), "");
    Prepare({worker});
    leader_.SetPaused(newest_, true, now_);
    Pass(absl::Seconds(2), {worker});
    leader_.OnDisconnected(worker, now_);
    leader_.SetPaused(newest_, false, now_);
    Do();
  }
  ExpectAnswer(/*attempts=*/9);
}

// Its run stops while the worker that stays has not confirmed it.
TEST_F(LeaderBlameTest, NorDoTheyBesideAWorkerThatStays) {
  const Leader::Connection stays = ++last_worker_;
  ASSERT_EQ(Join(stays, Offer("stays")), "");
  Leader::Connection worker = ++last_worker_;
  ASSERT_EQ(Join(worker, Offer("w2")), "");
  Submit(std::vector<uint32_t>(200, 1));
  for (int time = 0; time < 8; ++time) {
    Prepare({stays, worker});
    leader_.SetPaused(newest_, true, now_);
    Pass(absl::Seconds(2), {stays, worker});
    leader_.OnDisconnected(worker, now_);
    leader_.SetPaused(newest_, false, now_);
    worker = ++last_worker_;
    ASSERT_EQ(Join(worker, Offer(absl::StrCat("w", worker))), "");
    Stopped(stays);
  }
  Prepare({stays, worker});
  RankDone(stays, 0, 0);
  RankDone(worker, 1, kVocab);
  ASSERT_EQ(answers_.size(), 1u);
  ASSERT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_EQ(answers_[0]->attempts, 9);
}

TEST_F(LeaderBlameTest, SixAttemptsAreAllThatItGets) {
  Submit({1, 2, 3});
  for (const double layer : {3, 8, 13, 18, 23, 28}) {
    EXPECT_TRUE(answers_.empty());
    RunAndDie({.layer = layer, .layers_per_s = 0.5});
  }
  ASSERT_EQ(Join(99, Offer("w99")), "");
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsUnavailable(answers_[0].status())) << answers_[0].status();
}

}  // namespace
}  // namespace meshfill
