// Who measures what and when, and what counts of what they say.
#include "server/pool/link_survey.h"

#include <limits>
#include <map>
#include <random>

#include "gtest/gtest.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr Link kAssumed = {.latency_seconds = 2e-4, .bytes_per_second = 1e9};
constexpr Link kFast = {.latency_seconds = 1e-5, .bytes_per_second = 8e9};
constexpr Link kMiddle = {.latency_seconds = 1e-4, .bytes_per_second = 2e9};
constexpr Link kSlow = {.latency_seconds = 1e-3, .bytes_per_second = 1e8};

ConfiguredLinks LeftOut(bool between_hosts = true, bool on_host = true, bool out_of_host = true) {
  ConfiguredLinks configured;
  configured.links.between_nodes = configured.links.same_node = kAssumed;
  configured.measure = {between_hosts, on_host, out_of_host};
  return configured;
}

std::vector<LinkSurvey::RankLinks> AllSay(const LinkSurvey::Probes& probes, const Link& link) {
  std::vector<LinkSurvey::RankLinks> by_rank(probes.host_of_rank.size());
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const LinkProbe& probe : probes.pairs) {
      const bool sits_out = probe.peer_of_rank[rank] == static_cast<int>(rank);
      by_rank[rank].push_back(sits_out ? std::nullopt : std::optional<Link>(link));
    }
  }
  return by_rank;
}

using Classes = std::vector<LinkClass>;
using Pairs = std::vector<int>;

TEST(LinkSurveyTest, PairsRanksAsTheHeaderDrawsThem) {
  const LinkSurvey survey(LeftOut());
  const LinkSurvey::Probes probes = survey.Ask({0, 0, 0, 1, 1, 2, 2, 3});
  ASSERT_EQ(probes.classes, (Classes{LinkClass::kOutOfHost, LinkClass::kBetweenHosts, LinkClass::kOnHost}));
  EXPECT_EQ(probes.pairs[0].peer_of_rank, (Pairs{3, 4, 2, 0, 1, 7, 6, 5}));
  EXPECT_EQ(probes.pairs[1].peer_of_rank, (Pairs{3, 1, 2, 0, 4, 7, 6, 5}));
  EXPECT_EQ(probes.pairs[2].peer_of_rank, (Pairs{1, 0, 2, 4, 3, 6, 5, 7}));
}

TEST(LinkSurveyTest, AsksOnlyWhatIsLeftOutAndWhatTheRanksHave) {
  EXPECT_TRUE(LinkSurvey(ConfiguredLinks()).Ask({0, 0, 1, 1}).classes.empty());
  EXPECT_EQ(LinkSurvey(LeftOut(false, true, false)).Ask({0, 0, 1, 1}).classes, (Classes{LinkClass::kOnHost}));
  EXPECT_EQ(LinkSurvey(LeftOut()).Ask({0, 1, 2}).classes, (Classes{LinkClass::kBetweenHosts}));
  EXPECT_EQ(LinkSurvey(LeftOut()).Ask({0, 0, 0}).classes, (Classes{LinkClass::kOnHost}));
  EXPECT_TRUE(LinkSurvey(LeftOut()).Ask({0}).classes.empty());
  std::mt19937_64 random(TestSeed());
  for (int draw = 0; draw < 200; ++draw) {
    std::vector<int> host_of_rank(Draw(random, 1, 20));
    for (int& host : host_of_rank) host = Draw(random, 0, 5);
    const int ranks = static_cast<int>(host_of_rank.size());
    const LinkSurvey::Probes probes = LinkSurvey(LeftOut()).Ask(host_of_rank);
    for (size_t i = 0; i < probes.pairs.size(); ++i) {
      ASSERT_TRUE(IsPairing(probes.pairs[i], ranks));
      for (int rank = 0; rank < ranks; ++rank) {
        const int peer = probes.pairs[i].peer_of_rank[rank];
        if (peer == rank) continue;
        EXPECT_EQ(host_of_rank[rank] == host_of_rank[peer], probes.classes[i] == LinkClass::kOnHost);
      }
    }
  }
}

TEST(LinkSurveyTest, KeepsWhatItHeardAndAsksAgainWhenThePoolChanges) {
  LinkSurvey survey(LeftOut());
  const Topology pool = {.node_of_seat = {0, 0, 1}};
  EXPECT_EQ(survey.Describe(pool, false).front().source, "assumed");
  const LinkSurvey::Probes probes = survey.Ask({0, 0, 1});
  EXPECT_EQ(survey.links().between_nodes, kAssumed);
  EXPECT_EQ(survey.Take(probes, AllSay(probes, kFast)),
            "links measured: between hosts 8 GB/s, 10 us; on a host 8 GB/s, 10 us");
  EXPECT_EQ(survey.links().between_nodes, kFast);
  EXPECT_EQ(survey.links().same_node, kFast);
  EXPECT_TRUE(survey.Ask({0, 0, 1}).classes.empty());
  EXPECT_EQ(survey.Describe(pool, false).front().source, "measured");
  EXPECT_EQ(survey.Describe(pool, true).front().source, "measured before");

  survey.AskAgain();
  EXPECT_EQ(survey.links().between_nodes, kFast) << "the best there is, until measured again";
  EXPECT_EQ(survey.Describe(pool, false).front().source, "measured before");
  const LinkSurvey::Probes again = survey.Ask({0, 0, 1});
  EXPECT_EQ(again.classes.size(), 2u);
  survey.Take(again, AllSay(again, kSlow));
  EXPECT_EQ(survey.links().between_nodes, kSlow);
  survey.Take(probes, AllSay(probes, kFast));
  EXPECT_EQ(survey.links().between_nodes, kSlow) << "a late word of the pool of before";
}

TEST(LinkSurveyTest, TheMedianOfThePlausibleCounts) {
  for (const Link& nonsense :
       {Link{1e-5, 0}, Link{1e-5, -1}, Link{1e-5, kNan}, Link{1e-5, kInfinity}, Link{1e-5, 1e16},
        Link{-1e-5, 1e9}, Link{kNan, 1e9}, Link{kInfinity, 1e9}, Link{61, 1e9}}) {
    LinkSurvey survey(LeftOut());
    const LinkSurvey::Probes probes = survey.Ask({0, 0, 0, 0, 0, 0});
    EXPECT_EQ(survey.Take(probes, AllSay(probes, nonsense)), "no figure that a link can have: on a host");
    EXPECT_EQ(survey.links().same_node, kAssumed);
    EXPECT_EQ(survey.Ask({0, 0}).classes.size(), 1u) << "so the next run measures";

    std::vector<LinkSurvey::RankLinks> by_rank = AllSay(probes, kFast);
    by_rank[0] = by_rank[1] = {nonsense};
    by_rank[3] = {kMiddle};
    by_rank[4] = {};  // says nothing at all
    by_rank[5] = {kSlow};
    survey.Take(probes, by_rank);
    EXPECT_EQ(survey.links().same_node, kMiddle);
  }
}

TEST(LinkSurveyTest, TheSlowerOfTwoCounts) {
  LinkSurvey survey(LeftOut());
  const LinkSurvey::Probes probes = survey.Ask({0, 0});
  std::vector<LinkSurvey::RankLinks> by_rank = AllSay(probes, kMiddle);
  by_rank[1] = {kSlow};
  survey.Take(probes, by_rank);
  EXPECT_EQ(survey.links().same_node.bytes_per_second, kSlow.bytes_per_second);
}

TEST(LinkSurveyTest, FlowsOfAHostShareItsPortOrDoNot) {
  const std::vector<int> hosts = {0, 0, 0, 0, 1, 1, 1, 1};
  LinkSurvey survey(LeftOut());
  const LinkSurvey::Probes probes = survey.Ask(hosts);
  ASSERT_EQ(probes.classes.front(), LinkClass::kOutOfHost);
  std::vector<LinkSurvey::RankLinks> by_rank = AllSay(probes, kFast);
  for (LinkSurvey::RankLinks& links : by_rank) links[0] = Link{1e-5, 3e9};
  EXPECT_EQ(
      survey.Take(probes, by_rank),
      "links measured: between hosts 8 GB/s, 10 us; on a host 8 GB/s, 10 us; out of a host 12 GB/s shared");
  EXPECT_EQ(survey.links().node_bytes_per_second, 12e9);

  survey.AskAgain();
  const LinkSurvey::Probes again = survey.Ask(hosts);
  by_rank = AllSay(again, kFast);
  by_rank[3][0]->bytes_per_second = kNan;
  survey.Take(again, by_rank);
  EXPECT_EQ(survey.links().node_bytes_per_second, 12e9) << "of a host whose sum is not known, nothing counts";
  by_rank = AllSay(again, kFast);
  for (LinkSurvey::RankLinks& links : by_rank) links[0] = Link{1e-5, 7e9};
  survey.Take(again, by_rank);
  EXPECT_EQ(survey.links().node_bytes_per_second, kInfinity) << "each flow is nearly as fast as alone";
}

// Of hosts with 3, 2, 2 and 1 ranks, the last two have one flow, which is slower than both of another host.
TEST(LinkSurveyTest, OneFlowSaysNothingOfItsHostsPort) {
  LinkSurvey survey(LeftOut());
  const LinkSurvey::Probes probes = survey.Ask({0, 0, 0, 1, 1, 2, 2, 3});
  ASSERT_EQ(probes.classes.front(), LinkClass::kOutOfHost);
  std::vector<LinkSurvey::RankLinks> by_rank = AllSay(probes, kFast);
  for (const int rank : {0, 1, 3, 4}) by_rank[rank][0]->bytes_per_second = 3e9;
  for (const int rank : {5, 7}) by_rank[rank][0]->bytes_per_second = 1e9;
  survey.Take(probes, by_rank);
  EXPECT_EQ(survey.links().node_bytes_per_second, 6e9);
}

}  // namespace
}  // namespace meshfill
