#include "server/queue/prefill_queue.h"

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "server/queue/queue_room.h"
#include "server/queue/refusal.h"
#include "tests/server/queue/prefill_queue_fixture.h"

namespace meshfill {
namespace {

using PrefillQueueTest = PrefillQueueFixture;

TEST_F(PrefillQueueTest, RunsWhatIsSubmitted) {
  MakeQueue();
  auto slot = Reserve({.id = "a", .tokens = 3});
  auto waiter = std::make_shared<RecordingWaiter>();
  EXPECT_EQ(Submit(*slot, 7, waiter), 0);
  ASSERT_TRUE(waiter->Result().ok()) << waiter->Result().status();
  EXPECT_EQ(waiter->Result()->top.front().token, 10u);
  EXPECT_EQ(waiter->layers(), 4);
  EXPECT_GE(waiter->queue_seconds(), 0);
  EXPECT_EQ(queue_->snapshot().requests, 0);
}

// Lone seconds, and those that are shared with what waits.
TEST_F(PrefillQueueTest, CountsWhetherOthersWaitWhileOneComputes) {
  MakeQueue();
  const auto seconds = [&](const char* others) {
    const std::string name = absl::StrCat("meshfill_computing_seconds_total{others=\"", others, "\"} ");
    const std::string text = metrics_.Text();
    const size_t at = text.find(name);
    return at == std::string::npos ? -1 : std::stod(text.substr(at + name.size()));
  };
  const auto run = [&](int prompts) {
    engine_.Hold();
    std::vector<std::unique_ptr<PrefillQueue::Slot>> slots;
    std::vector<std::shared_ptr<RecordingWaiter>> waiters;
    for (int i = 0; i < prompts; ++i) {
      slots.push_back(Reserve({.id = std::to_string(i), .tokens = 3, .predicted_seconds = 1}));
      waiters.push_back(std::make_shared<RecordingWaiter>());
      Submit(*slots.back(), 1, waiters.back());
    }
    engine_.Release();
    for (const auto& waiter : waiters) EXPECT_TRUE(waiter->Result().ok());
  };
  run(1);
  const double lone = seconds("no");
  EXPECT_GT(lone, 0);
  EXPECT_EQ(seconds("yes"), 0);
  run(2);
  EXPECT_GT(seconds("no"), lone);
  EXPECT_GT(seconds("yes"), 0);
}

TEST_F(PrefillQueueTest, WhatStandsStillIsTold) {
  MakeQueue();
  engine_.Hold();
  auto slot = Reserve({.id = "a", .tokens = 3, .predicted_seconds = 40});  // 10 s a layer
  auto waiter = std::make_shared<RecordingWaiter>();
  Submit(*slot, 7, waiter);
  ASSERT_TRUE(engine_.WaitForBegun(1));
  absl::Time now = MonotonicNow();
  for (; queue_->snapshot().jobs.front().layers_done == 0; now = MonotonicNow()) {
    ASSERT_EQ(queue_->standstill(now), "");
  }
  EXPECT_EQ(queue_->standstill(now), "");
  EXPECT_EQ(queue_->standstill(now + absl::Seconds(199)), "");
  EXPECT_NE(queue_->standstill(now + absl::Seconds(201)), "");
  engine_.Release();
  ASSERT_TRUE(waiter->Result().ok());
  EXPECT_EQ(queue_->standstill(now + absl::Hours(1)), "");
}

TEST_F(PrefillQueueTest, OrdersByPriorityThenArrival) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  MakeQueue();
  engine_.Hold();
  auto blocker = Reserve({.id = "blocker", .tokens = 3});
  auto first = std::make_shared<RecordingWaiter>();
  Submit(*blocker, 255, first);
  ASSERT_TRUE(engine_.WaitForBegun(1));

  constexpr int kRequests = 30;
  std::vector<std::unique_ptr<PrefillQueue::Slot>> slots;
  std::vector<std::shared_ptr<RecordingWaiter>> waiters;
  std::vector<std::pair<int, uint32_t>> expected;  // (−priority, first id): ids rise with arrival
  for (uint32_t id = 0; id < kRequests; ++id) {
    const int priority = static_cast<int>(random() % 5) - 2;
    slots.push_back(Reserve({.id = std::to_string(id), .tokens = 3, .priority = priority}));
    waiters.push_back(std::make_shared<RecordingWaiter>());
    const auto ahead = std::count_if(expected.begin(), expected.end(),
                                     [&](const auto& other) { return other.first <= -priority; });
    EXPECT_EQ(Submit(*slots.back(), id, waiters.back()), 1 + ahead);
    expected.emplace_back(-priority, id);
  }
  std::sort(expected.begin(), expected.end());
  engine_.Release();
  for (const auto& waiter : waiters) EXPECT_TRUE(waiter->Result().ok());
  const std::vector<uint32_t> order = engine_.first_ids();
  ASSERT_EQ(order.size(), kRequests + 1u);
  for (int i = 0; i < kRequests; ++i) EXPECT_EQ(order[i + 1], expected[i].second) << "position " << i;
}

TEST_F(PrefillQueueTest, BoundsRequestsIncludingUploads) {
  MakeQueue({.max_requests = 2, .max_tokens = 1000});
  EXPECT_EQ(Metric("meshfill_queue_max_requests"), 2);
  EXPECT_EQ(Metric("meshfill_queue_max_tokens"), 1000);
  auto one = Reserve({.id = "1", .tokens = 3, .predicted_seconds = 20});
  auto two = Reserve({.id = "2", .tokens = 3, .predicted_seconds = 30});
  // Nothing runs: the first place is free as soon as it begins.
  ExpectRefusedWithRetry({.id = "3", .tokens = 3}, kLeast, kLeast);
  one.reset();  // given back
  EXPECT_NE(Reserve({.id = "3", .tokens = 3}), nullptr);
}

TEST_F(PrefillQueueTest, RetryIsTheRestOfWhatRuns) {
  MakeQueue({.max_requests = 1});
  engine_.Hold(0);
  auto running = Reserve({.id = "1", .tokens = 3, .predicted_seconds = 100});
  auto waiter = std::make_shared<RecordingWaiter>();
  Submit(*running, 1, waiter);
  ASSERT_TRUE(engine_.WaitForBegun(1));
  auto waiting = Reserve({.id = "2", .tokens = 3, .predicted_seconds = 10});
  ExpectRefusedWithRetry({.id = "3", .tokens = 3}, 90, 100);
  engine_.Release();
  EXPECT_TRUE(waiter->Result().ok());
}

TEST_F(PrefillQueueTest, BoundsTokens) {
  MakeQueue({.max_tokens = 100});
  auto one = Reserve({.id = "1", .tokens = 60});
  ExpectRefusedWithRetry({.id = "2", .tokens = 41}, kLeast, kLeast);
  auto two = Reserve({.id = "2", .tokens = 40});
  EXPECT_EQ(queue_->snapshot().tokens, 100);
  EXPECT_EQ(queue_->snapshot().requests, 2);
  ExpectRefusedWithRetry({.id = "3", .tokens = 1}, kLeast, kLeast);
  ExpectRefusedForGood({.id = "3", .tokens = 101});
}

// An upload counts twice what has come of it, and some tokens that are free.
TEST_F(PrefillQueueTest, AnAnnouncementHoldsNoTokensThatHaveNotCome) {
  constexpr int64_t kFree = QueueRoom::kFreeTokens;
  MakeQueue({.max_tokens = 10 * kFree});
  auto announced = Reserve({.id = "1", .tokens = 9 * kFree});
  EXPECT_EQ(queue_->snapshot().tokens, kFree);
  auto other = Reserve({.id = "2", .tokens = 4 * kFree});
  ASSERT_TRUE(other->Pay(4 * kFree).ok());
  EXPECT_EQ(queue_->snapshot().tokens, 5 * kFree);
  ASSERT_TRUE(announced->Pay(kFree / 4).ok());
  EXPECT_EQ(queue_->snapshot().tokens, 5 * kFree);
  ASSERT_TRUE(announced->Pay(3 * kFree).ok());
  EXPECT_EQ(queue_->snapshot().tokens, 10 * kFree);
  ExpectRefusedWithRetry({.id = "3", .tokens = 1}, kLeast, kLeast);
  const absl::Status beyond = announced->Pay(3 * kFree + 1);
  EXPECT_EQ(beyond.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(RetryAfter(beyond).has_value());
  other.reset();
  EXPECT_TRUE(announced->Pay(9 * kFree).ok());
  EXPECT_EQ(queue_->snapshot().tokens, 9 * kFree);
}

TEST_F(PrefillQueueTest, ASlowUploadGivesItsPlaceToOthersInAFullQueue) {
  MakeQueue({.max_requests = 2});
  constexpr int64_t kTokens = 1 << 20;
  const absl::Time begin = MonotonicNow();
  auto silent = Reserve({.id = "silent", .tokens = kTokens});
  auto fast = Reserve({.id = "fast", .tokens = kTokens});
  ASSERT_TRUE(fast->Pay(kTokens / 2).ok());
  std::unique_ptr<PrefillQueue::Slot> comes;
  while (comes == nullptr && MonotonicNow() < begin + absl::Seconds(20)) {
    auto slot = queue_->Reserve({.id = "comes", .tokens = 3});
    if (slot.ok()) {
      comes = *std::move(slot);
    } else {
      EXPECT_TRUE(RetryAfter(slot.status()).has_value());
      absl::SleepFor(absl::Milliseconds(10));
    }
  }
  ASSERT_NE(comes, nullptr);
  EXPECT_GE(MonotonicNow() - begin, QueueRoom::kUploadGrace);
  EXPECT_TRUE(fast->Pay(kTokens / 2 + 1).ok());
  const absl::Status lost = silent->Pay(1);
  EXPECT_EQ(lost.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(RetryAfter(lost).has_value());
  auto waiter = std::make_shared<RecordingWaiter>();
  EXPECT_EQ(silent->Submit({1, 2, 3}, {}, waiter).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(waiter->done());
  EXPECT_EQ(queue_->snapshot().requests, 2);
  EXPECT_TRUE(queue_->CheckId("", "silent").ok());
}

TEST_F(PrefillQueueTest, BoundsWhatATenantHas) {
  v1::Config config;
  config.mutable_tenant_limits()->set_max_requests(2);
  (*config.mutable_tenants())["big"].set_max_tokens(100);
  PrefillQueue::Limits limits;
  limits.tenants = Tenants(config);
  MakeQueue(limits);
  engine_.Hold(0);
  auto running = Reserve({.id = "1", .tenant = "small", .tokens = 3, .predicted_seconds = 100});
  auto waiter = std::make_shared<RecordingWaiter>();
  Submit(*running, 1, waiter);
  ASSERT_TRUE(engine_.WaitForBegun(1));
  // What has begun does not count.
  auto two = Reserve({.id = "2", .tenant = "small", .tokens = 3, .predicted_seconds = 10});
  auto three = Reserve({.id = "3", .tenant = "small", .tokens = 3, .predicted_seconds = 10});
  ExpectRefusedWithRetry({.id = "4", .tenant = "small", .tokens = 3}, 80, 100);
  EXPECT_EQ(RefusalOf(queue_->Reserve({.id = "4", .tenant = "small", .tokens = 3}).status()),
            Refusal::kTenantShare);
  // Others have their own bounds, and the named tenant both kinds.
  EXPECT_NE(Reserve({.id = "5", .tenant = "other", .tokens = 1000}), nullptr);
  ExpectRefusedForGood({.id = "6", .tenant = "big", .tokens = 101});
  auto big = Reserve({.id = "6", .tenant = "big", .tokens = 60});
  ExpectRefusedWithRetry({.id = "7", .tenant = "big", .tokens = 41}, kLeast, 200);
  auto more = Reserve({.id = "7", .tenant = "big", .tokens = 40});
  two.reset();
  EXPECT_NE(Reserve({.id = "4", .tenant = "small", .tokens = 3}), nullptr);
  engine_.Release();
  EXPECT_TRUE(waiter->Result().ok());
}

// A tenth of a second counts as 100 s for the one, whose short prompt then looks longer than the other's.
TEST_F(PrefillQueueTest, SharesGoByTheWeights) {
  v1::Config config;
  (*config.mutable_tenants())["light"].set_weight(0.001);
  PrefillQueue::Limits limits;
  limits.tenants = Tenants(config);
  MakeQueue(limits);
  engine_.Hold(0);
  std::vector<std::unique_ptr<PrefillQueue::Slot>> slots;
  std::vector<std::shared_ptr<RecordingWaiter>> waiters;
  const auto submit = [&](const Request& request) {
    slots.push_back(Reserve(request));
    waiters.push_back(std::make_shared<RecordingWaiter>());
    Submit(*slots.back(), static_cast<uint32_t>(slots.size()), waiters.back());
  };
  submit({.id = "runs", .tenant = "light", .tokens = 3, .predicted_seconds = 60});
  submit({.id = "long", .tenant = "other", .tokens = 3, .predicted_seconds = 4});
  submit({.id = "short", .tenant = "light", .tokens = 3, .predicted_seconds = 1});
  ASSERT_TRUE(engine_.WaitForBegun(1));
  absl::SleepFor(absl::Milliseconds(100));  // the ranks' time of the one
  engine_.Release();
  for (const auto& waiter : waiters) EXPECT_TRUE(waiter->Result().ok());
  EXPECT_EQ(engine_.first_ids(), (std::vector<uint32_t>{1, 2, 3}));
}

// One that would be too late by its turn is accepted where it goes before the others, and does.
TEST_F(PrefillQueueTest, ADeadlineThatCanBeMetIsMet) {
  MakeQueue();
  engine_.Hold();
  auto running = Reserve({.id = "runs", .tokens = 3, .predicted_seconds = 0.1});
  Submit(*running, 1, std::make_shared<RecordingWaiter>());
  ASSERT_TRUE(engine_.WaitForBegun(1));
  auto shorter = Reserve({.id = "shorter", .tokens = 3, .predicted_seconds = 50});
  auto first = std::make_shared<RecordingWaiter>();
  Submit(*shorter, 2, first);
  auto due = Reserve(
      {.id = "due", .tokens = 3, .predicted_seconds = 60, .deadline = MonotonicNow() + absl::Seconds(70)});
  ASSERT_NE(due, nullptr);
  auto second = std::make_shared<RecordingWaiter>();
  EXPECT_EQ(Submit(*due, 3, second), 1);
  engine_.Release();
  EXPECT_TRUE(first->Result().ok());
  EXPECT_TRUE(second->Result().ok());
  const std::vector<uint32_t> order = engine_.first_ids();
  ASSERT_EQ(order.size(), 3u);
  EXPECT_EQ(order[1], 3u);
}

TEST_F(PrefillQueueTest, BoundsThePredictedWaitForTheTurn) {
  MakeQueue({.max_wait = absl::Seconds(50)});
  auto one = Reserve({.id = "1", .tokens = 3, .predicted_seconds = 60});
  ASSERT_TRUE(one->Pay(1).ok());
  EXPECT_NE(Reserve({.id = "2", .tokens = 3, .predicted_seconds = 60}), nullptr);  // little of it has come
  ASSERT_TRUE(one->Pay(2).ok());
  ExpectRefusedWithRetry({.id = "2", .tokens = 3, .predicted_seconds = 60}, 10, 10);
  EXPECT_NE(Reserve({.id = "2", .tokens = 3, .priority = 1, .predicted_seconds = 60}), nullptr);
  EXPECT_NE(Reserve({.id = "3", .tokens = 3, .predicted_seconds = 59}), nullptr);  // before it
}

TEST_F(PrefillQueueTest, WaitsAreOfTheLatestPredictions) {
  MakeQueue({.max_wait = absl::Seconds(50)});
  engine_.Hold();
  auto running = Reserve({.id = "1", .tokens = 3, .predicted_seconds = 1});
  auto waiter = std::make_shared<RecordingWaiter>();
  Submit(*running, 1, waiter);
  ASSERT_TRUE(engine_.WaitForBegun(1));
  auto cached = Reserve({.id = "2", .tokens = 3, .predicted_seconds = 60});
  ASSERT_TRUE(cached->Pay(3).ok());
  ExpectRefusedWithRetry({.id = "3", .tokens = 3, .predicted_seconds = 70}, 10, 11);
  cached->SetPredictedSeconds(5, {});  // most of it is cached
  auto cached_waiter = std::make_shared<RecordingWaiter>();
  Submit(*cached, 2, cached_waiter);
  EXPECT_NE(Reserve({.id = "3", .tokens = 3, .predicted_seconds = 70}), nullptr);
  EXPECT_LE(queue_->snapshot().jobs[1].predicted_rest_seconds, 6);
  engine_.Release();
  EXPECT_TRUE(waiter->Result().ok());
  EXPECT_TRUE(cached_waiter->Result().ok());
}

TEST_F(PrefillQueueTest, RefusesDeadlinesThatCannotBeMet) {
  MakeQueue();
  auto one = Reserve({.id = "1", .tokens = 3, .priority = 1, .predicted_seconds = 60});
  ASSERT_TRUE(one->Pay(3).ok());
  const absl::Time deadline = MonotonicNow() + absl::Seconds(70);
  ExpectRefusedWithRetry({.id = "2", .tokens = 3, .predicted_seconds = 65, .deadline = deadline}, 60, 60);
  ExpectRefusedForGood({.id = "2", .tokens = 3, .predicted_seconds = 75, .deadline = deadline});
  EXPECT_NE(Reserve({.id = "2", .tokens = 3, .predicted_seconds = 5, .deadline = deadline}), nullptr);
  EXPECT_NE(Reserve({.id = "2", .tokens = 3, .priority = 1, .predicted_seconds = 65, .deadline = deadline}),
            nullptr);  // before the other, which has none
  const auto late = queue_->Reserve({.id = "3", .tokens = 3, .deadline = MonotonicNow() - absl::Seconds(1)});
  EXPECT_EQ(late.status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(PrefillQueueTest, RefusesLiveIdsUntilTheyEnd) {
  MakeQueue();
  auto slot = Reserve({.id = "same", .tokens = 3});
  EXPECT_EQ(queue_->Reserve({.id = "same", .tokens = 4}).status().code(), absl::StatusCode::kAlreadyExists);
  auto waiter = std::make_shared<RecordingWaiter>();
  Submit(*slot, 1, waiter);
  ASSERT_TRUE(waiter->Result().ok());
  EXPECT_NE(Reserve({.id = "same", .tokens = 4}), nullptr);
}

// Nobody keeps another from an id, or learns which of another's are live.
TEST_F(PrefillQueueTest, AnIdIsOneOfItsTenantsOwn) {
  MakeQueue();
  engine_.Hold();
  auto first = Reserve({.id = "same", .tenant = "a", .tokens = 3});
  EXPECT_TRUE(queue_->CheckId("b", "same").ok());
  auto second = Reserve({.id = "same", .tenant = "b", .tokens = 3});
  for (const char* tenant : {"a", "b"}) {
    EXPECT_TRUE(absl::IsAlreadyExists(queue_->CheckId(tenant, "same")));
    EXPECT_TRUE(
        absl::IsAlreadyExists(queue_->Reserve({.id = "same", .tenant = tenant, .tokens = 3}).status()));
  }
  auto waiter = std::make_shared<RecordingWaiter>();
  Submit(*first, 1, waiter);
  ASSERT_TRUE(engine_.WaitForBegun(1));
  second.reset();
  EXPECT_TRUE(queue_->CheckId("b", "same").ok());
  EXPECT_TRUE(absl::IsAlreadyExists(queue_->CheckId("a", "same"))) << "it runs";
  engine_.Release();
  ASSERT_TRUE(waiter->Result().ok());
  EXPECT_TRUE(queue_->CheckId("a", "same").ok());
}

TEST_F(PrefillQueueTest, WithdrawnWhileItWaitsNeverRuns) {
  MakeQueue();
  engine_.Hold();
  auto running = Reserve({.id = "1", .tokens = 3});
  auto running_waiter = std::make_shared<RecordingWaiter>();
  Submit(*running, 1, running_waiter);
  ASSERT_TRUE(engine_.WaitForBegun(1));
  auto waiting = Reserve({.id = "2", .tokens = 3});
  auto waiting_waiter = std::make_shared<RecordingWaiter>();
  EXPECT_EQ(Submit(*waiting, 2, waiting_waiter), 1);
  waiting.reset();
  EXPECT_EQ(queue_->snapshot().requests, 0);
  EXPECT_EQ(waiting_waiter.use_count(), 1) << "the queue still holds the waiter";
  engine_.Release();
  EXPECT_TRUE(running_waiter->Result().ok());
  EXPECT_EQ(engine_.first_ids(), std::vector<uint32_t>{1});
  EXPECT_FALSE(waiting_waiter->done());
}

TEST_F(PrefillQueueTest, WithdrawnWhileItRunsIsStopped) {
  MakeQueue();
  engine_.Hold();
  auto slot = Reserve({.id = "1", .tokens = 3});
  auto waiter = std::make_shared<RecordingWaiter>();
  Submit(*slot, 1, waiter);
  ASSERT_TRUE(engine_.WaitForBegun(1));
  slot.reset();
  EXPECT_TRUE(engine_.WaitForStopped(1));
  EXPECT_EQ(waiter->Result().status().code(), absl::StatusCode::kCancelled);

  engine_.Release();
  auto next = Reserve({.id = "2", .tokens = 3});
  auto next_waiter = std::make_shared<RecordingWaiter>();
  Submit(*next, 2, next_waiter);
  EXPECT_TRUE(next_waiter->Result().ok());
}

TEST_F(PrefillQueueTest, PassedDeadlineIsNotRun) {
  MakeQueue();
  engine_.Hold();
  auto running = Reserve({.id = "1", .tokens = 3});
  auto running_waiter = std::make_shared<RecordingWaiter>();
  Submit(*running, 1, running_waiter);
  ASSERT_TRUE(engine_.WaitForBegun(1));
  auto late = Reserve({.id = "2", .tokens = 3, .deadline = MonotonicNow() + absl::Milliseconds(20)});
  auto late_waiter = std::make_shared<RecordingWaiter>();
  Submit(*late, 2, late_waiter);
  absl::SleepFor(absl::Milliseconds(30));
  engine_.Release();
  EXPECT_EQ(late_waiter->Result().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(engine_.first_ids(), std::vector<uint32_t>{1});
}

TEST_F(PrefillQueueTest, EngineErrorsReachTheWaiterAndTheNextRuns) {
  MakeQueue();
  engine_.FailNext(absl::InternalError("NaN in the logits"));
  for (const bool good : {false, true}) {
    auto slot = Reserve({.id = "1", .tokens = 3});
    auto waiter = std::make_shared<RecordingWaiter>();
    Submit(*slot, 1, waiter);
    EXPECT_EQ(waiter->Result().ok(), good);
    EXPECT_EQ(waiter->Result().status().code(), good ? absl::StatusCode::kOk : absl::StatusCode::kInternal);
  }
}

TEST_F(PrefillQueueTest, DrainRefusesTheNewAndFinishesTheAccepted) {
  MakeQueue();
  engine_.Hold();
  auto running = Reserve({.id = "1", .tokens = 3});
  auto uploading = Reserve({.id = "2", .tokens = 3});
  auto one = std::make_shared<RecordingWaiter>(), two = std::make_shared<RecordingWaiter>();
  Submit(*running, 1, one);
  queue_->Drain();
  EXPECT_EQ(queue_->Reserve({.id = "3", .tokens = 3}).status().code(), absl::StatusCode::kUnavailable);
  Submit(*uploading, 2, two);
  engine_.Release();
  EXPECT_TRUE(one->Result().ok());
  EXPECT_TRUE(two->Result().ok());
}

TEST_F(PrefillQueueTest, StopAllEndsEverythingWithItsReason) {
  MakeQueue();
  engine_.Hold();
  auto running = Reserve({.id = "1", .tokens = 3}), waiting = Reserve({.id = "2", .tokens = 3}),
       uploading = Reserve({.id = "3", .tokens = 3});
  auto one = std::make_shared<RecordingWaiter>(), two = std::make_shared<RecordingWaiter>();
  Submit(*running, 1, one);
  ASSERT_TRUE(engine_.WaitForBegun(1));
  Submit(*waiting, 2, two);
  queue_->StopAll(absl::UnavailableError("going away"));
  EXPECT_EQ(one->Result().status(), absl::UnavailableError("going away"));
  EXPECT_EQ(two->Result().status(), absl::UnavailableError("going away"));
  EXPECT_EQ(uploading->Submit({1}, {}, std::make_shared<RecordingWaiter>()).status(),
            absl::UnavailableError("going away"));
}

TEST_F(PrefillQueueTest, SnapshotShowsWhatRunsAndWaits) {
  MakeQueue();
  engine_.Hold(2);
  auto running = Reserve({.id = "runs", .tokens = 3, .predicted_seconds = 100});
  auto waiter = std::make_shared<RecordingWaiter>();
  Submit(*running, 1, waiter);
  ASSERT_TRUE(engine_.WaitForBegun(1));
  auto uploading = Reserve({.id = "uploads", .tokens = 7, .predicted_seconds = 10});
  auto waiting = Reserve({.id = "waits", .tokens = 3, .predicted_seconds = 20});
  Submit(*waiting, 2, std::make_shared<RecordingWaiter>());
  const absl::Time deadline = MonotonicNow() + absl::Seconds(10);
  while (queue_->snapshot().jobs.front().layers_done < 2 && MonotonicNow() < deadline)
    absl::SleepFor(absl::Milliseconds(1));
  const PrefillQueue::Snapshot snapshot = queue_->snapshot();
  EXPECT_EQ(snapshot.requests, 2);
  EXPECT_EQ(snapshot.tokens, 10);
  ASSERT_EQ(snapshot.jobs.size(), 3u);
  EXPECT_EQ(snapshot.jobs[0].id, "runs");
  EXPECT_EQ(snapshot.jobs[0].phase, PrefillQueue::Phase::kRunning);
  EXPECT_EQ(snapshot.jobs[0].layers_done, 2);
  EXPECT_EQ(snapshot.jobs[0].layers, 4);
  EXPECT_GT(snapshot.jobs[0].elapsed_seconds, 0);
  EXPECT_EQ(snapshot.jobs[1].id, "waits");
  EXPECT_EQ(snapshot.jobs[1].phase, PrefillQueue::Phase::kWaiting);
  EXPECT_EQ(snapshot.jobs[1].tokens, 3);
  EXPECT_GE(snapshot.jobs[1].predicted_rest_seconds, 20);
  EXPECT_EQ(snapshot.jobs[2].id, "uploads");
  EXPECT_EQ(snapshot.jobs[2].phase, PrefillQueue::Phase::kUploading);
  EXPECT_NEAR(snapshot.jobs[2].predicted_rest_seconds, snapshot.jobs[1].predicted_rest_seconds + 10, 1e-9);
  engine_.Release();
  EXPECT_TRUE(waiter->Result().ok());
}

class PrefillQueuePreemptionTest : public PrefillQueueFixture {
 protected:
  PrefillQueuePreemptionTest() : PrefillQueueFixture(/*capacity=*/3) {}

  struct Sent {
    std::unique_ptr<PrefillQueue::Slot> slot;
    std::shared_ptr<RecordingWaiter> waiter;
    PrefillQueue::Turn turn;
  };
  Sent Send(uint32_t first_id, int64_t tokens, double predicted_seconds, int priority = 0) {
    Sent sent{.slot = Reserve({.id = std::to_string(first_id),
                               .tokens = tokens,
                               .priority = priority,
                               .predicted_seconds = predicted_seconds}),
              .waiter = std::make_shared<RecordingWaiter>(),
              .turn = {}};
    std::vector<uint32_t> prompt(tokens, 1);
    prompt.front() = first_id;
    const auto turn = sent.slot->Submit(std::move(prompt), {}, sent.waiter);
    EXPECT_TRUE(turn.ok()) << turn.status();
    sent.turn = turn.value_or(PrefillQueue::Turn{.before = -1});
    return sent;
  }
  std::map<std::string, PrefillQueue::Phase> Phases() const {
    std::map<std::string, PrefillQueue::Phase> phases;
    for (const PrefillQueue::JobView& job : queue_->snapshot().jobs) phases[job.id] = job.phase;
    return phases;
  }
  using Phase = PrefillQueue::Phase;
};

TEST_F(PrefillQueuePreemptionTest, ALongOneGivesWayAndGoesOn) {
  MakeQueue({}, [now = MonotonicNow()] { return now; });
  engine_.Hold(0);
  const Sent long_one = Send(1, 50, 100);
  ASSERT_TRUE(engine_.WaitForBegun(1));
  const Sent middle = Send(2, 20, 10);
  ASSERT_TRUE(engine_.WaitForBegun(2));
  EXPECT_EQ(middle.turn.before, 0);
  EXPECT_EQ(middle.turn.wait_seconds, 0);
  const Sent short_one = Send(3, 3, 1);
  ASSERT_TRUE(engine_.WaitForBegun(3));
  EXPECT_EQ(Phases(), (std::map<std::string, Phase>{
                          {"1", Phase::kPaused}, {"2", Phase::kPaused}, {"3", Phase::kRunning}}));
  const Sent shortest = Send(4, 3, 0.1);  // no more can live: it waits
  EXPECT_EQ(Phases()["4"], Phase::kWaiting);
  const Sent longest = Send(5, 60, 1000);
  EXPECT_EQ(longest.turn.before, 4);
  EXPECT_NEAR(longest.turn.wait_seconds, 111.1, 1);
  EXPECT_FALSE(long_one.waiter->done());
  engine_.Release();
  for (const Sent* sent : {&long_one, &middle, &short_one, &shortest, &longest}) {
    EXPECT_TRUE(sent->waiter->Result().ok()) << sent->waiter->Result().status();
  }
  EXPECT_EQ(engine_.first_ids(), (std::vector<uint32_t>{1, 2, 3, 4, 5}));
}

TEST_F(PrefillQueuePreemptionTest, WhatIsOverItsPredictionGivesWayThoughNothingElseHappens) {
  MakeQueue();
  engine_.Hold(0);
  const Sent wrong = Send(1, 50, 0.5);
  ASSERT_TRUE(engine_.WaitForBegun(1));
  const Sent waits = Send(2, 3, 0.4);
  EXPECT_EQ(Phases()["2"], Phase::kWaiting);
  ASSERT_TRUE(engine_.WaitForBegun(2));
  EXPECT_EQ(Phases()["1"], Phase::kPaused);
  engine_.Release();
  EXPECT_TRUE(wrong.waiter->Result().ok());
  EXPECT_TRUE(waits.waiter->Result().ok());
}

TEST_F(PrefillQueuePreemptionTest, WithdrawnWhileItGaveWayIsStoppedAtOnce) {
  MakeQueue();
  engine_.Hold(0);
  Sent long_one = Send(1, 50, 100);
  ASSERT_TRUE(engine_.WaitForBegun(1));
  const Sent short_one = Send(2, 3, 1);
  ASSERT_TRUE(engine_.WaitForBegun(2));
  long_one.slot.reset();
  EXPECT_EQ(long_one.waiter->Result().status().code(), absl::StatusCode::kCancelled);
  EXPECT_FALSE(short_one.waiter->done());
  engine_.Release();
  EXPECT_TRUE(short_one.waiter->Result().ok());
}

TEST_F(PrefillQueuePreemptionTest, WithdrawnWhileItRunsGivesItsTurnBack) {
  MakeQueue();
  engine_.Hold(0);
  const Sent long_one = Send(1, 50, 100);
  ASSERT_TRUE(engine_.WaitForBegun(1));
  Sent short_one = Send(2, 3, 1);
  ASSERT_TRUE(engine_.WaitForBegun(2));
  short_one.slot.reset();
  EXPECT_EQ(short_one.waiter->Result().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(Phases()["1"], Phase::kRunning);
  engine_.Release();
  EXPECT_TRUE(long_one.waiter->Result().ok());
}

TEST_F(PrefillQueuePreemptionTest, WhatFindsNoMemoryWaitsForAnEndAndIsNotOvertaken) {
  MakeQueue();
  engine_.Hold(0);
  engine_.RefuseBesideOthers(10);
  const Sent long_one = Send(1, 50, 100);
  ASSERT_TRUE(engine_.WaitForBegun(1));
  const Sent large = Send(2, 20, 10);  // goes first, but has no room beside the long one
  const absl::Time deadline = MonotonicNow() + absl::Seconds(10);
  while ((engine_.refusals() == 0 || Phases()["1"] != Phase::kRunning) && MonotonicNow() < deadline) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(Phases(), (std::map<std::string, Phase>{{"1", Phase::kRunning}, {"2", Phase::kWaiting}}));
  const Sent short_one = Send(3, 3, 1);  // goes before both, and has room
  const Sent later = Send(4, 5, 40);     // has room, but its turn is after the large one's
  ASSERT_TRUE(engine_.WaitForBegun(2));
  EXPECT_EQ(Phases()["3"], Phase::kRunning);
  EXPECT_EQ(Phases()["4"], Phase::kWaiting);
  engine_.Release();
  for (const Sent* sent : {&long_one, &large, &short_one, &later}) {
    EXPECT_TRUE(sent->waiter->Result().ok()) << sent->waiter->Result().status();
  }
  EXPECT_EQ(engine_.first_ids(), (std::vector<uint32_t>{1, 3, 2, 4}));
}

TEST_F(PrefillQueuePreemptionTest, RefusalWithNothingElseAliveIsTheAnswer) {
  MakeQueue();
  engine_.RefuseNext();
  const Sent alone = Send(1, 3, 1);
  EXPECT_EQ(alone.waiter->Result().status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(RetryAfter(alone.waiter->Result().status()).has_value()) << "leases may have the memory";
}

// Prompts come, are withdrawn and stopped at random moments: each is answered once, as it should be.
TEST_F(PrefillQueuePreemptionTest, EveryPromptHasOneAnswerInAnyMix) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  MakeQueue({.max_requests = 1000, .max_age = absl::Milliseconds(20)});
  engine_.RefuseBesideOthers(30);
  std::vector<Sent> sent;
  for (uint32_t id = 0; id < 200; ++id) {
    const int64_t tokens = 1 + random() % 40;
    sent.push_back(Send(id, tokens, 0.001 * tokens, static_cast<int>(random() % 5) - 2));
    if (random() % 8 == 0) sent[random() % sent.size()].slot.reset();
    if (random() % 4 == 0) absl::SleepFor(absl::Microseconds(random() % 2000));
  }
  for (Sent& each : sent) {
    if (each.slot == nullptr) continue;
    const auto& result = each.waiter->Result();
    EXPECT_TRUE(result.ok()) << result.status();
  }
  const absl::Time deadline = MonotonicNow() + absl::Seconds(10);
  while (!Phases().empty() && MonotonicNow() < deadline) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(Phases().empty()) << "something that was withdrawn lives on";
}

}  // namespace
}  // namespace meshfill
