// The watch over streams by itself: who is told what, and when.
#include "server/api/live_streams.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"

namespace meshfill {
namespace {

constexpr absl::Duration kSoon = absl::Milliseconds(30);
constexpr absl::Duration kPatience = absl::Seconds(20);

// Remembers what it was told. Its request has the id "mine".
class Heard : public LiveStreams::Stream {
 public:
  explicit Heard(std::string tenant = "t") : tenant_(std::move(tenant)) {}

  void OnUploadOverdue() override { Tell("overdue"); }
  void OnDrain() override { Tell("drain"); }
  void OnUploadStopped() override { Tell("stopped"); }
  void OnResultUnread() override { Tell("unread"); }
  bool IsOf(const std::string& request_id, const std::string* tenant) const override {
    return request_id == "mine" && (tenant == nullptr || *tenant == tenant_);
  }
  bool CancelRequest(const std::string& request_id, const std::string* tenant) override {
    if (IsOf(request_id, tenant)) Tell("cancelled");
    return IsOf(request_id, tenant);
  }

  std::vector<std::string> words() const {
    const MutexLock lock(mu_);
    return words_;
  }
  // False where it does not come to be so.
  bool Comes(const std::vector<std::string>& expected) const {
    MutexLock lock(mu_);
    const absl::Time deadline = MonotonicNow() + kPatience;
    while (words_ != expected && MonotonicNow() < deadline) changed_.WaitUntil(mu_, deadline);
    return words_ == expected;
  }

 private:
  void Tell(const std::string& word) {
    const MutexLock lock(mu_);
    words_.push_back(word);
    changed_.NotifyAll();
  }

  const std::string tenant_;
  mutable Mutex mu_;
  mutable CondVar changed_;
  std::vector<std::string> words_ ABSL_GUARDED_BY(mu_);
};

using Words = std::vector<std::string>;

std::shared_ptr<Heard> Add(LiveStreams& live) {
  auto stream = std::make_shared<Heard>();
  live.Add(stream);
  return stream;
}

// Returns once the watcher has told what it had to tell. limits.upload_timeout is zero: new streams are told
// at once that they are overdue.
void WaitForWatcher(LiveStreams& live) {
  for (int i = 0; i < 2; ++i) {  // what one look finds is told in any order
    const auto probe = Add(live);
    EXPECT_TRUE(probe->Comes({"overdue"}));
    live.Remove(probe.get());
  }
}

LiveStreams::Limits Patient() { return {.upload_timeout = absl::Hours(1), .result_timeout = absl::Hours(1)}; }

TEST(LiveStreamsTest, AnUploadThatStandsStillIsToldOnce) {
  LiveStreams::Limits limits = Patient();
  limits.upload_timeout = kSoon;
  LiveStreams live(limits);
  const auto still = Add(live), complete = Add(live);
  live.UploadDone(complete.get());
  EXPECT_TRUE(still->Comes({"overdue"}));
  absl::SleepFor(3 * kSoon);  // nothing can be waited for: nothing more may come
  EXPECT_EQ(still->words(), Words{"overdue"});
  EXPECT_EQ(complete->words(), Words());
  live.Remove(still.get());
  live.Remove(complete.get());
}

TEST(LiveStreamsTest, AMessageStartsTheClockAgainAsFarAsItsTokensPay) {
  LiveStreams::Limits limits = Patient();
  limits.upload_timeout = absl::Seconds(1);
  limits.upload_tokens_per_second = 1000;
  LiveStreams live(limits);
  const absl::Time begin = MonotonicNow();
  const auto slow = Add(live), paid = Add(live);
  live.OnMessage(paid.get(), int64_t{1} << 40);
  while (slow->words().empty()) {  // talks all the time, of no token
    ASSERT_LT(MonotonicNow() - begin, kPatience);
    live.OnMessage(slow.get(), 0);
    live.OnMessage(paid.get(), int64_t{1} << 40);
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_GE(MonotonicNow() - begin, limits.upload_timeout);
  live.UploadDone(paid.get());
  live.OnMessage(slow.get(), 0);  // one that was on its way: it is told no second time
  const auto quiet = Add(live);   // whose time comes after
  EXPECT_TRUE(quiet->Comes({"overdue"}));
  EXPECT_EQ(slow->words(), Words{"overdue"});
  EXPECT_EQ(paid->words(), Words());
  live.Remove(quiet.get());
  live.Remove(slow.get());
  live.Remove(paid.get());
}

TEST(LiveStreamsTest, ADrainIsToldOnceToEachAlsoToThoseThatComeLater) {
  LiveStreams live(Patient());
  const auto early = Add(live);
  live.StartDrain();
  EXPECT_TRUE(early->Comes({"drain"}));
  const auto late = Add(live);
  EXPECT_TRUE(late->Comes({"drain"}));
  live.StartDrain();
  const auto last = Add(live);
  EXPECT_TRUE(last->Comes({"drain"}));
  EXPECT_EQ(early->words(), Words{"drain"});
  for (const auto& stream : {early, late, last}) live.Remove(stream.get());
  EXPECT_TRUE(live.WaitUntilNone(MonotonicNow()));
}

TEST(LiveStreamsTest, AnAnswerThatIsNotReadIsDroppedInTime) {
  LiveStreams::Limits limits = Patient();
  limits.result_timeout = kSoon;
  LiveStreams live(limits);
  const auto unread = Add(live), running = Add(live);
  live.UploadDone(running.get());
  live.Ended(unread.get(), 10);
  EXPECT_TRUE(unread->Comes({"unread"}));
  EXPECT_EQ(running->words(), Words());
  EXPECT_FALSE(live.WaitUntilNone(MonotonicNow() + absl::Milliseconds(1)));
  live.Remove(unread.get());
  live.Remove(running.get());
  EXPECT_TRUE(live.WaitUntilNone(MonotonicNow()));
}

TEST(LiveStreamsTest, TheOldestAnswersMakeRoomForTheNewest) {
  LiveStreams::Limits limits = Patient();
  limits.unread_bytes = 100;
  LiveStreams live(limits);
  const auto first = Add(live), refused = Add(live), second = Add(live), third = Add(live);
  live.Ended(first.get(), 60);
  live.Ended(refused.get(), 0);  // holds nothing, so there is nothing to win
  live.Ended(second.get(), 40);
  EXPECT_EQ(first->words(), Words());
  live.Ended(third.get(), 1);
  EXPECT_TRUE(first->Comes({"unread"}));
  EXPECT_EQ(second->words(), Words());
  const auto huge = Add(live);
  live.Ended(huge.get(), 1000);  // alone above the bound: it is the newest, and stays
  EXPECT_TRUE(second->Comes({"unread"}));
  EXPECT_TRUE(third->Comes({"unread"}));
  EXPECT_EQ(huge->words(), Words());
  EXPECT_EQ(refused->words(), Words());
  live.Remove(huge.get());
  const auto next = Add(live), after = Add(live);  // its bytes have gone with it
  live.Ended(next.get(), 50);
  live.Ended(after.get(), 50);
  EXPECT_EQ(next->words(), Words());
  const auto last = Add(live);  // and no more than its bytes
  live.Ended(last.get(), 1);
  EXPECT_TRUE(next->Comes({"unread"}));
  for (const auto& stream : {first, refused, second, third, next, after, last}) live.Remove(stream.get());
}

TEST(LiveStreamsTest, AnAnswerThatIsGoneTakesNoRoom) {
  LiveStreams::Limits limits = Patient();
  limits.upload_timeout = absl::ZeroDuration();
  limits.unread_bytes = 100;
  LiveStreams live(limits);
  const auto read = Add(live), oldest = Add(live), newest = Add(live);
  for (const auto& stream : {read, oldest, newest}) EXPECT_TRUE(stream->Comes({"overdue"}));
  live.Ended(read.get(), 1);
  live.Remove(read.get());
  live.Ended(oldest.get(), 50);
  live.Ended(newest.get(), 50);
  WaitForWatcher(live);
  EXPECT_EQ(oldest->words(), Words{"overdue"});
  live.Remove(oldest.get());
  live.Remove(newest.get());
}

TEST(LiveStreamsTest, ADrainGivesAnswersLessTime) {
  LiveStreams::Limits limits = Patient();
  limits.drain_result_timeout = kSoon;
  LiveStreams live(limits);
  const auto before = Add(live), after = Add(live), running = Add(live);
  live.Ended(before.get(), 10);
  live.StartDrain();
  EXPECT_TRUE(before->Comes({"drain", "unread"}));
  live.Ended(after.get(), 10);
  EXPECT_TRUE(after->Comes({"drain", "unread"}));
  EXPECT_EQ(running->words(), Words{"drain"});
  for (const auto& stream : {before, after, running}) live.Remove(stream.get());
}

TEST(LiveStreamsTest, ADrainGivesNoAnswerMoreTime) {
  LiveStreams::Limits limits = Patient();
  limits.result_timeout = kSoon;
  limits.drain_result_timeout = absl::Hours(1);
  LiveStreams live(limits);
  const auto stream = Add(live);
  live.StartDrain();
  live.Ended(stream.get(), 10);
  EXPECT_TRUE(stream->Comes({"drain", "unread"}));
  live.Remove(stream.get());
}

TEST(LiveStreamsTest, AStopAndACancelReachThoseThatTheyAreFor) {
  LiveStreams live(Patient());
  const auto stream = Add(live);
  const std::string mine = "t", other = "u";
  EXPECT_TRUE(absl::IsNotFound(live.CancelRequest("other", nullptr)));
  EXPECT_TRUE(absl::IsNotFound(live.CancelRequest("mine", &other)));
  EXPECT_TRUE(live.CancelRequest("mine", &mine).ok());
  EXPECT_TRUE(live.CancelRequest("mine", nullptr).ok());
  live.StopUploads();
  EXPECT_EQ(stream->words(), (Words{"cancelled", "cancelled", "stopped"}));
  live.Remove(stream.get());
  live.Remove(stream.get());  // gone: nothing happens
  live.Ended(stream.get(), 5);
  live.OnMessage(stream.get(), 5);
  live.UploadDone(stream.get());
  EXPECT_TRUE(absl::IsNotFound(live.CancelRequest("mine", nullptr)));
}

TEST(LiveStreamsTest, ACancelThatNamesNoTenantEndsNoneOfSeveral) {
  LiveStreams live(Patient());
  const auto one = Add(live);
  const auto other = std::make_shared<Heard>("u");
  live.Add(other);
  const absl::Status several = live.CancelRequest("mine", nullptr);
  EXPECT_TRUE(absl::IsInvalidArgument(several)) << several;
  EXPECT_NE(several.message().find("meshfill-tenant"), absl::string_view::npos) << several;
  const std::string u = "u";
  EXPECT_TRUE(live.CancelRequest("mine", &u).ok());
  EXPECT_EQ(one->words(), Words{});
  EXPECT_EQ(other->words(), Words{"cancelled"});
  for (const auto& stream : {one, other}) live.Remove(stream.get());
}

}  // namespace
}  // namespace meshfill
