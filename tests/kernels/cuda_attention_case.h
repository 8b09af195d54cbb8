// A random attention block with a sequence of KV chunks, its expected state, and how far a CUDA kernel may be
// from it.
#ifndef MESHFILL_TESTS_KERNELS_CUDA_ATTENTION_CASE_H_
#define MESHFILL_TESTS_KERNELS_CUDA_ATTENTION_CASE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/stream.h"
#include "tests/kernels/lone_stream.h"
#include "tests/kernels/random_band.h"

namespace meshfill {

struct AttentionCase {
  DType dtype = DType::kBf16;
  int head_dim = 64;
  int kv_heads = 1;
  int group = 1;  // query heads for each KV head
  int64_t q_tokens = 0;
  int64_t k_tokens = 0;
  Band band = {};
  bool carry_in = false;

  int q_heads() const { return kv_heads * group; }
  int64_t rows() const { return q_heads() * q_tokens; }
  std::string DebugString() const {
    return absl::StrCat(DTypeName(dtype), " head_dim ", head_dim, " heads ", q_heads(), "/", kv_heads,
                        " q_tokens ", q_tokens, " k_tokens ", k_tokens, carry_in ? " carried, " : ", ",
                        meshfill::DebugString(band));
  }
};

// Tensors on the host, with poison behind them.
struct AttentionData {
  static constexpr int64_t kGuard = 64;

  AttentionData(const AttentionCase& shape, std::mt19937& random)
      : q(RandomBits(shape.rows() * shape.head_dim, shape.dtype, random)),
        k(RandomBits(shape.kv_heads * shape.k_tokens * shape.head_dim, shape.dtype, random)),
        v(RandomBits(shape.kv_heads * shape.k_tokens * shape.head_dim, shape.dtype, random)),
        o(shape.rows() * shape.head_dim + kGuard, std::numeric_limits<float>::quiet_NaN()),
        lse(shape.rows() + kGuard, std::numeric_limits<float>::quiet_NaN()) {
    if (!shape.carry_in) return;
    std::normal_distribution<float> normal;
    for (int64_t row = 0; row < shape.rows(); ++row) {
      const bool seen = random() % 4 != 0;  // some rows carry nothing yet
      lse[row] = seen ? 3 + normal(random) : -std::numeric_limits<float>::infinity();
      for (int d = 0; d < shape.head_dim; ++d) o[row * shape.head_dim + d] = seen ? normal(random) : 0.0f;
    }
  }

  AttentionBlockArgs Args(const AttentionCase& shape) {
    return {.q = q.data(),
            .k = k.data(),
            .v = v.data(),
            .q_tokens = shape.q_tokens,
            .k_tokens = shape.k_tokens,
            .q_heads = shape.q_heads(),
            .kv_heads = shape.kv_heads,
            .head_dim = shape.head_dim,
            .band = shape.band,
            .scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim)),
            .carry_in = shape.carry_in,
            .o = o.data(),
            .lse = lse.data()};
  }

  static std::vector<uint16_t> RandomBits(int64_t count, DType dtype, std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<uint16_t> bits(count);
    for (uint16_t& element : bits) {
      const float value = normal(random);
      // f16 has ten bits of mantissa: cut off the others of a value that is no subnormal.
      const uint32_t u = std::bit_cast<uint32_t>(std::abs(value) < 0x1p-10f ? 0x1p-10f : value);
      element = dtype == DType::kBf16
                    ? BFloat16::FromFloat(value).bits
                    : static_cast<uint16_t>((u >> 16 & 0x8000) | ((u >> 13 & 0x3ffff) - (112 << 10)));
    }
    return bits;
  }

  std::vector<uint16_t> q, k, v;
  std::vector<float> o, lse;
};

// Any layout's band, odd lengths, GQA 1 to 16; sizes that the emulator can pay for.
inline AttentionCase RandomAttentionCase(std::mt19937& random, std::initializer_list<int> head_dims,
                                         int64_t most_tokens) {
  AttentionCase shape;
  shape.dtype = Pick(random, {DType::kBf16, DType::kF16});
  shape.head_dim = Pick(random, head_dims);
  shape.kv_heads = Pick(random, {1, 1, 2});
  shape.group = Pick(random, {1, 1, 2, 3});
  shape.q_tokens = Pick<int64_t>(random, {1, 63, 64, 128, 129, Draw(random, 1, most_tokens)});
  shape.k_tokens = Pick<int64_t>(random, {0, 1, 64, 80, 128, 161, Draw(random, 1, most_tokens)});
  shape.band = RandomBand(random, shape.q_tokens, shape.k_tokens);
  shape.carry_in = Draw(random, 0, 1) == 0;
  return shape;
}

// A window: masked key tiles, whole ones, masked ones again.
inline AttentionCase MaskedAtBothEnds(std::mt19937& random, int head_dim) {
  AttentionCase shape{.head_dim = head_dim, .q_tokens = 100, .k_tokens = 700};
  shape.band.q.base = 600;
  shape.band.window = Draw(random, 420, 470);
  return shape;
}

// Makes the scores of a bf16 case grow towards one end of a row by more than the softmax's slack, so that
// what was accumulated must be rescaled on the way.
inline void GrowScores(const AttentionCase& shape, bool towards_the_end, AttentionData& data) {
  for (int64_t i = 0; i < std::ssize(data.k); ++i) {
    const int64_t key = i / shape.head_dim % shape.k_tokens;
    const float along = static_cast<float>(key) / shape.k_tokens;
    const float factor = 1 + 8 * (towards_the_end ? along : 1 - along);
    data.k[i] = BFloat16::FromFloat(factor * BFloat16{data.k[i]}.ToFloat()).bits;
  }
}

// The reference's block, its query heads side by side on the host's cores.
inline absl::Status AttendByReference(const AttentionCase& shape, const AttentionBlockArgs& block) {
  std::atomic<int> next = 0;
  std::vector<absl::Status> statuses(shape.q_heads());
  const auto work = [&] {
    const LoneStream reference = ReferenceStream(shape.dtype);
    for (int head; (head = next++) < shape.q_heads();) {
      const auto at = [&](const void* tensor, int64_t of_head, int64_t tokens) {
        return static_cast<const uint16_t*>(tensor) + of_head * tokens * shape.head_dim;
      };
      AttentionBlockArgs args = block;
      args.q_heads = args.kv_heads = 1;
      args.q = at(block.q, head, shape.q_tokens);
      args.k = at(block.k, head / shape.group, shape.k_tokens);
      args.v = at(block.v, head / shape.group, shape.k_tokens);
      args.o += head * shape.q_tokens * shape.head_dim;
      args.lse += head * shape.q_tokens;
      statuses[head] = reference->AttentionBlock(args);
    }
  };
  std::vector<std::thread> threads(std::min<size_t>(std::thread::hardware_concurrency(), shape.q_heads()));
  for (std::thread& thread : threads) thread = std::thread(work);
  work();
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// `before`: the data as the kernel got them; `after`: with o and lse as the kernel left them. Probabilities
// are rounded to the dtype, LSE is not: it is held to f32's accuracy.
inline void ExpectReferenceState(const AttentionCase& shape, const AttentionData& before,
                                 const AttentionData& after) {
  AttentionData expected = before;
  ASSERT_TRUE(AttendByReference(shape, expected.Args(shape)).ok());
  const double tolerance = shape.dtype == DType::kBf16 ? 4e-3 : 5e-4;
  double error = 0, norm = 0;
  for (int64_t row = 0; row < shape.rows(); ++row) {
    if (std::isinf(expected.lse[row])) {
      ASSERT_EQ(after.lse[row], expected.lse[row]) << "row " << row;
    } else {
      ASSERT_NEAR(after.lse[row], expected.lse[row], 2e-5 * std::max(1.0f, std::abs(expected.lse[row])))
          << "row " << row;
    }
    for (int64_t i = row * shape.head_dim; i < (row + 1) * shape.head_dim; ++i) {
      ASSERT_FALSE(std::isnan(after.o[i])) << "row " << row;
      ASSERT_NEAR(after.o[i], expected.o[i], 8 * tolerance * std::max(1.0f, std::abs(expected.o[i])))
          << "row " << row;
      error += (after.o[i] - expected.o[i]) * (after.o[i] - expected.o[i]);
      norm += expected.o[i] * expected.o[i];
    }
  }
  EXPECT_LE(std::sqrt(error), tolerance * std::sqrt(norm));
  for (int64_t i = 0; i < AttentionData::kGuard; ++i) {
    ASSERT_TRUE(std::isnan(after.o[shape.rows() * shape.head_dim + i]) &&
                std::isnan(after.lse[shape.rows() + i]))
        << "wrote past the end";
  }
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_KERNELS_CUDA_ATTENTION_CASE_H_
