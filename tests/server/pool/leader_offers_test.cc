// What a run uses of what its workers offer: what all of them can do, as sharing weights and exchanging head
// groups in slices.
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/pool/leader_fixture.h"

namespace meshfill {
namespace {

using LeaderTest = LeaderFixture;

TEST_F(LeaderTest, RunsShareWhatAllTheirWorkersCouldShareWhereThatIsFaster) {
  const auto shares = [this] {  // of the newest run
    Submit(std::vector<uint32_t>(200, 3));
    for (auto message = sent_[1].rbegin(); message != sent_[1].rend(); ++message) {
      if (message->has_prepare()) return static_cast<int>(message->prepare().weight_shares());
    }
    return -1;
  };
  const auto cancel = [this] {
    run_ = leader_.run_of(newest_);
    leader_.CancelRequest(newest_, absl::CancelledError("enough"), now_);
    Do();
    for (const Leader::Connection worker : {1, 2, 3}) Stopped(worker);
  };
  ASSERT_EQ(Join(1, StreamingOffer("a", 1 << 30)), "");
  EXPECT_EQ(shares(), 0);  // with whom?
  cancel();
  ASSERT_EQ(Join(2, StreamingOffer("b", 1 << 29)), "");
  const PoolCapacity capacity = leader_.capacity();
  ASSERT_TRUE(capacity.shared_weights.has_value());
  EXPECT_EQ(capacity.shared_weights->mode, WeightMode::kSharded);
  EXPECT_EQ(capacity.rank_weights.mode, WeightMode::kStreamed);
  EXPECT_EQ(capacity.rank_memory_bytes, 1 << 29);
  EXPECT_EQ(capacity.shared_rank_memory_bytes, (1 << 29) - 1500);
  EXPECT_EQ(shares(), 2);
  cancel();
  v1::Join packs_otherwise = StreamingOffer("c", 1 << 30);
  packs_otherwise.set_weight_layout(1);
  for (const v1::Join& other : {Offer("c"), packs_otherwise}) {  // the first one's weights are resident
    ASSERT_EQ(Join(3, other), "");
    EXPECT_FALSE(leader_.capacity().shared_weights.has_value());
    EXPECT_EQ(shares(), 0);
    cancel();
    leader_.OnDisconnected(3, now_);
    EXPECT_EQ(shares(), 2);
    cancel();
  }
  leader_.OnDisconnected(2, now_);
  v1::Join small = StreamingOffer("d", 1499);  // not even for its share
  ASSERT_EQ(Join(3, small), "");
  EXPECT_LT(leader_.capacity().shared_rank_memory_bytes, 0);
  v1::Join nonsense = StreamingOffer("e", 1 << 30);
  *nonsense.mutable_shared_weights() = nonsense.weights();
  EXPECT_NE(Join(4, nonsense).find("is not sharded"), std::string::npos);
  nonsense = SharingOffer("e");
  *nonsense.mutable_shared_weights() = nonsense.weights();
  EXPECT_NE(Join(5, nonsense).find("is not streamed"), std::string::npos);
}

TEST_F(LeaderTest, WorkersThatMustShareWeightsLayThemOutAlike) {
  v1::Join one = SharingOffer("a"), other = SharingOffer("b");
  one.set_backend("cpu/amx_bf16");
  one.set_weight_layout(1);
  other.set_backend("cpu/avx512_bf16");
  other.set_weight_layout(2);
  ASSERT_EQ(Join(1, one), "");
  EXPECT_NE(Join(2, other).find("packs weights for cpu/avx512_bf16, those that are there for cpu/amx_bf16"),
            std::string::npos);
  EXPECT_TRUE(sent_[2].back().refused().retry()) << "the other may go";
  one.set_name("c");
  EXPECT_EQ(Join(3, one), "");
  leader_.OnDisconnected(1, now_);
  leader_.OnDisconnected(3, now_);
  EXPECT_EQ(Join(4, other), "");
}

// Each worker of a run hears which share is its own, in the order of the seats, and from whom it gathers the
// others; the plan counts them.
TEST_F(LeaderTest, WorkersThatShareWeightsHearOfEachOther) {
  for (const auto& [connection, name] :
       std::map<Leader::Connection, std::string>{{1, "c"}, {2, "a"}, {3, "b"}}) {
    ASSERT_EQ(Join(connection, SharingOffer(name)), "");
  }
  Submit(std::vector<uint32_t>(200, 3));
  std::map<Leader::Connection, v1::Prepare> prepares;
  for (Leader::Connection connection : {1, 2, 3}) {
    for (const v1::LeaderMessage& message : sent_[connection]) {
      if (message.has_prepare()) prepares[connection] = message.prepare();
    }
  }
  ASSERT_EQ(prepares.size(), 3u);
  const auto plan = FromRunPlan(prepares[1].plan());
  ASSERT_TRUE(plan.ok()) << plan.status();
  const int head_seat = plan->SeatOf(plan->layout.RankOf(199));
  for (const auto& [connection, prepare] : prepares) {
    EXPECT_EQ(prepare.weight_shares(), 3u);
    EXPECT_EQ(prepare.weight_share(), prepare.first_rank());  // a rank each
    EXPECT_EQ(prepare.weight_head_share(), static_cast<uint32_t>(head_seat));
    const int rank = plan->RankAt(static_cast<int>(prepare.first_rank()));
    v1::WorkerMessage message = OfRun();
    message.mutable_prepared()->set_run(prepare.run());
    message.mutable_prepared()->add_addresses(absl::StrCat("rank ", rank));
    message.mutable_prepared()->add_addresses(absl::StrCat("share ", prepare.weight_share()));
    message.mutable_prepared()->set_hash(
        RunHash(*plan, static_cast<int>(prepare.first_rank()),
                {{plan->layout.Deal(rank, std::span<const uint32_t>(tokens_))}}));
    Say(connection, message);
  }
  ASSERT_TRUE(sent_[2].back().has_run());
  const auto& addresses = sent_[2].back().run().addresses();
  EXPECT_EQ(std::vector<std::string>(addresses.begin(), addresses.end()),
            (std::vector<std::string>{"rank 0", "rank 1", "rank 2", "share 0", "share 1", "share 2"}));
}

TEST_F(LeaderTest, WeightsAreSharedByAllWorkersOrByNone) {
  ASSERT_EQ(Join(1, SharingOffer("a")), "");
  EXPECT_NE(Join(2, Offer("b")).find("not sharded"), std::string::npos);
  EXPECT_TRUE(sent_[2].back().refused().retry());
  Submit({1, 2, 3});
  ASSERT_EQ(answers_.size(), 1u);
  EXPECT_TRUE(absl::IsFailedPrecondition(answers_[0].status()));
  EXPECT_NE(answers_[0].status().message().find("nobody to share with"), std::string::npos);
  ASSERT_EQ(Join(3, SharingOffer("c")), "");
  EXPECT_EQ(leader_.capacity().rank_memory_bytes, (1 << 30) - 1500);
  v1::Join small = SharingOffer("d");
  small.set_memory_bytes(900);
  ASSERT_EQ(Join(4, small), "");
  EXPECT_LT(leader_.capacity().rank_memory_bytes, 0);
  Submit({1, 2, 3});
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_TRUE(absl::IsFailedPrecondition(answers_[1].status()));
  EXPECT_NE(answers_[1].status().message().find("each of 3 workers keeps 1000"), std::string::npos)
      << answers_[1].status();
}

// It leads by its name, and would hold up the others.
TEST_F(LeaderTest, TheSlowestAreIdle) {
  for (const Leader::Connection worker : {2, 3}) {
    ASSERT_EQ(Join(worker, Offer(absl::StrCat("w", worker))), "");
  }
  const auto without = PlanForPool(Shape(), EngineOptions(), leader_.capacity(), 4096, {});
  ASSERT_TRUE(without.ok() && without->plan.ranks() == 2);
  v1::Join slow = Offer("a");
  slow.mutable_speed()->set_gemm_flops_per_second(1e9);
  ASSERT_EQ(Join(1, slow), "");
  Submit(std::vector<uint32_t>(4096, 1));
  EXPECT_EQ(PrepareOf(1), nullptr);
  const v1::Prepare* prepare = PrepareOf(2);
  ASSERT_NE(prepare, nullptr);
  ASSERT_NE(PrepareOf(3), nullptr);
  EXPECT_DOUBLE_EQ(FromRunPlan(prepare->plan())->predicted.seconds, without->plan.predicted.seconds);
}

// Head groups exchange in slices where all workers' messages go on beside compute, and nobody has said whole.
TEST_F(LeaderTest, PlansExchangesInSlicesWhereAllWorkersHideThem) {
  const auto exchanges = [this](bool whole) {
    PoolCapacity capacity = leader_.capacity();
    capacity.topology.same_node =
        capacity.topology.between_nodes = {.latency_seconds = 1e-6, .bytes_per_second = 1e6};
    EngineOptions options;
    options.whole_exchanges = whole;
    const auto choice =
        PlanForPool(Shape(), options, capacity, 4000, {.tile = Tile{1, 1}, .heads = capacity.ranks});
    EXPECT_TRUE(choice.ok()) << choice.status();
    return choice.ok() ? choice->plan.exchanges() : 0;
  };
  for (const int worker : {1, 2}) {
    v1::Join offer = Offer(absl::StrCat("w", worker));
    offer.mutable_speed()->set_gemm_flops_per_second(1e7);
    offer.set_many_messages(true);
    ASSERT_EQ(Join(worker, offer), "");
  }
  EXPECT_GT(exchanges(false), 1);
  EXPECT_EQ(exchanges(true), 1);
  for (const int worker : {3, 4}) ASSERT_EQ(Join(worker, Offer(absl::StrCat("w", worker))), "");
  EXPECT_EQ(exchanges(false), 1);
}

}  // namespace
}  // namespace meshfill
