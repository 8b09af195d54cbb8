#include "engine/model/stacked_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// Writes `columns` columns of a matrix of so many rows, whose rows begin `stride` elements apart, as rows, a
// block that stays in the cache at a time.
template <size_t kElementBytes>
void Transpose(const std::byte* from, int64_t rows, int64_t columns, int64_t stride, std::byte* to) {
  constexpr int64_t kBlock = 64;
  for (int64_t row = 0; row < rows; row += kBlock) {
    const int64_t end_row = std::min(rows, row + kBlock);
    for (int64_t column = 0; column < columns; column += kBlock) {
      const int64_t end_column = std::min(columns, column + kBlock);
      for (int64_t c = column; c < end_column; ++c) {
        for (int64_t r = row; r < end_row; ++r) {
          std::memcpy(to + (c * rows + r) * kElementBytes, from + (r * stride + c) * kElementBytes,
                      kElementBytes);
        }
      }
    }
  }
}

// Rows of a matrix that lies transposed in memory, [in_features, out_features], of 2 or 4 bytes an element.
class TransposedRows final : public RowSource {
 public:
  TransposedRows(const FoundWeight& matrix, const std::byte* elements)
      : elements_(elements),
        out_features_(matrix.entry->tensor.shape[0]),
        in_features_(matrix.entry->tensor.shape[1]),
        element_bytes_(DTypeBytes(matrix.dtype)) {}

  absl::Status Read(int64_t first, int64_t count, std::byte* to) const override {
    const auto transpose = element_bytes_ == sizeof(float) ? Transpose<4> : Transpose<2>;
    transpose(elements_ + static_cast<size_t>(first) * element_bytes_, in_features_, count, out_features_,
              to);
    return absl::OkStatus();
  }

 private:
  const std::byte* const elements_;
  const int64_t out_features_, in_features_;
  const size_t element_bytes_;
};

// Rows of a tensor as its file has them.
class TensorRows final : public RowSource {
 public:
  TensorRows(const FoundWeight& weight, const BeforeRead& before_read)
      : entry_(*weight.entry),
        row_bytes_(static_cast<size_t>(ElementsBytes(weight.dtype, entry_.tensor.shape[1]))),
        before_read_(before_read) {}

  absl::Status Read(int64_t first, int64_t count, std::byte* to) const override {
    ASSIGN_OR_RETURN(const PageCache cache, before_read_());
    return entry_.file->Read(entry_.tensor.bytes.subspan(first * row_bytes_, count * row_bytes_), cache, to);
  }

 private:
  const SafetensorsFolder::Entry& entry_;
  const size_t row_bytes_;
  const BeforeRead& before_read_;
};

}  // namespace

int64_t WidthOf(std::span<const FoundLinear> linears) { return linears[0].matrix.entry->tensor.shape[1]; }

int64_t StackedOutFeatures(std::span<const FoundLinear> linears) {
  int64_t rows = 0;
  for (const FoundLinear& linear : linears) rows += linear.matrix.entry->tensor.shape[0];
  return rows;
}

absl::StatusOr<std::vector<float>> StackedBias(std::span<const FoundLinear> linears,
                                               const BeforeRead& before_read) {
  std::vector<float> stacked;
  bool any = false;
  for (const FoundLinear& linear : linears) {
    ASSIGN_OR_RETURN(std::vector<float> bias, ToFloats(linear.bias, before_read));
    any = any || !bias.empty();
    bias.resize(linear.matrix.entry->tensor.shape[0], 0.0f);
    stacked.insert(stacked.end(), bias.begin(), bias.end());
  }
  if (!any) stacked.clear();
  return stacked;
}

absl::StatusOr<std::unique_ptr<StackedRows>> StackedRows::Of(std::span<const FoundLinear> linears,
                                                             const Fp8Blocks& blocks,
                                                             const BeforeRead& before_read) {
  std::unique_ptr<StackedRows> stacked(new StackedRows);
  for (const FoundLinear& linear : linears) RETURN_IF_ERROR(stacked->Add(linear, blocks, before_read));
  return stacked;
}

absl::Status StackedRows::Add(const FoundLinear& linear, const Fp8Blocks& blocks,
                              const BeforeRead& before_read) {
  const FoundWeight& matrix = linear.matrix;
  ASSIGN_OR_RETURN(std::vector<float> values, ToFloats(linear.bias, before_read));
  const std::vector<float>& bias = biases_.emplace_back(std::move(values));
  WeightRows rows = {.data = nullptr,
                     .dtype = matrix.dtype,
                     .rows = matrix.entry->tensor.shape[0],
                     .bias = bias.empty() ? nullptr : bias.data()};
  if (matrix.dtype == DType::kF4E2M1) {
    std::vector<std::byte>& exponents = exponents_.emplace_back(linear.scales.entry->tensor.bytes.size());
    RETURN_IF_ERROR(CopyElements(linear.scales, before_read, exponents.data()));
    rows.exponents = reinterpret_cast<const uint8_t*>(exponents.data());
  } else if (linear.scales.entry != nullptr) {
    ASSIGN_OR_RETURN(std::vector<float> factors, ToFloats(linear.scales, before_read));
    rows.scales = scales_.emplace_back(std::move(factors)).data();
    rows.scale_rows = std::min(blocks.rows, rows.rows);
    rows.scale_columns = std::min(blocks.columns, matrix.entry->tensor.shape[1]);
  }
  if (matrix.transposed) {
    // Read once as the file has it. Whoever packs the rows turns them.
    std::vector<std::byte>& elements = copies_.emplace_back(matrix.entry->tensor.bytes.size());
    RETURN_IF_ERROR(CopyElements(matrix, before_read, elements.data()));
    rows.source = sources_.emplace_back(std::make_unique<TransposedRows>(matrix, elements.data())).get();
  } else {
    rows.source = sources_.emplace_back(std::make_unique<TensorRows>(matrix, before_read)).get();
  }
  rows_.push_back(rows);
  return absl::OkStatus();
}

}  // namespace meshfill
