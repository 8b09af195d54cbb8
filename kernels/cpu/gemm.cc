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

// Columns [column, column + columns) of a weight, for tokens (rows, of experts) [begin, end).
struct Strip {
  const CpuWeight* weight;
  const WideMatrix* wide;  // null: the weight is narrow, and the columns are what is widened at a time
  int64_t column, columns;
  int64_t begin, end;
};

// Columns [column, column + columns) of one matrix in a task.
struct Part {
  const WideMatrix* matrix;
  int64_t column, columns;
  int64_t y_column;
  void* elements = nullptr;  // the first of the columns
  const Product* product = nullptr;
};

// One task: tokens [token, token + tokens) times columns of a weight, one part after the other.
struct Piece {
  const CpuWeight* weight;
  int64_t token, tokens;
  int64_t padded_tokens;  // what the kernels are compiled for; results beyond `tokens` are not used
  std::vector<Part> parts;

  bool padded() const { return padded_tokens > tokens; }
};

// The strips of one weight that are multiplied together, for the same tokens.
struct Strips {
  std::span<const Strip> strips;
  std::span<const WideMatrix> matrices;  // by strip

  const CpuWeight* weight() const { return strips.front().weight; }
  int64_t begin() const { return strips.front().begin; }
  int64_t end() const { return strips.front().end; }
  Piece AllColumns(int64_t token, int64_t tokens, int64_t padded_tokens) const {
    Piece piece = {weight(), token, tokens, padded_tokens, {}};
    for (size_t i = 0; i < strips.size(); ++i) {
      piece.parts.push_back({&matrices[i], 0, strips[i].columns, strips[i].column});
    }
    return piece;
  }
};

using CutStrips = std::function<void(const Strips& strips, std::vector<Piece>& pieces)>;

void CutColumns(const Strips& strips, std::vector<Piece>& pieces) {
  for (size_t i = 0; i < strips.strips.size(); ++i) {
    const Strip& strip = strips.strips[i];
    for (int64_t column = 0; column < strip.columns; column += kPanelFeatures) {
      const int64_t columns = std::min(kPanelFeatures, strip.columns - column);
      pieces.push_back(
          {strips.weight(), 0, 1, 1, {{&strips.matrices[i], column, columns, strip.column + column}}});
    }
  }
}

// Tiles of powers of two, so that few sizes are ever compiled: 300 tokens are 128 + 128 + 32 + 8 + 4.
void CutTokens(const Strips& strips, int threads, std::vector<Piece>& pieces) {
  const int64_t tokens = strips.end();
  const int64_t share = std::max(kSmallestSharedTile, (tokens + threads - 1) / threads);
  const int64_t tile = std::min<int64_t>(kTileTokens, std::bit_floor(static_cast<uint64_t>(share)));
  for (int64_t token = 0; token < tokens;) {
    const int64_t rest = std::bit_floor(static_cast<uint64_t>(tokens - token));
    const int64_t cut = std::min(tile, rest);
    pieces.push_back(strips.AllColumns(token, cut, cut));
    token += cut;
  }
}

// The rows of an expert by itself, in tiles of as many each, at most kTileTokens; a tile is filled up to a
// size of which there are few: a power of two, or a multiple of kPaddedTile. Each tile reads the expert's
// weights, which a small one behind the others would do for little.
void CutExpert(const Strips& strips, std::vector<Piece>& pieces) {
  constexpr int64_t kPaddedTile = 8;
  const int64_t rows = strips.end() - strips.begin();
  const int64_t tiles = (rows + kTileTokens - 1) / kTileTokens;
  const int64_t of_tile = (rows + tiles - 1) / tiles;
  const int64_t padded = of_tile < kPaddedTile
                             ? static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(of_tile)))
                             : (of_tile + kPaddedTile - 1) / kPaddedTile * kPaddedTile;
  for (int64_t row = strips.begin(); row < strips.end(); row += padded) {
    pieces.push_back(strips.AllColumns(row, std::min(padded, strips.end() - row), padded));
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
    const CutStrips cut_tokens = [threads](const Strips& all, std::vector<Piece>& pieces) {
      CutTokens(all, threads, pieces);
    };
    return RunStrips(strips, args.tokens == 1 ? CutStrips(CutColumns) : cut_tokens, operands, "gemm", stop);
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

  void AddStrips(const CpuWeight& weight, int64_t begin, int64_t end, std::vector<Strip>& strips) const {
    int64_t column = 0;
    for (const WideMatrix& wide : weight.wide()) {
      strips.push_back({&weight, &wide, column, wide.columns(), begin, end});
      column += wide.columns();
    }
    const int64_t panels = kWidenedBytes / WidenedBytes(weight, kPanelFeatures);
    const int64_t most = std::max<int64_t>(1, panels) * kPanelFeatures;
    for (; column < weight.out_features(); column += most) {
      strips.push_back(
          {&weight, nullptr, column, std::min(most, weight.out_features() - column), begin, end});
    }
  }

  // Strips that are wide run all at once, others as many as are widened together.
  absl::Status RunStrips(std::span<const Strip> strips, const CutStrips& cut, const Operands& operands,
                         const char* operation, const StopToken* stop) {
    while (!strips.empty()) {
      size_t count = 0;
      for (int64_t bytes = 0; count < strips.size(); ++count) {
        const Strip& strip = strips[count];
        if (strip.wide == nullptr) bytes += WidenedBytes(*strip.weight, strip.columns);
        if (count > 0 && bytes > kWidenedBytes) break;
      }
      ASSIGN_OR_RETURN(const std::vector<WideMatrix> matrices, Widen(strips.first(count), stop));
      std::vector<Piece> pieces;
      for (size_t first = 0, last = 0; first < count; first = last) {
        while (last < count && strips[last].weight == strips[first].weight) ++last;
        cut({strips.subspan(first, last - first), std::span(matrices).subspan(first, last - first)}, pieces);
      }
      RETURN_IF_ERROR(RunPieces(std::move(pieces), operands, operation, stop));
      strips = strips.subspan(count);
    }
    return absl::OkStatus();
  }

  // Each strip's matrix: of the weight's own, or in `widened_`, where it is until the next call.
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
      if (strip.wide != nullptr) {
        matrices.push_back(*strip.wide);
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
      if (strips[i].wide != nullptr) continue;
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

  // Finds or compiles the pieces' products.
  absl::Status Prepare(const Operands& operands, std::vector<Piece>& pieces) {
    KeepOneDnnSingleThreaded();
    try {
      for (Piece& piece : pieces) {
        const bool apart = piece.padded_tokens > 1 && !copies_y(operands, piece);
        for (Part& part : piece.parts) {
          const WideMatrix::Columns columns = part.matrix->ColumnsFrom(part.column, part.columns);
          const ProductKey key{.tokens = piece.padded_tokens,
                               .in_features = piece.weight->in_features(),
                               .columns = part.columns,
                               .matrix_columns = part.matrix->columns(),
                               .y_stride = apart ? piece.weight->out_features() : part.columns,
                               .y_dtype = widens_y(operands.y_dtype) ? multiply_dtype_ : operands.y_dtype,
                               .bias = piece.weight->has_bias(),
                               .accumulate = operands.accumulate};
          auto found = products_.find(key);
          if (found == products_.end()) {
            found = products_.emplace(key, Compile(key, multiply_dtype_, columns.layout)).first;
          }
          part.elements = columns.elements;
          part.product = &found->second;
        }
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
      for (const Part& part : piece.parts) {
        scratchpad_bytes = std::max(scratchpad_bytes, part.product->scratchpad.get_size());
        if (copies_x(operands, piece)) x_bytes = std::max(x_bytes, part.product->x.get_size());
        if (copies_y(operands, piece)) y_bytes = std::max(y_bytes, part.product->y.get_size());
      }
      if (operands.row_token != nullptr && widens()) {
        const int64_t elements = piece.tokens * piece.weight->in_features();
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
    // oneDNN's handles are not const, yet it reads only.
    void* const x = copies_x(operands, piece) ? CopyRows(operands, piece, worker)
                                              : const_cast<std::byte*>(RowOfX(operands, piece, 0));
    for (const Part& part : piece.parts) RETURN_IF_ERROR(RunPart(operands, piece, part, x, worker));
    return absl::OkStatus();
  }

  absl::Status RunPart(const Operands& operands, const Piece& piece, const Part& part, void* x,
                       Worker& worker) {
    const int64_t width = piece.weight->out_features();
    std::byte* const y = static_cast<std::byte*>(operands.y) +
                         (piece.token * width + part.y_column) * DTypeBytes(operands.y_dtype);
    if (!copies_y(operands, piece)) return Multiply(*piece.weight, part, x, y, worker);
    RETURN_IF_ERROR(Multiply(*piece.weight, part, x, worker.y->data(), worker));
    const DType from = widens_y(operands.y_dtype) ? multiply_dtype_ : operands.y_dtype;
    // Side by side, where the part has all columns.
    const int64_t copies = part.columns == width ? 1 : piece.tokens, count = piece.tokens / copies;
    for (int64_t copy = 0; copy < copies; ++copy) {
      ConvertValues(worker.y->data<std::byte>() + copy * part.columns * DTypeBytes(from), from,
                    count * part.columns, operands.y_dtype, y + copy * width * DTypeBytes(operands.y_dtype));
    }
    return absl::OkStatus();
  }

  const std::byte* RowOfX(const Operands& operands, const Piece& piece, int64_t row) const {
    const int64_t token =
        operands.row_token == nullptr ? piece.token + row : operands.row_token[piece.token + row];
    return static_cast<const std::byte*>(operands.x) +
           token * piece.weight->in_features() * DTypeBytes(dtype_);
  }

  // The piece's rows of x side by side, in multiply_dtype_; those that fill it up are 0.
  void* CopyRows(const Operands& operands, const Piece& piece, Worker& worker) const {
    const int64_t width = piece.weight->in_features();
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

  absl::Status Multiply(const CpuWeight& weight, const Part& part, void* x, void* y, Worker& worker) {
    KeepOneDnnSingleThreaded();
    try {
      const Product& product = *part.product;
      std::unordered_map<int, memory> operands{
          {DNNL_ARG_SRC, memory(product.x, CpuEngine(), x)},
          {DNNL_ARG_WEIGHTS, memory(product.weight, CpuEngine(), part.elements)},
          {DNNL_ARG_DST, memory(product.y, CpuEngine(), y)},
          {DNNL_ARG_SCRATCHPAD, memory(product.scratchpad, CpuEngine(), worker.scratchpad->data())}};
      if (weight.has_bias()) {
        operands.emplace(DNNL_ARG_BIAS, memory(product.bias, CpuEngine(), weight.bias(part.y_column)));
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
