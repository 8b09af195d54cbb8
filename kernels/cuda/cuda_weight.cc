#include "kernels/cuda/cuda_weight.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/cuda/layer_ops.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Rows of f32 or f16 that are on the device at a time, to be rounded.
constexpr int64_t kRawBytes = int64_t{64} << 20;

// Uploads rows of the file's dtype, rounded to bf16.
absl::Status UploadRounded(const WeightRows& source, int64_t in_features, BFloat16* to,
                           const CudaLane& lane) {
  const auto row_bytes = static_cast<int64_t>(in_features * DTypeBytes(source.dtype));
  const int64_t rows_at_a_time = std::max<int64_t>(1, kRawBytes / row_bytes);
  for (int64_t first = 0; first < source.rows; first += rows_at_a_time) {
    const int64_t rows = std::min(rows_at_a_time, source.rows - first);
    ASSIGN_OR_RETURN(const BufferRef raw, lane.Allocate(static_cast<size_t>(rows * row_bytes)));
    RETURN_IF_ERROR(
        lane.row_uploads->Upload(source, first, rows, row_bytes, raw->data<std::byte>(), *lane.queue));
    RETURN_IF_ERROR(LaunchConvert(raw->data(), source.dtype, rows * in_features, DType::kBf16,
                                  to + first * in_features, lane.queue->get()));
  }
  return absl::OkStatus();
}

absl::Status UploadMatrix(std::span<const WeightRows> rows, int64_t in_features, const CudaWeight& weight,
                          const CudaLane& lane) {
  const int64_t row_bytes = ElementsBytes(weight.dtype, in_features);
  auto* to = weight.matrix->data<std::byte>();
  for (const WeightRows& source : rows) {
    if (source.dtype == weight.dtype) {
      RETURN_IF_ERROR(lane.row_uploads->Upload(source, 0, source.rows, row_bytes, to, *lane.queue));
    } else {
      RETURN_IF_ERROR(UploadRounded(source, in_features, reinterpret_cast<BFloat16*>(to), lane));
    }
    to += source.rows * row_bytes;
  }
  return absl::OkStatus();
}

int64_t ScalesOfRow(const CudaWeight& weight) {
  return (weight.in_features() + weight.scale_columns - 1) / weight.scale_columns;
}

// Those of each row, one after the other.
absl::StatusOr<BufferRef> UploadScales(std::span<const WeightRows> rows, const CudaWeight& weight,
                                       const CudaLane& lane) {
  const int64_t columns = ScalesOfRow(weight);
  const bool fp4 = weight.dtype == DType::kF4E2M1;
  std::vector<std::byte> all(weight.out_features() * columns * (fp4 ? sizeof(uint8_t) : sizeof(float)));
  std::byte* to = all.data();
  const auto append = [&](const void* from, size_t bytes) {
    std::memcpy(to, from, bytes);
    to += bytes;
  };
  for (const WeightRows& source : rows) {
    if (fp4) {
      append(source.exponents, source.rows * columns);
      continue;
    }
    for (int64_t row = 0; row < source.rows; ++row) {
      append(source.scales + row / source.scale_rows * columns, columns * sizeof(float));
    }
  }
  ASSIGN_OR_RETURN(BufferRef scales, lane.Allocate(all.size()));
  RETURN_IF_ERROR(lane.queue->Upload(all.data(), all.size(), scales->data()));
  return scales;
}

absl::Status UploadBias(std::span<const WeightRows> rows, CudaWeight& weight, const CudaLane& lane) {
  const int64_t out_features = weight.out_features();
  std::vector<float> all(out_features);
  int64_t first = 0;
  for (const WeightRows& source : rows) {
    if (source.bias != nullptr) std::copy_n(source.bias, source.rows, all.begin() + first);
    first += source.rows;
  }
  ASSIGN_OR_RETURN(weight.bias_f32, lane.Allocate(out_features * sizeof(float)));
  ASSIGN_OR_RETURN(weight.bias_bf16, lane.Allocate(out_features * sizeof(BFloat16)));
  RETURN_IF_ERROR(lane.queue->Upload(all.data(), out_features * sizeof(float), weight.bias_f32->data()));
  return LaunchConvert(weight.bias_f32->data(), DType::kF32, out_features, DType::kBf16,
                       weight.bias_bf16->data(), lane.queue->get());
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaWeight>> PackCudaWeight(std::span<const WeightRows> rows,
                                                           int64_t in_features, const CudaLane& lane) {
  int64_t out_features = 0;
  bool bias = false;
  for (const WeightRows& source : rows) {
    out_features += source.rows;
    bias = bias || source.bias != nullptr;
  }
  const WeightRows& front = rows.front();
  const bool narrow = front.scales != nullptr || front.exponents != nullptr;
  auto weight = std::make_unique<CudaWeight>(out_features, in_features, narrow ? front.dtype : DType::kBf16);
  ASSIGN_OR_RETURN(
      weight->matrix,
      lane.Allocate(static_cast<size_t>(out_features * ElementsBytes(weight->dtype, in_features))));
  RETURN_IF_ERROR(UploadMatrix(rows, in_features, *weight, lane));
  if (narrow) {
    weight->scale_columns = front.exponents != nullptr ? kMxBlock : front.scale_columns;
    ASSIGN_OR_RETURN(weight->scales, UploadScales(rows, *weight, lane));
  }
  if (bias) RETURN_IF_ERROR(UploadBias(rows, *weight, lane));
  return weight;
}

absl::StatusOr<WidenedMatrices> WidenMatrices(std::span<const CudaWeight* const> weights,
                                              const CudaLane& lane) {
  WidenedMatrices all;
  const int64_t out_features = weights.front()->out_features(), in_features = weights.front()->in_features();
  std::vector<NarrowMatrix> narrow;
  for (const CudaWeight* weight : weights) {
    all.matrix.push_back(weight->narrow() ? nullptr : weight->matrix->data<BFloat16>());
    if (!weight->narrow()) continue;
    narrow.push_back({.elements = weight->matrix->data<uint8_t>(),
                      .scales = weight->scales->data(),
                      .scale_columns = Divisor(static_cast<uint32_t>(weight->scale_columns)),
                      .scales_of_row = static_cast<uint32_t>(ScalesOfRow(*weight)),
                      .fp4 = weight->dtype == DType::kF4E2M1});
  }
  if (narrow.empty()) return all;
  const int64_t elements = out_features * in_features;
  ASSIGN_OR_RETURN(all.scratch, lane.Allocate(narrow.size() * elements * sizeof(BFloat16)));
  auto* to = all.scratch->data<BFloat16>();
  const size_t list_bytes = narrow.size() * sizeof(NarrowMatrix);
  ASSIGN_OR_RETURN(const BufferRef list, lane.Allocate(list_bytes));
  RETURN_IF_ERROR(lane.queue->Upload(narrow.data(), list_bytes, list->data()));
  RETURN_IF_ERROR(
      LaunchWiden({narrow, list->data<NarrowMatrix>(), out_features, in_features, to}, lane.queue->get()));
  for (const BFloat16*& matrix : all.matrix) {
    if (matrix == nullptr) matrix = std::exchange(to, to + elements);
  }
  return all;
}

}  // namespace meshfill
