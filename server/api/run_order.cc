#include "server/api/run_order.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

namespace meshfill {
namespace {

constexpr double kLeastRestSeconds = 1e-6;
constexpr size_t kMostTenants = 4096;  // whose leads are kept, beside those that have something here

}  // namespace

bool RunOrder::Rank::Before(const Rank& other) const {
  if (stays != other.stays) return stays;
  if (aged != other.aged) return aged;
  if (aged) return std::tie(complete_at, ticket) < std::tie(other.complete_at, other.ticket);
  if (priority != other.priority) return priority > other.priority;
  if (weight != other.weight) return weight < other.weight;
  return std::tie(complete_at, ticket) < std::tie(other.complete_at, other.ticket);
}

void RunOrder::Announce(Ticket ticket, const Job& job, absl::Time now) {
  Settle(now);
  leads_[job.tenant] = LeadOfNew(job.tenant);
  Entry& entry = entries_[ticket];
  entry.job = job;
  entry.job.priority = std::clamp(job.priority, -kTopPriority, kTopPriority);
  entry.rest_seconds = job.work_seconds;
}

void RunOrder::SetWork(Ticket ticket, double work_seconds) {
  entries_.at(ticket).rest_seconds = work_seconds;
}

void RunOrder::Complete(Ticket ticket, absl::Time now) {
  Entry& entry = entries_.at(ticket);
  entry.state = State::kWaiting;
  entry.complete_at = now;
}

void RunOrder::SetDone(Ticket ticket, double share, absl::Time now) {
  Entry& entry = entries_.at(ticket);
  if (!(share > 0)) return;
  entry.measured_at = Computed(ticket, entry, now);
  entry.rest_seconds = absl::ToDoubleSeconds(entry.measured_at) * (1 - std::min(1.0, share)) / share;
}

void RunOrder::PutBack(Ticket ticket, absl::Time now) {
  Settle(now);
  if (computing_ == ticket) computing_ = 0;
  Entry& entry = entries_.at(ticket);
  entry.state = State::kWaiting;
  entry.put_back = live() > 0;
}

void RunOrder::Leave(Ticket ticket, absl::Time now) {
  Settle(now);
  if (computing_ == ticket) computing_ = 0;
  entries_.at(ticket).leaving = true;
}

void RunOrder::Remove(Ticket ticket, absl::Time now) {
  Settle(now);
  if (computing_ == ticket) computing_ = 0;
  entries_.erase(ticket);
  for (auto& [other, entry] : entries_) entry.put_back = false;
  ForgetTenants();
}

RunOrder::Ticket RunOrder::Choose(absl::Time now) {
  Settle(now);
  std::optional<Rank> barrier;  // the first that waits for memory: nothing new begins after it
  for (const auto& [ticket, entry] : entries_) {
    if (!entry.put_back) continue;
    const Rank rank = RankOf(ticket, entry, leads_.at(entry.job.tenant), now);
    if (!barrier.has_value() || rank.Before(*barrier)) barrier = rank;
  }
  const bool full = live() >= options_.most_live;
  std::optional<Rank> best;
  for (const auto& [ticket, entry] : entries_) {
    if (entry.state == State::kUploading || entry.leaving) continue;
    const bool waits = entry.state == State::kWaiting;
    if (waits && (full || entry.put_back)) continue;
    const Rank rank = RankOf(ticket, entry, leads_.at(entry.job.tenant), now);
    if (waits && barrier.has_value() && barrier->Before(rank)) continue;
    if (!best.has_value() || rank.Before(*best)) best = rank;
  }
  const Ticket chosen = best.has_value() ? best->ticket : 0;
  if (chosen == computing_) return chosen;
  computing_ = chosen;
  if (chosen == 0) return 0;
  Entry& entry = entries_.at(chosen);
  entry.state = State::kLive;
  entry.since = now;
  return chosen;
}

int RunOrder::live() const {
  return static_cast<int>(std::count_if(entries_.begin(), entries_.end(),
                                        [](const auto& each) { return each.second.state == State::kLive; }));
}

double RunOrder::RestSeconds(Ticket ticket, absl::Time now) const {
  return Rest(ticket, entries_.at(ticket), now);
}

double RunOrder::ComputedSeconds(Ticket ticket, absl::Time now) const {
  return absl::ToDoubleSeconds(Computed(ticket, entries_.at(ticket), now));
}

std::vector<RunOrder::Ticket> RunOrder::Turns(absl::Time now) const {
  std::vector<std::pair<bool, Rank>> ranks;  // whether it uploads
  for (const auto& [ticket, entry] : entries_) {
    ranks.emplace_back(entry.state == State::kUploading,
                       RankOf(ticket, entry, leads_.at(entry.job.tenant), now));
  }
  std::sort(ranks.begin(), ranks.end(), [](const auto& left, const auto& right) {
    return left.first != right.first ? right.first : left.second.Before(right.second);
  });
  std::vector<Ticket> turns;
  for (const auto& [uploads, rank] : ranks) turns.push_back(rank.ticket);
  return turns;
}

double RunOrder::WaitSeconds(const Job& job, absl::Time now) const {
  Entry added;
  added.job = job;
  added.job.priority = std::clamp(job.priority, -kTopPriority, kTopPriority);
  added.rest_seconds = job.work_seconds;
  const Rank rank = RankOf(std::numeric_limits<Ticket>::max(), added, LeadOfNew(job.tenant), now);
  double seconds = 0;
  for (const auto& [ticket, entry] : entries_) {
    if (RankOf(ticket, entry, leads_.at(entry.job.tenant), now).Before(rank))
      seconds += Rest(ticket, entry, now);
  }
  return seconds;
}

absl::Duration RunOrder::Computed(Ticket ticket, const Entry& entry, absl::Time now) const {
  return ticket == computing_ ? entry.computed + (now - entry.since) : entry.computed;
}

double RunOrder::Rest(Ticket ticket, const Entry& entry, absl::Time now) const {
  if (entry.leaving) return 0;
  const absl::Duration since_measured = Computed(ticket, entry, now) - entry.measured_at;
  // What takes longer than predicted may take as long again.
  return std::abs(entry.rest_seconds - absl::ToDoubleSeconds(since_measured));
}

RunOrder::Rank RunOrder::RankOf(Ticket ticket, const Entry& entry, double lead, absl::Time now) const {
  const double rest = std::max(kLeastRestSeconds, Rest(ticket, entry, now));
  return {.stays = options_.most_live == 1 && entry.state == State::kLive,
          .aged = now - entry.complete_at - Computed(ticket, entry, now) > options_.max_age,
          .priority = entry.job.priority,
          .weight = std::log2(rest) + lead / kLeadSeconds - (ticket == computing_ ? 1 : 0),
          .complete_at = entry.complete_at,
          .ticket = ticket};
}

double RunOrder::LeadOfNew(const std::string& tenant) const {
  const auto lead = leads_.find(tenant);
  return lead == leads_.end() ? LeastLead() : std::max(lead->second, LeastLead());
}

double RunOrder::LeastLead() const {
  double least = std::numeric_limits<double>::infinity();
  for (const auto& [ticket, entry] : entries_) {
    least = std::min(least, leads_.at(entry.job.tenant));
  }
  return std::isfinite(least) ? least : 0;
}

void RunOrder::Settle(absl::Time now) {
  if (computing_ == 0) return;
  Entry& entry = entries_.at(computing_);
  leads_[entry.job.tenant] += absl::ToDoubleSeconds(now - entry.since);
  entry.computed += now - entry.since;
  entry.since = now;
}

// Of those that have nothing here: who has no lead, or all where they are too many.
void RunOrder::ForgetTenants() {
  if (entries_.empty()) return leads_.clear();
  std::set<std::string_view> here;
  for (const auto& [ticket, entry] : entries_) here.insert(entry.job.tenant);
  const double least = LeastLead();
  const bool too_many = leads_.size() > kMostTenants + here.size();
  std::erase_if(leads_, [&](const auto& lead) {
    return !here.contains(lead.first) && (too_many || lead.second <= least);
  });
}

}  // namespace meshfill
