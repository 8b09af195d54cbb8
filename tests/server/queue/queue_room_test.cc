#include "server/queue/queue_room.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/config/priority_class.h"
#include "server/queue/refusal.h"
#include "server/queue/run_order.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

using State = RunOrder::State;
using testing::HasSubstr;
using Ticket = QueueRoom::Ticket;
using LostPlace = QueueRoom::LostPlace;

constexpr int64_t kFree = QueueRoom::kFreeTokens;
const char* const kTenants[] = {"a", "b", "others"};

// A room, the order that predicts for it, and what the test knows of each request.
class QueueRoomTest : public testing::Test {
 protected:
  struct Known {
    RunOrder::Job job;
    int64_t tokens = 0;
    absl::Time entered_at;
    State state = State::kUploading;
    int64_t uploaded_tokens = 0;
    absl::Time complete_at;
  };
  struct Sum {
    int64_t requests = 0;
    int64_t tokens = 0;
  };

  void MakeRoom(const QueueRoom::Limits& limits) {
    limits_ = limits;
    room_ = std::make_unique<QueueRoom>(limits, [this] { return now_; });
  }

  // Small bounds of the queue and of two tenants, and weights.
  QueueRoom::Limits DrawLimits() {
    v1::Config config;
    config.mutable_tenant_limits()->set_max_requests(Draw(random_, 2, 12));
    (*config.mutable_tenants())["a"].set_max_tokens(Draw(random_, 1 * kFree, 20 * kFree));
    (*config.mutable_tenants())["b"].set_max_requests(Draw(random_, 1, 6));
    for (const char* tenant : {"a", "b"}) {
      (*config.mutable_tenants())[tenant].set_weight(Draw(random_, 1, 20) / 10.0);
    }
    return {.max_requests = Draw<int64_t>(random_, 1, 12),
            .max_tokens = Draw(random_, 2 * kFree, 30 * kFree),
            .tenants = Tenants(config)};
  }

  const TenantLimits& Share(const std::string& tenant) const { return limits_.tenants.LimitsOf(tenant); }

  Ticket Enter(const RunOrder::Job& job, int64_t tokens) {
    const Ticket ticket = ++last_ticket_;
    room_->Enter(ticket, job, tokens);
    order_.Announce(ticket, job, now_);
    known_[ticket] = {.job = job, .tokens = tokens, .entered_at = now_};
    return ticket;
  }
  void Complete(Ticket ticket) {
    room_->Complete(ticket);
    order_.Complete(ticket, now_);
    known_.at(ticket).state = State::kWaiting;
    known_.at(ticket).complete_at = now_;
  }
  void Remove(Ticket ticket) {
    room_->Remove(ticket);
    order_.Remove(ticket, now_);
    known_.erase(ticket);
  }
  // Those whose turn it is begin.
  void Choose() {
    order_.Choose(now_);
    for (auto& [ticket, known] : known_) {
      if (order_.state(ticket) != State::kLive || known.state == State::kLive) continue;
      room_->Begin(ticket);
      known.state = State::kLive;
    }
  }

  static int64_t Claim(const Known& known) {
    if (known.state == State::kLive) return 0;
    if (known.state == State::kWaiting) return known.tokens;
    return std::clamp(2 * known.uploaded_tokens, std::min(kFree, known.tokens), known.tokens);
  }
  // The claims of all but some, of one tenant where it is given.
  Sum Claims(const std::string& tenant = "", const std::vector<Ticket>& without = {}) const {
    Sum sum;
    for (const auto& [ticket, known] : known_) {
      if (known.state == State::kLive || (!tenant.empty() && known.job.tenant != tenant)) continue;
      if (std::count(without.begin(), without.end(), ticket) > 0) continue;
      ++sum.requests;
      sum.tokens += Claim(known);
    }
    return sum;
  }
  bool QueueHasRoom(int64_t tokens, const std::vector<Ticket>& without = {}) const {
    const Sum all = Claims("", without);
    return all.requests < limits_.max_requests && all.tokens + tokens <= limits_.max_tokens;
  }
  bool HasRoom(const std::string& tenant, int64_t tokens, const std::vector<Ticket>& without = {}) const {
    const Sum own = Claims(tenant, without);
    return QueueHasRoom(tokens, without) && own.requests < Share(tenant).max_requests &&
           own.tokens + tokens <= Share(tenant).max_tokens;
  }
  absl::Duration Late(const Known& known) const {
    return now_ - known.entered_at - QueueRoom::kUploadGrace -
           absl::Seconds(static_cast<double>(known.uploaded_tokens) / QueueRoom::kPlaceTokensPerSecond);
  }
  // The furthest behind first.
  std::vector<Ticket> LateUploads() const {
    std::vector<std::pair<absl::Duration, Ticket>> late;
    for (const auto& [ticket, known] : known_) {
      if (known.state == State::kUploading && Late(known) > absl::ZeroDuration())
        late.emplace_back(Late(known), ticket);
    }
    std::sort(late.rbegin(), late.rend());
    std::vector<Ticket> tickets;
    for (const auto& [behind, ticket] : late) tickets.push_back(ticket);
    return tickets;
  }
  static bool Before(Ticket one, Ticket other, const std::vector<Ticket>& all) {
    return std::find(all.begin(), all.end(), one) < std::find(all.begin(), all.end(), other);
  }
  // What a tenant would have with `more`, by the share that it had when `asks` asked: above 1 it is beyond.
  // Of places where these are full, else of tokens. A tenant's only prompt is within its share.
  double OfShare(const std::string& tenant, const std::string& asks, bool places, const Sum& more,
                 const std::vector<Ticket>& gone) const {
    double weights = 0;
    for (const char* each : kTenants) {
      if (each == asks || Claims(each).requests > 0) weights += Share(each).weight;
    }
    const Sum has = Claims(tenant, gone);
    const double part = places ? static_cast<double>(has.requests + more.requests) / limits_.max_requests
                               : static_cast<double>(has.tokens + more.tokens) / limits_.max_tokens;
    return has.requests + more.requests <= 1 ? 0 : part * weights / Share(tenant).weight;
  }

  std::vector<Ticket> In(State state) const {
    std::vector<Ticket> tickets;
    for (const auto& [ticket, known] : known_) {
      if (known.state == state) tickets.push_back(ticket);
    }
    return tickets;
  }

  // ---- What holds after each step, and of each newcomer.
  void ExpectClaimsAddUp() const {
    const QueueLoad load = room_->load();
    int64_t running_tokens = 0;
    absl::Time oldest = absl::InfiniteFuture();
    std::array<int64_t, 5> by_class{};
    for (const auto& [ticket, known] : known_) {
      EXPECT_EQ(room_->ClaimOf(ticket), Claim(known));
      if (known.state == State::kLive) running_tokens += known.tokens;
      if (known.state != State::kLive) ++by_class[known.job.priority + kTopPriority];
      if (known.state == State::kWaiting) oldest = std::min(oldest, known.complete_at);
    }
    EXPECT_EQ(load.requests, Claims().requests);
    EXPECT_EQ(load.tokens, Claims().tokens);
    EXPECT_EQ(load.running_tokens, running_tokens);
    EXPECT_EQ(load.requests_by_class, by_class);
    EXPECT_EQ(load.oldest, oldest);
  }

  void ExpectBeyondShare(Ticket lost, const std::string& asks, const Sum& more,
                         const std::vector<Ticket>& gone) const {
    constexpr double kRounding = 1e-9;
    const bool places = more.requests > 0 && Claims("", gone).requests >= limits_.max_requests;
    const std::string& loser = known_.at(lost).job.tenant;
    EXPECT_LE(OfShare(asks, asks, places, more, gone), 1 + kRounding) << "it has used its share";
    EXPECT_GT(OfShare(loser, asks, places, {}, gone), 1 - kRounding) << "it was within its share";
    for (const char* other : kTenants) {
      EXPECT_LE(OfShare(other, asks, places, {}, gone), OfShare(loser, asks, places, {}, gone) + kRounding);
    }
    EXPECT_NE(known_.at(lost).state, State::kLive) << "it has begun";
    for (const auto& [ticket, known] : known_) {
      if (known.job.tenant != loser || known.state == State::kLive) continue;
      if (std::count(gone.begin(), gone.end(), ticket) > 0 || ticket == lost) continue;
      EXPECT_TRUE(known.job.priority > known_.at(lost).job.priority ||
                  (known.job.priority == known_.at(lost).job.priority && ticket < lost))
          << "a newer one, or one of a lower class, kept its place";
    }
  }

  void ExpectPlacesAreTakenForRoomAlone(const std::string& tenant, int64_t tokens,
                                        const std::vector<LostPlace>& taken) const {
    const std::vector<Ticket> late = LateUploads();
    if (taken.empty()) {
      EXPECT_TRUE(HasRoom(tenant, tokens) || !HasRoom(tenant, tokens, late)) << "they would have made room";
      return;
    }
    std::vector<Ticket> slow_ones, beyond_shares;
    for (const auto& [ticket, slow] : taken) (slow ? slow_ones : beyond_shares).push_back(ticket);
    if (!beyond_shares.empty()) {
      std::vector<Ticket> gone = late;
      for (const Ticket ticket : beyond_shares) {
        EXPECT_FALSE(QueueHasRoom(tokens, gone)) << "one place less would do";
        ExpectBeyondShare(ticket, tenant, {1, tokens}, gone);
        gone.push_back(ticket);
      }
    }
    // Each slow one was needed, though all that are further behind had lost theirs.
    std::vector<Ticket> others = late;
    for (auto ticket = late.rbegin(); ticket != late.rend(); ++ticket) {
      others.pop_back();
      const bool is_lost = std::count(slow_ones.begin(), slow_ones.end(), *ticket) > 0;
      if (is_lost && (beyond_shares.empty() || known_.at(*ticket).job.tenant != tenant)) {
        std::vector<Ticket> without = others;
        without.insert(without.end(), beyond_shares.begin(), beyond_shares.end());
        for (const Ticket lost : slow_ones) {
          if (Before(*ticket, lost, late)) without.push_back(lost);
        }
        EXPECT_FALSE(HasRoom(tenant, tokens, without)) << "it need not have lost its place";
      }
    }
    std::vector<Ticket> gone = beyond_shares;
    for (const Ticket ticket : slow_ones) {
      EXPECT_EQ(std::count(late.begin(), late.end(), ticket), 1) << "it was not late";
      gone.push_back(ticket);
    }
    EXPECT_TRUE(HasRoom(tenant, tokens, gone)) << "places were taken for nothing";
  }

  void ExpectRefusedByTheFirstLimit(const absl::Status& refused, const std::string& tenant, int64_t tokens) {
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
    const bool never = tokens > limits_.max_tokens || tokens > Share(tenant).max_tokens;
    const Refusal first = tokens > limits_.max_tokens                     ? Refusal::kQueueTokens
                          : never                                         ? Refusal::kTenantShare
                          : Claims().requests >= limits_.max_requests     ? Refusal::kQueueRequests
                          : Claims().tokens + tokens > limits_.max_tokens ? Refusal::kQueueTokens
                                                                          : Refusal::kTenantShare;
    EXPECT_EQ(RefusalOf(refused), first) << refused;
    EXPECT_EQ(RetryAfter(refused).has_value(), !never) << refused;
    EXPECT_GE(RetryAfter(refused).value_or(absl::InfiniteDuration()), QueueRoom::kLeastRetry);
  }

  // A request comes: whether it has entered.
  bool Come(const RunOrder::Job& job, int64_t tokens) {
    const std::vector<LostPlace> taken = room_->PlacesToTakeFor(job, tokens, order_);
    ExpectPlacesAreTakenForRoomAlone(job.tenant, tokens, taken);
    for (const auto& [ticket, slow] : taken) {
      ++(slow ? slow_ : beyond_share_);
      Remove(ticket);
    }
    const absl::Status may_enter = room_->MayEnter(job, tokens, order_);
    EXPECT_EQ(may_enter.ok(), HasRoom(job.tenant, tokens)) << may_enter;
    if (!may_enter.ok()) {
      ExpectRefusedByTheFirstLimit(may_enter, job.tenant, tokens);
      return false;
    }
    Enter(job, tokens);
    return true;
  }

  // A part of an upload comes: whether it may go on.
  bool Pay(Ticket ticket, int64_t tokens_so_far) {
    Known& known = known_.at(ticket);
    const int64_t before = Claim(known);
    const std::vector<LostPlace> taken = room_->PlacesToTakeToPay(ticket, tokens_so_far);
    std::vector<Ticket> gone;
    for (const auto& [lost, slow] : taken) {
      EXPECT_FALSE(slow);
      const int64_t more = QueueRoom::UploadClaim(known.tokens, tokens_so_far) - before;
      EXPECT_GT(Claims("", gone).tokens + more, limits_.max_tokens) << "one place less would do";
      ExpectBeyondShare(lost, known.job.tenant, {0, more}, gone);
      gone.push_back(lost);
    }
    for (const Ticket lost : gone) Remove(lost);
    known.uploaded_tokens = tokens_so_far;
    const absl::Status paid = room_->Pay(ticket, tokens_so_far, order_);
    const bool of_share = Claims(known.job.tenant).tokens <= Share(known.job.tenant).max_tokens;
    EXPECT_EQ(paid.ok(), Claim(known) == before || (of_share && Claims().tokens <= limits_.max_tokens));
    if (paid.ok()) {
      paid_by_others_ += static_cast<int>(gone.size());
      return true;
    }
    EXPECT_TRUE(gone.empty()) << "places were taken for nothing";
    EXPECT_EQ(RefusalOf(paid), of_share ? Refusal::kQueueTokens : Refusal::kTenantShare) << paid;
    EXPECT_GE(RetryAfter(paid).value_or(absl::ZeroDuration()), QueueRoom::kLeastRetry) << paid;
    return false;
  }

  RunOrder::Job DrawJob() {
    return {.tenant = kTenants[Draw(random_, 0, 2)],
            .priority = Draw(random_, -kTopPriority, kTopPriority),
            .work_seconds = 0.1 * Draw(random_, 1, 200)};
  }

  std::mt19937_64 random_{TestSeed()};
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
  QueueRoom::Limits limits_;
  std::unique_ptr<QueueRoom> room_;
  RunOrder order_{{.most_live = 2}};
  std::map<Ticket, Known> known_;
  Ticket last_ticket_ = 0;
  int slow_ = 0, beyond_share_ = 0, paid_by_others_ = 0;  // places that were lost
};

TEST_F(QueueRoomTest, AnUploadClaimsBetweenTheFreeTokensAndWhatItAnnounced) {
  for (int i = 0; i < 1000; ++i) {
    const int64_t announced = Draw<int64_t>(random_, 1, 10 * kFree);
    const int64_t uploaded = Draw<int64_t>(random_, 0, announced);
    const int64_t claim = QueueRoom::UploadClaim(announced, uploaded);
    EXPECT_LE(claim, announced);
    EXPECT_GE(claim, std::min(announced, kFree));
    EXPECT_GE(claim, uploaded);
    EXPECT_EQ(claim == announced, 2 * uploaded >= announced || announced <= kFree);
    EXPECT_LE(claim, QueueRoom::UploadClaim(announced, uploaded + 1)) << "it never shrinks";
  }
}

TEST_F(QueueRoomTest, AFullQueueNamesItsLimitOfRequests) {
  MakeRoom({.max_requests = 1});
  Enter({.tenant = "a"}, 1);
  const absl::Status full = room_->MayEnter({.tenant = "a"}, 1, order_);
  EXPECT_NE(full.message().find("1 requests (queue.max_requests is 1)"), absl::string_view::npos) << full;
}

// It would be refused all the same.
TEST_F(QueueRoomTest, NobodyLosesAPlaceToOneThatWouldBeTooLate) {
  MakeRoom({.max_requests = 1});
  const Ticket silent = Enter({.tenant = "a"}, 2 * kFree);
  now_ += absl::Seconds(10);
  RunOrder::Job job = {.tenant = "b", .work_seconds = 2};
  const std::vector<LostPlace> its_place = {{silent, /*slow=*/true}};
  EXPECT_EQ(room_->PlacesToTakeFor(job, 1, order_), its_place);
  job.deadline = now_ + absl::Seconds(1);
  EXPECT_EQ(room_->PlacesToTakeFor(job, 1, order_), std::vector<LostPlace>{});
  EXPECT_EQ(RefusalOf(room_->MayEnter(job, 1, order_)), Refusal::kQueueRequests);
  job.deadline = now_ + absl::Seconds(3);
  EXPECT_EQ(room_->PlacesToTakeFor(job, 1, order_), its_place);
}

// How much is cached is known when the prompt is complete.
TEST_F(QueueRoomTest, ADeadlineCountsWithAllThatMayBeCached) {
  MakeRoom({});
  RunOrder::Job job = {.tenant = "a", .work_seconds = 10, .may_save_seconds = 6};
  job.deadline = now_ + absl::Seconds(5);
  EXPECT_TRUE(room_->MayEnter(job, 1, order_).ok());
  RunOrder::Job cold = job;
  cold.may_save_seconds = 0;
  EXPECT_EQ(RefusalOf(room_->CheckWait(cold, order_)), Refusal::kDeadline);
  EXPECT_EQ(RefusalOf(room_->CheckDeadline(cold, 0)), Refusal::kDeadline);
  job.deadline = now_ + absl::Seconds(3.5);
  const absl::Status refused = room_->MayEnter(job, 1, order_);
  EXPECT_EQ(RefusalOf(refused), Refusal::kDeadline) << refused;
  EXPECT_EQ(RetryAfter(refused), std::nullopt) << refused;
  Complete(Enter({.tenant = "a", .work_seconds = 2}, 1));
  job.deadline = now_ + absl::Seconds(5);
  EXPECT_TRUE(RetryAfter(room_->MayEnter(job, 1, order_)).has_value()) << "2 s of waiting, 4 s of prefill";
  job.deadline = now_ + absl::Seconds(6);
  EXPECT_TRUE(room_->MayEnter(job, 1, order_).ok());
  job.deadline = now_ + absl::Seconds(10);
  cold.deadline = job.deadline;
  EXPECT_TRUE(room_->CheckDeadline(cold, 0).ok());
  EXPECT_TRUE(RetryAfter(room_->CheckDeadline(cold, 1)).has_value()) << "waiting is what is too long";
}

// What a flood of them costs is bounded: each hears what the first one's look at all that wait has found.
TEST_F(QueueRoomTest, RefusalsByDeadlineShareALook) {
  int looks = 0;  // at the clock; it goes on by a second at each, so that a look at the order takes one
  room_ = std::make_unique<QueueRoom>(QueueRoom::Limits{}, [&] {
    ++looks;
    return now_ += absl::Seconds(1);
  });
  for (int i = 0; i < 20; ++i) {
    const Ticket ticket = ++last_ticket_;
    order_.Announce(ticket, {.tenant = "a", .work_seconds = 100}, now_);
    order_.Complete(ticket, now_);
  }
  RunOrder::Job job = {
      .tenant = "a", .priority = -1, .work_seconds = 500, .deadline = now_ + absl::Minutes(20)};
  const auto refused = [&] {
    looks = 0;
    const absl::Status status = room_->MayEnter(job, 1, order_);
    EXPECT_EQ(RefusalOf(status), Refusal::kDeadline) << status;
    return absl::ToDoubleSeconds(RetryAfter(status).value_or(absl::ZeroDuration()));
  };
  EXPECT_NEAR(refused(), 2000, 1e-6);
  const int first = looks;
  for (int i = 1; i < 5; ++i) {
    job.work_seconds += 10;
    job.deadline += absl::Seconds(10);
    EXPECT_NEAR(refused(), 2000, 1e-6);
    EXPECT_EQ(looks, first - 1) << "the order was not asked";
  }
  RunOrder::Job higher = job, patient = job;
  higher.priority = 1;
  EXPECT_TRUE(room_->MayEnter(higher, 1, order_).ok());
  patient.deadline = now_ + absl::Hours(1);
  EXPECT_TRUE(room_->MayEnter(patient, 1, order_).ok());
  for (Ticket ticket = 1; ticket <= 5; ++ticket) order_.Remove(ticket, now_);
  now_ += absl::Seconds(21);
  EXPECT_NEAR(refused(), 1500, 1e-6) << "after a while it looks again";
  looks = 0;
  job.deadline = now_ + absl::Seconds(100);
  EXPECT_EQ(RetryAfter(room_->MayEnter(job, 1, order_)), std::nullopt) << "without any waiting, too";
  EXPECT_EQ(looks, 3) << "the order was not asked";
}

// Neither does it wait for those whose places it takes.
TEST_F(QueueRoomTest, WhoLosesItsPlaceHasNoTurnEither) {
  MakeRoom({.max_requests = 1, .max_wait = absl::Seconds(5)});
  const Ticket stalled = Enter({.tenant = "a", .work_seconds = 10}, 2 * kFree);
  ASSERT_TRUE(room_->Pay(stalled, 3 * kFree / 2, order_).ok());
  order_.Pay(stalled);
  now_ += absl::Minutes(10);
  const RunOrder::Job job = {.tenant = "a", .work_seconds = 20};
  EXPECT_GT(order_.WaitSeconds(job, now_), 9);
  EXPECT_EQ(room_->PlacesToTakeFor(job, 1, order_), (std::vector<LostPlace>{{stalled, /*slow=*/true}}));
}

// By its weight among those that have places or ask.
TEST_F(QueueRoomTest, ATenantWithinItsShareOfThePlacesAlwaysGetsIn) {
  for (int sequence = 0; sequence < 200 && !HasFailure(); ++sequence) {
    while (!known_.empty()) Remove(known_.begin()->first);
    v1::Config config;
    for (const char* tenant : kTenants) {
      (*config.mutable_tenants())[tenant].set_weight(Draw(random_, 1, 4) / 10.0);
    }
    // Nobody's share is less than a place.
    MakeRoom({.max_requests = Draw<int64_t>(random_, 9, 30), .tenants = Tenants(config)});
    const std::string greedy = kTenants[Draw(random_, 0, 2)];
    for (int64_t i = 0; i < limits_.max_requests; ++i) Complete(Enter({.tenant = greedy}, kFree));
    for (int step = 0; step < 60 && !HasFailure(); ++step) {
      const RunOrder::Job job = DrawJob();
      const bool within = OfShare(job.tenant, job.tenant, /*places=*/true, {1, kFree}, {}) <= 1 + 1e-9;
      EXPECT_EQ(Come(job, kFree), within);
      EXPECT_EQ(Claims().requests, limits_.max_requests);
      for (const Ticket upload : In(State::kUploading)) Complete(upload);
    }
  }
  EXPECT_GT(beyond_share_, 100);
  EXPECT_EQ(slow_, 0);
}

// One that has entered is not kept from its tokens by who comes first.
TEST_F(QueueRoomTest, AnUploadWithinItsShareHasRoomForTheRest) {
  MakeRoom({.max_tokens = 16 * kFree});
  const Ticket uploads = Enter({.tenant = "a"}, 8 * kFree);
  std::vector<Ticket> others;
  for (int i = 0; i < 15; ++i) Complete(others.emplace_back(Enter({.tenant = "b"}, kFree)));
  EXPECT_EQ(Claims().tokens, limits_.max_tokens);
  EXPECT_EQ(room_->PlacesToTakeToPay(uploads, kFree / 2), std::vector<LostPlace>{}) << "it claims that";
  EXPECT_TRUE(Pay(uploads, 4 * kFree));
  EXPECT_EQ(paid_by_others_, 7);
  EXPECT_TRUE(known_.contains(others[7]));
  EXPECT_FALSE(known_.contains(others[8])) << "the newest go";
  // The others have their share, too.
  const Ticket second = Enter({.tenant = "a"}, kFree);
  EXPECT_EQ(room_->PlacesToTakeToPay(second, kFree), std::vector<LostPlace>{});
}

// Its share is a third of the queue, and it is half of it.
TEST_F(QueueRoomTest, ALoneUploadBeyondItsShareHasRoomForTheRest) {
  MakeRoom({.max_tokens = 16 * kFree});
  const Ticket uploads = Enter({.tenant = "a"}, 8 * kFree);
  Complete(Enter({.tenant = "c"}, kFree));
  for (int i = 0; i < 14; ++i) Complete(Enter({.tenant = "b"}, kFree));
  EXPECT_EQ(Claims().tokens, limits_.max_tokens);
  EXPECT_TRUE(Pay(uploads, 4 * kFree));
  EXPECT_EQ(paid_by_others_, 7);
}

TEST_F(QueueRoomTest, NobodyLosesAPlaceToAnUploadThatIsRefused) {
  v1::Config config;
  (*config.mutable_tenants())["a"].set_max_tokens(6 * kFree);
  MakeRoom({.max_tokens = 16 * kFree, .tenants = Tenants(config)});
  const Ticket first = Enter({.tenant = "a"}, 4 * kFree), second = Enter({.tenant = "a"}, 4 * kFree);
  EXPECT_TRUE(Pay(first, 4 * kFree));
  for (int i = 0; i < 11; ++i) Complete(Enter({.tenant = "b"}, kFree));
  EXPECT_EQ(room_->PlacesToTakeToPay(second, 4 * kFree), std::vector<LostPlace>{}) << "beyond a's max_tokens";
  EXPECT_EQ(room_->PlacesToTakeToPay(second, kFree).size(), 1u);
}

// In binary 3 places are a little more than 4 * 0.3 / (0.3 + 0.1).
TEST_F(QueueRoomTest, AShareIsWholeWhateverTheWeights) {
  v1::Config config;
  (*config.mutable_tenants())["a"].set_weight(0.3);
  (*config.mutable_tenants())["b"].set_weight(0.1);
  MakeRoom({.max_requests = 4, .tenants = Tenants(config)});
  for (const char* tenant : {"a", "a", "b", "b"}) Complete(Enter({.tenant = tenant}, 1));
  EXPECT_TRUE(Come({.tenant = "a"}, 1));
  EXPECT_FALSE(Come({.tenant = "a"}, 1));
  EXPECT_FALSE(Come({.tenant = "b"}, 1));
}

TEST_F(QueueRoomTest, ASlowUploadKeepsItsPlaceWhereItWouldNotDo) {
  MakeRoom({.max_tokens = 16 * kFree});
  Enter({.tenant = "c"}, kFree);
  for (int i = 0; i < 3; ++i) Complete(Enter({.tenant = "a"}, 5 * kFree));
  now_ += absl::Seconds(10);
  EXPECT_EQ(room_->PlacesToTakeFor({.tenant = "b"}, 5 * kFree, order_),
            (std::vector<LostPlace>{{last_ticket_, /*slow=*/false}}));
  // Where both are needed both go.
  EXPECT_EQ(room_->PlacesToTakeFor({.tenant = "b"}, 6 * kFree, order_).size(), 2u);
}

TEST_F(QueueRoomTest, AShareIsNotExceededBySlowUploads) {
  MakeRoom({.max_tokens = 16 * kFree});
  const Ticket slow = Enter({.tenant = "b"}, kFree);
  Complete(Enter({.tenant = "b"}, 3 * kFree));
  Complete(Enter({.tenant = "a"}, 5 * kFree));
  const Ticket newest = Enter({.tenant = "a"}, 5 * kFree);
  Complete(newest);
  now_ += absl::Seconds(10);
  EXPECT_EQ(room_->PlacesToTakeFor({.tenant = "b"}, 5 * kFree, order_),
            (std::vector<LostPlace>{{slow, /*slow=*/true}, {newest, /*slow=*/false}}));
}

// The newest of the other tenant, from its last on.
TEST_F(QueueRoomTest, OneRequestTakesThousandsOfPlaces) {
  constexpr int kPrompts = 8000;
  MakeRoom({.max_requests = 2 * kPrompts, .max_tokens = kPrompts * 1000});
  for (int i = 0; i < kPrompts; ++i) {
    room_->Enter(i + 1, {.tenant = "a"}, 1000);
    room_->Complete(i + 1);
  }
  std::vector<LostPlace> newest;
  for (int i = 0; i < kPrompts / 2; ++i) newest.push_back({static_cast<Ticket>(kPrompts - i)});
  EXPECT_EQ(room_->PlacesToTakeFor({.tenant = "b"}, kPrompts / 2 * 1000, order_), newest);
}

TEST_F(QueueRoomTest, WhoLosesItsPlaceToAnotherTenantHearsWhenToCome) {
  MakeRoom({.max_requests = 2});
  Complete(Enter({.tenant = "a", .work_seconds = 50}, 1));
  Choose();
  Complete(Enter({.tenant = "a", .work_seconds = 100}, 1));
  const RunOrder::Job job = {.tenant = "a", .work_seconds = 100};
  const Ticket newest = Enter(job, 1);
  Complete(newest);
  const std::vector<LostPlace> lost = room_->PlacesToTakeFor({.tenant = "b", .work_seconds = 1}, 1, order_);
  ASSERT_EQ(lost, (std::vector<LostPlace>{{newest, /*slow=*/false}}));
  Remove(newest);
  Complete(Enter({.tenant = "b", .work_seconds = 200}, 1));
  double next_begins = 0;
  for (const RunOrder::Turn& turn : order_.Turns(now_)) {
    if (known_.at(turn.ticket).state != State::kLive) {
      next_begins = turn.begins_seconds;
      break;
    }
  }
  ASSERT_GT(next_begins, 10);
  // Of two of a tenant the second comes after the first.
  const QueueRoom::Loser loser = {lost.front(), job, 1}, larger = {lost.front(), job, limits_.max_tokens};
  const std::vector<absl::Status> all_told =
      room_->PlacesLost(std::vector<QueueRoom::Loser>{loser, larger}, order_);
  ASSERT_EQ(all_told.size(), 2u);
  const absl::Status told = all_told.front();
  EXPECT_NEAR(absl::ToDoubleSeconds(RetryAfter(all_told.back()).value_or(absl::ZeroDuration())),
              next_begins + RetryLine::kPace * 100, 1e-6);
  EXPECT_EQ(told.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(RefusalOf(told), Refusal::kTenantShare);
  EXPECT_NEAR(absl::ToDoubleSeconds(RetryAfter(told).value_or(absl::ZeroDuration())), next_begins, 1e-6);
  // As one that is refused now, and the next one stands behind it.
  const absl::Status refused = room_->MayEnter(job, 1, order_);
  EXPECT_NEAR(absl::ToDoubleSeconds(RetryAfter(refused).value_or(absl::ZeroDuration())),
              next_begins + RetryLine::kPace * 200, 1e-6);
}

TEST_F(QueueRoomTest, AClassAboveTheTenantsIsRefused) {
  v1::Config config;
  config.mutable_tenant_limits()->set_max_priority(-1);
  (*config.mutable_tenants())["a"].set_max_priority(1);
  (*config.mutable_tenants())["b"].set_max_priority(2);
  MakeRoom({.tenants = Tenants(config)});
  const auto highest = [&](const std::string& tenant) {
    int most = -100;
    for (int priority = -100; priority <= 100; ++priority) {
      if (room_->CheckClass({.tenant = tenant, .priority = priority}).ok()) most = priority;
    }
    return most;
  };
  EXPECT_EQ(highest("a"), 1);
  EXPECT_EQ(highest("b"), 100) << "which counts as 2";
  EXPECT_EQ(highest("others"), -1);
  EXPECT_EQ(room_->CheckClass({.tenant = "a", .priority = 2}),
            absl::PermissionDeniedError("priority is 2; the tenant's requests may have 1 at most (its "
                                        "max_priority); send a lower one"));
}

TEST_F(QueueRoomTest, RulesHoldOverAnySequence) {
  int entered = 0, refused = 0, paid = 0, unpaid = 0;
  for (int sequence = 0; sequence < 60; ++sequence) {
    while (!known_.empty()) Remove(known_.begin()->first);
    MakeRoom(DrawLimits());
    for (int step = 0; step < 200 && !HasFailure(); ++step) {
      now_ += absl::Milliseconds(Draw(random_, 0, 2000));
      const std::vector<Ticket> uploads = In(State::kUploading), waiting = In(State::kWaiting),
                                live = In(State::kLive);
      const auto one_of = [&](const auto& all) { return all[Draw<size_t>(random_, 0, all.size() - 1)]; };
      const int action = Draw(random_, 0, 9);
      if (action < 4) {
        ++(Come(DrawJob(), Draw<int64_t>(random_, 1, 12 * kFree)) ? entered : refused);
      } else if (action < 6 && !uploads.empty()) {
        const Ticket ticket = one_of(uploads);
        const Known& known = known_.at(ticket);
        const bool goes_on = Pay(ticket, Draw(random_, known.uploaded_tokens, known.tokens));
        ++(goes_on ? paid : unpaid);
        if (!goes_on && Draw(random_, 0, 1) == 0) Remove(ticket);
      } else if (action == 6 && !uploads.empty()) {
        Complete(one_of(uploads));
      } else if (action == 7) {
        Choose();
      } else if (action == 8 && live.size() > 1) {
        const Ticket ticket = one_of(live);
        room_->PutBack(ticket);
        order_.PutBack(ticket, now_);
        known_.at(ticket).state = State::kWaiting;
      } else if (action == 9 && !known_.empty()) {
        Remove(one_of(std::vector<Ticket>{known_.begin()->first, known_.rbegin()->first}));
      }
      ExpectClaimsAddUp();
    }
  }
  // Each way of a rule was met.
  EXPECT_GT(entered, 100);
  EXPECT_GT(refused, 100);
  EXPECT_GT(paid, 100);
  EXPECT_GT(unpaid, 10);
  EXPECT_GT(slow_, 10);
  EXPECT_GT(beyond_share_, 10);
  EXPECT_GT(paid_by_others_, 0);
}

// Where clients upload what they announced, and leave when they are refused.
TEST_F(QueueRoomTest, NoLimitIsEverExceeded) {
  for (int sequence = 0; sequence < 30; ++sequence) {
    while (!known_.empty()) Remove(known_.begin()->first);
    MakeRoom(DrawLimits());
    for (int step = 0; step < 300 && !HasFailure(); ++step) {
      now_ += absl::Milliseconds(Draw(random_, 0, 500));
      Come(DrawJob(), Draw<int64_t>(random_, 1, 12 * kFree));
      for (const Ticket ticket : In(State::kUploading)) {
        if (!known_.contains(ticket)) continue;  // it has lost its place
        const Known& known = known_.at(ticket);
        const int64_t more = Draw<int64_t>(random_, 0, kFree);
        if (!Pay(ticket, std::min(known.tokens, known.uploaded_tokens + more))) {
          Remove(ticket);
        } else if (known.uploaded_tokens == known.tokens) {
          Complete(ticket);
        }
      }
      if (Draw(random_, 0, 3) == 0) Choose();
      const std::vector<Ticket> live = In(State::kLive);
      if (live.size() > 1) Remove(live.front());
      EXPECT_LE(room_->load().requests, limits_.max_requests);
      EXPECT_LE(room_->load().tokens, limits_.max_tokens);
      for (const char* tenant : kTenants) {
        EXPECT_LE(Claims(tenant).requests, Share(tenant).max_requests);
        EXPECT_LE(Claims(tenant).tokens, Share(tenant).max_tokens);
      }
    }
  }
}

// The room is there when enough of those that wait have begun, and not before.
TEST_F(QueueRoomTest, RetryIsWhenTheFirstTurnsHaveMadeRoom) {
  for (int sequence = 0; sequence < 50 && !HasFailure(); ++sequence) {
    while (!known_.empty()) Remove(known_.begin()->first);
    MakeRoom(DrawLimits());
    for (int i = 0; i < 12; ++i) {
      RunOrder::Job job = DrawJob();
      job.work_seconds += 1;
      const int64_t tokens = Draw<int64_t>(random_, 1, 6 * kFree);
      if (HasRoom(job.tenant, tokens)) Complete(Enter(job, tokens));
      Choose();
    }
    const int64_t tokens = Draw<int64_t>(random_, 1, kFree);
    for (const char* tenant : kTenants) {
      if (HasRoom(tenant, tokens)) continue;
      const absl::Status refused = room_->MayEnter({.tenant = tenant, .work_seconds = 1}, tokens, order_);
      const double told = absl::ToDoubleSeconds(RetryAfter(refused).value_or(absl::ZeroDuration()));
      std::vector<Ticket> begun;
      double until_room = 0;
      for (const RunOrder::Turn& turn : order_.Turns(now_)) {
        if (HasRoom(tenant, tokens, begun)) break;
        if (known_.at(turn.ticket).state == State::kLive) continue;
        begun.push_back(turn.ticket);
        until_room = turn.begins_seconds;
      }
      EXPECT_NEAR(told, std::max(until_room, absl::ToDoubleSeconds(QueueRoom::kLeastRetry)), 1e-6);
    }
  }
}

TEST_F(QueueRoomTest, OneMayEnterWhoseTurnComesSoonEnough) {
  int enough = 0, too_long = 0, too_late = 0;
  for (int sequence = 0; sequence < 1000 && !HasFailure(); ++sequence) {
    while (!known_.empty()) Remove(known_.begin()->first);
    // Waits and work are tenths of a second. The bounds are not, so that rounding decides nothing.
    MakeRoom({.max_wait = absl::Seconds(Draw(random_, 1, 60) + 0.03)});
    for (int i = Draw(random_, 0, 8); i > 0; --i) Complete(Enter(DrawJob(), kFree));
    Choose();
    RunOrder::Job job = DrawJob();
    job.deadline = now_ + absl::Seconds(Draw(random_, -1, 100) + 0.05);
    const double left = absl::ToDoubleSeconds(job.deadline - now_);
    const double wait = order_.WaitSeconds(job, now_);
    const double max_wait = absl::ToDoubleSeconds(limits_.max_wait);
    const absl::Status may_enter = room_->MayEnter(job, kFree, order_);
    EXPECT_EQ(may_enter.ok(), wait <= max_wait && wait + job.work_seconds <= left) << may_enter;
    if (may_enter.ok()) {
      ++enough;
      continue;
    }
    const bool hopeless = job.work_seconds > left;  // without any waiting, too
    const bool waits = wait > max_wait && !hopeless;
    ++(waits ? too_long : too_late);
    EXPECT_EQ(RefusalOf(may_enter), waits ? Refusal::kQueueWait : Refusal::kDeadline) << may_enter;
    // Until the wait is short enough, or until it is over; never where the work alone is too long.
    const double retry = hopeless ? 0 : waits ? wait - max_wait : wait;
    const absl::Duration least = retry > 0 ? QueueRoom::kLeastRetry : absl::ZeroDuration();
    EXPECT_NEAR(absl::ToDoubleSeconds(RetryAfter(may_enter).value_or(absl::ZeroDuration())),
                std::max(retry, absl::ToDoubleSeconds(least)), 1e-6);
  }
  EXPECT_GT(enough, 10);
  EXPECT_GT(too_long, 10);
  EXPECT_GT(too_late, 10);
}

// Turns that took 1 ms to find tell refusals for 20 ms more.
TEST_F(QueueRoomTest, RefusalsFindTurnsForATwentiethOfTheTime) {
  limits_ = {.max_requests = 1};
  room_ = std::make_unique<QueueRoom>(limits_, [this] { return now_ += absl::Milliseconds(1); });
  Complete(Enter({.work_seconds = 100}, 1));
  Choose();
  Complete(Enter({.work_seconds = 100}, 1));
  const auto told = [&](const std::string& tenant) {
    const absl::Status refused = room_->MayEnter({.tenant = tenant}, 1, order_);
    return absl::ToDoubleSeconds(RetryAfter(refused).value_or(absl::ZeroDuration()));
  };
  EXPECT_NEAR(told("a"), 100, 0.1);
  order_.SetDone(known_.begin()->first, 0.5, now_ += absl::Milliseconds(1));  // much faster than predicted
  EXPECT_NEAR(told("b"), 100, 0.1);
  now_ += absl::Milliseconds(21);
  EXPECT_LT(told("c"), 60);
}

}  // namespace
}  // namespace meshfill
