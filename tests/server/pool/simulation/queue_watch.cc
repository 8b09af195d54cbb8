#include "tests/server/pool/simulation/queue_watch.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/queue/refusal.h"
#include "tests/server/pool/simulation/pool_simulation.h"
#include "tests/server/pool/simulation/queue.h"

namespace meshfill {
namespace {

constexpr double kSlackOfWork = 0.25;                       // turn_rank.cc
constexpr absl::Duration kLooks = absl::Milliseconds(100);  // two
constexpr int kChecksOfPredictions = 16;                    // events, from one to the next

}  // namespace

void QueueWatch::Fail(const std::string& what) { queue_.story_.Fail(absl::StrCat("the queue: ", what)); }

absl::Time QueueWatch::now() const { return queue_.now(); }

// ---- Whose turn it is.

absl::Duration QueueWatch::Stood(const Job& job, absl::Time at) const {
  const absl::Duration since = queue_.Computes(job.ticket) ? at - last_ : absl::ZeroDuration();
  return at - job.complete_at - job.computed - since;
}

bool QueueWatch::IsAged(const Job& job, absl::Time at) const {
  return job.complete && Stood(job, at) > queue_.limits().max_age;
}

bool QueueWatch::IsOlder(const Job& one, const Job& other) const {
  return std::tie(one.complete_at, one.ticket) < std::tie(other.complete_at, other.ticket);
}

bool QueueWatch::GoesBefore(const Job& other, const Job& aged) const {
  return &other == &aged || IsOlder(other, aged) || IsAged(other, last_) || other.begun_at <= aged.aged_at;
}

void QueueWatch::Advance() {
  const absl::Duration passed = now() - last_;
  if (passed > absl::ZeroDuration() && !queue_.computing_.empty() && has_elder_) {
    for (auto& [ticket, job] : queue_.jobs_) {
      if (job.stopped || !IsAged(job, last_)) continue;
      if (job.aged_at == absl::InfiniteFuture()) {
        job.aged_at = last_;
        job.others_first = MostComputed(last_);
        ++queue_.story_.census_.aged;
      }
      double slack_seconds = 0;
      bool before = false;
      for (const auto& each : queue_.computing_) {
        const Job& other = queue_.jobs_.at(each);
        before = before || GoesBefore(other, job);
        slack_seconds = std::max(slack_seconds, kSlackOfWork * other.run.work_seconds);
      }
      (before ? job.others_first : job.after_others) += passed;
      if (!before && job.after_others > job.others_first + absl::Seconds(slack_seconds) + kLooks) {
        Fail(absl::StrCat("what came after an aged prompt has computed for ",
                          absl::FormatDuration(job.after_others), ", and what goes before it for ",
                          absl::FormatDuration(job.others_first)));
      }
    }
  }
  for (const RunOrder::Ticket ticket : queue_.computing_) queue_.jobs_.at(ticket).computed += passed;
  last_ = now();
}

absl::Duration QueueWatch::MostComputed(absl::Time at) const {
  double most_seconds = 0;
  for (const auto& [ticket, job] : queue_.jobs_) {
    if (job.begun && !job.stopped) {
      most_seconds = std::max(most_seconds, queue_.order_.ComputedSeconds(ticket, at));
    }
  }
  return absl::Seconds(most_seconds);
}

// The oldest aged one that may compute.
const QueueWatch::Job* QueueWatch::Elder() const {
  const Job *elder = nullptr, *put_back = nullptr;
  for (const auto& [ticket, job] : queue_.jobs_) {
    if (job.put_back && IsAged(job, now()) && (put_back == nullptr || IsOlder(job, *put_back)))
      put_back = &job;
  }
  const bool places = queue_.order_.live() + 1 < queue_.most_live_ || queue_.order_.live() == 0;
  for (const auto& [ticket, job] : queue_.jobs_) {
    if (job.stopped || job.put_back || !IsAged(job, now())) continue;
    if (!job.begun && !(places && (put_back == nullptr || IsOlder(job, *put_back)))) continue;
    if (elder == nullptr || IsOlder(job, *elder)) elder = &job;
  }
  return elder;
}

void QueueWatch::CheckTurns() {
  const RunOrder& order = queue_.order_;
  const std::vector<RunOrder::Ticket>& computing = queue_.computing_;
  bool may = false;
  for (const auto& [ticket, job] : queue_.jobs_) {
    const bool lives = job.begun && !job.stopped;
    const bool may_begin = job.complete && !job.begun && !job.put_back && order.live() == 0;
    may = may || lives || may_begin;
  }
  if (may && computing.empty()) Fail("nobody has the turn, and somebody may compute");
  if (computing.empty()) return;
  const int submeshes = order.submeshes(computing.front());
  std::set<uint64_t> groups;
  for (const RunOrder::Ticket ticket : computing) {
    if (order.submeshes(ticket) != submeshes) Fail("turns on sub-meshes of several sizes");
    if (queue_.jobs_.at(ticket).stopped) Fail("a prompt has the turn that nobody wants");
    groups.insert(queue_.jobs_.at(ticket).group);
  }
  if (submeshes == 1 && groups.size() > 1) Fail("two have all devices at once");
  if (static_cast<int>(computing.size()) > submeshes && submeshes > 1) Fail("more turns than sub-meshes");
  CheckSubmeshes();
  const Job* const elder = Elder();
  has_elder_ = elder != nullptr;
  const bool aged = std::any_of(queue_.jobs_.begin(), queue_.jobs_.end(), [&](const auto& each) {
    return !each.second.stopped && IsAged(each.second, now());
  });
  if (!aged || (has_elder_ && queue_.Computes(elder->ticket))) return;
  const Job& first = queue_.jobs_.at(computing.front());
  const bool begins = first.choice == queue_.choices_;
  const bool lived = std::any_of(queue_.jobs_.begin(), queue_.jobs_.end(), [&](const auto& each) {
    return each.second.begun && !each.second.stopped && each.second.choice != queue_.choices_;
  });
  if (!has_elder_ && !(begins && lived)) return;
  ++queue_.story_.census_.elders_gave_way;
  const double computed =
      has_elder_ ? order.ComputedSeconds(elder->ticket, now()) : absl::ToDoubleSeconds(MostComputed(now()));
  // Of a pass any of its prompts may have gone before the aged one.
  double least_beyond = std::numeric_limits<double>::infinity();
  for (const RunOrder::Ticket ticket : computing) {
    if (submeshes > 1 && ticket != first.ticket) continue;
    const double work = queue_.jobs_.at(ticket).run.work_seconds;
    const double rest = order.RestSeconds(ticket, now()) / std::max(1e-9, order.WholeSeconds(ticket)) * work;
    least_beyond = std::min(least_beyond, rest - computed - std::max(1e-6, kSlackOfWork * work));
  }
  if (least_beyond > 0) {
    Fail(absl::StrCat("an aged prompt that has computed for ", computed, " s gives way to one that takes ",
                      least_beyond, " s more"));
  }
}

// What began just now is placed later.
void QueueWatch::CheckSubmeshes() {
  const PoolSimulation& story = queue_.story_;
  std::set<std::map<int, int>> taken;
  for (const RunOrder::Ticket ticket : queue_.computing_) {
    const Job& job = queue_.jobs_.at(ticket);
    if (!job.prefill || queue_.order_.submeshes(ticket) == 1) continue;
    const auto run = story.runs_told_.find(story.leader_->run_of(job.at_leader));
    if (run != story.runs_told_.end() && !taken.insert(run->second.nodes).second) {
      Fail("two have the turn on one sub-mesh");
    }
  }
}

// ---- Who is there.

void QueueWatch::Check() {
  CheckStates();
  CheckLeader();
  if (++checks_ % kChecksOfPredictions == 0) CheckPredictions();
}

void QueueWatch::CheckStates() {
  const Load all = Claims(""), within = Claims("", /*within_bounds=*/true);
  int64_t running_tokens = 0;
  std::set<uint64_t> groups;
  std::set<std::string> tenants;
  for (const auto& [ticket, job] : queue_.jobs_) {
    const auto state = job.begun      ? RunOrder::State::kLive
                       : job.complete ? RunOrder::State::kWaiting
                                      : RunOrder::State::kUploading;
    if (queue_.order_.state(ticket) != state) Fail("a request is not in the state that the order has it in");
    const double unlike = absl::ToDoubleSeconds(job.computed) - queue_.order_.ComputedSeconds(ticket, now());
    if (std::abs(unlike) > 1e-6) Fail("the order has counted other turns of a request");
    if (queue_.room_.ClaimOf(ticket) != ClaimOf(job)) Fail("a request claims other tokens than it should");
    if (job.begun) {
      groups.insert(job.group);
      running_tokens += job.tokens;
    }
    tenants.insert(job.run.tenant);
  }
  if (queue_.order_.live() != std::ssize(groups)) Fail("the order lets others live than the queue has begun");
  if (std::ssize(groups) > queue_.most_live_) Fail("more live than may");
  const QueueLoad load = queue_.room_.load();
  if (load.requests != all.requests || load.tokens != all.tokens)
    Fail("claims that are not those of requests");
  if (load.running_tokens != running_tokens) Fail("tokens run that are not those of what lives");
  if (!HasRoom(within, {}, "")) Fail("more is claimed than the queue may hold");
  for (const std::string& tenant : tenants) {
    if (!HasRoom(Claims(tenant, /*within_bounds=*/true), {}, tenant)) {
      Fail("more is claimed than a tenant may have");
    }
  }
  if (queue_.computing_ != queue_.order_.computing()) {
    Fail("the order's turns are not those that the queue gave");
  }
}

// Whoever has begun there is the queue's, and stands still unless it is its turn.
void QueueWatch::CheckLeader() {
  const PoolSimulation& story = queue_.story_;
  size_t there = 0;
  for (const auto& [ticket, job] : queue_.jobs_) {
    const auto request = story.requests_.find(job.at_leader);
    if (job.at_leader == 0 || request == story.requests_.end()) {
      if (job.prefill && !job.answered.has_value()) Fail("what lives in the queue is gone from the pool");
      continue;
    }
    ++there;
    if (!job.begun) Fail("what waits in the queue is in the pool");
    if (job.prefill && !job.stopped && request->second.paused == queue_.Computes(ticket)) {
      Fail("a run stands still that has the turn, or goes on without it");
    }
  }
  if (there != story.requests_.size()) Fail("the pool has requests that the queue does not have");
}

// Run ahead, the order names each request once, and those whose turn it is first.
void QueueWatch::CheckPredictions() {
  const RunOrder& order = queue_.order_;
  std::set<RunOrder::Ticket> expected, seen;
  bool stops = false;
  for (const auto& [ticket, job] : queue_.jobs_) {
    stops = stops || job.stopped;
    if (!job.stopped) expected.insert(ticket);
  }
  double last = 0;
  for (const RunOrder::Turn& turn : order.Turns(now())) {
    if (!seen.insert(turn.ticket).second) Fail("a request has two turns ahead");
    if (turn.begins_seconds < last || turn.ends_seconds < turn.begins_seconds)
      Fail("turns that run backwards");
    last = turn.begins_seconds;
  }
  if (seen != expected) Fail("the order has other requests than the queue");
}

// ---- Who enters.

int64_t QueueWatch::ClaimOf(const Job& job) {
  if (job.begun) return 0;
  if (job.complete) return job.tokens;
  return std::min(job.tokens, std::max(QueueRoom::kFreeTokens, 2 * job.paid_tokens));
}

QueueWatch::Load QueueWatch::Claims(const std::string& tenant, bool within_bounds) const {
  Load claims;
  for (const auto& [ticket, job] : queue_.jobs_) {
    const bool counts = !job.begun && (tenant.empty() || job.run.tenant == tenant);
    if (!counts || (within_bounds && job.over_bounds)) continue;
    ++claims.requests;
    claims.tokens += ClaimOf(job);
  }
  return claims;
}

bool QueueWatch::HasRoom(const Load& claims, const Load& more, const std::string& tenant) const {
  const QueueRoom::Limits& limits = queue_.limits();
  const TenantLimits& own = limits.tenants.LimitsOf(tenant);
  const int64_t most_requests = tenant.empty() ? limits.max_requests : own.max_requests;
  const int64_t most_tokens = tenant.empty() ? limits.max_tokens : own.max_tokens;
  return claims.requests + more.requests <= most_requests && claims.tokens + more.tokens <= most_tokens;
}

void QueueWatch::CheckEntered(const RunOrder::Job& run, int64_t tokens) {
  const Load more = {.requests = 1, .tokens = tokens};
  if (!HasRoom(Claims(""), more, "")) Fail("a request enters, and the queue has no room");
  if (!HasRoom(Claims(run.tenant), more, run.tenant)) Fail("a request enters, and its tenant has no room");
  if (now() >= run.deadline) Fail("a request enters after its deadline");
  if (run.priority > queue_.limits().tenants.LimitsOf(run.tenant).max_priority) {
    Fail("a request of a class enters that its tenant may not send");
  }
}

void QueueWatch::CheckRefused(const RunOrder::Job& run, int64_t tokens, const absl::Status& refused) {
  const QueueRoom::Limits& limits = queue_.limits();
  const TenantLimits& tenant = limits.tenants.LimitsOf(run.tenant);
  const Load more = {.requests = 1, .tokens = tokens};
  if (absl::IsPermissionDenied(refused)) {
    if (run.priority <= tenant.max_priority) Fail("a class is refused that the tenant may send");
    return;
  }
  if (absl::IsDeadlineExceeded(refused)) {
    if (now() < run.deadline) Fail("a deadline has passed that has not");
    return;
  }
  if (!absl::IsResourceExhausted(refused))
    return Fail(absl::StrCat("a strange refusal: ", refused.ToString()));
  const double left_seconds = absl::ToDoubleSeconds(run.deadline - now());
  const bool for_good = tokens > limits.max_tokens || tokens > tenant.max_tokens ||
                        run.work_seconds - run.may_save_seconds > left_seconds;
  if (!for_good) CheckTold(refused);
  switch (RefusalOf(refused)) {
    case Refusal::kQueueRequests:
    case Refusal::kQueueTokens:
      if (HasRoom(Claims(""), more, "")) Fail("a request is refused, and the queue has room");
      break;
    case Refusal::kTenantShare:
      if (HasRoom(Claims(run.tenant), more, run.tenant))
        Fail("a request is refused, and its tenant has room");
      break;
    case Refusal::kQueueWait:
      if (queue_.jobs_.empty()) Fail("a request would wait for nobody");
      return;
    case Refusal::kDeadline:
      if (queue_.jobs_.empty() && !for_good) Fail("a deadline is lost by waiting for nobody");
      return;
    default:
      return Fail(absl::StrCat("a strange refusal: ", refused.ToString()));
  }
  const bool alike = limits.tenants.named().empty();
  const bool waits_for_all = limits.max_wait == absl::InfiniteDuration() && left_seconds > 1e9;
  if (!alike || !waits_for_all || for_good || Claims(run.tenant).requests > 0) return;
  for (const auto& [ticket, job] : queue_.jobs_) {
    const bool beyond = !job.begun && Claims(job.run.tenant).requests > 1;
    if (beyond && HasRoom(Claims(""), {.tokens = tokens}, "")) {
      Fail("a tenant is kept out by one that has several places");
    }
  }
}

// Nobody is told to come later than when all here have ended, and those that were told before.
void QueueWatch::CheckTold(const absl::Status& refused) {
  const std::optional<absl::Duration> retry = RetryAfter(refused);
  if (!retry.has_value()) return Fail(absl::StrCat("a refusal without RetryInfo: ", refused.ToString()));
  double most_seconds = 1;
  for (const auto& [ticket, job] : queue_.jobs_) {
    double most = std::max(job.run.work_seconds, queue_.order_.RestSeconds(ticket, now()));
    for (const SubmeshSeconds& on : job.run.submeshes) most = std::max(most, on.seconds);
    most_seconds += most;
  }
  if (*retry < QueueRoom::kLeastRetry || *retry > queue_.limits().max_age + absl::Seconds(2 * most_seconds)) {
    Fail(absl::StrCat("a request is told to come again after ", absl::FormatDuration(*retry)));
  }
}

// Whether an upload is behind the pace that keeps it its place.
bool QueueWatch::IsSlow(const Job& job) const {
  const double paid_seconds = static_cast<double>(job.paid_tokens) / QueueRoom::kPlaceTokensPerSecond;
  return now() - job.entered_at > QueueRoom::kUploadGrace + absl::Seconds(paid_seconds);
}

void QueueWatch::CheckLosers(std::span<const QueueRoom::LostPlace> places) {
  std::set<RunOrder::Ticket> gone;
  for (const QueueRoom::LostPlace& place : places) {
    const auto found = queue_.jobs_.find(place.ticket);
    if (found == queue_.jobs_.end()) return Fail("a place is lost that nobody has");
    const Job& loser = found->second;
    if (!gone.insert(place.ticket).second) Fail("a place is lost twice");
    if (loser.begun) Fail("what lives loses its place");
    if (place.slow && (loser.complete || !IsSlow(loser))) {
      Fail("an upload loses its place that is not slow");
    }
    for (const auto& [ticket, job] : queue_.jobs_) {
      if (place.slow || job.begun || job.run.tenant != loser.run.tenant || gone.contains(ticket)) continue;
      if (!job.complete && IsSlow(job)) continue;  // spared, where others' places do
      const bool is_lower = std::pair(job.run.priority, -static_cast<int64_t>(ticket)) <
                            std::pair(loser.run.priority, -static_cast<int64_t>(loser.ticket));
      if (is_lower) Fail("a place is lost, and its tenant has a newer one or a lower class");
    }
  }
}

void QueueWatch::CheckEmpty() {
  Check();
  CheckPredictions();
  if (!queue_.jobs_.empty()) Fail("requests are left at the end");
  if (!queue_.groups_.empty() || !queue_.at_leader_.empty() || !queue_.computing_.empty()) {
    Fail("runs are left at the end");
  }
  const QueueLoad load = queue_.room_.load();
  if (load.requests != 0 || load.tokens != 0 || load.running_tokens != 0) Fail("claims are left at the end");
  if (queue_.order_.live() != 0 || queue_.order_.MostWaitSeconds(now()) != 0) {
    Fail("the order has something at the end");
  }
}

}  // namespace meshfill
