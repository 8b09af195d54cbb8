#include "kernels/cuda/cuda_weight.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/layer_ops.h"
#include "kernels/return_if_error.h"
#include "kernels/word_hash.h"

namespace meshfill {
namespace {

// Rows of f32 or f16 that are on the device at a time, to be rounded.
constexpr int64_t kRawBytes = int64_t{64} << 20;
// Kernels read narrow rows so many bytes at a time, or fewer.
constexpr int64_t kRowAlignment = 16;

bool IsNarrow(DType dtype) { return dtype == DType::kF8E4M3 || dtype == DType::kF4E2M1; }

int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// How a weight's rows lie in memory. Scales begin where the elements end: 8 divides the features.
struct RowForm {
  ElementKind kind;  // of bf16, FP8 or MXFP4
  int64_t element_bytes;
  int64_t scale_bytes;  // 0: it has none
  int64_t bytes;        // from one row to the next

  static RowForm Of(const ElementKind& source, int64_t in_features) {
    RowForm form = {.kind = source, .scale_bytes = 0};
    if (!IsNarrow(source.dtype)) form.kind = {.dtype = DType::kBf16};
    form.bytes = form.element_bytes = ElementsBytes(form.kind.dtype, in_features);
    if (!IsNarrow(source.dtype)) return form;
    const int64_t scales = (in_features + source.scale_columns - 1) / source.scale_columns;
    form.scale_bytes = scales * static_cast<int64_t>(form.fp4() ? sizeof(uint8_t) : sizeof(float));
    form.bytes = RoundUp(form.element_bytes + form.scale_bytes, kRowAlignment);
    return form;
  }
  bool fp4() const { return kind.dtype == DType::kF4E2M1; }
};

ElementKind KindOf(const WeightRows& rows) {
  return {.dtype = rows.dtype, .scale_columns = rows.exponents != nullptr ? kMxBlock : rows.scale_columns};
}

// Writes what lies behind the elements of a row: its scales, and zeros.
void WriteScales(const WeightRows& source, const RowForm& form, int64_t row, std::byte* behind) {
  const auto* scales = reinterpret_cast<const std::byte*>(source.exponents);
  if (!form.fp4()) {
    scales = reinterpret_cast<const std::byte*>(source.scales);
    row /= source.scale_rows;
  }
  std::memcpy(behind, scales + row * form.scale_bytes, form.scale_bytes);
  std::memset(behind + form.scale_bytes, 0, form.bytes - form.element_bytes - form.scale_bytes);
}

// Uploads rows of the file's dtype, rounded to bf16.
absl::Status UploadRounded(const WeightRows& source, int64_t first, int64_t count, int64_t in_features,
                           BFloat16* to, const CudaLane& lane) {
  const size_t row_bytes = in_features * DTypeBytes(source.dtype);
  const int64_t rows_at_a_time = std::max<int64_t>(1, kRawBytes / static_cast<int64_t>(row_bytes));
  for (int64_t done = 0; done < count; done += rows_at_a_time) {
    const int64_t rows = std::min(rows_at_a_time, count - done);
    ASSIGN_OR_RETURN(const BufferRef raw, lane.Allocate(rows * row_bytes));
    RETURN_IF_ERROR(lane.row_uploads->Upload(source, first + done, rows,
                                             {.bytes = row_bytes, .stride = row_bytes},
                                             raw->data<std::byte>(), *lane.queue));
    RETURN_IF_ERROR(LaunchConvert(raw->data(), source.dtype, rows * in_features, DType::kBf16,
                                  to + done * in_features, lane.queue->get()));
  }
  return absl::OkStatus();
}

absl::Status UploadRows(const WeightRows& source, int64_t first, int64_t count, int64_t in_features,
                        const RowForm& form, std::byte* to, const CudaLane& lane) {
  if (source.dtype != form.kind.dtype) {
    return UploadRounded(source, first, count, in_features, reinterpret_cast<BFloat16*>(to), lane);
  }
  UploadedRows rows = {.bytes = static_cast<size_t>(form.element_bytes),
                       .stride = static_cast<size_t>(form.bytes)};
  if (form.bytes > form.element_bytes) {
    rows.write_behind = [&](int64_t row, std::byte* behind) { WriteScales(source, form, row, behind); };
  }
  return lane.row_uploads->Upload(source, first, count, rows, to, *lane.queue);
}

absl::Status UploadBias(std::span<const float> bias, CudaWeight& weight, const CudaLane& lane) {
  const size_t size_bytes = bias.size() * sizeof(float);
  ASSIGN_OR_RETURN(weight.bias_f32, lane.Allocate(size_bytes));
  ASSIGN_OR_RETURN(weight.bias_bf16, lane.Allocate(bias.size() * sizeof(BFloat16)));
  RETURN_IF_ERROR(lane.queue->Upload(bias.data(), size_bytes, weight.bias_f32->data()));
  return LaunchConvert(weight.bias_f32->data(), DType::kF32, std::ssize(bias), DType::kBf16,
                       weight.bias_bf16->data(), lane.queue->get());
}

// Those of all rows, 0 where some have none; empty where none has.
std::vector<float> BiasOf(std::span<const WeightRows> rows, int64_t out_features) {
  std::vector<float> all;
  int64_t first = 0;
  for (const WeightRows& source : rows) {
    if (source.bias != nullptr) {
      all.resize(out_features);
      std::copy_n(source.bias, source.rows, all.begin() + first);
    }
    first += source.rows;
  }
  return all;
}

}  // namespace

PackedForm CudaWeightForm(int64_t out_features, int64_t in_features, const ElementKind& kind) {
  const RowForm form = RowForm::Of(kind, in_features);
  WordHash layout;
  for (const int64_t word :
       {static_cast<int64_t>(form.kind.dtype), form.element_bytes, form.scale_bytes, form.bytes}) {
    layout.Add(static_cast<uint64_t>(word));
  }
  return {.bytes = out_features * form.bytes,
          .panel_rows = 1,
          .panel_bytes = form.bytes,
          .layout = layout.Finish()};
}

absl::StatusOr<BufferRef> PackCudaRows(std::span<const WeightRows> rows, int64_t in_features, int64_t first,
                                       int64_t count, const CudaLane& lane) {
  const RowForm form = RowForm::Of(KindOf(rows.front()), in_features);
  ASSIGN_OR_RETURN(BufferRef packed, lane.Allocate(static_cast<size_t>(count * form.bytes)));
  int64_t begin = 0;  // the source's first row
  for (const WeightRows& source : rows) {
    const int64_t from = std::max(first, begin), until = std::min(first + count, begin + source.rows);
    if (from < until) {
      RETURN_IF_ERROR(UploadRows(source, from - begin, until - from, in_features, form,
                                 packed->data<std::byte>() + (from - first) * form.bytes, lane));
    }
    begin += source.rows;
  }
  return packed;
}

absl::StatusOr<std::unique_ptr<CudaWeight>> CudaWeightOfRows(int64_t out_features, int64_t in_features,
                                                             const ElementKind& kind, BufferRef rows,
                                                             std::span<const float> bias,
                                                             const CudaLane& lane) {
  const RowForm form = RowForm::Of(kind, in_features);
  if (static_cast<int64_t>(rows->size_bytes()) != out_features * form.bytes) {
    return absl::InternalError(absl::StrCat("a weight of ", out_features, " rows of ", form.bytes,
                                            " bytes is given ", rows->size_bytes(), " bytes"));
  }
  auto weight = std::make_unique<CudaWeight>(out_features, in_features, form.kind, std::move(rows));
  if (!bias.empty()) RETURN_IF_ERROR(UploadBias(bias, *weight, lane));
  return weight;
}

absl::StatusOr<std::unique_ptr<CudaWeight>> PackCudaWeight(std::span<const WeightRows> rows,
                                                           int64_t in_features, const CudaLane& lane) {
  int64_t out_features = 0;
  for (const WeightRows& source : rows) out_features += source.rows;
  ASSIGN_OR_RETURN(BufferRef packed, PackCudaRows(rows, in_features, 0, out_features, lane));
  return CudaWeightOfRows(out_features, in_features, KindOf(rows.front()), std::move(packed),
                          BiasOf(rows, out_features), lane);
}

absl::StatusOr<WidenedMatrices> WidenMatrices(std::span<const CudaWeight* const> weights,
                                              const CudaLane& lane) {
  WidenedMatrices all;
  const int64_t out_features = weights.front()->out_features(), in_features = weights.front()->in_features();
  std::vector<NarrowMatrix> narrow;
  for (const CudaWeight* weight : weights) {
    all.matrix.push_back(weight->narrow() ? nullptr : weight->rows->data<BFloat16>());
    if (!weight->narrow()) continue;
    const RowForm form = RowForm::Of(weight->kind, in_features);
    narrow.push_back({.rows = weight->rows->data<uint8_t>(),
                      .row_bytes = static_cast<uint32_t>(form.bytes),
                      .scales_at = static_cast<uint32_t>(form.element_bytes),
                      .scale_columns = Divisor(static_cast<uint32_t>(form.kind.scale_columns)),
                      .fp4 = form.fp4()});
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
