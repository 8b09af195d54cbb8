#include "server/queue/run_order.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "server/queue/looks_ahead.h"

namespace meshfill {
namespace {

constexpr double kLeastRestSeconds = 1e-6;
constexpr size_t kMostTenants = 4096;  // tenants whose leads are kept, beside those that have something here

// Picks one prefill of each pass.
class OneOfAPass {
 public:
  bool operator()(const RunEntry& entry) { return entry.pack == 0 || seen_.insert(entry.pack).second; }

 private:
  std::set<uint64_t> seen_;
};

}  // namespace

void RunOrder::Announce(Ticket ticket, const Job& job, absl::Time now) {
  Settle(now);
  leads_[job.tenant] = LeadOfNew(job.tenant);
  Entry& entry = entries_[ticket];
  entry.job = job;
  entry.job.priority = ClassOf(job.priority);
  entry.rest_seconds = entry.whole_seconds = job.work_seconds;
}

void RunOrder::SetWork(Ticket ticket, double work_seconds, std::vector<SubmeshSeconds> submeshes,
                       const PackShare& pack) {
  Entry& entry = entries_.at(ticket);
  entry.job.work_seconds = entry.rest_seconds = entry.whole_seconds = work_seconds;
  entry.job.submeshes = std::move(submeshes);
  entry.job.pack = pack;
}

void RunOrder::Pay(Ticket ticket) { entries_.at(ticket).paid = true; }

void RunOrder::Complete(Ticket ticket, absl::Time now) {
  Entry& entry = entries_.at(ticket);
  leads_[entry.job.tenant] = LeadOfNew(entry.job.tenant);
  entry.state = State::kWaiting;
  entry.complete_at = now;
}

void RunOrder::SetDone(Ticket ticket, double share, absl::Time now) {
  if (!(share > 0)) return;
  share = std::min(1.0, share);
  Entry& told = entries_.at(ticket);
  const absl::Duration computed = told.Computed(now);
  if (std::exchange(told.anew, false)) {
    const absl::Duration counts = absl::Seconds(share * told.whole_seconds);
    told.computed_lost = std::max(absl::ZeroDuration(), computed - counts);
  }
  const double seconds = absl::ToDoubleSeconds(computed - told.computed_lost);
  const double whole_seconds = seconds + (1 - share) * told.whole_seconds;
  const double rest_seconds = (1 - share) * whole_seconds;
  for (auto& [other, entry] : entries_) {
    if (other != ticket && (told.pack == 0 || entry.pack != told.pack)) continue;
    entry.measured_at = entry.Computed(now);
    entry.rest_seconds = rest_seconds;
  }
}

void RunOrder::BeginAnew(Ticket ticket) { entries_.at(ticket).anew = true; }

void RunOrder::PutBack(Ticket ticket, absl::Time now) {
  const bool others_live = live() > 1;
  Entry& entry = entries_.at(ticket);
  const bool shared = entry.pack != 0;
  ReturnToWait(ticket, now);
  (shared ? entry.apart : entry.put_back) = others_live;
}

void RunOrder::PutApart(Ticket ticket, absl::Time now) {
  ReturnToWait(ticket, now);
  entries_.at(ticket).job.pack = {};
}

void RunOrder::ReturnToWait(Ticket ticket, absl::Time now) {
  TakeTurn(ticket, now);
  Entry& entry = entries_.at(ticket);
  entry.state = State::kWaiting;
  entry.submeshes = 1;
  entry.place = 0;
  entry.pack = 0;
  entry.rest_seconds = entry.whole_seconds = entry.job.work_seconds;
  entry.measured_at = entry.computed;
  entry.anew = false;
  entry.computed_lost = absl::ZeroDuration();
}

void RunOrder::Leave(Ticket ticket, absl::Time now) {
  TakeTurn(ticket, now);
  entries_.at(ticket).leaving = true;
}

void RunOrder::Remove(std::span<const Ticket> tickets, absl::Time now) {
  for (const Ticket ticket : tickets) Forget(ticket, now);
  FindRoomAgain();
  ForgetTenants();
}

void RunOrder::Forget(Ticket ticket, absl::Time now) {
  TakeTurn(ticket, now);
  entries_.erase(ticket);
  if (elder_.ticket == ticket) elder_ = {};
}

void RunOrder::FindRoomAgain() {
  for (auto& [ticket, entry] : entries_) entry.put_back = entry.apart = false;
}

RunOrder::Ticket RunOrder::Choose(absl::Time now) {
  Settle(now);
  Give(FirstThatMay(Ranked(now).tickets, now), now);
  return computing_.empty() ? 0 : computing_.front();
}

Ranking RunOrder::Ranked(absl::Time now) {
  FindUrgent(now);
  const FreePlaces places = PlacesNow(now);
  std::vector<TurnRank> ranks;
  ranks.reserve(entries_.size());
  for (const auto& [ticket, entry] : entries_) ranks.push_back(RankOf(ticket, entry, places, now));
  return RankByTurns(std::move(ranks), elder_);
}

FreePlaces RunOrder::PlacesNow(absl::Time now) const {
  FreePlaces places(options_.most_live - live());
  for (const auto& [ticket, entry] : entries_) {
    if (entry.state == State::kLive && !entry.leaving) places.CountRest(entry.RestOnAll(now));
  }
  return places;
}

Gang RunOrder::FirstThatMay(std::span<const Ticket> ranked, absl::Time now) const {
  const GangChoice::Limits limits = {
      .places = PlacesNow(now), .max_age = options_.max_age, .pack = options_.pack};
  return GangChoice(entries_, computing_, limits, now).FirstThatMay(ranked);
}

void RunOrder::Give(const Gang& gang, absl::Time now) {
  for (const Ticket ticket : computing_) {
    Entry& entry = entries_.at(ticket);
    entry.computes = std::find(gang.tickets.begin(), gang.tickets.end(), ticket) != gang.tickets.end();
  }
  computing_ = gang.tickets;
  if (gang.pass_seconds.has_value()) ++last_pack_;
  for (const Ticket ticket : computing_) {
    Entry& entry = entries_.at(ticket);
    if (std::exchange(entry.computes, true)) continue;
    entry.since = now;
    if (std::exchange(entry.state, State::kLive) == State::kLive) continue;
    entry.submeshes = gang.submeshes;
    entry.pack = gang.pass_seconds.has_value() ? last_pack_ : 0;
    entry.whole_seconds = gang.pass_seconds.value_or(entry.job.SecondsOn(gang.submeshes));
    entry.rest_seconds = entry.whole_seconds;
  }
}

void RunOrder::TakeTurn(Ticket ticket, absl::Time now) {
  Settle(now);
  entries_.at(ticket).computes = false;
  std::erase(computing_, ticket);
}

bool RunOrder::StandsForPack(Ticket ticket) const {
  const uint64_t pack = entries_.at(ticket).pack;
  if (pack == 0) return true;
  const auto first = std::find_if(entries_.begin(), entries_.end(), [&](const auto& each) {
    return each.second.pack == pack && !each.second.leaving;
  });
  return first != entries_.end() && first->first == ticket;
}

int RunOrder::live() const {
  OneOfAPass one_of_a_pass;
  return static_cast<int>(std::count_if(entries_.begin(), entries_.end(), [&](const auto& each) {
    return each.second.state == State::kLive && one_of_a_pass(each.second);
  }));
}

double RunOrder::RestSeconds(Ticket ticket, absl::Time now) const { return entries_.at(ticket).Rest(now); }

double RunOrder::ComputedSeconds(Ticket ticket, absl::Time now) const {
  return absl::ToDoubleSeconds(entries_.at(ticket).Computed(now));
}

std::vector<RunOrder::Turn> RunOrder::Turns(absl::Time now) const { return RunOrder(*this).RunAhead(now, 0); }

std::vector<RunOrder::Turn> RunOrder::TurnsUpTo(Ticket ticket, absl::Time now) const {
  return RunOrder(*this).RunAhead(now, ticket);
}

double RunOrder::LikelyEndSeconds(const Turn& turn, absl::Time now) const {
  const Entry& entry = entries_.at(turn.ticket);
  const double share = recent_.ShareBefore(entry.job.priority, entry.RestOnAll(now), now);
  // Where nothing gives way, they come before its begin alone.
  const double beside = options_.most_live == 1 ? turn.begins_seconds : turn.ends_seconds;
  const double later = beside * share / (1 - share);
  // It becomes urgent early enough to end by then.
  const double deadline = absl::ToDoubleSeconds(entry.job.deadline - now);
  return std::max(turn.ends_seconds, std::min(turn.ends_seconds + later, deadline));
}

double RunOrder::MostWaitSeconds(absl::Time now) const {
  double seconds = 0;
  OneOfAPass one_of_a_pass;
  for (const auto& [ticket, entry] : entries_) {
    if (!entry.leaving && !one_of_a_pass(entry)) continue;
    if (entry.state == State::kUploading && !entry.paid) continue;
    double most = entry.Rest(now);
    if (entry.state != State::kLive) {
      for (const SubmeshSeconds& on : entry.job.submeshes) most = std::max(most, on.seconds);
    }
    seconds += most;
  }
  return seconds;
}

double RunOrder::WaitSeconds(const Job& job, absl::Time now) const {
  constexpr Ticket kAdded = std::numeric_limits<Ticket>::max();
  RunOrder ahead(*this);
  for (const auto& [ticket, entry] : entries_) {
    if (entry.state == State::kUploading && entry.paid) ahead.Complete(ticket, now);
  }
  ahead.Announce(kAdded, job, now);
  ahead.Complete(kAdded, now);
  return ahead.RunAhead(now, kAdded).back().begins_seconds;
}

std::vector<RunOrder::Turn> RunOrder::RunAhead(absl::Time now, Ticket stop) {
  Settle(now);
  if (std::erase_if(entries_, [](const auto& each) { return each.second.leaving; }) > 0) FindRoomAgain();
  double all_seconds = 0;
  OneOfAPass one_of_a_pass;
  for (auto& [ticket, entry] : entries_) {
    entry.rest_seconds = entry.Rest(now);
    entry.measured_at = entry.computed;
    if (one_of_a_pass(entry)) all_seconds += entry.rest_seconds;
  }
  const LooksAhead looks(all_seconds);
  std::vector<Turn> turns;
  std::map<Ticket, size_t> place;  // in turns
  double seconds = 0;
  while (!entries_.empty()) {
    Ranking ranking = Ranked(now + absl::Seconds(seconds));
    const double until = looks.Next(seconds, ranking.holds_seconds), earliest = looks.Earliest(seconds);
    const Ticket elder = elder_.ticket;
    bool computes = false;
    while (seconds < (elder_.ticket == elder ? until : earliest)) {
      const Gang gang = FirstThatMay(ranking.tickets, now + absl::Seconds(seconds));
      if (gang.tickets.empty()) break;
      computes = true;
      Give(gang, now + absl::Seconds(seconds));
      const int pack_prompts = gang.submeshes == 1 ? static_cast<int>(gang.tickets.size()) : 1;
      double shortest = std::numeric_limits<double>::infinity();
      std::vector<std::pair<double, Ticket>> rests;
      for (const Ticket ticket : gang.tickets) {
        const auto [turn, first] = place.emplace(ticket, turns.size());
        if (first) turns.push_back({ticket, seconds, seconds, gang.submeshes, pack_prompts});
        if (ticket == stop) {
          turns.back().ends_seconds += entries_.at(ticket).Rest(now + absl::Seconds(seconds));
          return turns;
        }
        rests.emplace_back(entries_.at(ticket).Rest(now + absl::Seconds(seconds)), ticket);
        shortest = std::min(shortest, rests.back().first);
      }
      const bool ends = seconds + shortest <= until;
      seconds = ends ? seconds + shortest : until;
      Settle(now + absl::Seconds(seconds));
      if (!ends) break;
      for (const auto& [rest, ticket] : rests) {
        if (rest > shortest) continue;
        turns[place.at(ticket)].ends_seconds = seconds;
        Forget(ticket, now + absl::Seconds(seconds));
        std::erase(ranking.tickets, ticket);
      }
      FindRoomAgain();
    }
    if (computes) continue;
    bool completes = false;
    for (auto& [ticket, entry] : entries_) {
      if (entry.state != State::kUploading) continue;
      Complete(ticket, now + absl::Seconds(seconds));
      completes = true;
    }
    if (!completes) break;
  }
  return turns;
}

TurnRank RunOrder::RankOf(Ticket ticket, const Entry& entry, const FreePlaces& places, absl::Time now) const {
  const double rest = std::max(kLeastRestSeconds, entry.RestOnAll(now));
  const double lead = leads_.at(entry.job.tenant);
  const double waits = absl::ToDoubleSeconds(entry.Stood(now)) /
                       (kPatience * std::max(kLeastRestSeconds, entry.job.work_seconds));
  const bool lives = entry.state == State::kLive && !entry.leaving;
  const bool may_begin =
      entry.state == State::kWaiting && !entry.put_back && places.HasOneFor(entry.job.work_seconds);
  return {.ticket = ticket,
          .lives = lives,
          .may_compute = lives || may_begin,
          .put_back = entry.put_back,
          .computes = entry.computes,
          .stays = options_.most_live == 1 && entry.state == State::kLive,
          .aged = entry.IsOlder(options_.max_age, now),
          .priority = entry.job.priority,
          .urgent = entry.IsUrgent(now),
          .deadline = entry.job.deadline,
          .work_seconds = entry.job.work_seconds,
          .rest_seconds = rest,
          .weighted_rest = std::log2(rest / (1 + waits)) + lead / kLeadSeconds - (entry.computes ? 1 : 0),
          .complete_at = entry.complete_at};
}

// Marks a prefill as urgent from the latest time on at which it must begin. In each class that time is
// counted from the last deadline back.
void RunOrder::FindUrgent(absl::Time now) {
  absl::Time earliest = absl::InfiniteFuture();
  for (const auto& [ticket, entry] : entries_) earliest = std::min(earliest, entry.job.deadline);
  if (now + kRestToSpare * absl::Seconds(MostWaitSeconds(now)) < earliest)
    return;  // one after the other, too
  const double most_lead = LeastLead() + kLeadSeconds;
  std::vector<std::pair<Ticket, Entry*>> due;
  for (auto& [ticket, entry] : entries_) {
    if (entry.job.deadline == absl::InfiniteFuture() || !entry.CanMeetDeadline(now)) continue;
    if (entry.urgent || leads_.at(entry.job.tenant) <= most_lead) due.emplace_back(ticket, &entry);
  }
  std::sort(due.begin(), due.end(), [](const auto& left, const auto& right) {
    const RunOrder::Job &one = left.second->job, &other = right.second->job;
    return std::tie(one.priority, one.deadline) > std::tie(other.priority, other.deadline);
  });
  absl::Time latest = absl::InfiniteFuture();
  int priority = kTopPriority + 1;
  OneOfAPass one_of_a_pass;
  for (const auto& [ticket, entry] : due) {
    if (std::exchange(priority, entry->job.priority) != priority) latest = absl::InfiniteFuture();
    const absl::Duration rest = absl::Seconds(kRestToSpare * entry->Rest(now));
    const absl::Time end = one_of_a_pass(*entry) ? std::min(latest, entry->job.deadline) : latest + rest;
    latest = std::min(end, entry->job.deadline) - rest;
    entry->urgent = entry->urgent || now >= latest;
  }
}

double RunOrder::LeadOfNew(const std::string& tenant) const {
  const auto lead = leads_.find(tenant);
  return lead == leads_.end() ? LeastLead() : std::max(lead->second, LeastLead());
}

double RunOrder::LeastLead() const {
  double least = std::numeric_limits<double>::infinity();
  for (const auto& [ticket, entry] : entries_) {
    if (entry.state != State::kUploading) least = std::min(least, leads_.at(entry.job.tenant));
  }
  return std::isfinite(least) ? least : 0;
}

void RunOrder::Settle(absl::Time now) {
  if (computing_.empty()) return;
  const double passed_seconds = absl::ToDoubleSeconds(now - entries_.at(computing_.front()).since);
  const bool elder_computes = entries_.contains(elder_.ticket) && entries_.at(elder_.ticket).computes;
  elder_.credit_seconds += elder_computes ? passed_seconds : -passed_seconds;
  double added_seconds = 0;
  for (const Ticket ticket : computing_) added_seconds += entries_.at(ticket).job.pack.added_seconds;
  for (const Ticket ticket : computing_) {
    Entry& entry = entries_.at(ticket);
    double seconds = absl::ToDoubleSeconds(now - entry.since) / entry.submeshes;  // of all devices
    if (entry.submeshes == 1 && computing_.size() > 1) {
      seconds *= added_seconds > 0 ? entry.job.pack.added_seconds / added_seconds
                                   : 1 / static_cast<double>(computing_.size());
    }
    leads_[entry.job.tenant] += seconds / entry.job.weight;
    recent_.Add(entry.job.priority, entry.job.work_seconds, seconds, now);
    entry.computed += now - entry.since;
    entry.since = now;
  }
}

// Forgets tenants that have nothing here and no lead over the others, or all that have nothing here, where
// they are too many. Where nothing here is complete, the ranks are idle: all leads become 0.
void RunOrder::ForgetTenants() {
  std::set<std::string_view> here;
  bool idle = true;
  for (const auto& [ticket, entry] : entries_) {
    here.insert(entry.job.tenant);
    idle = idle && entry.state == State::kUploading;
  }
  if (idle) {
    for (auto& [tenant, lead] : leads_) lead = 0;
  }
  const double least = LeastLead();
  const bool too_many = leads_.size() > kMostTenants + here.size();
  std::erase_if(leads_, [&](const auto& lead) {
    return !here.contains(lead.first) && (too_many || lead.second <= least);
  });
}

}  // namespace meshfill
