// What slices hide of head groups' all-to-alls: the formula against a port and a rank step by step, and the
// planner's choice of slices.
#include "engine/plan/exposed_exchange.h"

#include <algorithm>
#include <random>
#include <vector>

#include "engine/plan/cost_model.h"
#include "engine/plan/planner.h"
#include "gtest/gtest.h"
#include "tests/engine/layer_kinds.h"
#include "tests/engine/random_seed.h"

namespace meshfill {
namespace {

// A rank works on slices in turn, each once it is there; its port moves one message at a time, in the order
// in which they may leave.
ExposedSeconds PlayedOut(const ExchangeSeconds& exchange, double work) {
  double rank = 0, port = 0;
  std::vector<double> arrived;
  for (int slice = 0; slice < exchange.slices; ++slice) arrived.push_back(port += exchange.arrives);
  port += exchange.prefix;
  double worked = 0;
  for (int slice = 0; slice < exchange.slices; ++slice) {
    worked = rank = std::max(rank, arrived[slice]) + work / exchange.slices;
    port = std::max(port, rank) + exchange.leaves;
  }
  return {.to_tokens = worked - work, .to_heads = std::max(0.0, std::max(port, worked) - worked)};
}

TEST(ExposedExchange, IsThatOfARankAndItsPort) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  std::exponential_distribution<double> seconds;
  for (int draw = 0; draw < 2000; ++draw) {
    ExchangeSeconds exchange{.slices = Draw(random, 1, 12),
                             .arrives = seconds(random),
                             .prefix = Draw(random, 0, 1) * seconds(random),
                             .leaves = seconds(random)};
    if (Draw(random, 0, 3) == 0) exchange.arrives = 0;                   // the first layer
    if (Draw(random, 0, 3) == 0) exchange.prefix = exchange.leaves = 0;  // the last one
    const double work = Draw(random, 0, 4) * exchange.slices * seconds(random);
    const ExposedSeconds exposed = ExposedOf(exchange, work), played = PlayedOut(exchange, work);
    ASSERT_NEAR(exposed.to_tokens, played.to_tokens, 1e-9) << "seed " << seed << ", draw " << draw;
    ASSERT_NEAR(exposed.to_heads, played.to_heads, 1e-9) << "seed " << seed << ", draw " << draw;
  }
}

ModelShape Model(int q_heads, int kv_heads) {
  return {.layers = 8,
          .hidden = 1024,
          .intermediate = 2048,
          .q_heads = q_heads,
          .kv_heads = kv_heads,
          .head_dim = 64,
          .vocab = 1000,
          .context_tokens = 1 << 20,
          .dtype = DType::kBf16};
}

// Of 100 Mbit/s, as far as a slow port goes.
PlanRequest SlowPortsRequest(std::mt19937_64& random, int node_seats) {
  PlanRequest request = {.tokens = Draw<int64_t>(random, 100, 60000),
                         .ranks = node_seats << Draw(random, 0, 3),
                         .one_memory = false,
                         .hides_exchanges = true};
  request.topology = {.same_node = {.latency_seconds = 1e-5, .bytes_per_second = 10e9},
                      .between_nodes = {.latency_seconds = 1e-4, .bytes_per_second = 1e9},
                      .node_bytes_per_second = 1e9};
  for (int seat = 0; seat < request.ranks; ++seat) {
    request.topology.node_of_seat.push_back(seat / node_seats);
  }
  return request;
}

TEST(ExposedExchange, PlansInSlicesHideAndAreBounded) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  int sliced = 0;
  for (int draw = 0; draw < 150; ++draw) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", draw " << draw);
    const ModelShape model = Model(16, 1 << Draw(random, 0, 4));
    PlanRequest request = SlowPortsRequest(random, 1 << Draw(random, 0, 3));
    PoolSpeed speed = {.gemm_flops_per_second = std::exp2(Draw(random, 36, 43)),
                       .attention_flops_per_second = std::exp2(Draw(random, 36, 43)),
                       .slice_seconds = Draw(random, 0, 1) * 1e-4,
                       .slice_tokens = Draw<int64_t>(random, 1, 2000)};
    if (Draw(random, 0, 2) == 0) request.heads = 1;
    const auto choice = MakePlan(model, speed, request);
    ASSERT_TRUE(choice.ok()) << choice.status();
    const Plan& plan = choice->plan;
    PlanRequest whole = request;
    whole.hides_exchanges = false;
    const auto at_once = MakePlan(model, speed, whole);
    ASSERT_TRUE(at_once.ok()) << at_once.status();
    EXPECT_EQ(at_once->plan.exchange_tokens, 0);
    EXPECT_LE(plan.predicted.seconds, at_once->plan.predicted.seconds * 1.021);  // 1 % twice
    EXPECT_LE(LeastSeconds(model, speed, plan), plan.predicted.seconds * (1 + 1e-9));
    EXPECT_NEAR(plan.predicted.parts.transfers - plan.predicted.parts.hidden,
                plan.predicted.comm_wait_seconds, 1e-9 * plan.predicted.seconds);
    EXPECT_GE(plan.predicted.parts.hidden, -1e-12);
    if (plan.exchanges() == 1) {
      EXPECT_EQ(plan.exchange_tokens, 0);
      EXPECT_EQ(plan.slice_tokens, speed.slice_tokens);
      continue;
    }
    ++sliced;
    EXPECT_GT(plan.heads, 1);
    EXPECT_EQ(plan.exchange_tokens % plan.slice_tokens, 0);
    EXPECT_LE(plan.slice_tokens, speed.slice_tokens);
    EXPECT_LE(plan.exchanges(), kMostExchanges);
    Plan same = plan;
    same.exchange_tokens = 0;
    const Prediction unsliced = Predict(model, speed, same, same.schedule);
    EXPECT_LT(plan.predicted.seconds, 0.99 * unsliced.seconds);
    EXPECT_EQ(plan.predicted.comm_bytes, unsliced.comm_bytes);
  }
  EXPECT_GT(sliced, 5);
}

TEST(ExposedExchange, PlansWithoutSlicesWhereTheyCannotBe) {
  std::mt19937_64 random(1);
  PlanRequest request = SlowPortsRequest(random, 1);
  request.tokens = 32768;
  request.heads = 8;
  request.ranks = 8;
  request.tile = Tile{1, 1};
  request.topology.node_of_seat.resize(8);
  for (int seat = 0; seat < 8; ++seat) request.topology.node_of_seat[seat] = seat;
  const PoolSpeed speed = {.gemm_flops_per_second = 1e12, .attention_flops_per_second = 1e12};
  const auto plan = [&] { return MakePlan(Model(16, 8), speed, request).value().plan; };
  const Plan sliced = plan();
  EXPECT_GT(sliced.exchanges(), 1);
  request.weights.mode = WeightMode::kStreamed;  // two layers' weights are not there at once
  EXPECT_EQ(plan().exchanges(), 1);
  request.weights.mode = WeightMode::kResident;
  request.memory_budget_bytes = sliced.predicted.run_bytes - 1;
  const Plan small = plan();  // slices that do not fit are none
  EXPECT_EQ(small.exchanges(), 1);
  EXPECT_LT(small.predicted.run_bytes, sliced.predicted.run_bytes);
  request.memory_budget_bytes = sliced.predicted.run_bytes;
  EXPECT_EQ(plan(), sliced);
}

// 32 nodes of eight H100s with one 400 Gb/s port each.
TEST(ExposedExchange, HidesAPartBetweenNodes) {
  const PoolSpeed speed = {.gemm_flops_per_second = 600e12,
                           .attention_flops_per_second = 600e12,
                           .merge_bytes_per_second = 1e12,
                           .block_row_seconds = 1e-11,
                           .slice_tokens = 4096};
  const ModelShape model = {.layers = 32,
                            .hidden = 4096,
                            .intermediate = 14336,
                            .q_heads = 32,
                            .kv_heads = 32,
                            .head_dim = 128,
                            .vocab = 32000,
                            .context_tokens = 1 << 21,
                            .dtype = DType::kBf16};
  PlanRequest request = {.tokens = 1 << 20, .ranks = 256, .one_memory = false};
  request.topology = {.same_node = {.latency_seconds = 5e-6, .bytes_per_second = 360e9},
                      .between_nodes = {.latency_seconds = 1e-5, .bytes_per_second = 45e9},
                      .node_bytes_per_second = 45e9};
  for (int seat = 0; seat < 256; ++seat) request.topology.node_of_seat.push_back(seat / 8);
  const auto at_once = MakePlan(model, speed, request);
  request.hides_exchanges = true;
  const auto hidden = MakePlan(model, speed, request);
  ASSERT_TRUE(at_once.ok() && hidden.ok()) << at_once.status() << hidden.status();
  EXPECT_GT(hidden->plan.exchanges(), 1);
  EXPECT_LT(hidden->plan.predicted.seconds, 0.98 * at_once->plan.predicted.seconds);
  EXPECT_LT(hidden->plan.predicted.comm_wait_seconds, 0.9 * at_once->plan.predicted.comm_wait_seconds);
}

}  // namespace
}  // namespace meshfill
