#include "server/queue/queue_room.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/return_if_error.h"
#include "server/queue/refusal.h"

namespace meshfill {
namespace {

const std::string kOtherTenants = "other";  // in the load: those without a name in the configuration
constexpr double kWholeShare = 1 + 1e-9;    // sums of weights are rounded

absl::Status Refuse(Refusal refusal, const std::string& message) {
  return WithRefusal(absl::ResourceExhaustedError(message), refusal);
}

absl::Status WithRetry(const absl::Status& refused, double seconds) {
  return WithRetryAfter(refused, std::max(QueueRoom::kLeastRetry, absl::Seconds(seconds)));
}

// A run of so many seconds, where so many are left until its deadline.
absl::Status CheckRun(double seconds, double left_seconds) {
  if (seconds <= left_seconds) return absl::OkStatus();
  return Refuse(Refusal::kDeadline,
                absl::StrFormat("the deadline is in %.3g s, but the prediction is %.3g s of prefill without "
                                "any waiting; allow more time, or send a shorter prompt",
                                left_seconds, seconds));
}

// Of its prefill at least.
double LeastSeconds(const RunOrder::Job& job) { return job.work_seconds - job.may_save_seconds; }

}  // namespace

QueueRoom::QueueRoom(const Limits& limits, Clock clock)
    : limits_(limits), clock_(std::move(clock)), retry_line_(limits.max_age) {}

void QueueRoom::Claims::Count(const Entry& entry, int sign) {
  for (Load* load : {&queue, &of_tenants[entry.tenant]}) {
    load->requests += sign;
    load->tokens += sign * ClaimOf(entry);
  }
}

int64_t QueueRoom::UploadClaim(int64_t announced_tokens, int64_t tokens_so_far) {
  return std::min(announced_tokens, std::max(kFreeTokens, 2 * tokens_so_far));
}

int64_t QueueRoom::ClaimOf(const Entry& entry) {
  switch (entry.state) {
    case RunOrder::State::kUploading:
      return UploadClaim(entry.tokens, entry.uploaded_tokens);
    case RunOrder::State::kWaiting:
      return entry.tokens;
    case RunOrder::State::kLive:
      break;
  }
  return 0;
}

QueueRoom::Claims QueueRoom::ClaimsBeside(const std::string& tenant) const {
  Claims claims{.tenant = tenant, .queue = {}, .of_tenants = {{tenant, {}}}};
  for (const auto& [ticket, entry] : entries_) {
    if (HasPlace(entry)) claims.Count(entry);
  }
  for (const auto& [each, load] : claims.of_tenants) claims.weights += limits_.tenants.LimitsOf(each).weight;
  return claims;
}

absl::Status QueueRoom::CheckClass(const RunOrder::Job& job) const {
  const int most = limits_.tenants.LimitsOf(job.tenant).max_priority;
  if (ClassOf(job.priority) <= most) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("priority is ", job.priority,
                                                  "; the tenant's requests may have ", most,
                                                  " at most (its max_priority); send a lower one"));
}

std::vector<QueueRoom::LostPlace> QueueRoom::PlacesToTakeFor(const RunOrder::Job& job, int64_t tokens,
                                                             const RunOrder& order) const {
  if (!CheckSize(job.tenant, tokens).ok()) return {};
  Claims claims = ClaimsBeside(job.tenant);
  if (CheckBeside(claims, tokens).ok()) return {};
  std::vector<LostPlace> taken;
  TakeSlowUploads(claims, taken);
  if (!CheckTenant(claims, tokens).ok()) return {};
  const Load more = {.requests = 1, .tokens = tokens};
  if (!TakeBeyondShares(&Load::requests, limits_.max_requests, more, claims, taken)) return {};
  if (!TakeBeyondShares(&Load::tokens, limits_.max_tokens, more, claims, taken)) return {};
  SpareSlowUploads(tokens, claims, taken);
  const absl::Time now = clock_();
  if (IsSoonEnough(job, order.MostWaitSeconds(now), now)) return taken;
  RunOrder without_them = order;
  std::vector<Ticket> gone;
  for (const LostPlace& lost : taken) gone.push_back(lost.ticket);
  without_them.Remove(gone, now);
  if (!CheckWait(job, without_them).ok()) return {};
  return taken;
}

void QueueRoom::TakeSlowUploads(Claims& claims, std::vector<LostPlace>& taken) const {
  const absl::Time now = clock_();
  // How far each upload is behind its pace, and its ticket.
  std::vector<std::pair<absl::Duration, Ticket>> behind;
  for (const auto& [ticket, entry] : entries_) {
    if (entry.state != RunOrder::State::kUploading) continue;
    const double paid_seconds = static_cast<double>(entry.uploaded_tokens) / kPlaceTokensPerSecond;
    const absl::Duration late = now - entry.entered_at - kUploadGrace - absl::Seconds(paid_seconds);
    if (late > absl::ZeroDuration()) behind.emplace_back(late, ticket);
  }
  std::sort(behind.rbegin(), behind.rend());
  for (const auto& [late, ticket] : behind) {
    claims.Count(entries_.at(ticket), -1);
    taken.push_back({ticket, /*slow=*/true});
  }
}

bool QueueRoom::TakeBeyondShares(int64_t Load::*full, int64_t most, const Load& more, Claims& claims,
                                 std::vector<LostPlace>& taken) const {
  const auto is_full = [&] { return claims.queue.*full + more.*full > most; };
  if (!is_full()) return true;
  // What a tenant has, by its share. A lone prompt is within it.
  const auto of_share = [&](const std::string& tenant, const Load& load) {
    const double share = static_cast<double>(most) * limits_.tenants.LimitsOf(tenant).weight / claims.weights;
    return load.requests <= 1 ? 0 : static_cast<double>(load.*full) / share;
  };
  const Load asks = {.requests = claims.of_tenant().requests + more.requests,
                     .tokens = claims.of_tenant().tokens + more.tokens};
  if (of_share(claims.tenant, asks) > kWholeShare) return false;
  std::set<std::pair<double, std::string>> beyond;  // of its share, and who has it; the furthest last
  const auto look_at = [&](const std::string& tenant) {
    const double has = of_share(tenant, claims.of_tenants.at(tenant));
    if (has > kWholeShare) beyond.emplace(has, tenant);
  };
  for (const auto& [tenant, load] : claims.of_tenants) look_at(tenant);
  if (beyond.empty()) return false;
  std::map<std::string, std::vector<Ticket>> rows = Rows(taken);
  while (is_full() && !beyond.empty()) {
    const std::string loser = beyond.extract(std::prev(beyond.end())).value().second;
    std::vector<Ticket>& row = rows.at(loser);
    taken.push_back({row.back()});
    claims.Count(entries_.at(row.back()), -1);
    row.pop_back();
    look_at(loser);
  }
  return !is_full();
}

std::map<std::string, std::vector<QueueRoom::Ticket>> QueueRoom::Rows(
    const std::vector<LostPlace>& taken) const {
  std::set<Ticket> gone;
  for (const LostPlace& lost : taken) gone.insert(lost.ticket);
  std::map<std::string, std::vector<Ticket>> rows;
  for (const auto& [ticket, entry] : entries_) {
    if (HasPlace(entry) && !gone.contains(ticket)) rows[entry.tenant].push_back(ticket);
  }
  for (auto& [tenant, row] : rows) {
    std::stable_sort(row.begin(), row.end(), [&](Ticket left, Ticket right) {
      return entries_.at(left).priority > entries_.at(right).priority;
    });
  }
  return rows;
}

void QueueRoom::SpareSlowUploads(int64_t tokens, Claims& claims, std::vector<LostPlace>& taken) const {
  const auto is_slow = [](const LostPlace& lost) { return lost.slow; };
  const bool all_slow = std::all_of(taken.begin(), taken.end(), is_slow);
  for (auto lost = taken.end(); lost != taken.begin();) {
    --lost;
    const Entry& entry = entries_.at(lost->ticket);
    // With its own the tenant would be beyond its share.
    if (!lost->slow || (!all_slow && entry.tenant == claims.tenant)) continue;
    claims.Count(entry);
    if (CheckBeside(claims, tokens).ok()) {
      lost = taken.erase(lost);
    } else {
      claims.Count(entry, -1);
    }
  }
}

std::vector<QueueRoom::LostPlace> QueueRoom::PlacesToTakeToPay(Ticket ticket, int64_t tokens_so_far) const {
  const Entry& entry = entries_.at(ticket);
  const int64_t more_tokens = UploadClaim(entry.tokens, tokens_so_far) - ClaimOf(entry);
  if (more_tokens == 0) return {};
  Claims claims = ClaimsBeside(entry.tenant);
  if (claims.of_tenant().tokens + more_tokens > TenantsTokens(entry.tenant)) return {};
  std::vector<LostPlace> taken;
  const Load more = {.requests = 0, .tokens = more_tokens};
  if (!TakeBeyondShares(&Load::tokens, limits_.max_tokens, more, claims, taken)) return {};
  return taken;
}

absl::Status QueueRoom::MayEnter(const RunOrder::Job& job, int64_t tokens, const RunOrder& order) {
  RETURN_IF_ERROR(CheckSize(job.tenant, tokens));
  const absl::Status full = CheckBeside(ClaimsBeside(job.tenant), tokens);
  if (!full.ok()) return WithRetryForRoom(full, job, SecondsUntilRoom(job.tenant, tokens, order));
  const absl::Time now = clock_();
  if (IsSoonEnough(job, order.MostWaitSeconds(now), now)) return absl::OkStatus();
  return CheckWaitOf(job, WaitSeconds(job, order));
}

absl::Status QueueRoom::WithRetryForRoom(const absl::Status& refused, const RunOrder::Job& job,
                                         double seconds_until_room) {
  return WithRetry(refused, seconds_until_room + retry_line_.Join(job.tenant, job.work_seconds, clock_()));
}

absl::Status QueueRoom::CheckSize(const std::string& tenant, int64_t tokens) const {
  if (tokens > limits_.max_tokens) {
    return Refuse(Refusal::kQueueTokens,
                  absl::StrCat("the queue never has room for ", tokens, " tokens (queue.max_tokens is ",
                               limits_.max_tokens, "); send a shorter prompt"));
  }
  if (tokens > TenantsTokens(tenant)) {
    return Refuse(Refusal::kTenantShare,
                  absl::StrCat("the tenant never has room for ", tokens, " tokens (its max_tokens is ",
                               TenantsTokens(tenant), "); send a shorter prompt"));
  }
  return absl::OkStatus();
}

absl::Status QueueRoom::CheckBeside(const Claims& claims, int64_t tokens) const {
  RETURN_IF_ERROR(CheckQueue(claims, tokens));
  return CheckTenant(claims, tokens);
}

absl::Status QueueRoom::CheckQueue(const Claims& claims, int64_t tokens) const {
  const Load& queue = claims.queue;
  if (queue.requests + 1 > limits_.max_requests) {
    return Refuse(Refusal::kQueueRequests,
                  absl::StrCat("the queue is full: ", queue.requests, " requests (queue.max_requests is ",
                               limits_.max_requests, "); try again later"));
  }
  if (queue.tokens + tokens > limits_.max_tokens) {
    return Refuse(Refusal::kQueueTokens,
                  absl::StrCat("the queue has no room for ", tokens, " tokens beside the ", queue.tokens,
                               " in it (queue.max_tokens is ", limits_.max_tokens, "); try again later"));
  }
  return absl::OkStatus();
}

absl::Status QueueRoom::CheckTenant(const Claims& claims, int64_t tokens) const {
  const Load& of_tenant = claims.of_tenant();
  const TenantLimits& tenant = limits_.tenants.LimitsOf(claims.tenant);
  if (of_tenant.requests + 1 > tenant.max_requests) {
    return Refuse(Refusal::kTenantShare, absl::StrCat("the tenant has ", of_tenant.requests,
                                                      " requests in the queue (its max_requests is ",
                                                      tenant.max_requests, "); try again later"));
  }
  if (of_tenant.tokens + tokens > tenant.max_tokens) {
    return Refuse(Refusal::kTenantShare,
                  absl::StrCat("the tenant has no room for ", tokens, " tokens beside its ", of_tenant.tokens,
                               " in the queue (its max_tokens is ", tenant.max_tokens, "); try again later"));
  }
  return absl::OkStatus();
}

bool QueueRoom::IsSoonEnough(const RunOrder::Job& job, double wait_seconds, absl::Time now) const {
  return wait_seconds <= absl::ToDoubleSeconds(limits_.max_wait) &&
         wait_seconds + LeastSeconds(job) <= absl::ToDoubleSeconds(job.deadline - now);
}

absl::Status QueueRoom::CheckWait(const RunOrder::Job& job, const RunOrder& order) const {
  const absl::Time now = clock_();
  if (IsSoonEnough(job, order.MostWaitSeconds(now), now)) return absl::OkStatus();
  return CheckWaitOf(job, order.WaitSeconds(job, now));
}

double QueueRoom::WaitSeconds(const RunOrder::Job& job, const RunOrder& order) {
  const absl::Time now = clock_();
  const double least_seconds = refused_waits_.LeastSeconds(job, now);
  if (!IsSoonEnough(job, least_seconds, now)) return least_seconds;
  const double seconds = order.WaitSeconds(job, now);
  if (!IsSoonEnough(job, seconds, now)) refused_waits_.Add(job, seconds, now, clock_());
  return seconds;
}

absl::Status QueueRoom::CheckWaitOf(const RunOrder::Job& job, double wait_seconds) const {
  const double max_wait_seconds = absl::ToDoubleSeconds(limits_.max_wait);
  if (wait_seconds > max_wait_seconds) {
    return WithRetry(
        Refuse(Refusal::kQueueWait,
               absl::StrFormat("the predicted wait is %.3g s (queue.max_wait is %.3g s); try again later",
                               wait_seconds, max_wait_seconds)),
        wait_seconds - max_wait_seconds);
  }
  return CheckDeadline(job, wait_seconds);
}

absl::Status QueueRoom::CheckDeadline(const RunOrder::Job& job, double wait_seconds) const {
  const double left_seconds = absl::ToDoubleSeconds(job.deadline - clock_());
  if (left_seconds <= 0)
    return absl::DeadlineExceededError("the deadline passed before the request was read");
  const double run_seconds = LeastSeconds(job);
  RETURN_IF_ERROR(CheckRun(run_seconds, left_seconds));
  if (wait_seconds + run_seconds > left_seconds) {
    return WithRetry(
        Refuse(Refusal::kDeadline,
               absl::StrFormat("the deadline is in %.3g s, but the prediction is %.3g s of waiting and "
                               "%.3g s of prefill; allow more time, or try again later",
                               left_seconds, wait_seconds, run_seconds)),
        wait_seconds);
  }
  return absl::OkStatus();
}

void QueueRoom::Enter(Ticket ticket, const RunOrder::Job& job, int64_t tokens) {
  entries_[ticket] = {
      .tenant = job.tenant, .priority = ClassOf(job.priority), .tokens = tokens, .entered_at = clock_()};
}

absl::Status QueueRoom::Pay(Ticket ticket, int64_t tokens_so_far, const RunOrder& order) {
  Entry& entry = entries_.at(ticket);
  const int64_t claim_before = ClaimOf(entry);
  entry.uploaded_tokens = tokens_so_far;
  if (ClaimOf(entry) == claim_before) return absl::OkStatus();
  const Claims claims = ClaimsBeside(entry.tenant);
  const int64_t tenants_tokens = TenantsTokens(entry.tenant);
  const bool beyond_share = claims.of_tenant().tokens > tenants_tokens;
  if (!beyond_share && claims.queue.tokens <= limits_.max_tokens) return absl::OkStatus();
  return WithRetry(
      Refuse(beyond_share ? Refusal::kTenantShare : Refusal::kQueueTokens,
             absl::StrCat("others have taken the room for the rest of this upload, after ", tokens_so_far,
                          " of ", entry.tokens, " tokens (",
                          beyond_share ? absl::StrCat("the tenant's max_tokens is ", tenants_tokens)
                                       : absl::StrCat("queue.max_tokens is ", limits_.max_tokens),
                          "); try again later")),
      SecondsUntilRoom(entry.tenant, entry.tokens, order));
}

void QueueRoom::Complete(Ticket ticket) {
  Entry& entry = entries_.at(ticket);
  entry.state = RunOrder::State::kWaiting;
  entry.complete_at = clock_();
}

std::vector<absl::Status> QueueRoom::PlacesLost(std::span<const Loser> losers, const RunOrder& order) {
  std::vector<absl::Status> told;
  std::map<std::string, double> seconds_until_room;  // by tenant
  for (const auto& [place, job, tokens] : losers) {
    if (place.slow) {
      told.push_back(WithRetryAfter(
          Refuse(Refusal::kQueueRequests,
                 absl::StrCat("the queue is full, and the upload was slower than ", kPlaceTokensPerSecond,
                              " tokens/s: its place went to others; upload without pauses, or try again "
                              "later")),
          kUploadGrace));
      continue;
    }
    const auto [seconds, is_first] = seconds_until_room.try_emplace(job.tenant);
    if (is_first) seconds->second = SecondsUntilRoom(job.tenant, tokens, order);
    told.push_back(WithRetryForRoom(
        Refuse(Refusal::kTenantShare,
               "the queue is full, and the tenant has more than its share of it: its newest prompt of the "
               "lowest priority, this one, lost its place to another tenant; try again later"),
        job, seconds->second));
  }
  return told;
}

double QueueRoom::SecondsUntilRoom(const std::string& tenant, int64_t tokens, const RunOrder& order) {
  Claims claims = ClaimsBeside(tenant);
  double seconds = 0;
  for (const RunOrder::Turn& turn : RecentTurns(order)) {
    const auto entry = entries_.find(turn.ticket);
    if (entry == entries_.end() || !HasPlace(entry->second)) continue;
    seconds = turn.begins_seconds;
    claims.Count(entry->second, -1);
    if (CheckBeside(claims, tokens).ok()) break;
  }
  return seconds;
}

const std::vector<RunOrder::Turn>& QueueRoom::RecentTurns(const RunOrder& order) {
  const absl::Time now = clock_();
  if (now >= recent_turns_until_) {
    recent_turns_ = order.Turns(now);
    const absl::Time found = clock_();
    recent_turns_until_ = found + kRefusalsShare * (found - now);
  }
  return recent_turns_;
}

QueueLoad QueueRoom::load() const {
  QueueLoad load;
  const auto& named = limits_.tenants.named();
  for (const auto& [tenant, limits] : named) load.requests_by_tenant[tenant] = 0;
  load.requests_by_tenant[kOtherTenants] = 0;
  for (const auto& [ticket, entry] : entries_) {
    if (!HasPlace(entry)) {
      load.running_tokens += entry.tokens;
      continue;
    }
    ++load.requests;
    load.tokens += ClaimOf(entry);
    ++load.requests_by_class[entry.priority + kTopPriority];
    ++load.requests_by_tenant[named.contains(entry.tenant) ? entry.tenant : kOtherTenants];
    load.oldest = std::min(load.oldest, entry.complete_at);
  }
  return load;
}

}  // namespace meshfill
