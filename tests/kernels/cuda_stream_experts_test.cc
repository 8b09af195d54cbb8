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

// From the logits to the sum: the host knows no expert's rows.
TEST_F(CudaStreamTest, ExpertsInARow) {
  ForRandomDraws(10, [&](std::mt19937_64& random) {
    RouterRule rule = RandomRule(random);
    rule.groups = rule.used_groups = 1;
    const auto length = [&] {
      return Draw(random, 0, 1) == 0 ? 8 * Draw(random, 1, 25) : Draw(random, 1, 200);
    };
    const int64_t tokens = Draw(random, 0, 250), hidden = length(), width = length();
    const Tensor logits = UnevenLogits(random, rule, tokens);
    RowsOnDevice on_device(*stream_, rule, tokens);
    OnDevice device_logits = Copy(logits);
    ASSERT_OK(stream_->Route(
        {.logits = device_logits.data<float>(), .tokens = tokens, .rule = rule, .rows = on_device.rows()}));
    OwnRows routed(rule, tokens);
    on_device.Read(routed);
    ExpectSortedRows(routed, rule, tokens);

    const auto dtype = [&] { return Draw(random, 0, 2) == 0 ? DType::kF8E4M3 : DType::kBf16; };
    RandomExpertMlps mlps(random, *reference_, rule, tokens, routed.rows, hidden, width, dtype(), dtype());
    const auto gate_up = mlps.GateUpOn(*device_), down = mlps.DownOn(*device_);
    OnDevice x = Copy(mlps.x), narrow = Copy(mlps.narrow), y = Copy(mlps.y);
    ExpertMlpArgs args = mlps.Args(gate_up, down, on_device.rows());
    args.x = x.data(), args.narrow = narrow.data(), args.y = y.data();
    ASSERT_OK(stream_->ExpertMlp(args));
    Tensor sum = Tensor::Normal(random, DType::kF32, tokens * hidden);
    OnDevice device_sum = Copy(sum);
    ASSERT_OK(stream_->AddExperts({.y = y.data(),
                                   .rows = on_device.rows(),
                                   .tokens = tokens,
                                   .used = rule.used,
                                   .width = hidden,
                                   .x = device_sum.data<float>()}));
    const Tensor said = y.Read();
    mlps.ExpectAgrees(said);
    ASSERT_OK(reference_->AddExperts({.y = said.data(),
                                      .rows = routed.rows,
                                      .tokens = tokens,
                                      .used = rule.used,
                                      .width = hidden,
                                      .x = sum.data<float>()}));
    ExpectClose(device_sum.Read(), sum, 1e-5);
  });
}

}  // namespace
}  // namespace meshfill
