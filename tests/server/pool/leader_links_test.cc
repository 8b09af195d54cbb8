// Links that the configuration leaves out: when a run measures them, and what the next is planned with.
#include <array>
#include <limits>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/pool/leader_fixture.h"

namespace meshfill {
namespace {

// Links that the configuration leaves out.
class MeasuringLeaderTest : public LeaderFixture {
 protected:
  MeasuringLeaderTest() : LeaderFixture(LeftOut()) {}

  static Leader::Options LeftOut() {
    Leader::Options options = Options(2);
    v1::PoolSection pool;
    pool.set_measure_links(true);
    pool.set_host_link_bytes_per_second(5e9);
    options.links = ConfiguredLinksOf(pool);
    return options;
  }
  // A run on workers 1, 2, …, each on its own host, that say the same.
  void RunOn(int workers, const std::vector<std::optional<Link>>& links, double probe_seconds = 0) {
    Submit(std::vector<uint32_t>(100 * workers, 1));
    std::vector<Leader::Connection> connections;
    for (int i = 1; i <= workers; ++i) connections.push_back(i);
    Prepare(connections);
    Pass(absl::Milliseconds(500), connections);
    for (int i = 1; i <= workers; ++i) {
      const bool last = i == workers;
      RankDone(i, static_cast<uint32_t>(i - 1), last ? kVocab : 0, links, probe_seconds);
    }
    ASSERT_FALSE(answers_.empty());
    ASSERT_TRUE(answers_.back().ok()) << answers_.back().status();
  }
  void JoinOnItsOwnHost(Leader::Connection connection) {
    v1::Join offer = Offer(absl::StrCat("w", connection));
    offer.set_host(absl::StrCat("host", connection));
    ASSERT_EQ(Join(connection, offer), "");
  }
  // In the newest Run.
  int ProbesAsked(Leader::Connection connection) {
    int probes = -1;
    for (const v1::LeaderMessage& message : sent_[connection]) {
      if (message.has_run()) probes = message.run().probes_size();
    }
    return probes;
  }

  static constexpr Link kSlow = {.latency_seconds = 3e-3, .bytes_per_second = 7e6};
};

TEST_F(MeasuringLeaderTest, AsksInTheFirstRunAndPlansTheNextWithTheAnswer) {
  JoinOnItsOwnHost(1);
  JoinOnItsOwnHost(2);
  RunOn(2, {kSlow}, 0.2);
  EXPECT_EQ(ProbesAsked(1), 1);
  EXPECT_EQ(ProbesAsked(2), 1);
  EXPECT_EQ(planned_with_.back().between_nodes.bytes_per_second, 1e9) << "assumed";
  EXPECT_EQ(log_.back(), "links measured: between hosts 7 MB/s, 3 ms; it took 200ms");
  EXPECT_TRUE(answers_.back()->probed);
  EXPECT_NEAR(answers_.back()->seconds, 0.3, 1e-9) << "without what the probes took";
  EXPECT_EQ(leader_.links().front().source, "measured");

  RunOn(2, {});
  EXPECT_EQ(ProbesAsked(1), 0);
  EXPECT_EQ(planned_with_.back().between_nodes, kSlow);
  EXPECT_EQ(planned_with_.back().same_node.bytes_per_second, 5e9) << "as given";
  EXPECT_FALSE(answers_.back()->probed);
  EXPECT_NEAR(answers_.back()->seconds, 0.5, 1e-9);
}

TEST_F(MeasuringLeaderTest, AsksAgainOnceThePoolChanged) {
  JoinOnItsOwnHost(1);
  JoinOnItsOwnHost(2);
  RunOn(2, {kSlow});
  JoinOnItsOwnHost(3);
  EXPECT_EQ(leader_.links().front().source, "measured before");
  RunOn(3, {Link{.latency_seconds = 1e-3, .bytes_per_second = 9e6}});
  EXPECT_EQ(ProbesAsked(3), 1);
  EXPECT_EQ(planned_with_.back().between_nodes, kSlow) << "until then";
  EXPECT_EQ(leader_.capacity().topology.between_nodes.bytes_per_second, 9e6);
  leader_.OnDisconnected(3, now_);
  RunOn(2, {kSlow});
  EXPECT_EQ(ProbesAsked(1), 1);
}

// Two runs, the second over a pool that has one worker more. Their probes are asked for as they begin.
class GrowingPoolTest : public MeasuringLeaderTest {
 protected:
  void Begin() {
    JoinOnItsOwnHost(1);
    JoinOnItsOwnHost(2);
    Submit(std::vector<uint32_t>(300, 1));
    first_ = newest_;
    first_epoch_ = leader_.epoch();
  }
  Leader::Ticket Grow() {
    JoinOnItsOwnHost(3);
    const Leader::Ticket second = leader_.Submit({.id = "r8", .tokens = tokens_, .options = {}}, now_);
    Do();
    EXPECT_GT(leader_.epoch(), first_epoch_);
    return second;
  }
  void SetPaused(Leader::Ticket ticket, bool paused) {
    leader_.SetPaused(ticket, paused, now_);
    Do();
  }

  Leader::Ticket first_ = 0;
  uint64_t first_epoch_ = 0;
};

TEST_F(GrowingPoolTest, WhatARunOfBeforeMeasuredIsNotTaken) {
  Begin();
  Prepare({1, 2});
  EXPECT_EQ(ProbesAsked(1), 1);
  const uint64_t run = run_;
  const Leader::Ticket second = Grow();
  SetPaused(second, true);
  Prepare({1, 2, 3});
  run_ = run;
  epoch_ = first_epoch_;
  RankDone(1, 0, 0, {kSlow});
  RankDone(2, 1, kVocab, {kSlow});
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(answers_[0].ok()) << answers_[0].status();
  EXPECT_EQ(log_.back(), "links measured for a pool that has changed: not taken; it took 0");
  EXPECT_EQ(leader_.links().front().source, "assumed");
  SetPaused(second, false);
  EXPECT_EQ(ProbesAsked(3), 1);
}

TEST_F(GrowingPoolTest, ARunOfBeforeThatStartsLateMeasuresNothing) {
  Begin();
  SetPaused(first_, true);
  Prepare({1, 2});
  Grow();
  Prepare({1, 2, 3});
  EXPECT_EQ(ProbesAsked(1), 1);
  SetPaused(first_, false);
  EXPECT_EQ(ProbesAsked(1), 0);
}

TEST_F(MeasuringLeaderTest, WhoSaysNothingOrNonsenseIsAskedAgain) {
  JoinOnItsOwnHost(1);
  JoinOnItsOwnHost(2);
  RunOn(2, {});
  EXPECT_EQ(log_.back(), "no figure that a link can have: between hosts; it took 0");
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double time : {nan, -1.0, 1e300}) {
    RunOn(2, {Link{.latency_seconds = nan, .bytes_per_second = -1}, kSlow, kSlow}, time);
    EXPECT_EQ(ProbesAsked(1), 1);
    EXPECT_NEAR(answers_.back()->seconds, 0.5, 1e-9);
    EXPECT_EQ(leader_.capacity().topology.between_nodes.bytes_per_second, 1e9);
  }
}

TEST_F(MeasuringLeaderTest, ARunThatEndsEarlyLeavesTheLinksToTheNext) {
  JoinOnItsOwnHost(1);
  JoinOnItsOwnHost(2);
  Submit(std::vector<uint32_t>(200, 1));
  Prepare({1, 2});
  EXPECT_EQ(ProbesAsked(1), 1);
  RankDone(1, 0, 0, {kSlow});
  v1::WorkerMessage failed = OfRun();
  failed.mutable_rank_done()->set_run(run_);
  failed.mutable_rank_done()->set_rank(1);
  *failed.mutable_rank_done()->mutable_outcome() = ToOutcome(absl::UnavailableError("measuring the link"));
  Say(2, failed);
  Stopped(1);
  Stopped(2);
  Prepare({1, 2});
  EXPECT_EQ(ProbesAsked(1), 1);
  EXPECT_EQ(planned_with_.back().between_nodes.bytes_per_second, 1e9);
}

TEST(LinksOfTest, WhatIsLeftOutIsMeasuredWhereAsked) {
  v1::PoolSection pool;
  EXPECT_EQ(ConfiguredLinksOf(pool).measure, (std::array<bool, kLinkClasses>{}));
  pool.set_measure_links(true);
  ConfiguredLinks links = ConfiguredLinksOf(pool);
  EXPECT_EQ(links.measure, (std::array<bool, kLinkClasses>{true, true, true}));
  EXPECT_EQ(links.links.between_nodes, (Link{.latency_seconds = 200e-6, .bytes_per_second = 1e9}));
  EXPECT_EQ(links.links.same_node, links.links.between_nodes);
  EXPECT_TRUE(links.links.one_flow_a_seat);

  pool.mutable_link_latency()->set_nanos(3'000'000);
  links = ConfiguredLinksOf(pool);
  EXPECT_EQ(links.measure, (std::array<bool, kLinkClasses>{false, true, true})) << "one of both says all";
  EXPECT_EQ(links.links.between_nodes, (Link{.latency_seconds = 3e-3, .bytes_per_second = 1e9}));
  EXPECT_EQ(links.links.same_node, links.links.between_nodes) << "until measured";

  pool.set_host_link_bytes_per_second(2e9);
  pool.set_host_bytes_per_second(0);
  links = ConfiguredLinksOf(pool);
  EXPECT_EQ(links.measure, (std::array<bool, kLinkClasses>{}));
  EXPECT_EQ(links.links.same_node, (Link{.latency_seconds = 3e-3, .bytes_per_second = 2e9}));
  EXPECT_EQ(links.links.node_bytes_per_second, std::numeric_limits<double>::infinity())
      << "nothing is shared";
  EXPECT_FALSE(links.links.one_flow_a_seat);
}

}  // namespace
}  // namespace meshfill
