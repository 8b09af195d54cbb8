// Valid schedules of no particular merit: at each step a random communication that may start, or none, and a
// random choice of the blocks that are ready; at its end some of what is under way ends. They reach orders
// that no algorithm here takes.
#ifndef MESHFILL_TESTS_ENGINE_SCHEDULE_RANDOM_SCHEDULE_H_
#define MESHFILL_TESTS_ENGINE_SCHEDULE_RANDOM_SCHEDULE_H_

#include <algorithm>
#include <array>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "engine/schedule/schedule.h"
#include "tests/engine/random_seed.h"

namespace meshfill {

// 0, or ranks of an inner ring of a double ring of the tile's, if there are any.
inline int DrawKvInner(std::mt19937_64& random, Tile tile) {
  std::vector<int> possible = {0};
  for (int ranks = 2; ranks < tile.b; ++ranks) {
    if (tile.b % ranks == 0) possible.push_back(ranks);
  }
  return possible[Draw<size_t>(random, 0, possible.size() - 1)];
}

inline Schedule RandomSchedule(std::mt19937_64& random, Tile tile, int kv_inner = 0) {
  Schedule schedule = {.tile = tile, .steps = {}, .kv_inner = kv_inner};
  std::vector<BlockIndex> missing;
  for (int u = 0; u < tile.a; ++u) {
    for (int v = 0; v < tile.b; ++v) missing.push_back({.u = u, .v = v});
  }
  // Of each round of a double ring but the last: the first chunk of the next one, then those of its own.
  const int round = kv_inner == 0 ? tile.b : kv_inner;
  std::vector<std::pair<int, int>> kv_hops;  // KV#v that is sent, and what comes for it
  for (int first = 0; first < tile.b; first += round) {
    if (first + round < tile.b) kv_hops.emplace_back(first, first + round);
    for (int v = first; v < first + round - 1; ++v) kv_hops.emplace_back(v, v + 1);
  }
  int q = 0;  // that have ended
  int o = 0;
  size_t kv = 0;  // that have started
  std::vector<bool> has_kv(tile.b, false);
  has_kv[0] = true;
  struct UnderWay {
    std::optional<size_t> step;  // that started what is under way
    int kv = 0;                  // what comes
  };
  std::array<UnderWay, kRings> rings;
  const auto of = [&](Ring ring) -> UnderWay& { return rings[static_cast<int>(ring)]; };
  UnderWay& along_q = of(Ring::kQ);
  const auto of_next_kv = [&]() -> UnderWay& {
    const auto [sent, received] = kv_hops[kv];
    return of(received == sent + 1 ? Ring::kKv : Ring::kKvOuter);
  };
  const auto end = [&](UnderWay& ring) {
    Step& step = schedule.steps[*ring.step];
    step.spans = static_cast<int>(schedule.steps.size() - *ring.step);
    q += step.comm == Traffic::kQ;
    o += step.comm == Traffic::kO;
    if (step.comm == Traffic::kKv) has_kv[ring.kv] = true;
    ring.step.reset();
  };
  const auto any_under_way = [&] {
    return std::any_of(rings.begin(), rings.end(),
                       [](const UnderWay& ring) { return ring.step.has_value(); });
  };
  while (!missing.empty() || q < tile.a - 1 || kv < kv_hops.size() || o < tile.a - 1 || any_under_way()) {
    std::vector<std::optional<Traffic>> startable = {std::nullopt};
    if (q < tile.a - 1 && !along_q.step.has_value()) startable.push_back(Traffic::kQ);
    if (kv < kv_hops.size() && !of_next_kv().step.has_value() && has_kv[kv_hops[kv].first]) {
      startable.push_back(Traffic::kKv);
    }
    const bool row_whole =
        std::none_of(missing.begin(), missing.end(), [&](BlockIndex b) { return b.u == o + 1; });
    if (o < tile.a - 1 && row_whole && !along_q.step.has_value()) startable.push_back(Traffic::kO);
    Step step = {.comm = startable[Draw<size_t>(random, 0, startable.size() - 1)], .blocks = {}};

    std::shuffle(missing.begin(), missing.end(), random);
    const size_t most_blocks = Draw<size_t>(random, 0, 3);
    std::erase_if(missing, [&](BlockIndex block) {
      if (block.u > q || !has_kv[block.v] || step.blocks.size() >= most_blocks) return false;
      step.blocks.push_back(block);
      return true;
    });
    if (step.comm == Traffic::kKv) {
      of_next_kv() = {.step = schedule.steps.size(), .kv = kv_hops[kv].second};
      ++kv;
    } else if (step.comm.has_value()) {
      along_q.step = schedule.steps.size();
    }
    if (step != Step{}) schedule.steps.push_back(std::move(step));
    for (UnderWay& ring : rings) {
      if (ring.step.has_value() && Draw(random, 0, 1) == 1) end(ring);
    }
  }
  return schedule;
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_SCHEDULE_RANDOM_SCHEDULE_H_
