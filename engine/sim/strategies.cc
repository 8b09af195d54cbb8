#include "engine/sim/strategies.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/mesh/mesh.h"
#include "engine/mesh/placement.h"
#include "engine/sim/head_groups.h"
#include "engine/sim/lockstep.h"
#include "engine/sim/mesh_lanes.h"
#include "engine/sim/placed_mesh.h"
#include "engine/sim/rival_programs.h"
#include "kernels/return_if_error.h"

namespace meshfill::sim {
namespace {

constexpr std::array<StrategyKind, kStrategyKinds> kAllKinds = {
    StrategyKind::kRing,           StrategyKind::kPassQ,       StrategyKind::kPaperMesh,
    StrategyKind::kUlysses,        StrategyKind::kUsp,         StrategyKind::kBurst,
    StrategyKind::kLoongTrain,     StrategyKind::kStarTrail,   StrategyKind::kTwoWayRing,
    StrategyKind::kAllGather,      StrategyKind::kAttention2d, StrategyKind::kTasp,
    StrategyKind::kTensorParallel, StrategyKind::kPlanned,     StrategyKind::kPlannedLanes};

// One setting of a strategy.
struct Variant {
  std::string settings;
  Placement placement;
  RankProgram program;
  double lockstep_seconds = 0;
};

// The variants that the lockstep estimate finds fastest, fastest first; the first to come among equals.
class Shortlist {
 public:
  Shortlist(const Cluster& cluster, int size) : cluster_(cluster), size_(size) {}

  void Add(std::string settings, RankProgram program, Placement placement) {
    const double seconds = LockstepSeconds(program, placement, cluster_);
    const auto after = std::find_if(variants_.begin(), variants_.end(),
                                    [&](const Variant& other) { return seconds < other.lockstep_seconds; });
    if (after - variants_.begin() >= size_) return;
    variants_.insert(after, {.settings = std::move(settings),
                             .placement = std::move(placement),
                             .program = std::move(program),
                             .lockstep_seconds = seconds});
    if (static_cast<int>(variants_.size()) > size_) variants_.pop_back();
  }

  const std::vector<Variant>& variants() const { return variants_; }

 private:
  const Cluster& cluster_;
  const int size_;
  std::vector<Variant> variants_;
};

std::vector<int> DivisorsOf(int number) {
  std::vector<int> divisors;
  for (const Tile tile : TilesOf(number)) divisors.push_back(tile.a);
  return divisors;
}

class Variants {
 public:
  Variants(const AttentionJob& job, Pass pass, int ranks, const Cluster& cluster, Shortlist& shortlist)
      : job_(job), pass_(pass), ranks_(ranks), cluster_(cluster), shortlist_(shortlist) {}

  absl::Status AddAll(StrategyKind kind) {
    switch (kind) {
      case StrategyKind::kRing:
        AddMesh({.tile = {.a = 1, .b = ranks_}, .placement = RowFirst(ranks_)});
        break;
      case StrategyKind::kPassQ:
        AddMesh({.tile = {.a = ranks_, .b = 1}, .placement = RowFirst(ranks_)});
        break;
      case StrategyKind::kPaperMesh:
        AddMesh(PaperMesh(job_, pass_, ranks_, cluster_), Profile::kIsolated);
        break;
      case StrategyKind::kUlysses:
        if (CheckHeadGroups(job_, ranks_).ok()) {
          AddMesh({.heads = ranks_, .tile = {}, .placement = RowFirst(ranks_)});
        }
        break;
      case StrategyKind::kUsp:
        for (int heads : HeadGroupCounts()) {
          AddPlacedMeshes(heads, {.a = 1, .b = ranks_ / heads});
          if (pass_ == Pass::kBackward) AddDoubleRing({.heads = heads, .window = ranks_ / heads});
        }
        break;
      case StrategyKind::kBurst:
        AddDoubleRings(1, /*moves_queries=*/true);
        break;
      case StrategyKind::kLoongTrain:
        for (int heads : HeadGroupCounts()) AddDoubleRings(heads, /*moves_queries=*/false);
        break;
      case StrategyKind::kStarTrail:
        for (int heads : HeadGroupCounts()) AddStarTrails(heads);
        break;
      case StrategyKind::kTwoWayRing:
        if (pass_ == Pass::kForward) {
          shortlist_.Add("both ways", TwoWayRingProgram(job_, ranks_), RowFirst(ranks_));
        }
        break;
      case StrategyKind::kAllGather:
        AddTensorContexts(1);
        break;
      case StrategyKind::kAttention2d:
        for (int heads : HeadGroupCounts()) {
          for (const Tile tile : TilesOf(ranks_ / heads)) AddAttention2d(heads, tile);
        }
        break;
      case StrategyKind::kTasp:
        for (int heads : HeadGroupCounts()) {
          for (const ParallelRings& rings : RingsSideBySide(heads)) {
            AddForward(RingsText(rings), [&] { return ParallelRingsProgram(job_, rings); });
          }
        }
        break;
      case StrategyKind::kTensorParallel:
        for (int tensor : HeadGroupCounts()) {
          if (tensor > 1) AddTensorContexts(tensor);
        }
        break;
      case StrategyKind::kPlanned:
        if (pass_ == Pass::kForward) return AddPlan();
        for (int heads : HeadGroupCounts()) {
          for (const Tile tile : TilesOf(ranks_ / heads)) AddPlacedMeshes(heads, tile);
        }
        break;
      case StrategyKind::kPlannedLanes:
        RETURN_IF_ERROR(AddAll(StrategyKind::kTwoWayRing));
        for (int heads : HeadGroupCounts()) {
          for (const Tile tile : TilesOf(ranks_ / heads)) AddPlacedLanes(heads, tile);
        }
        break;
    }
    return absl::OkStatus();
  }

 private:
  std::vector<int> HeadGroupCounts() const {
    std::vector<int> counts = DivisorsOf(ranks_);
    std::erase_if(counts, [this](int heads) { return !CheckHeadGroups(job_, heads).ok(); });
    return counts;
  }

  void AddMesh(PlacedMesh mesh, Profile profile = Profile::kShared) {
    std::string settings = mesh.DebugString();
    RankProgram program = MeshProgram(job_, pass_, mesh, cluster_, profile);
    shortlist_.Add(std::move(settings), std::move(program), std::move(mesh.placement));
  }

  // What the planner makes of the forward pass.
  absl::Status AddPlan() {
    ASSIGN_OR_RETURN(Plan plan, MakeForwardPlan(job_, ranks_, cluster_));
    RankProgram program = MeshForwardProgram(job_, plan.heads, plan.schedule);
    const PlacedMesh mesh{.heads = plan.heads,
                          .tile = plan.tile,
                          .placement = std::move(plan.placement),
                          .kv_inner = plan.kv_inner};
    shortlist_.Add(mesh.DebugString(), std::move(program), mesh.placement);
    return absl::OkStatus();
  }

  // Adds the mesh in every placement; backward, in the order that is fastest.
  void AddPlacedMeshes(int heads, Tile tile) {
    for (Placement& placement : PlacementsOf(MeshGrid(heads, tile), cluster_.gpus_per_node)) {
      PlacedMesh mesh{.heads = heads, .tile = tile, .placement = std::move(placement)};
      pass_ == Pass::kForward ? AddMesh(std::move(mesh)) : AddFastestBackward(std::move(mesh));
    }
  }

  // Algorithm 3 where no other order is faster.
  void AddFastestBackward(PlacedMesh mesh) {
    std::string settings = mesh.DebugString();
    RankProgram fastest = MeshProgram(job_, pass_, mesh, cluster_);
    double least = LockstepSeconds(fastest, mesh.placement, cluster_);
    const bool one_order = mesh.tile.a == 1 || mesh.tile.b == 1;
    for (const auto& [order, name] : {std::pair{BackwardOrder::kRowsFirst, ", rows first"},
                                      std::pair{BackwardOrder::kColumnsFirst, ", columns first"}}) {
      if (one_order) break;
      RankProgram program =
          MeshProgram(job_, pass_, mesh, cluster_, Profile::kShared, Buffers::kRelease, order);
      const double seconds = LockstepSeconds(program, mesh.placement, cluster_);
      if (seconds >= least) continue;
      least = seconds;
      fastest = std::move(program);
      settings = mesh.DebugString() + name;
    }
    shortlist_.Add(std::move(settings), std::move(fastest), std::move(mesh.placement));
  }

  void AddPlacedLanes(int heads, Tile tile) {
    for (Placement& placement : PlacementsOf(MeshGrid(heads, tile), cluster_.gpus_per_node)) {
      PlacedMesh mesh{.heads = heads, .tile = tile, .placement = std::move(placement)};
      std::string settings = mesh.DebugString();
      RankProgram program = MeshLanesProgram(job_, pass_, mesh, cluster_);
      shortlist_.Add(std::move(settings), std::move(program), std::move(mesh.placement));
    }
  }

  void AddDoubleRings(int heads, bool moves_queries) {
    for (int window : DivisorsOf(ranks_ / heads)) {
      AddDoubleRing({.heads = heads,
                     .windows = ranks_ / heads / window,
                     .window = window,
                     .moves_queries = moves_queries});
    }
  }

  // Adds the double ring in every placement.
  void AddDoubleRing(const DoubleRing& ring) {
    AddPlaced(ring.grid().DebugString(), ring.grid(), DoubleRingProgram(job_, ring, pass_));
  }

  void AddStarTrails(int heads) {
    const int ranks = ranks_ / heads;
    for (int team : DivisorsOf(ranks)) {
      if (ranks % (team * team) != 0) continue;
      const StarTrail star{.heads = heads, .ranks = ranks, .team = team};
      const std::string groups = heads == 1 ? "" : absl::StrCat(heads, "·");
      AddPlaced(absl::StrCat(groups, "C=", team), star.grid(), StarTrailProgram(job_, star, pass_));
    }
  }

  void AddAttention2d(int heads, Tile tile) {
    if (pass_ != Pass::kForward) return;
    for (const bool overlaps : {false, true}) {
      const std::string name =
          PlacedMesh{.heads = heads, .tile = tile, .placement = RowFirst(1)}.DebugString();
      AddPlaced(absl::StrCat(name, overlaps ? ", overlapped" : ""), MeshGrid(heads, tile),
                Attention2dProgram(job_, {.heads = heads, .tile = tile, .overlaps = overlaps}));
    }
  }

  void AddPlaced(const std::string& settings, Grid grid, const RankProgram& program) {
    for (Placement& placement : PlacementsOf(grid, cluster_.gpus_per_node)) {
      std::string placed = absl::StrCat(settings, ", ", placement.name);
      shortlist_.Add(std::move(placed), program, std::move(placement));
    }
  }

  // Rows of ranks in a node fill it; several leave it at different GPUs.
  std::vector<ParallelRings> RingsSideBySide(int heads) const {
    const int places = ranks_ / heads;
    int span = std::clamp(cluster_.gpus_per_node / heads, 1, places);
    while (places % span != 0) --span;
    std::vector<ParallelRings> all;
    for (int rings : DivisorsOf(span)) {
      all.push_back({.heads = heads, .places = places, .span = span, .rings = rings});
    }
    return all;
  }

  static std::string RingsText(const ParallelRings& rings) {
    return absl::StrCat(rings.heads, "·", rings.places, ", ", rings.rings,
                        rings.rings == 1 ? " ring" : " rings");
  }

  // Members of a team first, so that as many as possible are in a node.
  void AddTensorContexts(int tensor) {
    for (const ParallelRings& rings : RingsSideBySide(tensor)) {
      for (const bool gathers : {true, false}) {
        if (tensor == 1 && !gathers) continue;  // a ring, or TASP
        AddForward(absl::StrCat(RingsText(rings), gathers ? ", gathered" : ""), [&] {
          return TensorContextProgram(job_, {.tensor = tensor, .context = rings, .gathers = gathers});
        });
      }
    }
  }

  template <typename Program>
  void AddForward(std::string settings, const Program& program) {
    if (pass_ == Pass::kForward) shortlist_.Add(std::move(settings), program(), RowFirst(ranks_));
  }

  const AttentionJob& job_;
  const Pass pass_;
  const int ranks_;
  const Cluster& cluster_;
  Shortlist& shortlist_;
};

PassResult Summary(const Variant& variant, const Simulation& simulation) {
  PassResult result{.settings = variant.settings,
                    .seconds = simulation.seconds,
                    .sent_bytes = variant.program.sent_bytes,
                    .peak_bytes = variant.program.peak_bytes,
                    .program = variant.program,
                    .placement = variant.placement};
  const double ranks = static_cast<double>(simulation.ranks.size());
  for (const RankTimes& times : simulation.ranks) {
    result.compute_seconds += times.compute_seconds / ranks;
    for (Traffic traffic : kAllTraffics) {
      result.wait_seconds[traffic] += times.wait_seconds[traffic] / ranks;
    }
  }
  return result;
}

// Gives the planner with two communications at once what a plan with one has found faster, pass by pass.
void TakeFaster(std::vector<StrategyResult>& results) {
  for (StrategyResult& lanes : results) {
    if (lanes.kind != StrategyKind::kPlannedLanes) continue;
    for (const StrategyResult& other : results) {
      if (!IsRunnable(other.kind)) continue;
      for (size_t p = 0; p < other.passes.size(); ++p) {
        if (other.passes[p].seconds < lanes.passes[p].seconds) lanes.passes[p] = other.passes[p];
      }
    }
  }
}

}  // namespace

std::span<const StrategyKind, kStrategyKinds> AllStrategies() { return kAllKinds; }

const char* StrategyName(StrategyKind kind) {
  switch (kind) {
    case StrategyKind::kRing:
      return "ring";
    case StrategyKind::kPassQ:
      return "pass_q";
    case StrategyKind::kPaperMesh:
      return "paper_mesh";
    case StrategyKind::kUlysses:
      return "ulysses";
    case StrategyKind::kUsp:
      return "usp";
    case StrategyKind::kBurst:
      return "burst";
    case StrategyKind::kLoongTrain:
      return "loongtrain";
    case StrategyKind::kStarTrail:
      return "startrail";
    case StrategyKind::kTwoWayRing:
      return "two_way_ring";
    case StrategyKind::kAllGather:
      return "all_gather";
    case StrategyKind::kAttention2d:
      return "attention2d";
    case StrategyKind::kTasp:
      return "tasp";
    case StrategyKind::kTensorParallel:
      return "tensor_parallel";
    case StrategyKind::kPlanned:
      return "planned";
    case StrategyKind::kPlannedLanes:
      return "planned_lanes";
  }
  return "?";
}

absl::StatusOr<StrategyKind> ParseStrategy(std::string_view name) {
  std::string known;
  for (StrategyKind kind : kAllKinds) {
    if (name == StrategyName(kind)) return kind;
    absl::StrAppend(&known, known.empty() ? "" : ", ", StrategyName(kind));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", std::string(name), "\" is no strategy; there are ", known));
}

bool IsRunnable(StrategyKind kind) {
  switch (kind) {
    case StrategyKind::kRing:
    case StrategyKind::kPassQ:
    case StrategyKind::kPaperMesh:
    case StrategyKind::kUlysses:
    case StrategyKind::kUsp:
    case StrategyKind::kPlanned:
      return true;
    case StrategyKind::kBurst:
    case StrategyKind::kLoongTrain:
    case StrategyKind::kStarTrail:
    case StrategyKind::kTwoWayRing:
    case StrategyKind::kAllGather:
    case StrategyKind::kAttention2d:
    case StrategyKind::kTasp:
    case StrategyKind::kTensorParallel:
    case StrategyKind::kPlannedLanes:
      return false;
  }
  return false;
}

bool IsRival(StrategyKind kind) {
  return kind != StrategyKind::kPlanned && kind != StrategyKind::kPlannedLanes &&
         kind != StrategyKind::kTwoWayRing;
}

absl::StatusOr<std::optional<PassResult>> RunStrategy(StrategyKind kind, const AttentionJob& job, Pass pass,
                                                      int ranks, const Cluster& cluster, int shortlist_size) {
  RETURN_IF_ERROR(CheckJob(job));
  RETURN_IF_ERROR(CheckCluster(cluster));
  if (ranks < 1) return absl::InvalidArgumentError(absl::StrCat(ranks, " ranks; at least 1 is needed"));
  Shortlist shortlist(cluster, shortlist_size);
  RETURN_IF_ERROR(Variants(job, pass, ranks, cluster, shortlist).AddAll(kind));
  std::optional<PassResult> best;
  for (const Variant& variant : shortlist.variants()) {
    ASSIGN_OR_RETURN(Simulation simulation, Simulate(variant.program, variant.placement, cluster));
    if (!best.has_value() || simulation.seconds < best->seconds) best = Summary(variant, simulation);
  }
  return best;
}

absl::StatusOr<std::vector<StrategyResult>> CompareStrategies(std::span<const StrategyKind> kinds,
                                                              const AttentionJob& job,
                                                              std::span<const Pass> passes, int ranks,
                                                              const Cluster& cluster) {
  std::vector<StrategyResult> results;
  for (StrategyKind kind : kinds) {
    StrategyResult result{.kind = kind, .passes = {}};
    for (Pass pass : passes) {
      ASSIGN_OR_RETURN(std::optional<PassResult> one, RunStrategy(kind, job, pass, ranks, cluster));
      if (!one.has_value()) {
        result.passes.clear();
        break;
      }
      result.passes.push_back(*std::move(one));
    }
    results.push_back(std::move(result));
  }
  TakeFaster(results);
  return results;
}

}  // namespace meshfill::sim
