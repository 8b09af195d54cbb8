// Who computes at the same time, for orders that are given. Orders as they come: run_order_*_test.
#include "server/queue/gang_choice.h"

#include <gtest/gtest.h>

#include <vector>

namespace meshfill {
namespace {

// Who shares a pass, of prompts that take so long, in that order: a deadline or a tenant's lead may put a
// long one before shorter ones.
std::vector<RunTicket> SharersOf(const std::vector<double>& work_seconds) {
  const absl::Time now = absl::UnixEpoch();
  GangChoice::Entries entries;
  std::vector<RunTicket> ranked;
  for (const double seconds : work_seconds) {
    ranked.push_back(ranked.size() + 1);
    RunEntry& entry = entries[ranked.back()];
    entry.job = {.work_seconds = seconds, .pack = {.tokens = 1, .least_seconds = seconds}};
    entry.state = RunState::kWaiting;
    entry.complete_at = now;
  }
  const std::vector<RunTicket> nobody;
  const GangChoice choice(
      entries, nobody,
      {.places = FreePlaces(8), .max_age = absl::Hours(1), .pack = {.ranks = 1, .rank_tokens = 64}}, now);
  return choice.FirstThatMay(ranked).tickets;
}

TEST(GangChoice, NoneInAPassIsMoreThanTwiceAsLongAsAnother) {
  EXPECT_EQ(SharersOf({5.0, 1.0, 2.5, 2.4, 5.0}), (std::vector<RunTicket>{1, 3, 5}));
  EXPECT_EQ(SharersOf({2.0, 1.0, 4.0, 1.5}), (std::vector<RunTicket>{1, 2, 4})) << "twice the first one";
  EXPECT_EQ(SharersOf({2.0, 4.0, 1.0, 3.0}), (std::vector<RunTicket>{1, 2, 4})) << "half of it";
}

TEST(GangChoice, TheLastPlaceIsForWhatTakesHalfOfTheShortestRest) {
  for (const int free : {0, 1, 2}) {
    const absl::Time now = absl::UnixEpoch();
    GangChoice::Entries entries;
    const std::vector<RunTicket> ranked = {1, 2, 3};
    for (const RunTicket ticket : ranked) {
      RunEntry& entry = entries[ticket];
      entry.job.work_seconds = ticket == 1 ? 5.1 : 4.9;
      entry.state = RunState::kWaiting;
      entry.complete_at = now;
    }
    GangChoice::Limits limits = {.places = FreePlaces(free), .max_age = absl::Hours(1)};
    for (const double rest : {20.0, 10.0, 30.0}) limits.places.CountRest(rest);
    const std::vector<RunTicket> nobody;
    const Gang gang = GangChoice(entries, nobody, limits, now).FirstThatMay(ranked);
    EXPECT_EQ(gang.tickets, free == 0   ? std::vector<RunTicket>{}
                            : free == 1 ? std::vector<RunTicket>{2}
                                        : std::vector<RunTicket>{1});
  }
}

// A pass that several share takes the last place for no longer than one prompt may.
TEST(GangChoice, ALongPassTakesNotTheLastPlace) {
  for (const double shortest_rest : {2.5, 10.0}) {
    const absl::Time now = absl::UnixEpoch();
    GangChoice::Entries entries;
    const std::vector<RunTicket> ranked = {1, 2, 3, 4};
    for (const RunTicket ticket : ranked) {
      RunEntry& entry = entries[ticket];
      entry.job = {.work_seconds = 1, .pack = {.tokens = 1, .least_seconds = 1.5}};
      entry.state = RunState::kWaiting;
      entry.complete_at = now;
    }
    GangChoice::Limits limits = {
        .places = FreePlaces(1), .max_age = absl::Hours(1), .pack = {.ranks = 1, .rank_tokens = 64}};
    limits.places.CountRest(shortest_rest);
    const std::vector<RunTicket> nobody;
    const Gang gang = GangChoice(entries, nobody, limits, now).FirstThatMay(ranked);
    EXPECT_EQ(gang.tickets.size(), shortest_rest == 10 ? 4u : 1u);
  }
}

}  // namespace
}  // namespace meshfill
