#include "server/queue/gang_choice.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <utility>

namespace meshfill {
namespace {

constexpr double kLongestBeside = 2;  // longest prefill beside the first, or beside one that shares its pass
// Sub-meshes and packs are taken where the mean end is before so much of that in turn.
constexpr double kLeastGain = 0.95;
constexpr size_t kMostWeighed = 64;                 // prefills that this mean is over
constexpr size_t kMostLookedAt = 4 * kMostWeighed;  // of the order, for those that could share a pass

}  // namespace

Gang GangChoice::FirstThatMay(std::span<const RunTicket> ranked) const {
  Gang gang;
  FreePlaces places = limits_.places;
  double longest_seconds = 0;
  bool looks_at_gain = false;
  for (size_t i = 0; i < ranked.size(); ++i) {
    const RunEntry& entry = entries_.at(ranked[i]);
    if (entry.state == RunState::kUploading || entry.leaving) continue;
    if (entry.put_back) places.KeepForShort(entry.job.work_seconds);
    const bool lives = entry.state == RunState::kLive;
    if (!lives && !places.HasOneFor(entry.job.work_seconds)) continue;
    if (gang.tickets.empty()) {
      if (entry.pack != 0) return {.tickets = MembersOf(entry.pack)};
      gang.submeshes = lives ? entry.submeshes : BestSubmeshes(ranked.subspan(i), places);
      if (!lives && limits_.pack.ranks > 0) {
        Gang pack = BestPack(ranked.subspan(i), gang.submeshes, places);
        if (!pack.tickets.empty() && places.HasOneFor(*pack.pass_seconds)) return pack;
      }
      longest_seconds = kLongestBeside * entry.job.SecondsOn(gang.submeshes);
      looks_at_gain = lives;
    } else if (lives ? entry.submeshes != gang.submeshes || IsAt(entry.place, gang)
                     : !MayBeBeside(entry, gang.submeshes, longest_seconds)) {
      continue;
    } else if (!lives && std::exchange(looks_at_gain, false) &&
               !GainBeside(ranked, gang.submeshes, longest_seconds)) {
      places.Close();
      continue;
    }
    gang.tickets.push_back(ranked[i]);
    if (!lives) places.Take(entry.job.work_seconds);
    if (std::ssize(gang.tickets) == gang.submeshes) break;
  }
  return gang;
}

bool GangChoice::IsAt(uint64_t place, const Gang& gang) const {
  return place != 0 && std::any_of(gang.tickets.begin(), gang.tickets.end(),
                                   [&](RunTicket ticket) { return entries_.at(ticket).place == place; });
}

int GangChoice::BestSubmeshes(std::span<const RunTicket> ranked, const FreePlaces& places) const {
  const RunEntry& first = entries_.at(ranked.front());
  const auto computes_on = [this](int submeshes) {
    return std::count_if(computing_.begin(), computing_.end(),
                         [&](RunTicket ticket) { return entries_.at(ticket).submeshes == submeshes; });
  };
  int best = 1;
  double best_ratio = kLeastGain;
  for (const auto& [submeshes, seconds] : first.job.submeshes) {
    if (!KeepsDeadline(first, seconds)) continue;
    const auto at_once = std::min<std::ptrdiff_t>(submeshes, places.alike() + computes_on(submeshes));
    std::vector<double> free_at(static_cast<size_t>(at_once), 0);
    double in_turn = 0, ends_in_turn = 0, ends_beside = 0;
    size_t weighed = 0;
    for (const RunTicket ticket : ranked) {
      const RunEntry& entry = entries_.at(ticket);
      const bool lives = entry.state == RunState::kLive;
      if (entry.state == RunState::kUploading || entry.leaving || weighed == kMostWeighed) continue;
      if (lives && !(entry.computes && entry.submeshes == submeshes)) continue;
      const double on_submesh = lives ? entry.Rest(now_) : entry.job.SecondsOn(submeshes);
      if (!lives && !MayBeBeside(entry, submeshes, kLongestBeside * seconds)) continue;
      const auto next = std::min_element(free_at.begin(), free_at.end());
      *next += on_submesh;
      ends_beside += *next;
      if (!lives) in_turn += entry.job.work_seconds;
      ends_in_turn += lives ? in_turn + on_submesh : in_turn;  // what lives goes on after who takes all
      ++weighed;
    }
    if (ends_beside >= best_ratio * ends_in_turn) continue;
    best_ratio = ends_beside / ends_in_turn;
    best = submeshes;
  }
  return best;
}

bool GangChoice::GainBeside(std::span<const RunTicket> ranked, int submeshes, double longest_seconds) const {
  std::vector<double> free_at;
  for (const RunTicket ticket : ranked) {
    const RunEntry& entry = entries_.at(ticket);
    const bool on_one = entry.state == RunState::kLive && !entry.leaving && entry.submeshes == submeshes;
    if (on_one && std::ssize(free_at) < submeshes) free_at.push_back(entry.Rest(now_));
  }
  double in_turn = *std::max_element(free_at.begin(), free_at.end());
  free_at.resize(static_cast<size_t>(submeshes), 0);
  double ends_in_turn = 0, ends_beside = 0;
  for (const RunTicket ticket : ranked) {
    const RunEntry& entry = entries_.at(ticket);
    if (entry.state != RunState::kWaiting || !MayBeBeside(entry, submeshes, longest_seconds)) continue;
    const auto next = std::min_element(free_at.begin(), free_at.end());
    *next += entry.job.SecondsOn(submeshes);
    ends_beside += *next;
    in_turn += entry.job.work_seconds;
    ends_in_turn += in_turn;
  }
  return ends_beside < ends_in_turn;
}

std::vector<RunTicket> GangChoice::MembersOf(uint64_t pack) const {
  std::vector<RunTicket> members;
  for (const auto& [ticket, entry] : entries_) {
    if (entry.pack == pack && !entry.leaving) members.push_back(ticket);
  }
  return members;
}

// The size of the pack is weighed over all that could share it. Where many wait, a large one lets the first
// end later than a small one would, and all the others earlier.
Gang GangChoice::BestPack(std::span<const RunTicket> ranked, int submeshes, const FreePlaces& places) const {
  const std::vector<Sharer> sharers = Sharers(ranked);
  if (sharers.size() < 2) return {};
  Passes best = InPasses(sharers, 1);
  best.ends_seconds *= kLeastGain;
  for (size_t most = 2;; most = std::min(2 * most, sharers.size())) {
    const Passes passes = InPasses(sharers, most);
    const bool earlier = passes.prompts > 1 && passes.ends_seconds < best.ends_seconds;
    if (earlier && KeepDeadlines(std::span(sharers).first(passes.prompts), passes.seconds)) best = passes;
    if (most == sharers.size()) break;
  }
  if (best.prompts < 2) return {};
  if (submeshes > 1 && EndsBeside(sharers, submeshes, places) <= EndsAround(best, submeshes)) return {};
  Gang pack{.pass_seconds = best.seconds};
  for (const Sharer& sharer : std::span(sharers).first(best.prompts)) pack.tickets.push_back(sharer->first);
  return pack;
}

std::vector<GangChoice::Sharer> GangChoice::Sharers(std::span<const RunTicket> ranked) const {
  const RunEntry& first = entries_.at(ranked.front());
  std::vector<Sharer> sharers;
  if (!MayShare(first)) return sharers;
  double shortest = first.job.work_seconds, longest = shortest;
  for (const RunTicket ticket : ranked.first(std::min(ranked.size(), kMostLookedAt))) {
    const Sharer sharer = entries_.find(ticket);
    const RunEntry& entry = sharer->second;
    if (entry.put_back || sharers.size() == kMostWeighed) break;
    if (!MayShare(entry) || entry.job.priority != first.job.priority) continue;
    const double work = entry.job.work_seconds;
    if (std::max(longest, work) > kLongestBeside * std::min(shortest, work)) continue;
    shortest = std::min(shortest, work);
    longest = std::max(longest, work);
    sharers.push_back(sharer);
  }
  return sharers;
}

// What is old waits for nobody's tokens but its own.
bool GangChoice::MayShare(const RunEntry& entry) const {
  const PackShare& share = entry.job.pack;
  return entry.state == RunState::kWaiting && !entry.put_back && !entry.apart && share.tokens > 0 &&
         share.tokens <= limits_.pack.rank_tokens && share.bytes <= limits_.pack.rank_bytes &&
         !entry.IsOlder(limits_.max_age, now_);
}

// A pass ends with the first that finds no room: nobody overtakes it. Where a pass would take longer than its
// prompts in turn, they run in turn.
GangChoice::Passes GangChoice::InPasses(std::span<const Sharer> sharers, size_t most_prompts) const {
  Passes passes;
  for (size_t begin = 0; begin < sharers.size();) {
    Pack pack(limits_.pack);
    double in_turn = 0;
    size_t end = begin;
    for (; end < sharers.size() && end - begin < most_prompts; ++end) {
      const RunJob& job = sharers[end]->second.job;
      if (!pack.Add(job.pack).has_value()) break;
      in_turn += job.work_seconds;
    }
    const bool share = end - begin > 1 && pack.seconds() <= in_turn;
    if (share && begin == 0) {
      passes.prompts = end;
      passes.seconds = pack.seconds();
    }
    if (share) passes.all_seconds += pack.seconds();
    for (; begin < end; ++begin) {
      if (!share) passes.all_seconds += sharers[begin]->second.job.work_seconds;
      passes.ends_seconds += passes.all_seconds;
    }
  }
  return passes;
}

double GangChoice::EndsBeside(std::span<const Sharer> sharers, int submeshes,
                              const FreePlaces& places) const {
  std::vector<double> free_at;
  for (const RunTicket ticket : computing_) {
    const RunEntry& entry = entries_.at(ticket);
    if (entry.submeshes == submeshes) free_at.push_back(entry.Rest(now_));
  }
  double ends = std::accumulate(free_at.begin(), free_at.end(), 0.0);
  const size_t at_once = free_at.size() + static_cast<size_t>(places.alike());
  free_at.resize(std::min(at_once, static_cast<size_t>(submeshes)), 0);
  double in_turn = 0, ends_in_turn = 0;  // of those that run on all devices alone
  size_t alone = 0;
  for (const Sharer& sharer : sharers) {
    const RunJob& job = sharer->second.job;
    const double on_submesh = job.SecondsOn(submeshes);
    if (std::isinf(on_submesh)) {
      in_turn += job.work_seconds;
      ends_in_turn += in_turn;
      ++alone;
      continue;
    }
    const auto next = std::min_element(free_at.begin(), free_at.end());
    *next += on_submesh;
    ends += *next;
  }
  return ends + ends_in_turn + static_cast<double>(alone) * *std::max_element(free_at.begin(), free_at.end());
}

double GangChoice::EndsAround(const Passes& passes, int submeshes) const {
  double ends = passes.ends_seconds;
  for (const RunTicket ticket : computing_) {
    const RunEntry& entry = entries_.at(ticket);
    if (entry.submeshes == submeshes) ends += passes.all_seconds + entry.Rest(now_);
  }
  return ends;
}

bool GangChoice::MayBeBeside(const RunEntry& entry, int submeshes, double longest_seconds) const {
  const double seconds = entry.job.SecondsOn(submeshes);
  return seconds <= longest_seconds && KeepsDeadline(entry, seconds);
}

bool GangChoice::KeepDeadlines(std::span<const Sharer> sharers, double pass_seconds) const {
  return std::all_of(sharers.begin(), sharers.end(),
                     [&](const Sharer& sharer) { return KeepsDeadline(sharer->second, pass_seconds); });
}

// With time to spare, or it takes no longer than by itself on all devices.
bool GangChoice::KeepsDeadline(const RunEntry& entry, double seconds) const {
  const absl::Time end = now_ + absl::Seconds(kRestToSpare * seconds);
  return end <= entry.job.deadline || seconds <= entry.job.work_seconds || !entry.CanMeetDeadline(now_);
}

}  // namespace meshfill
