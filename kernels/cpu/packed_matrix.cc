#include "kernels/cpu/packed_matrix.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/cpu/layer_ops.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

using dnnl::memory;

// Tokens for which oneDNN is asked for its preference; the answer is the same for all counts that Gemm
// multiplies.
constexpr int64_t kTypicalTokens = 128;

// Reads rows of a source, converted: where that changes nothing, to where they go.
absl::Status ReadRows(const WeightRows& source, int64_t in_features, int64_t first, int64_t count,
                      DType dtype, std::byte* to) {
  if (source.dtype == dtype) return source.source->Read(first, count, to);
  constexpr int64_t kRowsAtATime = 32;
  std::vector<std::byte> raw(kRowsAtATime * in_features * DTypeBytes(source.dtype));
  for (int64_t done = 0; done < count; done += kRowsAtATime) {
    const int64_t rows = std::min(kRowsAtATime, count - done);
    RETURN_IF_ERROR(source.source->Read(first + done, rows, raw.data()));
    ConvertValues(raw.data(), source.dtype, rows * in_features, dtype,
                  to + done * in_features * DTypeBytes(dtype));
  }
  return absl::OkStatus();
}

// Copies rows [begin, begin + count) of the stacked sources, converted.
absl::Status CopyRows(std::span<const WeightRows> sources, int64_t in_features, int64_t begin, int64_t count,
                      DType dtype, std::byte* to) {
  const int64_t end = begin + count;
  int64_t first = 0;  // row of the stack at which the source begins
  for (const WeightRows& source : sources) {
    const int64_t from = std::max(begin, first), until = std::min(end, first + source.rows);
    std::byte* const target = to + (from - begin) * in_features * DTypeBytes(dtype);
    if (from < until && source.data == nullptr) {
      RETURN_IF_ERROR(ReadRows(source, in_features, from - first, until - from, dtype, target));
    } else if (from < until) {
      const auto* rows = static_cast<const std::byte*>(source.data);
      ConvertValues(rows + (from - first) * in_features * DTypeBytes(source.dtype), source.dtype,
                    (until - from) * in_features, dtype, target);
    }
    first += source.rows;
  }
  return absl::OkStatus();
}

// One worker's rows on their way into the packed layout.
struct Staging {
  BufferRef rounded;  // [panel, in_features], compute dtype
  BufferRef widened;  // the same in the dtype of the multiplication; `rounded` itself where that is the
                      // compute dtype
  absl::Status status;
};

absl::StatusOr<Staging> AllocateStaging(int64_t panel_elements, DType compute_dtype, DType multiply_dtype) {
  ASSIGN_OR_RETURN(BufferRef rounded, AllocateHostMemory(panel_elements * DTypeBytes(compute_dtype)));
  if (multiply_dtype == compute_dtype) return Staging{rounded, rounded, {}};
  ASSIGN_OR_RETURN(BufferRef widened, AllocateHostMemory(panel_elements * DTypeBytes(multiply_dtype)));
  return Staging{std::move(rounded), std::move(widened), {}};
}

absl::Status Reorder(const Staging& staging, int64_t in_features, int64_t columns, DType dtype,
                     const WideMatrix::Columns& panel) {
  KeepOneDnnSingleThreaded();
  try {
    const memory::desc rows({in_features, columns}, OneDnnType(dtype), memory::dims{1, in_features});
    memory from(rows, CpuEngine(), staging.widened->data());
    memory to(panel.layout, CpuEngine(), panel.elements);
    dnnl::stream stream(CpuEngine());
    dnnl::reorder(from, to).execute(stream, from, to);
    return absl::OkStatus();
  } catch (const dnnl::error& error) {
    return OneDnnError("packing a weight", error);
  }
}

absl::StatusOr<memory::desc> LayoutOf(int64_t in_features, int64_t out_features, DType compute_dtype) {
  try {
    return PreferredLayout(in_features, out_features, MultiplyDType(compute_dtype));
  } catch (const dnnl::error& error) {
    return OneDnnError("choosing a weight's layout", error);
  }
}

// Offset of a column's first element, in elements.
int64_t OffsetOf(const memory::desc& layout, int64_t in_features, int64_t column) {
  const int64_t columns = std::min(kPanelFeatures, layout.dims()[1] - column);
  return layout.submemory_desc({in_features, columns}, {0, column}).data.offset0;
}

// Packs panels [first, first + panels) of the matrix.
absl::Status PackInto(const WideMatrix& matrix, std::span<const WeightRows> rows, DType compute_dtype,
                      int64_t first, int64_t panels, ThreadPool& pool) {
  const DType dtype = MultiplyDType(compute_dtype);
  const int64_t in_features = matrix.in_features(), out_features = matrix.columns();
  std::vector<Staging> staging;
  for (int worker = 0; worker < pool.threads(); ++worker) {
    ASSIGN_OR_RETURN(auto allocated, AllocateStaging(std::min(kPanelFeatures, out_features) * in_features,
                                                     compute_dtype, dtype));
    staging.push_back(std::move(allocated));
  }
  pool.ParallelFor(panels, [&](int64_t panel, int worker) {
    const int64_t begin = (first + panel) * kPanelFeatures;
    const int64_t columns = std::min(kPanelFeatures, out_features - begin);
    Staging& mine = staging[worker];
    if (!mine.status.ok()) return;
    mine.status = CopyRows(rows, in_features, begin, columns, compute_dtype, mine.rounded->data<std::byte>());
    if (!mine.status.ok()) return;
    if (mine.widened != mine.rounded) {
      ConvertValues(mine.rounded->data(), compute_dtype, columns * in_features, dtype, mine.widened->data());
    }
    mine.status.Update(Reorder(mine, in_features, columns, dtype, matrix.ColumnsFrom(begin, columns)));
  });
  for (const Staging& worker : staging) {
    if (!worker.status.ok()) return worker.status;
  }
  return absl::OkStatus();
}

}  // namespace

memory::desc PreferredLayout(int64_t in_features, int64_t out_features, DType dtype) {
  const dnnl::matmul::desc operation(
      RowMajor(kTypicalTokens, in_features, dtype),
      memory::desc({in_features, out_features}, OneDnnType(dtype), memory::format_tag::any),
      RowMajor(kTypicalTokens, out_features, DType::kF32));
  return dnnl::matmul::primitive_desc(operation, CpuEngine()).weights_desc();
}

int64_t RowsOf(std::span<const WeightRows> rows) {
  int64_t sum = 0;
  for (const WeightRows& source : rows) sum += source.rows;
  return sum;
}

std::vector<float> StackBias(std::span<const WeightRows> rows) {
  std::vector<float> stacked;
  const bool any =
      std::any_of(rows.begin(), rows.end(), [](const auto& source) { return source.bias != nullptr; });
  if (!any) return stacked;
  for (const WeightRows& source : rows) {
    stacked.resize(stacked.size() + source.rows, 0.0f);
    if (source.bias != nullptr) std::copy_n(source.bias, source.rows, stacked.end() - source.rows);
  }
  return stacked;
}

DType MultiplyDType(DType compute_dtype) {
  KeepOneDnnSingleThreaded();
  try {
    PreferredLayout(64, 64, compute_dtype);
    return compute_dtype;
  } catch (const dnnl::error&) {
    return DType::kF32;
  }
}

WideMatrix::Columns WideMatrix::ColumnsFrom(int64_t begin, int64_t columns) const {
  memory::desc part = layout.submemory_desc({in_features(), columns}, {0, begin});
  // The offset goes into the pointer, since the fast matmul takes none in the layout.
  const int64_t offset = std::exchange(part.data.offset0, 0);
  return {part, static_cast<std::byte*>(elements) + offset * DTypeBytes(dtype)};
}

absl::StatusOr<std::unique_ptr<PackedMatrix>> PackMatrix(std::span<const WeightRows> rows,
                                                         int64_t in_features, DType compute_dtype,
                                                         ThreadPool& pool) {
  ASSIGN_OR_RETURN(const memory::desc layout, LayoutOf(in_features, RowsOf(rows), compute_dtype));
  ASSIGN_OR_RETURN(BufferRef elements, AllocateHostMemory(layout.get_size()));
  auto packed = std::make_unique<PackedMatrix>(layout, MultiplyDType(compute_dtype), std::move(elements),
                                               StackBias(rows));
  const int64_t panels = (packed->out_features() + kPanelFeatures - 1) / kPanelFeatures;
  RETURN_IF_ERROR(PackInto(*packed->wide(), rows, compute_dtype, 0, panels, pool));
  return packed;
}

absl::StatusOr<PackedForm> PackedFormOf(int64_t in_features, int64_t out_features, DType compute_dtype) {
  ASSIGN_OR_RETURN(const memory::desc layout, LayoutOf(in_features, out_features, compute_dtype));
  const auto bytes = static_cast<int64_t>(layout.get_size());
  if (out_features <= kPanelFeatures) return PackedForm{bytes, out_features, bytes};
  const auto width = static_cast<int64_t>(DTypeBytes(MultiplyDType(compute_dtype)));
  const int64_t panel_bytes = OffsetOf(layout, in_features, kPanelFeatures) * width;
  const int64_t panels = (out_features + kPanelFeatures - 1) / kPanelFeatures;
  // The panels fill the bytes one by one only where no row of an input feature spans two of them.
  const int64_t padded_in = layout.data.padded_dims[0];
  if (panel_bytes != kPanelFeatures * padded_in * width || bytes <= (panels - 1) * panel_bytes ||
      bytes > panels * panel_bytes) {
    return absl::UnimplementedError(
        absl::StrCat("cpu: oneDNN lays weights of ", out_features, " x ", in_features,
                     " out so that they cannot be divided; set model.weights to streamed"));
  }
  return PackedForm{bytes, kPanelFeatures, panel_bytes};
}

absl::StatusOr<BufferRef> PackMatrixPanels(std::span<const WeightRows> rows, int64_t in_features,
                                           DType compute_dtype, int64_t first, int64_t panels,
                                           ThreadPool& pool) {
  const int64_t out_features = RowsOf(rows);
  ASSIGN_OR_RETURN(const PackedForm form, PackedFormOf(in_features, out_features, compute_dtype));
  ASSIGN_OR_RETURN(const memory::desc layout, LayoutOf(in_features, out_features, compute_dtype));
  const int64_t begin = form.ByteOf(first);
  ASSIGN_OR_RETURN(BufferRef bytes, AllocateHostMemory(form.ByteOf(first + panels) - begin));
  const WideMatrix whole{layout, MultiplyDType(compute_dtype), bytes->data<std::byte>() - begin};
  RETURN_IF_ERROR(PackInto(whole, rows, compute_dtype, first, panels, pool));
  return bytes;
}

absl::StatusOr<std::unique_ptr<PackedMatrix>> MatrixOfPanels(int64_t in_features, int64_t out_features,
                                                             DType compute_dtype, BufferRef elements,
                                                             std::vector<float> bias) {
  ASSIGN_OR_RETURN(const memory::desc layout, LayoutOf(in_features, out_features, compute_dtype));
  if (elements->size_bytes() != layout.get_size()) {
    return absl::InternalError(absl::StrCat("a packed weight of ", elements->size_bytes(), " bytes, where ",
                                            out_features, " x ", in_features, " take ", layout.get_size()));
  }
  return std::make_unique<PackedMatrix>(layout, MultiplyDType(compute_dtype), std::move(elements),
                                        std::move(bias));
}

}  // namespace meshfill
