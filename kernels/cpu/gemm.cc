#include "kernels/cpu/gemm.h"

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstring>
#include <deque>
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
#include "kernels/cpu/product_pieces.h"
#include "kernels/return_if_error.h"

namespace meshfill {

using dnnl::memory;

struct TileProduct {
  memory::desc x, weight, bias, y;  // bias: of no dimensions where there is none
  dnnl::matmul primitive;
  memory::desc scratchpad;
};

namespace {

// What a TileProduct depends on.
struct ProductKey {
  int64_t tokens, in_features, columns;
  int64_t block_columns;  // columns of the block, `columns` of which are multiplied
  int64_t y_stride;       // elements from one token to the next
  DType y_dtype;
  bool bias, accumulate;
  auto operator<=>(const ProductKey&) const = default;
};

TileProduct Compile(const ProductKey& key, DType dtype, const memory::desc& weight) {
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

}  // namespace

class CpuGemm::Impl {
 public:
  Impl(DType dtype, ThreadPool& pool)
      : dtype_(dtype),
        multiply_dtype_(MultiplyDType(dtype)),
        amx_(multiply_dtype_ == DType::kBf16 && OneDnnUsesTiles()),
        pool_(pool),
        workers_(pool.threads()) {}

  absl::Status Run(const GemmArgs& args, const StopToken* stop) {
    if (args.tokens == 0) return absl::OkStatus();
    std::vector<Strip> strips;
    AddStrips(static_cast<const CpuWeight&>(*args.weight), 0, args.tokens, strips);
    const Operands operands = {
        .x = args.x, .y = args.y, .y_dtype = args.y_dtype, .accumulate = args.accumulate};
    return RunStrips(strips, pool_.threads(), operands, "gemm", stop);
  }

  absl::Status RunExperts(const ExpertGemmArgs& args, const StopToken* stop) {
    std::vector<Strip> strips;
    for (size_t expert = 0; expert < args.weights.size(); ++expert) {
      const int64_t begin = args.rows.begin[expert], end = args.rows.begin[expert + 1];
      if (begin == end) continue;
      AddStrips(static_cast<const CpuWeight&>(*args.weights[expert]), begin, end, strips);
    }
    return RunStrips(strips, /*threads=*/1, OperandsOf(args), "expert gemm", stop);
  }

  bool MayRunExpertMlps(const ExpertMlpArgs& args) const {
    constexpr int64_t kMostTileBytes = int64_t{16} << 20;
    const auto is_wide = [](const std::unique_ptr<PackedWeight>& weight) {
      return !static_cast<const CpuWeight&>(*weight).wide().empty();
    };
    const int64_t tile_bytes = MostTileTokens(amx_) * args.gate_up.front()->out_features() *
                               static_cast<int64_t>(DTypeBytes(dtype_));
    return tile_bytes <= kMostTileBytes && std::ranges::all_of(args.gate_up, is_wide) &&
           std::ranges::all_of(args.down, is_wide);
  }

  absl::Status RunExpertMlps(const ExpertMlpArgs& args, const StopToken* stop) {
    const Operands gate_up_operands = OperandsOf(GateUpProductOf(args));
    Operands down_operands = OperandsOf(DownProductOf(args));
    down_operands.y_is_read_late = true;
    std::vector<Piece> gate_up, down;
    int64_t most_tokens = 0;
    for (size_t expert = 0; expert < args.down.size(); ++expert) {
      const int64_t begin = args.rows.begin[expert], end = args.rows.begin[expert + 1];
      if (begin == end) continue;
      std::vector<Strip> first, second;
      AddStrips(static_cast<const CpuWeight&>(*args.gate_up[expert]), begin, end, first);
      AddStrips(static_cast<const CpuWeight&>(*args.down[expert]), begin, end, second);
      Cut cut = BestCut(first, amx_, /*threads=*/1);
      cut.tile_tokens = std::max(cut.tile_tokens, BestCut(second, amx_, /*threads=*/1).tile_tokens);
      CutProduct(first, cut, gate_up);
      CutProduct(second, cut, down);
      most_tokens = std::max(most_tokens, cut.tile_tokens);
    }
    RETURN_IF_ERROR(Prepare(gate_up_operands, gate_up));
    RETURN_IF_ERROR(Prepare(down_operands, down));
    RETURN_IF_ERROR(Reserve(gate_up, gate_up_operands));
    RETURN_IF_ERROR(Reserve(down, down_operands));
    const int64_t width = args.down.front()->in_features();
    for (Worker& worker : workers_) {
      RETURN_IF_ERROR(Enlarge(worker.wide, most_tokens * 2 * width * DTypeBytes(dtype_)));
      RETURN_IF_ERROR(Enlarge(worker.narrow, most_tokens * width * DTypeBytes(dtype_)));
    }
    return Share(std::ssize(gate_up), "expert mlp", stop, [&](int64_t task, Worker& worker) -> absl::Status {
      const Piece& piece = gate_up[task];
      Operands operands = gate_up_operands;
      operands.y = worker.wide->data();
      operands.first_y = piece.token;
      RETURN_IF_ERROR(RunPiece(operands, piece, stop, worker));
      ActivateTokens({.activation = args.activation,
                      .x = worker.wide->data(),
                      .tokens = piece.tokens,
                      .width = width,
                      .y = worker.narrow->data()},
                     dtype_);
      operands = down_operands;
      operands.x = worker.narrow->data();
      operands.first_x = piece.token;
      return RunPiece(operands, down[task], stop, worker);
    });
  }

 private:
  // What one thread of the team needs for itself.
  struct Worker {
    dnnl::stream stream{CpuEngine()};
    BufferRef scratchpad;
    BufferRef x;  // a tile, where it is not read as it lies: [tokens, in_features of the block] by block
    BufferRef y;  // some columns of a tile, where they are not written where they will lie
    BufferRef wide, narrow;  // a tile between an expert's two products: [tokens, 2·width], [tokens, width]
    absl::Status status;
  };

  // What the pieces read and write.
  struct Operands {
    const void* x;
    const int32_t* row_token = nullptr;  // the row of x for each of y's; null: the same
    void* y;
    DType y_dtype;
    bool accumulate = false;
    int64_t first_x = 0, first_y = 0;  // the rows that x and y begin with
    bool y_is_read_late = false;       // when the caches have something else
  };

  Operands OperandsOf(const ExpertGemmArgs& args) const {
    return {
        .x = args.x, .row_token = args.by_token ? args.rows.token : nullptr, .y = args.y, .y_dtype = dtype_};
  }

  int64_t WidenedBytes(const CpuWeight& weight, int64_t columns) const {
    return weight.in_features() * columns * static_cast<int64_t>(DTypeBytes(multiply_dtype_));
  }

  void AddStrips(const CpuWeight& weight, int64_t begin, int64_t end, std::vector<Strip>& strips) const {
    int64_t column = 0;
    for (const WideStrip& wide : weight.wide()) {
      const int64_t columns = wide.front().columns();
      strips.push_back({&weight, &wide, column, columns, begin, end});
      column += columns;
    }
    const int64_t panels = AddsBlocks(weight.in_features(), multiply_dtype_)
                               ? 1
                               : kWidenedBytes / WidenedBytes(weight, kPanelFeatures);
    const int64_t most = std::max<int64_t>(1, panels) * kPanelFeatures;
    for (; column < weight.out_features(); column += most) {
      strips.push_back(
          {&weight, nullptr, column, std::min(most, weight.out_features() - column), begin, end});
    }
  }

  // Strips that are wide run all at once, others as many as are widened together. `threads` share the tokens
  // of each weight.
  absl::Status RunStrips(std::span<Strip> strips, int threads, const Operands& operands,
                         const char* operation, const StopToken* stop) {
    while (!strips.empty()) {
      size_t count = 0;
      for (int64_t bytes = 0; count < strips.size(); ++count) {
        const Strip& strip = strips[count];
        if (strip.wide == nullptr) bytes += WidenedBytes(*strip.weight, strip.columns);
        if (count > 0 && bytes > kWidenedBytes) break;
      }
      RETURN_IF_ERROR(Widen(strips.first(count), stop));
      std::vector<Piece> pieces;
      for (size_t first = 0, last = 0; first < count; first = last) {
        while (last < count && strips[last].weight == strips[first].weight) ++last;
        const std::span<const Strip> of_weight = strips.subspan(first, last - first);
        CutProduct(of_weight, BestCut(of_weight, amx_, threads), pieces);
      }
      RETURN_IF_ERROR(RunPieces(std::move(pieces), operands, operation, stop));
      strips = strips.subspan(count);
    }
    return absl::OkStatus();
  }

  // Gives strips of narrow weights the wide ones of `widened_`, good until the next call.
  absl::Status Widen(std::span<Strip> strips, const StopToken* stop) {
    struct Tile {
      size_t strip;
      const WideBlock* block;
      const BlockPlaces* places;
      int64_t tile;
    };
    std::vector<std::pair<size_t, StripForm>> forms;  // of strips that are narrow
    int64_t bytes = 0;
    KeepOneDnnSingleThreaded();
    for (size_t i = 0; i < strips.size(); ++i) {
      if (strips[i].wide != nullptr) continue;
      try {
        forms.emplace_back(i, StripForm(strips[i].weight->in_features(), strips[i].columns, multiply_dtype_));
      } catch (const dnnl::error& error) {
        return OneDnnError("choosing a weight's layout", error);
      }
      bytes += forms.back().second.bytes();
    }
    if (forms.empty()) return absl::OkStatus();
    if (widened_ == nullptr || static_cast<int64_t>(widened_->size_bytes()) < bytes) {
      widened_ = nullptr;
      ASSIGN_OR_RETURN(widened_, AllocateHostMemory(bytes));
    }
    widened_strips_.clear();
    std::deque<BlockPlaces> places;
    std::vector<Tile> tiles;
    auto* to = widened_->data<std::byte>();
    for (const auto& [i, form] : forms) {
      strips[i].wide = &widened_strips_.emplace_back(form.At(std::exchange(to, to + form.bytes())));
      for (const WideBlock& block : *strips[i].wide) {
        places.emplace_back(*block.layout);
        for (int64_t tile = 0; tile * NarrowMatrix::kTileColumns < strips[i].columns; ++tile) {
          tiles.push_back({i, &block, &places.back(), tile});
        }
      }
    }
    pool_.ParallelFor(std::ssize(tiles), [&](int64_t task, int) {
      if (stop != nullptr && !stop->Proceed()) return;
      const Tile& tile = tiles[task];
      static_cast<const NarrowMatrix*>(strips[tile.strip].weight)
          ->WidenTile(strips[tile.strip].column, tile.tile, *tile.places, *tile.block);
    });
    return absl::OkStatus();
  }

  absl::Status RunPieces(std::vector<Piece> pieces, const Operands& operands, const char* operation,
                         const StopToken* stop) {
    RETURN_IF_ERROR(Prepare(operands, pieces));
    RETURN_IF_ERROR(Reserve(pieces, operands));
    return Share(std::ssize(pieces), operation, stop, [&](int64_t task, Worker& worker) {
      return RunPiece(operands, pieces[task], stop, worker);
    });
  }

  // task(index, worker) for all tasks, on the team.
  template <class Task>
  absl::Status Share(int64_t tasks, const char* operation, const StopToken* stop, const Task& task) {
    pool_.ParallelFor(tasks, [&](int64_t index, int worker) {
      workers_[worker].status.Update(task(index, workers_[worker]));
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
          for (const WideBlock& block : *part.strip) {
            const bool first = block.first_in == 0;
            const ProductKey key{.tokens = piece.padded_tokens,
                                 .in_features = block.in_features(),
                                 .columns = part.columns,
                                 .block_columns = block.columns(),
                                 .y_stride = apart ? piece.weight->out_features() : part.columns,
                                 .y_dtype = ProductDType(operands, piece),
                                 .bias = piece.weight->has_bias() && first,
                                 .accumulate = operands.accumulate || !first};
            auto found = products_.find(key);
            const auto columns = [&] { return block.ColumnsFrom(part.column, part.columns); };
            if (found == products_.end()) {
              found = products_.emplace(key, Compile(key, multiply_dtype_, columns().layout)).first;
            }
            const bool whole = part.columns == block.columns();
            part.addends.push_back(
                {&found->second, whole ? block.elements : columns().elements, block.first_in});
          }
        }
      }
    } catch (const dnnl::error& error) {
      return OneDnnError("compiling a matmul", error);
    }
    return absl::OkStatus();
  }

  // Gives every worker the scratch memory that the largest piece needs.
  absl::Status Reserve(const std::vector<Piece>& pieces, const Operands& operands) {
    size_t scratchpad_bytes = 0, x_bytes = 0, y_bytes = 0;
    for (const Piece& piece : pieces) {
      if (copies_x(operands, piece)) {
        const int64_t elements = piece.padded_tokens * piece.weight->in_features();
        x_bytes = std::max(x_bytes, elements * DTypeBytes(multiply_dtype_));
      }
      for (const Part& part : piece.parts) {
        for (const Addend& addend : part.addends) {
          scratchpad_bytes = std::max(scratchpad_bytes, addend.product->scratchpad.get_size());
        }
        if (copies_y(operands, piece)) {
          y_bytes = std::max(y_bytes, part.addends.front().product->y.get_size());
        }
      }
    }
    for (Worker& worker : workers_) {
      RETURN_IF_ERROR(Enlarge(worker.scratchpad, scratchpad_bytes));
      RETURN_IF_ERROR(Enlarge(worker.x, x_bytes));
      RETURN_IF_ERROR(Enlarge(worker.y, y_bytes));
    }
    return absl::OkStatus();
  }

  // To at least so many bytes; their contents are lost.
  static absl::Status Enlarge(BufferRef& buffer, size_t bytes) {
    if (buffer != nullptr && buffer->size_bytes() >= bytes) return absl::OkStatus();
    ASSIGN_OR_RETURN(BufferRef larger, AllocateHostMemory(bytes));
    buffer = std::move(larger);
    return absl::OkStatus();
  }

  // One token's features lie side by side, however they are cut into blocks.
  bool copies_x(const Operands& operands, const Piece& piece) const {
    return widens() || piece.padded() || operands.row_token != nullptr ||
           (piece.adds() && piece.padded_tokens > 1);
  }
  bool copies_y(const Operands& operands, const Piece& piece) const {
    return widens_y(operands.y_dtype) || piece.padded() || piece.adds();
  }
  // The dtype that products write.
  DType ProductDType(const Operands& operands, const Piece& piece) const {
    if (piece.adds()) return DType::kF32;
    return widens_y(operands.y_dtype) ? multiply_dtype_ : operands.y_dtype;
  }

  absl::Status RunPiece(const Operands& operands, const Piece& piece, const StopToken* stop, Worker& worker) {
    std::byte* x = nullptr;
    for (const Part& part : piece.parts) {
      if (stop != nullptr && !stop->Proceed()) break;
      // oneDNN's handles are not const, yet it reads only.
      if (x == nullptr) {
        x = copies_x(operands, piece) ? CopyRows(operands, piece, worker)
                                      : const_cast<std::byte*>(RowOfX(operands, piece, 0));
      }
      RETURN_IF_ERROR(RunPart(operands, piece, part, x, worker));
    }
    return absl::OkStatus();
  }

  absl::Status RunPart(const Operands& operands, const Piece& piece, const Part& part, std::byte* x,
                       Worker& worker) {
    const int64_t width = piece.weight->out_features();
    std::byte* const y =
        static_cast<std::byte*>(operands.y) +
        ((piece.token - operands.first_y) * width + part.y_column) * DTypeBytes(operands.y_dtype);
    if (!copies_y(operands, piece)) return Multiply(piece, part, x, y, worker);
    auto* const copy = worker.y->data<std::byte>();
    const DType dtype = ProductDType(operands, piece);
    // Rows lie side by side in y, too, where the part has all columns.
    const int64_t copies = part.columns == width ? 1 : piece.tokens, count = piece.tokens / copies;
    const auto for_each_copy = [&](const auto& convert) {
      for (int64_t i = 0; i < copies; ++i) {
        convert(copy + i * part.columns * DTypeBytes(dtype), y + i * width * DTypeBytes(operands.y_dtype),
                count * part.columns);
      }
    };
    if (operands.accumulate) {
      for_each_copy([&](std::byte* product, const std::byte* rows, int64_t elements) {
        ConvertValues(rows, operands.y_dtype, elements, dtype, product);
      });
    }
    RETURN_IF_ERROR(Multiply(piece, part, x, copy, worker));
    if (operands.y_is_read_late && dtype == DType::kF32 && operands.y_dtype == DType::kBf16) {
      RoundRowsPastCaches(worker.y->data<float>(), piece.tokens, part.columns, width,
                          reinterpret_cast<BFloat16*>(y));
      return absl::OkStatus();
    }
    for_each_copy([&](const std::byte* product, std::byte* rows, int64_t elements) {
      ConvertValues(product, dtype, elements, operands.y_dtype, rows);
    });
    return absl::OkStatus();
  }

  const std::byte* RowOfX(const Operands& operands, const Piece& piece, int64_t row) const {
    const int64_t token =
        operands.row_token == nullptr ? piece.token + row : operands.row_token[piece.token + row];
    return static_cast<const std::byte*>(operands.x) +
           (token - operands.first_x) * piece.weight->in_features() * DTypeBytes(dtype_);
  }

  // The piece's rows of x in multiply_dtype_, side by side for each block; those that fill it up are 0.
  std::byte* CopyRows(const Operands& operands, const Piece& piece, Worker& worker) const {
    auto* to = worker.x->data<std::byte>();
    for (const WideBlock& block : *piece.parts.front().strip) {
      const int64_t features = block.in_features();
      const auto row_bytes = static_cast<size_t>(features) * DTypeBytes(multiply_dtype_);
      for (int64_t row = 0; row < piece.tokens; ++row) {
        ConvertValues(RowOfX(operands, piece, row) + block.first_in * DTypeBytes(dtype_), dtype_, features,
                      multiply_dtype_, std::exchange(to, to + row_bytes));
      }
      const size_t rest = (piece.padded_tokens - piece.tokens) * row_bytes;
      std::memset(std::exchange(to, to + rest), 0, rest);
    }
    return worker.x->data<std::byte>();
  }

  // Adds up the part's products.
  absl::Status Multiply(const Piece& piece, const Part& part, std::byte* x, void* y, Worker& worker) {
    KeepOneDnnSingleThreaded();
    try {
      for (const Addend& addend : part.addends) {
        const TileProduct& product = *addend.product;
        std::byte* const x_of_block = x + addend.first_in * piece.padded_tokens * DTypeBytes(multiply_dtype_);
        std::unordered_map<int, memory> operands{
            {DNNL_ARG_SRC, memory(product.x, CpuEngine(), x_of_block)},
            {DNNL_ARG_WEIGHTS, memory(product.weight, CpuEngine(), addend.elements)},
            {DNNL_ARG_DST, memory(product.y, CpuEngine(), y)},
            {DNNL_ARG_SCRATCHPAD, memory(product.scratchpad, CpuEngine(), worker.scratchpad->data())}};
        if (product.bias.dims().size() > 0) {
          operands.emplace(DNNL_ARG_BIAS,
                           memory(product.bias, CpuEngine(), piece.weight->bias(part.y_column)));
        }
        product.primitive.execute(worker.stream, operands);
      }
      return absl::OkStatus();
    } catch (const dnnl::error& error) {
      return OneDnnError("running a matmul", error);
    }
  }

  const DType dtype_;
  const DType multiply_dtype_;  // f32 where the machine cannot multiply bf16
  const bool amx_;              // the products are AMX's
  ThreadPool& pool_;
  std::vector<Worker> workers_;
  std::map<ProductKey, TileProduct> products_;
  BufferRef widened_;  // strips of narrow weights, in the layout of the multiplication
  std::deque<WideStrip> widened_strips_;
};

CpuGemm::CpuGemm(DType dtype, ThreadPool& pool) : impl_(std::make_unique<Impl>(dtype, pool)) {}
CpuGemm::~CpuGemm() = default;

absl::Status CpuGemm::Run(const GemmArgs& args, const StopToken* stop) { return impl_->Run(args, stop); }

bool CpuGemm::MayRunExpertMlps(const ExpertMlpArgs& args) const { return impl_->MayRunExpertMlps(args); }

absl::Status CpuGemm::RunExpertMlps(const ExpertMlpArgs& args, const StopToken* stop) {
  return impl_->RunExpertMlps(args, stop);
}

absl::Status CpuGemm::RunExperts(const ExpertGemmArgs& args, const StopToken* stop) {
  return impl_->RunExperts(args, stop);
}

}  // namespace meshfill
