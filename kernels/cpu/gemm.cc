#include "kernels/cpu/gemm.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <compare>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/cpu/layer_ops.h"
#include "oneapi/dnnl/dnnl.hpp"

namespace meshfill {
namespace {

using dnnl::memory;

// Tokens of the largest tile: the weights, which stream through the cache once for each tile, are then read
// at a few GB/s while a core computes at full speed.
constexpr int64_t kTileTokens = 128;
// Below this a tile is no longer worth a thread of its own.
constexpr int64_t kSmallestSharedTile = 16;
// Output features of a panel, the unit of packing and of a single token's product; a multiple of every block
// that oneDNN lays weights out in.
constexpr int64_t kPanelFeatures = 512;

memory::data_type DnnlType(DType dtype) {
  return dtype == DType::kF32 ? memory::data_type::f32 : memory::data_type::bf16;
}

memory::desc RowMajor(int64_t rows, int64_t columns, int64_t row_stride, DType dtype) {
  return memory::desc({rows, columns}, DnnlType(dtype), memory::dims{row_stride, 1});
}

// One engine for the process; engines are immutable and safe to share.
const dnnl::engine& CpuEngine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

// oneDNN sizes its own OpenMP team by this setting of the calling thread; our team is the ThreadPool.
void KeepOneDnnSingleThreaded() { omp_set_num_threads(1); }

dnnl::primitive_attr Attributes(bool accumulate) {
  dnnl::primitive_attr attributes;
  // The library's own scratchpad belongs to the thread that created a primitive; ours run on any.
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (accumulate) {
    dnnl::post_ops sum;
    sum.append_sum();
    attributes.set_post_ops(sum);
  }
  return attributes;
}

absl::Status OneDnnError(const char* what, const dnnl::error& error) {
  return absl::InternalError(absl::StrCat("oneDNN: ", what, ": ", error.what()));
}

// The layout that oneDNN likes best for a weight of [in, out].
memory::desc PreferredLayout(int64_t in_features, int64_t out_features, DType dtype) {
  const dnnl::matmul::desc operation(
      RowMajor(kTileTokens, in_features, in_features, dtype),
      memory::desc({in_features, out_features}, DnnlType(dtype), memory::format_tag::any),
      RowMajor(kTileTokens, out_features, out_features, DType::kF32));
  return dnnl::matmul::primitive_desc(operation, Attributes(false), CpuEngine()).weights_desc();
}

// Below AVX-512 oneDNN has no bf16: weights and inputs are then widened, which loses nothing but speed.
bool MachineMultipliesBf16() {
  try {
    PreferredLayout(64, 64, DType::kBf16);
    return true;
  } catch (const dnnl::error&) {
    return false;
  }
}

// Columns [begin, begin + columns) of a packed matrix: their layout, and where they begin.
struct Panel {
  memory::desc desc;
  int64_t offset;  // in elements
};

Panel PanelOf(const memory::desc& matrix, int64_t begin, int64_t columns) {
  memory::desc desc = matrix.submemory_desc({matrix.dims()[0], columns}, {0, begin});
  // Moved to the pointer, since the fast matmul takes none in the layout.
  const int64_t offset = std::exchange(desc.data.offset0, 0);
  return {desc, offset};
}

class PackedMatrix final : public PackedWeight {
 public:
  PackedMatrix(memory::desc desc, DType dtype, BufferRef elements, std::vector<float> bias)
      : PackedWeight(desc.dims()[1], desc.dims()[0]),
        desc_(std::move(desc)),
        dtype_(dtype),
        elements_(std::move(elements)),
        bias_(std::move(bias)) {}

  const memory::desc& desc() const { return desc_; }  // of Wᵀ, [in, out]
  DType dtype() const { return dtype_; }
  bool has_bias() const { return !bias_.empty(); }
  // oneDNN's handles are not const, yet it reads only.
  void* elements(int64_t offset) const { return elements_->data<char>() + offset * DTypeBytes(dtype_); }
  float* bias(int64_t column) const { return const_cast<float*>(bias_.data()) + column; }

 private:
  memory::desc desc_;
  DType dtype_;
  BufferRef elements_;
  std::vector<float> bias_;  // [out] or empty
};

// A compiled product of a tile of tokens with some columns of a weight.
struct Product {
  memory::desc x, weight, bias, y;
  dnnl::matmul primitive;
  memory::desc scratchpad;
};

// What a Product depends on.
struct ProductKey {
  int64_t tokens, in_features, out_features, columns;
  DType y_dtype;
  bool bias, accumulate;
  auto operator<=>(const ProductKey&) const = default;
};

Product Compile(const ProductKey& key, DType dtype, const memory::desc& weight) {
  Product product{.x = RowMajor(key.tokens, key.in_features, key.in_features, dtype),
                  .weight = weight,
                  .bias = {},
                  .y = RowMajor(key.tokens, key.columns, key.columns, key.y_dtype),
                  .primitive = {},
                  .scratchpad = {}};
  if (key.bias) product.bias = RowMajor(1, key.columns, key.columns, DType::kF32);
  const auto operation = key.bias ? dnnl::matmul::desc(product.x, product.weight, product.bias, product.y)
                                  : dnnl::matmul::desc(product.x, product.weight, product.y);
  const dnnl::matmul::primitive_desc compiled(operation, Attributes(key.accumulate), CpuEngine());
  product.primitive = dnnl::matmul(compiled);
  product.scratchpad = compiled.scratchpad_desc();
  return product;
}

// One task: tokens [token, token + tokens) times columns [column, column + columns). Either spans its
// dimension unless the other is 1, so x and y are without gaps.
struct Piece {
  int64_t token, tokens;
  int64_t column, columns;
  int64_t weight_offset = 0;
  const Product* product = nullptr;
};

std::vector<Piece> CutColumns(int64_t out_features) {
  std::vector<Piece> pieces;
  for (int64_t column = 0; column < out_features; column += kPanelFeatures) {
    pieces.push_back({0, 1, column, std::min(kPanelFeatures, out_features - column)});
  }
  return pieces;
}

// Tiles of powers of two, so that few sizes are ever compiled: 300 tokens are 128 + 128 + 32 + 8 + 4.
std::vector<Piece> CutTokens(int64_t tokens, int64_t out_features, int threads) {
  const int64_t share = std::max(kSmallestSharedTile, (tokens + threads - 1) / threads);
  const int64_t tile = std::min<int64_t>(kTileTokens, std::bit_floor(static_cast<uint64_t>(share)));
  std::vector<Piece> pieces;
  for (int64_t token = 0; token < tokens;) {
    const int64_t rest = std::bit_floor(static_cast<uint64_t>(tokens - token));
    pieces.push_back({token, std::min(tile, rest), 0, out_features});
    token += pieces.back().tokens;
  }
  return pieces;
}

// Copies rows [begin, begin + count) of the stacked sources, converted.
void CopyRows(std::span<const WeightRows> sources, int64_t in_features, int64_t begin, int64_t count,
              DType dtype, std::byte* to) {
  const int64_t end = begin + count;
  int64_t first = 0;  // row of the stack at which the source begins
  for (const WeightRows& source : sources) {
    const int64_t from = std::max(begin, first), until = std::min(end, first + source.rows);
    if (from < until) {
      const auto* rows = static_cast<const std::byte*>(source.data);
      ConvertValues(rows + (from - first) * in_features * DTypeBytes(source.dtype), source.dtype,
                    (until - from) * in_features, dtype,
                    to + (from - begin) * in_features * DTypeBytes(dtype));
    }
    first += source.rows;
  }
}

std::vector<float> StackBias(std::span<const WeightRows> sources) {
  std::vector<float> stacked;
  const bool any =
      std::any_of(sources.begin(), sources.end(), [](const auto& rows) { return rows.bias != nullptr; });
  if (!any) return stacked;
  for (const WeightRows& source : sources) {
    stacked.resize(stacked.size() + source.rows, 0.0f);
    if (source.bias != nullptr) std::copy_n(source.bias, source.rows, stacked.end() - source.rows);
  }
  return stacked;
}

}  // namespace

class CpuGemm::Impl {
 public:
  Impl(DType dtype, ThreadPool& pool) : dtype_(dtype), pool_(pool) {
    KeepOneDnnSingleThreaded();
    multiply_dtype_ = dtype == DType::kBf16 && !MachineMultipliesBf16() ? DType::kF32 : dtype;
    for (int worker = 0; worker < pool.threads(); ++worker) workers_.emplace_back();
  }

  absl::StatusOr<std::unique_ptr<PackedWeight>> Pack(std::span<const WeightRows> rows, int64_t in_features) {
    KeepOneDnnSingleThreaded();
    try {
      return PackPanels(rows, in_features);
    } catch (const dnnl::error& error) {
      return OneDnnError("packing a weight", error);
    }
  }

  absl::Status Run(const GemmArgs& args, const StopToken* stop) {
    if (args.tokens == 0) return absl::OkStatus();
    KeepOneDnnSingleThreaded();
    const auto& weight = static_cast<const PackedMatrix&>(*args.weight);
    std::vector<Piece> pieces = args.tokens == 1
                                    ? CutColumns(weight.out_features())
                                    : CutTokens(args.tokens, weight.out_features(), pool_.threads());
    try {
      for (Piece& piece : pieces) Prepare(args, weight, piece);
    } catch (const dnnl::error& error) {
      return OneDnnError("compiling a matmul", error);
    }
    if (absl::Status status = ReserveScratch(pieces, weight.in_features(), args.y_dtype); !status.ok())
      return status;
    for (Worker& worker : workers_) worker.status = absl::OkStatus();
    pool_.ParallelFor(static_cast<int64_t>(pieces.size()), [&](int64_t task, int worker) {
      if (stop != nullptr && stop->stopped()) return;
      RunPiece(args, weight, pieces[task], workers_[worker]);
    });
    for (const Worker& worker : workers_) {
      if (!worker.status.ok()) return worker.status;
    }
    return stop != nullptr && stop->stopped() ? absl::CancelledError("gemm: stopped") : absl::OkStatus();
  }

 private:
  // What one thread of the team needs for itself.
  struct Worker {
    dnnl::stream stream{CpuEngine()};
    BufferRef scratchpad;
    BufferRef x;  // a tile in multiply_dtype_, where that is not the compute dtype
    BufferRef y;
    absl::Status status;
  };

  bool widens() const { return multiply_dtype_ != dtype_; }
  bool widens_y(DType y_dtype) const { return widens() && y_dtype != multiply_dtype_; }

  absl::StatusOr<std::unique_ptr<PackedWeight>> PackPanels(std::span<const WeightRows> rows,
                                                           int64_t in_features) {
    int64_t out_features = 0;
    for (const WeightRows& source : rows) out_features += source.rows;
    const memory::desc layout = PreferredLayout(in_features, out_features, multiply_dtype_);
    absl::StatusOr<BufferRef> elements = AllocateHostMemory(layout.get_size());
    if (!elements.ok()) return elements.status();
    const int64_t panel_elements = std::min(kPanelFeatures, out_features) * in_features;
    absl::StatusOr<BufferRef> staging = AllocateHostMemory(panel_elements * DTypeBytes(multiply_dtype_));
    if (!staging.ok()) return staging.status();
    absl::StatusOr<BufferRef> rounded =
        AllocateHostMemory(widens() ? panel_elements * DTypeBytes(dtype_) : 0);
    if (!rounded.ok()) return rounded.status();

    for (int64_t begin = 0; begin < out_features; begin += kPanelFeatures) {
      const int64_t columns = std::min(kPanelFeatures, out_features - begin);
      if (widens()) {
        CopyRows(rows, in_features, begin, columns, dtype_, (*rounded)->data<std::byte>());
        ConvertValues((*rounded)->data(), dtype_, columns * in_features, multiply_dtype_, (*staging)->data());
      } else {
        CopyRows(rows, in_features, begin, columns, dtype_, (*staging)->data<std::byte>());
      }
      const Panel panel = PanelOf(layout, begin, columns);
      memory from({{in_features, columns}, DnnlType(multiply_dtype_), memory::dims{1, in_features}},
                  CpuEngine(), (*staging)->data());
      memory to(panel.desc, CpuEngine(),
                (*elements)->data<std::byte>() + panel.offset * DTypeBytes(multiply_dtype_));
      dnnl::reorder(from, to).execute(workers_[0].stream, from, to);
    }
    return std::make_unique<PackedMatrix>(layout, multiply_dtype_, *std::move(elements), StackBias(rows));
  }

  void Prepare(const GemmArgs& args, const PackedMatrix& weight, Piece& piece) {
    const ProductKey key{.tokens = piece.tokens,
                         .in_features = weight.in_features(),
                         .out_features = weight.out_features(),
                         .columns = piece.columns,
                         .y_dtype = widens_y(args.y_dtype) ? multiply_dtype_ : args.y_dtype,
                         .bias = weight.has_bias(),
                         .accumulate = args.accumulate};
    const Panel panel = PanelOf(weight.desc(), piece.column, piece.columns);
    piece.weight_offset = panel.offset;
    auto found = products_.find(key);
    if (found == products_.end())
      found = products_.emplace(key, Compile(key, multiply_dtype_, panel.desc)).first;
    piece.product = &found->second;
  }

  absl::Status ReserveScratch(const std::vector<Piece>& pieces, int64_t in_features, DType y_dtype) {
    size_t scratchpad_bytes = 0, x_bytes = 0, y_bytes = 0;
    for (const Piece& piece : pieces) {
      scratchpad_bytes = std::max(scratchpad_bytes, piece.product->scratchpad.get_size());
      if (widens()) x_bytes = std::max(x_bytes, piece.tokens * in_features * sizeof(float));
      if (widens_y(y_dtype)) y_bytes = std::max(y_bytes, piece.tokens * piece.columns * sizeof(float));
    }
    for (Worker& worker : workers_) {
      for (auto [buffer, bytes] :
           {std::pair(&worker.scratchpad, scratchpad_bytes), {&worker.x, x_bytes}, {&worker.y, y_bytes}}) {
        if (*buffer != nullptr && (*buffer)->size_bytes() >= bytes) continue;
        absl::StatusOr<BufferRef> larger = AllocateHostMemory(bytes);
        if (!larger.ok()) return larger.status();
        *buffer = *std::move(larger);
      }
    }
    return absl::OkStatus();
  }

  void RunPiece(const GemmArgs& args, const PackedMatrix& weight, const Piece& piece, Worker& worker) {
    KeepOneDnnSingleThreaded();
    const int64_t in_features = weight.in_features();
    // Not const: oneDNN's handles are not, yet it reads only.
    void* x = const_cast<std::byte*>(static_cast<const std::byte*>(args.x)) +
              piece.token * in_features * DTypeBytes(dtype_);
    void* y = static_cast<std::byte*>(args.y) +
              (piece.token * weight.out_features() + piece.column) * DTypeBytes(args.y_dtype);
    if (widens()) {
      ConvertValues(x, dtype_, piece.tokens * in_features, multiply_dtype_, worker.x->data());
      x = worker.x->data();
    }
    void* product_y = widens_y(args.y_dtype) ? worker.y->data() : y;
    try {
      const Product& product = *piece.product;
      const dnnl::engine& engine = CpuEngine();
      std::unordered_map<int, memory> operands{
          {DNNL_ARG_SRC, memory(product.x, engine, x)},
          {DNNL_ARG_WEIGHTS, memory(product.weight, engine, weight.elements(piece.weight_offset))},
          {DNNL_ARG_DST, memory(product.y, engine, product_y)},
          {DNNL_ARG_SCRATCHPAD, memory(product.scratchpad, engine, worker.scratchpad->data())}};
      if (weight.has_bias()) {
        operands.emplace(DNNL_ARG_BIAS, memory(product.bias, engine, weight.bias(piece.column)));
      }
      product.primitive.execute(worker.stream, operands);
    } catch (const dnnl::error& error) {
      worker.status = OneDnnError("running a matmul", error);
      return;
    }
    if (widens_y(args.y_dtype)) {
      ConvertValues(product_y, multiply_dtype_, piece.tokens * piece.columns, args.y_dtype, y);
    }
  }

  const DType dtype_;
  DType multiply_dtype_;  // f32 where the machine cannot multiply bf16
  ThreadPool& pool_;
  std::vector<Worker> workers_;
  std::map<ProductKey, Product> products_;
};

CpuGemm::CpuGemm(DType dtype, ThreadPool& pool) : impl_(std::make_unique<Impl>(dtype, pool)) {}
CpuGemm::~CpuGemm() = default;

absl::StatusOr<std::unique_ptr<PackedWeight>> CpuGemm::Pack(std::span<const WeightRows> rows,
                                                            int64_t in_features) {
  return impl_->Pack(rows, in_features);
}

absl::Status CpuGemm::Run(const GemmArgs& args, const StopToken* stop) { return impl_->Run(args, stop); }

}  // namespace meshfill
