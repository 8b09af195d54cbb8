#include "kernels/cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <numbers>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/cpu/amx.h"
#include "kernels/cpu/attention_kernel.h"
#include "kernels/cpu/attention_ranges.h"
#include "kernels/return_if_error.h"

namespace meshfill {
namespace {

// ---- Targets.

struct AttentionTarget {
  const char* name;
  bool (*runs_here)();
  const AttentionKernel& (*kernel)(DType dtype);
};

#if defined(__x86_64__)
bool HasAvx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool HasAvx512Bf16() { return HasAvx512() && __builtin_cpu_supports("avx512bf16"); }
bool HasAmxBf16() { return HasAvx512Bf16() && MayUseTiles(); }

const AttentionKernel& Avx512WithBf16AttentionKernel(DType dtype) {
  return dtype == DType::kBf16 ? Avx512Bf16AttentionKernel() : Avx512AttentionKernel(dtype);
}
const AttentionKernel& Avx512WithAmxAttentionKernel(DType dtype) {
  return dtype == DType::kBf16 ? AmxBf16AttentionKernel() : Avx512AttentionKernel(dtype);
}
#endif

constexpr AttentionTarget kTargets[] = {
#if defined(__x86_64__)
    {"amx_bf16", HasAmxBf16, Avx512WithAmxAttentionKernel},
    {"avx512_bf16", HasAvx512Bf16, Avx512WithBf16AttentionKernel},
    {"avx512", HasAvx512, Avx512AttentionKernel},
    {"avx2", HasAvx2, Avx2AttentionKernel},
#endif
    {"portable", [] { return true; }, PortableAttentionKernel},
};

// ---- Sizes.

// What a worker keeps in its L2 cache: one block of packed keys and values, and the packed queries and the
// outputs of its task. Larger blocks save traffic of the outputs, larger tasks save packing. A task of
// vectors leaves a third of 1 MiB to the rest.
constexpr int64_t kBlockWords = (256 << 10) / sizeof(uint32_t);
constexpr int64_t kTaskWordsOfRow = 256;  // of all that a task may have
constexpr int64_t kLeastTaskRows = 384;
constexpr int64_t kTasksOfThread = 4;  // at least, where smaller ones can be had: threads end together

constexpr int64_t DivideRoundingUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// No bit of the result depends on how many rows a task has, and so on the thread count: strips and blocks
// begin at multiples of their sizes.
struct Tiling {
  int group;            // query heads of a KV head
  int strip_rows;       // query rows of the kernel's strips
  int64_t query_words;  // words of a packed query
  int64_t padded_dim;   // elements of an output row
  int block_keys;       // keys that are packed at a time
  int64_t strips;       // strips of a task, in each head of the group
  int64_t tiles;        // tiles of tile_tokens queries

  int64_t tile_tokens() const { return strips * strip_rows; }
  int64_t rows() const { return group * tile_tokens(); }  // output rows of a tile
};

Tiling MakeTiling(const AttentionBlockArgs& args, const AttentionKernel& kernel, int threads) {
  Tiling tiling{.group = args.q_heads / args.kv_heads,
                .strip_rows = kernel.strip_rows,
                .query_words = kernel.QueryWords(args.head_dim),
                .padded_dim = kernel.PaddedDim(args.head_dim),
                .block_keys = kernel.block_keys,
                .strips = 1,
                .tiles = 0};
  while (kernel.KeyBlockWords(args.head_dim, tiling.block_keys) +
             kernel.ValueBlockWords(args.head_dim, tiling.block_keys) >
         kBlockWords) {
    tiling.block_keys /= 2;
  }
  for (int64_t task_rows = kernel.task_rows;; task_rows /= 2) {
    const int64_t task_words = task_rows * kTaskWordsOfRow;
    const int64_t rows = std::min(task_rows, task_words / (tiling.query_words + tiling.padded_dim));
    const int64_t strips =
        std::min(rows / tiling.group / kernel.strip_rows, DivideRoundingUp(args.q_tokens, kernel.strip_rows));
    tiling.strips = std::max<int64_t>(strips, 1);
    tiling.tiles = DivideRoundingUp(args.q_tokens, tiling.tile_tokens());
    if (tiling.tiles * args.kv_heads >= kTasksOfThread * threads || task_rows / 2 < kLeastTaskRows) break;
  }
  return tiling;
}

// ---- Scratch: one worker's memory, bounded by the sizes above and independent of the chunk's length.

struct FreeAligned {
  void operator()(uint32_t* words) const { ::operator delete (words, std::align_val_t{64}); }
};

struct Scratch {
  std::unique_ptr<uint32_t, FreeAligned> memory;
  uint32_t* keys;
  uint32_t* values;
  uint32_t* queries;               // [group, tile_tokens, QueryWords]
  float* output;                   // [group, tile_tokens, PaddedDim]
  float* max;                      // [group, tile_tokens]
  float* sum;                      // [group, tile_tokens]
  std::vector<KeyRange> ranges;    // [tile_tokens]
  std::vector<StripBlock> strips;  // of the block at hand
};

absl::StatusOr<Scratch> AllocateScratch(const AttentionKernel& kernel, const Tiling& tiling, int head_dim) {
  constexpr int64_t kLineWords = 64 / sizeof(uint32_t);
  const int64_t rows = tiling.rows();
  const int64_t sizes[] = {kernel.KeyBlockWords(head_dim, tiling.block_keys),
                           kernel.ValueBlockWords(head_dim, tiling.block_keys),
                           rows * tiling.query_words,
                           rows * tiling.padded_dim,
                           rows,
                           rows};
  int64_t words = 0;
  int64_t offsets[std::size(sizes)];
  for (size_t i = 0; i < std::size(sizes); ++i) {
    offsets[i] = words;
    words += DivideRoundingUp(sizes[i], kLineWords) * kLineWords;
  }
  const size_t bytes = words * sizeof(uint32_t);
  auto* memory = static_cast<uint32_t*>(::operator new (bytes, std::align_val_t{64}, std::nothrow));
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("attention: no memory for ", bytes,
                                                     " bytes of scratch; free memory or use fewer threads"));
  }
  return Scratch{.memory = std::unique_ptr<uint32_t, FreeAligned>(memory),
                 .keys = memory + offsets[0],
                 .values = memory + offsets[1],
                 .queries = memory + offsets[2],
                 .output = reinterpret_cast<float*>(memory + offsets[3]),
                 .max = reinterpret_cast<float*>(memory + offsets[4]),
                 .sum = reinterpret_cast<float*>(memory + offsets[5]),
                 .ranges = std::vector<KeyRange>(tiling.tile_tokens()),
                 .strips = {}};
}

// ---- One call: its tasks are the tiles of each KV head's group of query heads.

class AttentionRun {
 public:
  AttentionRun(const AttentionBlockArgs& args, DType dtype, const AttentionKernel& kernel,
               const Tiling& tiling, const StopToken* stop)
      : args_(args), element_bytes_(DTypeBytes(dtype)), kernel_(kernel), tiling_(tiling), stop_(stop) {}

  int64_t tasks() const { return tiling_.tiles * args_.kv_heads; }
  bool stopped() const { return stop_ != nullptr && stop_->stopped(); }
  bool Proceed() const { return stop_ == nullptr || stop_->Proceed(); }

  void RunTask(int64_t task, Scratch& scratch) const;

 private:
  // The queries [begin, begin + tokens) of every head of a KV head's group.
  struct Tile {
    int64_t kv_head;
    int64_t begin;
    int64_t tokens;
  };

  // Body(row of the scratch, row of the chunk's q, o and lse, token in the tile), for the tile's real rows.
  template <typename Body>
  void ForEachRow(const Tile& tile, Body body) const {
    for (int64_t head = 0; head < tiling_.group; ++head) {
      const int64_t scratch_row = head * tiling_.tile_tokens();
      const int64_t chunk_row = (tile.kv_head * tiling_.group + head) * args_.q_tokens + tile.begin;
      for (int64_t token = 0; token < tile.tokens; ++token)
        body(scratch_row + token, chunk_row + token, token);
    }
  }

  const char* InputRow(const void* tensor, int64_t row) const {
    return static_cast<const char*>(tensor) + row * args_.head_dim * element_bytes_;
  }

  void FindRanges(const Tile& tile, Scratch& scratch) const;
  void LoadQueries(const Tile& tile, Scratch& scratch) const;
  void LoadState(const Tile& tile, Scratch& scratch) const;
  void AttendKeys(const Tile& tile, int64_t key_begin, Scratch& scratch) const;
  void StoreState(const Tile& tile, const Scratch& scratch) const;

  const AttentionBlockArgs& args_;
  const size_t element_bytes_;
  const AttentionKernel& kernel_;
  const Tiling tiling_;
  const StopToken* stop_;
};

void AttentionRun::RunTask(int64_t task, Scratch& scratch) const {
  if (!Proceed()) return;
  // Under a causal mask later queries see more keys: the longest tasks come first, and the threads end
  // together.
  const int64_t tile_tokens = tiling_.tile_tokens();
  const int64_t begin = (tiling_.tiles - 1 - task / args_.kv_heads) * tile_tokens;
  const Tile tile{.kv_head = task % args_.kv_heads,
                  .begin = begin,
                  .tokens = std::min(tile_tokens, args_.q_tokens - begin)};
  FindRanges(tile, scratch);
  LoadQueries(tile, scratch);
  LoadState(tile, scratch);
  const int64_t visible_begin = scratch.ranges.front().begin;
  const int64_t visible_end = scratch.ranges.back().end;
  // Blocks begin at multiples of their size, whatever the tile sees: a row's bits do not depend on its
  // neighbours.
  for (int64_t key = visible_begin / tiling_.block_keys * tiling_.block_keys; key < visible_end;
       key += tiling_.block_keys) {
    if (!Proceed()) return;
    AttendKeys(tile, key, scratch);
  }
  StoreState(tile, scratch);
}

void AttentionRun::FindRanges(const Tile& tile, Scratch& scratch) const {
  for (int64_t token = 0; token < std::ssize(scratch.ranges); ++token) {
    // The rows that fill the last strip see what the last query sees; nobody reads their output.
    const int64_t slot = tile.begin + std::min(token, tile.tokens - 1);
    scratch.ranges[token] = VisibleKeys(args_.band, slot, args_.k_tokens);
  }
}

void AttentionRun::LoadQueries(const Tile& tile, Scratch& scratch) const {
  ForEachRow(tile, [&](int64_t scratch_row, int64_t chunk_row, int64_t token) {
    if (token % tiling_.strip_rows != 0) return;
    const int count = static_cast<int>(std::min<int64_t>(tiling_.strip_rows, tile.tokens - token));
    kernel_.pack_queries(InputRow(args_.q, chunk_row), count, args_.head_dim,
                         scratch.queries + scratch_row * tiling_.query_words);
  });
}

// The carried state (o, lse) is a softmax whose maximum is lse and whose sum is 1.
void AttentionRun::LoadState(const Tile& tile, Scratch& scratch) const {
  const int64_t rows = tiling_.rows();
  std::fill_n(scratch.output, rows * tiling_.padded_dim, 0.0f);
  std::fill_n(scratch.max, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(scratch.sum, rows, 0.0f);
  if (!args_.carry_in) return;
  ForEachRow(tile, [&](int64_t scratch_row, int64_t chunk_row, int64_t) {
    const float lse = args_.lse[chunk_row];
    if (lse == -std::numeric_limits<float>::infinity()) return;
    scratch.max[scratch_row] = static_cast<float>(lse * std::numbers::log2e);
    scratch.sum[scratch_row] = 1.0f;
    std::memcpy(scratch.output + scratch_row * tiling_.padded_dim, args_.o + chunk_row * args_.head_dim,
                args_.head_dim * sizeof(float));
  });
}

void AttentionRun::AttendKeys(const Tile& tile, int64_t key_begin, Scratch& scratch) const {
  const int head_dim = args_.head_dim;
  const int count = static_cast<int>(std::min<int64_t>(tiling_.block_keys, args_.k_tokens - key_begin));
  const int64_t kv_row = tile.kv_head * args_.k_tokens + key_begin;
  kernel_.pack_keys(InputRow(args_.k, kv_row), count, head_dim, scratch.keys);
  kernel_.pack_values(InputRow(args_.v, kv_row), count, head_dim, tiling_.block_keys, scratch.values);

  scratch.strips.clear();
  StripBlock block;
  block.keys = scratch.keys;
  block.values = scratch.values;
  block.head_dim = head_dim;
  block.block_keys = tiling_.block_keys;
  block.scale_log2e = static_cast<float>(args_.scale * std::numbers::log2e);
  const auto in_block = [&](int64_t key) {
    return static_cast<int>(std::clamp<int64_t>(key - key_begin, 0, count));
  };
  for (int64_t token = 0; token < tile.tokens; token += tiling_.strip_rows) {
    for (int row = 0; row < tiling_.strip_rows; ++row) {
      block.row_begin[row] = in_block(scratch.ranges[token + row].begin);
      block.row_end[row] = in_block(scratch.ranges[token + row].end);
    }
    if (block.row_begin[0] >= block.row_end[tiling_.strip_rows - 1]) continue;
    for (int64_t head = 0; head < tiling_.group; ++head) {
      const int64_t row = head * tiling_.tile_tokens() + token;
      block.queries = scratch.queries + row * tiling_.query_words;
      block.output = scratch.output + row * tiling_.padded_dim;
      block.max = scratch.max + row;
      block.sum = scratch.sum + row;
      scratch.strips.push_back(block);
    }
  }
  if (!scratch.strips.empty()) kernel_.attend(scratch.strips.data(), static_cast<int>(scratch.strips.size()));
}

void AttentionRun::StoreState(const Tile& tile, const Scratch& scratch) const {
  ForEachRow(tile, [&](int64_t scratch_row, int64_t chunk_row, int64_t token) {
    const KeyRange& range = scratch.ranges[token];
    if (args_.carry_in && range.begin >= range.end) return;  // nothing was added: the carried bits stay
    const float sum = scratch.sum[scratch_row];
    const float normalizer = sum > 0 ? 1.0f / sum : 0.0f;
    const float* from = scratch.output + scratch_row * tiling_.padded_dim;
    float* to = args_.o + chunk_row * args_.head_dim;
    for (int d = 0; d < args_.head_dim; ++d) to[d] = from[d] * normalizer;
    args_.lse[chunk_row] =
        static_cast<float>(scratch.max[scratch_row] * std::numbers::ln2 + std::log(double{sum}));
  });
}

}  // namespace

std::vector<std::string> SupportedAttentionTargets() {
  std::vector<std::string> names;
  for (const AttentionTarget& target : kTargets) {
    if (target.runs_here()) names.push_back(target.name);
  }
  return names;
}

absl::Status CpuAttentionBlock(const AttentionBlockArgs& args, DType dtype, const std::string& target,
                               ThreadPool& pool, const StopToken* stop) {
  const auto* found = std::find_if(
      std::begin(kTargets), std::end(kTargets),
      [&](const AttentionTarget& candidate) { return candidate.name == target && candidate.runs_here(); });
  if (found == std::end(kTargets)) {
    return absl::InvalidArgumentError(absl::StrCat("attention: no target '", target,
                                                   "' on this machine; use one of ",
                                                   absl::StrJoin(SupportedAttentionTargets(), ", ")));
  }
  if (dtype == DType::kF16) {
    return absl::InvalidArgumentError(
        "attention: inputs of f16 are not computed with; convert them to bf16 or f32");
  }
  if (!(args.scale > 0 && std::isfinite(args.scale))) {
    return absl::InvalidArgumentError(
        absl::StrCat("attention: the scale must be positive, but is ", args.scale));
  }
  const AttentionKernel& kernel = found->kernel(dtype);
  const Tiling tiling = MakeTiling(args, kernel, pool.threads());
  const AttentionRun run(args, dtype, kernel, tiling, stop);
  std::vector<Scratch> scratch;
  for (int worker = 0; worker < pool.threads(); ++worker) {
    ASSIGN_OR_RETURN(Scratch allocated, AllocateScratch(kernel, tiling, args.head_dim));
    scratch.push_back(std::move(allocated));
  }
  pool.ParallelFor(run.tasks(), [&](int64_t task, int worker) { run.RunTask(task, scratch[worker]); });
  if (run.stopped()) return absl::CancelledError("attention: stopped");
  return absl::OkStatus();
}

}  // namespace meshfill
