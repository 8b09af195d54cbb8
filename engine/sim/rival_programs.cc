#include "engine/sim/rival_programs.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/sim/head_groups.h"
#include "engine/sim/mesh_rings.h"

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
        outer_from_(
            Peers(ring.grid(),
                  [&](int i, int y, int x) { return ring.grid().Rank(i, (y + 1) % ring.windows, x); })),
        next_window_from_(Peers(ring.grid(), [&](int i, int y, int x) {
          return ring.grid().Rank(i, (y + 1) % ring.windows, (x + 1) % ring.window);
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
    const int outer_gradient = builder_.AddChannel(returned, next_window_from_);
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
  const std::vector<int> next_window_from_;  // the gradients of a window's last place
};

// Ring steps along a channel with nothing to overlap: an all-gather or a reduce-scatter of `count` chunks.
void Collective(ProgramBuilder& builder, int channel, int64_t bytes, int count) {
  for (int step = 1; step < count; ++step) {
    builder.Start(channel, bytes);
    builder.Wait(channel);
  }
}

// One of a ring's hops on each channel, which share the bytes, and what is computed meanwhile.
template <typename Compute>
void Hop(ProgramBuilder& builder, const std::vector<int>& channels, int64_t bytes, Compute compute) {
  const auto rings = static_cast<int64_t>(channels.size());
  for (int channel : channels) builder.Start(channel, (bytes + rings - 1) / rings);
  compute();
  for (int channel : channels) builder.Wait(channel);
}

std::vector<int> RingChannels(ProgramBuilder& builder, const HeadGroups& groups, const ParallelRings& rings) {
  std::vector<int> channels;
  for (int ring = 0; ring < rings.rings; ++ring) {
    const auto place = [&](int position) {
      position %= rings.places;
      return position / rings.span * rings.span + (position + ring) % rings.span;
    };
    std::vector<int> from(rings.places);
    for (int position = 0; position < rings.places; ++position) from[place(position)] = place(position + 1);
    channels.push_back(builder.AddChannel(Traffic::kKv, groups.InEveryMesh(from)));
  }
  return channels;
}

// A block of each KV chunk, while the next one is under way.
void PassKvRound(ProgramBuilder& builder, const HeadGroups& groups, const ParallelRings& rings) {
  const std::vector<int> channels = RingChannels(builder, groups, rings);
  const auto block = [&] { builder.Compute(groups.BlockFlops(Pass::kForward), 1); };
  for (int hop = 1; hop < rings.places; ++hop) Hop(builder, channels, groups.chunk().kv, block);
  block();
}

}  // namespace

RankProgram DoubleRingProgram(const AttentionJob& job, const DoubleRing& ring, Pass pass) {
  return DoubleRingBuilder(job, ring, pass).Run();
}

RankProgram StarTrailProgram(const AttentionJob& job, const StarTrail& star, Pass pass) {
  const Grid grid = star.star();
  const int team = star.team;
  const int hops = grid.rows;
  const HeadGroups groups(job, star.heads, star.ranks);
  const ChunkBytes& chunk = groups.chunk();
  ProgramBuilder builder(star.all_ranks());
  const bool forward = pass == Pass::kForward;
  const double flops = groups.BlockFlops(pass) * team * team;
  const auto peers = [&](auto from) { return groups.InEveryMesh(Peers(grid, from)); };
  const auto in_team = peers([&](int i, int y, int x) { return grid.Rank(i, y, (x + 1) % team); });
  const auto in_ring = peers([&](int i, int y, int x) { return grid.Rank(i, (y + 1) % hops, x); });
  // Place x of every team works on the KV of the teams in sub-ring x: place i of team (x, y) has it for team
  // (i, y).
  const auto start = peers([&](int i, int y, int x) { return grid.Rank(x, y, i); });

  groups.Exchange(builder, {forward ? chunk.q : chunk.odoq, groups.k_bytes(), groups.k_bytes()});
  builder.Take(team * ((forward ? chunk.q + chunk.o_state : chunk.odoq + chunk.dq) + 2 * chunk.kv) +
               (forward ? 0 : 2 * team * chunk.dkv));
  const int gather = builder.AddChannel(Traffic::kGather, in_team);
  Collective(builder, gather, (forward ? chunk.q : chunk.odoq) + chunk.kv, team);
  const int place = builder.AddChannel(Traffic::kGather, start);
  builder.Start(place, team * chunk.kv);
  builder.Wait(place);
  const int ring = builder.AddChannel(Traffic::kKv, in_ring);
  const int gradients = builder.AddChannel(Traffic::kDkv, in_ring);
  const bool returns = !forward && hops > 1;
  for (int hop = 0; hop < hops; ++hop) {
    if (hop + 1 < hops) builder.Start(ring, team * chunk.kv);
    builder.Compute(flops, 1);
    if (returns && hop > 0) builder.Wait(gradients);
    if (returns) builder.Start(gradients, team * chunk.dkv);  // on with its chunk, at last home
    if (hop + 1 < hops) builder.Wait(ring);
  }
  if (returns) builder.Wait(gradients);
  if (forward) {
    Collective(builder, gather, chunk.o, team);
    groups.Exchange(builder, {chunk.o_finished});
    return std::move(builder).Build();
  }
  builder.Start(place, team * chunk.dkv);
  builder.Wait(place);
  Collective(builder, gather, chunk.dkv + chunk.dq, team);
  groups.Exchange(builder, {chunk.dq, chunk.dkv});
  return std::move(builder).Build();
}

RankProgram ParallelRingsProgram(const AttentionJob& job, const ParallelRings& rings) {
  const HeadGroups groups(job, rings.heads, rings.places);
  const ChunkBytes& chunk = groups.chunk();
  ProgramBuilder builder(rings.ranks());
  groups.Exchange(builder, {chunk.q, groups.k_bytes(), groups.k_bytes()});
  builder.Take(chunk.q + chunk.o_state + std::min(rings.places, 2) * chunk.kv);
  PassKvRound(builder, groups, rings);
  groups.Exchange(builder, {chunk.o_finished});
  return std::move(builder).Build();
}

RankProgram Attention2dProgram(const AttentionJob& job, const Attention2d& attention) {
  const auto [a, b] = attention.tile;
  const HeadGroups groups(job, attention.heads, a * b);
  const ChunkBytes& chunk = groups.chunk();
  const MeshRings rings = MeshRingsOf(groups, attention.tile);
  ProgramBuilder builder(groups.ranks());
  groups.Exchange(builder, {chunk.q, groups.k_bytes(), groups.k_bytes()});
  builder.Take(a * (chunk.q + chunk.o_state) + (attention.overlaps ? std::min(b, 2) : b) * chunk.kv);
  const int q = builder.AddChannel(Traffic::kQ, rings.q_from);
  const int kv = builder.AddChannel(Traffic::kKv, rings.kv_from);
  const int o = builder.AddChannel(Traffic::kO, rings.q_from);
  for (int hop = 1; hop < std::max(a, b); ++hop) {
    const bool with_kv = !attention.overlaps && hop < b;
    if (hop < a) builder.Start(q, chunk.q);
    if (with_kv) builder.Start(kv, chunk.kv);
    if (hop < a) builder.Wait(q);
    if (with_kv) builder.Wait(kv);
  }
  const double flops = a * b * groups.BlockFlops(Pass::kForward);
  const int launches = attention.overlaps ? b : 1;
  for (int left = launches; left > 0; --left) {
    if (left > 1) builder.Start(kv, chunk.kv);
    builder.Compute(flops / launches, 1);
    if (left > 1) builder.Wait(kv);
  }
  Collective(builder, o, chunk.o, a);
  groups.Exchange(builder, {chunk.o_finished});
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
  // KV chunks in use and arriving, both ways.
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

RankProgram TensorContextProgram(const AttentionJob& job, const TensorContext& plan) {
  const HeadGroups groups(job, plan.tensor, plan.context.places);
  const ChunkBytes& chunk = groups.chunk();
  ProgramBuilder builder(groups.ranks());
  const Grid line{.planes = plan.tensor, .columns = plan.context.places};
  const int team = builder.AddChannel(Traffic::kGather, Peers(line, [&](int i, int, int x) {
                                        return line.Rank((i + 1) % plan.tensor, 0, x);
                                      }));
  builder.Take(plan.tensor * groups.share().q + chunk.q + chunk.o_state +
               std::min(plan.context.places, plan.gathers ? plan.context.places : 2) * chunk.kv);
  Collective(builder, team, groups.share().q, plan.tensor);
  if (plan.gathers) {
    const std::vector<int> channels = RingChannels(builder, groups, plan.context);
    for (int hop = 1; hop < plan.context.places; ++hop) Hop(builder, channels, chunk.kv, [] {});
    builder.Compute(job.Flops(Pass::kForward) / groups.ranks(), 1);
  } else {
    PassKvRound(builder, groups, plan.context);
  }
  Collective(builder, team, groups.share().o_finished, plan.tensor);
  return std::move(builder).Build();
}

}  // namespace meshfill::sim
