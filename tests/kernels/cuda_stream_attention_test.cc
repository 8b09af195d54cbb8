// Attention on CUDA's streams against the reference: from Q, K and V to merged partial outputs.
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "tests/kernels/cuda_stream_fixture.h"

namespace meshfill {
namespace {

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

}  // namespace
}  // namespace meshfill
