#include "tests/engine/run/attention_case.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "engine/comm/in_process.h"
#include "tests/engine/random_seed.h"
#include "tests/engine/schedule/random_schedule.h"

namespace meshfill {
namespace {

// Attention by its definition, in double: [q_heads, tokens, head_dim].
std::vector<double> DirectAttention(const Case& c) {
  const auto& [q, k, v, sinks] = c.prompt;
  const int64_t tokens = c.tokens();
  const int d = c.model.head_dim;
  std::vector<double> o(q.size());
  for (int head = 0; head < c.model.q_heads; ++head) {
    const int64_t kv_head = head / (c.model.q_heads / c.model.kv_heads);
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t position = c.cached() + i;
      const int64_t first = c.window == 0 ? 0 : std::max<int64_t>(0, position - c.window + 1);
      std::vector<double> scores;
      for (int64_t j = first; j <= position; ++j) {
        double dot = 0;
        for (int x = 0; x < d; ++x)
          dot += double{q[(head * tokens + i) * d + x]} * k[(kv_head * c.keys() + j) * d + x];
        scores.push_back(dot / std::sqrt(d));
      }
      const double max = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (double score : scores) sum += std::exp(score - max);
      if (!sinks.empty()) sum += std::exp(sinks[head] - max);
      for (int64_t j = first; j <= position; ++j) {
        const double weight = std::exp(scores[j - first] - max) / sum;
        for (int x = 0; x < d; ++x)
          o[(head * tokens + i) * d + x] += weight * v[(kv_head * c.keys() + j) * d + x];
      }
    }
  }
  return o;
}

// This rank's rows of one tensor that `groups` deals, by slot: `heads` of them from `first_head` on.
void Deal(const Case& c, const TokenLayout& groups, int rank, const std::vector<float>& from, int first_head,
          int heads, float* to) {
  const int d = c.model.head_dim;
  const int group = rank / c.plan.heads;
  const int64_t chunk_tokens = groups.ChunkTokens(group);
  for (int head = 0; head < heads; ++head) {
    for (int64_t slot = 0; slot < chunk_tokens; ++slot) {
      const int64_t row = (first_head + head) * groups.tokens() + groups.TokenAt(group, slot);
      std::copy_n(&from[row * d], d, to + (head * chunk_tokens + slot) * d);
    }
  }
}

}  // namespace

Case MakeCase(std::mt19937_64& random, const TokenLayout& layout, Tile tile, DType partial_dtype,
              int64_t window, int heads, int64_t cached_tokens, int kv_inner) {
  const auto cost = [&random] { return Draw(random, 1, 4); };
  Schedule schedule = kv_inner != 0 || Draw(random, 0, 1)
                          ? RandomSchedule(random, tile, kv_inner)
                          : GreedySchedule(tile, {.c_q = cost(), .c_kv = cost(), .c_o = cost()});
  const int kv_heads = heads == 3 ? 1 : Draw(random, 1, 2);  // splits or replicates
  const PlanShape shape = {.layout = layout,
                           .heads = heads,
                           .tile = tile,
                           .kv_inner = kv_inner,
                           .partial_dtype = partial_dtype,
                           .cached_tokens = cached_tokens};
  Case c = {.plan = {shape, Grain().slice_tokens, {}, std::move(schedule), {}},
            .model = {.layers = 1,
                      .q_heads = kv_heads * heads * Draw(random, 1, 3),
                      .kv_heads = kv_heads,
                      .head_dim = 2 * Draw(random, 1, 6),
                      .dtype = DType::kF32},
            .window = window,
            .prompt = {}};
  std::normal_distribution<float> normal;
  for (auto [values, rows] : {std::pair(&c.prompt.q, c.model.q_heads * c.tokens()),
                              std::pair(&c.prompt.k, c.model.kv_heads * c.keys()),
                              std::pair(&c.prompt.v, c.model.kv_heads * c.keys())}) {
    values->resize(rows * c.model.head_dim);
    std::generate(values->begin(), values->end(), [&] { return 2 * normal(random); });
  }
  if (Draw(random, 0, 1) == 1) {
    c.prompt.sinks.resize(c.model.q_heads);
    for (float& sink : c.prompt.sinks) sink = 2 * normal(random);
  }
  return c;
}

Case DrawCase(std::mt19937_64& random, int64_t cached_tokens) {
  const int heads = Draw(random, 0, 1) ? 1 : Draw(random, 2, 3);
  const std::vector<Tile> tiles = TilesOf(Draw(random, 1, 16 / heads));
  const int n = heads * tiles.front().ranks();
  const int64_t most_tokens = Draw(random, 0, 3) == 0 ? n : 90;  // fewer tokens than ranks, too
  const auto layout = TokenLayout::Make(static_cast<LayoutKind>(Draw(random, 0, 2)), n,
                                        Draw<int64_t>(random, 1, most_tokens), Draw<int64_t>(random, 1, 9));
  const Tile tile = tiles[Draw<size_t>(random, 0, tiles.size() - 1)];
  return MakeCase(random, *layout, tile, DType::kF32, Draw(random, 0, 1) ? Draw<int64_t>(random, 1, 40) : 0,
                  heads, cached_tokens, DrawKvInner(random, tile));
}

LayerChunks ChunksOf(const Case& c, int rank, Stream& stream) {
  const int64_t chunk_tokens = c.chunk_tokens(rank);
  const ModelShape slice = c.slice();
  LayerChunks chunks = {
      .q = stream.Allocate(slice.q_bytes(chunk_tokens)).value(),
      .kv = stream.Allocate(slice.kv_bytes(c.kv_groups().ChunkTokens(rank / c.plan.heads))).value()};
  const int q_head = c.first_head(rank, c.model.q_heads), kv_head = c.first_head(rank, c.model.kv_heads);
  auto* const kv = chunks.kv->data<float>();
  Deal(c, c.groups(), rank, c.prompt.q, q_head, slice.q_heads, chunks.q->data<float>());
  Deal(c, c.kv_groups(), rank, c.prompt.k, kv_head, slice.kv_heads, kv);
  Deal(c, c.kv_groups(), rank, c.prompt.v, kv_head, slice.kv_heads, kv + chunks.kv->size_bytes() / 8);
  return chunks;
}

std::vector<RankEnd> RunMesh(const Case& c, absl::Duration wait_timeout, int layers,
                             const std::function<void(int rank, WatchedStream&)>& prepare,
                             const StopToken* stop) {
  const int n = c.plan.ranks();
  auto communicators = MakeInProcessCommunicators(n);
  std::vector<RankEnd> ends(n);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      RankEnd& end = ends[rank];
      WatchedStream stream(DType::kF32, stop);
      if (prepare != nullptr) prepare(rank, stream);
      AttentionExecutor executor(c.plan, c.model, rank, stream, *communicators[rank], wait_timeout,
                                 end.stats);
      for (int layer = 0; layer < layers && end.status.ok(); ++layer) {
        absl::StatusOr<BufferRef> o = executor.Run(ChunksOf(c, rank, stream), c.window,
                                                   c.prompt.sinks.empty() ? nullptr : c.prompt.sinks.data());
        end.status = o.status();
        if (!o.ok()) continue;
        const float* data = (*o)->data<float>();
        end.o.assign(data, data + c.slice().q_elements(c.chunk_tokens(rank)));
      }
      if (!end.status.ok()) communicators[rank]->Abort(end.status);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ends;
}

double LargestError(const Case& c, const std::vector<RankEnd>& ends) {
  const std::vector<double> expected = DirectAttention(c);
  const int d = c.model.head_dim;
  double largest = 0;
  for (int rank = 0; rank < c.plan.ranks(); ++rank) {
    if (!ends[rank].status.ok()) return std::numeric_limits<double>::infinity();
    const int64_t chunk_tokens = c.chunk_tokens(rank);
    for (int64_t i = 0; i < c.slice().q_elements(chunk_tokens); ++i) {
      const int64_t head = c.first_head(rank, c.model.q_heads) + i / (chunk_tokens * d);
      const int64_t token = c.token_at(rank, i / d % chunk_tokens);
      const double error = std::abs(ends[rank].o[i] - expected[(head * c.tokens() + token) * d + i % d]);
      largest = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(largest, error);
    }
  }
  return largest;
}

}  // namespace meshfill
