#include "server/api/gang_choice.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace meshfill {
namespace {

constexpr double kLongestBeside = 2;  // longest prefill on a sub-mesh beside the first, by its seconds
constexpr double kLeastGain = 0.95;   // sub-meshes are taken where the mean end is before that of one
constexpr size_t kMostWeighed = 64;   // prefills that this mean is over

}  // namespace

Gang GangChoice::FirstThatMay(std::span<const RunTicket> ranked) const {
  Gang gang;
  int may_begin = may_begin_;
  double longest_seconds = 0;
  bool looks_at_gain = false;
  for (size_t i = 0; i < ranked.size(); ++i) {
    const RunEntry& entry = entries_.at(ranked[i]);
    if (entry.state == RunState::kUploading || entry.leaving) continue;
    if (entry.put_back) may_begin = 0;  // nothing new begins after who waits for memory
    const bool lives = entry.state == RunState::kLive;
    if (!lives && may_begin == 0) continue;
    if (gang.tickets.empty()) {
      gang.submeshes = lives ? entry.submeshes : BestSubmeshes(ranked.subspan(i));
      longest_seconds = kLongestBeside * entry.job.SecondsOn(gang.submeshes);
      looks_at_gain = lives;
    } else if (lives ? entry.submeshes != gang.submeshes || IsAt(entry.place, gang)
                     : entry.job.SecondsOn(gang.submeshes) > longest_seconds) {
      continue;
    } else if (!lives && std::exchange(looks_at_gain, false) &&
               !GainBeside(ranked, gang.submeshes, longest_seconds)) {
      may_begin = 0;
      continue;
    }
    gang.tickets.push_back(ranked[i]);
    if (!lives) --may_begin;
    if (std::ssize(gang.tickets) == gang.submeshes) break;
  }
  return gang;
}

bool GangChoice::IsAt(uint64_t place, const Gang& gang) const {
  return place != 0 && std::any_of(gang.tickets.begin(), gang.tickets.end(),
                                   [&](RunTicket ticket) { return entries_.at(ticket).place == place; });
}

int GangChoice::BestSubmeshes(std::span<const RunTicket> ranked) const {
  const RunJob& first = entries_.at(ranked.front()).job;
  const auto computes_on = [this](int submeshes) {
    return std::count_if(computing_.begin(), computing_.end(),
                         [&](RunTicket ticket) { return entries_.at(ticket).submeshes == submeshes; });
  };
  int best = 1;
  double best_ratio = kLeastGain;
  for (const auto& [submeshes, seconds] : first.submeshes) {
    const auto at_once = std::min<std::ptrdiff_t>(submeshes, may_begin_ + computes_on(submeshes));
    std::vector<double> free_at(static_cast<size_t>(at_once), 0);
    double in_turn = 0, ends_in_turn = 0, ends_beside = 0;
    size_t weighed = 0;
    for (const RunTicket ticket : ranked) {
      const RunEntry& entry = entries_.at(ticket);
      const bool lives = entry.state == RunState::kLive;
      if (entry.state == RunState::kUploading || entry.leaving || weighed == kMostWeighed) continue;
      if (lives && !(entry.computes && entry.submeshes == submeshes)) continue;
      const double on_submesh = lives ? entry.Rest(now_) : entry.job.SecondsOn(submeshes);
      if (!lives && on_submesh > kLongestBeside * seconds) continue;
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
    const double on_submesh = entry.job.SecondsOn(submeshes);
    if (entry.state != RunState::kWaiting || on_submesh > longest_seconds) continue;
    const auto next = std::min_element(free_at.begin(), free_at.end());
    *next += on_submesh;
    ends_beside += *next;
    in_turn += entry.job.work_seconds;
    ends_in_turn += in_turn;
  }
  return ends_beside < ends_in_turn;
}

}  // namespace meshfill
