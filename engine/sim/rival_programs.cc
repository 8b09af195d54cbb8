#include "engine/sim/rival_programs.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/sim/head_groups.h"

namespace meshfill::sim {
namespace {

// `from(i, y, x)` as a grid's rank, for every rank.
template <typename From>
std::vector<int> Peers(Grid grid, From from) {
  std::vector<int> peers(grid.ranks());
  for (int i = 0; i < grid.planes; ++i) {
    for (int y = 0; y < grid.rows; ++y) {
      for (int x = 0; x < grid.columns; ++x) peers[grid.Rank(i, y, x)] = from(i, y, x);
    }
  }
  return peers;
}

class DoubleRingBuilder {
 public:
  DoubleRingBuilder(const AttentionJob& job, const DoubleRing& ring, Pass pass)
      : ring_(ring),
        pass_(pass),
        groups_(job, ring.heads, ring.windows * ring.window),
        builder_(ring.ranks()),
        inner_from_(Peers(
            ring.grid(), [&](int i, int y, int x) { return ring.grid().Rank(i, y, (x + 1) % ring.window); })),
        outer_from_(Peers(ring.grid(), [&](int i, int y, int x) {
          return ring.grid().Rank(i, (y + 1) % ring.windows, x);
        })) {}

  RankProgram Run() && {
    const ChunkBytes& chunk = groups_.chunk();
    if (pass_ == Pass::kForward) {
      groups_.Exchange(builder_, {chunk.q, groups_.k_bytes(), groups_.k_bytes()});
      Round(chunk.kv, 0, chunk.q + chunk.o_state);
      groups_.Exchange(builder_, {chunk.o_finished});
      return std::move(builder_).Build();
    }
    groups_.Exchange(builder_, {chunk.odoq, groups_.k_bytes(), groups_.k_bytes()});
    if (ring_.moves_queries) {
      Round(chunk.odoq, chunk.dq, chunk.kv + chunk.dkv);
    } else {
      Round(chunk.kv, chunk.dkv, chunk.odoq + chunk.dq);
    }
    groups_.Exchange(builder_, {chunk.dq, chunk.dkv});
    return std::move(builder_).Build();
  }

 private:
  // `moving` bytes go round, `gradient` bytes follow one block behind (0: none), `resident` bytes stay.
  void Round(int64_t moving, int64_t gradient, int64_t resident) {
    const Traffic data = ring_.moves_queries && pass_ == Pass::kBackward ? Traffic::kQ : Traffic::kKv;
    const Traffic returned = data == Traffic::kQ ? Traffic::kDq : Traffic::kDkv;
    const int inner = builder_.AddChannel(data, inner_from_);
    const int outer = builder_.AddChannel(data, outer_from_);
    const int inner_gradient = builder_.AddChannel(returned, inner_from_);
    const int outer_gradient = builder_.AddChannel(returned, outer_from_);
    builder_.Take(resident +
                  3 * (moving + gradient));  // in use, arriving from the window and from the next one
    int gradient_under_way = -1;
    for (int y = 0; y < ring_.windows; ++y) {
      const bool last_window = y == ring_.windows - 1;
      if (!last_window) builder_.Start(outer, moving);
      for (int x = 0; x < ring_.window; ++x) {
        const bool last_place = x == ring_.window - 1;
        if (!last_place) builder_.Start(inner, moving);
        builder_.Compute(groups_.BlockFlops(pass_), 1);
        if (gradient > 0) {
          if (gradient_under_way >= 0) builder_.Wait(gradient_under_way);
          gradient_under_way = HopOfGradient(last_place, last_window, inner_gradient, outer_gradient);
          if (gradient_under_way >= 0) builder_.Start(gradient_under_way, gradient);
        }
        if (!last_place) builder_.Wait(inner);
      }
      if (!last_window) builder_.Wait(outer);
    }
    if (gradient_under_way >= 0) builder_.Wait(gradient_under_way);
  }

  // Where the gradient of the block just computed goes: on with its chunk, at last home. -1: it is there.
  int HopOfGradient(bool last_place, bool last_window, int inner, int outer) const {
    if (!last_place) return inner;
    if (!last_window || ring_.windows > 1) return outer;
    return ring_.window > 1 ? inner : -1;
  }

  const DoubleRing ring_;
  const Pass pass_;
  const HeadGroups groups_;
  ProgramBuilder builder_;
  const std::vector<int> inner_from_;
  const std::vector<int> outer_from_;
};

// Ring steps along a channel with nothing to overlap: an all-gather or a reduce-scatter of `count` chunks.
void Collective(ProgramBuilder& builder, int channel, int64_t bytes, int count) {
  for (int step = 1; step < count; ++step) {
    builder.Start(channel, bytes);
    builder.Wait(channel);
  }
}

}  // namespace

RankProgram DoubleRingProgram(const AttentionJob& job, const DoubleRing& ring, Pass pass) {
  return DoubleRingBuilder(job, ring, pass).Run();
}

RankProgram StarTrailProgram(const AttentionJob& job, const StarTrail& star, Pass pass) {
  const Grid grid = star.grid();
  const int team = star.team;
  const int hops = grid.rows;
  const HeadGroups groups(job, 1, star.ranks);
  const ChunkBytes& chunk = groups.chunk();
  ProgramBuilder builder(star.ranks);
  const bool forward = pass == Pass::kForward;
  const double flops = groups.BlockFlops(pass) * team * team;

  const auto in_team = Peers(grid, [&](int i, int y, int x) { return grid.Rank(i, y, (x + 1) % team); });
  const auto in_ring = Peers(grid, [&](int i, int y, int x) { return grid.Rank(i, (y + 1) % hops, x); });
  // Place x of every team works on the KV of the teams in sub-ring x: place i of team (x, y) has it for team
  // (i, y).
  const auto start = Peers(grid, [&](int i, int y, int x) { return grid.Rank(x, y, i); });

  builder.Take(team * ((forward ? chunk.q + chunk.o_state : chunk.odoq + chunk.dq) + 2 * chunk.kv) +
               (forward ? 0 : 2 * team * chunk.dkv));
  const int gather = builder.AddChannel(Traffic::kGather, in_team);
  Collective(builder, gather, (forward ? chunk.q : chunk.odoq) + chunk.kv, team);
  const int place = builder.AddChannel(Traffic::kGather, start);
  builder.Start(place, team * chunk.kv);
  builder.Wait(place);
  const int ring = builder.AddChannel(Traffic::kKv, in_ring);
  for (int hop = 0; hop < hops; ++hop) {
    if (hop + 1 < hops) builder.Start(ring, team * chunk.kv);
    builder.Compute(flops, team * team);
    if (hop + 1 < hops) builder.Wait(ring);
  }
  if (forward) {
    Collective(builder, gather, chunk.o, team);
    return std::move(builder).Build();
  }
  const int gradients = builder.AddChannel(Traffic::kDkv, in_ring);
  Collective(builder, gradients, team * chunk.dkv, hops);
  builder.Start(place, team * chunk.dkv);
  builder.Wait(place);
  Collective(builder, gather, chunk.dkv + chunk.dq, team);
  return std::move(builder).Build();
}

RankProgram TwoWayRingProgram(const AttentionJob& job, int ranks) {
  const HeadGroups groups(job, 1, ranks);
  const ChunkBytes& chunk = groups.chunk();
  const Grid ring{.columns = ranks};
  ProgramBuilder builder(ranks);
  const auto from = [&](int shift) {
    return Peers(ring, [&](int, int, int x) { return (x + shift + ranks) % ranks; });
  };
  const int ahead = builder.AddChannel(Traffic::kKv, from(1));
  const int behind = builder.AddChannel(Traffic::kKv, from(-1));
  // In use and arriving, of both ways.
  builder.Take(chunk.q + chunk.o_state + std::min(ranks, 4) * chunk.kv);
  int here = 1;  // chunks to compute with
  for (int left = ranks - 1; left > 0;) {
    const bool both = left > 1;
    builder.Start(ahead, chunk.kv);
    if (both) builder.Start(behind, chunk.kv);
    builder.Compute(here * groups.BlockFlops(Pass::kForward), here);
    builder.Wait(ahead);
    if (both) builder.Wait(behind);
    here = both ? 2 : 1;
    left -= here;
  }
  builder.Compute(here * groups.BlockFlops(Pass::kForward), here);
  return std::move(builder).Build();
}

RankProgram TensorParallelProgram(const AttentionJob& job, int ranks) {
  const HeadGroups groups(job, 1, ranks);
  const Grid line{.columns = ranks};
  ProgramBuilder builder(ranks);
  const int channel =
      builder.AddChannel(Traffic::kGather, Peers(line, [&](int, int, int x) { return (x + 1) % ranks; }));
  builder.Take(ranks * groups.chunk().q + groups.chunk().q + groups.chunk().kv + groups.chunk().o_state);
  Collective(builder, channel, groups.chunk().q, ranks);
  builder.Compute(job.Flops(Pass::kForward) / ranks, 1);
  Collective(builder, channel, groups.chunk().o_finished, ranks);
  return std::move(builder).Build();
}

}  // namespace meshfill::sim
