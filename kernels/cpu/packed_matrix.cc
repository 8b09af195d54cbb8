#include "kernels/cpu/packed_matrix.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/cpu/layer_ops.h"
#include "kernels/return_if_error.h"
#include "kernels/word_hash.h"

namespace meshfill {
namespace {

using dnnl::memory;

// Tokens for which oneDNN is asked for its preference; the answer is the same for all counts that Gemm
// multiplies.
constexpr int64_t kTypicalTokens = 128;
// The most input features of a block that is added to others.
constexpr int64_t kBlockFeatures = 512;

// The layout that oneDNN prefers for a matrix of this size, which takes it long to say; it stays where it is.
// Throws as StripForm does.
const memory::desc& PreferredLayout(int64_t in_features, int64_t out_features, DType dtype) {
  static absl::Mutex mutex;
  static auto& layouts = *new std::map<std::tuple<int64_t, int64_t, DType>, memory::desc>;
  const absl::MutexLock lock(&mutex);
  const std::tuple key(in_features, out_features, dtype);
  if (const auto found = layouts.find(key); found != layouts.end()) return found->second;
  const dnnl::matmul::desc operation(
      RowMajor(kTypicalTokens, in_features, dtype),
      memory::desc({in_features, out_features}, OneDnnType(dtype), memory::format_tag::any),
      RowMajor(kTypicalTokens, out_features, DType::kF32));
  return layouts.emplace(key, dnnl::matmul::primitive_desc(operation, CpuEngine()).weights_desc())
      .first->second;
}

// Input features of each block but the last.
int64_t BlockFeatures(int64_t in_features, DType dtype) {
  constexpr int64_t kTileFeatures = 32;  // of AMX's tiles, which blocks fill
  if (!AddsBlocks(in_features, dtype)) return in_features;
  const int64_t blocks = (in_features + kBlockFeatures - 1) / kBlockFeatures;
  const int64_t features = (in_features + blocks - 1) / blocks;
  return (features + kTileFeatures - 1) / kTileFeatures * kTileFeatures;
}

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

absl::StatusOr<MatrixForm> FormOf(int64_t in_features, int64_t out_features, DType compute_dtype) {
  const DType dtype = MultiplyDType(compute_dtype);
  try {
    return MatrixForm(in_features, out_features, dtype);
  } catch (const dnnl::error& error) {
    return OneDnnError("choosing a weight's layout", error);
  }
}

// Packs the columns of one panel at a time, some rows of the weight after the other.
class PanelPacker {
 public:
  PanelPacker(const MatrixForm& form, void* elements, std::span<const WeightRows> rows, int64_t in_features,
              DType compute_dtype)
      : form_(form),
        elements_(elements),
        rows_(rows),
        in_features_(in_features),
        compute_dtype_(compute_dtype),
        dtype_(MultiplyDType(compute_dtype)) {}

  // What lies in panels [first, first + panels), and all memory that is needed.
  absl::Status Prepare(int64_t first, int64_t panels, PackTeam& team) {
    for (const int64_t panel : {first, first + panels - 1}) {  // all but a last one lie alike
      for (const WideBlock& block : form_.PanelAt(panel, elements_).strip) {
        places_.try_emplace(block.layout, *block.layout);
      }
    }
    const int64_t bytes = team.pool.threads() * staged_bytes();
    if (team.staging == nullptr || static_cast<int64_t>(team.staging->size_bytes()) < bytes) {
      team.staging = nullptr;
      ASSIGN_OR_RETURN(team.staging, AllocateHostMemory(bytes));
    }
    staging_ = team.staging->data<std::byte>();
    return absl::OkStatus();
  }

  // On the team's thread `worker`.
  absl::Status Pack(int64_t index, int worker) const {
    const MatrixForm::Panel panel = form_.PanelAt(index, elements_);
    std::byte* const rounded = staging_ + worker * staged_bytes();
    std::byte* const widened =
        rounded + (widens() ? staged_rows() * in_features_ * DTypeBytes(compute_dtype_) : 0);
    for (int64_t done = 0; done < panel.columns; done += staged_rows()) {
      const int64_t columns = std::min(staged_rows(), panel.columns - done);
      RETURN_IF_ERROR(
          CopyRows(rows_, in_features_, index * kPanelFeatures + done, columns, compute_dtype_, rounded));
      if (widens()) ConvertValues(rounded, compute_dtype_, columns * in_features_, dtype_, widened);
      for (const WideBlock& block : panel.strip) {
        PackColumns(widened, in_features_, panel.column + done, columns, places_.at(block.layout), block);
      }
    }
    return absl::OkStatus();
  }

 private:
  bool widens() const { return dtype_ != compute_dtype_; }
  // Rows that are read at a time, and stay in the cache.
  int64_t staged_rows() const {
    constexpr int64_t kCachedBytes = 512 << 10;
    const int64_t groups = kCachedBytes / (kGroupColumns * in_features_ * DTypeBytes(dtype_));
    return std::clamp<int64_t>(groups * kGroupColumns, kGroupColumns, kPanelFeatures);
  }
  // For one worker: rows in the compute dtype, and where that is another in the dtype of the multiplication.
  int64_t staged_bytes() const {
    const int64_t elements = staged_rows() * in_features_;
    const int64_t bytes = elements * (DTypeBytes(dtype_) + (widens() ? DTypeBytes(compute_dtype_) : 0));
    return (bytes + kHostAlignmentBytes - 1) / kHostAlignmentBytes * kHostAlignmentBytes;
  }

  const MatrixForm& form_;
  void* const elements_;  // of the whole matrix
  const std::span<const WeightRows> rows_;
  const int64_t in_features_;
  const DType compute_dtype_, dtype_;
  std::map<const memory::desc*, BlockPlaces> places_;  // by layout
  std::byte* staging_ = nullptr;
};

// A hash of how the elements of a matrix lie that has such strips.
uint64_t LayoutHash(const StripForm& strip, const StripForm& last_strip) {
  WordHash hash;
  for (const StripForm* form : {&strip, &last_strip}) {
    for (const WideBlock& block : form->At(nullptr)) {
      const dnnl_memory_desc_t& layout = block.layout->data;
      const dnnl_blocking_desc_t& blocking = layout.format_desc.blocking;
      hash.Add(static_cast<uint64_t>(layout.data_type));
      for (int dimension = 0; dimension < layout.ndims; ++dimension) {
        hash.Add(static_cast<uint64_t>(layout.padded_dims[dimension]));
        hash.Add(static_cast<uint64_t>(blocking.strides[dimension]));
      }
      for (int inner = 0; inner < blocking.inner_nblks; ++inner) {
        hash.Add(static_cast<uint64_t>(blocking.inner_blks[inner]));
        hash.Add(static_cast<uint64_t>(blocking.inner_idxs[inner]));
      }
    }
  }
  return hash.Finish();
}

// The form of a matrix in oneDNN's layout, if it is multiplied as a whole: one panel lies after the other.
std::optional<PackedForm> OneProduct(int64_t in_features, int64_t out_features, DType dtype) {
  if (AddsBlocks(in_features, dtype)) return std::nullopt;
  const memory::desc& layout = PreferredLayout(in_features, out_features, dtype);
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

bool AddsBlocks(int64_t in_features, DType dtype) {
  return dtype == DType::kBf16 && in_features > kBlockFeatures && OneDnnUsesTiles();
}

StripForm::StripForm(int64_t in_features, int64_t columns, DType dtype) {
  constexpr int64_t kCacheLine = 64;
  const int64_t features = BlockFeatures(in_features, dtype);
  for (int64_t in = 0; in < in_features; in += features) {
    const memory::desc& layout = PreferredLayout(std::min(features, in_features - in), columns, dtype);
    blocks_.push_back({&layout, dtype, in, nullptr});
    offsets_.push_back(bytes_);
    const auto bytes = static_cast<int64_t>(layout.get_size());
    bytes_ += (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  }
}

WideStrip StripForm::At(void* elements) const {
  WideStrip strip = blocks_;
  for (size_t i = 0; i < strip.size(); ++i) {
    strip[i].elements = static_cast<std::byte*>(elements) + offsets_[i];
  }
  return strip;
}

MatrixForm::MatrixForm(int64_t in_features, int64_t out_features, DType dtype)
    : MatrixForm(in_features, out_features, dtype, OneProduct(in_features, out_features, dtype)) {}

MatrixForm::MatrixForm(int64_t in_features, int64_t out_features, DType dtype,
                       const std::optional<PackedForm>& one_product)
    : out_features_(out_features),
      strip_columns_(one_product.has_value() ? out_features : std::min(kPanelFeatures, out_features)),
      strip_(in_features, strip_columns_, dtype),
      last_strip_(in_features, out_features - (strips() - 1) * strip_columns_, dtype),
      panels_(one_product.value_or(PackedForm{.bytes = (strips() - 1) * strip_.bytes() + last_strip_.bytes(),
                                              .panel_rows = strip_columns_,
                                              .panel_bytes = strip_.bytes()})) {
  panels_.layout = LayoutHash(strip_, last_strip_);
}

WideStrip MatrixForm::StripAt(int64_t strip, void* elements) const {
  return (strip == strips() - 1 ? last_strip_ : strip_)
      .At(static_cast<std::byte*>(elements) + strip * panels_.panel_bytes);
}

MatrixForm::Panel MatrixForm::PanelAt(int64_t panel, void* elements) const {
  const int64_t begin = panel * kPanelFeatures, strip = begin / strip_columns_;
  return {.strip = StripAt(strip, elements),
          .column = begin - strip * strip_columns_,
          .columns = std::min(kPanelFeatures, out_features_ - begin)};
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
                                                         PackTeam& team) {
  const int64_t out_features = RowsOf(rows);
  ASSIGN_OR_RETURN(const MatrixForm form, FormOf(in_features, out_features, compute_dtype));
  ASSIGN_OR_RETURN(BufferRef elements,
                   PackMatrixPanels(rows, in_features, compute_dtype, 0, form.panels().panels(), team));
  return std::make_unique<PackedMatrix>(in_features, out_features, form, std::move(elements),
                                        StackBias(rows));
}

absl::StatusOr<PackedForm> PackedFormOf(int64_t in_features, int64_t out_features, DType compute_dtype) {
  ASSIGN_OR_RETURN(const MatrixForm form, FormOf(in_features, out_features, compute_dtype));
  return form.panels();
}

absl::StatusOr<BufferRef> PackMatrixPanels(std::span<const WeightRows> rows, int64_t in_features,
                                           DType compute_dtype, int64_t first, int64_t panels,
                                           PackTeam& team) {
  ASSIGN_OR_RETURN(const MatrixForm form, FormOf(in_features, RowsOf(rows), compute_dtype));
  const int64_t begin = form.panels().ByteOf(first);
  ASSIGN_OR_RETURN(BufferRef bytes, AllocateHostMemory(form.panels().ByteOf(first + panels) - begin));
  PanelPacker packer(form, bytes->data<std::byte>() - begin, rows, in_features, compute_dtype);
  RETURN_IF_ERROR(packer.Prepare(first, panels, team));
  std::vector<absl::Status> statuses(team.pool.threads());
  team.pool.ParallelFor(panels, [&](int64_t panel, int worker) {
    if (statuses[worker].ok()) statuses[worker] = packer.Pack(first + panel, worker);
  });
  for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
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
