// CUDA's streams against the reference, operation by operation, on fresh random inputs and poisoned
// outputs; and what it promises of streams and memory. Runs on a device, or ends with status 77: not run.
// Linked with tests/fake_cuda it runs anywhere.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_device.h"
#include "tests/kernels/lone_stream.h"
#include "tests/kernels/random_experts.h"
#include "tests/kernels/random_tensor.h"

namespace meshfill {
namespace {

// A tensor's copy on the device.
class OnDevice {
 public:
  OnDevice(Stream& stream, const Tensor& tensor) : stream_(stream), tensor_(tensor) {
    absl::StatusOr<BufferRef> buffer = stream.Place(tensor.data(), ByteCount());
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    if (buffer.ok()) buffer_ = *std::move(buffer);
  }
  template <typename T = void>
  T* data() {
    return buffer_->data<T>();
  }
  const BufferRef& buffer() const { return buffer_; }
  // After what was called before.
  Tensor Read() {
    EXPECT_TRUE(stream_.Download(data(), ByteCount(), tensor_.data()).ok());
    return tensor_;
  }

 private:
  size_t ByteCount() const { return tensor_.count() * DTypeBytes(tensor_.dtype()); }

  Stream& stream_;
  Tensor tensor_;
  BufferRef buffer_;
};

class CudaStreamTest : public testing::Test {
 protected:
  void SetUp() override {
    device_ = MakeDevice();
    ASSERT_NE(device_, nullptr);
    stream_ = Make();
  }

  static std::unique_ptr<Device> MakeDevice(size_t index = 0) {
    const auto infos = FindCudaDevices();
    EXPECT_TRUE(infos.ok()) << infos.status();
    if (!infos.ok()) return nullptr;
    auto device = MakeCudaDevice((*infos)[index % infos->size()]);
    EXPECT_TRUE(device.ok()) << device.status();
    return device.ok() ? *std::move(device) : nullptr;
  }
  // Another rank on the device.
  std::unique_ptr<Stream> Make(const StopToken* stop = nullptr) {
    auto stream = device_->NewStream(stop);
    EXPECT_TRUE(stream.ok()) << stream.status();
    return stream.ok() ? *std::move(stream) : nullptr;
  }

  // Calls body(random) for some draws.
  template <typename Body>
  void ForRandomDraws(int draws, const Body& body) {
    ASSERT_NE(stream_, nullptr);
    for (int draw = 0; draw < draws; ++draw) {
      const uint64_t seed = TestSeed();
      SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed);
      std::mt19937_64 random(seed);
      body(random);
      if (HasFatalFailure()) return;
    }
  }

  OnDevice Copy(const Tensor& tensor) { return OnDevice(*stream_, tensor); }

  const LoneStream reference_ = ReferenceStream(DType::kBf16);
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

#define ASSERT_OK(expression)                    \
  do {                                           \
    const absl::Status ok_status = (expression); \
    ASSERT_TRUE(ok_status.ok()) << ok_status;    \
  } while (false)

TEST_F(CudaStreamTest, SaysWhatItIs) {
  EXPECT_EQ(device_->name().rfind("cuda/sm", 0), 0u) << device_->name();
  EXPECT_EQ(device_->dtype(), DType::kBf16);
  EXPECT_FALSE(device_->lost());
}

TEST_F(CudaStreamTest, Embed) {
  ForRandomDraws(10, [&](std::mt19937_64& random) {
    const int64_t vocab = Draw(random, 1, 50), width = Draw(random, 1, 700), tokens = Draw(random, 0, 300);
    const DType dtype = std::vector{DType::kF32, DType::kBf16, DType::kF16}[Draw(random, 0, 2)];
    const Tensor table = Tensor::Normal(random, dtype, vocab * width);
    std::vector<uint32_t> ids(tokens);
    for (uint32_t& id : ids) id = static_cast<uint32_t>(Draw(random, 0, vocab - 1));
    Tensor expected(DType::kF32, tokens * width);
    OnDevice got = Copy(expected), device_table = Copy(table);
    ASSERT_OK(reference_->Embed(ids, table.data(), dtype, width, expected.data<float>()));
    ASSERT_OK(stream_->Embed(ids, device_table.data(), dtype, width, got.data<float>()));
    std::fill(ids.begin(), ids.end(), 0);  // the operation has them
    ExpectClose(got.Read(), expected, 0);
  });
}

TEST_F(CudaStreamTest, RmsNorm) {
  ForRandomDraws(10, [&](std::mt19937_64& random) {
    const int64_t tokens = Draw(random, 0, 200), width = Draw(random, 1, 1500);
    const Tensor x = Tensor::Normal(random, DType::kF32, tokens * width, 3);
    const Tensor weight = Tensor::Normal(random, DType::kF32, width);
    Tensor expected(DType::kBf16, tokens * width);
    OnDevice got = Copy(expected), device_x = Copy(x), device_weight = Copy(weight);
    ASSERT_OK(stream_->RmsNorm(device_x.data<float>(), device_weight.data<float>(), tokens, width, 1e-5f,
                               got.data()));
    ASSERT_OK(
        reference_->RmsNorm(x.data<float>(), weight.data<float>(), tokens, width, 1e-5f, expected.data()));
    ExpectClose(got.Read(), expected, 4e-6);
  });
}

TEST_F(CudaStreamTest, AddRmsNorm) {
  ForRandomDraws(10, [&](std::mt19937_64& random) {
    const int64_t tokens = Draw(random, 0, 200), width = Draw(random, 1, 1500);
    const Tensor y = Tensor::Normal(random, DType::kF32, tokens * width, 3);
    const Tensor weight = Tensor::Normal(random, DType::kF32, width);
    Tensor x = Tensor::Normal(random, DType::kF32, tokens * width);
    OnDevice got = Copy(x), device_y = Copy(y), device_weight = Copy(weight);
    ASSERT_OK(stream_->AddRmsNorm(device_y.data<float>(), device_weight.data<float>(), tokens, width, 1e-5f,
                                  got.data<float>()));
    ASSERT_OK(
        reference_->AddRmsNorm(y.data<float>(), weight.data<float>(), tokens, width, 1e-5f, x.data<float>()));
    ExpectClose(got.Read(), x, 1e-5);
  });
}

TEST_F(CudaStreamTest, Scale) {
  ForRandomDraws(6, [&](std::mt19937_64& random) {
    const int64_t count = Draw(random, 0, 100'000);
    Tensor x = Tensor::Normal(random, DType::kF32, count);
    OnDevice got = Copy(x);
    ASSERT_OK(stream_->Scale(got.data<float>(), count, 7.25f));
    ASSERT_OK(reference_->Scale(x.data<float>(), count, 7.25f));
    ExpectClose(got.Read(), x, 0);
  });
}

TEST_F(CudaStreamTest, Gemm) {
  ForRandomDraws(12, [&](std::mt19937_64& random) {
    const int64_t tokens = Draw(random, 0, 3) == 0 ? 1 : Draw(random, 0, 150);
    const int64_t in = 8 * Draw(random, 1, 40);
    std::vector<Tensor> matrices, biases;
    std::vector<WeightRows> rows;
    const bool bias = Draw(random, 0, 1) == 1;
    int64_t out = 0;
    for (int64_t part = Draw(random, 1, 3); part > 0; --part) {
      const DType dtype = std::vector{DType::kF32, DType::kBf16, DType::kF16}[Draw(random, 0, 2)];
      const int64_t part_rows = 8 * Draw(random, 1, 20);
      matrices.push_back(Tensor::Normal(random, dtype, part_rows * in));
      biases.push_back(Tensor::Normal(random, DType::kF32, part_rows));
      // Biases of the file's own dtype, which is bf16: the epilogue adds them in y's.
      for (int64_t i = 0; i < part_rows; ++i) {
        biases.back().Set(i, BFloat16::FromFloat(biases.back().At(i)).ToFloat());
      }
      out += part_rows;
    }
    for (size_t part = 0; part < matrices.size(); ++part) {
      rows.push_back({.data = matrices[part].data(),
                      .dtype = matrices[part].dtype(),
                      .rows = matrices[part].count() / in,
                      .bias = bias ? biases[part].data<float>() : nullptr});
    }
    auto packed = device_->PackWeight(rows, in);
    ASSERT_TRUE(packed.ok()) << packed.status();
    auto reference_packed = reference_.device().PackWeight(rows, in);
    ASSERT_TRUE(reference_packed.ok());
    EXPECT_EQ((*packed)->out_features(), out);
    EXPECT_EQ((*packed)->in_features(), in);
    matrices.clear();  // the sources may go

    const Tensor x = Tensor::Normal(random, DType::kBf16, tokens * in);
    const DType y_dtype = Draw(random, 0, 1) == 0 ? DType::kF32 : DType::kBf16;
    const bool accumulate = y_dtype == DType::kF32 && Draw(random, 0, 1) == 1;
    Tensor expected =
        accumulate ? Tensor::Normal(random, y_dtype, tokens * out) : Tensor(y_dtype, tokens * out);
    OnDevice got = Copy(expected), device_x = Copy(x);
    ASSERT_OK(stream_->Gemm({.weight = packed->get(),
                             .x = device_x.data(),
                             .tokens = tokens,
                             .y = got.data(),
                             .y_dtype = y_dtype,
                             .accumulate = accumulate}));
    ASSERT_OK(reference_->Gemm({.weight = reference_packed->get(),
                                .x = x.data(),
                                .tokens = tokens,
                                .y = expected.data(),
                                .y_dtype = y_dtype,
                                .accumulate = accumulate}));
    ExpectClose(got.Read(), expected, 2e-4);
  });
}

// Long enough that algorithms are timed; an accumulated y must not be touched by that.
TEST_F(CudaStreamTest, GemmThatIsTimedGivesTheSameBitsAgain) {
  ForRandomDraws(1, [&](std::mt19937_64& random) {
    const int64_t tokens = 1024, in = 8 * Draw(random, 2, 5), out = 8 * Draw(random, 1, 4);
    const Tensor matrix = Tensor::Normal(random, DType::kBf16, out * in);
    const Tensor x = Tensor::Normal(random, DType::kBf16, tokens * in);
    const Tensor before = Tensor::Normal(random, DType::kF32, tokens * out);
    const WeightRows rows{.data = matrix.data(), .dtype = DType::kBf16, .rows = out};
    Tensor expected = before;
    auto reference_packed = reference_.device().PackWeight({&rows, 1}, in);
    ASSERT_OK(reference_->Gemm({.weight = reference_packed->get(),
                                .x = x.data(),
                                .tokens = tokens,
                                .y = expected.data(),
                                .y_dtype = DType::kF32,
                                .accumulate = true}));
    std::vector<Tensor> results;
    for (int time = 0; time < 3; ++time) {
      const std::unique_ptr<Stream> rank = Make();  // another rank on the device
      OnDevice got(*rank, before), device_x(*rank, x);
      auto packed = device_->PackWeight({&rows, 1}, in);
      ASSERT_TRUE(packed.ok()) << packed.status();
      ASSERT_OK(rank->Gemm({.weight = packed->get(),
                            .x = device_x.data(),
                            .tokens = tokens,
                            .y = got.data(),
                            .y_dtype = DType::kF32,
                            .accumulate = true}));
      results.push_back(got.Read());
      ExpectClose(results.back(), expected, 2e-4);
    }
    EXPECT_TRUE(results[0].SameBits(results[1]));
    EXPECT_TRUE(results[0].SameBits(results[2]));
  });
}

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

TEST_F(CudaStreamTest, SplitQkv) {
  ForRandomDraws(15, [&](std::mt19937_64& random) {
    const int q_heads = Draw(random, 1, 9), kv_heads = Draw(random, 1, 4);
    const int head_dim = 8 * static_cast<int>(Draw(random, 1, 32)), half = head_dim / 2;
    const int64_t chunk_tokens = Draw(random, 0, 60);
    const int64_t slot_begin = Draw(random, 0, chunk_tokens),
                  tokens = Draw(random, 0, chunk_tokens - slot_begin);
    const Tensor qkv = Tensor::Normal(random, DType::kBf16, tokens * (q_heads + 2 * kv_heads) * head_dim);
    const Tensor q_norm = Tensor::Normal(random, DType::kF32, head_dim);
    const Tensor k_norm = Tensor::Normal(random, DType::kF32, head_dim);
    const bool norms = Draw(random, 0, 1) == 1;
    Tensor cos(DType::kF32, chunk_tokens * half), sin = cos;
    for (int64_t i = 0; i < cos.count(); ++i) {
      const double angle = std::uniform_real_distribution<>(-3, 3)(random);
      cos.Set(i, static_cast<float>(std::cos(angle)));
      sin.Set(i, static_cast<float>(std::sin(angle)));
    }
    // Zeros: what the slice does not write must stay.
    const auto zeros = [&](int64_t heads) {
      Tensor tensor(DType::kBf16, heads * chunk_tokens * head_dim);
      for (int64_t i = 0; i < tensor.count(); ++i) tensor.Set(i, 0);
      return tensor;
    };
    Tensor q = zeros(q_heads), k = zeros(kv_heads), v = zeros(kv_heads);
    OnDevice device_q = Copy(q), device_k = Copy(k), device_v = Copy(v), device_qkv = Copy(qkv);
    OnDevice device_cos = Copy(cos), device_sin = Copy(sin), device_q_norm = Copy(q_norm),
             device_k_norm = Copy(k_norm);
    SplitQkvArgs args{.qkv = qkv.data(),
                      .tokens = tokens,
                      .slot_begin = slot_begin,
                      .chunk_tokens = chunk_tokens,
                      .q_heads = q_heads,
                      .kv_heads = kv_heads,
                      .head_dim = head_dim,
                      .rotated_dim = head_dim,
                      .q_norm = norms ? q_norm.data<float>() : nullptr,
                      .k_norm = norms ? k_norm.data<float>() : nullptr,
                      .norm_eps = 1e-6f,
                      .rope_cos = cos.data<float>(),
                      .rope_sin = sin.data<float>(),
                      .q = q.data(),
                      .k = k.data(),
                      .v = v.data()};
    ASSERT_OK(reference_->SplitQkv(args));
    args.qkv = device_qkv.data(), args.q = device_q.data(), args.k = device_k.data(),
    args.v = device_v.data();
    args.rope_cos = device_cos.data<float>(), args.rope_sin = device_sin.data<float>();
    if (norms) args.q_norm = device_q_norm.data<float>(), args.k_norm = device_k_norm.data<float>();
    ASSERT_OK(stream_->SplitQkv(args));
    ExpectClose(device_q.Read(), q, 1e-5);
    ExpectClose(device_k.Read(), k, 1e-5);
    ExpectClose(device_v.Read(), v, 0);
  });
}

TEST_F(CudaStreamTest, AttentionBlockWithCarriedState) {
  ForRandomDraws(6, [&](std::mt19937_64& random) {
    const int kv_heads = Draw(random, 1, 2), q_heads = kv_heads * static_cast<int>(Draw(random, 1, 3));
    const int head_dim = 8 * static_cast<int>(Draw(random, 1, 16));
    const int64_t q_tokens = Draw(random, 1, 90), k_tokens = Draw(random, 1, 90);
    const Tensor q = Tensor::Normal(random, DType::kBf16, q_heads * q_tokens * head_dim);
    const Tensor k = Tensor::Normal(random, DType::kBf16, kv_heads * k_tokens * head_dim);
    const Tensor v = Tensor::Normal(random, DType::kBf16, kv_heads * k_tokens * head_dim);
    Tensor o(DType::kF32, q_heads * q_tokens * head_dim), lse(DType::kF32, q_heads * q_tokens);
    OnDevice device_q = Copy(q), device_k = Copy(k), device_v = Copy(v), device_o = Copy(o),
             device_lse = Copy(lse);
    AttentionBlockArgs args{.q_tokens = q_tokens,
                            .k_tokens = k_tokens,
                            .q_heads = q_heads,
                            .kv_heads = kv_heads,
                            .head_dim = head_dim,
                            .band = {.q = {.base = Draw(random, 0, 2), .stride = 3, .width = 16},
                                     .k = {.base = Draw(random, 0, 2), .stride = 3, .width = 16},
                                     .window = 0},
                            .scale = 1 / std::sqrt(static_cast<float>(head_dim))};
    for (const bool carry_in : {false, true}) {  // the second block stands farther left and is seen more
      args.carry_in = carry_in;
      if (carry_in) args.band.q.base += 3;
      args.q = q.data(), args.k = k.data(), args.v = v.data(), args.o = o.data<float>(),
      args.lse = lse.data<float>();
      ASSERT_OK(reference_->AttentionBlock(args));
      args.q = device_q.data(), args.k = device_k.data(), args.v = device_v.data();
      args.o = device_o.data<float>(), args.lse = device_lse.data<float>();
      ASSERT_OK(stream_->AttentionBlock(args));
    }
    ExpectClose(device_o.Read(), o, 3e-2);
    ExpectClose(device_lse.Read(), lse, 3e-2);
  });
}

TEST_F(CudaStreamTest, ApplySinks) {
  ForRandomDraws(10, [&](std::mt19937_64& random) {
    const int heads = static_cast<int>(Draw(random, 1, 9)), head_dim = static_cast<int>(Draw(random, 1, 256));
    const int64_t tokens = Draw(random, 0, 100);
    Tensor o = Tensor::Normal(random, DType::kF32, heads * tokens * head_dim);
    Tensor lse = Tensor::Normal(random, DType::kF32, heads * tokens, 20);
    for (int64_t row = 0; row < lse.count(); ++row) {
      if (Draw(random, 0, 5) == 0) lse.Set(row, -std::numeric_limits<float>::infinity());
    }
    const Tensor sinks = Tensor::Normal(random, DType::kF32, heads, 20);
    OnDevice got = Copy(o), device_lse = Copy(lse), device_sinks = Copy(sinks);
    ApplySinksArgs args{.o = o.data<float>(),
                        .lse = lse.data<float>(),
                        .sinks = sinks.data<float>(),
                        .heads = heads,
                        .tokens = tokens,
                        .head_dim = head_dim};
    ASSERT_OK(reference_->ApplySinks(args));
    args.o = got.data<float>(), args.lse = device_lse.data<float>(), args.sinks = device_sinks.data<float>();
    ASSERT_OK(stream_->ApplySinks(args));
    ExpectClose(got.Read(), o, 1e-5);
  });
}

TEST_F(CudaStreamTest, MergePartial) {
  constexpr float kNothingSeen = -std::numeric_limits<float>::infinity();
  ForRandomDraws(15, [&](std::mt19937_64& random) {
    const int64_t rows = Draw(random, 0, 900);
    const int head_dim = static_cast<int>(Draw(random, 1, 256));
    const DType other_dtype = Draw(random, 0, 1) == 0 ? DType::kF32 : DType::kBf16;
    Tensor o = Tensor::Normal(random, DType::kF32, rows * head_dim);
    Tensor lse = Tensor::Normal(random, DType::kF32, rows, 20);
    Tensor other_o = Tensor::Normal(random, other_dtype, rows * head_dim);
    Tensor other_lse = Tensor::Normal(random, DType::kF32, rows, 20);
    for (int64_t row = 0; row < rows; ++row) {
      for (auto [state_o, state_lse] : {std::pair(&o, &lse), {&other_o, &other_lse}}) {
        if (Draw(random, 0, 3) != 0) continue;
        state_lse->Set(row, kNothingSeen);
        for (int i = 0; i < head_dim; ++i) state_o->Set(row * head_dim + i, 0);
      }
    }
    OnDevice device_o = Copy(o), device_lse = Copy(lse), device_other_o = Copy(other_o);
    OnDevice device_other_lse = Copy(other_lse);
    MergePartialArgs args{.o = o.data<float>(),
                          .lse = lse.data<float>(),
                          .other_o = other_o.data(),
                          .other_dtype = other_dtype,
                          .other_lse = other_lse.data<float>(),
                          .rows = rows,
                          .head_dim = head_dim};
    ASSERT_OK(reference_->MergePartial(args));
    args.o = device_o.data<float>(), args.lse = device_lse.data<float>();
    args.other_o = device_other_o.data(), args.other_lse = device_other_lse.data<float>();
    ASSERT_OK(stream_->MergePartial(args));
    ExpectClose(device_o.Read(), o, 1e-5);
    ExpectClose(device_lse.Read(), lse, 1e-6);
  });
}

// Rows for `tokens` slots anywhere among more, heads or slots outermost; the elements that they span.
std::pair<HeadRows, int64_t> DrawRows(std::mt19937_64& random, DType dtype, int heads, int64_t tokens,
                                      int head_dim) {
  const SlotPositions slots = {
      .base = Draw(random, 0, 3), .stride = Draw(random, 1, 3), .width = Draw(random, 1, 70)};
  const int64_t all_slots = tokens == 0 ? 0 : slots.At(tokens - 1) + Draw(random, 1, 3);
  const int64_t all_heads = heads + Draw(random, 0, 2);
  const HeadRows heads_outermost = {
      .dtype = dtype, .head_stride = all_slots * head_dim, .slot_stride = head_dim, .slots = slots};
  const HeadRows slots_outermost = {
      .dtype = dtype, .head_stride = head_dim, .slot_stride = all_heads * head_dim, .slots = slots};
  return {Draw(random, 0, 1) ? heads_outermost : slots_outermost, all_heads * all_slots * head_dim};
}

TEST_F(CudaStreamTest, CopyHeads) {
  ForRandomDraws(30, [&](std::mt19937_64& random) {
    const int heads = static_cast<int>(Draw(random, 1, 9)), head_dim = static_cast<int>(Draw(random, 1, 200));
    const int64_t tokens = Draw(random, 0, 200);
    const DType from_dtype = Draw(random, 0, 1) ? DType::kF32 : DType::kBf16;
    const DType to_dtype = Draw(random, 0, 1) ? DType::kF32 : DType::kBf16;
    const auto [from_rows, from_elements] = DrawRows(random, from_dtype, heads, tokens, head_dim);
    const auto [to_rows, to_elements] = DrawRows(random, to_dtype, heads, tokens, head_dim);
    const Tensor from = Tensor::Normal(random, from_dtype, from_elements);
    Tensor expected(to_dtype, to_elements);  // other rows must stay as they are
    OnDevice got = Copy(expected), device_from = Copy(from);
    CopyHeadsArgs args{.from = from.data(),
                       .from_rows = from_rows,
                       .to = expected.data(),
                       .to_rows = to_rows,
                       .heads = heads,
                       .tokens = tokens,
                       .head_dim = head_dim};
    ASSERT_OK(reference_->CopyHeads(args));
    args.from = device_from.data(), args.to = got.data();
    ASSERT_OK(stream_->CopyHeads(args));
    EXPECT_TRUE(got.Read().SameBits(expected));
  });
}

TEST_F(CudaStreamTest, CopyHeadsToHost) {
  ForRandomDraws(20, [&](std::mt19937_64& random) {
    const int heads = static_cast<int>(Draw(random, 1, 5)), head_dim = static_cast<int>(Draw(random, 1, 100));
    const int64_t tokens = Draw(random, 0, 200);
    const SlotPositions slots = {
        .base = Draw(random, 0, 3), .stride = Draw(random, 1, 3), .width = Draw(random, 1, 70)};
    const int64_t all_slots = tokens == 0 ? 0 : slots.At(tokens - 1) + Draw(random, 1, 3);
    const Tensor from = Tensor::Normal(random, DType::kBf16, heads * tokens * head_dim);
    Tensor expected(DType::kBf16, all_slots * heads * head_dim);
    Tensor got = expected;
    OnDevice device_from = Copy(from);
    CopyHeadsArgs args{
        .from = from.data(),
        .from_rows = {.dtype = DType::kBf16, .head_stride = tokens * head_dim, .slot_stride = head_dim},
        .to = expected.data(),
        .to_rows = {.dtype = DType::kBf16,
                    .head_stride = head_dim,
                    .slot_stride = int64_t{heads} * head_dim,
                    .slots = slots},
        .heads = heads,
        .tokens = tokens,
        .head_dim = head_dim};
    ASSERT_OK(reference_->CopyHeads(args));
    args.from = device_from.data(), args.to = got.data();
    const auto copy = stream_->CopyHeadsToHost(args, device_from.buffer());
    ASSERT_OK(copy.status());
    ASSERT_OK((*copy)->Wait());
    EXPECT_TRUE(got.SameBits(expected));
  });
}

// K and V of `tokens` slots of eight heads of 128, and where they go.
struct HostCopyCase {
  static constexpr int kHeads = 8, kHeadDim = 128;

  HostCopyCase(std::mt19937_64& random, int64_t tokens)
      : tokens(tokens),
        from(Tensor::Normal(random, DType::kBf16, kHeads * tokens * kHeadDim)),
        to(DType::kBf16, from.count()) {}
  CopyHeadsArgs Args(const void* source) {
    return {.from = source,
            .from_rows = {.dtype = DType::kBf16, .head_stride = tokens * kHeadDim, .slot_stride = kHeadDim},
            .to = to.data(),
            .to_rows = {.dtype = DType::kBf16,
                        .head_stride = kHeadDim,
                        .slot_stride = kHeads * kHeadDim,
                        .slots = {.width = tokens}},
            .heads = kHeads,
            .tokens = tokens,
            .head_dim = kHeadDim};
  }

  const int64_t tokens;
  const Tensor from;
  Tensor to;
};

// Longer than the pinned memory that it goes through, and than what another copy left there.
TEST_F(CudaStreamTest, LongCopiesToTheHostGoInPieces) {
  ForRandomDraws(2, [&](std::mt19937_64& random) {
    HostCopyCase first(random, Draw(random, 9'000, 20'000)), second(random, Draw(random, 1, 9'000));
    std::unique_ptr<HostCopy> copies[2];
    OnDevice first_from = Copy(first.from), second_from = Copy(second.from);
    copies[0] = stream_->CopyHeadsToHost(first.Args(first_from.data()), first_from.buffer()).value();
    copies[1] = stream_->CopyHeadsToHost(second.Args(second_from.data()), second_from.buffer()).value();
    ASSERT_OK(copies[1]->Wait());
    ASSERT_OK(copies[0]->Wait());
    for (HostCopyCase* const one : {&first, &second}) {
      HostCopyCase expected = *one;
      expected.to = Tensor(DType::kBf16, one->from.count());
      ASSERT_OK(reference_->CopyHeads(expected.Args(one->from.data())));
      EXPECT_TRUE(one->to.SameBits(expected.to));
    }
  });
}

// Its memory may go at once.
TEST_F(CudaStreamTest, ADroppedCopyToTheHostWritesNothingMore) {
  ForRandomDraws(5, [&](std::mt19937_64& random) {
    HostCopyCase dropped(random, 20'000);
    {
      OnDevice from = Copy(dropped.from);
      ASSERT_OK(stream_->CopyHeadsToHost(dropped.Args(from.data()), from.buffer()).status());
    }
    const Tensor left = dropped.to;
    ASSERT_OK(stream_->Finish());
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_TRUE(dropped.to.SameBits(left));
  });
}

TEST_F(CudaStreamTest, AStopTokenEndsTheWaitForACopyToTheHost) {
  ForRandomDraws(1, [&](std::mt19937_64& random) {
    StopToken stop;
    const std::unique_ptr<Stream> stopped = Make(&stop);
    HostCopyCase copied(random, 20'000);
    OnDevice from = Copy(copied.from);
    const auto copy = stopped->CopyHeadsToHost(copied.Args(from.data()), from.buffer());
    ASSERT_OK(copy.status());
    stop.Stop();
    const absl::Status status = (*copy)->Wait();  // it may have been faster
    EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
    EXPECT_TRUE(
        absl::IsCancelled(stopped->CopyHeadsToHost(copied.Args(from.data()), from.buffer()).status()));
  });
}

TEST_F(CudaStreamTest, GeGlu) {
  ForRandomDraws(10, [&](std::mt19937_64& random) {
    const int64_t tokens = Draw(random, 0, 60), width = Draw(random, 1, 900);
    const Tensor x = Tensor::Normal(random, DType::kBf16, tokens * 2 * width, 4);
    Tensor expected(DType::kBf16, tokens * width);
    OnDevice got = Copy(expected), device_x = Copy(x);
    ASSERT_OK(stream_->GeGlu(device_x.data(), tokens, width, got.data()));
    ASSERT_OK(reference_->GeGlu(x.data(), tokens, width, expected.data()));
    ExpectClose(got.Read(), expected, 4e-6);
  });
}

TEST_F(CudaStreamTest, ClampedSwiGlu) {
  ForRandomDraws(10, [&](std::mt19937_64& random) {
    const int64_t tokens = Draw(random, 0, 60), width = Draw(random, 1, 900);
    const Tensor x = Tensor::Normal(random, DType::kBf16, tokens * 2 * width, 6);
    Tensor expected(DType::kBf16, tokens * width);
    OnDevice got = Copy(expected), device_x = Copy(x);
    ClampedSwiGluArgs args{
        .x = x.data(), .tokens = tokens, .width = width, .alpha = 1.702f, .limit = 7, .y = expected.data()};
    ASSERT_OK(reference_->ClampedSwiGlu(args));
    args.x = device_x.data(), args.y = got.data();
    ASSERT_OK(stream_->ClampedSwiGlu(args));
    ExpectClose(got.Read(), expected, 4e-6);
  });
}

TEST_F(CudaStreamTest, SwiGlu) {
  ForRandomDraws(10, [&](std::mt19937_64& random) {
    const int64_t tokens = Draw(random, 0, 100), width = Draw(random, 1, 1100);
    const Tensor x = Tensor::Normal(random, DType::kBf16, tokens * 2 * width, 4);
    Tensor expected(DType::kBf16, tokens * width);
    OnDevice got = Copy(expected), device_x = Copy(x);
    ASSERT_OK(stream_->SwiGlu(device_x.data(), tokens, width, got.data()));
    ASSERT_OK(reference_->SwiGlu(x.data(), tokens, width, expected.data()));
    ExpectClose(got.Read(), expected, 4e-6);
  });
}

TEST_F(CudaStreamTest, Convert) {
  ForRandomDraws(8, [&](std::mt19937_64& random) {
    const Tensor from = Tensor::Normal(random, DType::kF32, Draw(random, 0, 100000));
    OnDevice device_from = Copy(from);
    for (const DType to : {DType::kF32, DType::kBf16}) {
      Tensor expected(to, from.count());
      OnDevice got = Copy(expected);
      ASSERT_OK(stream_->Convert(device_from.data<float>(), from.count(), to, got.data()));
      ASSERT_OK(reference_->Convert(from.data<float>(), from.count(), to, expected.data()));
      EXPECT_TRUE(got.Read().SameBits(expected));
    }
  });
}

// ---- Streams and memory.

// Adds ones to a tensor of zeros, [tokens, kWidth], one in each operation: work whose end is far.
class Counter {
 public:
  static constexpr int64_t kWidth = 8;

  Counter(Stream& stream, int64_t tokens)
      : stream_(stream),
        tokens_(tokens),
        zeros_(DType::kF32, tokens * kWidth),
        ones_(DType::kBf16, tokens * kWidth) {
    for (int64_t i = 0; i < zeros_.count(); ++i) zeros_.Set(i, 0), ones_.Set(i, 1);
    // y += x Wᵀ with eighths in W: every product adds a one.
    const std::vector<BFloat16> eighths(kWidth * kWidth, BFloat16::FromFloat(1.0f / kWidth));
    const WeightRows rows{.data = eighths.data(), .dtype = DType::kBf16, .rows = kWidth};
    weight_ = *stream.device().PackWeight({&rows, 1}, kWidth);
    ones_on_device_ = *stream.Place(ones_.data(), ones_.count() * sizeof(BFloat16));
  }
  BufferRef Count(int times) {
    BufferRef y = *stream_.Place(zeros_.data(), zeros_.count() * sizeof(float));
    for (int time = 0; time < times; ++time) {
      EXPECT_TRUE(stream_
                      .Gemm({.weight = weight_.get(),
                             .x = ones_on_device_->data(),
                             .tokens = tokens_,
                             .y = y->data(),
                             .y_dtype = DType::kF32,
                             .accumulate = true})
                      .ok());
    }
    return y;
  }

 private:
  Stream& stream_;
  const int64_t tokens_;
  Tensor zeros_, ones_;
  std::unique_ptr<PackedWeight> weight_;
  BufferRef ones_on_device_;
};

void ExpectAll(Stream& stream, const BufferRef& buffer, float expected) {
  std::vector<float> values(buffer->size_bytes() / sizeof(float));
  ASSERT_OK(stream.Download(buffer->data(), buffer->size_bytes(), values.data()));
  for (const float value : values) ASSERT_EQ(value, expected);
}

// Null where it fails.
std::shared_ptr<const StreamPoint> MarkOf(Stream& stream) {
  auto point = stream.Mark();
  EXPECT_TRUE(point.ok()) << point.status();
  return std::move(point).value_or(nullptr);
}

TEST_F(CudaStreamTest, ReceiversSeeWhatSendersHaveQueued) {
  const LoneStream elsewhere(MakeDevice(1));  // on the second device where there is one
  const std::unique_ptr<Stream> sender = Make(), here = Make();
  for (Stream* const receiver : {here.get(), elsewhere.get()}) {
    Counter counter(*sender, 333);
    for (int round = 0; round < 12; ++round) {
      const int times = 3 + round;
      auto message = receiver->Fetch({counter.Count(times), MarkOf(*sender)});
      ASSERT_TRUE(message.ok()) << message.status();
      auto taken = receiver->TakeOver(*std::move(message));
      ASSERT_TRUE(taken.ok()) << taken.status();
      auto copy = receiver->Allocate((*taken)->size_bytes());
      ASSERT_TRUE(copy.ok());
      ASSERT_OK(
          receiver->Convert((*taken)->data<float>(), 333 * Counter::kWidth, DType::kF32, (*copy)->data()));
      taken->reset();  // before the receiver's stream has come to the copy
      // Memory of the same size, written at once: it must not be what the receiver still reads.
      const BufferRef next = counter.Count(1);
      ExpectAll(*receiver, *copy, static_cast<float>(times));
      ExpectAll(*sender, next, 1);
    }
  }
}

TEST_F(CudaStreamTest, MemoryThatAnotherRankReadsOutlivesItsOwner) {
  const std::unique_ptr<Stream> reader = Make();
  Counter counter(*reader, 200);
  for (int round = 0; round < 12; ++round) {
    auto owner = std::make_unique<LoneStream>(MakeDevice());
    Counter owned(**owner, 200);  // its weight stays: it is the device's, not in the stream's order
    BufferRef shared = owned.Count(5);
    auto taken = reader->TakeOver({shared, MarkOf(**owner)});
    ASSERT_TRUE(taken.ok());
    const BufferRef slow = counter.Count(4);  // the reader's stream is busy
    auto copy = reader->Allocate(shared->size_bytes());
    ASSERT_OK(reader->Convert((*taken)->data<float>(), 200 * Counter::kWidth, DType::kF32, (*copy)->data()));
    taken->reset();
    shared.reset();
    owner.reset();
    ExpectAll(*reader, *copy, 5);
  }
}

TEST_F(CudaStreamTest, MarksTellTheDevicesTime) {
  Counter counter(*stream_, 100);
  const auto begin = MarkOf(*stream_);
  counter.Count(20);
  const auto middle = MarkOf(*stream_);
  counter.Count(20);
  const auto end = MarkOf(*stream_);
  ASSERT_OK(stream_->Finish());
  ASSERT_TRUE(begin != nullptr && middle != nullptr && end != nullptr);
  EXPECT_GT(middle->SecondsSince(*begin), 0);
  EXPECT_GT(end->SecondsSince(*middle), 0);
  EXPECT_NEAR(end->SecondsSince(*begin), end->SecondsSince(*middle) + middle->SecondsSince(*begin), 1e-4);
}

TEST_F(CudaStreamTest, AStopTokenEndsEveryOperation) {
  StopToken stop;
  const std::unique_ptr<Stream> stopped = Make(&stop);
  auto buffer = stopped->Allocate(4096);
  ASSERT_TRUE(buffer.ok());
  float* const data = (*buffer)->data<float>();
  stop.Stop();
  EXPECT_TRUE(absl::IsCancelled(stopped->RmsNorm(data, data, 1, 16, 0, data + 64)));
  EXPECT_TRUE(absl::IsCancelled(stopped->Convert(data, 16, DType::kF32, data + 64)));
  AttentionBlockArgs block{.q_heads = 1, .kv_heads = 1, .head_dim = 8};
  EXPECT_TRUE(absl::IsCancelled(stopped->AttentionBlock(block)));
  // A stream that was made without it goes on.
  EXPECT_TRUE(stream_->Convert(data, 16, DType::kF32, data + 64).ok());
  EXPECT_TRUE(stream_->Finish().ok());
}

TEST_F(CudaStreamTest, TheDevicesMemoryIsThereForEveryStream) {
  const std::vector<float> values(1 << 16, 7);
  const auto placed = device_->Place(values.data(), values.size() * sizeof(float));
  ASSERT_TRUE(placed.ok()) << placed.status();
  const auto raw = device_->Allocate(values.size() * sizeof(float));
  ASSERT_TRUE(raw.ok()) << raw.status();
  const std::unique_ptr<Stream> first = Make(), second = Make();
  ExpectAll(*first, *placed, 7);
  ASSERT_OK(second->Convert((*placed)->data<float>(), 1 << 16, DType::kF32, (*raw)->data()));
  ExpectAll(*second, *raw, 7);
}

TEST_F(CudaStreamTest, RefusesMoreMemoryThanThereIs) {
  const auto refused = stream_->Allocate(size_t{1} << 46);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  EXPECT_NE(refused.status().message().find("70368744177664 bytes"), std::string::npos) << refused.status();
  EXPECT_FALSE(device_->lost());
  EXPECT_TRUE(stream_->Allocate(1 << 20).ok());
  EXPECT_TRUE(stream_->Allocate(0).ok());
}

}  // namespace
}  // namespace meshfill

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (const auto devices = meshfill::FindCudaDevices(); !devices.ok()) {
    std::printf("not run: %s\n", std::string(devices.status().message()).c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
