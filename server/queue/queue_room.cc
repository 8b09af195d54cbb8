#include "server/queue/queue_room.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/return_if_error.h"
#include "server/queue/refusal.h"

namespace meshfill {
namespace {

constexpr int kRefusalsShare = 20;  // at most 1/20 of the time goes to the turns that refusals tell

absl::Status Refuse(Refusal refusal, const std::string& message) {
  return WithRefusal(absl::ResourceExhaustedError(message), refusal);
}

absl::Status WithRetry(const absl::Status& refused, double seconds) {
  return WithRetryAfter(refused, std::max(QueueRoom::kLeastRetry, absl::Seconds(seconds)));
}

}  // namespace

QueueRoom::QueueRoom(const Limits& limits, Clock clock)
    : limits_(limits), clock_(std::move(clock)), retry_line_(limits.max_age) {}

void QueueRoom::Claims::Count(const Entry& entry, int sign) {
  for (Load* load : {&queue, &of_tenant}) {
    if (load == &of_tenant && entry.tenant != tenant) continue;
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
  Claims claims{.tenant = tenant};
  for (const auto& [ticket, entry] : entries_) {
    if (HasPlace(entry)) claims.Count(entry);
  }
  return claims;
}

std::vector<QueueRoom::Ticket> QueueRoom::PlacesToTakeFor(const RunOrder::Job& job, int64_t tokens,
                                                          const RunOrder& order) const {
  Claims claims = ClaimsBeside(job.tenant);
  if (CheckBeside(claims, tokens).ok()) return {};
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
  std::vector<Ticket> taken;
  for (const auto& [late, ticket] : behind) {
    if (CheckBeside(claims, tokens).ok()) break;
    const Entry& entry = entries_.at(ticket);
    const bool queue_full =
        claims.queue.requests + 1 > limits_.max_requests || claims.queue.tokens + tokens > limits_.max_tokens;
    if (!queue_full && entry.tenant != job.tenant) continue;
    claims.Count(entry, -1);
    taken.push_back(ticket);
  }
  if (!CheckBeside(claims, tokens).ok()) return {};
  RunOrder without_them = order;
  for (const Ticket ticket : taken) without_them.Remove(ticket, now);
  if (!CheckWait(job, without_them).ok()) return {};
  return taken;
}

absl::Status QueueRoom::MayEnter(const RunOrder::Job& job, int64_t tokens, const RunOrder& order) {
  RETURN_IF_ERROR(CheckSize(job.tenant, tokens));
  const absl::Status full = CheckBeside(ClaimsBeside(job.tenant), tokens);
  if (!full.ok()) {
    const double seconds = SecondsUntilRoom(job.tenant, tokens, order);
    return WithRetry(full, seconds + retry_line_.Join(job.tenant, job.work_seconds, clock_()));
  }
  return CheckWait(job, order);
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
  const auto& [tenant_name, queue, of_tenant] = claims;
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
  const TenantLimits& tenant = limits_.tenants.LimitsOf(tenant_name);
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

absl::Status QueueRoom::CheckWait(const RunOrder::Job& job, const RunOrder& order) const {
  const absl::Time now = clock_();
  const double max_wait_seconds = absl::ToDoubleSeconds(limits_.max_wait);
  const double left_seconds = absl::ToDoubleSeconds(job.deadline - now);
  const double most_seconds = order.MostWaitSeconds(now);
  if (most_seconds <= max_wait_seconds && most_seconds + job.work_seconds <= left_seconds) {
    return absl::OkStatus();
  }
  const double wait_seconds = order.WaitSeconds(job, now);
  if (wait_seconds > max_wait_seconds) {
    return WithRetry(
        Refuse(Refusal::kQueueWait,
               absl::StrFormat("the predicted wait is %.3g s (queue.max_wait is %.3g s); try again later",
                               wait_seconds, max_wait_seconds)),
        wait_seconds - max_wait_seconds);
  }
  if (left_seconds <= 0)
    return absl::DeadlineExceededError("the deadline passed before the request was read");
  if (job.work_seconds > left_seconds) {
    return Refuse(
        Refusal::kDeadline,
        absl::StrFormat("the deadline is in %.3g s, but the prediction is %.3g s of prefill without "
                        "any waiting; allow more time, or send a shorter prompt",
                        left_seconds, job.work_seconds));
  }
  if (wait_seconds + job.work_seconds > left_seconds) {
    return WithRetry(
        Refuse(Refusal::kDeadline,
               absl::StrFormat("the deadline is in %.3g s, but the prediction is %.3g s of waiting and "
                               "%.3g s of prefill; allow more time, or try again later",
                               left_seconds, wait_seconds, job.work_seconds)),
        wait_seconds);
  }
  return absl::OkStatus();
}

void QueueRoom::Enter(Ticket ticket, const RunOrder::Job& job, int64_t tokens) {
  entries_[ticket] = {
      .tenant = job.tenant, .priority = job.priority, .tokens = tokens, .entered_at = clock_()};
}

absl::Status QueueRoom::Pay(Ticket ticket, int64_t tokens_so_far, const RunOrder& order) {
  Entry& entry = entries_.at(ticket);
  const int64_t claim_before = ClaimOf(entry);
  entry.uploaded_tokens = tokens_so_far;
  if (ClaimOf(entry) == claim_before) return absl::OkStatus();
  const Claims claims = ClaimsBeside(entry.tenant);
  const int64_t tenants_tokens = TenantsTokens(entry.tenant);
  const bool beyond_share = claims.of_tenant.tokens > tenants_tokens;
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

absl::Status QueueRoom::PlaceLost() {
  return WithRetryAfter(
      Refuse(Refusal::kQueueRequests,
             absl::StrCat("the queue is full, and the upload was slower than ", kPlaceTokensPerSecond,
                          " tokens/s: its place went to others; upload without pauses, or try again later")),
      kUploadGrace);
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
  for (const auto& [ticket, entry] : entries_) {
    if (!HasPlace(entry)) {
      load.running_tokens += entry.tokens;
      continue;
    }
    ++load.requests;
    load.tokens += ClaimOf(entry);
    constexpr int kTop = RunOrder::kTopPriority;
    ++load.requests_by_class[std::clamp(entry.priority, -kTop, kTop) + kTop];
    load.oldest = std::min(load.oldest, entry.complete_at);
  }
  return load;
}

}  // namespace meshfill
