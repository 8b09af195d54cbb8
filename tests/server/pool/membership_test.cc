// Who is in the pool: what a worker may offer, what all of them make together, and who stays out for how
// long. Through the leader, which is how anybody joins.
#include "server/pool/membership.h"

#include <cmath>
#include <string>
#include <vector>

#include "tests/server/pool/leader_fixture.h"

namespace meshfill {
namespace {

class MembershipTest : public LeaderFixture {
 protected:
  explicit MembershipTest(const Leader::Options& options = Options()) : LeaderFixture(options) {}

  void Leave(Leader::Connection worker) {
    v1::WorkerMessage leave = OfRun();
    leave.mutable_leave();
    Say(worker, leave);
  }
  v1::Join OfHost(const std::string& name, const std::string& host, uint32_t ranks) const {
    v1::Join offer = Offer(name, ranks);
    offer.set_host(host);
    return offer;
  }
};

TEST_F(MembershipTest, ARankHasItsPartOfItsWorkersMemory) {
  v1::Join two = Offer("a", 2);
  two.set_memory_bytes(3000);
  two.set_kv_memory_bytes(500);
  ASSERT_EQ(Join(1, two), "");
  EXPECT_EQ(leader_.capacity().ranks, 2);
  EXPECT_EQ(leader_.capacity().rank_memory_bytes, 1500);
  EXPECT_EQ(leader_.capacity().rank_kv_bytes, 250);
  v1::Join one = Offer("b");
  one.set_memory_bytes(1400);
  one.set_kv_memory_bytes(260);
  ASSERT_EQ(Join(2, one), "");
  EXPECT_EQ(leader_.capacity().rank_memory_bytes, 1400) << "the tightest";
  EXPECT_EQ(leader_.capacity().rank_kv_bytes, 250);
}

TEST_F(MembershipTest, APoolCanWhatAllItsWorkersCan) {
  for (const bool first : {true, false}) {
    v1::Join can = Offer(first ? "a" : "b"), cannot = Offer(first ? "b" : "a");
    can.set_many_messages(true);
    can.set_kv_on_host(true);
    can.mutable_speed()->set_gemm_flops_per_second(2e9);
    can.mutable_speed()->set_attention_flops_per_second(9e9);
    cannot.mutable_speed()->set_gemm_flops_per_second(9e9);
    cannot.mutable_speed()->set_attention_flops_per_second(3e9);
    ASSERT_EQ(Join(1, can), "");
    EXPECT_TRUE(leader_.capacity().many_messages);
    EXPECT_TRUE(leader_.capacity().kv_on_host);
    ASSERT_EQ(Join(2, cannot), "");
    const PoolCapacity capacity = leader_.capacity();
    EXPECT_FALSE(capacity.many_messages);
    EXPECT_FALSE(capacity.kv_on_host);
    EXPECT_EQ(capacity.speed.gemm_flops_per_second, 2e9);
    EXPECT_EQ(capacity.speed.attention_flops_per_second, 3e9);
    EXPECT_EQ(capacity.speed.lone_rank_speedup, 1);
    for (const Leader::Connection worker : {2, 1}) leader_.OnDisconnected(worker, now_);
  }
  // Whichever joins last.
  v1::Join cannot = Offer("a"), can = Offer("b");
  can.set_many_messages(true);
  can.set_kv_on_host(true);
  ASSERT_EQ(Join(3, cannot), "");
  ASSERT_EQ(Join(4, can), "");
  EXPECT_FALSE(leader_.capacity().many_messages);
  EXPECT_FALSE(leader_.capacity().kv_on_host);
}

TEST_F(MembershipTest, SeatsFollowHostsAndThenNames) {
  ASSERT_EQ(Join(1, OfHost("c", "h2", 1)), "");
  ASSERT_EQ(Join(2, OfHost("b", "h1", 1)), "");
  ASSERT_EQ(Join(3, OfHost("a", "h1", 2)), "");
  const PoolCapacity capacity = leader_.capacity();
  EXPECT_EQ(capacity.first_seats, (std::vector<int>{0, 2, 3}));
  EXPECT_EQ(capacity.topology.node_of_seat, (std::vector<int>{0, 0, 0, 1}));
}

TEST_F(MembershipTest, WhoIsSlowerSitsBehindTheOthers) {
  const auto as_fast = [&](const std::string& name, const std::string& host, double rate) {
    v1::Join offer = OfHost(name, host, 2);
    offer.mutable_speed()->set_gemm_flops_per_second(rate * 50e9);
    offer.mutable_speed()->set_attention_flops_per_second(rate * 50e9);
    return offer;
  };
  ASSERT_EQ(Join(1, as_fast("a", "h1", 0.5)), "");
  ASSERT_EQ(Join(2, as_fast("b", "h1", 1)), "");
  ASSERT_EQ(Join(3, as_fast("c", "h2", 1)), "");
  ASSERT_EQ(Join(4, as_fast("d", "h2", 0.9)), "");
  ASSERT_EQ(Join(5, as_fast("e", "h0", 0.1)), "");
  std::string names;
  for (const Leader::WorkerView& worker : leader_.workers()) names += worker.offer->name();
  EXPECT_EQ(names, "cdbae") << "hosts together; a tenth is no difference";
  const PoolCapacity capacity = leader_.capacity();
  EXPECT_EQ(capacity.topology.node_of_seat, (std::vector<int>{0, 0, 0, 0, 1, 1, 1, 1, 2, 2}));
  EXPECT_EQ(capacity.speed.gemm_flops_per_second, 5e9);
  ASSERT_EQ(capacity.faster_parts.size(), 2u);
  EXPECT_EQ(capacity.faster_parts[0].ranks, 6);
  EXPECT_EQ(capacity.faster_parts[0].speed.gemm_flops_per_second, 45e9);
  EXPECT_EQ(capacity.faster_parts[1].ranks, 8);
  EXPECT_EQ(capacity.faster_parts[1].speed.gemm_flops_per_second, 25e9);
  EXPECT_EQ(capacity.faster_parts[1].topology.node_of_seat, (std::vector<int>{0, 0, 0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(capacity.faster_parts[1].first_seats, (std::vector<int>{0, 2, 4, 6}));
}

// None is much slower than the one before it, but the last ones are than the first.
TEST_F(MembershipTest, SpeedsMayFallByLittleSteps) {
  for (int i = 0; i < 5; ++i) {
    v1::Join offer = OfHost(absl::StrCat("w", i), absl::StrCat("h", i), 1);
    offer.mutable_speed()->set_gemm_flops_per_second(std::pow(1.2, -i) * 50e9);
    offer.mutable_speed()->set_attention_flops_per_second(std::pow(1.2, -i) * 50e9);
    ASSERT_EQ(Join(static_cast<Leader::Connection>(i + 1), offer), "");
  }
  const PoolCapacity capacity = leader_.capacity();
  ASSERT_EQ(capacity.faster_parts.size(), 2u);
  EXPECT_EQ(capacity.faster_parts[0].ranks, 2);
  EXPECT_EQ(capacity.faster_parts[1].ranks, 4);
}

TEST_F(MembershipTest, AFasterPartHasItsOwnWorkersMemory) {
  for (const bool slow : {false, true}) {
    v1::Join offer = StreamingOffer(slow ? "slow" : "fast", slow ? 4000 : 9000);
    offer.set_kv_memory_bytes(slow ? 10 : 20);
    if (slow) offer.mutable_speed()->set_gemm_flops_per_second(1e9);
    ASSERT_EQ(Join(slow ? 2 : 1, offer), "");
  }
  const PoolCapacity capacity = leader_.capacity();
  EXPECT_EQ(capacity.rank_memory_bytes, 4000);
  EXPECT_TRUE(capacity.shared_weights.has_value());
  ASSERT_EQ(capacity.faster_parts.size(), 1u);
  EXPECT_EQ(capacity.faster_parts[0].rank_memory_bytes, 9000);
  EXPECT_EQ(capacity.faster_parts[0].rank_kv_bytes, 20);
  EXPECT_FALSE(capacity.faster_parts[0].shared_weights.has_value()) << "all of the pool have their shares";
}

TEST_F(MembershipTest, KnowsWhoseRanksShareCores) {
  ASSERT_EQ(Join(1, Offer("a")), "");
  EXPECT_FALSE(leader_.capacity().ranks_share_cores);
  v1::Join two = Offer("b", 2);
  two.mutable_speed()->set_lone_rank_speedup(1.5);
  ASSERT_EQ(Join(2, two), "");
  ASSERT_EQ(Join(3, Offer("c")), "");
  EXPECT_TRUE(leader_.capacity().ranks_share_cores);
}

TEST_F(MembershipTest, WhoDrainsCountsNoMore) {
  Join(1, Offer("a"));
  Join(2, Offer("b"));
  Submit(std::vector<uint32_t>(200, 1));
  EXPECT_EQ(leader_.peak_flops(), 2e12);
  Leave(2);
  EXPECT_EQ(leader_.peak_flops(), 1e12);
  EXPECT_EQ(leader_.capacity().ranks, 1);
  EXPECT_EQ(leader_.capacity().topology.node_of_seat.size(), 1u);
  EXPECT_EQ(leader_.workers().size(), 2u) << "its run goes on";
}

TEST(SeatWorkersTest, WhoHasNoRankOfThePlanHasNoSeat) {
  std::vector<Membership::Worker> workers(3);
  std::vector<const Membership::Worker*> by_place;
  for (Membership::Worker& worker : workers) {
    worker.offer.set_ranks(2);
    by_place.push_back(&worker);
  }
  const std::vector<SeatsOfWorker> seats = SeatWorkers(by_place, 3);
  ASSERT_EQ(seats.size(), 2u);
  EXPECT_EQ(seats[0].count, 2);
  EXPECT_EQ(seats[1].worker, by_place[1]);
  EXPECT_EQ(seats[1].first, 2);
  EXPECT_EQ(seats[1].count, 1);
  EXPECT_EQ(SeatWorkers(by_place, 4).size(), 2u);
}

TEST(SeatWorkersTest, SeatsOfAPartOfThePoolAreItsRanks) {
  std::vector<Membership::Worker> workers(4);
  std::vector<const Membership::Worker*> all;
  for (Membership::Worker& worker : workers) {
    worker.offer.set_ranks(static_cast<uint32_t>(1 + all.size() % 2));
    all.push_back(&worker);
  }
  EXPECT_EQ(PoolRanks(all, all, 6), (std::vector<int>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(PoolRanks(all, {all[2], all[3]}, 3), (std::vector<int>{3, 4, 5}));
  EXPECT_EQ(PoolRanks(all, {all[1], all[3]}, 3), (std::vector<int>{1, 2, 4})) << "one sits idle";
  EXPECT_EQ(PoolRanks({all[0], all[2]}, {all[1], all[2], all[3]}, 5), (std::vector<int>{2, 3, 1, 4, 5}))
      << "two drain";
}

TEST_F(MembershipTest, OffersAreBounded) {
  Leader::Connection connection = 0;
  const auto refusal = [&](auto change) {
    v1::Join offer = Offer("b");
    change(offer);
    return Join(++connection, offer);
  };
  const std::string longest(256, 'x'), longer(257, 'x');
  EXPECT_EQ(refusal([&](v1::Join& offer) {
              offer.set_host(longest);
              offer.set_backend(longest);
              offer.set_kv_address(longest);
              for (int i = 0; i < kMaxHostRanks; ++i) offer.add_devices(longest);
            }),
            "");
  leader_.OnDisconnected(connection, now_);
  const char* const reason = "256 bytes";
  EXPECT_NE(refusal([&](v1::Join& offer) { offer.set_host(longer); }).find(reason), std::string::npos);
  EXPECT_NE(refusal([&](v1::Join& offer) { offer.set_kv_address(longer); }).find(reason), std::string::npos);
  EXPECT_NE(refusal([&](v1::Join& offer) { offer.set_data_plane(longer); }).find(reason), std::string::npos);
  EXPECT_NE(refusal([&](v1::Join& offer) {
              for (int i = 0; i <= kMaxHostRanks; ++i) offer.add_devices("d");
            }).find(reason),
            std::string::npos);
  EXPECT_NE(refusal([](v1::Join& offer) { offer.set_name(std::string(129, 'n')); }).find("128 characters"),
            std::string::npos);
  EXPECT_EQ(refusal([](v1::Join& offer) { offer.set_name(std::string(128, 'n')); }), "");
}

class KeptOutTest : public MembershipTest {
 protected:
  KeptOutTest() : MembershipTest(Short()) {}
  static Leader::Options Short() {
    Leader::Options options = Options();
    options.least_kept_out = absl::Seconds(10);
    options.most_kept_out = absl::Seconds(30);
    return options;
  }
  // Worker b joins, is to prepare a run and does not. How long it is kept out.
  absl::Duration FailToPrepare() {
    EXPECT_EQ(Join(++b_, Offer("b")), "");
    Submit(std::vector<uint32_t>(200, 1));
    Prepare({1});
    Pass(Options().prepare_timeout + absl::Seconds(1), {1, b_});
    EXPECT_EQ(closed_.back(), b_);
    const absl::Time since = now_ - absl::Seconds(1);
    Stopped(1);
    Prepare({1});
    RankDone(1, 0, kVocab);
    while (Join(++b_, Offer("b")) != "" && now_ < since + absl::Minutes(10)) {
      Pass(absl::Milliseconds(500), {1});
    }
    const absl::Duration out = now_ - since;
    leader_.OnDisconnected(b_, now_);
    Do();
    return out;
  }

  Leader::Connection b_ = 1;
};

TEST_F(KeptOutTest, TheTimeDoublesUpToItsBoundAndGoodTimesAreSeen) {
  Join(1, Offer("a"));
  EXPECT_NEAR(absl::ToDoubleSeconds(FailToPrepare()), 10, 0.7);
  EXPECT_NEAR(absl::ToDoubleSeconds(FailToPrepare()), 20, 0.7);
  EXPECT_NEAR(absl::ToDoubleSeconds(FailToPrepare()), 30, 0.7);
  EXPECT_NEAR(absl::ToDoubleSeconds(FailToPrepare()), 30, 0.7);
  Pass(absl::Seconds(31), {1});
  EXPECT_NEAR(absl::ToDoubleSeconds(FailToPrepare()), 10, 0.7) << "it has long been well";
}

}  // namespace
}  // namespace meshfill
