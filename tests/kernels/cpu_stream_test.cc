#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <deque>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/cpu/cpu_device.h"
#include "tests/kernels/lone_stream.h"
#include "tests/kernels/random_experts.h"
#include "tests/kernels/random_tensor.h"
#include "tests/kernels/simd_target.h"

namespace meshfill {
namespace {

// The CPU backend, on 1 to 3 threads and every instruction set, against the reference on the same random
// inputs.
class CpuStreamTest : public testing::TestWithParam<DType> {
 protected:
  // Calls body(cpu, reference, random) for some draws.
  template <typename Body>
  void ForRandomDraws(int draws, const Body& body) {
    const uint64_t seed = TestSeed();
    for (int draw = 0; draw < draws; ++draw) {
      SCOPED_TRACE(testing::Message() << "MESHFILL_SEED=" << seed << ", draw " << draw);
      std::mt19937_64 random(seed + draw);
      const std::vector<int64_t> targets = SimdTargets();
      const ScopedSimdTarget target(targets[Draw(random, 0, std::ssize(targets) - 1)]);
      const LoneStream cpu(MakeCpuDevice(GetParam(), static_cast<int>(Draw(random, 1, 3))));
      const LoneStream reference = ReferenceStream(GetParam());
      body(*cpu, *reference, random);
      if (HasFatalFailure()) return;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Dtypes, CpuStreamTest, testing::Values(DType::kF32, DType::kBf16),
                         [](const auto& param) { return DTypeName(param.param); });

TEST_P(CpuStreamTest, Embed) {
  ForRandomDraws(10, [&](Stream& cpu, Stream& reference, std::mt19937_64& random) {
    const int64_t vocab = Draw(random, 1, 50), width = Draw(random, 1, 700), tokens = Draw(random, 0, 900);
    const DType dtype = std::vector{DType::kF32, DType::kBf16, DType::kF16}[Draw(random, 0, 2)];
    const Tensor table = Tensor::Normal(random, dtype, vocab * width);
    std::vector<uint32_t> ids(tokens);
    for (uint32_t& id : ids) id = static_cast<uint32_t>(Draw(random, 0, vocab - 1));
    Tensor got(DType::kF32, tokens * width), expected = got;
    ASSERT_TRUE(cpu.Embed(ids, table.data(), dtype, width, got.data<float>()).ok());
    ASSERT_TRUE(reference.Embed(ids, table.data(), dtype, width, expected.data<float>()).ok());
    ExpectClose(got, expected, 0);
  });
}

TEST_P(CpuStreamTest, RmsNorm) {
  ForRandomDraws(10, [&](Stream& cpu, Stream& reference, std::mt19937_64& random) {
    const int64_t tokens = Draw(random, 0, 400), width = Draw(random, 1, 1500);
    const float scale = Draw(random, 0, 1) == 1 ? 3 : 3e-3f;  // where eps counts
    const Tensor x = Tensor::Normal(random, DType::kF32, tokens * width, scale);
    const Tensor weight = Tensor::Normal(random, DType::kF32, width);
    Tensor got(GetParam(), tokens * width), expected = got;
    for (auto [backend, y] : {std::pair(&cpu, &got), {&reference, &expected}}) {
      ASSERT_TRUE(
          backend->RmsNorm(x.data<float>(), weight.data<float>(), tokens, width, 1e-5f, y->data()).ok());
    }
    ExpectClose(got, expected, 2e-6);
  });
}

TEST_P(CpuStreamTest, AddRmsNorm) {
  ForRandomDraws(10, [&](Stream& cpu, Stream& reference, std::mt19937_64& random) {
    const int64_t tokens = Draw(random, 0, 400), width = Draw(random, 1, 1500);
    const float scale = Draw(random, 0, 1) == 1 ? 3 : 3e-3f;  // where eps counts
    const Tensor y = Tensor::Normal(random, DType::kF32, tokens * width, scale);
    const Tensor weight = Tensor::Normal(random, DType::kF32, width);
    Tensor got = Tensor::Normal(random, DType::kF32, tokens * width), expected = got;
    for (auto [backend, x] : {std::pair(&cpu, &got), {&reference, &expected}}) {
      ASSERT_TRUE(
          backend->AddRmsNorm(y.data<float>(), weight.data<float>(), tokens, width, 1e-5f, x->data<float>())
              .ok());
    }
    ExpectClose(got, expected, 2e-6);
  });
}

TEST_P(CpuStreamTest, Scale) {
  ForRandomDraws(10, [&](Stream& cpu, Stream& reference, std::mt19937_64& random) {
    Tensor got = Tensor::Normal(random, DType::kF32, Draw(random, 0, 300000)), expected = got;
    ASSERT_TRUE(cpu.Scale(got.data<float>(), got.count(), 33.75f).ok());
    ASSERT_TRUE(reference.Scale(expected.data<float>(), expected.count(), 33.75f).ok());
    EXPECT_TRUE(got.SameBits(expected));
  });
}

TEST_P(CpuStreamTest, SplitQkv) {
  ForRandomDraws(20, [&](Stream& cpu, Stream& reference, std::mt19937_64& random) {
    const int q_heads = Draw(random, 1, 9), kv_heads = Draw(random, 1, 4);
    const int head_dim = 2 * static_cast<int>(Draw(random, 1, 128));
    const int half = Draw(random, 0, 1) == 1 ? head_dim / 2 : static_cast<int>(Draw(random, 1, head_dim / 2));
    const int64_t chunk_tokens = Draw(random, 0, 120);
    const int64_t slot_begin = Draw(random, 0, chunk_tokens),
                  tokens = Draw(random, 0, chunk_tokens - slot_begin);
    const float scale = Draw(random, 0, 1) == 1 ? 1 : 1e-3f;  // where norm_eps counts
    const Tensor qkv =
        Tensor::Normal(random, GetParam(), tokens * (q_heads + 2 * kv_heads) * head_dim, scale);
    const Tensor q_norm = Tensor::Normal(random, DType::kF32, q_heads * head_dim);
    const Tensor k_norm = Tensor::Normal(random, DType::kF32, kv_heads * head_dim);
    const bool norms = Draw(random, 0, 1) == 1, all_heads = Draw(random, 0, 1) == 1;
    Tensor cos(DType::kF32, chunk_tokens * half), sin = cos;
    for (int64_t i = 0; i < cos.count(); ++i) {
      const double angle = std::uniform_real_distribution<>(-3, 3)(random);
      cos.Set(i, static_cast<float>(std::cos(angle)));
      sin.Set(i, static_cast<float>(std::sin(angle)));
    }
    struct Split {
      Tensor q, k, v;
    };
    const Split poisoned{Tensor(GetParam(), q_heads * chunk_tokens * head_dim),
                         Tensor(GetParam(), kv_heads * chunk_tokens * head_dim),
                         Tensor(GetParam(), kv_heads * chunk_tokens * head_dim)};
    Split got = poisoned, expected = poisoned;
    for (auto [backend, split] : {std::pair(&cpu, &got), {&reference, &expected}}) {
      ASSERT_TRUE(backend
                      ->SplitQkv({.qkv = qkv.data(),
                                  .tokens = tokens,
                                  .slot_begin = slot_begin,
                                  .chunk_tokens = chunk_tokens,
                                  .q_heads = q_heads,
                                  .kv_heads = kv_heads,
                                  .head_dim = head_dim,
                                  .rotated_dim = 2 * half,
                                  .q_norm = norms ? q_norm.data<float>() : nullptr,
                                  .k_norm = norms ? k_norm.data<float>() : nullptr,
                                  .norm_all_heads = all_heads,
                                  .norm_eps = 1e-6f,
                                  .rope_cos = cos.data<float>(),
                                  .rope_sin = sin.data<float>(),
                                  .q = split->q.data(),
                                  .k = split->k.data(),
                                  .v = split->v.data()})
                      .ok());
    }
    // Slots outside the slice must keep their poison, which compares unequal: look at the slice, then at the
    // rest.
    for (auto [mine, theirs] :
         {std::pair(&got.q, &expected.q), {&got.k, &expected.k}, {&got.v, &expected.v}}) {
      Tensor slice(GetParam(), mine->count()), reference_slice = slice;
      for (int64_t i = 0; i < mine->count(); ++i) {
        const int64_t slot = i / head_dim % chunk_tokens;
        const bool inside = slot >= slot_begin && slot < slot_begin + tokens;
        EXPECT_EQ(std::isnan(mine->At(i)), !inside);
        slice.Set(i, inside ? mine->At(i) : 0);
        reference_slice.Set(i, inside ? theirs->At(i) : 0);
      }
      EXPECT_TRUE(mine->GuardIntact());
      ExpectClose(slice, reference_slice, 5e-6);
    }
  });
}

TEST_P(CpuStreamTest, AttentionBlockWithCarriedState) {
  ForRandomDraws(6, [&](Stream& cpu, Stream& reference, std::mt19937_64& random) {
    const int kv_heads = Draw(random, 1, 2), q_heads = kv_heads * static_cast<int>(Draw(random, 1, 3));
    const int head_dim = Draw(random, 1, 96);
    const int64_t q_tokens = Draw(random, 1, 90), k_tokens = Draw(random, 1, 90);
    const Tensor q = Tensor::Normal(random, GetParam(), q_heads * q_tokens * head_dim);
    const Tensor k = Tensor::Normal(random, GetParam(), kv_heads * k_tokens * head_dim);
    const Tensor v = Tensor::Normal(random, GetParam(), kv_heads * k_tokens * head_dim);
    Tensor o(DType::kF32, q_heads * q_tokens * head_dim), lse(DType::kF32, q_heads * q_tokens);
    Tensor expected_o = o, expected_lse = lse;
    AttentionBlockArgs args{.q = q.data(),
                            .k = k.data(),
                            .v = v.data(),
                            .q_tokens = q_tokens,
                            .k_tokens = k_tokens,
                            .q_heads = q_heads,
                            .kv_heads = kv_heads,
                            .head_dim = head_dim,
                            .band = {.q = {.base = Draw(random, 0, 2), .stride = 3, .width = 16},
                                     .k = {.base = Draw(random, 0, 2), .stride = 3, .width = 16},
                                     .window = 0},
                            .scale = 1 / std::sqrt(static_cast<float>(head_dim)),
                            .carry_in = false,
                            .o = nullptr,
                            .lse = nullptr};
    for (const bool carry_in : {false, true}) {  // the second block stands farther left and is seen more
      args.carry_in = carry_in;
      if (carry_in) args.band.q.base += 3;
      for (auto [backend, to_o, to_lse] :
           {std::tuple(&cpu, &o, &lse), {&reference, &expected_o, &expected_lse}}) {
        args.o = to_o->data<float>();
        args.lse = to_lse->data<float>();
        ASSERT_TRUE(backend->AttentionBlock(args).ok());
      }
      const double tolerance = GetParam() == DType::kF32 ? 2e-5 : 3e-2;
      ExpectClose(o, expected_o, tolerance);
      ExpectClose(lse, expected_lse, tolerance);
    }
  });
}

TEST_P(CpuStreamTest, MergePartial) {
  constexpr float kNothingSeen = -std::numeric_limits<float>::infinity();
  ForRandomDraws(20, [&](Stream& cpu, Stream& reference, std::mt19937_64& random) {
    const int64_t rows = Draw(random, 0, 3000);
    const int head_dim = Draw(random, 1, 256);
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
    Tensor expected_o = o, expected_lse = lse;
    for (auto [backend, to_o, to_lse] :
         {std::tuple(&cpu, &o, &lse), {&reference, &expected_o, &expected_lse}}) {
      ASSERT_TRUE(backend
                      ->MergePartial({.o = to_o->data<float>(),
                                      .lse = to_lse->data<float>(),
                                      .other_o = other_o.data(),
                                      .other_dtype = other_dtype,
                                      .other_lse = other_lse.data<float>(),
                                      .rows = rows,
                                      .head_dim = head_dim})
                      .ok());
    }
    ExpectClose(o, expected_o, 1e-5);
    ExpectClose(lse, expected_lse, 1e-6);
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

TEST_P(CpuStreamTest, CopyHeads) {
  ForRandomDraws(40, [&](Stream& cpu, Stream& reference, std::mt19937_64& random) {
    const int heads = Draw(random, 1, 9), head_dim = Draw(random, 1, 200);
    const int64_t tokens = Draw(random, 0, 300);
    const DType from_dtype = Draw(random, 0, 1) ? DType::kF32 : DType::kBf16;
    const auto [from_rows, from_elements] = DrawRows(random, from_dtype, heads, tokens, head_dim);
    const auto [to_rows, to_elements] = DrawRows(random, GetParam(), heads, tokens, head_dim);
    const Tensor from = Tensor::Normal(random, from_dtype, from_elements);
    Tensor got(GetParam(), to_elements), expected = got;  // other rows must stay as they are
    for (auto [backend, to] : {std::pair(&cpu, &got), {&reference, &expected}}) {
      ASSERT_TRUE(backend
                      ->CopyHeads({.from = from.data(),
                                   .from_rows = from_rows,
                                   .to = to->data(),
                                   .to_rows = to_rows,
                                   .heads = heads,
                                   .tokens = tokens,
                                   .head_dim = head_dim})
                      .ok());
    }
    EXPECT_TRUE(got.SameBits(expected));
  });
}

TEST_P(CpuStreamTest, Activate) {
  for (const Gating gating : {Gating::kSwiGlu, Gating::kGeGlu, Gating::kClampedSwiGlu}) {
    SCOPED_TRACE(testing::Message() << "gating " << static_cast<int>(gating));
    ForRandomDraws(10, [&](Stream& cpu, Stream& reference, std::mt19937_64& random) {
      const int64_t tokens = Draw(random, 0, 300), width = Draw(random, 1, 1100);
      const Tensor x = Tensor::Normal(random, GetParam(), tokens * 2 * width, 4);
      Tensor got(GetParam(), tokens * width), expected = got;
      for (auto [backend, y] : {std::pair(&cpu, &got), {&reference, &expected}}) {
        ASSERT_TRUE(backend
                        ->Activate({.activation = {.gating = gating, .alpha = 1.702f, .limit = 5},
                                    .x = x.data(),
                                    .tokens = tokens,
                                    .width = width,
                                    .y = y->data()})
                        .ok());
      }
      ExpectClose(got, expected, 1e-6);
    });
  }
}

TEST_P(CpuStreamTest, ApplySinks) {
  ForRandomDraws(10, [&](Stream& cpu, Stream& reference, std::mt19937_64& random) {
    const int heads = static_cast<int>(Draw(random, 1, 20)),
              head_dim = static_cast<int>(Draw(random, 1, 256));
    const int64_t tokens = Draw(random, 0, 300);
    const Tensor lse = Tensor::Normal(random, DType::kF32, heads * tokens, 5),
                 sinks = Tensor::Normal(random, DType::kF32, heads, 5);
    Tensor got = Tensor::Normal(random, DType::kF32, heads * tokens * head_dim), expected = got;
    for (auto [backend, o] : {std::pair(&cpu, &got), {&reference, &expected}}) {
      ASSERT_TRUE(backend
                      ->ApplySinks({.o = o->data<float>(),
                                    .lse = lse.data<float>(),
                                    .sinks = sinks.data<float>(),
                                    .heads = heads,
                                    .tokens = tokens,
                                    .head_dim = head_dim})
                      .ok());
    }
    EXPECT_TRUE(got.GuardIntact());
    ExpectClose(got, expected, 1e-5);
  });
}

TEST_P(CpuStreamTest, Convert) {
  ForRandomDraws(10, [&](Stream& cpu, Stream& reference, std::mt19937_64& random) {
    const Tensor from = Tensor::Normal(random, DType::kF32, Draw(random, 0, 300000));
    for (const DType to : {DType::kF32, DType::kBf16}) {
      Tensor got(to, from.count()), expected = got;
      ASSERT_TRUE(cpu.Convert(from.data<float>(), from.count(), to, got.data()).ok());
      ASSERT_TRUE(reference.Convert(from.data<float>(), from.count(), to, expected.data()).ok());
      EXPECT_TRUE(got.SameBits(expected));
    }
  });
}

TEST_P(CpuStreamTest, AllocatesAlignedMemoryOfAnySize) {
  const auto cpu = MakeCpuDevice(GetParam(), 1);
  for (const size_t bytes : {0, 1, 63, 4096, 1 << 20, (4 << 20) - 1, 4 << 20, (9 << 20) + 3}) {
    const auto buffer = cpu->Allocate(bytes);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_EQ((*buffer)->size_bytes(), bytes);
    const size_t alignment = bytes < 4 << 20 ? 64 : 2 << 20;  // large ones have huge pages
    EXPECT_EQ(reinterpret_cast<uintptr_t>((*buffer)->data()) % alignment, 0u) << bytes;
    if (bytes > 0) std::memset((*buffer)->data(), 1, bytes);
  }
}

// Bytes of address space that this process has.
int64_t MappedBytes() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

TEST_P(CpuStreamTest, LargeMemoryIsGivenBackWhole) {
  const auto cpu = MakeCpuDevice(GetParam(), 1);
  const int64_t before = MappedBytes();
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(cpu->Allocate((64 << 20) + 1).ok());
  EXPECT_LT(MappedBytes() - before, 64 << 20);
}

TEST_P(CpuStreamTest, MemoryThatIsNotToBeHadIsAnErrorThatNamesTheBytes) {
  const auto cpu = MakeCpuDevice(GetParam(), 1);
  for (const size_t bytes : {size_t{1} << 50, size_t{1} << 62, std::numeric_limits<size_t>::max()}) {
    const absl::Status status = cpu->Allocate(bytes).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_NE(status.message().find(std::to_string(bytes)), std::string::npos) << status;
  }
}

TEST_P(CpuStreamTest, ABufferOutlivesItsDeviceAndDiesOnAnotherThread) {
  auto cpu = MakeCpuDevice(GetParam(), 2);
  BufferRef small = *cpu->Allocate(1000), large = *cpu->Allocate(8 << 20);
  cpu.reset();
  std::memset(small->data(), 1, small->size_bytes());
  std::memset(large->data(), 1, large->size_bytes());
  std::thread([small = std::move(small), large = std::move(large)]() mutable {
    small.reset();
    large.reset();
  }).join();
}

// Every operation of a stream on a little data, each with outputs of its own.
class EveryOperation {
 public:
  using Operation = std::function<absl::Status(Stream&)>;

  EveryOperation(Device& device, DType dtype) : device_(device), dtype_(dtype) {
    const float* const x = Input(DType::kF32)->data<float>();
    const void* const values = Input(dtype)->data();
    AddElementwise(x, values);
    AddAttention(x, values);
    AddProducts(x, values);
  }

  const std::vector<Operation>& all() const { return all_; }

 private:
  Tensor* Input(DType dtype) { return &tensors_.emplace_back(Tensor::Normal(random_, dtype, kElements)); }
  float* Output() { return tensors_.emplace_back(DType::kF32, kElements).data<float>(); }

  void AddElementwise(const float* x, const void* values) {
    all_.push_back([=, this, y = Output()](Stream& cpu) { return cpu.Embed(ids_, x, DType::kF32, 8, y); });
    all_.push_back([=, y = Output()](Stream& cpu) { return cpu.RmsNorm(x, x, 2, 8, 1e-5f, y); });
    all_.push_back([=, y = Output()](Stream& cpu) { return cpu.AddRmsNorm(x, x, 2, 8, 1e-5f, y); });
    all_.push_back([y = Output()](Stream& cpu) { return cpu.Scale(y, kElements, 2); });
    for (const Gating gating : {Gating::kSwiGlu, Gating::kGeGlu, Gating::kClampedSwiGlu}) {
      all_.push_back([=, y = Output()](Stream& cpu) {
        return cpu.Activate({.activation = {.gating = gating, .alpha = 1, .limit = 7},
                             .x = values,
                             .tokens = 2,
                             .width = 8,
                             .y = y});
      });
    }
    all_.push_back([=, y = Output()](Stream& cpu) { return cpu.Convert(x, kElements, DType::kF32, y); });
  }

  void AddAttention(const float* x, const void* values) {
    all_.push_back([=, q = Output(), k = Output(), v = Output()](Stream& cpu) {
      return cpu.SplitQkv({.qkv = values,
                           .tokens = 2,
                           .slot_begin = 0,
                           .chunk_tokens = 2,
                           .q_heads = 1,
                           .kv_heads = 1,
                           .head_dim = 8,
                           .rotated_dim = 8,
                           .rope_cos = x,
                           .rope_sin = x,
                           .q = q,
                           .k = k,
                           .v = v});
    });
    all_.push_back([=, o = Output(), lse = Output()](Stream& cpu) {
      return cpu.AttentionBlock({.q = values,
                                 .k = values,
                                 .v = values,
                                 .q_tokens = 2,
                                 .k_tokens = 2,
                                 .q_heads = 1,
                                 .kv_heads = 1,
                                 .head_dim = 8,
                                 .band = {},
                                 .scale = 1,
                                 .carry_in = false,
                                 .o = o,
                                 .lse = lse});
    });
    all_.push_back([=, o = Output(), lse = Output()](Stream& cpu) {
      return cpu.MergePartial({.o = o,
                               .lse = lse,
                               .other_o = x,
                               .other_dtype = DType::kF32,
                               .other_lse = x,
                               .rows = 2,
                               .head_dim = 8});
    });
    all_.push_back([=, o = Output()](Stream& cpu) {
      return cpu.ApplySinks({.o = o, .lse = x, .sinks = x, .heads = 2, .tokens = 2, .head_dim = 8});
    });
    all_.push_back([=, this, y = Output()](Stream& cpu) {
      return cpu.CopyHeads({.from = x,
                            .from_rows = {.dtype = DType::kF32, .head_stride = 16, .slot_stride = 8},
                            .to = y,
                            .to_rows = {.dtype = dtype_, .head_stride = 8, .slot_stride = 8},
                            .heads = 1,
                            .tokens = 2,
                            .head_dim = 8});
    });
  }

  void AddProducts(const float* x, const void* values) {
    const WeightRows rows{.data = values, .dtype = dtype_, .rows = 8};
    for (int expert = 0; expert < kRule.experts; ++expert) {
      weights_.push_back(device_.PackWeight({&rows, 1}, 8).value());
      down_.push_back(device_.PackWeight({&rows, 1}, 4).value());
    }
    all_.push_back([=, this, y = Output()](Stream& cpu) {
      return cpu.Gemm(
          {.weight = weights_[0].get(), .x = values, .tokens = 2, .y = y, .y_dtype = DType::kF32});
    });
    const RouteArgs routed = {.logits = x, .tokens = 2, .rule = kRule, .rows = routed_.rows};
    EXPECT_TRUE(device_.NewStream(nullptr).value()->Route(routed).ok());
    all_.push_back([=, this](Stream& cpu) {
      return cpu.Route({.logits = x, .tokens = 2, .rule = kRule, .rows = to_route_.rows});
    });
    all_.push_back([=, this, narrow = Output(), y = Output()](Stream& cpu) {
      return cpu.ExpertMlp({.gate_up = weights_,
                            .down = down_,
                            .rows = routed_.rows,
                            .row_count = 2 * kRule.used,
                            .activation = {},
                            .x = values,
                            .narrow = narrow,
                            .y = y});
    });
    all_.push_back([=, this, y = Output()](Stream& cpu) {
      return cpu.AddExperts(
          {.y = values, .rows = routed_.rows, .tokens = 2, .used = kRule.used, .width = 8, .x = y});
    });
  }

  static constexpr int64_t kElements = 64;
  static constexpr RouterRule kRule = {.experts = 3, .used = 2};

  Device& device_;
  const DType dtype_;
  std::mt19937_64 random_{1};
  std::deque<Tensor> tensors_;  // a deque: they stay where they are
  const std::vector<uint32_t> ids_ = {0, 0};
  std::vector<std::unique_ptr<PackedWeight>> weights_, down_;
  OwnRows routed_{kRule, 2}, to_route_{kRule, 2};
  std::vector<Operation> all_;
};

// Every operation answers CANCELLED once the token is raised; a stream with another one works.
TEST_P(CpuStreamTest, ARaisedStopTokenCancels) {
  const auto device = MakeCpuDevice(GetParam(), 2);
  const EveryOperation every(*device, GetParam());
  const auto expect_each = [&](Stream& stream, absl::StatusCode code) {
    for (size_t i = 0; i < every.all().size(); ++i) {
      const absl::Status status = every.all()[i](stream);
      EXPECT_EQ(status.code(), code) << "operation " << i << ": " << status;
    }
  };
  StopToken stop, fresh;
  auto stream = *device->NewStream(&stop);
  expect_each(*stream, absl::StatusCode::kOk);
  stop.Stop();
  expect_each(*stream, absl::StatusCode::kCancelled);
  stream = *device->NewStream(&fresh);
  expect_each(*stream, absl::StatusCode::kOk);
}

TEST_P(CpuStreamTest, APausedRunStandsStillInEveryOperation) {
  const auto device = MakeCpuDevice(GetParam(), 1);
  const EveryOperation every(*device, GetParam());
  StopToken run;
  run.Pause();
  std::atomic<size_t> begun = 0;
  std::vector<std::atomic<bool>> done(every.all().size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < done.size(); ++i) {
    threads.emplace_back([&, i] {
      const auto stream = *device->NewStream(&run);
      ++begun;
      const absl::Status status = every.all()[i](*stream);
      EXPECT_TRUE(status.ok()) << "operation " << i << ": " << status;
      done[i] = true;
    });
  }
  while (begun < done.size()) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(10));  // any of them would be done by now
  for (size_t i = 0; i < done.size(); ++i) EXPECT_FALSE(done[i]) << "operation " << i;
  run.Resume();
  for (std::thread& thread : threads) thread.join();
}

// Streams of one device at once, and one after the other on the threads of the first.
TEST(CpuDevice, StreamsComputeTheSameAtOnceAndInTurn) {
  const auto device = MakeCpuDevice(DType::kF32, 4, 2);
  std::mt19937_64 random(1);
  const Tensor x = Tensor::Normal(random, DType::kF32, 64 * 32),
               matrix = Tensor::Normal(random, DType::kF32, 32 * 48);
  const WeightRows rows{.data = matrix.data(), .dtype = DType::kF32, .rows = 48};
  const auto weight = device->PackWeight({&rows, 1}, 32);
  ASSERT_TRUE(weight.ok()) << weight.status();
  const auto multiply = [&](Tensor& y) {
    const auto stream = *device->NewStream(nullptr);
    EXPECT_TRUE(
        stream
            ->Gemm(
                {.weight = weight->get(), .x = x.data(), .tokens = 64, .y = y.data(), .y_dtype = DType::kF32})
            .ok());
  };
  Tensor first(DType::kF32, 64 * 48), second = first, third = first;
  std::thread other(multiply, std::ref(first));
  multiply(second);
  other.join();
  multiply(third);
  EXPECT_TRUE(first.SameBits(second));
  EXPECT_TRUE(first.SameBits(third));
}

TEST(CpuDevice, SaysItsTarget) {
  EXPECT_EQ(MakeCpuDevice(DType::kF32, 1)->name().rfind("cpu/", 0), 0u);
  EXPECT_EQ(MakeCpuDevice(DType::kBf16, 1)->dtype(), DType::kBf16);
}

}  // namespace
}  // namespace meshfill
