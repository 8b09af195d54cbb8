// Valid schedules of no particular merit: at each step a random communication that may start, or none, and a
// random choice of the blocks that are ready; at its end some of what is under way ends. They reach orders
// that no algorithm here takes.
#ifndef MESHFILL_TESTS_ENGINE_SCHEDULE_RANDOM_SCHEDULE_H_
#define MESHFILL_TESTS_ENGINE_SCHEDULE_RANDOM_SCHEDULE_H_

#include <algorithm>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "engine/schedule/schedule.h"
#include "tests/engine/random_seed.h"

namespace meshfill {

inline Schedule RandomSchedule(std::mt19937_64& random, Tile tile) {
  Schedule schedule = {.tile = tile, .steps = {}};
  std::vector<BlockIndex> missing;
  for (int u = 0; u < tile.a; ++u) {
    for (int v = 0; v < tile.b; ++v) missing.push_back({.u = u, .v = v});
  }
  int q = 0;  // that have ended
  int kv = 0;
  int o = 0;
  std::optional<size_t> along_q, along_kv;  // the step that started what is under way
  const auto end = [&](std::optional<size_t>& ring) {
    Step& step = schedule.steps[*ring];
    step.spans = static_cast<int>(schedule.steps.size() - *ring);
    q += step.comm == Traffic::kQ;
    kv += step.comm == Traffic::kKv;
    o += step.comm == Traffic::kO;
    ring.reset();
  };
  while (!missing.empty() || q < tile.a - 1 || kv < tile.b - 1 || o < tile.a - 1) {
    std::vector<std::optional<Traffic>> startable = {std::nullopt};
    if (q < tile.a - 1 && !along_q.has_value()) startable.push_back(Traffic::kQ);
    if (kv < tile.b - 1 && !along_kv.has_value()) startable.push_back(Traffic::kKv);
    const bool row_whole =
        std::none_of(missing.begin(), missing.end(), [&](BlockIndex b) { return b.u == o + 1; });
    if (o < tile.a - 1 && row_whole && !along_q.has_value()) startable.push_back(Traffic::kO);
    Step step = {.comm = startable[Draw<size_t>(random, 0, startable.size() - 1)], .blocks = {}};

    std::shuffle(missing.begin(), missing.end(), random);
    const size_t most_blocks = Draw<size_t>(random, 0, 3);
    std::erase_if(missing, [&](BlockIndex block) {
      if (block.u > q || block.v > kv || step.blocks.size() >= most_blocks) return false;
      step.blocks.push_back(block);
      return true;
    });
    if (step.comm.has_value()) (step.comm == Traffic::kKv ? along_kv : along_q) = schedule.steps.size();
    if (step != Step{}) schedule.steps.push_back(std::move(step));
    for (std::optional<size_t>* const ring : {&along_q, &along_kv}) {
      if (ring->has_value() && Draw(random, 0, 1) == 1) end(*ring);
    }
  }
  return schedule;
}

}  // namespace meshfill

#endif  // MESHFILL_TESTS_ENGINE_SCHEDULE_RANDOM_SCHEDULE_H_
