#include "kernels/cpu/gemm.h"

#include <algorithm>
#include <bit>
#include <compare>
#include <cstddef>
#include <cstring>
#include <functional>
#include <map>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/cpu/layer_ops.h"
#include "kernels/cpu/narrow_matrix.h"
#include "kernels/cpu/onednn.h"
#include "kernels/cpu/packed_matrix.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

using dnnl::memory;

// Tokens of the largest tile: the weights, which stream through the cache once for each tile, are then read
// at a few GB/s while a core computes at full speed.
constexpr int64_t kTileTokens = 128;
// Below this a tile is no longer worth a thread of its own.
constexpr int64_t kSmallestSharedTile = 16;

// A compiled product of a tile of tokens with some columns of a weight.
struct Product {
  memory::desc x, weight, bias, y;
  dnnl::matmul primitive;
  memory::desc scratchpad;
};

// What a Product depends on.
struct ProductKey {
  int64_t tokens, in_features, columns;
  int64_t matrix_columns;  // columns of the matrix, `columns` of which are multiplied
  int64_t y_stride;        // elements from one token to the next
  DType y_dtype;
  bool bias, accumulate;
  auto operator<=>(const ProductKey&) const = default;
};

Product Compile(const ProductKey& key, DType dtype, const memory::desc& weight) {
  dnnl::primitive_attr attributes;
  // The library's own scratchpad belongs to the thread that created a primitive; ours run on any.
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (key.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum();
    attributes.set_post_ops(sum);
  }
  const memory::desc x = RowMajor(key.tokens, key.in_features, dtype);
  const memory::desc y({key.tokens, key.columns}, OneDnnType(key.y_dtype), memory::dims{key.y_stride, 1});
  const memory::desc bias = key.bias ? RowMajor(1, key.columns, DType::kF32) : memory::desc();
  const auto operation = key.bias ? dnnl::matmul::desc(x, weight, bias, y) : dnnl::matmul::desc(x, weight, y);
  const dnnl::matmul::primitive_desc compiled(operation, attributes, CpuEngine());
  return {x, weight, bias, y, dnnl::matmul(compiled), compiled.scratchpad_desc()};
}

// Columns [column, column + columns) of a weight, for tokens (rows, of experts) [begin, end). Of a narrow
// weight they are what is widened at a time.
struct Strip {
  const CpuWeight* weight;
  int64_t column, columns;
  int64_t begin, end;
};

// One task: tokens [token, token + tokens) times columns [column, column + columns) of a strip.
struct Piece {
  const Strip* strip;
  const WideMatrix* matrix;  // the strip's
  int64_t token, tokens;
  int64_t column, columns;   // columns within the matrix
  int64_t padded_tokens;     // the kernel is compiled for this many; beyond `tokens` its results are not used
  void* elements = nullptr;  // the first of the columns
  const Product* product = nullptr;

  bool padded() const { return padded_tokens > tokens; }
  int64_t y_column() const { return strip->column + column; }
};

using CutStrip =
    std::function<void(const Strip& strip, const WideMatrix& matrix, std::vector<Piece>& pieces)>;

void CutColumns(const Strip& strip, const WideMatrix& matrix, std::vector<Piece>& pieces) {
  for (int64_t column = 0; column < strip.columns; column += kPanelFeatures) {
    pieces.push_back({&strip, &matrix, 0, 1, column, std::min(kPanelFeatures, strip.columns - column), 1});
  }
}

// Tiles of powers of two, so that few sizes are ever compiled: 300 tokens are 128 + 128 + 32 + 8 + 4.
void CutTokens(const Strip& strip, const WideMatrix& matrix, int threads, std::vector<Piece>& pieces) {
  const int64_t tokens = strip.end;
  const int64_t share = std::max(kSmallestSharedTile, (tokens + threads - 1) / threads);
  const int64_t tile = std::min<int64_t>(kTileTokens, std::bit_floor(static_cast<uint64_t>(share)));
  for (int64_t token = 0; token < tokens;) {
    const int64_t rest = std::bit_floor(static_cast<uint64_t>(tokens - token));
    const int64_t cut = std::min(tile, rest);
    pieces.push_back({&strip, &matrix, token, cut, 0, strip.columns, cut});
    token += cut;
  }
}

// The rows of an expert by itself, in tiles; a last one is filled up to a size of which there are few: a
// power of two, or a multiple of kPaddedTile. A few hundred rows in powers of two would be many small tiles,
// and each of them reads the expert's weights.
void CutExpert(const Strip& strip, const WideMatrix& matrix, std::vector<Piece>& pieces) {
  constexpr int64_t kPaddedTile = 16;
  for (int64_t row = strip.begin; row < strip.end; row += kTileTokens) {
    const int64_t rows = std::min(kTileTokens, strip.end - row);
    const int64_t padded = rows < kPaddedTile
                               ? static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)))
                               : (rows + kPaddedTile - 1) / kPaddedTile * kPaddedTile;
    pieces.push_back({&strip, &matrix, row, rows, 0, strip.columns, padded});
  }
}

}  // namespace

class CpuGemm::Impl {
 public:
  Impl(DType dtype, ThreadPool& pool)
      : dtype_(dtype), multiply_dtype_(MultiplyDType(dtype)), pool_(pool), workers_(pool.threads()) {}

  absl::Status Run(const GemmArgs& args, const StopToken* stop) {
    if (args.tokens == 0) return absl::OkStatus();
    std::vector<Strip> strips;
    AddStrips(static_cast<const CpuWeight&>(*args.weight), 0, args.tokens, strips);
    const Operands operands = {
        .x = args.x, .y = args.y, .y_dtype = args.y_dtype, .accumulate = args.accumulate};
    const int threads = pool_.threads();
    const CutStrip cut_tokens = [threads](const Strip& strip, const WideMatrix& matrix,
                                          std::vector<Piece>& pieces) {
      CutTokens(strip, matrix, threads, pieces);
    };
    return RunStrips(strips, args.tokens == 1 ? CutStrip(CutColumns) : cut_tokens, operands, "gemm", stop);
  }

  absl::Status RunExperts(const ExpertGemmArgs& args, const StopToken* stop) {
    std::vector<Strip> strips;
    for (size_t expert = 0; expert < args.weights.size(); ++expert) {
      const int64_t begin = args.rows.begin[expert], end = args.rows.begin[expert + 1];
      if (begin == end) continue;
      AddStrips(static_cast<const CpuWeight&>(*args.weights[expert]), begin, end, strips);
    }
    const Operands operands = {
        .x = args.x, .row_token = args.by_token ? args.rows.token : nullptr, .y = args.y, .y_dtype = dtype_};
    return RunStrips(strips, CutExpert, operands, "expert gemm", stop);
  }

 private:
  // What one thread of the team needs for itself.
  struct Worker {
    dnnl::stream stream{CpuEngine()};
    BufferRef scratchpad;
    BufferRef x, y;  // a tile in multiply_dtype_, where that is not the compute dtype, or the tile is padded
    BufferRef gathered;  // rows of a tile in the compute dtype, where they lie apart
    absl::Status status;
  };

  // What the pieces read and write.
  struct Operands {
    const void* x;
    const int32_t* row_token = nullptr;  // the row of x for each of y's; null: the same
    void* y;
    DType y_dtype;
    bool accumulate = false;
  };

  int64_t WidenedBytes(const CpuWeight& weight, int64_t columns) const {
    return weight.in_features() * columns * static_cast<int64_t>(DTypeBytes(multiply_dtype_));
  }

  // A weight that is wide is one strip.
  void AddStrips(const CpuWeight& weight, int64_t begin, int64_t end, std::vector<Strip>& strips) const {
    int64_t most = weight.out_features();
    if (weight.wide() == nullptr) {
      const int64_t panels = kWidenedBytes / WidenedBytes(weight, kPanelFeatures);
      most = std::max<int64_t>(1, panels) * kPanelFeatures;
    }
    for (int64_t column = 0; column < weight.out_features(); column += most) {
      strips.push_back({&weight, column, std::min(most, weight.out_features() - column), begin, end});
    }
  }

  // Strips that are wide run all at once, others as many as are widened together.
  absl::Status RunStrips(std::span<const Strip> strips, const CutStrip& cut, const Operands& operands,
                         const char* operation, const StopToken* stop) {
    while (!strips.empty()) {
      size_t count = 0;
      for (int64_t bytes = 0; count < strips.size(); ++count) {
        const Strip& strip = strips[count];
        if (strip.weight->wide() == nullptr) bytes += WidenedBytes(*strip.weight, strip.columns);
        if (count > 0 && bytes > kWidenedBytes) break;
      }
      ASSIGN_OR_RETURN(const std::vector<WideMatrix> matrices, Widen(strips.first(count), stop));
      std::vector<Piece> pieces;
      for (size_t i = 0; i < count; ++i) cut(strips[i], matrices[i], pieces);
      RETURN_IF_ERROR(RunPieces(std::move(pieces), operands, operation, stop));
      strips = strips.subspan(count);
    }
    return absl::OkStatus();
  }

  // Each strip's matrix: the weight's own, or in `widened_`, where it is until the next call.
  absl::StatusOr<std::vector<WideMatrix>> Widen(std::span<const Strip> strips, const StopToken* stop) {
    struct Tile {
      size_t strip;
      int64_t tile;
    };
    std::vector<WideMatrix> matrices;
    std::vector<size_t> offsets;
    std::vector<Tile> tiles;
    size_t bytes = 0;
    KeepOneDnnSingleThreaded();
    for (const Strip& strip : strips) {
      offsets.push_back(bytes);
      if (const WideMatrix* wide = strip.weight->wide(); wide != nullptr) {
        matrices.push_back(*wide);
        continue;
      }
      try {
        matrices.push_back({PreferredLayout(strip.weight->in_features(), strip.columns, multiply_dtype_),
                            multiply_dtype_, nullptr});
      } catch (const dnnl::error& error) {
        return OneDnnError("choosing a weight's layout", error);
      }
      constexpr size_t kCacheLine = 64;
      bytes += (matrices.back().layout.get_size() + kCacheLine - 1) / kCacheLine * kCacheLine;
      for (int64_t tile = 0; tile * NarrowMatrix::kTileColumns < strip.columns; ++tile) {
        tiles.push_back({matrices.size() - 1, tile});
      }
    }
    if (tiles.empty()) return matrices;
    if (widened_ == nullptr || widened_->size_bytes() < bytes) {
      widened_ = nullptr;
      ASSIGN_OR_RETURN(widened_, AllocateHostMemory(bytes));
    }
    std::vector<NarrowMatrix::Places> places(strips.size());
    for (size_t i = 0; i < strips.size(); ++i) {
      if (strips[i].weight->wide() != nullptr) continue;
      matrices[i].elements = widened_->data<std::byte>() + offsets[i];
      places[i] = NarrowMatrix::PlacesIn(matrices[i]);
    }
    pool_.ParallelFor(std::ssize(tiles), [&](int64_t task, int) {
      if (stop != nullptr && !stop->Proceed()) return;
      const auto [i, tile] = tiles[task];
      static_cast<const NarrowMatrix*>(strips[i].weight)
          ->WidenTile(strips[i].column, tile, places[i], matrices[i]);
    });
    return matrices;
  }

  absl::Status RunPieces(std::vector<Piece> pieces, const Operands& operands, const char* operation,
                         const StopToken* stop) {
    RETURN_IF_ERROR(Prepare(operands, pieces));
    RETURN_IF_ERROR(Reserve(pieces, operands));
    pool_.ParallelFor(std::ssize(pieces), [&](int64_t task, int worker) {
      if (stop != nullptr && !stop->Proceed()) return;
      workers_[worker].status.Update(RunPiece(operands, pieces[task], workers_[worker]));
    });
    for (Worker& worker : workers_) {
      if (!worker.status.ok()) return std::exchange(worker.status, absl::OkStatus());
    }
    return stop != nullptr && stop->stopped() ? absl::CancelledError(absl::StrCat(operation, ": stopped"))
                                              : absl::OkStatus();
  }

  bool widens() const { return multiply_dtype_ != dtype_; }
  bool widens_y(DType y_dtype) const { return widens() && y_dtype != multiply_dtype_; }

  // Finds or compiles each piece's product.
  absl::Status Prepare(const Operands& operands, std::vector<Piece>& pieces) {
    KeepOneDnnSingleThreaded();
    try {
      for (Piece& piece : pieces) {
        const CpuWeight& weight = *piece.strip->weight;
        const WideMatrix::Columns columns = piece.matrix->ColumnsFrom(piece.column, piece.columns);
        const bool apart = piece.padded_tokens > 1 && !copies_y(operands, piece);
        const ProductKey key{.tokens = piece.padded_tokens,
                             .in_features = weight.in_features(),
                             .columns = piece.columns,
                             .matrix_columns = piece.matrix->columns(),
                             .y_stride = apart ? weight.out_features() : piece.columns,
                             .y_dtype = widens_y(operands.y_dtype) ? multiply_dtype_ : operands.y_dtype,
                             .bias = weight.has_bias(),
                             .accumulate = operands.accumulate};
        auto found = products_.find(key);
        if (found == products_.end()) {
          found = products_.emplace(key, Compile(key, multiply_dtype_, columns.layout)).first;
        }
        piece.elements = columns.elements;
        piece.product = &found->second;
      }
    } catch (const dnnl::error& error) {
      return OneDnnError("compiling a matmul", error);
    }
    return absl::OkStatus();
  }

  // Gives every worker the scratch memory that the largest piece needs.
  absl::Status Reserve(const std::vector<Piece>& pieces, const Operands& operands) {
    size_t scratchpad_bytes = 0, x_bytes = 0, y_bytes = 0, gathered_bytes = 0;
    for (const Piece& piece : pieces) {
      scratchpad_bytes = std::max(scratchpad_bytes, piece.product->scratchpad.get_size());
      if (copies_x(operands, piece)) x_bytes = std::max(x_bytes, piece.product->x.get_size());
      if (copies_y(operands, piece)) y_bytes = std::max(y_bytes, piece.product->y.get_size());
      if (operands.row_token != nullptr && widens()) {
        const int64_t elements = piece.tokens * piece.strip->weight->in_features();
        gathered_bytes = std::max(gathered_bytes, static_cast<size_t>(elements) * DTypeBytes(dtype_));
      }
    }
    for (Worker& worker : workers_) {
      for (auto [buffer, bytes] : {std::pair(&worker.scratchpad, scratchpad_bytes),
                                   {&worker.x, x_bytes},
                                   {&worker.y, y_bytes},
                                   {&worker.gathered, gathered_bytes}}) {
        if (*buffer != nullptr && (*buffer)->size_bytes() >= bytes) continue;
        ASSIGN_OR_RETURN(BufferRef larger, AllocateHostMemory(bytes));
        *buffer = std::move(larger);
      }
    }
    return absl::OkStatus();
  }

  bool copies_x(const Operands& operands, const Piece& piece) const {
    return widens() || piece.padded() || operands.row_token != nullptr;
  }
  bool copies_y(const Operands& operands, const Piece& piece) const {
    return widens_y(operands.y_dtype) || piece.padded();
  }

  absl::Status RunPiece(const Operands& operands, const Piece& piece, Worker& worker) {
    const int64_t width = piece.strip->weight->out_features();
    std::byte* const y = static_cast<std::byte*>(operands.y) +
                         (piece.token * width + piece.y_column()) * DTypeBytes(operands.y_dtype);
    // oneDNN's handles are not const, yet it reads only.
    void* const x = copies_x(operands, piece) ? CopyRows(operands, piece, worker)
                                              : const_cast<std::byte*>(RowOfX(operands, piece, 0));
    if (!copies_y(operands, piece)) return Multiply(piece, x, y, worker);
    RETURN_IF_ERROR(Multiply(piece, x, worker.y->data(), worker));
    const DType from = widens_y(operands.y_dtype) ? multiply_dtype_ : operands.y_dtype;
    // Side by side, where the piece has all columns.
    const int64_t copies = piece.columns == width ? 1 : piece.tokens, count = piece.tokens / copies;
    for (int64_t copy = 0; copy < copies; ++copy) {
      ConvertValues(worker.y->data<std::byte>() + copy * piece.columns * DTypeBytes(from), from,
                    count * piece.columns, operands.y_dtype, y + copy * width * DTypeBytes(operands.y_dtype));
    }
    return absl::OkStatus();
  }

  const std::byte* RowOfX(const Operands& operands, const Piece& piece, int64_t row) const {
    const int64_t token =
        operands.row_token == nullptr ? piece.token + row : operands.row_token[piece.token + row];
    return static_cast<const std::byte*>(operands.x) +
           token * piece.strip->weight->in_features() * DTypeBytes(dtype_);
  }

  // The piece's rows of x side by side, in multiply_dtype_; those that fill it up are 0.
  void* CopyRows(const Operands& operands, const Piece& piece, Worker& worker) const {
    const int64_t width = piece.strip->weight->in_features();
    const void* rows = RowOfX(operands, piece, 0);
    if (operands.row_token != nullptr) {
      const int64_t row_bytes = width * DTypeBytes(dtype_);
      auto* const gathered = (widens() ? worker.gathered : worker.x)->data<std::byte>();
      for (int64_t row = 0; row < piece.tokens; ++row) {
        std::memcpy(gathered + row * row_bytes, RowOfX(operands, piece, row), row_bytes);
      }
      rows = gathered;
    }
    if (rows != worker.x->data()) {
      ConvertValues(rows, dtype_, piece.tokens * width, multiply_dtype_, worker.x->data());
    }
    const int64_t row_bytes = width * DTypeBytes(multiply_dtype_);
    std::memset(worker.x->data<std::byte>() + piece.tokens * row_bytes, 0,
                (piece.padded_tokens - piece.tokens) * row_bytes);
    return worker.x->data();
  }

  absl::Status Multiply(const Piece& piece, void* x, void* y, Worker& worker) {
    KeepOneDnnSingleThreaded();
    try {
      const Product& product = *piece.product;
      std::unordered_map<int, memory> operands{
          {DNNL_ARG_SRC, memory(product.x, CpuEngine(), x)},
          {DNNL_ARG_WEIGHTS, memory(product.weight, CpuEngine(), piece.elements)},
          {DNNL_ARG_DST, memory(product.y, CpuEngine(), y)},
          {DNNL_ARG_SCRATCHPAD, memory(product.scratchpad, CpuEngine(), worker.scratchpad->data())}};
      if (const CpuWeight& weight = *piece.strip->weight; weight.has_bias()) {
        operands.emplace(DNNL_ARG_BIAS, memory(product.bias, CpuEngine(), weight.bias(piece.y_column())));
      }
      product.primitive.execute(worker.stream, operands);
      return absl::OkStatus();
    } catch (const dnnl::error& error) {
      return OneDnnError("running a matmul", error);
    }
  }

  const DType dtype_;
  const DType multiply_dtype_;  // f32 where the machine cannot multiply bf16
  ThreadPool& pool_;
  std::vector<Worker> workers_;
  std::map<ProductKey, Product> products_;
  BufferRef widened_;  // strips of narrow weights, in the layout of the multiplication
};

CpuGemm::CpuGemm(DType dtype, ThreadPool& pool) : impl_(std::make_unique<Impl>(dtype, pool)) {}
CpuGemm::~CpuGemm() = default;

absl::Status CpuGemm::Run(const GemmArgs& args, const StopToken* stop) { return impl_->Run(args, stop); }

absl::Status CpuGemm::RunExperts(const ExpertGemmArgs& args, const StopToken* stop) {
  return impl_->RunExperts(args, stop);
}

}  // namespace meshfill
