// Linear layers of FP8 and MXFP4 rows, and rows that are read, for tests of every device.
#ifndef MESHFILL_TESTS_KERNELS_NARROW_LAYERS_H_
#define MESHFILL_TESTS_KERNELS_NARROW_LAYERS_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/device.h"
#include "tests/kernels/random_tensor.h"

namespace meshfill {

// Rows that are in no memory, which may fail.
class FileRows final : public RowSource {
 public:
  FileRows(const Tensor& rows, int64_t row_bytes) : rows_(rows), row_bytes_(row_bytes) {}
  absl::Status Read(int64_t first, int64_t count, std::byte* to) const override {
    if (fails_at <= first + count) return absl::DataLossError("rows are gone");
    std::memcpy(to, static_cast<const std::byte*>(rows_.data()) + first * row_bytes_,
                static_cast<size_t>(count * row_bytes_));
    return absl::OkStatus();
  }
  int64_t fails_at = INT64_MAX;  // a row

 private:
  const Tensor& rows_;
  const int64_t row_bytes_;
};

// In f32, of values that bf16 has: a device may add them in y's dtype.
inline Tensor RandomBias(std::mt19937_64& random, int64_t count) {
  Tensor bias = Tensor::Normal(random, DType::kF32, count);
  for (int64_t i = 0; i < count; ++i) bias.Set(i, BFloat16::FromFloat(bias.At(i)).ToFloat());
  return bias;
}

// A linear layer of FP8 rows, with a scale for each block, and the same in f32: each element times its scale.
struct Fp8Layer {
  int64_t in_features, out_features = 0;
  std::vector<Tensor> elements, scales, biases, dequantised;
  std::vector<WeightRows> rows, dequantised_rows;

  // Sources of a multiple of `granule` rows each.
  Fp8Layer(std::mt19937_64& random, int64_t in_features, int64_t max_rows, int64_t max_sources = 3,
           int64_t granule = 1)
      : in_features(in_features) {
    const int64_t sources = Draw(random, 1, max_sources), scale_columns = Draw(random, 1, in_features + 20);
    const bool bias = Draw(random, 0, 1) == 1;
    for (int64_t i = 0; i < sources; ++i) {
      const int64_t count = granule * Draw(random, 1, max_rows / granule);
      const int64_t scale_rows = Draw(random, 1, count + 5);
      const int64_t scale_count =
          ((count + scale_rows - 1) / scale_rows) * ((in_features + scale_columns - 1) / scale_columns);
      elements.push_back(Tensor::Normal(random, DType::kF8E4M3, count * in_features, 60));
      scales.push_back(Tensor::Normal(random, DType::kF32, scale_count, 0.01f));
      biases.push_back(RandomBias(random, count));
      dequantised.push_back(Tensor(DType::kF32, count * in_features));
      const WeightRows source{.data = elements[i].data(),
                              .dtype = DType::kF8E4M3,
                              .rows = count,
                              .bias = bias ? biases[i].data<float>() : nullptr,
                              .scales = scales[i].data<float>(),
                              .scale_rows = scale_rows,
                              .scale_columns = scale_columns};
      for (int64_t e = 0; e < count * in_features; ++e) {
        dequantised[i].Set(e,
                           elements[i].At(e) * source.ScaleOf(e / in_features, e % in_features, in_features));
      }
      rows.push_back(source);
      dequantised_rows.push_back({.data = nullptr, .dtype = DType::kF32, .rows = count, .bias = source.bias});
      out_features += count;
    }
    Point();
  }

  // Tensors move with the vectors that hold them; what the rows point to does not.
  void Point() {
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i].data = elements[i].data();
      dequantised_rows[i].data = dequantised[i].data();
    }
  }
};

// A linear layer of MXFP4 rows, and the same in f32: each element times its scale.
struct Fp4Layer {
  int64_t in_features, out_features = 0;
  std::vector<std::vector<uint8_t>> elements, exponents;
  std::vector<Tensor> biases, dequantised;
  std::vector<WeightRows> rows, dequantised_rows;

  Fp4Layer(std::mt19937_64& random, int64_t blocks, int64_t max_rows, int64_t granule = 1)
      : in_features(blocks * kMxBlock) {
    const bool bias = Draw(random, 0, 1) == 1;
    const int64_t sources = Draw(random, 1, 3);
    for (int64_t i = 0; i < sources; ++i) {
      const int64_t count = granule * Draw(random, 1, max_rows / granule);
      for (auto [bytes, size, least, most] :
           {std::tuple(&elements, count * in_features / 2, 0, 255), {&exponents, count * blocks, 117, 127}}) {
        bytes->emplace_back(size);
        for (uint8_t& byte : bytes->back()) byte = static_cast<uint8_t>(Draw(random, least, most));
      }
      biases.push_back(RandomBias(random, count));
      dequantised.emplace_back(DType::kF32, count * in_features);
      for (int64_t e = 0; e < count * in_features; ++e) {
        const int bits = elements[i][e / 2] >> (e % 2 == 0 ? 0 : 4) & 15;
        dequantised[i].Set(
            e, Fp4ToFloat(static_cast<uint8_t>(bits)) * std::ldexp(1.0f, exponents[i][e / kMxBlock] - 127));
      }
      out_features += count;
    }
    for (int64_t i = 0; i < sources; ++i) {
      const int64_t count = dequantised[i].count() / in_features;
      rows.push_back({.data = elements[i].data(),
                      .dtype = DType::kF4E2M1,
                      .rows = count,
                      .bias = bias ? biases[i].data<float>() : nullptr,
                      .exponents = exponents[i].data()});
      dequantised_rows.push_back(
          {.data = dequantised[i].data(), .dtype = DType::kF32, .rows = count, .bias = rows[i].bias});
    }
  }
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_KERNELS_NARROW_LAYERS_H_
