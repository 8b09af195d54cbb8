// The queue where prompts that wait at the same time share a pass.
#include <atomic>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "server/queue/prefill_queue.h"
#include "tests/engine/random_seed.h"
#include "tests/server/eventually.h"
#include "tests/server/queue/prefill_queue_fixture.h"

namespace meshfill {
namespace {

using Phase = PrefillQueue::Phase;

class PrefillQueuePacksTest : public PrefillQueueFixture {
 protected:
  explicit PrefillQueuePacksTest(int capacity = 3) : PrefillQueueFixture(capacity) {
    engine_.SharePasses({.ranks = 4, .rank_tokens = 64}, {});
  }

  struct Sent {
    std::unique_ptr<PrefillQueue::Slot> slot;
    std::shared_ptr<RecordingWaiter> waiter;
    PrefillQueue::Turn turn;
  };
  static Request RequestOf(uint32_t first_id, int64_t tokens, double seconds) {
    return {.id = std::to_string(first_id), .tokens = tokens, .predicted_seconds = seconds};
  }
  Sent Send(const Request& request, std::shared_ptr<PrefillQueue::Waiter> hears = nullptr,
            const PrefillOptions& options = {}) {
    Sent sent{.slot = Reserve(request), .waiter = std::make_shared<RecordingWaiter>(), .turn = {}};
    std::vector<uint32_t> prompt(static_cast<size_t>(request.tokens), 1);
    prompt.front() = static_cast<uint32_t>(std::stoi(request.id));
    const auto turn = sent.slot->Submit(std::move(prompt), options, hears == nullptr ? sent.waiter : hears);
    EXPECT_TRUE(turn.ok()) << turn.status();
    sent.turn = turn.value_or(PrefillQueue::Turn{.before = -1});
    return sent;
  }
  // A pass of short prompts takes as long as one of them alone.
  static Request ShortRequest(uint32_t first_id) {
    Request request = RequestOf(first_id, 3, 1);
    request.pack = {.tokens = 3, .least_seconds = 1};
    return request;
  }
  // Too long for a pack; it stands at its first layer.
  Sent BeginLong() {
    engine_.Hold(0);
    Sent sent = Send(RequestOf(50, 50, 1000));
    EXPECT_TRUE(engine_.WaitForBegun(1));
    return sent;
  }
  // Of the highest class: the others wait until it ends.
  Sent Block(double seconds = 100) {
    engine_.Hold(0);
    const int begun = static_cast<int>(engine_.first_ids().size());
    Request request = RequestOf(99, 1, seconds);
    request.priority = 2;
    Sent sent = Send(request);
    EXPECT_TRUE(engine_.WaitForBegun(begun + 1));
    return sent;
  }
  static void Unblock(Sent& blocker) {
    blocker.slot.reset();
    EXPECT_EQ(blocker.waiter->Result().status().code(), absl::StatusCode::kCancelled);
  }
  // Short prompts, ids from 1 on, that have begun as a pack and stand at their first layer.
  std::vector<Sent> BeginPack(int prompts) {
    Sent blocker = Block();
    std::vector<Sent> pack;
    for (int id = 1; id <= prompts; ++id) pack.push_back(Send(ShortRequest(static_cast<uint32_t>(id))));
    Unblock(blocker);
    EXPECT_TRUE(engine_.WaitForBegun(1 + prompts));
    EXPECT_EQ(engine_.packs().size(), 1u);
    return pack;
  }
  void ExpectResult(const Sent& sent, uint32_t first_id, int pack_prompts) {
    const auto& result = sent.waiter->Result();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->top.front().token, first_id + 2) << "another prompt's result";
    EXPECT_EQ(result->pack_prompts, pack_prompts);
    EXPECT_EQ(sent.waiter->layers(), 4);
  }
  std::map<std::string, Phase> Phases() const {
    std::map<std::string, Phase> phases;
    for (const PrefillQueue::JobView& job : queue_->snapshot().jobs) phases[job.id] = job.phase;
    return phases;
  }
  // False after 10 s.
  bool WaitForPhase(const std::string& id, Phase phase) const {
    const absl::Time deadline = MonotonicNow() + absl::Seconds(10);
    while (MonotonicNow() < deadline) {
      const auto phases = Phases();
      if (const auto found = phases.find(id); found != phases.end() && found->second == phase) return true;
      absl::SleepFor(absl::Milliseconds(1));
    }
    return false;
  }
};

TEST_F(PrefillQueuePacksTest, ABacklogOfShortPromptsBeginsAsOnePack) {
  MakeQueue({}, [now = MonotonicNow()] { return now; });
  Sent blocker = Block();
  std::vector<Sent> sent;
  for (uint32_t id = 1; id <= 5; ++id) sent.push_back(Send(ShortRequest(id)));
  for (const Sent& each : sent) {
    EXPECT_EQ(each.turn.before, 1) << "who shares its pass is not waited for";
    EXPECT_NEAR(each.turn.wait_seconds, 100, 1);
    EXPECT_EQ(each.turn.submeshes, 1);
    // The first came when nobody was there to share one.
    EXPECT_NEAR(each.turn.pass_seconds, &each == &sent.front() ? 0 : 1, 1e-6);
  }
  Unblock(blocker);
  ASSERT_TRUE(engine_.WaitForBegun(6));
  EXPECT_EQ(engine_.packs(), (std::vector<std::vector<uint32_t>>{{1, 2, 3, 4, 5}}));
  for (const auto& [id, phase] : Phases()) EXPECT_EQ(phase, Phase::kRunning) << id;
  EXPECT_EQ(Phases().size(), 5u);
  const Sent after = Send(RequestOf(6, 3, 2));
  EXPECT_EQ(after.turn.before, 5);
  EXPECT_NEAR(after.turn.wait_seconds, 1, 0.5);
  engine_.Release();
  for (uint32_t id = 1; id <= 5; ++id) ExpectResult(sent[id - 1], id, 5);
  ExpectResult(after, 6, 1);
  EXPECT_EQ(Metric("meshfill_prefill_seconds_count"), 6);
  EXPECT_EQ(Metric("meshfill_queue_wait_seconds_count"), 7) << "the stopped one began, too";
  EXPECT_EQ(Metric("meshfill_preemptions_total"), 0);
}

TEST_F(PrefillQueuePacksTest, EachOfAPackIsStoppedByItself) {
  MakeQueue();
  std::vector<Sent> pack = BeginPack(4);
  pack[0].slot.reset();
  EXPECT_EQ(pack[0].waiter->Result().status().code(), absl::StatusCode::kCancelled);
  pack[2].slot.reset();
  EXPECT_EQ(Phases()["2"], Phase::kRunning);
  EXPECT_FALSE(pack[1].waiter->done());
  engine_.Release();
  ExpectResult(pack[1], 2, 4);
  ExpectResult(pack[3], 4, 4);
  EXPECT_EQ(pack[2].waiter->Result().status().code(), absl::StatusCode::kCancelled);
}

// Its rank's run is tried again, say: the others have their answers, and their places and ids are free.
TEST_F(PrefillQueuePacksTest, OneThatTakesLongerKeepsNoOtherFromItsAnswer) {
  constexpr uint32_t kLongest = 2;
  MakeQueue();
  const std::vector<Sent> pack = BeginPack(4);
  engine_.HoldPromptOfPack(kLongest);
  engine_.Hold(4);  // behind the last layer
  for (const uint32_t id : {1, 3, 4}) ExpectResult(pack[id - 1], id, 4);
  EXPECT_FALSE(pack[kLongest - 1].waiter->done());
  EXPECT_TRUE(Eventually([&] { return queue_->snapshot().jobs.size() == 1; }));
  EXPECT_EQ(Phases(), (std::map<std::string, Phase>{{"2", Phase::kRunning}}));
  EXPECT_TRUE(queue_->CheckId("", "3").ok());
  engine_.Release();
  ExpectResult(pack[kLongest - 1], kLongest, 4);
}

TEST_F(PrefillQueuePacksTest, APackGivesWayToAHigherClassAndGoesOn) {
  MakeQueue();
  const std::vector<Sent> pack = BeginPack(3);
  Request request = RequestOf(10, 3, 50);
  request.priority = 1;
  Sent higher = Send(request);
  ASSERT_TRUE(engine_.WaitForBegun(5));
  EXPECT_EQ(
      Phases(),
      (std::map<std::string, Phase>{
          {"1", Phase::kPaused}, {"2", Phase::kPaused}, {"3", Phase::kPaused}, {"10", Phase::kRunning}}));
  EXPECT_TRUE(Eventually([&] { return Metric("meshfill_preemptions_total") == 3; })) << "each prompt counts";
  higher.slot.reset();
  ASSERT_TRUE(WaitForPhase("3", Phase::kRunning));
  EXPECT_EQ(Phases()["1"], Phase::kRunning);
  engine_.Release();
  for (uint32_t id = 1; id <= 3; ++id) ExpectResult(pack[id - 1], id, 3);
}

TEST_F(PrefillQueuePacksTest, APackThatFindsNoMemoryWaitsForAnEnd) {
  MakeQueue();
  engine_.RefuseBesideOthers(2);
  Sent long_one = BeginLong();
  Sent blocker = Block();
  std::vector<Sent> sent;
  for (uint32_t id = 1; id <= 3; ++id) sent.push_back(Send(ShortRequest(id)));
  Unblock(blocker);
  ASSERT_TRUE(WaitForPhase("50", Phase::kRunning));
  EXPECT_GE(engine_.refusals(), 1);
  for (const char* id : {"1", "2", "3"}) EXPECT_EQ(Phases()[id], Phase::kWaiting);
  EXPECT_EQ(queue_->snapshot().requests, 3) << "they have their places again";
  long_one.slot.reset();
  ASSERT_TRUE(engine_.WaitForBegun(5));
  ASSERT_EQ(engine_.packs().size(), 1u);
  const std::vector<uint32_t> pack = engine_.packs()[0];  // what stood still for a moment longer comes first
  EXPECT_EQ(std::set<uint32_t>(pack.begin(), pack.end()), (std::set<uint32_t>{1, 2, 3}));
  engine_.Release();
  for (uint32_t id = 1; id <= 3; ++id) ExpectResult(sent[id - 1], id, 3);
}

// Each of them fits: none waits for the long one's end, as all together would have to.
TEST_F(PrefillQueuePacksTest, APackThatFindsNoMemoryRunsOneByOne) {
  MakeQueue();
  Sent long_one = BeginLong();
  Sent blocker = Block();
  engine_.FailPacks(absl::ResourceExhaustedError("no room"));
  std::vector<Sent> sent;
  for (uint32_t id = 1; id <= 3; ++id) sent.push_back(Send(ShortRequest(id)));
  Unblock(blocker);
  ASSERT_TRUE(engine_.WaitForBegun(3)) << "beside the long one, which stands still";
  EXPECT_EQ(Phases()["50"], Phase::kPaused);
  engine_.Release();
  for (uint32_t id = 1; id <= 3; ++id) ExpectResult(sent[id - 1], id, 1);
  EXPECT_EQ(engine_.packs().size(), 0u);
  EXPECT_TRUE(long_one.waiter->Result().ok());
}

TEST_F(PrefillQueuePacksTest, WhereAPackCannotBeginEachBeginsByItself) {
  for (const bool no_memory : {true, false}) {
    MakeQueue();
    Sent blocker = Block();
    std::vector<Sent> sent;
    for (uint32_t id = 1; id <= 4; ++id) sent.push_back(Send(ShortRequest(id)));
    engine_.FailPacks(no_memory ? absl::ResourceExhaustedError("no room")
                                : absl::InternalError("no passes today"));
    Unblock(blocker);
    engine_.Release();
    for (uint32_t id = 1; id <= 4; ++id) ExpectResult(sent[id - 1], id, 1);
    EXPECT_EQ(engine_.packs().size(), 0u);
    queue_ = nullptr;
  }
}

TEST_F(PrefillQueuePacksTest, ABadPromptSpoilsNoOthers) {
  MakeQueue();
  Sent blocker = Block();
  std::vector<Sent> sent;
  for (uint32_t id = 1; id <= 3; ++id) {
    sent.push_back(Send(ShortRequest(id), nullptr, {.top_k = id == 2 ? -1 : 1}));
  }
  Unblock(blocker);
  engine_.Release();
  ExpectResult(sent[0], 1, 1);
  EXPECT_EQ(sent[1].waiter->Result().status().code(), absl::StatusCode::kInvalidArgument);
  ExpectResult(sent[2], 3, 1);
}

TEST_F(PrefillQueuePacksTest, WhoseDeadlineHasPassedTakesNoPart) {
  for (const int others : {1, 3}) {
    const absl::Time begin = MonotonicNow();
    std::atomic<int64_t> passed_seconds = 0;
    MakeQueue({}, [&] { return begin + absl::Seconds(passed_seconds.load()); });
    Sent blocker = Block(1);
    const size_t begun = engine_.first_ids().size(), packs = engine_.packs().size();
    std::vector<Sent> sent;
    for (int id = 1; id <= others; ++id) sent.push_back(Send(ShortRequest(static_cast<uint32_t>(id))));
    Request late = ShortRequest(7);
    late.deadline = begin + absl::Seconds(10);
    const Sent told = Send(late);
    passed_seconds = 20;
    Unblock(blocker);
    EXPECT_EQ(told.waiter->Result().status().code(), absl::StatusCode::kDeadlineExceeded);
    engine_.Release();
    for (int id = 1; id <= others; ++id) ExpectResult(sent[id - 1], static_cast<uint32_t>(id), others);
    EXPECT_EQ(engine_.first_ids().size(), begun + static_cast<size_t>(others));
    EXPECT_EQ(engine_.packs().size(), packs + (others > 1 ? 1 : 0)) << "one alone shares no pass";
    queue_ = nullptr;
  }
}

// Withdraws another when its own prefill is about to begin.
class WithdrawingWaiter final : public PrefillQueue::Waiter {
 public:
  WithdrawingWaiter(std::shared_ptr<RecordingWaiter> hears, std::unique_ptr<PrefillQueue::Slot>& other)
      : hears_(std::move(hears)), other_(other) {}
  void OnPrefillBegin() override { other_.reset(); }
  void OnLayerDone(int layers_done, int layers, double seconds) override {
    hears_->OnLayerDone(layers_done, layers, seconds);
  }
  void OnPrefillDone(absl::StatusOr<PrefillResult> result, double queue_seconds) override {
    hears_->OnPrefillDone(std::move(result), queue_seconds);
  }

 private:
  const std::shared_ptr<RecordingWaiter> hears_;
  std::unique_ptr<PrefillQueue::Slot>& other_;
};

TEST_F(PrefillQueuePacksTest, OneThatIsStoppedWhileThePackBeginsLetsTheOthersCompute) {
  for (const bool fails : {false, true}) {
    MakeQueue();
    engine_.FailPacks(fails ? absl::InternalError("no passes today") : absl::OkStatus());
    Sent blocker = Block();
    Sent stopped = Send(ShortRequest(1));
    const auto waiter = std::make_shared<RecordingWaiter>();
    Sent other = Send(ShortRequest(2), std::make_shared<WithdrawingWaiter>(waiter, stopped.slot));
    other.waiter = waiter;
    const Sent third = Send(ShortRequest(3));
    Unblock(blocker);
    EXPECT_FALSE(stopped.waiter->Result().ok());
    engine_.Release();
    ExpectResult(other, 2, fails ? 1 : 3);
    ExpectResult(third, 3, fails ? 1 : 3);
    queue_ = nullptr;
  }
}

TEST_F(PrefillQueuePacksTest, StopAllEndsAPackWithItsReason) {
  MakeQueue();
  const std::vector<Sent> pack = BeginPack(3);
  queue_->StopAll(absl::UnavailableError("going away"));
  for (const Sent& sent : pack) {
    EXPECT_EQ(sent.waiter->Result().status(), absl::UnavailableError("going away"));
  }
}

TEST_F(PrefillQueuePacksTest, APackStandsStillByTheSecondsOfItsPass) {
  MakeQueue();
  Sent blocker = Block();
  std::vector<Sent> sent;
  for (uint32_t id = 1; id <= 4; ++id) {
    Request request = ShortRequest(id);
    request.predicted_seconds = 20;
    request.pack.least_seconds = 40;  // 10 s a layer
    sent.push_back(Send(request));
  }
  engine_.Hold(1);
  Unblock(blocker);
  ASSERT_TRUE(engine_.WaitForBegun(5));
  ASSERT_EQ(engine_.packs().size(), 1u);
  absl::Time now = MonotonicNow();
  for (; queue_->snapshot().jobs.back().layers_done == 0; now = MonotonicNow()) {
    ASSERT_EQ(queue_->standstill(now), "");
  }
  EXPECT_EQ(queue_->standstill(now), "");
  EXPECT_EQ(queue_->standstill(now + absl::Seconds(190)), "");
  EXPECT_NE(queue_->standstill(now + absl::Seconds(210)), "");
  engine_.Release();
  for (const Sent& each : sent) EXPECT_TRUE(each.waiter->Result().ok());
}

// Prompts come, are withdrawn and stopped at random moments, and packs find no memory, or cannot begin: each
// is answered once, as it should be.
TEST_F(PrefillQueuePacksTest, EveryPromptHasOneAnswerInAnyMix) {
  std::mt19937_64 random(TestSeed());
  MakeQueue({.max_requests = 1000, .max_age = absl::Milliseconds(20)});
  engine_.RefuseBesideOthers(30);
  std::vector<Sent> sent;
  for (uint32_t id = 0; id < 300; ++id) {
    const int64_t tokens = Draw(random, 1, 40);
    Request request = RequestOf(id, tokens, 1e-4 * static_cast<double>(tokens));
    request.priority = Draw(random, -1, 1);
    request.pack = {.tokens = tokens, .least_seconds = 1e-4, .added_seconds = 1e-5};
    sent.push_back(Send(request));
    if (Draw(random, 0, 7) == 0) sent[random() % sent.size()].slot.reset();
    if (Draw(random, 0, 15) == 0) absl::SleepFor(absl::Microseconds(Draw(random, 0, 2000)));
    if (Draw(random, 0, 30) == 0) {
      engine_.FailPacks(Draw(random, 0, 1) == 0 ? absl::OkStatus() : absl::InternalError("no passes"));
    }
  }
  for (Sent& each : sent) {
    if (each.slot == nullptr) continue;
    EXPECT_TRUE(each.waiter->Result().ok()) << each.waiter->Result().status();
  }
  const absl::Time deadline = MonotonicNow() + absl::Seconds(10);
  while (!Phases().empty() && MonotonicNow() < deadline) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(Phases().empty()) << "something that was withdrawn lives on";
}

class PrefillQueueOnePassTest : public PrefillQueuePacksTest {
 protected:
  PrefillQueueOnePassTest() : PrefillQueuePacksTest(/*capacity=*/1) {}
};

TEST_F(PrefillQueueOnePassTest, APackCountsAsOneThatLives) {
  MakeQueue();
  const std::vector<Sent> pack = BeginPack(6);
  const Sent after = Send(RequestOf(7, 3, 0.1));
  EXPECT_EQ(Phases()["7"], Phase::kWaiting) << "nothing gives way where one lives";
  engine_.Release();
  for (uint32_t id = 1; id <= 6; ++id) ExpectResult(pack[id - 1], id, 6);
  ExpectResult(after, 7, 1);
}

}  // namespace
}  // namespace meshfill
