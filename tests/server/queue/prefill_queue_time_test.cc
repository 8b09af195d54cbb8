// The queue in virtual time: places of slow uploads, waits that are told, seconds and gauges that are
// counted.
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/queue/prefill_queue.h"
#include "server/queue/queue_room.h"
#include "server/queue/refusal.h"
#include "tests/server/eventually.h"
#include "tests/server/queue/prefill_queue_fixture.h"

namespace meshfill {
namespace {

constexpr int64_t kUpload = 1 << 20;  // tokens

class PrefillQueueTimeTest : public PrefillQueueFixture {
 protected:
  explicit PrefillQueueTimeTest(int capacity = 1) : PrefillQueueFixture(capacity) {}

  void MakeQueue(const PrefillQueue::Limits& limits = {}) {
    PrefillQueueFixture::MakeQueue(
        limits, [this] { return begin_ + absl::Milliseconds(passed_milliseconds_.load()); });
  }
  void Pass(absl::Duration time) { passed_milliseconds_ += absl::ToInt64Milliseconds(time); }
  absl::Time now() const { return begin_ + absl::Milliseconds(passed_milliseconds_.load()); }

  bool HasPlace(const std::string& id) const {
    for (const PrefillQueue::JobView& job : queue_->snapshot().jobs) {
      if (job.id == id) return true;
    }
    return false;
  }

  // Begins a prefill of `predicted_seconds` that stands at its first layer.
  std::unique_ptr<PrefillQueue::Slot> Run(double predicted_seconds) {
    engine_.Hold(0);
    auto slot = Reserve({.id = "runs", .tokens = 3, .predicted_seconds = predicted_seconds});
    Submit(*slot, 1, running_);
    EXPECT_TRUE(engine_.WaitForBegun(1));
    return slot;
  }

  const absl::Time begin_ = MonotonicNow();
  std::atomic<int64_t> passed_milliseconds_ = 0;
  std::shared_ptr<RecordingWaiter> running_ = std::make_shared<RecordingWaiter>();
};

TEST_F(PrefillQueueTimeTest, AnUploadHasItsGraceAndThenItsPace) {
  MakeQueue({.max_requests = 1});
  auto slow = Reserve({.id = "slow", .tokens = kUpload});
  ASSERT_TRUE(slow->Pay(20000).ok());  // two seconds at the pace
  Pass(QueueRoom::kUploadGrace + absl::Seconds(2));
  ExpectRefusedWithRetry({.id = "comes", .tokens = 3}, kLeast, kLeast);
  Pass(absl::Milliseconds(1));
  EXPECT_NE(Reserve({.id = "comes", .tokens = 3}), nullptr);
  EXPECT_FALSE(HasPlace("slow"));
  EXPECT_EQ(slow->Pay(20001).code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(PrefillQueueTimeTest, TheUploadThatIsFurthestBehindLosesItsPlace) {
  MakeQueue({.max_requests = 3});
  auto last = Reserve({.id = "furthest", .tokens = kUpload});
  Pass(absl::Seconds(3));
  auto middle = Reserve({.id = "behind", .tokens = kUpload});
  auto fast = Reserve({.id = "in time", .tokens = kUpload});
  ASSERT_TRUE(fast->Pay(kUpload / 2).ok());
  Pass(absl::Seconds(5));
  auto comes = Reserve({.id = "comes", .tokens = 3});
  EXPECT_FALSE(HasPlace("furthest"));
  EXPECT_TRUE(HasPlace("behind"));
  EXPECT_TRUE(HasPlace("in time"));
}

TEST_F(PrefillQueueTimeTest, NobodyLosesAPlaceForWhoHasNoRoomYet) {
  constexpr int64_t kFree = QueueRoom::kFreeTokens;
  MakeQueue({.max_tokens = 20 * kFree});
  auto fast = Reserve({.id = "fast", .tokens = 8 * kFree});
  ASSERT_TRUE(fast->Pay(8 * kFree).ok());
  auto slow = Reserve({.id = "slow", .tokens = 8 * kFree});  // which counts for kFree
  Pass(absl::Seconds(10));
  ExpectRefusedWithRetry({.id = "comes", .tokens = 13 * kFree}, kLeast, kLeast);
  EXPECT_TRUE(HasPlace("slow"));
  EXPECT_NE(Reserve({.id = "comes", .tokens = 12 * kFree}), nullptr);
  EXPECT_FALSE(HasPlace("slow"));
  EXPECT_TRUE(HasPlace("fast"));
}

TEST_F(PrefillQueueTimeTest, ATenantsShareTakesPlacesOfItsOwnAlone) {
  v1::Config config;
  config.mutable_tenant_limits()->set_max_requests(2);
  PrefillQueue::Limits limits;
  limits.tenants = Tenants(config);
  MakeQueue(limits);
  auto other = Reserve({.id = "other's", .tenant = "other", .tokens = kUpload});
  Pass(absl::Seconds(1));
  auto own = Reserve({.id = "own", .tenant = "full", .tokens = kUpload});
  auto fast = Reserve({.id = "fast", .tenant = "full", .tokens = kUpload});
  ASSERT_TRUE(fast->Pay(kUpload / 2).ok());
  Pass(absl::Seconds(3));
  EXPECT_NE(Reserve({.id = "comes", .tenant = "full", .tokens = 3}), nullptr);
  EXPECT_TRUE(HasPlace("other's"));
  EXPECT_FALSE(HasPlace("own"));
}

// Who is first has all places only until another tenant asks. An accepted prompt that loses its place hears
// it at once, an upload at its next message.
TEST_F(PrefillQueueTimeTest, AFullQueueMakesRoomForATenantWithinItsShare) {
  MakeQueue({.max_requests = 4});
  const auto running = Run(100);
  std::vector<std::unique_ptr<PrefillQueue::Slot>> slots;
  std::vector<std::shared_ptr<RecordingWaiter>> waiters;
  const auto submit = [&](const Request& request) {
    slots.push_back(Reserve(request));
    waiters.push_back(std::make_shared<RecordingWaiter>());
    Submit(*slots.back(), 2, waiters.back());
  };
  for (const char* id : {"1", "2", "3"}) {
    submit({.id = id, .tenant = "busy", .tokens = 3, .predicted_seconds = 60});
  }
  auto upload = Reserve({.id = "upload", .tenant = "busy", .tokens = 3, .predicted_seconds = 60});
  Pass(absl::Milliseconds(500));
  ExpectRefusedWithRetry({.id = "5", .tenant = "busy", .tokens = 3}, 1, 100);

  submit({.id = "other's first", .tenant = "other", .tokens = 3, .predicted_seconds = 60});
  EXPECT_FALSE(HasPlace("upload"));
  submit({.id = "other's second", .tenant = "other", .tokens = 3, .predicted_seconds = 60});
  EXPECT_FALSE(HasPlace("3"));
  ExpectRefusedWithRetry({.id = "other's third", .tenant = "other", .tokens = 3}, 1, 100);
  EXPECT_EQ(Metric("meshfill_queue_requests"), 4);

  for (const absl::Status& lost :
       {waiters[2]->Result().status(), upload->Pay(1), upload->Submit({1, 2, 3}, {}, waiters[2]).status()}) {
    EXPECT_EQ(lost.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(RefusalOf(lost), Refusal::kTenantShare);
    EXPECT_GE(RetryAfter(lost).value_or(absl::ZeroDuration()), absl::Seconds(90)) << "when a place is free";
    EXPECT_NE(lost.message().find("another tenant"), absl::string_view::npos) << lost;
  }
  EXPECT_DOUBLE_EQ(waiters[2]->queue_seconds(), 0.5);
  EXPECT_FALSE(running_->done());
  engine_.Release();
  for (const int kept : {0, 1, 3, 4}) EXPECT_TRUE(waiters[kept]->Result().ok());
  EXPECT_EQ(engine_.first_ids().size(), 5u) << "what lost its place never ran";
}

// So does one whose upload goes on.
TEST_F(PrefillQueueTimeTest, AnUploadTakesWhatOthersHaveBeyondTheirShare) {
  constexpr int64_t kFree = QueueRoom::kFreeTokens;
  MakeQueue({.max_tokens = 8 * kFree});
  const auto running = Run(100);
  auto upload = Reserve({.id = "upload", .tenant = "other", .tokens = 4 * kFree});
  std::vector<std::unique_ptr<PrefillQueue::Slot>> slots;
  std::vector<std::shared_ptr<RecordingWaiter>> waiters;
  for (int i = 0; i < 7; ++i) {
    slots.push_back(Reserve({.id = std::to_string(i), .tenant = "busy", .tokens = kFree}));
    waiters.push_back(std::make_shared<RecordingWaiter>());
    Submit(*slots.back(), 2, waiters.back());
  }
  EXPECT_TRUE(upload->Pay(2 * kFree).ok());
  for (int i = 0; i < 7; ++i) EXPECT_EQ(waiters[i]->done(), i >= 4) << i;
  EXPECT_TRUE(absl::IsResourceExhausted(waiters[4]->Result().status()));
  EXPECT_EQ(Metric("meshfill_queue_tokens"), 8 * kFree);
  engine_.Release();
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(waiters[i]->Result().ok());
}

TEST_F(PrefillQueueTimeTest, AClassThatTheTenantMayNotSendTakesNoPlace) {
  v1::Config config;
  (*config.mutable_tenants())["batch"].set_max_priority(-1);
  PrefillQueue::Limits limits = {.max_requests = 2};
  limits.tenants = Tenants(config);
  MakeQueue(limits);
  auto first = Reserve({.id = "first", .tenant = "busy", .tokens = 3});
  auto second = Reserve({.id = "second", .tenant = "busy", .tokens = 3});
  const auto denied = queue_->Reserve({.id = "denied", .tenant = "batch", .tokens = 3, .priority = 0});
  EXPECT_EQ(denied.status().code(), absl::StatusCode::kPermissionDenied) << denied.status();
  EXPECT_TRUE(HasPlace("second"));
  EXPECT_NE(Reserve({.id = "batch", .tenant = "batch", .tokens = 3, .priority = -1}), nullptr);
}

TEST_F(PrefillQueueTimeTest, RetryIsUntilTheFirstThatWaitsBegins) {
  MakeQueue({.max_requests = 2});
  const auto running = Run(100);
  std::vector<std::unique_ptr<PrefillQueue::Slot>> slots;
  std::vector<std::shared_ptr<RecordingWaiter>> waiters;
  for (const double seconds : {10.0, 20.0}) {
    slots.push_back(Reserve({.id = std::to_string(seconds), .tokens = 3, .predicted_seconds = seconds}));
    waiters.push_back(std::make_shared<RecordingWaiter>());
    Submit(*slots.back(), 2, waiters.back());
  }
  Pass(absl::Seconds(30));
  ExpectRefusedWithRetry({.id = "3", .tokens = 3}, 69.9, 70.1);
  engine_.Release();
  for (const auto& waiter : waiters) EXPECT_TRUE(waiter->Result().ok());
}

// Each comes after those of its tenant that were told before, so that not all come at once.
TEST_F(PrefillQueueTimeTest, WhoIsRefusedLaterIsToldToComeLater) {
  MakeQueue({.max_requests = 1});
  const auto running = Run(100);
  auto waits = Reserve({.id = "waits", .tokens = 3, .predicted_seconds = 10});
  const auto told = [&](const std::string& tenant) {
    const auto slot =
        queue_->Reserve({.id = "refused", .tenant = tenant, .tokens = 3, .predicted_seconds = 8});
    return absl::ToDoubleSeconds(RetryAfter(slot.status()).value_or(absl::ZeroDuration()));
  };
  const double first = told("a"), second = told("a"), third = told("a");
  EXPECT_NEAR(first, 100, 0.1);
  EXPECT_GT(second, first + 1);
  EXPECT_NEAR(third - second, second - first, 0.1);
  EXPECT_NEAR(told("b"), first, 0.1);
  engine_.Release();
  EXPECT_TRUE(running_->Result().ok());
}

// What is being stopped computes no more: who comes waits for the others alone.
TEST_F(PrefillQueueTimeTest, WhatIsBeingStoppedIsNotWaitedFor) {
  MakeQueue({.max_wait = absl::Seconds(50)});
  auto running = Run(100);
  ExpectRefusedWithRetry({.id = "2", .tokens = 3, .predicted_seconds = 200}, 50, 50);
  engine_.HoldStopped();
  running.reset();
  EXPECT_NE(Reserve({.id = "2", .tokens = 3, .predicted_seconds = 200}), nullptr);
  EXPECT_FALSE(running_->done());
  engine_.Release();
}

TEST_F(PrefillQueueTimeTest, GaugesTellWhatWaitsUploadsAndRuns) {
  MakeQueue();
  const auto running = Run(100);
  EXPECT_EQ(Metric("meshfill_running_tokens"), 3);
  EXPECT_EQ(Metric("meshfill_queue_requests"), 0);
  EXPECT_EQ(Metric("meshfill_queue_tokens"), 0);
  auto uploads = Reserve({.id = "uploads", .tokens = 70, .priority = -1, .predicted_seconds = 1});
  EXPECT_EQ(Metric("meshfill_queue_oldest_seconds"), 0) << "an upload does not wait yet";
  auto waits = Reserve({.id = "waits", .tokens = 5, .priority = 9, .predicted_seconds = 10});
  auto waiter = std::make_shared<RecordingWaiter>();
  Submit(*waits, 2, waiter);
  EXPECT_EQ(Metric("meshfill_running_tokens"), 3);
  EXPECT_EQ(Metric("meshfill_queue_requests"), 2);
  EXPECT_EQ(Metric("meshfill_queue_tokens"), 75);
  EXPECT_EQ(Metric("meshfill_queue_class_requests{class=\"-1\"}"), 1);
  EXPECT_EQ(Metric("meshfill_queue_class_requests{class=\"0\"}"), 0);
  EXPECT_EQ(Metric("meshfill_queue_class_requests{class=\"2\"}"), 1);
  uploads.reset();
  EXPECT_EQ(Metric("meshfill_queue_requests"), 1);
  EXPECT_EQ(Metric("meshfill_queue_tokens"), 5);
  engine_.Release();
  EXPECT_TRUE(waiter->Result().ok());
  EXPECT_EQ(Metric("meshfill_queue_requests"), 0);
  EXPECT_EQ(Metric("meshfill_running_tokens"), 0);
}

TEST_F(PrefillQueueTimeTest, GaugesTellWhatTheNamedTenantsHave) {
  v1::Config config;
  (*config.mutable_tenants())["batch"].set_weight(2);
  PrefillQueue::Limits limits;
  limits.tenants = Tenants(config);
  MakeQueue(limits);
  const auto requests = [&](const std::string& tenant) {
    return Metric(absl::StrCat("meshfill_queue_tenant_requests{tenant=\"", tenant, "\"}"));
  };
  EXPECT_EQ(requests("batch"), 0);
  EXPECT_EQ(requests("other"), 0);
  const auto running = Run(100);
  auto one = Reserve({.id = "1", .tenant = "batch", .tokens = 3});
  auto two = Reserve({.id = "2", .tenant = "batch", .tokens = 3});
  auto unnamed = Reserve({.id = "3", .tenant = "whoever", .tokens = 3});
  EXPECT_EQ(requests("batch"), 2);
  EXPECT_EQ(requests("other"), 1) << "what runs is not counted";
  EXPECT_EQ(requests("whoever"), -1) << "clients make no series";
  one.reset();
  EXPECT_EQ(requests("batch"), 1);
  engine_.Release();
}

// /metrics itself tells how old the oldest is, by the real time.
TEST_F(PrefillQueueTimeTest, TheOldestHasWaitedSinceItsSubmit) {
  MakeQueue();
  Pass(-absl::Seconds(100));
  const auto running = Run(1000);
  auto uploads = Reserve({.id = "uploads", .tokens = 3});
  Pass(absl::Seconds(40));
  auto waits = Reserve({.id = "waits", .tokens = 3, .predicted_seconds = 10});
  auto waiter = std::make_shared<RecordingWaiter>();
  Submit(*waits, 2, waiter);
  EXPECT_GE(Metric("meshfill_queue_oldest_seconds"), 60);
  EXPECT_LT(Metric("meshfill_queue_oldest_seconds"), 100);
  engine_.Release();
  EXPECT_TRUE(waiter->Result().ok());
}

TEST_F(PrefillQueueTimeTest, WaitsAreCountedFromTheSubmitToTheBegin) {
  MakeQueue();
  const auto running = Run(1000);
  EXPECT_EQ(Metric("meshfill_queue_wait_seconds_sum"), 0);
  auto slot = Reserve({.id = "waits", .tokens = 3, .predicted_seconds = 10});
  Pass(absl::Seconds(7));  // its upload
  auto waiter = std::make_shared<RecordingWaiter>();
  Submit(*slot, 2, waiter);
  Pass(absl::Seconds(20));
  const PrefillQueue::Snapshot snapshot = queue_->snapshot();
  ASSERT_EQ(snapshot.jobs.size(), 2u);
  EXPECT_DOUBLE_EQ(snapshot.jobs[0].elapsed_seconds, 27);
  EXPECT_DOUBLE_EQ(snapshot.jobs[1].elapsed_seconds, 27) << "since its header";
  EXPECT_EQ(snapshot.jobs[1].layers, 0);
  engine_.Release();
  ASSERT_TRUE(waiter->Result().ok());
  EXPECT_DOUBLE_EQ(waiter->queue_seconds(), 20);
  EXPECT_DOUBLE_EQ(running_->queue_seconds(), 0);
  EXPECT_DOUBLE_EQ(Metric("meshfill_queue_wait_seconds_sum"), 20);
  EXPECT_EQ(Metric("meshfill_queue_wait_seconds_count"), 2);
  EXPECT_EQ(Metric("meshfill_prefill_seconds_count"), 2);
}

// They have had half of the last two minutes: who waits is told to wait for as many again.
TEST_F(PrefillQueueTimeTest, WhoWaitsIsToldOfShorterOnesThatKeepComing) {
  MakeQueue();
  const auto short_one = Run(10);
  Pass(absl::Seconds(60));
  engine_.Release();
  ASSERT_TRUE(running_->Result().ok());
  engine_.Hold(0);
  auto runs = Reserve({.id = "runs too", .tokens = 3, .predicted_seconds = 100});
  Submit(*runs, 2, std::make_shared<RecordingWaiter>());
  ASSERT_TRUE(engine_.WaitForBegun(2));
  auto waits = Reserve({.id = "waits", .tokens = 3, .predicted_seconds = 200});
  const auto turn = waits->Submit({3, 1, 2}, {}, std::make_shared<RecordingWaiter>());
  ASSERT_TRUE(turn.ok()) << turn.status();
  EXPECT_NEAR(turn->wait_seconds, 100 / (1 - 0.5), 1e-6);
  const PrefillQueue::Snapshot snapshot = queue_->snapshot();
  ASSERT_EQ(snapshot.jobs.size(), 2u);
  EXPECT_NEAR(snapshot.jobs[0].predicted_rest_seconds, 100, 1e-6) << "nothing gives way here";
  EXPECT_NEAR(snapshot.jobs[1].predicted_rest_seconds, 100 / (1 - 0.5) + 200, 1e-6);
  engine_.Release();
}

TEST_F(PrefillQueueTimeTest, SecondsAreComputedBesideOthersFromTheFirstThatWaitsToTheLast) {
  MakeQueue();
  const auto running = Run(1000);
  Pass(absl::Seconds(5));
  auto waits = Reserve({.id = "waits", .tokens = 3, .predicted_seconds = 1000});
  Submit(*waits, 2, std::make_shared<RecordingWaiter>());
  Pass(absl::Seconds(7));
  waits.reset();
  Pass(absl::Seconds(20));
  engine_.Release();
  ASSERT_TRUE(running_->Result().ok());
  EXPECT_DOUBLE_EQ(Metric("meshfill_computing_seconds_total{others=\"yes\"}"), 7);
  EXPECT_DOUBLE_EQ(Metric("meshfill_computing_seconds_total{others=\"no\"}"), 25);
}

TEST_F(PrefillQueueTimeTest, TheTimeThatItStoodStillIsWaiting) {
  MakeQueue();
  engine_.SayPaused(3.5);
  const auto running = Run(1);
  engine_.Release();
  ASSERT_TRUE(running_->Result().ok());
  EXPECT_DOUBLE_EQ(running_->queue_seconds(), 3.5);
  EXPECT_DOUBLE_EQ(Metric("meshfill_paused_seconds_total"), 3.5);
}

// One that its deadline let in for what may be cached is refused when it is complete and too little is; a
// slow upload that would have been in time is not.
TEST_F(PrefillQueueTimeTest, WhatIsCachedIsKnownWhenThePromptIsComplete) {
  MakeQueue();
  const absl::Time deadline = now() + absl::Seconds(10);
  for (const double work_seconds : {9.0, 20.0}) {
    for (const double found_seconds : {8.0, 12.0}) {
      auto slot = Reserve({.id = "id",
                           .tokens = 3,
                           .predicted_seconds = work_seconds,
                           .deadline = deadline,
                           .may_save_seconds = 15});
      slot->SetPredictedSeconds(found_seconds, {});
      const auto waiter = std::make_shared<RecordingWaiter>();
      const absl::Status told = slot->Submit({1, 2, 3}, {}, waiter).status();
      const bool too_late = work_seconds > 10 && found_seconds > 10;
      EXPECT_EQ(RefusalOf(told), too_late ? Refusal::kDeadline : RefusalOf(absl::OkStatus())) << told;
      EXPECT_EQ(RetryAfter(told), std::nullopt) << told;
      EXPECT_TRUE(too_late || waiter->Result().ok());
    }
  }
}

// One that meets its deadline alone, but not after the one that runs, unless most of it is cached.
TEST_F(PrefillQueueTimeTest, TooLittleIsCachedForWhoHasToWait) {
  MakeQueue();
  const auto running = Run(8);
  const absl::Time deadline = now() + absl::Seconds(10);
  for (const double found_seconds : {5.0, 1.0}) {
    auto slot = Reserve(
        {.id = "id", .tokens = 3, .predicted_seconds = 5, .deadline = deadline, .may_save_seconds = 4.9});
    ASSERT_NE(slot, nullptr);
    slot->SetPredictedSeconds(found_seconds, {});
    const absl::Status told = slot->Submit({1, 2, 3}, {}, std::make_shared<RecordingWaiter>()).status();
    EXPECT_EQ(told.ok(), found_seconds == 1) << told;
    if (told.ok()) continue;
    EXPECT_EQ(RefusalOf(told), Refusal::kDeadline) << told;
    EXPECT_TRUE(RetryAfter(told).has_value()) << told;
  }
  engine_.Release();
}

TEST_F(PrefillQueueTimeTest, ADeadlineMayPassInTheQueue) {
  MakeQueue();
  const auto running = Run(1);
  auto late =
      Reserve({.id = "late", .tokens = 3, .predicted_seconds = 1, .deadline = now() + absl::Hours(1)});
  auto waiter = std::make_shared<RecordingWaiter>();
  Submit(*late, 2, waiter);
  Pass(absl::Hours(1));
  engine_.Release();
  EXPECT_EQ(waiter->Result().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(engine_.first_ids(), std::vector<uint32_t>{1});
}

TEST_F(PrefillQueueTimeTest, TheFirstReasonOfAStopCounts) {
  MakeQueue();
  const auto running = Run(1);
  auto waits = Reserve({.id = "waits", .tokens = 3});
  queue_->StopAll(absl::UnavailableError("going away"));
  queue_->StopAll(absl::InternalError("again"));
  EXPECT_EQ(running_->Result().status(), absl::UnavailableError("going away"));
  EXPECT_EQ(waits->Pay(1), absl::UnavailableError("going away"));
}

class PrefillQueueTurnsTest : public PrefillQueueTimeTest {
 protected:
  PrefillQueueTurnsTest() : PrefillQueueTimeTest(/*capacity=*/3) {}
};

TEST_F(PrefillQueueTurnsTest, EachPreemptionIsCounted) {
  MakeQueue();
  const auto running = Run(100);
  EXPECT_EQ(Metric("meshfill_preemptions_total"), 0);
  auto shorter = Reserve({.id = "shorter", .tokens = 3, .predicted_seconds = 1});
  auto waiter = std::make_shared<RecordingWaiter>();
  Submit(*shorter, 2, waiter);
  ASSERT_TRUE(engine_.WaitForBegun(2));
  EXPECT_TRUE(Eventually([&] { return Metric("meshfill_preemptions_total") == 1; }));
  engine_.Release();
  EXPECT_TRUE(running_->Result().ok());
  EXPECT_TRUE(waiter->Result().ok());
  EXPECT_EQ(Metric("meshfill_preemptions_total"), 1);
}

TEST_F(PrefillQueueTurnsTest, AStopIsNoPreemption) {
  MakeQueue();
  auto running = Run(100);
  running.reset();
  EXPECT_EQ(running_->Result().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(Metric("meshfill_preemptions_total"), 0);
}

TEST_F(PrefillQueueTurnsTest, ThoseThatShareASubmeshTakeTurns) {
  MakeQueue();
  engine_.PutAllAt(7);
  engine_.Hold();
  std::vector<std::unique_ptr<PrefillQueue::Slot>> slots;
  std::vector<std::shared_ptr<RecordingWaiter>> waiters;
  for (const char* id : {"a", "b"}) {
    slots.push_back(Reserve(
        {.id = id, .tokens = 3, .predicted_seconds = 2, .submeshes = {{.submeshes = 2, .seconds = 1}}}));
    waiters.push_back(std::make_shared<RecordingWaiter>());
    EXPECT_EQ(Submit(*slots.back(), 1, waiters.back()), 0) << "it waits for nobody";
  }
  ASSERT_TRUE(engine_.WaitForBegun(2));  // side by side: nobody knows better yet
  const absl::Time end = MonotonicNow() + absl::Seconds(10);
  const auto paused = [&] {
    const auto jobs = queue_->snapshot().jobs;
    return std::count_if(jobs.begin(), jobs.end(),
                         [](const auto& job) { return job.phase == PrefillQueue::Phase::kPaused; });
  };
  while (paused() == 0 && MonotonicNow() < end) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(paused(), 1);
  engine_.Release();
  for (const auto& waiter : waiters) EXPECT_TRUE(waiter->Result().ok());
}

TEST_F(PrefillQueueTurnsTest, WhoGaveWayMayStandStill) {
  MakeQueue();
  const auto running = Run(100);
  auto shorter = Reserve({.id = "shorter", .tokens = 3, .predicted_seconds = 1});
  auto waiter = std::make_shared<RecordingWaiter>();
  Submit(*shorter, 2, waiter);
  ASSERT_TRUE(engine_.WaitForBegun(2));
  const auto shorter_has_done = [&](int layers) {
    return Eventually([&] {
      const auto jobs = queue_->snapshot().jobs;
      return std::any_of(jobs.begin(), jobs.end(),
                         [&](const auto& job) { return job.id == "shorter" && job.layers_done == layers; });
    });
  };
  for (const int layers : {1, 2}) {
    engine_.Hold(layers);
    ASSERT_TRUE(shorter_has_done(layers));
    EXPECT_EQ(queue_->standstill(now() + absl::Hours(layers)), "");
  }
  engine_.Release();
  EXPECT_TRUE(waiter->Result().ok());
  EXPECT_TRUE(running_->Result().ok());
}

// What has gone beyond its prediction gives way when time alone has passed: a thread of the queue looks.
TEST_F(PrefillQueueTurnsTest, WhatIsOverItsPredictionGivesWay) {
  MakeQueue();
  const auto running = Run(10);
  auto next = Reserve({.id = "next", .tokens = 3, .predicted_seconds = 8});
  auto waiter = std::make_shared<RecordingWaiter>();
  EXPECT_EQ(Submit(*next, 2, waiter), 1);
  Pass(absl::Seconds(40));
  ASSERT_TRUE(engine_.WaitForBegun(2));
  engine_.Release();
  EXPECT_TRUE(running_->Result().ok());
  EXPECT_TRUE(waiter->Result().ok());
}

}  // namespace
}  // namespace meshfill
