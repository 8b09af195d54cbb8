#include "engine/plan/layer_reach.h"

#include <algorithm>

#include "engine/model/model_shape.h"

namespace meshfill {
namespace {

// Whether some block is hidden, and the hops from a chunk to those who see it are the first in falling order.
bool SeesAll(const TokenLayout& layout, int64_t cached_tokens, int64_t window, int kv_inner) {
  const int64_t ranks = layout.ranks(), stripe = layout.stripe();
  if (ranks == 1 || window == 0 || kv_inner != 0 || layout.kind() == LayoutKind::kZigzag) return true;
  if (layout.kind() == LayoutKind::kContiguous) return cached_tokens > 0;
  return window >= (ranks - 2) * stripe + 2 || cached_tokens % (ranks * stripe) != 0;
}

// Σ over the queries 0 … queries − 1 of the keys k < keys for which query − k ≤ most.
double PairsWithin(int64_t queries, int64_t keys, int64_t most) {
  const auto sum = [](int64_t first, int64_t last) {  // sum of first … last
    return first > last ? 0.0 : static_cast<double>(last - first + 1) * static_cast<double>(first + last) / 2;
  };
  const int64_t all = std::clamp<int64_t>(most + 1, 0, queries);  // queries that see every key
  const int64_t first = std::max<int64_t>(0, most + 1), last = std::min(queries - 1, most + keys - 1);
  return static_cast<double>(all) * static_cast<double>(keys) +
         (first > last ? 0 : sum(keys - (last - most), keys - (first - most)));
}

// Visible pairs of consecutive queries and keys, the first of which are `distance` tokens apart.
double BandPairs(int64_t distance, int64_t queries, int64_t keys, int64_t window) {
  if (distance - (keys - 1) >= window) return 0;  // most blocks of a large pool
  return PairsWithin(queries, keys, window - 1 - distance) - PairsWithin(queries, keys, -distance - 1);
}

// Pairs of the prompt's queries with its own keys and those before it.
double PairsAfter(const TokenLayout& layout, int64_t cached_tokens, int64_t window) {
  return VisiblePairs(cached_tokens + layout.tokens(), window) - VisiblePairs(cached_tokens, window);
}

}  // namespace

LayerReach::LayerReach(const PlanShape& shape, int64_t window)
    : q_layout_(shape.layout.Groups(shape.heads)),
      kv_layout_(KvLayout(shape.layout, shape.cached_tokens).Groups(shape.heads)),
      window_(window),
      has_prefix_(shape.cached_tokens > 0),
      sees_all_(SeesAll(q_layout_, shape.cached_tokens, window, shape.kv_inner)),
      farthest_(static_cast<int>(
          std::min<int64_t>(q_layout_.ranks() - 1, (window + q_layout_.stripe() - 2) / q_layout_.stripe()))),
      mesh_(shape.tile, sees_all_ ? KvOrder::kRising : KvOrder::kFalling, shape.kv_inner) {}

// A query's chunk sees the stripes up to farthest_ behind its own. Those of a later chunk are of the round
// before.
bool LayerReach::Sees(int q_chunk, int kv_chunk) const {
  if (sees_all_) return true;
  const int ranks = mesh_.ranks();
  if ((q_chunk - kv_chunk + ranks) % ranks > farthest_) return false;
  const int64_t queries = q_layout_.ChunkTokens(q_chunk);
  if (kv_chunk <= q_chunk || has_prefix_) return queries > 0;
  return q_layout_.kind() == LayoutKind::kStriped && queries > q_layout_.stripe();
}

// The KV chunk `hop` behind is the nearest that the hop-th rank computes with.
bool LayerReach::QReaches(int q_chunk, int hop) const {
  return Sees(q_chunk, (q_chunk - hop + mesh_.ranks()) % mesh_.ranks());
}

SlotRange LayerReach::KvReach(int kv_chunk, int hop) const {
  const SlotRange whole = {0, kv_layout_.ChunkTokens(kv_chunk)};
  if (sees_all_) return whole;
  const auto [a, b] = mesh_.tile();
  // The nearest queries are the first of the hop's Q group; behind the prompt's end, those of group 0, if the
  // chunk has yet to come there.
  const int own_group = kv_chunk / a, group = (own_group + hop) % b;
  const bool at_the_end = group > own_group && q_layout_.ChunkTokens(a * group) == 0;
  if (at_the_end && own_group == 0) return {};
  const int q_chunk = at_the_end ? 0 : a * group;
  if (!Sees(q_chunk, kv_chunk)) return {};
  if (q_layout_.kind() == LayoutKind::kStriped) return whole;
  const int64_t first_seen = (q_chunk - kv_chunk) * q_layout_.stripe() - window_ + 1;
  return {std::max<int64_t>(0, first_seen), whole.end};
}

int64_t LayerReach::LargestQ(int hop) const {
  if (sees_all_) return q_layout_.LargestChunkTokens();
  if (hop > farthest_) return 0;
  if (q_layout_.kind() == LayoutKind::kStriped) return q_layout_.LargestChunkTokens();
  return q_layout_.ChunkTokens(hop);  // what is in front of it meets no keys
}

int64_t LayerReach::LargestKv(int hop) const {
  if (sees_all_) return kv_layout_.LargestChunkTokens();
  const int a = mesh_.tile().a;
  const int nearest = a - 1;  // the first chunk that is as near as any to those who see it
  if (q_layout_.kind() == LayoutKind::kContiguous) return KvReach(nearest, hop).slots();
  return hop * a - nearest <= farthest_ ? kv_layout_.LargestChunkTokens() : 0;
}

int64_t LayerReach::MostCutKeys() const {
  if (sees_all_ || q_layout_.kind() == LayoutKind::kStriped) return 0;
  return std::min(window_, q_layout_.stripe()) - 1;
}

LayerPairs::LayerPairs(const LayerReach& reach, int64_t cached_tokens, int64_t window)
    : reach_(reach),
      cached_tokens_(cached_tokens),
      window_(window),
      alike_(reach.sees_all()),
      stripe_(reach.q_layout().stripe()),
      whole_chunks_(reach.q_layout().tokens() / stripe_),
      rest_(reach.q_layout().tokens() % stripe_) {}

// Striped and zigzag layouts deal every rank the same share of the prompt's pairs (zigzag under a window only
// about: its average counts). Under the contiguous one, every step has some rank at a block that sees all.
BlockPairs LayerPairs::Alike() const {
  const TokenLayout& layout = reach_.q_layout();
  const auto ranks = static_cast<double>(layout.ranks()), tokens = static_cast<double>(layout.tokens());
  const auto chunk = static_cast<double>(layout.LargestChunkTokens());
  const double pairs = PairsAfter(layout, cached_tokens_, window_);
  BlockPairs block = {.largest_rows = chunk, .mean = pairs / (ranks * ranks), .mean_rows = tokens / ranks};
  const auto kv_chunk = static_cast<double>(reach_.kv_layout().LargestChunkTokens());
  block.largest =
      layout.kind() == LayoutKind::kContiguous && layout.ranks() > 1
          ? chunk * kv_chunk
          : pairs * (chunk / tokens) * (kv_chunk / static_cast<double>(reach_.kv_layout().tokens()));
  return block;
}

// Visible pairs of a chunk of queries with the keys of the chunk that is `back` chunks before it.
double LayerPairs::ChunkPairs(int64_t back, bool ragged) const {
  const int64_t queries = ragged ? rest_ : stripe_;
  return BandPairs(back * stripe_, queries, back == 0 ? queries : stripe_, window_);
}

// The ranks of a Q group compute the block (u, v) with keys of u + a·v chunks back, but for the last u of
// them, whose Q#u is of the group's begin: a chunks less, and round the ring from there.
BlockPairs LayerPairs::Of(int u, int v) const {
  if (alike_) return Alike();
  const auto [a, b] = reach_.mesh().tile();
  const int ranks = a * b;
  BlockPairs block;
  const auto add = [&](double pairs, double rows, double share) {
    if (pairs > block.largest) {
      block.largest = pairs;
      block.largest_rows = rows;
    }
    block.mean += pairs * share;
    block.mean_rows += rows * share;
  };
  if (reach_.q_layout().kind() == LayoutKind::kStriped) {
    const auto rows = static_cast<double>(reach_.q_layout().LargestChunkTokens());
    const double mean_rows = static_cast<double>(reach_.q_layout().tokens()) / ranks;
    const auto stripes = [&](int back, double share, double wrapped) {
      const double pairs = BandPairs(back * stripe_, stripe_, stripe_, window_);
      if (pairs == 0) return;
      // Queries of the first round see nothing of chunks in front of theirs.
      const double seen = mean_rows / static_cast<double>(stripe_) - (cached_tokens_ == 0 ? wrapped : 0);
      // No rank waits for those that have theirs a column earlier or later: all have as many.
      block.largest += share * pairs * rows / static_cast<double>(stripe_);
      block.largest_rows += share * rows;
      block.mean += share * pairs * std::max(0.0, seen);
      block.mean_rows += share * mean_rows;
    };
    const auto share = [a = a](int of) { return static_cast<double>(of) / a; };
    const double wrapped = static_cast<double>(v) / b;
    stripes(u + a * v, share(a - u), wrapped);
    if (u > 0) stripes(v > 0 ? u + a * (v - 1) : ranks - a + u, share(u), v > 0 ? wrapped : 1);
    return block;
  }
  const int64_t groups = whole_chunks_ / a, first_left = whole_chunks_ % a;
  const auto chunks = [&](int64_t back, int64_t whole, bool with_rest) {
    if (whole > 0) {
      const double pairs = ChunkPairs(back, false);
      add(pairs, pairs == 0 ? 0 : static_cast<double>(stripe_), static_cast<double>(whole) / ranks);
    }
    if (with_rest && rest_ > 0) {
      const double pairs = ChunkPairs(back, true);
      add(pairs, pairs == 0 ? 0 : static_cast<double>(rest_), 1.0 / ranks);
    }
  };
  const int64_t groups_behind = std::max<int64_t>(0, groups - v);  // whole groups with keys v groups back
  const bool left_over = groups >= v;  // the group that is not whole has keys v groups back, too
  chunks(u + int64_t{a} * v, groups_behind * (a - u) + (left_over ? std::max<int64_t>(0, first_left - u) : 0),
         left_over && first_left >= u);
  if (u > 0 && v > 0) {
    chunks(u + int64_t{a} * (v - 1), groups_behind * u + (left_over ? std::min<int64_t>(first_left, u) : 0),
           left_over && first_left < u);
  }
  return block;
}

BlockPairs LayerPairs::LeastOfTile() const {
  const TokenLayout& layout = reach_.q_layout();
  const auto [a, b] = reach_.mesh().tile();
  BlockPairs tile;
  if (alike_ || layout.kind() == LayoutKind::kStriped) {
    for (int u = 0; u < a; ++u) {
      for (int v = 0; v < b; ++v) {
        const BlockPairs block = Of(u, v);
        tile.largest += block.largest;
        tile.mean += block.mean;
      }
    }
    return tile;
  }
  // Contiguous chunks: the mean over the ranks of the last whole Q group.
  const int64_t end = whole_chunks_ / a * a * stripe_;
  if (end > 0) {
    tile.largest = (VisiblePairs(end, window_) - VisiblePairs(end - a * stripe_, window_)) / a;
  }
  tile.mean = PairsAfter(layout, 0, window_) / layout.ranks();
  return tile;
}

}  // namespace meshfill
