// Experts on CUDA's streams against the reference: the choice by token, and the products by expert.
#include <algorithm>
#include <random>

#include "tests/kernels/cuda_stream_fixture.h"
#include "tests/kernels/random_experts.h"

namespace meshfill {
namespace {

// Where the rows of ExpertRows lie on the device, and a copy of them on the host.
class RowsOnDevice {
 public:
  RowsOnDevice(Stream& stream, const RouterRule& rule, int64_t tokens)
      : own(rule, tokens), memory(stream, own.memory), rule_(rule), tokens_(tokens) {}

  ExpertRows rows() { return ExpertRowsIn(memory.data(), rule_.experts, rule_.used, tokens_); }
  // After what was called before.
  void Read(OwnRows& to) {
    const Tensor read = memory.Read();
    std::copy_n(read.data<std::byte>(), read.count() * sizeof(float), to.memory.data<std::byte>());
  }

  OwnRows own;
  OnDevice memory;

 private:
  const RouterRule rule_;
  const int64_t tokens_;
};

TEST_F(CudaStreamTest, Route) {
  ForRandomDraws(15, [&](std::mt19937_64& random) {
    const RandomRoute route(random, *reference_, 900);
    RowsOnDevice on_device(*stream_, route.rule, route.tokens);
    OnDevice logits = Copy(route.logits), correction = Copy(route.correction);
    RouteArgs args = route.Args(on_device.rows());
    args.logits = logits.data<float>();
    if (args.correction != nullptr) args.correction = correction.data<float>();
    ASSERT_OK(stream_->Route(args));
    OwnRows got(route.rule, route.tokens);
    on_device.Read(got);
    ExpectSortedRows(got, route.rule, route.tokens);
    if (!HasFatalFailure()) route.ExpectSameChoice(got);
  });
}

// From the logits to the sum, without a look at what is between: the host knows no expert's rows.
TEST_F(CudaStreamTest, ExpertsInARow) {
  ForRandomDraws(10, [&](std::mt19937_64& random) {
    RouterRule rule = RandomRule(random);
    rule.groups = rule.used_groups = 1;
    const int64_t tokens = Draw(random, 0, 250),
                  in = Draw(random, 0, 1) == 0 ? 8 * Draw(random, 1, 30) : Draw(random, 1, 200);
    const int64_t out = Draw(random, 1, 200), rows = tokens * rule.used;
    const Tensor logits = UnevenLogits(random, rule, tokens);
    const Tensor by_token = Tensor::Normal(random, DType::kBf16, tokens * in);
    const Tensor by_row = Tensor::Normal(random, DType::kBf16, rows * in);
    const RandomExperts experts(random, reference_.device(), DType::kBf16, rule.experts, out, in);
    const auto packed = experts.PackedOn(*device_);
    RowsOnDevice on_device(*stream_, rule, tokens);
    OnDevice device_logits = Copy(logits), device_by_token = Copy(by_token), device_by_row = Copy(by_row);
    ASSERT_OK(stream_->Route(
        {.logits = device_logits.data<float>(), .tokens = tokens, .rule = rule, .rows = on_device.rows()}));
    Tensor expected(DType::kBf16, rows * out), sum = Tensor::Normal(random, DType::kF32, tokens * out);
    OnDevice first = Copy(expected), second = Copy(expected), device_sum = Copy(sum);
    for (const bool is_by_token : {true, false}) {
      ASSERT_OK(stream_->ExpertGemm({.weights = packed,
                                     .rows = on_device.rows(),
                                     .row_count = rows,
                                     .by_token = is_by_token,
                                     .x = is_by_token ? device_by_token.data() : device_by_row.data(),
                                     .y = is_by_token ? first.data() : second.data()}));
    }
    ASSERT_OK(stream_->AddExperts({.y = second.data(),
                                   .rows = on_device.rows(),
                                   .tokens = tokens,
                                   .used = rule.used,
                                   .width = out,
                                   .x = device_sum.data<float>()}));
    OwnRows routed(rule, tokens);
    on_device.Read(routed);
    ExpectSortedRows(routed, rule, tokens);
    for (const bool is_by_token : {true, false}) {
      ASSERT_OK(reference_->ExpertGemm({.weights = experts.packed(),
                                        .rows = routed.rows,
                                        .row_count = rows,
                                        .by_token = is_by_token,
                                        .x = is_by_token ? by_token.data() : by_row.data(),
                                        .y = expected.data()}));
      ExpectClose(is_by_token ? first.Read() : second.Read(), expected, 2e-4);
    }
    const Tensor said = second.Read();
    ASSERT_OK(reference_->AddExperts({.y = said.data(),
                                      .rows = routed.rows,
                                      .tokens = tokens,
                                      .used = rule.used,
                                      .width = out,
                                      .x = sum.data<float>()}));
    ExpectClose(device_sum.Read(), sum, 1e-5);
  });
}

}  // namespace
}  // namespace meshfill
