// The order that is made of ranks, for ranks that are given. Orders as they come: run_order_*_test.
#include "server/queue/turn_rank.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace meshfill {
namespace {

using Tickets = std::vector<RunTicket>;

// One that came with its ticket's second, and may compute.
TurnRank RankOf(RunTicket ticket, double rest_seconds) {
  return {.ticket = ticket,
          .may_compute = true,
          .rest_seconds = rest_seconds,
          .weighted_rest = std::log2(rest_seconds),
          .complete_at = absl::FromUnixSeconds(static_cast<int64_t>(ticket))};
}

TurnRank AgedOf(RunTicket ticket, double rest_seconds) {
  TurnRank rank = RankOf(ticket, rest_seconds);
  rank.aged = true;
  return rank;
}

TEST(TurnRank, WithoutAgedOnesTheLeastRestGoesFirst) {
  Elder elder{.ticket = 1, .credit_seconds = 5};  // it has ended
  const Ranking ranking = RankByTurns({RankOf(2, 4), RankOf(3, 1), RankOf(4, 2)}, elder);
  EXPECT_EQ(ranking.tickets, (Tickets{3, 4, 2}));
  EXPECT_EQ(ranking.holds_seconds, std::numeric_limits<double>::infinity());
  EXPECT_EQ(elder.ticket, 0u);
}

TEST(TurnRank, ANewElderGivesWayToNobody) {
  Elder elder{.ticket = 1, .credit_seconds = 100};
  const Ranking ranking = RankByTurns({RankOf(4, 0.5), AgedOf(3, 10), AgedOf(2, 20), RankOf(5, 2)}, elder);
  EXPECT_EQ(ranking.tickets, (Tickets{2, 3, 4, 5}));
  EXPECT_EQ(elder.ticket, 2u);
  EXPECT_EQ(elder.credit_seconds, 0);
  EXPECT_EQ(ranking.holds_seconds, 0.5) << "until then it has computed enough for the shortest";
}

// Only to what its credit is enough for, and what would go before it were it not aged.
TEST(TurnRank, AnElderGivesWayForItsCredit) {
  Elder elder{.ticket = 2, .credit_seconds = 1};
  TurnRank low = RankOf(6, 0.1), high = RankOf(7, 0.8);
  low.priority = -1;
  high.priority = 1;
  const Ranking ranking =
      RankByTurns({low, AgedOf(3, 0.2), RankOf(4, 0.5), RankOf(5, 1.1), AgedOf(2, 20), high}, elder);
  EXPECT_EQ(ranking.tickets, (Tickets{7, 3, 4, 2, 5, 6}));
  EXPECT_EQ(ranking.holds_seconds, 0.8) << "when the first has ended the others have no credit";
  EXPECT_EQ(elder.ticket, 2u);
  EXPECT_EQ(elder.credit_seconds, 1);
}

// A prediction that is a little wrong takes its turn from nobody.
TEST(TurnRank, WhatGoesBeforeAnElderGoesOnForALittleMoreThanItsCredit) {
  TurnRank computes = RankOf(4, 0.7), waits = RankOf(5, 0.7);
  computes.computes = true;
  computes.work_seconds = waits.work_seconds = 1;
  Elder elder{.ticket = 2, .credit_seconds = 0.5};
  const Ranking ranking = RankByTurns({waits, AgedOf(2, 20), computes}, elder);
  EXPECT_EQ(ranking.tickets, (Tickets{4, 2, 5}));
  EXPECT_EQ(ranking.holds_seconds, 0.7);
  computes.rest_seconds = 0.8;
  EXPECT_EQ(RankByTurns({AgedOf(2, 20), computes}, elder).tickets, (Tickets{2, 4})) << "too much more";
  elder = {.ticket = 1, .credit_seconds = 0.5};
  computes.rest_seconds = 0.2;
  EXPECT_EQ(RankByTurns({AgedOf(2, 20), computes}, elder).tickets, (Tickets{2, 4})) << "a new elder";
}

TEST(TurnRank, ARoundedCreditIsEnough) {
  Elder elder{.ticket = 2, .credit_seconds = 1 - 1e-9};
  EXPECT_EQ(RankByTurns({AgedOf(2, 20), RankOf(3, 1)}, elder).tickets, (Tickets{3, 2}));
}

TEST(TurnRank, TheElderIsOneThatMayCompute) {
  for (const bool one_may : {true, false}) {
    Elder elder;
    TurnRank oldest = AgedOf(2, 10), next = AgedOf(3, 10), short_one = RankOf(4, 1), lives = RankOf(5, 2);
    oldest.may_compute = false;
    next.may_compute = one_may;
    short_one.may_compute = false;
    lives.lives = true;
    const std::vector<TurnRank> ranks = {oldest, next, short_one, lives};
    RankByTurns(ranks, elder);
    EXPECT_EQ(elder.ticket, one_may ? 3u : 5u) << "they wait for the first that lives to end";
    elder.credit_seconds = 3;
    EXPECT_EQ(RankByTurns(ranks, elder).tickets, one_may ? (Tickets{5, 2, 3, 4}) : (Tickets{2, 3, 5, 4}));
  }
}

// What would begin before it only seems to have the turn: what lives computes.
TEST(TurnRank, NobodyWhoIsYoungerThanOneThatWaitsForMemoryIsTheElder) {
  TurnRank put_back = AgedOf(2, 10), lives = RankOf(5, 2);
  put_back.may_compute = false;
  put_back.put_back = true;
  lives.lives = true;
  for (const RunTicket waits : {1, 3}) {
    Elder elder;
    RankByTurns({put_back, AgedOf(waits, 10), lives}, elder);
    EXPECT_EQ(elder.ticket, waits == 1 ? 1u : 5u);
  }
  Elder elder;
  lives.aged = true;
  RankByTurns({put_back, AgedOf(3, 10), lives}, elder);
  EXPECT_EQ(elder.ticket, 5u) << "it has begun";
  TurnRank shorter = RankOf(6, 1);
  shorter.lives = true;
  elder = {};
  RankByTurns({put_back, lives, shorter}, elder);
  EXPECT_EQ(elder.ticket, 5u) << "it is old, and the other is not";
}

}  // namespace
}  // namespace meshfill
