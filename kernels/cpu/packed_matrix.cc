#include "kernels/cpu/packed_matrix.h"

#include <algorithm>
#include <cstddef>
#include <optional>
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

absl::StatusOr<MatrixForm> FormOf(int64_t in_features, int64_t out_features, DType compute_dtype) {
  const DType dtype = MultiplyDType(compute_dtype);
  try {
    return MatrixForm(in_features, out_features, dtype);
  } catch (const dnnl::error& error) {
    return OneDnnError("choosing a weight's layout", error);
  }
}

// Packs panels [first, first + panels) of the matrix whose bytes begin at `elements`.
absl::Status PackInto(const MatrixForm& form, void* elements, std::span<const WeightRows> rows,
                      int64_t in_features, DType compute_dtype, int64_t first, int64_t panels,
                      ThreadPool& pool) {
  const DType dtype = MultiplyDType(compute_dtype);
  const int64_t out_features = RowsOf(rows);
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
    mine.status.Update(Reorder(mine, in_features, columns, dtype, form.PanelAt(first + panel, elements)));
  });
  for (const Staging& worker : staging) {
    if (!worker.status.ok()) return worker.status;
  }
  return absl::OkStatus();
}

// The form of one panel after the other, where this layout has them so.
std::optional<PackedForm> DividedBy(const memory::desc& layout) {
  const int64_t in_features = layout.dims()[0], out_features = layout.dims()[1];
  const auto bytes = static_cast<int64_t>(layout.get_size());
  if (out_features <= kPanelFeatures) return PackedForm{bytes, out_features, bytes};
  const auto width = static_cast<int64_t>(memory::data_type_size(layout.data_type()));
  const int64_t panel_bytes =
      layout
          .submemory_desc({in_features, std::min(kPanelFeatures, out_features - kPanelFeatures)},
                          {0, kPanelFeatures})
          .data.offset0 *
      width;
  const int64_t panels = (out_features + kPanelFeatures - 1) / kPanelFeatures;
  // The panels fill the bytes one by one only where no row of an input feature spans two of them.
  const int64_t padded_in = layout.data.padded_dims[0];
  if (panel_bytes != kPanelFeatures * padded_in * width || bytes <= (panels - 1) * panel_bytes ||
      bytes > panels * panel_bytes) {
    return std::nullopt;
  }
  return PackedForm{bytes, kPanelFeatures, panel_bytes};
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

MatrixForm::MatrixForm(int64_t in_features, int64_t out_features, DType dtype)
    : in_features_(in_features),
      out_features_(out_features),
      dtype_(dtype),
      layout_(PreferredLayout(in_features, out_features, dtype)),
      last_layout_(layout_),
      strip_columns_(out_features) {
  if (const std::optional<PackedForm> divided = DividedBy(layout_); divided.has_value()) {
    panels_ = *divided;
    return;
  }
  strip_columns_ = kPanelFeatures;
  layout_ = PreferredLayout(in_features, kPanelFeatures, dtype);
  last_layout_ = PreferredLayout(in_features, out_features - (strips() - 1) * kPanelFeatures, dtype);
  const auto panel_bytes = static_cast<int64_t>(layout_.get_size());
  panels_ = {.bytes = (strips() - 1) * panel_bytes + static_cast<int64_t>(last_layout_.get_size()),
             .panel_rows = kPanelFeatures,
             .panel_bytes = panel_bytes};
}

WideMatrix MatrixForm::StripAt(int64_t strip, void* elements) const {
  return {strip == strips() - 1 ? last_layout_ : layout_, dtype_,
          static_cast<std::byte*>(elements) + strip * panels_.panel_bytes};
}

WideMatrix::Columns MatrixForm::PanelAt(int64_t panel, void* elements) const {
  const int64_t begin = panel * kPanelFeatures, strip = begin / strip_columns_;
  const int64_t columns = std::min(kPanelFeatures, out_features_ - begin);
  return StripAt(strip, elements).ColumnsFrom(begin - strip * strip_columns_, columns);
}

PackedMatrix::PackedMatrix(int64_t in_features, int64_t out_features, const MatrixForm& form,
                           BufferRef elements, std::vector<float> bias)
    : CpuWeight(out_features, in_features, std::move(bias)), elements_(std::move(elements)) {
  for (int64_t strip = 0; strip < form.strips(); ++strip) {
    strips_.push_back(form.StripAt(strip, elements_->data()));
  }
}

absl::StatusOr<std::unique_ptr<PackedMatrix>> PackMatrix(std::span<const WeightRows> rows,
                                                         int64_t in_features, DType compute_dtype,
                                                         ThreadPool& pool) {
  const int64_t out_features = RowsOf(rows);
  ASSIGN_OR_RETURN(const MatrixForm form, FormOf(in_features, out_features, compute_dtype));
  ASSIGN_OR_RETURN(BufferRef elements,
                   PackMatrixPanels(rows, in_features, compute_dtype, 0, form.panels().panels(), pool));
  return std::make_unique<PackedMatrix>(in_features, out_features, form, std::move(elements),
                                        StackBias(rows));
}

absl::StatusOr<PackedForm> PackedFormOf(int64_t in_features, int64_t out_features, DType compute_dtype) {
  ASSIGN_OR_RETURN(const MatrixForm form, FormOf(in_features, out_features, compute_dtype));
  return form.panels();
}

absl::StatusOr<BufferRef> PackMatrixPanels(std::span<const WeightRows> rows, int64_t in_features,
                                           DType compute_dtype, int64_t first, int64_t panels,
                                           ThreadPool& pool) {
  ASSIGN_OR_RETURN(const MatrixForm form, FormOf(in_features, RowsOf(rows), compute_dtype));
  const int64_t begin = form.panels().ByteOf(first);
  ASSIGN_OR_RETURN(BufferRef bytes, AllocateHostMemory(form.panels().ByteOf(first + panels) - begin));
  std::byte* const whole = bytes->data<std::byte>() - begin;
  RETURN_IF_ERROR(PackInto(form, whole, rows, in_features, compute_dtype, first, panels, pool));
  return bytes;
}

absl::StatusOr<std::unique_ptr<PackedMatrix>> MatrixOfPanels(int64_t in_features, int64_t out_features,
                                                             DType compute_dtype, BufferRef elements,
                                                             std::vector<float> bias) {
  ASSIGN_OR_RETURN(const MatrixForm form, FormOf(in_features, out_features, compute_dtype));
  if (const int64_t bytes = form.panels().bytes; static_cast<int64_t>(elements->size_bytes()) != bytes) {
    return absl::InternalError(absl::StrCat("a packed weight of ", elements->size_bytes(), " bytes, where ",
                                            out_features, " x ", in_features, " take ", bytes));
  }
  return std::make_unique<PackedMatrix>(in_features, out_features, form, std::move(elements),
                                        std::move(bias));
}

}  // namespace meshfill
