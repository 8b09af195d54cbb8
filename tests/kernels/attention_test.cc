#include "kernels/cpu/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/kernels/random_band.h"

namespace meshfill {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// A tensor as the kernel reads it, and the values that its elements have.
struct Tensor {
  Tensor(std::vector<float> from, DType dtype)
      : values(std::move(from)), stored(values.size() * DTypeBytes(dtype)) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (dtype == DType::kF32) {
        std::memcpy(&stored[4 * i], &values[i], 4);
      } else {
        const BFloat16 rounded = BFloat16::FromFloat(values[i]);
        values[i] = rounded.ToFloat();
        std::memcpy(&stored[2 * i], &rounded, 2);
      }
    }
  }
  std::vector<float> values;
  std::vector<char> stored;
};

std::vector<float> RandomValues(std::mt19937& random, int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

struct Shape {
  int q_heads = 1;
  int kv_heads = 1;
  int head_dim = 64;
  int64_t q_tokens = 0;
  int64_t k_tokens = 0;
  Band band = {};

  int64_t q_rows() const { return q_heads * q_tokens; }
  int64_t kv_rows() const { return kv_heads * k_tokens; }
  std::string DebugString() const {
    return absl::StrCat("q_heads ", q_heads, " kv_heads ", kv_heads, " head_dim ", head_dim, " q_tokens ",
                        q_tokens, " k_tokens ", k_tokens, ", ", meshfill::DebugString(band));
  }
};

struct State {
  std::vector<float> o;
  std::vector<float> lse;

  static State Poisoned(const Shape& shape) {
    return {std::vector<float>(shape.q_rows() * shape.head_dim, kNaN),
            std::vector<float>(shape.q_rows(), kNaN)};
  }
  // Equality of bits: poison left in place is equal to itself.
  bool operator==(const State& other) const {
    return o.size() == other.o.size() && lse.size() == other.lse.size() &&
           std::memcmp(o.data(), other.o.data(), o.size() * sizeof(float)) == 0 &&
           std::memcmp(lse.data(), other.lse.data(), lse.size() * sizeof(float)) == 0;
  }
};

float DefaultScale(const Shape& shape) { return 1.0f / std::sqrt(static_cast<float>(shape.head_dim)); }

AttentionBlockArgs Args(const Shape& shape, const Tensor& q, const Tensor& k, const Tensor& v, State& state) {
  return {.q = q.stored.data(),
          .k = k.stored.data(),
          .v = v.stored.data(),
          .q_tokens = shape.q_tokens,
          .k_tokens = shape.k_tokens,
          .q_heads = shape.q_heads,
          .kv_heads = shape.kv_heads,
          .head_dim = shape.head_dim,
          .band = shape.band,
          .scale = DefaultScale(shape),
          .carry_in = false,
          .o = state.o.data(),
          .lse = state.lse.data()};
}

// A set of keys and values that a query may see, with their own positions.
struct KvChunk {
  const Tensor* k;
  const Tensor* v;
  SlotPositions positions;
  int64_t tokens;
};

// One row of attention over several chunks, in double, straight from the definition.
struct ReferenceRow {
  std::vector<double> o;
  // By element, the L2 norm of the terms that o is the sum of: the rounding of a term does not shrink where
  // the terms happen to cancel, so errors are measured against this and not against o.
  std::vector<double> terms;
  double lse;
};

ReferenceRow Reference(const Shape& shape, float scale, const Tensor& q, const std::vector<KvChunk>& chunks,
                       int head, int64_t q_slot) {
  const int64_t q_row = head * shape.q_tokens + q_slot;
  const int64_t kv_head = head / (shape.q_heads / shape.kv_heads);
  std::vector<double> scores;
  std::vector<const float*> values;
  for (const KvChunk& chunk : chunks) {
    const Band band{
        .q = shape.band.q, .k = chunk.positions, .window = shape.band.window, .first_q = shape.band.first_q};
    for (int64_t slot = 0; slot < chunk.tokens; ++slot) {
      if (!band.Visible(q_slot, slot)) continue;
      const int64_t offset = (kv_head * chunk.tokens + slot) * shape.head_dim;
      double dot = 0;
      for (int d = 0; d < shape.head_dim; ++d) {
        dot += double{q.values[q_row * shape.head_dim + d]} * double{chunk.k->values[offset + d]};
      }
      scores.push_back(dot * scale);
      values.push_back(&chunk.v->values[offset]);
    }
  }
  ReferenceRow row{std::vector<double>(shape.head_dim, 0.0), std::vector<double>(shape.head_dim, 0.0),
                   -kInfinity};
  if (scores.empty()) return row;
  const double max = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (size_t i = 0; i < scores.size(); ++i) {
    const double weight = std::exp(scores[i] - max);
    sum += weight;
    for (int d = 0; d < shape.head_dim; ++d) {
      row.o[d] += weight * values[i][d];
      row.terms[d] = std::hypot(row.terms[d], weight * values[i][d]);
    }
  }
  for (double& o : row.o) o /= sum;
  for (double& terms : row.terms) terms /= sum;
  row.lse = max + std::log(sum);
  return row;
}

class AttentionTest : public testing::TestWithParam<std::tuple<std::string, DType>> {
 protected:
  const std::string& target() const { return std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }
  double o_tolerance() const { return dtype() == DType::kF32 ? 2e-6 : 6e-3; }
  // Probabilities are rounded to bf16 before they are summed: up to 2^-9 of the sum.
  double lse_tolerance() const { return dtype() == DType::kF32 ? 4e-6 : 4e-3; }

  Tensor RandomTensor(int64_t rows, int head_dim) {
    return Tensor(RandomValues(random_, rows * head_dim), dtype());
  }

  void Run(const AttentionBlockArgs& args, int threads = 1) {
    ThreadPool pool(threads);
    const absl::Status status = CpuAttentionBlock(args, dtype(), target(), pool, nullptr);
    ASSERT_TRUE(status.ok()) << status;
  }

  // Every `step`-th row against the reference: L2 error over them relative to the terms', LSE one by one.
  void ExpectMatches(const Shape& shape, float scale, const Tensor& q, const std::vector<KvChunk>& chunks,
                     const State& state, int64_t step = 1) {
    double error = 0, norm = 0;
    for (int64_t row = 0; row < shape.q_rows(); row += step) {
      const int head = static_cast<int>(row / shape.q_tokens);
      const ReferenceRow expected = Reference(shape, scale, q, chunks, head, row % shape.q_tokens);
      for (int d = 0; d < shape.head_dim; ++d) {
        const double o = state.o[row * shape.head_dim + d];
        error += (o - expected.o[d]) * (o - expected.o[d]);
        norm += expected.terms[d] * expected.terms[d];
        ASSERT_TRUE(expected.lse != -kInfinity || o == 0) << "row " << row << " sees nothing, but o is " << o;
      }
      if (expected.lse == -kInfinity) {
        ASSERT_EQ(state.lse[row], -kInfinity) << "row " << row;
      } else {
        ASSERT_NEAR(state.lse[row], expected.lse, lse_tolerance() * std::max(1.0, std::abs(expected.lse)))
            << "row " << row;
      }
    }
    ASSERT_LE(std::sqrt(error), o_tolerance() * std::sqrt(norm));
  }

  Shape RandomShape() {
    Shape shape;
    shape.kv_heads = Pick(random_, {1, 1, 2, 3});
    shape.q_heads = shape.kv_heads * Pick(random_, {1, 1, 2, 4, 7});
    shape.head_dim = Pick(random_, {1, 3, 8, 16, 17, 64, 80, 96, 127, 128, 192, 255, 256});
    shape.q_tokens = Pick<int64_t>(random_, {0, 1, 5, 6, 7, Draw(random_, 1, 130)});
    shape.k_tokens = Pick<int64_t>(random_, {0, 1, 2, 63, 64, 65, Draw(random_, 1, 700)});
    shape.band = RandomBand(random_, shape.q_tokens, shape.k_tokens);
    return shape;
  }

  const uint32_t seed_ = TestSeed();
  std::mt19937 random_{seed_};
};

TEST_P(AttentionTest, RandomShapesMatchTheDefinition) {
  for (int draw = 0; draw < 60; ++draw) {
    const Shape shape = RandomShape();
    SCOPED_TRACE(absl::StrCat("seed ", seed_, ", draw ", draw, ": ", shape.DebugString()));
    const Tensor q = RandomTensor(shape.q_rows(), shape.head_dim);
    const Tensor k = RandomTensor(shape.kv_rows(), shape.head_dim);
    const Tensor v = RandomTensor(shape.kv_rows(), shape.head_dim);
    State state = State::Poisoned(shape);
    Run(Args(shape, q, k, v, state));
    ExpectMatches(shape, DefaultScale(shape), q, {{&k, &v, shape.band.k, shape.k_tokens}}, state);
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionTest, StaysAccurateOverThousandsOfKeys) {
  for (const int head_dim : {64, 128}) {
    Shape shape{.head_dim = head_dim, .q_tokens = 4096, .k_tokens = 4096};
    SCOPED_TRACE(absl::StrCat("seed ", seed_, ": ", shape.DebugString()));
    const Tensor q = RandomTensor(shape.q_rows(), head_dim);
    const Tensor k = RandomTensor(shape.kv_rows(), head_dim);
    const Tensor v = RandomTensor(shape.kv_rows(), head_dim);
    State state = State::Poisoned(shape);
    Run(Args(shape, q, k, v, state), 2);
    ExpectMatches(shape, DefaultScale(shape), q, {{&k, &v, shape.band.k, shape.k_tokens}}, state, 41);
  }
}

// A striped sequence's KV chunks, taken in any order, leave what one pass over all of them would.
TEST_P(AttentionTest, CarriedStateEqualsOneWhole) {
  for (int draw = 0; draw < 12; ++draw) {
    const int64_t n = Draw(random_, 2, 3), width = Pick<int64_t>(random_, {1, 16, 64});
    const int64_t rank = Draw(random_, 0, n - 1);
    Shape shape{.q_heads = 4, .kv_heads = 2, .head_dim = Pick(random_, {5, 64, 128})};
    shape.q_tokens = Draw(random_, 1, 90);
    shape.band.q = {.base = rank, .stride = n, .width = width};
    if (draw % 3 == 0) shape.band.window = Draw(random_, 1, 200);
    std::vector<int64_t> order(n);
    std::vector<Tensor> k, v;
    std::vector<KvChunk> chunks;
    k.reserve(n), v.reserve(n);
    for (int64_t j = 0; j < n; ++j) {
      order[j] = j;
      const int64_t tokens = Draw(random_, 0, 300);
      k.push_back(RandomTensor(shape.kv_heads * tokens, shape.head_dim));
      v.push_back(RandomTensor(shape.kv_heads * tokens, shape.head_dim));
      chunks.push_back({&k[j], &v[j], {.base = j, .stride = n, .width = width}, tokens});
    }
    std::shuffle(order.begin(), order.end(), random_);
    SCOPED_TRACE(absl::StrCat("seed ", seed_, ", draw ", draw, ": ", shape.DebugString()));
    const Tensor q = RandomTensor(shape.q_rows(), shape.head_dim);
    State state = State::Poisoned(shape);
    for (const int64_t j : order) {
      shape.band.k = chunks[j].positions;
      shape.k_tokens = chunks[j].tokens;
      AttentionBlockArgs args = Args(shape, q, k[j], v[j], state);
      args.carry_in = j != order.front();
      Run(args);
    }
    ExpectMatches(shape, DefaultScale(shape), q, chunks, state);
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionTest, ABlockThatShowsNothingKeepsTheCarriedBits) {
  Shape shape{.q_heads = 2, .kv_heads = 1, .head_dim = 16, .q_tokens = 40, .k_tokens = 30};
  shape.band.k.base = 20;  // queries 0 to 19 see no key
  const Tensor q = RandomTensor(shape.q_rows(), shape.head_dim);
  const Tensor k = RandomTensor(shape.kv_rows(), shape.head_dim);
  const Tensor v = RandomTensor(shape.kv_rows(), shape.head_dim);
  State state{RandomValues(random_, shape.q_rows() * shape.head_dim), RandomValues(random_, shape.q_rows())};
  const State before = state;
  AttentionBlockArgs args = Args(shape, q, k, v, state);
  args.carry_in = true;
  Run(args);
  for (int64_t row = 0; row < shape.q_rows(); ++row) {
    EXPECT_EQ(state.lse[row] == before.lse[row], row % shape.q_tokens < 20) << "row " << row;
    EXPECT_EQ(state.o[row * shape.head_dim] == before.o[row * shape.head_dim], row % shape.q_tokens < 20);
  }
}

TEST_P(AttentionTest, NoKeysOrNoQueries) {
  const Shape no_keys{.q_heads = 3, .kv_heads = 3, .head_dim = 33, .q_tokens = 7, .k_tokens = 0};
  const Tensor q = RandomTensor(no_keys.q_rows(), no_keys.head_dim);
  const Tensor none({}, dtype());
  State state = State::Poisoned(no_keys);
  AttentionBlockArgs args = Args(no_keys, q, none, none, state);
  Run(args);
  EXPECT_EQ(state.o, std::vector<float>(state.o.size(), 0.0f));
  EXPECT_EQ(state.lse, std::vector<float>(state.lse.size(), -kInfinity));

  args.carry_in = true;
  Run(args);
  EXPECT_EQ(state.o, std::vector<float>(state.o.size(), 0.0f));
  EXPECT_EQ(state.lse, std::vector<float>(state.lse.size(), -kInfinity));

  const Shape no_queries{.head_dim = 33, .q_tokens = 0, .k_tokens = 7};
  const Tensor k = RandomTensor(no_queries.kv_rows(), no_queries.head_dim);
  State empty = State::Poisoned(no_queries);
  Run(Args(no_queries, none, k, k, empty));
}

// Keys and values that no query sees may hold anything, where whole tiles of them are hidden.
TEST_P(AttentionTest, HiddenTilesAreNotTouched) {
  Shape shape{.head_dim = 64, .q_tokens = 64, .k_tokens = 1024};
  shape.band.q.base = 512;
  shape.band.window = 128;  // keys 385 to 575
  std::vector<float> k_values = RandomValues(random_, shape.kv_rows() * shape.head_dim);
  std::vector<float> v_values = RandomValues(random_, shape.kv_rows() * shape.head_dim);
  for (auto* values : {&k_values, &v_values}) {
    std::fill(values->begin(), values->begin() + 384 * shape.head_dim, kNaN);
    std::fill(values->begin() + 576 * shape.head_dim, values->end(), kNaN);
  }
  const Tensor q = RandomTensor(shape.q_rows(), shape.head_dim);
  const Tensor k(k_values, dtype()), v(v_values, dtype());
  State state = State::Poisoned(shape);
  Run(Args(shape, q, k, v, state));
  SCOPED_TRACE(absl::StrCat("seed ", seed_));
  ExpectMatches(shape, DefaultScale(shape), q, {{&k, &v, shape.band.k, shape.k_tokens}}, state);
}

// Scores of ±10,000 that are exact in every dtype, so that the result must be, too.
TEST_P(AttentionTest, ExtremeScoresNeitherOverflowNorVanish) {
  Shape shape{.head_dim = 32, .q_tokens = 30, .k_tokens = 300};
  shape.band.q.base = 300;  // all keys visible
  std::vector<float> q_values(shape.q_rows() * shape.head_dim, 0.0f);
  std::vector<float> k_values(shape.kv_rows() * shape.head_dim, 0.0f);
  for (int64_t row = 0; row < shape.q_rows(); ++row)
    q_values[row * shape.head_dim] = row % 2 == 0 ? 100.0f : -100.0f;
  for (int64_t row = 0; row < shape.kv_rows(); ++row) {
    k_values[row * shape.head_dim] = Pick(random_, {-100.0f, -99.5f, 0.0f, 99.5f, 100.0f});
  }
  const Tensor q(q_values, dtype()), k(k_values, dtype());
  const Tensor v = RandomTensor(shape.kv_rows(), shape.head_dim);
  State state = State::Poisoned(shape);
  AttentionBlockArgs args = Args(shape, q, k, v, state);
  args.scale = 1.0f;
  Run(args);
  SCOPED_TRACE(absl::StrCat("seed ", seed_));
  ExpectMatches(shape, 1.0f, q, {{&k, &v, shape.band.k, shape.k_tokens}}, state);

  // Only the lowest scores are visible: the sum must not underflow to an empty row.
  for (int64_t row = 0; row < shape.kv_rows(); ++row) k_values[row * shape.head_dim] = -100.0f;
  const Tensor lowest(k_values, dtype());
  args.k = lowest.stored.data();
  Run(args);
  ExpectMatches(shape, 1.0f, q, {{&lowest, &v, shape.band.k, shape.k_tokens}}, state);
}

// A NaN must reach the logits, where the server looks for it, and no row that does not see it.
TEST_P(AttentionTest, NaNSpreadsToTheRowsThatSeeIt) {
  const Shape shape{.head_dim = 20, .q_tokens = 300, .k_tokens = 300};
  std::vector<float> k_values = RandomValues(random_, shape.kv_rows() * shape.head_dim);
  k_values[100 * shape.head_dim + 7] = kNaN;
  const Tensor q = RandomTensor(shape.q_rows(), shape.head_dim), k(k_values, dtype());
  const Tensor v = RandomTensor(shape.kv_rows(), shape.head_dim);
  State state = State::Poisoned(shape);
  Run(Args(shape, q, k, v, state));
  for (int64_t row = 0; row < shape.q_rows(); ++row) {
    EXPECT_EQ(std::isnan(state.lse[row]), row >= 100) << "row " << row;
    EXPECT_EQ(std::isnan(state.o[row * shape.head_dim]), row >= 100) << "row " << row;
  }
}

TEST_P(AttentionTest, TheSameBitsForAnyThreadCountAndAnyCutOfTheQueries) {
  Shape shape{.q_heads = 6, .kv_heads = 2, .head_dim = 72, .q_tokens = 700, .k_tokens = 900};
  shape.band.q = {.base = 1, .stride = 2, .width = 16};
  shape.band.k = {.base = 0, .stride = 2, .width = 16};
  SCOPED_TRACE(absl::StrCat("seed ", seed_));
  const Tensor q = RandomTensor(shape.q_rows(), shape.head_dim);
  const Tensor k = RandomTensor(shape.kv_rows(), shape.head_dim);
  const Tensor v = RandomTensor(shape.kv_rows(), shape.head_dim);
  State whole = State::Poisoned(shape);
  Run(Args(shape, q, k, v, whole));
  for (const int threads : {1, 2, 3}) {
    State state = State::Poisoned(shape);
    Run(Args(shape, q, k, v, state), threads);
    EXPECT_TRUE(state == whole) << threads << " threads";
  }
  // The first head's first 100 queries alone.
  Shape cut = shape;
  cut.q_heads = cut.kv_heads = 1;
  cut.q_tokens = 100;
  State state = State::Poisoned(cut);
  Run(Args(cut, q, k, v, state));
  EXPECT_EQ(std::memcmp(state.o.data(), whole.o.data(), state.o.size() * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(state.lse.data(), whole.lse.data(), state.lse.size() * sizeof(float)), 0);
}

// What was accumulated must be scaled on the way, of some rows here and of others there.
TEST_P(AttentionTest, ScoresThatGrowAlongTheRow) {
  for (const int head_dim : {24, 64, 128}) {
    for (const bool towards_the_end : {false, true}) {
      Shape shape{.q_heads = 2, .kv_heads = 1, .head_dim = head_dim, .q_tokens = 50};
      shape.k_tokens = Draw(random_, 600, 1300);
      shape.band.q.base = shape.k_tokens;
      SCOPED_TRACE(absl::StrCat("seed ", seed_, ": ", shape.DebugString()));
      std::vector<float> k_values = RandomValues(random_, shape.kv_rows() * head_dim);
      for (int64_t i = 0; i < std::ssize(k_values); ++i) {
        const float along = static_cast<float>(i / head_dim) / static_cast<float>(shape.k_tokens);
        k_values[i] *= 1 + 8 * (towards_the_end ? along : 1 - along);
      }
      const Tensor q = RandomTensor(shape.q_rows(), head_dim), k(k_values, dtype());
      const Tensor v = RandomTensor(shape.kv_rows(), head_dim);
      State state = State::Poisoned(shape);
      Run(Args(shape, q, k, v, state));
      ExpectMatches(shape, DefaultScale(shape), q, {{&k, &v, shape.band.k, shape.k_tokens}}, state);
      if (HasFatalFailure()) return;
    }
  }
}

// Other rows of its strip have larger scores, and raise what they are measured from elsewhere.
TEST_P(AttentionTest, ARowsBitsAreItsOwn) {
  Shape shape{.head_dim = 128, .q_tokens = 70, .k_tokens = 1000};
  shape.band.q.base = shape.k_tokens;
  SCOPED_TRACE(absl::StrCat("seed ", seed_));
  std::vector<float> q_values = RandomValues(random_, shape.q_rows() * shape.head_dim);
  const Tensor k = RandomTensor(shape.kv_rows(), shape.head_dim);
  const Tensor v = RandomTensor(shape.kv_rows(), shape.head_dim);
  State before = State::Poisoned(shape), after = before;
  Run(Args(shape, Tensor(q_values, dtype()), k, v, before));
  const auto is_kept = [](int64_t row) { return row % 5 == 0; };
  for (int64_t i = 0; i < std::ssize(q_values); ++i) {
    if (!is_kept(i / shape.head_dim)) q_values[i] *= static_cast<float>(i / shape.head_dim % 9);
  }
  Run(Args(shape, Tensor(q_values, dtype()), k, v, after));
  for (int64_t row = 0; row < shape.q_rows(); ++row) {
    if (!is_kept(row)) continue;
    const auto bytes = static_cast<size_t>(shape.head_dim) * sizeof(float);
    EXPECT_EQ(after.lse[row], before.lse[row]) << row;
    EXPECT_EQ(std::memcmp(&after.o[row * shape.head_dim], &before.o[row * shape.head_dim], bytes), 0) << row;
  }
}

TEST_P(AttentionTest, ARaisedStopTokenCancels) {
  // More than a second of work on the fastest core: a token looked at only at the end would be noticed.
  Shape shape{.head_dim = 16, .q_tokens = 1 << 13, .k_tokens = 1 << 19};
  shape.band.q.base = shape.k_tokens;
  const Tensor q(std::vector<float>(shape.q_rows() * shape.head_dim, 0.5f), dtype());
  const Tensor k(std::vector<float>(shape.kv_rows() * shape.head_dim, 0.5f), dtype());
  State state = State::Poisoned(shape);
  ThreadPool pool(1);
  constexpr std::chrono::seconds kSoon(1);
  auto least = std::chrono::steady_clock::duration::max();  // the machine may stand still in any attempt
  for (int attempt = 0; attempt < 5 && least >= kSoon; ++attempt) {
    StopToken stop;
    std::thread stopper([&stop] {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      stop.Stop();
    });
    const auto start = std::chrono::steady_clock::now();
    const absl::Status stopped =
        CpuAttentionBlock(Args(shape, q, k, k, state), dtype(), target(), pool, &stop);
    least = std::min(least, std::chrono::steady_clock::now() - start);
    stopper.join();
    EXPECT_EQ(stopped.code(), absl::StatusCode::kCancelled);
  }
  EXPECT_LT(least, kSoon);

  StopToken stop;
  stop.Stop();
  const absl::Status before = CpuAttentionBlock(Args(shape, q, k, k, state), dtype(), target(), pool, &stop);
  EXPECT_EQ(before.code(), absl::StatusCode::kCancelled);
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionTest,
                         testing::Combine(testing::ValuesIn(SupportedAttentionTargets()),
                                          testing::Values(DType::kF32, DType::kBf16)),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param), "_",
                                               DTypeName(std::get<1>(info.param)));
                         });

TEST(AttentionArgumentsTest, WhatCannotBeComputedIsRefused) {
  ThreadPool pool(1);
  State state;
  const Tensor none({}, DType::kF32);
  AttentionBlockArgs args = Args(Shape{}, none, none, none, state);
  EXPECT_TRUE(CpuAttentionBlock(args, DType::kF32, "portable", pool, nullptr).ok());
  EXPECT_EQ(CpuAttentionBlock(args, DType::kF16, "portable", pool, nullptr).code(),
            absl::StatusCode::kInvalidArgument);
  const absl::Status no_target = CpuAttentionBlock(args, DType::kF32, "mmx", pool, nullptr);
  EXPECT_EQ(no_target.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(no_target.message().find("portable"), std::string::npos) << no_target;
  for (const float scale : {0.0f, -1.0f, kNaN, kInfinity}) {
    args.scale = scale;
    EXPECT_EQ(CpuAttentionBlock(args, DType::kF32, "portable", pool, nullptr).code(),
              absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace meshfill
