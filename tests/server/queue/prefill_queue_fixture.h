// What tests of the queue share: an engine that stands where it is told to, and a waiter that writes down
// what it hears.
#ifndef MESHFILL_TESTS_SERVER_QUEUE_PREFILL_QUEUE_FIXTURE_H_
#define MESHFILL_TESTS_SERVER_QUEUE_PREFILL_QUEUE_FIXTURE_H_

#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/monotonic_time.h"
#include "server/queue/prefill_queue.h"
#include "server/queue/refusal.h"
#include "tests/server/fake_engine.h"

namespace meshfill {

class RecordingWaiter final : public PrefillQueue::Waiter {
 public:
  void OnLayerDone(int layers_done, int layers, double seconds_since_begin) override {
    EXPECT_EQ(layers_done, layers_ + 1);
    EXPECT_GE(seconds_since_begin, 0);
    layers_ = layers_done;
  }
  void OnPrefillDone(absl::StatusOr<PrefillResult> result, double queue_seconds) override {
    result_ = std::move(result);
    queue_seconds_ = queue_seconds;
    done_.set_value();  // throws where it is called twice
  }
  const absl::StatusOr<PrefillResult>& Result() {
    EXPECT_EQ(ended_.wait_for(std::chrono::seconds(10)), std::future_status::ready);
    return *result_;
  }
  bool done() const { return ended_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  double queue_seconds() const { return queue_seconds_; }
  int layers() const { return layers_; }

 private:
  std::optional<absl::StatusOr<PrefillResult>> result_;
  double queue_seconds_ = 0;
  int layers_ = 0;
  std::promise<void> done_;
  std::future<void> ended_ = done_.get_future();
};

class PrefillQueueFixture : public testing::Test {
 protected:
  explicit PrefillQueueFixture(int capacity = 1) : engine_(/*layers=*/4, capacity) {}
  using Request = PrefillQueue::Request;

  void MakeQueue(const PrefillQueue::Limits& limits = {}, PrefillQueue::Clock clock = MonotonicNow) {
    queue_ = std::make_unique<PrefillQueue>(engine_, limits, metrics_, last_prefill_, std::move(clock));
  }

  std::unique_ptr<PrefillQueue::Slot> Reserve(const Request& request) {
    auto slot = queue_->Reserve(request);
    EXPECT_TRUE(slot.ok()) << slot.status();
    return slot.ok() ? *std::move(slot) : nullptr;
  }

  static int Submit(PrefillQueue::Slot& slot, uint32_t first_id,
                    const std::shared_ptr<RecordingWaiter>& waiter) {
    const absl::StatusOr<PrefillQueue::Turn> before = slot.Submit({first_id, 1, 2}, {}, waiter);
    EXPECT_TRUE(before.ok()) << before.status();
    return before.ok() ? before->before : -1;
  }

  static constexpr double kLeast = 0.1;  // seconds, as RetryInfo says them

  // Waiting would not help.
  void ExpectRefusedForGood(const Request& request) {
    const auto slot = queue_->Reserve(request);
    EXPECT_EQ(slot.status().code(), absl::StatusCode::kResourceExhausted) << slot.status();
    EXPECT_EQ(RetryAfter(slot.status()), std::nullopt) << slot.status();
  }

  void ExpectRefusedWithRetry(const Request& request, double least_seconds, double most_seconds) {
    const auto slot = queue_->Reserve(request);
    ASSERT_EQ(slot.status().code(), absl::StatusCode::kResourceExhausted) << slot.status();
    const auto retry = RetryAfter(slot.status());
    ASSERT_TRUE(retry.has_value()) << slot.status();
    EXPECT_GE(*retry, absl::Seconds(least_seconds)) << slot.status();
    EXPECT_LE(*retry, absl::Seconds(most_seconds)) << slot.status();
  }

  // The value of a series as /metrics has it, labels included; -1: there is none.
  double Metric(const std::string& series) const {
    const std::string text = absl::StrCat("\n", metrics_.Text());
    const std::string begin = absl::StrCat("\n", series, " ");
    const size_t at = text.find(begin);
    return at == std::string::npos ? -1 : std::stod(text.substr(at + begin.size()));
  }

  FakeEngine engine_;
  Metrics metrics_;
  LastPrefill last_prefill_;
  std::unique_ptr<PrefillQueue> queue_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_QUEUE_PREFILL_QUEUE_FIXTURE_H_
