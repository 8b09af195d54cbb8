#include "server/queue/turn_rank.h"

#include <algorithm>
#include <tuple>

namespace meshfill {
namespace {

using Ranks = std::vector<TurnRank>;

constexpr double kSlackOfWork = 0.25;        // over the credit: its rest is predicted anew after each layer
constexpr double kLeastSlackSeconds = 1e-6;  // times are rounded

// Of `ranks`, which are in order but for their ages. Their end: none is aged.
Ranks::iterator FindElder(Ranks& ranks) {
  const auto oldest = [&ranks](auto&& is_one) {
    auto found = ranks.end();
    for (auto rank = ranks.begin(); rank != ranks.end(); ++rank) {
      if (rank->aged && is_one(*rank) && (found == ranks.end() || rank->IsOlder(*found))) found = rank;
    }
    return found;
  };
  if (oldest([](const TurnRank&) { return true; }) == ranks.end()) return ranks.end();
  const auto put_back = oldest([](const TurnRank& rank) { return rank.put_back; });
  const auto elder = oldest([&](const TurnRank& rank) {
    return rank.may_compute && (rank.lives || put_back == ranks.end() || rank.IsOlder(*put_back));
  });
  if (elder != ranks.end()) return elder;
  return std::find_if(ranks.begin(), ranks.end(), [](const TurnRank& rank) { return rank.lives; });
}

}  // namespace

bool TurnRank::Before(const TurnRank& other) const {
  if (stays != other.stays) return stays;
  if (priority != other.priority) return priority > other.priority;
  if (urgent != other.urgent) return urgent;
  if (urgent && deadline != other.deadline) return deadline < other.deadline;
  if (weighted_rest != other.weighted_rest) return weighted_rest < other.weighted_rest;
  return IsOlder(other);
}

bool TurnRank::IsOlder(const TurnRank& other) const {
  return std::tie(complete_at, ticket) < std::tie(other.complete_at, other.ticket);
}

Ranking RankByTurns(Ranks ranks, Elder& elder) {
  std::sort(ranks.begin(), ranks.end(),
            [](const TurnRank& left, const TurnRank& right) { return left.Before(right); });
  Ranking ranking;
  const auto served = FindElder(ranks);
  const RunTicket ticket = served == ranks.end() ? 0 : served->ticket;
  const bool is_new = elder.ticket != ticket;  // what computes did not go before it
  if (is_new) elder = {.ticket = ticket};
  if (ticket != 0) {
    served->aged = true;
    const double credit = elder.credit_seconds;
    double least_rest = std::numeric_limits<double>::infinity();  // of those that the credit holds back
    const auto ahead_end = std::stable_partition(ranks.begin(), served, [&](const TurnRank& rank) {
      if (!rank.may_compute) return false;
      const double slack = rank.computes && !is_new ? kSlackOfWork * rank.work_seconds : 0;
      if (rank.rest_seconds <= credit + std::max(kLeastSlackSeconds, slack)) return true;
      least_rest = std::min(least_rest, rank.rest_seconds);
      return false;
    });
    ranking.holds_seconds = ahead_end == ranks.begin() ? least_rest - credit : ranks.front().rest_seconds;
    const auto aged_end =
        std::stable_partition(ahead_end, ranks.end(), [](const TurnRank& rank) { return rank.aged; });
    std::sort(ahead_end, aged_end,
              [](const TurnRank& left, const TurnRank& right) { return left.IsOlder(right); });
  }
  ranking.tickets.reserve(ranks.size());
  for (const TurnRank& rank : ranks) ranking.tickets.push_back(rank.ticket);
  return ranking;
}

}  // namespace meshfill
