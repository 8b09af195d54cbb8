
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "tests/kernels/lone_stream.h"
#include "tests/kernels/random_tensor.h"

namespace meshfill {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The reference itself, against what is known in closed form.
class ReferenceStreamTest : public testing::Test {
 protected:
  // Normal numbers.
  std::vector<float> Normal(int64_t count, float scale = 1) {
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> values(count);
    for (float& value : values) value = normal(random_);
    return values;
  }

  const uint64_t seed_ = TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "MESHFILL_SEED=" << seed_};
  std::mt19937_64 random_{seed_};
  const LoneStream f32_ = ReferenceStream(DType::kF32);
  const LoneStream bf16_ = ReferenceStream(DType::kBf16);
};

void ExpectNear(const std::vector<float>& got, const std::vector<float>& expected, double tolerance) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i]) continue;  // infinities too
    ASSERT_NEAR(got[i], expected[i], tolerance) << "at " << i;
  }
}

// ---- Linear layers.

TEST_F(ReferenceStreamTest, GemmStacksItsSourcesAndAddsTheirBiases) {
  const std::vector<float> upper = {1, 2, 3, 4}, lower = {5, 6}, bias = {100, 200}, x = {1, 10, 0, -1};
  const std::vector<WeightRows> rows = {
      {.data = upper.data(), .dtype = DType::kF32, .rows = 2, .bias = bias.data()},
      {.data = lower.data(), .dtype = DType::kF32, .rows = 1}};
  const auto weight = f32_.device().PackWeight(rows, 2);
  ASSERT_TRUE(weight.ok()) << weight.status();
  std::vector<float> y(6, 1000);
  GemmArgs args{.weight = weight->get(), .x = x.data(), .tokens = 2, .y = y.data(), .y_dtype = DType::kF32};
  ASSERT_TRUE(f32_->Gemm(args).ok());
  EXPECT_EQ(y, (std::vector<float>{121, 243, 65, 98, 196, -6}));
  args.accumulate = true;
  ASSERT_TRUE(f32_->Gemm(args).ok());
  EXPECT_EQ(y, (std::vector<float>{242, 486, 130, 196, 392, -12}));
}

TEST_F(ReferenceStreamTest, GemmIsLinear) {
  const int64_t in = Draw(random_, 1, 50), out = Draw(random_, 1, 50);
  const std::vector<float> w = Normal(out * in), x = Normal(2 * in);
  const WeightRows rows{.data = w.data(), .dtype = DType::kF32, .rows = out};
  const auto weight = f32_.device().PackWeight({&rows, 1}, in);
  std::vector<float> both(x.begin(), x.begin() + in), y(2 * out), y_both(out);
  for (int64_t i = 0; i < in; ++i) both[i] = 2 * x[i] - 3 * x[in + i];
  for (auto [from, tokens, to] : {std::tuple(x.data(), 2, y.data()), {both.data(), 1, y_both.data()}}) {
    ASSERT_TRUE(
        f32_->Gemm({.weight = weight->get(), .x = from, .tokens = tokens, .y = to, .y_dtype = DType::kF32})
            .ok());
  }
  for (int64_t row = 0; row < out; ++row) EXPECT_NEAR(y_both[row], 2 * y[row] - 3 * y[out + row], 1e-4);
}

// ---- Norm, activation, movement.

TEST_F(ReferenceStreamTest, RmsNormMakesTheRootMeanSquareOne) {
  const int64_t width = Draw(random_, 1, 300);
  const std::vector<float> x = Normal(width, 7), ones(width, 1.0f);
  std::vector<float> y(width);
  ASSERT_TRUE(f32_->RmsNorm(x.data(), ones.data(), 1, width, 0.0f, y.data()).ok());
  const double squares = std::inner_product(y.begin(), y.end(), y.begin(), 0.0);
  EXPECT_NEAR(squares / width, 1, 1e-5);
  EXPECT_NEAR(y[0] * x.back(), y.back() * x[0], 1e-4);  // in x's direction
}

TEST_F(ReferenceStreamTest, SwiGluAtKnownPoints) {
  const std::vector<float> x = {0, 1, -1, 60, 3, 2, 2, 0.5f};  // gates, then ups
  std::vector<float> y(4);
  ASSERT_TRUE(f32_->Activate({.x = x.data(), .tokens = 1, .width = 4, .y = y.data()}).ok());
  const auto e = static_cast<float>(std::exp(1.0));
  ExpectNear(y, {0, 2 * e / (e + 1), -2 / (e + 1), 30}, 1e-6);
}

TEST_F(ReferenceStreamTest, ClampedSwiGluAtKnownPoints) {
  const std::vector<float> x = {1, 0.5f, 9, 2, 1, -8, -1, 8};  // gate, up, …
  std::vector<float> y(4);
  ASSERT_TRUE(f32_->Activate({.activation = {.gating = Gating::kClampedSwiGlu, .alpha = 2, .limit = 7},
                              .x = x.data(),
                              .tokens = 2,
                              .width = 2,
                              .y = y.data()})
                  .ok());
  const auto sigmoid = [](double s) { return static_cast<float>(1 / (1 + std::exp(-s))); };
  ExpectNear(y, {1.5f * sigmoid(2), 21 * sigmoid(14), -6 * sigmoid(2), -8 * sigmoid(-2)}, 1e-5);
}

TEST_F(ReferenceStreamTest, GeGluAtKnownPoints) {
  const std::vector<float> x = {0, 1, -1, 60, 3, 2, 2, 0.5f};  // gates, then ups
  std::vector<float> y(4);
  ASSERT_TRUE(f32_->Activate({.activation = {.gating = Gating::kGeGlu},
                              .x = x.data(),
                              .tokens = 1,
                              .width = 4,
                              .y = y.data()})
                  .ok());
  ExpectNear(y, {0, 2 * 0.8411920f, 2 * -0.1588080f, 30}, 1e-6);
}

TEST_F(ReferenceStreamTest, AddRmsNormAddsWhatRmsNormGives) {
  const int64_t width = Draw(random_, 1, 300);
  const std::vector<float> y = Normal(width, 7), weight = Normal(width, 1);
  std::vector<float> normed(width), x(width, 3.0f);
  ASSERT_TRUE(f32_->RmsNorm(y.data(), weight.data(), 1, width, 1e-5f, normed.data()).ok());
  ASSERT_TRUE(f32_->AddRmsNorm(y.data(), weight.data(), 1, width, 1e-5f, x.data()).ok());
  ASSERT_TRUE(f32_->Scale(x.data(), width, 2).ok());
  for (int64_t i = 0; i < width; ++i) EXPECT_NEAR(x[i], 2 * (3 + normed[i]), 1e-5);
}

TEST_F(ReferenceStreamTest, Bf16OutputsAreRoundedOnceToNearestEven) {
  // 1 + 2^-8 is halfway between 1 and 1 + 2^-7; a little more rounds up.
  const std::vector<float> from = {1 + 0x1p-8f, 1 + 0x3p-8f, 1 + 0x1p-8f + 0x1p-20f, kInfinity};
  std::vector<BFloat16> to(4);
  ASSERT_TRUE(bf16_->Convert(from.data(), 4, DType::kBf16, to.data()).ok());
  EXPECT_EQ(to[0].ToFloat(), 1.0f);
  EXPECT_EQ(to[1].ToFloat(), 1 + 0x1p-6f);
  EXPECT_EQ(to[2].ToFloat(), 1 + 0x1p-7f);
  EXPECT_EQ(to[3].ToFloat(), kInfinity);
}

TEST_F(ReferenceStreamTest, EmbedMovesRows) {
  const std::vector<float> table = {0, 1, 10, 11, 20, 21};
  const std::vector<uint32_t> ids = {2, 0, 2};
  std::vector<float> x(6);
  ASSERT_TRUE(f32_->Embed(ids, table.data(), DType::kF32, 2, x.data()).ok());
  EXPECT_EQ(x, (std::vector<float>{20, 21, 0, 1, 20, 21}));
}

TEST_F(ReferenceStreamTest, CopyHeadsMovesRows) {
  const std::vector<float> o = {0, 1, 2, 3, 4, 5, 6, 7};  // 2 heads, 4 slots, head_dim 1
  std::vector<float> y(4);
  const HeadRows slots_1_and_2 = {
      .dtype = DType::kF32, .head_stride = 4, .slot_stride = 1, .slots = {.base = 1}};
  const HeadRows tokens_outermost = {.dtype = DType::kF32, .head_stride = 1, .slot_stride = 2};
  ASSERT_TRUE(f32_->CopyHeads({.from = o.data(),
                               .from_rows = slots_1_and_2,
                               .to = y.data(),
                               .to_rows = tokens_outermost,
                               .heads = 2,
                               .tokens = 2,
                               .head_dim = 1})
                  .ok());
  EXPECT_EQ(y, (std::vector<float>{1, 5, 2, 6}));

  std::vector<BFloat16> rounded(8, BFloat16::FromFloat(-1));
  const std::vector<float> x = {1, 1 + 0x1p-8f, 3 + 0x1p-20f, 4};
  ASSERT_TRUE(
      f32_->CopyHeads(
              {.from = x.data(),
               .from_rows = {.dtype = DType::kF32, .head_stride = 4, .slot_stride = 1},
               .to = rounded.data(),
               .to_rows = {.dtype = DType::kBf16,
                           .head_stride = 8,
                           .slot_stride = 1,
                           .slots = {.base = 1, .stride = 2, .width = 2}},  // stripes 1 and 3 of 2 slots
               .heads = 1,
               .tokens = 4,
               .head_dim = 1})
          .ok());
  std::vector<float> got;
  for (const BFloat16 value : rounded) got.push_back(value.ToFloat());
  EXPECT_EQ(got, (std::vector<float>{-1, -1, 1, 1, -1, -1, 3, 4}));
}

// ---- RoPE.

class RopeTest : public ReferenceStreamTest {
 protected:
  static constexpr int kHeadDim = 10;

  // One token's q and k heads at `position`, rotated.
  std::pair<std::vector<float>, std::vector<float>> Rotate(const std::vector<float>& qkv, double position) {
    std::vector<float> cos(kHeadDim / 2), sin(kHeadDim / 2), q(kHeadDim), k(kHeadDim), v(kHeadDim);
    for (int i = 0; i < kHeadDim / 2; ++i) {
      const double angle = position * std::pow(100.0, -2.0 * i / kHeadDim);
      cos[i] = static_cast<float>(std::cos(angle));
      sin[i] = static_cast<float>(std::sin(angle));
    }
    EXPECT_TRUE(f32_->SplitQkv({.qkv = qkv.data(),
                                .tokens = 1,
                                .slot_begin = 0,
                                .chunk_tokens = 1,
                                .q_heads = 1,
                                .kv_heads = 1,
                                .head_dim = kHeadDim,
                                .rotated_dim = kHeadDim,
                                .rope_cos = cos.data(),
                                .rope_sin = sin.data(),
                                .q = q.data(),
                                .k = k.data(),
                                .v = v.data()})
                    .ok());
    EXPECT_TRUE(std::equal(v.begin(), v.end(), qkv.begin() + 2 * kHeadDim));
    return {q, k};
  }

  static double Dot(const std::vector<float>& a, const std::vector<float>& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  }
};

TEST_F(RopeTest, PositionZeroChangesNothing) {
  const std::vector<float> qkv = Normal(3 * kHeadDim);
  const auto [q, k] = Rotate(qkv, 0);
  EXPECT_TRUE(std::equal(q.begin(), q.end(), qkv.begin()));
  EXPECT_TRUE(std::equal(k.begin(), k.end(), qkv.begin() + kHeadDim));
}

TEST_F(RopeTest, AQuarterTurnSwapsTheHalves) {
  std::vector<float> qkv(3 * kHeadDim, 0.0f);
  qkv[0] = 1;
  const auto [q, k] = Rotate(qkv, std::acos(0.0));
  EXPECT_NEAR(q[0], 0, 1e-6);
  EXPECT_NEAR(q[kHeadDim / 2], 1, 1e-6);
}

TEST_F(RopeTest, RotationsKeepLengthsAndScoresDependOnTheDistanceAlone) {
  const std::vector<float> qkv = Normal(3 * kHeadDim);
  const auto [q0, k0] = Rotate(qkv, 0);
  const double distance = static_cast<double>(Draw(random_, 1, 50));
  const double score = Dot(Rotate(qkv, distance).first, k0);
  for (int i = 0; i < 10; ++i) {
    const auto position = static_cast<double>(Draw(random_, 1, 1000));
    const auto [q, k] = Rotate(qkv, position);
    EXPECT_NEAR(Dot(q, q), Dot(q0, q0), 1e-5);
    EXPECT_NEAR(Dot(Rotate(qkv, position + distance).first, k), score, 1e-4);
  }
}

// ---- Attention and merges.

// A random problem of one query head group; `q_begin`, `k_begin` are the positions of the first query and
// key.
struct Attention {
  int64_t q_tokens, k_tokens;
  int head_dim;
  std::vector<float> q, k, v, o, lse;

  AttentionBlockArgs Args(int64_t q_begin, int64_t k_first, int64_t k_count, bool carry_in) {
    return {.q = q.data(),
            .k = k.data() + k_first * head_dim,
            .v = v.data() + k_first * head_dim,
            .q_tokens = q_tokens,
            .k_tokens = k_count,
            .q_heads = 1,
            .kv_heads = 1,
            .head_dim = head_dim,
            .band = {.q = {.base = q_begin}, .k = {.base = k_first}, .window = 0},
            .scale = 0.5f,
            .carry_in = carry_in,
            .o = o.data(),
            .lse = lse.data()};
  }
};

class AttentionTest : public ReferenceStreamTest {
 protected:
  Attention RandomAttention() {
    Attention problem{.q_tokens = Draw(random_, 1, 20),
                      .k_tokens = Draw(random_, 3, 40),
                      .head_dim = static_cast<int>(Draw(random_, 1, 12)),
                      .q = {},
                      .k = {},
                      .v = {},
                      .o = {},
                      .lse = {}};
    problem.q = Normal(problem.q_tokens * problem.head_dim);
    problem.k = Normal(problem.k_tokens * problem.head_dim);
    problem.v = Normal(problem.k_tokens * problem.head_dim);
    problem.o.assign(problem.q.size(), NAN);
    problem.lse.assign(problem.q_tokens, NAN);
    return problem;
  }
};

TEST_F(AttentionTest, EqualKeysGiveTheMeanOfTheVisibleValues) {
  Attention problem = RandomAttention();
  std::fill(problem.k.begin(), problem.k.end(), 0.0f);
  ASSERT_TRUE(f32_->AttentionBlock(problem.Args(0, 0, problem.k_tokens, false)).ok());
  for (int64_t row = 0; row < problem.q_tokens; ++row) {
    const int64_t visible = std::min(row + 1, problem.k_tokens);
    EXPECT_NEAR(problem.lse[row], std::log(static_cast<double>(visible)), 1e-6);
    for (int i = 0; i < problem.head_dim; ++i) {
      double mean = 0;
      for (int64_t key = 0; key < visible; ++key) mean += problem.v[key * problem.head_dim + i] / visible;
      EXPECT_NEAR(problem.o[row * problem.head_dim + i], mean, 1e-5);
    }
  }
}

TEST_F(AttentionTest, AWindowShowsTheLastKeysOnly) {
  Attention problem = RandomAttention();
  std::fill(problem.k.begin(), problem.k.end(), 0.0f);
  AttentionBlockArgs args = problem.Args(problem.k_tokens, 0, problem.k_tokens, false);  // behind every key
  args.band.window = 3;
  ASSERT_TRUE(f32_->AttentionBlock(args).ok());
  for (int64_t row = 0; row < problem.q_tokens; ++row) {
    const int64_t visible = std::max<int64_t>(0, 2 - row);  // row 0 sees the last two, row 1 the last
    if (visible == 0) {
      EXPECT_EQ(problem.lse[row], -kInfinity);
      EXPECT_EQ(problem.o[row * problem.head_dim], 0);
    } else {
      EXPECT_NEAR(problem.lse[row], std::log(static_cast<double>(visible)), 1e-6);
    }
  }
}

TEST_F(AttentionTest, RowsThatSeeNothingAreEmptyOrKeepWhatTheyCarried) {
  Attention problem = RandomAttention();
  AttentionBlockArgs args = problem.Args(0, 0, problem.k_tokens, false);
  args.band.k.base = problem.q_tokens;  // every key is in the future
  ASSERT_TRUE(f32_->AttentionBlock(args).ok());
  for (const float lse : problem.lse) EXPECT_EQ(lse, -kInfinity);
  for (const float o : problem.o) EXPECT_EQ(o, 0);
  problem.o = Normal(std::ssize(problem.o));
  problem.lse = Normal(std::ssize(problem.lse));
  const std::vector<float> carried_o = problem.o, carried_lse = problem.lse;
  args = problem.Args(0, 0, problem.k_tokens, true);
  args.band.k.base = problem.q_tokens;
  ASSERT_TRUE(f32_->AttentionBlock(args).ok());
  EXPECT_EQ(problem.o, carried_o);
  EXPECT_EQ(problem.lse, carried_lse);
}

// The keys in one block, in two blocks one after the other, and in two blocks merged afterwards.
TEST_F(AttentionTest, HoweverTheKeysAreSplitTheResultIsTheSame) {
  Attention whole = RandomAttention();
  const int64_t split = Draw(random_, 1, whole.k_tokens - 1), q_begin = Draw(random_, 0, whole.k_tokens);
  Attention carried = whole, left = whole, right = whole;
  ASSERT_TRUE(f32_->AttentionBlock(whole.Args(q_begin, 0, whole.k_tokens, false)).ok());
  ASSERT_TRUE(f32_->AttentionBlock(carried.Args(q_begin, split, whole.k_tokens - split, false)).ok());
  ASSERT_TRUE(f32_->AttentionBlock(carried.Args(q_begin, 0, split, true)).ok());
  ExpectNear(carried.o, whole.o, 1e-5);
  ExpectNear(carried.lse, whole.lse, 1e-5);
  ASSERT_TRUE(f32_->AttentionBlock(left.Args(q_begin, 0, split, false)).ok());
  ASSERT_TRUE(f32_->AttentionBlock(right.Args(q_begin, split, whole.k_tokens - split, false)).ok());
  ASSERT_TRUE(f32_->MergePartial({.o = left.o.data(),
                                  .lse = left.lse.data(),
                                  .other_o = right.o.data(),
                                  .other_dtype = DType::kF32,
                                  .other_lse = right.lse.data(),
                                  .rows = left.q_tokens,
                                  .head_dim = left.head_dim})
                  .ok());
  ExpectNear(left.o, whole.o, 1e-5);
  ExpectNear(left.lse, whole.lse, 1e-5);
}

// A sink is a key of that score whose value is 0.
TEST_F(AttentionTest, ASinkIsAKeyWithoutAValue) {
  const int64_t heads = Draw(random_, 1, 4), q_tokens = Draw(random_, 1, 9), k_tokens = Draw(random_, 1, 20);
  const std::vector<float> sinks = Normal(heads, 2), q(heads * q_tokens, 1.0f),
                           keys = Normal(heads * k_tokens, 2), values = Normal(heads * k_tokens);
  // One dimension, and queries of 1: a key is its score.
  const auto attend = [&](bool with_sinks) {
    const int64_t all = k_tokens + (with_sinks ? 1 : 0);
    std::vector<float> k, v, o(heads * q_tokens), lse(heads * q_tokens);
    for (int64_t head = 0; head < heads; ++head) {
      if (with_sinks) k.push_back(sinks[head]), v.push_back(0);
      k.insert(k.end(), &keys[head * k_tokens], &keys[head * k_tokens] + k_tokens);
      v.insert(v.end(), &values[head * k_tokens], &values[head * k_tokens] + k_tokens);
    }
    EXPECT_TRUE(f32_->AttentionBlock({.q = q.data(),
                                      .k = k.data(),
                                      .v = v.data(),
                                      .q_tokens = q_tokens,
                                      .k_tokens = all,
                                      .q_heads = static_cast<int>(heads),
                                      .kv_heads = static_cast<int>(heads),
                                      .head_dim = 1,
                                      .band = {.first_q = all},  // all keys are seen
                                      .scale = 1,
                                      .carry_in = false,
                                      .o = o.data(),
                                      .lse = lse.data()})
                    .ok());
    return std::pair(o, lse);
  };
  auto [o, lse] = attend(false);
  ASSERT_TRUE(f32_->ApplySinks({.o = o.data(),
                                .lse = lse.data(),
                                .sinks = sinks.data(),
                                .heads = static_cast<int>(heads),
                                .tokens = q_tokens,
                                .head_dim = 1})
                  .ok());
  ExpectNear(o, attend(true).first, 1e-5);
}

TEST_F(AttentionTest, MergesAreAssociative) {
  const int head_dim = static_cast<int>(Draw(random_, 1, 9));
  const int64_t rows = Draw(random_, 1, 30);
  struct State {
    std::vector<float> o, lse;
  };
  const auto random_state = [&] {
    State state{Normal(rows * head_dim), Normal(rows, 10)};
    for (int64_t row = 0; row < rows; ++row) {
      if (Draw(random_, 0, 2) != 0) continue;
      state.lse[row] = -kInfinity;
      std::fill_n(state.o.begin() + row * head_dim, head_dim, 0.0f);
    }
    return state;
  };
  const auto merged = [&](State into, const State& other) {
    EXPECT_TRUE(f32_->MergePartial({.o = into.o.data(),
                                    .lse = into.lse.data(),
                                    .other_o = other.o.data(),
                                    .other_dtype = DType::kF32,
                                    .other_lse = other.lse.data(),
                                    .rows = rows,
                                    .head_dim = head_dim})
                    .ok());
    return into;
  };
  const State a = random_state(), b = random_state(), c = random_state();
  const State left = merged(merged(a, b), c), right = merged(a, merged(b, c)),
              turned = merged(merged(c, a), b);
  for (const State& other : {right, turned}) {
    ExpectNear(other.o, left.o, 1e-5);
    ExpectNear(other.lse, left.lse, 1e-5);
  }
}

TEST_F(AttentionTest, QueryHeadsShareTheirKeyHeads) {
  // 4 query heads over 2 key heads; one key each, so o is the value of the head that was attended.
  const std::vector<float> q(4, 1.0f), k(2, 1.0f), v = {10, 20};
  std::vector<float> o(4), lse(4);
  ASSERT_TRUE(f32_->AttentionBlock({.q = q.data(),
                                    .k = k.data(),
                                    .v = v.data(),
                                    .q_tokens = 1,
                                    .k_tokens = 1,
                                    .q_heads = 4,
                                    .kv_heads = 2,
                                    .head_dim = 1,
                                    .band = {},
                                    .scale = 3.0f,
                                    .carry_in = false,
                                    .o = o.data(),
                                    .lse = lse.data()})
                  .ok());
  EXPECT_EQ(o, (std::vector<float>{10, 10, 20, 20}));
  EXPECT_EQ(lse, (std::vector<float>{3, 3, 3, 3}));
}

}  // namespace
}  // namespace meshfill
