#include "kernels/cpu/gemm.h"

#include <algorithm>
#include <bit>
#include <compare>
#include <cstddef>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/cpu/host_memory.h"
#include "kernels/cpu/layer_ops.h"
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
  int64_t tokens, in_features, out_features, columns;
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
  const memory::desc y = RowMajor(key.tokens, key.columns, key.y_dtype);
  const memory::desc bias = key.bias ? RowMajor(1, key.columns, DType::kF32) : memory::desc();
  const auto operation = key.bias ? dnnl::matmul::desc(x, weight, bias, y) : dnnl::matmul::desc(x, weight, y);
  const dnnl::matmul::primitive_desc compiled(operation, attributes, CpuEngine());
  return {x, weight, bias, y, dnnl::matmul(compiled), compiled.scratchpad_desc()};
}

// One task: tokens [token, token + tokens) times columns [column, column + columns). It spans all columns
// unless there is one token only, so x and y are without gaps.
struct Piece {
  int64_t token, tokens;
  int64_t column, columns;
  void* weight = nullptr;  // the first of the columns
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

}  // namespace

class CpuGemm::Impl {
 public:
  Impl(DType dtype, ThreadPool& pool)
      : dtype_(dtype), multiply_dtype_(MultiplyDType(dtype)), pool_(pool), workers_(pool.threads()) {}

  absl::Status Run(const GemmArgs& args, const StopToken* stop) {
    if (args.tokens == 0) return absl::OkStatus();
    const auto& weight = static_cast<const PackedMatrix&>(*args.weight);
    std::vector<Piece> pieces = args.tokens == 1
                                    ? CutColumns(weight.out_features())
                                    : CutTokens(args.tokens, weight.out_features(), pool_.threads());
    RETURN_IF_ERROR(Prepare(args, weight, pieces));
    RETURN_IF_ERROR(Reserve(pieces, args.y_dtype));
    pool_.ParallelFor(std::ssize(pieces), [&](int64_t task, int worker) {
      if (stop != nullptr && !stop->Proceed()) return;
      workers_[worker].status.Update(RunPiece(args, weight, pieces[task], workers_[worker]));
    });
    for (Worker& worker : workers_) {
      if (!worker.status.ok()) return std::exchange(worker.status, absl::OkStatus());
    }
    return stop != nullptr && stop->stopped() ? absl::CancelledError("gemm: stopped") : absl::OkStatus();
  }

 private:
  // What one thread of the team needs for itself.
  struct Worker {
    dnnl::stream stream{CpuEngine()};
    BufferRef scratchpad;
    BufferRef x, y;  // a tile in multiply_dtype_, where that is not the compute dtype
    absl::Status status;
  };

  bool widens() const { return multiply_dtype_ != dtype_; }
  bool widens_y(DType y_dtype) const { return widens() && y_dtype != multiply_dtype_; }

  // Finds or compiles each piece's product.
  absl::Status Prepare(const GemmArgs& args, const PackedMatrix& weight, std::vector<Piece>& pieces) {
    KeepOneDnnSingleThreaded();
    ProductKey key{.tokens = 0,
                   .in_features = weight.in_features(),
                   .out_features = weight.out_features(),
                   .columns = 0,
                   .y_dtype = widens_y(args.y_dtype) ? multiply_dtype_ : args.y_dtype,
                   .bias = weight.has_bias(),
                   .accumulate = args.accumulate};
    try {
      for (Piece& piece : pieces) {
        const PackedMatrix::Columns columns = weight.ColumnsFrom(piece.column, piece.columns);
        key.tokens = piece.tokens;
        key.columns = piece.columns;
        auto found = products_.find(key);
        if (found == products_.end()) {
          found = products_.emplace(key, Compile(key, multiply_dtype_, columns.layout)).first;
        }
        piece.weight = columns.elements;
        piece.product = &found->second;
      }
    } catch (const dnnl::error& error) {
      return OneDnnError("compiling a matmul", error);
    }
    return absl::OkStatus();
  }

  // Gives every worker the scratch memory that the largest piece needs.
  absl::Status Reserve(const std::vector<Piece>& pieces, DType y_dtype) {
    size_t scratchpad_bytes = 0, x_bytes = 0, y_bytes = 0;
    for (const Piece& piece : pieces) {
      scratchpad_bytes = std::max(scratchpad_bytes, piece.product->scratchpad.get_size());
      if (widens()) x_bytes = std::max(x_bytes, piece.product->x.get_size());
      if (widens_y(y_dtype)) y_bytes = std::max(y_bytes, piece.product->y.get_size());
    }
    for (Worker& worker : workers_) {
      for (auto [buffer, bytes] :
           {std::pair(&worker.scratchpad, scratchpad_bytes), {&worker.x, x_bytes}, {&worker.y, y_bytes}}) {
        if (*buffer != nullptr && (*buffer)->size_bytes() >= bytes) continue;
        ASSIGN_OR_RETURN(BufferRef larger, AllocateHostMemory(bytes));
        *buffer = std::move(larger);
      }
    }
    return absl::OkStatus();
  }

  absl::Status RunPiece(const GemmArgs& args, const PackedMatrix& weight, const Piece& piece,
                        Worker& worker) {
    const int64_t x_begin = piece.token * weight.in_features();
    const int64_t y_begin = piece.token * weight.out_features() + piece.column;
    // oneDNN's handles are not const, yet it reads only.
    void* x = const_cast<std::byte*>(static_cast<const std::byte*>(args.x)) + x_begin * DTypeBytes(dtype_);
    void* y = static_cast<std::byte*>(args.y) + y_begin * DTypeBytes(args.y_dtype);
    if (!widens()) return Multiply(weight, piece, x, y, worker);

    ConvertValues(x, dtype_, piece.tokens * weight.in_features(), multiply_dtype_, worker.x->data());
    if (!widens_y(args.y_dtype)) return Multiply(weight, piece, worker.x->data(), y, worker);
    const absl::Status status = Multiply(weight, piece, worker.x->data(), worker.y->data(), worker);
    if (status.ok())
      ConvertValues(worker.y->data(), multiply_dtype_, piece.tokens * piece.columns, args.y_dtype, y);
    return status;
  }

  absl::Status Multiply(const PackedMatrix& weight, const Piece& piece, void* x, void* y, Worker& worker) {
    KeepOneDnnSingleThreaded();
    try {
      const Product& product = *piece.product;
      std::unordered_map<int, memory> operands{
          {DNNL_ARG_SRC, memory(product.x, CpuEngine(), x)},
          {DNNL_ARG_WEIGHTS, memory(product.weight, CpuEngine(), piece.weight)},
          {DNNL_ARG_DST, memory(product.y, CpuEngine(), y)},
          {DNNL_ARG_SCRATCHPAD, memory(product.scratchpad, CpuEngine(), worker.scratchpad->data())}};
      if (weight.has_bias()) {
        operands.emplace(DNNL_ARG_BIAS, memory(product.bias, CpuEngine(), weight.bias(piece.column)));
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
};

CpuGemm::CpuGemm(DType dtype, ThreadPool& pool) : impl_(std::make_unique<Impl>(dtype, pool)) {}
CpuGemm::~CpuGemm() = default;

absl::Status CpuGemm::Run(const GemmArgs& args, const StopToken* stop) { return impl_->Run(args, stop); }

}  // namespace meshfill
