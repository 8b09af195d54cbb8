// The order of prefills that may share passes, in virtual time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/queue/run_order.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

using Ticket = RunOrder::Ticket;
using Tickets = std::vector<Ticket>;

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr PackRoom kRoom = {.ranks = 4, .rank_tokens = 2048};
constexpr int64_t kContext = 1 << 20;
constexpr double kStreamSeconds = 0.1;  // weights stream past

absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

// A prompt of so many tokens, each of which takes a rank so long. Alone in a pass all ranks share it, at a
// loss of a tenth.
RunOrder::Job JobOf(int64_t tokens, double token_seconds) {
  const double added = static_cast<double>(tokens) * token_seconds;
  return {.work_seconds = std::max(kStreamSeconds, 0.01 + 1.1 * added / kRoom.ranks),
          .pack = {.tokens = tokens <= kRoom.rank_tokens ? tokens : 0,
                   .least_seconds = kStreamSeconds,
                   .pass_seconds = 0.01,
                   .added_seconds = added}};
}

RunOrder::Job ShortJob(double work_seconds = kStreamSeconds) {
  RunOrder::Job job = JobOf(100, 1e-5);
  job.work_seconds = work_seconds;
  return job;
}

// From memory-bound prompts to those that compute for most of a pass, some too long to share one.
RunOrder::Job RandomJob(std::mt19937_64& random) {
  return JobOf(Draw(random, 10, 3000), std::pow(10, Draw(random, -60, -35) / 10.0));
}

// A pool that does what the order says, and looks at what it says.
class Order {
 public:
  explicit Order(int most_live = 8, const PackRoom& room = kRoom, double max_age = 1e6)
      : most_live_(most_live),
        order_({.max_age = absl::Seconds(max_age), .most_live = most_live, .pack = room}) {}

  Ticket Add(const RunOrder::Job& job, double now) {
    const Ticket ticket = ++last_;
    order_.Announce(ticket, job, At(now));
    order_.Complete(ticket, At(now));
    jobs_[ticket] = job;
    comes_[ticket] = now;
    rest_[ticket] = 1;
    return ticket;
  }

  const Tickets& Choose(double now) {
    order_.Choose(At(now));
    const Tickets& computing = order_.computing();
    if (computing.empty()) return computing;
    Tickets begin;
    for (const Ticket ticket : computing) {
      if (!pass_of_.contains(ticket)) begin.push_back(ticket);
    }
    if (begin.size() == computing.size()) {
      Begin(computing, now);
    } else {
      EXPECT_TRUE(begin.empty()) << "a prompt joins a pass that has begun";
    }
    for (const Ticket ticket : computing) {
      EXPECT_EQ(pass_of_.at(ticket), pass_of_.at(computing.front())) << "two passes at once on all devices";
    }
    const auto& members = passes_.at(pass_of_.at(computing.front())).members;
    EXPECT_EQ(computing.size(), members.size()) << "some of a pass stand still";
    std::set<int> live;
    for (const auto& [ticket, rest] : rest_) {
      if (pass_of_.contains(ticket)) live.insert(pass_of_.at(ticket));
    }
    EXPECT_LE(std::ssize(live), most_live_);
    EXPECT_EQ(order_.live(), std::ssize(live));
    return computing;
  }

  // Computes until `until` or the end.
  void Run(double& now, double until) {
    while (now < until && !rest_.empty()) {
      const Tickets computing = Choose(now);
      ASSERT_FALSE(computing.empty()) << "nobody computes, though somebody waits";
      const double seconds = passes_.at(pass_of_.at(computing.front())).seconds;
      const double step = std::min({until - now, 0.05, rest_.at(computing.front()) * seconds});
      now += step;
      for (const Ticket ticket : computing) {
        double& rest = rest_.at(ticket);
        rest -= step / seconds;
        if (rest <= 1e-9) End(ticket, now);
      }
    }
  }

  void End(Ticket ticket, double now) {
    rest_.erase(ticket);
    passes_.at(pass_of_.at(ticket)).members.erase(ticket);
    ends_[ticket] = now;
    order_.Remove(ticket, At(now));
  }

  int PackOf(Ticket ticket) const { return passes_.at(pass_of_.at(ticket)).prompts; }
  double MeanEnd() const {
    double sum = 0;
    for (const auto& [ticket, end] : ends_) sum += end - comes_.at(ticket);
    return sum / static_cast<double>(ends_.size());
  }

  struct Pass {
    std::set<Ticket> members;  // those that have not ended
    int prompts = 0;           // that began
    double seconds = 0;
  };

  const int most_live_;
  RunOrder order_;
  std::map<Ticket, RunOrder::Job> jobs_;
  std::map<Ticket, double> comes_, begins_, ends_;
  std::map<Ticket, double> rest_;  // share of the pass
  std::map<Ticket, int> pass_of_;
  std::vector<Pass> passes_;
  Ticket last_ = 0;

 private:
  void Begin(const Tickets& tickets, double now) {
    Pass pass{.members = {tickets.begin(), tickets.end()}, .prompts = static_cast<int>(tickets.size())};
    double shortest = kInfinite, longest = 0, in_turn = 0;
    Pack pack(kRoom);
    for (const Ticket ticket : tickets) {
      const RunOrder::Job& job = jobs_.at(ticket);
      if (tickets.size() > 1) {
        EXPECT_TRUE(pack.Add(job.pack).has_value()) << "no room";
        EXPECT_EQ(job.priority, jobs_.at(tickets.front()).priority);
      }
      shortest = std::min(shortest, job.work_seconds);
      longest = std::max(longest, job.work_seconds);
      in_turn += job.work_seconds;
      pass_of_[ticket] = static_cast<int>(passes_.size());
      begins_[ticket] = now;
    }
    EXPECT_LE(longest, 2 * shortest) << "a short prompt shares a pass with a long one";
    pass.seconds = tickets.size() > 1 ? pack.seconds() : in_turn;
    EXPECT_LE(pass.seconds, in_turn) << "a pass takes longer than its prompts in turn";
    EXPECT_NEAR(order_.WholeSeconds(tickets.front()), pass.seconds, 1e-9) << "dealt in another order";
    passes_.push_back(pass);
  }
};

TEST(RunOrderPacks, ALoneOneSharesWithNobody) {
  Order order;
  order.Add(ShortJob(), 0);
  double now = 0;
  order.Run(now, 10);
  EXPECT_EQ(order.PackOf(1), 1);
  EXPECT_NEAR(now, kStreamSeconds, 1e-9);
}

TEST(RunOrderPacks, ShortOnesThatWaitAtTheSameTimeShareOnePass) {
  Order order(/*most_live=*/1);
  for (int i = 0; i < 12; ++i) order.Add(ShortJob(), 0);
  double now = 0;
  order.Run(now, 10);
  for (Ticket ticket = 1; ticket <= 12; ++ticket) EXPECT_EQ(order.PackOf(ticket), 12);
  EXPECT_NEAR(now, kStreamSeconds, 1e-9) << "as long as one alone";
}

TEST(RunOrderPacks, APassHoldsWhatItsRanksHold) {
  Order order;
  RunOrder::Job half = ShortJob();
  half.pack.tokens = kRoom.rank_tokens / 2;
  for (int i = 0; i < 20; ++i) order.Add(half, 0);
  double now = 0;
  order.Run(now, 10);
  for (Ticket ticket = 1; ticket <= 16; ++ticket) EXPECT_EQ(order.PackOf(ticket), 8);
  for (Ticket ticket = 17; ticket <= 20; ++ticket) EXPECT_EQ(order.PackOf(ticket), 4);
}

// Of those that find no room none is left out for a smaller one after it.
TEST(RunOrderPacks, NobodyOvertakesTheFirstThatFindsNoRoom) {
  Order order;
  RunOrder::Job large = ShortJob(), small = ShortJob();
  large.pack.tokens = kRoom.rank_tokens - 50;
  for (int i = 0; i < 4; ++i) order.Add(large, 0);
  const Ticket no_room = order.Add(large, 0);
  const Ticket after = order.Add(small, 0);
  const Tickets begin = order.Choose(0);
  EXPECT_EQ(begin, (Tickets{1, 2, 3, 4}));
  double now = 0;
  order.Run(now, 10);
  EXPECT_EQ(order.begins_.at(no_room), order.begins_.at(after));
}

// A pass takes 3 s and another 1 s for each prompt: of few, each but the first waits longer in it than it
// gains, of many nobody waits for the others' weights.
TEST(RunOrderPacks, TheMoreWaitTheLargerThePack) {
  const auto first_pack = [](int prompts) {
    Order order(8, {.ranks = 1, .rank_tokens = 1 << 20});
    const RunOrder::Job job = {.work_seconds = 2.2,
                               .pack = {.tokens = 1, .pass_seconds = 1.2, .added_seconds = 1}};
    for (int i = 0; i < prompts; ++i) order.Add(job, 0);
    order.order_.Choose(At(0));
    return std::ssize(order.order_.computing());
  };
  EXPECT_EQ(first_pack(2), 1) << "3.2 s for both, or 2.2 s and 4.4 s: too little is gained";
  EXPECT_GT(first_pack(16), 2);
  EXPECT_LT(first_pack(16), 16);
  EXPECT_GE(first_pack(64), first_pack(16));
}

// Prompts that compute much gain little, and the first would end late.
TEST(RunOrderPacks, WhatGainsNothingRunsInTurn) {
  Order order;
  const RunOrder::Job job = JobOf(2000, 1e-3);
  for (int i = 0; i < 4; ++i) order.Add(job, 0);
  double now = 0;
  order.Run(now, 100);
  for (Ticket ticket = 1; ticket <= 4; ++ticket) {
    EXPECT_EQ(order.PackOf(ticket), 1);
    EXPECT_NEAR(order.ends_.at(ticket), static_cast<double>(ticket) * job.work_seconds, 1e-6);
  }
}

TEST(RunOrderPacks, AMuchLongerOneSharesNoPassWithShortOnes) {
  Order order;
  for (const double work : {0.1, 0.12, 0.3, 0.19, 0.21, 0.5}) order.Add(ShortJob(work), 0);
  double now = 0;
  order.Run(now, 10);
  EXPECT_EQ(order.begins_.at(1), order.begins_.at(4));
  EXPECT_LT(order.begins_.at(1), order.begins_.at(5)) << "more than twice as long as the first";
  EXPECT_EQ(order.begins_.at(5), order.begins_.at(3));
  EXPECT_LT(order.begins_.at(5), order.begins_.at(6));
}

TEST(RunOrderPacks, ClassesShareNoPass) {
  Order order;
  RunOrder::Job high = ShortJob();
  high.priority = 1;
  for (int i = 0; i < 4; ++i) {
    order.Add(ShortJob(), 0);
    order.Add(high, 0);
  }
  double now = 0;
  order.Run(now, 10);
  for (Ticket ticket = 1; ticket <= 8; ++ticket) {
    EXPECT_EQ(order.PackOf(ticket), 4);
    EXPECT_NEAR(order.begins_.at(ticket), ticket % 2 == 0 ? 0 : kStreamSeconds, 1e-9);
  }
}

TEST(RunOrderPacks, WhatIsOldRunsByItself) {
  Order order(8, kRoom, /*max_age=*/5);
  RunOrder::Job blocker = {.priority = 2, .work_seconds = 6};
  order.Add(blocker, 0);
  for (int i = 0; i < 3; ++i) order.Add(ShortJob(), 0);
  double now = 0;
  order.Run(now, 2);
  for (int i = 0; i < 3; ++i) order.Add(ShortJob(), now);
  order.Run(now, 100);
  for (Ticket ticket = 2; ticket <= 4; ++ticket) EXPECT_EQ(order.PackOf(ticket), 1) << ticket;
  for (Ticket ticket = 5; ticket <= 7; ++ticket) EXPECT_EQ(order.PackOf(ticket), 3) << ticket;
}

TEST(RunOrderPacks, WhatIsUrgentSharesAPassThatIsInTime) {
  for (const bool in_time : {true, false}) {
    Order order;
    RunOrder::Job urgent = ShortJob();
    urgent.deadline = At(0.12);
    if (!in_time) urgent.pack.pass_seconds = 0.15;
    for (int i = 0; i < 4; ++i) order.Add(ShortJob(), 0);
    const Ticket last = order.Add(urgent, 0);
    double now = 0;
    order.Run(now, 10);
    EXPECT_EQ(order.PackOf(last), in_time ? 5 : 1);
    EXPECT_EQ(order.begins_.at(last), 0);
    EXPECT_LE(order.ends_.at(last), 0.12);
    EXPECT_EQ(order.PackOf(1), in_time ? 5 : 4);
  }
}

TEST(RunOrderPacks, ALostDeadlineKeepsNobodyFromSharing) {
  Order order;
  RunOrder::Job lost = ShortJob();
  lost.deadline = At(0.01);
  lost.pack.pass_seconds = 0.11;  // longer than it takes alone
  for (int i = 0; i < 4; ++i) order.Add(ShortJob(), 0);
  order.Add(lost, 0);
  double now = 0;
  order.Run(now, 10);
  for (Ticket ticket = 1; ticket <= 5; ++ticket) EXPECT_EQ(order.PackOf(ticket), 5);
}

// Three times what could be computed in turn: all of it is urgent by that count, and in time together.
TEST(RunOrderPacks, AFloodOfDeadlinesIsMetByPacks) {
  std::mt19937_64 random(TestSeed());
  Order order;
  double now = 0;
  for (double comes = 0; comes < 20; comes += 0.001 * Draw(random, 1, 65)) {
    if (order.rest_.empty()) now = std::max(now, comes);
    order.Run(now, comes);
    RunOrder::Job job = JobOf(Draw(random, 10, 500), 1e-5);
    job.deadline = At(now + 1);
    order.Add(job, now);
  }
  order.Run(now, kInfinite);
  for (const auto& [ticket, end] : order.ends_) EXPECT_LE(At(end), order.jobs_.at(ticket).deadline);
}

// A prompt whose deadline is near has no part in a pass that ends too late for it.
TEST(RunOrderPacks, APackLeavesADeadlineTimeToSpare) {
  Order order;
  RunOrder::Job job = ShortJob(0.2);
  job.pack.pass_seconds = 0.2;
  job.pack.added_seconds = 0.02;
  for (int i = 0; i < 15; ++i) order.Add(job, 0);
  job.deadline = At(0.27);  // all of them in one pass take 0.28 s
  const Ticket due = order.Add(job, 0);
  double now = 0;
  order.Run(now, 10);
  EXPECT_GT(order.PackOf(1), 1);
  EXPECT_LE(order.ends_.at(due), 0.27);
}

TEST(RunOrderPacks, DeadlinesThatCanBeMetInTurnAreMetWithPacks) {
  std::mt19937_64 random(TestSeed());
  int packed = 0;
  for (int draw = 0; draw < 200; ++draw) {
    Order order;
    const double token_seconds = std::pow(10, Draw(random, -50, -35) / 10.0);
    double in_turn = 0;
    for (int i = Draw(random, 2, 24); i > 0; --i) {
      RunOrder::Job job = JobOf(Draw(random, 500, 1000), token_seconds);
      in_turn += 1.25 * job.work_seconds;
      if (i % 3 == 0) job.deadline = At(in_turn + 0.07 + Draw(random, 0, 100) / 100.0);
      order.Add(job, 0);
    }
    double now = 0;
    order.Run(now, kInfinite);
    for (const auto& [ticket, end] : order.ends_) {
      EXPECT_LE(At(end), order.jobs_.at(ticket).deadline) << "of " << order.ends_.size();
      packed += order.PackOf(ticket) > 1 ? 1 : 0;
    }
  }
  EXPECT_GT(packed, 500) << "too little is packed to show anything";
}

// One pass is done by all their deadlines: a shorter one still goes before it.
TEST(RunOrderPacks, TheDeadlinesOfAPackAskForOnePass) {
  Order order;
  RunOrder::Job due = ShortJob();
  due.deadline = At(1.05);
  for (int i = 0; i < 8; ++i) order.Add(due, 0);
  order.Add({.priority = -1, .work_seconds = 100}, 0);
  double now = 0;
  order.Run(now, 0.02);
  ASSERT_EQ(order.order_.computing().size(), 8u);
  order.order_.SetDone(1, 0.1, At(now));  // 0.18 s are left of it
  const Ticket shorter = order.Add({.work_seconds = 0.03}, now);
  EXPECT_EQ(order.Choose(now), Tickets{shorter});
}

// Those that wait are as long as those in the pack, which takes longer than each: it goes on to its end.
TEST(RunOrderPacks, APackDoesNotGiveWayToItsLike) {
  Order order;
  RunOrder::Job job = ShortJob();
  job.pack = {.tokens = kRoom.rank_tokens / 4, .pass_seconds = 0.04, .added_seconds = 0.09};
  for (int i = 0; i < 40; ++i) order.Add(job, 0);
  double now = 0;
  while (!order.rest_.empty()) {
    order.Run(now, now + 0.03);
    EXPECT_LE(order.order_.live(), 1);
  }
  EXPECT_EQ(order.PackOf(1), 8);
  for (const auto& [ticket, end] : order.ends_) {
    EXPECT_NEAR(end - order.begins_.at(ticket), order.passes_[order.pass_of_.at(ticket)].seconds, 1e-6);
  }
}

TEST(RunOrderPacks, APackGivesWayAsAWhole) {
  for (const bool by_class : {true, false}) {
    Order order;
    for (int i = 0; i < 6; ++i) order.Add(ShortJob(), 0);
    double now = 0;
    order.Run(now, 0.04);
    ASSERT_EQ(order.order_.computing(), (Tickets{1, 2, 3, 4, 5, 6}));
    EXPECT_NEAR(order.order_.RestSeconds(3, At(now)), 0.06, 1e-9);
    RunOrder::Job comes = {.priority = by_class ? 1 : 0, .work_seconds = by_class ? 5 : 0.029};
    const Ticket ticket = order.Add(comes, now);
    EXPECT_EQ(order.Choose(now), Tickets{ticket});
    EXPECT_EQ(order.order_.live(), 2);
    order.Run(now, 100);
    EXPECT_NEAR(order.ends_.at(ticket), 0.04 + comes.work_seconds, 1e-9);
    for (Ticket other = 1; other <= 6; ++other) EXPECT_NEAR(order.ends_.at(other), now, 1e-9);
    EXPECT_NEAR(now, kStreamSeconds + comes.work_seconds, 1e-9);
  }
}

TEST(RunOrderPacks, ALittleShorterOneWaitsForAPack) {
  Order order;
  for (int i = 0; i < 6; ++i) order.Add(ShortJob(), 0);
  double now = 0;
  order.Run(now, 0.04);
  const Ticket shorter = order.Add({.work_seconds = 0.031}, now);
  order.Run(now, 100);
  EXPECT_NEAR(order.begins_.at(shorter), kStreamSeconds, 1e-9);
}

// What is told of one is told of all: they compute together.
TEST(RunOrderPacks, WhatIsDoneCorrectsTheWholePack) {
  Order order;
  for (int i = 0; i < 3; ++i) order.Add(ShortJob(), 0);
  const Ticket lone = order.Add({.work_seconds = 40}, 0);
  order.Choose(0);
  order.order_.SetDone(2, 0.25, At(1));
  const double rest = 0.75 * (1 + 0.75 * kStreamSeconds);
  for (Ticket ticket = 1; ticket <= 3; ++ticket) {
    EXPECT_NEAR(order.order_.RestSeconds(ticket, At(1)), rest, 1e-9);
    EXPECT_NEAR(order.order_.RestSeconds(ticket, At(1.25)), rest - 0.25, 1e-9);
    EXPECT_NEAR(order.order_.ComputedSeconds(ticket, At(1.25)), 1.25, 1e-9);
    EXPECT_NEAR(order.order_.WholeSeconds(ticket), kStreamSeconds, 1e-9);
  }
  EXPECT_NEAR(order.order_.RestSeconds(lone, At(1)), 40, 1e-9);
  const std::vector<RunOrder::Turn> turns = order.order_.Turns(At(1.25));
  ASSERT_EQ(turns.size(), 4u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_NEAR(turns[i].ends_seconds, rest - 0.25, 1e-9);
    EXPECT_EQ(turns[i].pack_prompts, 3);
  }
  EXPECT_EQ(turns[3].pack_prompts, 1);
  EXPECT_NEAR(turns[3].begins_seconds, rest - 0.25, 1e-9);
  EXPECT_NEAR(order.order_.MostWaitSeconds(At(1.25)), 40 + rest - 0.25, 1e-9) << "of a pack one counts";
}

TEST(RunOrderPacks, OneThatLeavesLetsTheOthersCompute) {
  Order order(/*most_live=*/2);
  for (int i = 0; i < 3; ++i) order.Add(ShortJob(), 0);
  order.Choose(0);
  RunOrder& only = order.order_;
  EXPECT_TRUE(only.StandsForPack(1));
  EXPECT_FALSE(only.StandsForPack(2));
  only.Leave(1, At(0.02));
  EXPECT_FALSE(only.StandsForPack(1));
  EXPECT_TRUE(only.StandsForPack(2));
  only.Choose(At(0.02));
  EXPECT_EQ(only.computing(), (Tickets{2, 3}));
  EXPECT_EQ(only.live(), 1);
  EXPECT_NEAR(only.MostWaitSeconds(At(0.02)), 0.08, 1e-9);
  EXPECT_NEAR(only.Turns(At(0.02)).back().ends_seconds, 0.08, 1e-9);
  only.Remove(1, At(0.03));
  only.Remove(3, At(0.04));
  only.Choose(At(0.04));
  EXPECT_EQ(only.computing(), Tickets{2});
  only.Leave(2, At(0.05));
  EXPECT_EQ(only.Choose(At(0.05)), 0u);
  EXPECT_EQ(only.live(), 1) << "until it is removed";
  only.Remove(2, At(0.06));
  EXPECT_EQ(only.live(), 0);
}

// First each by itself. Who finds no memory even so waits, and once another has ended they share a pass
// again.
TEST(RunOrderPacks, APackThatFindsNoMemoryWaitsForAnEnd) {
  for (const bool others_live : {true, false}) {
    RunOrder order({.max_age = absl::Hours(1), .most_live = 4, .pack = kRoom});
    if (others_live) {
      order.Announce(10, {.work_seconds = 100}, At(0));
      order.Complete(10, At(0));
      ASSERT_EQ(order.Choose(At(0)), 10u);
    }
    for (const Ticket ticket : {1, 2, 3}) {
      order.Announce(ticket, ShortJob(), At(1));
      order.Complete(ticket, At(1));
    }
    order.Choose(At(1));
    ASSERT_EQ(order.computing(), (Tickets{1, 2, 3}));
    for (const Ticket ticket : {1, 2, 3}) order.PutBack(ticket, At(1.5));
    EXPECT_EQ(order.live(), others_live ? 1 : 0);
    EXPECT_NEAR(order.RestSeconds(2, At(1.5)), kStreamSeconds, 1e-9);
    order.Choose(At(2));
    EXPECT_EQ(order.computing(), others_live ? Tickets{1} : (Tickets{1, 2, 3}));
    if (!others_live) continue;
    order.PutBack(1, At(2));
    order.Choose(At(2));
    EXPECT_EQ(order.computing(), Tickets{10});
    order.Remove(10, At(3));
    order.Choose(At(3));
    EXPECT_EQ(order.computing(), (Tickets{1, 2, 3}));
  }
}

TEST(RunOrderPacks, WhatIsPutApartRunsByItself) {
  Order order;
  order.Add({.priority = -1, .work_seconds = 100}, 0);
  order.Choose(0);
  for (int i = 0; i < 3; ++i) order.Add(ShortJob(), 0);
  order.order_.Choose(At(0));
  ASSERT_EQ(order.order_.computing(), (Tickets{2, 3, 4}));
  for (const Ticket ticket : {2, 3, 4}) order.order_.PutApart(ticket, At(0));
  EXPECT_EQ(order.order_.live(), 1);
  double now = 0;
  order.Run(now, 1000);
  for (const Ticket ticket : {2, 3, 4}) {
    EXPECT_EQ(order.PackOf(ticket), 1);
    EXPECT_NEAR(order.ends_.at(ticket), (static_cast<double>(ticket) - 1) * kStreamSeconds, 1e-6);
  }
}

// Where four sub-meshes make the mean end earliest, no pass is shared, and the other way round.
TEST(RunOrderPacks, TheBetterOfPacksAndSubmeshesIsTaken) {
  for (const bool packs_are_better : {true, false}) {
    RunOrder order({.max_age = absl::Hours(1), .most_live = 8, .pack = kRoom});
    RunOrder::Job job = ShortJob(1);
    job.submeshes = {{.submeshes = 4, .seconds = 1.6}};  // 1.6 for four
    job.pack = {.tokens = 100, .pass_seconds = packs_are_better ? 1.5 : 1.7, .added_seconds = 0.001};
    for (Ticket ticket = 1; ticket <= 4; ++ticket) {
      order.Announce(ticket, job, At(0));
      order.Complete(ticket, At(0));
    }
    order.Choose(At(0));
    EXPECT_EQ(order.computing().size(), 4u);
    EXPECT_EQ(order.submeshes(1), packs_are_better ? 1 : 4);
    EXPECT_EQ(order.Turns(At(0)).front().pack_prompts, packs_are_better ? 4 : 1);
  }
}

// What computes on a sub-mesh would stand still for a pack: that counts, too.
TEST(RunOrderPacks, APackIsWeighedWithThoseThatItHoldsUp) {
  for (const bool holds_up : {true, false}) {
    RunOrder order({.max_age = absl::Hours(1), .most_live = 8, .pack = kRoom});
    const auto add = [&](Ticket ticket, const RunOrder::Job& job) {
      order.Announce(ticket, job, At(0));
      order.Complete(ticket, At(0));
    };
    if (holds_up) {
      for (const Ticket ticket : {1, 2, 3}) {
        add(ticket, {.work_seconds = 9, .submeshes = {{.submeshes = 4, .seconds = 10}}});
      }
      order.Choose(At(0));
      ASSERT_EQ(order.computing(), (Tickets{1, 2, 3}));
    }
    // Both at once on sub-meshes take 1.3 s each, and 1.2 s in a pass.
    RunOrder::Job job = ShortJob(1);
    job.submeshes = {{.submeshes = 4, .seconds = 1.3}};
    job.pack.pass_seconds = 1.2;
    for (const Ticket ticket : {4, 5}) add(ticket, job);
    order.Choose(At(0));
    EXPECT_EQ(order.submeshes(4), holds_up ? 4 : 1);
  }
}

// The lead of a tenant tells how long a prompt of it seems: so the leads can be read.
TEST(RunOrderPacks, TenantsAreChargedTheirSharesOfAPass) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 50; ++draw) {
    RunOrder order({.max_age = absl::Hours(1), .most_live = 8, .pack = kRoom});
    const auto add = [](RunOrder& to, Ticket ticket, const RunOrder::Job& job, double now) {
      to.Announce(ticket, job, At(now));
      to.Complete(ticket, At(now));
    };
    const int members = Draw(random, 2, 4);
    const bool nothing_added = Draw(random, 0, 4) == 0;
    std::vector<double> added;
    for (Ticket ticket = 1; ticket <= static_cast<Ticket>(members); ++ticket) {
      RunOrder::Job job = ShortJob();
      job.tenant = std::to_string(ticket);
      job.pack.added_seconds = nothing_added ? 0 : 1e-3 * Draw(random, 1, 9);
      added.push_back(job.pack.added_seconds);
      add(order, ticket, job, 0);
      add(order, 100 + ticket, {.tenant = job.tenant, .priority = -2, .work_seconds = 1000}, 0);  // it stays
    }
    add(order, 100, {.tenant = "owed nothing", .priority = -2, .work_seconds = 1000}, 0);
    order.Choose(At(0));
    ASSERT_EQ(std::ssize(order.computing()), members);
    // One of them may be stopped: from then on the others share what it took.
    const double all = std::accumulate(added.begin(), added.end(), 0.0);
    const double first = Draw(random, 1, 30) / 10.0, second = Draw(random, 1, 30) / 10.0;
    order.Leave(1, At(first));
    order.Choose(At(first));
    for (Ticket ticket = 1; ticket <= static_cast<Ticket>(members); ++ticket) {
      order.Remove(ticket, At(first + second));
    }
    const auto share = [&](int i, double of, int among) { return of > 0 ? added[i] / of : 1.0 / among; };
    double charged = 0;
    for (int i = 0; i < members; ++i) {
      const double lead =
          first * share(i, all, members) + (i > 0 ? second * share(i, all - added[0], members - 1) : 0);
      charged += lead;
      for (const bool before : {true, false}) {
        RunOrder ahead = order;
        const double now = first + second;
        const double seems = std::exp2(lead / RunOrder::kLeadSeconds) * (before ? 1.001 : 0.999);
        add(ahead, 200, {.tenant = std::to_string(i + 1), .work_seconds = 1}, now);
        add(ahead, 201, {.tenant = "owed nothing", .work_seconds = seems}, now);
        EXPECT_EQ(ahead.Choose(At(now)), before ? 200u : 201u) << "a lead of " << lead;
      }
    }
    EXPECT_NEAR(charged, first + second, 1e-9);
  }
}

// What is told of the turns to come is what happens where nothing else comes, whatever lives already; but for
// a few, where a moment decides who is first.
TEST(RunOrderPacks, WhatIsToldIsWhatHappens) {
  std::mt19937_64 random(TestSeed());
  int told = 0, wrong = 0, packed = 0;
  for (int draw = 0; draw < 300; ++draw) {
    Order order(Draw(random, 1, 8));
    double now = 0;
    const auto add = [&](int count) {
      for (int i = 0; i < count; ++i) {
        RunOrder::Job job = RandomJob(random);
        job.priority = Draw(random, 0, 9) == 0 ? 1 : 0;
        job.tenant = std::to_string(Draw(random, 0, 1));
        order.Add(job, now);
      }
    };
    add(Draw(random, 0, 8));
    order.Run(now, Draw(random, 0, 20) / 10.0);
    add(Draw(random, 1, 30));
    const double told_at = now, most_wait = order.order_.MostWaitSeconds(At(now));
    const std::vector<RunOrder::Turn> turns = order.order_.Turns(At(now));
    const auto begins_before = order.begins_;
    order.Run(now, kInfinite);
    double all = 0;
    for (const auto& [ticket, end] : order.ends_) all = std::max(all, end - told_at);
    for (const RunOrder::Turn& turn : turns) {
      EXPECT_LE(turn.begins_seconds, most_wait + 1e-6);
      const auto right = [&](double seconds, double real) {
        return std::abs(seconds - real + told_at) < 0.1 * all + 0.01;
      };
      ++told;
      packed += turn.pack_prompts > 1 ? 1 : 0;
      const bool begins_right =
          begins_before.contains(turn.ticket) || right(turn.begins_seconds, order.begins_.at(turn.ticket));
      if (!begins_right || !right(turn.ends_seconds, order.ends_.at(turn.ticket)) ||
          (!begins_before.contains(turn.ticket) && turn.pack_prompts != order.PackOf(turn.ticket))) {
        ++wrong;
      }
    }
  }
  EXPECT_LE(wrong, told / 10) << "of " << told;
  EXPECT_GT(packed, told / 10) << "of " << told;
}

TEST(RunOrderPacks, TheWaitOfOneThatComesKnowsItsPack) {
  Order order;
  for (int i = 0; i < 8; ++i) order.Add(ShortJob(), 0);
  const auto wait_of = [&](const RunOrder::Job& job) { return order.order_.WaitSeconds(job, At(0)); };
  EXPECT_EQ(wait_of(ShortJob()), 0) << "it would share their pass";
  RunOrder::Job alone = ShortJob();
  alone.pack = {};
  EXPECT_NEAR(wait_of(alone), kStreamSeconds, 1e-9);
  Ticket last = order.Add(ShortJob(), 0);
  EXPECT_EQ(order.order_.TurnsUpTo(last, At(0)).back().pack_prompts, 9);
  EXPECT_EQ(order.order_.TurnsUpTo(last, At(0)).back().begins_seconds, 0);
}

// Without room for packs nothing depends on what prompts would bring to one.
TEST(RunOrderPacks, WithoutRoomAllIsAsBefore) {
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 50; ++draw) {
    const RunOrder::Options options = {.max_age = absl::Seconds(3), .most_live = Draw(random, 1, 4)};
    RunOrder with(options), without(options);
    std::map<Ticket, double> rest;
    double now = 0;
    for (Ticket ticket = 1; ticket <= 40 || !rest.empty();) {
      if (ticket <= 40 && Draw(random, 0, 2) == 0) {
        RunOrder::Job job = RandomJob(random);
        job.priority = Draw(random, -1, 1);
        if (Draw(random, 0, 2) == 0) job.deadline = At(now + Draw(random, 1, 50) / 10.0);
        if (Draw(random, 0, 2) == 0) job.submeshes = {{.submeshes = 2, .seconds = 1.5 * job.work_seconds}};
        with.Announce(ticket, job, At(now));
        job.pack = {};
        without.Announce(ticket, job, At(now));
        for (RunOrder* order : {&with, &without}) order->Complete(ticket, At(now));
        rest[ticket++] = job.work_seconds;
      }
      with.Choose(At(now));
      without.Choose(At(now));
      ASSERT_EQ(with.computing(), without.computing());
      ASSERT_EQ(with.MostWaitSeconds(At(now)), without.MostWaitSeconds(At(now)));
      now += 0.03;
      for (const Ticket computes : without.computing())
        rest.at(computes) -= 0.03 / without.submeshes(computes);
      for (const Ticket computes : Tickets(without.computing())) {
        if (rest.at(computes) > 0) continue;
        rest.erase(computes);
        with.Remove(computes, At(now));
        without.Remove(computes, At(now));
      }
    }
  }
}

// The mean end of random backlogs is never much later than without packs, and far earlier where weights take
// most of a pass.
TEST(RunOrderPacks, TheMeanEndIsEarlier) {
  std::mt19937_64 random(TestSeed());
  double with_sum = 0, without_sum = 0;
  for (int draw = 0; draw < 200; ++draw) {
    const bool memory_bound = draw % 2 == 0;
    std::vector<RunOrder::Job> jobs(static_cast<size_t>(Draw(random, 2, 60)));
    for (RunOrder::Job& job : jobs)
      job = memory_bound ? JobOf(Draw(random, 10, 500), 1e-5) : RandomJob(random);
    const auto mean_end = [&](const PackRoom& room) {
      Order order(8, room);
      for (const RunOrder::Job& job : jobs) order.Add(job, 0);
      double now = 0;
      order.Run(now, kInfinite);
      return order.MeanEnd();
    };
    const double with = mean_end(kRoom), without = mean_end({});
    EXPECT_LE(with, 1.01 * without) << jobs.size() << " prompts";
    if (memory_bound && jobs.size() > 8) {
      EXPECT_LE(with, 0.4 * without) << jobs.size() << " prompts";
    }
    if (memory_bound) continue;
    with_sum += with;
    without_sum += without;
  }
  EXPECT_LE(with_sum, 0.8 * without_sum);
  RecordProperty("mean_end_with_packs", std::to_string(with_sum / without_sum));
}

}  // namespace
}  // namespace meshfill
