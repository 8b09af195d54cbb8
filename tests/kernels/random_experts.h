// Routers on random logits, for tests of every device: where rows must lie, and who must be chosen.
#ifndef MESHFILL_TESTS_KERNELS_RANDOM_EXPERTS_H_
#define MESHFILL_TESTS_KERNELS_RANDOM_EXPERTS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "kernels/experts.h"
#include "kernels/stream.h"
#include "tests/kernels/random_tensor.h"

namespace meshfill {

// Rows in memory of their own, poisoned.
struct OwnRows {
  OwnRows(const RouterRule& rule, int64_t tokens)
      : memory(DType::kF32, ExpertRowsBytes(rule.experts, rule.used, tokens) / 4),
        rows(ExpertRowsIn(memory.data(), rule.experts, rule.used, tokens)) {}
  OwnRows(const OwnRows&) = delete;
  OwnRows& operator=(const OwnRows&) = delete;
  Tensor memory;
  ExpertRows rows;
};

inline RouterRule RandomRule(std::mt19937_64& random) {
  RouterRule rule;
  rule.score = Draw(random, 0, 1) == 0 ? RouterScore::kSoftmax : RouterScore::kSigmoid;
  rule.groups = static_cast<int>(Draw(random, 0, 1) == 0 ? 1 : Draw(random, 2, 5));
  const int of_group = static_cast<int>(Draw(random, rule.groups == 1 ? 1 : 2, 20));
  rule.experts = rule.groups * of_group;
  rule.used_groups = static_cast<int>(Draw(random, 1, rule.groups));
  rule.used = static_cast<int>(Draw(random, 1, std::min(8, of_group * rule.used_groups)));
  rule.normalised = Draw(random, 0, 1) == 1;
  rule.scale = Draw(random, 0, 1) == 1 ? 1.0f : 2.5f;
  return rule;
}

inline int ExpertOf(const ExpertRows& rows, const RouterRule& rule, int64_t token, int i) {
  const int32_t row = rows.row[token * rule.used + i];
  return static_cast<int>(std::upper_bound(rows.begin, rows.begin + rule.experts + 1, row) - rows.begin - 1);
}

// No token is dropped, none comes twice, and the rows are sorted by expert, then by token.
inline void ExpectSortedRows(const OwnRows& own, const RouterRule& rule, int64_t tokens) {
  const ExpertRows& rows = own.rows;
  ASSERT_TRUE(own.memory.GuardIntact());
  ASSERT_EQ(rows.begin[0], 0);
  ASSERT_EQ(rows.begin[rule.experts], tokens * rule.used);
  std::vector<int> seen(tokens * rule.used, 0);
  for (int64_t token = 0; token < tokens; ++token) {
    for (int i = 0; i < rule.used; ++i) {
      const int32_t row = rows.row[token * rule.used + i];
      ASSERT_TRUE(row >= 0 && row < tokens * rule.used);
      ++seen[row];
      ASSERT_EQ(rows.token[row], token);
      if (i > 0) {
        ASSERT_LT(ExpertOf(rows, rule, token, i - 1), ExpertOf(rows, rule, token, i));
      }
    }
  }
  EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
  for (int expert = 0; expert < rule.experts; ++expert) {
    ASSERT_LE(rows.begin[expert], rows.begin[expert + 1]);
    EXPECT_TRUE(std::is_sorted(rows.token + rows.begin[expert], rows.token + rows.begin[expert + 1]));
  }
}

// Counters of each expert's tokens that have counted before, and one behind them.
class OwnCounters {
 public:
  explicit OwnCounters(const RouterRule& rule) : counts(rule.experts + 1, kBefore) {}

  // They have the tokens of `own`, `times` times.
  void ExpectTokensOf(const OwnRows& own, const RouterRule& rule, int64_t tokens, int times) const {
    std::vector<int32_t> expected(counts.size(), kBefore);
    for (int64_t token = 0; token < tokens; ++token) {
      for (int i = 0; i < rule.used; ++i) expected[ExpertOf(own.rows, rule, token, i)] += times;
    }
    EXPECT_EQ(counts, expected);
  }

  std::vector<int32_t> counts;

 private:
  static constexpr int32_t kBefore = 7;
};

// A router's inputs, and the reference's answer.
class RandomRoute {
 public:
  RandomRoute(std::mt19937_64& random, Stream& reference, int64_t most_tokens)
      : rule(RandomRule(random)),
        tokens(Draw(random, 1, most_tokens)),
        logits(Tensor::Normal(random, DType::kF32, tokens * rule.experts, 2)),
        correction(Tensor::Normal(random, DType::kF32, rule.experts, 0.2f)),
        corrected(Draw(random, 0, 1) == 1),
        expected_(rule, tokens),
        nudged_(rule, tokens) {
    Tensor near = logits;
    const Tensor noise = Tensor::Normal(random, DType::kF32, logits.count(), 1e-4f);
    for (int64_t i = 0; i < logits.count(); ++i) near.Set(i, logits.At(i) + noise.At(i));
    for (auto [own, from] : {std::pair(&expected_, &logits), {&nudged_, &near}}) {
      RouteArgs args = Args(own->rows);
      args.logits = from->data<float>();
      EXPECT_TRUE(reference.Route(args).ok());
    }
  }

  RouteArgs Args(const ExpertRows& rows) const {
    return {.logits = logits.data<float>(),
            .correction = corrected ? correction.data<float>() : nullptr,
            .tokens = tokens,
            .rule = rule,
            .rows = rows};
  }

  // As the reference, but where a nudge changes its choice: there a rounding may.
  void ExpectSameChoice(const OwnRows& got) const {
    int64_t compared = 0;
    for (int64_t token = 0; token < tokens; ++token) {
      bool firm = true;
      for (int i = 0; i < rule.used; ++i) {
        firm &= ExpertOf(expected_.rows, rule, token, i) == ExpertOf(nudged_.rows, rule, token, i);
      }
      if (!firm) continue;
      ++compared;
      for (int i = 0; i < rule.used; ++i) {
        ASSERT_EQ(ExpertOf(got.rows, rule, token, i), ExpertOf(expected_.rows, rule, token, i));
        const float weight = expected_.rows.weight[token * rule.used + i];
        EXPECT_NEAR(got.rows.weight[token * rule.used + i], weight, 1e-5 * std::abs(weight) + 1e-7);
      }
    }
    EXPECT_GE(compared, tokens * 9 / 10 - 1);
  }

  const RouterRule rule;
  const int64_t tokens;
  const Tensor logits, correction;
  const bool corrected;

 private:
  OwnRows expected_, nudged_;
};

// Random weights of every expert, and the reference's. dtype: f32, bf16, or FP8 with one scale.
class RandomExperts {
 public:
  RandomExperts(std::mt19937_64& random, Device& reference, DType dtype, int experts, int64_t out, int64_t in)
      : in_(in) {
    const bool fp8 = dtype == DType::kF8E4M3;
    const bool biased = Draw(random, 0, 1) == 1;
    for (int expert = 0; expert < experts; ++expert) {
      matrices_.push_back(Tensor::Normal(random, dtype, out * in, fp8 ? 1 / kFp8Scale : 1));
      biases_.push_back(Tensor::Normal(random, DType::kF32, out));
      rows_.push_back({.data = matrices_.back().data(),
                       .dtype = dtype,
                       .rows = out,
                       .bias = biased ? biases_.back().data<float>() : nullptr,
                       .scales = fp8 ? &kFp8Scale : nullptr,
                       .scale_rows = out,
                       .scale_columns = in});
    }
    packed_ = PackedOn(reference);
  }

  std::vector<std::unique_ptr<PackedWeight>> PackedOn(Device& device) const {
    std::vector<std::unique_ptr<PackedWeight>> packed;
    for (const WeightRows& rows : rows_) {
      auto weight = device.PackWeight({&rows, 1}, in_);
      EXPECT_TRUE(weight.ok()) << weight.status();
      packed.push_back(weight.ok() ? *std::move(weight) : nullptr);
    }
    return packed;
  }

  const std::vector<std::unique_ptr<PackedWeight>>& packed() const { return packed_; }  // the reference's
  const std::vector<WeightRows>& rows() const { return rows_; }

 private:
  static constexpr float kFp8Scale = 1.0f / 64;
  const int64_t in_;
  std::vector<Tensor> matrices_, biases_;
  std::vector<WeightRows> rows_;
  std::vector<std::unique_ptr<PackedWeight>> packed_;
};

// One product of every expert's rows, row by row on the reference.
inline void MultiplyRowByRow(Stream& reference, const ExpertGemmArgs& args) {
  const int64_t bytes = DTypeBytes(reference.device().dtype());
  for (size_t expert = 0; expert < args.weights.size(); ++expert) {
    const PackedWeight& weight = *args.weights[expert];
    for (int64_t row = args.rows.begin[expert]; row < args.rows.begin[expert + 1]; ++row) {
      const int64_t from = args.by_token ? args.rows.token[row] : row;
      EXPECT_TRUE(reference
                      .Gemm({.weight = &weight,
                             .x = static_cast<const std::byte*>(args.x) + from * weight.in_features() * bytes,
                             .tokens = 1,
                             .y = static_cast<std::byte*>(args.y) + row * weight.out_features() * bytes,
                             .y_dtype = reference.device().dtype()})
                      .ok());
    }
  }
}

// MLPs of experts, their scratch, and the reference's answer. What lies between the products is rounded,
// which may go either way: rows are compared as vectors.
class RandomExpertMlps {
 public:
  // gate_up, down: dtypes of the weights.
  RandomExpertMlps(std::mt19937_64& random, Stream& reference, const RouterRule& rule, int64_t tokens,
                   const ExpertRows& rows, int64_t hidden, int64_t width, DType gate_up, DType down)
      : dtype_(reference.device().dtype()),
        hidden_(hidden),
        row_count_(tokens * rule.used),
        gate_up_(random, reference.device(), gate_up, rule.experts, 2 * width, hidden),
        down_(random, reference.device(), down, rule.experts, hidden, width),
        x(Tensor::Normal(random, dtype_, tokens * hidden, 1 / std::sqrt(static_cast<float>(hidden)))),
        narrow(dtype_, row_count_ * width),
        y(dtype_, row_count_ * std::max(hidden, 2 * width)),
        activation{.gating = std::vector{Gating::kSwiGlu, Gating::kGeGlu,
                                         Gating::kClampedSwiGlu}[Draw(random, 0, 2)],
                   .alpha = 1.702f,
                   .limit = 2},
        expected_(y) {
    Tensor scratch = narrow;
    ExpertMlpArgs args = Args(gate_up_.packed(), down_.packed(), rows);
    args.narrow = scratch.data();
    args.y = expected_.data();
    EXPECT_TRUE(reference.ExpertMlp(args).ok());
  }

  std::vector<std::unique_ptr<PackedWeight>> GateUpOn(Device& device) const {
    return gate_up_.PackedOn(device);
  }
  std::vector<std::unique_ptr<PackedWeight>> DownOn(Device& device) const { return down_.PackedOn(device); }

  ExpertMlpArgs Args(std::span<const std::unique_ptr<PackedWeight>> gate_up,
                     std::span<const std::unique_ptr<PackedWeight>> down, const ExpertRows& rows) {
    return {.gate_up = gate_up,
            .down = down,
            .rows = rows,
            .row_count = row_count_,
            .activation = activation,
            .x = x.data(),
            .narrow = narrow.data(),
            .y = y.data()};
  }

  void ExpectAgrees(const Tensor& got) const {
    ASSERT_TRUE(got.GuardIntact()) << "wrote past the end";
    const auto norm = [&](int64_t row, const auto& value) {
      double squares = 0;
      for (int64_t i = row * hidden_; i < (row + 1) * hidden_; ++i) squares += value(i) * value(i);
      return std::sqrt(squares);
    };
    double mean = 0;
    for (int64_t row = 0; row < row_count_; ++row) {
      mean += norm(row, [&](int64_t i) { return double{expected_.At(i)}; }) / static_cast<double>(row_count_);
    }
    for (int64_t row = 0; row < row_count_; ++row) {
      const double size = norm(row, [&](int64_t i) { return double{expected_.At(i)}; });
      const double error = norm(row, [&](int64_t i) { return double{got.At(i)} - expected_.At(i); });
      ASSERT_LE(error, (dtype_ == DType::kBf16 ? 1e-2 : 1e-5) * (size + mean)) << "row " << row;
    }
  }

 private:
  const DType dtype_;
  const int64_t hidden_, row_count_;
  const RandomExperts gate_up_, down_;

 public:
  const Tensor x;
  Tensor narrow, y;  // scratch, and the answer
  const GatedActivation activation;

 private:
  Tensor expected_;
};

// Some experts get everything, some nothing: the first is everyone's favourite, the last nobody's.
inline Tensor UnevenLogits(std::mt19937_64& random, const RouterRule& rule, int64_t tokens) {
  Tensor logits = Tensor::Normal(random, DType::kF32, tokens * rule.experts);
  for (int64_t token = 0; token < tokens; ++token) {
    logits.Set(token * rule.experts, 20);
    if (rule.experts > rule.used) logits.Set((token + 1) * rule.experts - 1, -20);
  }
  return logits;
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_KERNELS_RANDOM_EXPERTS_H_
