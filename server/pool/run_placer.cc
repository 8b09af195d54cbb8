#include "server/pool/run_placer.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/plan/short_room.h"
#include "kernels/return_if_error.h"
#include "server/pool/offered_speed.h"
#include "server/pool/pool_planner.h"

namespace meshfill {
namespace {

// Who has ranks in a new run by this plan.
std::vector<LeaderActions::Connection> Seated(const Plan& plan, const HeldRuns::Workers& workers) {
  std::vector<LeaderActions::Connection> seated;
  for (const SeatsOfWorker& seats : SeatWorkers(workers, plan.ranks())) {
    seated.push_back(seats.worker->connection);
  }
  return seated;
}

void SetShortRoom(PoolCapacity& capacity, int64_t rank_bytes) {
  capacity.short_rank_bytes = rank_bytes;
  for (PoolCapacity& part : capacity.faster_parts) part.short_rank_bytes = rank_bytes;
}

}  // namespace

RunPlacer::RunPlacer(PoolPlanner planner, const Membership& members, const LinkSurvey& survey,
                     const LiveRuns& live, KvDirectory& kv)
    : planner_(std::move(planner)), members_(members), survey_(survey), live_(live), kv_(kv) {}

absl::StatusOr<std::optional<PlacedRun>> RunPlacer::Place(RunId run, LiveRequest& live) {
  if (live.pieces.has_value()) return PlaceNextPiece(run, live);
  if (live.pack.has_value()) return PlaceInPack(run, live);
  KvSlabs prefix = kv_.FindPrefix(live.request.options);
  if (live.request.options.submeshes > 1) {
    if (std::optional<PlacedRun> planned = PlaceOnSubmesh(run, live, prefix)) return planned;
    prefix = kv_.FindPrefix(live.request.options);
  }
  absl::StatusOr<std::optional<PlacedRun>> planned = PlaceBehind(run, live, prefix);
  const bool was_behind = prefix.tokens() > 0;
  prefix = {};  // let go: others may need its room
  if (absl::IsResourceExhausted(planned.status()) && was_behind) return PlaceBehind(run, live, prefix);
  return planned;
}

std::optional<PlacedRun> RunPlacer::PlaceOnSubmesh(RunId run, LiveRequest& live, KvSlabs& prefix) {
  for (HeldRuns::Workers& mesh : SubmeshesFor(live, prefix)) {
    absl::StatusOr<PlanChoice> choice = PlanOn(mesh, live, kv_.CanFollow(prefix, mesh) ? prefix : KvSlabs());
    if (!choice.ok() || !choice->pieces.empty()) continue;
    auto planned = Begin(run, live, *std::move(choice), prefix, std::move(mesh));
    if (planned.ok() && planned->has_value()) return *std::move(planned);
  }
  return std::nullopt;
}

absl::StatusOr<std::optional<PlacedRun>> RunPlacer::PlaceBehind(RunId run, LiveRequest& live,
                                                                KvSlabs& prefix) {
  HeldRuns::Workers workers = members_.ByPlace();
  absl::StatusOr<PlanChoice> choice =
      PlanOn(workers, live, kv_.CanFollow(prefix, workers) ? prefix : KvSlabs());
  if (HeldRuns::Workers holders = HoldersElsewhere(prefix, workers); !holders.empty()) {
    if (absl::StatusOr<PlanChoice> there = PlanOn(holders, live, prefix); IsFaster(there, choice)) {
      choice = std::move(there);
      workers = std::move(holders);
    }
  }
  RETURN_IF_ERROR(choice.status());
  const bool in_pieces = !choice->pieces.empty();
  auto begun = Begin(run, live, *std::move(choice), prefix, workers);
  if (!in_pieces || !absl::IsResourceExhausted(begun.status())) return begun;
  // No room for K and V between the pieces: whole it needs none, but may leave no memory to short ones.
  PoolCapacity capacity = CapacityOn(workers);
  SetShortRoom(capacity, 0);
  choice = planner_(capacity, std::ssize(live.request.tokens), live.request.options,
                    KvDirectory::Describe(prefix));
  if (!choice.ok() || !choice->pieces.empty()) return begun;
  return Begin(run, live, *std::move(choice), prefix, std::move(workers));
}

absl::StatusOr<std::optional<PlacedRun>> RunPlacer::Begin(RunId run, LiveRequest& live, PlanChoice choice,
                                                          KvSlabs& prefix, HeldRuns::Workers workers) {
  const bool shares_weights = choice.weights.mode == WeightMode::kSharded;
  std::optional<PromptPieces> pieces;
  if (!choice.pieces.empty()) {
    std::vector<LeaderActions::Connection> seated = Seated(choice.plan, workers);
    pieces.emplace(std::move(choice), std::move(seated));
  }
  Plan plan = pieces.has_value() ? pieces->plan() : std::move(choice.plan);
  if (plan.cached_tokens == 0) prefix = {};
  if (!HasRoom(plan, workers, shares_weights)) return std::nullopt;
  const KvDirectory::Piece piece = {.first = true,
                                    .tokens_ahead = pieces.has_value() ? pieces->tokens_ahead() : 0};
  ASSIGN_OR_RETURN(KvDirectory::RunKv kv,
                   kv_.BeginRun(run, live.request.options, prefix, piece, plan, workers));
  live.pieces = std::move(pieces);
  if (live.pieces.has_value()) live.pieces->HoldAhead(std::move(kv.ahead));
  return PlacedRun{.workers = std::move(workers),
                   .plan = std::move(plan),
                   .shares_weights = shares_weights,
                   .kv = std::move(kv)};
}

absl::StatusOr<std::optional<PlacedRun>> RunPlacer::PlaceNextPiece(RunId run, LiveRequest& live) {
  PromptPieces& pieces = *live.pieces;
  const HeldRuns::Workers workers = WorkersFor(live);
  Plan plan = pieces.plan();
  if (!HasRoom(plan, workers, pieces.shares_weights())) return std::nullopt;
  pieces.HoldAhead(nullptr);
  const KvDirectory::Piece piece = {.first = false, .tokens_ahead = pieces.tokens_ahead()};
  ASSIGN_OR_RETURN(KvDirectory::RunKv kv,
                   kv_.BeginRun(run, live.request.options, pieces.before(), piece, plan, workers));
  pieces.HoldAhead(std::move(kv.ahead));
  return PlacedRun{.workers = workers,
                   .plan = std::move(plan),
                   .shares_weights = pieces.shares_weights(),
                   .kv = std::move(kv)};
}

absl::StatusOr<std::optional<PlacedRun>> RunPlacer::PlaceInPack(RunId run, LiveRequest& live) {
  const auto worker = members_.all().find(live.pack->worker);
  if (worker == members_.all().end()) return absl::FailedPreconditionError("its worker is gone");
  const HeldRuns::Workers only = {&worker->second};
  ASSIGN_OR_RETURN(PlanChoice choice, planner_(OneRankOf(CapacityOn(only)), std::ssize(live.request.tokens),
                                               live.request.options, CachedPrefix()));
  if (!choice.pieces.empty()) return absl::FailedPreconditionError("it is too long to share a pass");
  // A rank that computes all of them stands still no longer than the pass takes.
  Prediction& predicted = choice.plan.predicted;
  predicted.compute_seconds = std::max(predicted.compute_seconds, live.pack->seconds);
  predicted.seconds = live.pack->seconds;
  KvSlabs no_prefix;
  return Begin(run, live, std::move(choice), no_prefix, only);
}

std::optional<std::pair<LeaderActions::Connection, int>> RunPlacer::PlaceOfRank(int rank) const {
  for (const Membership::Worker* worker : members_.ByPlace()) {
    const auto ranks = static_cast<int>(worker->offer.ranks());
    if (rank < ranks) return std::pair(worker->connection, rank);
    rank -= ranks;
  }
  return std::nullopt;
}

std::optional<PoolCapacity> RunPlacer::RankCapacity() const {
  const HeldRuns::Workers workers = members_.ByPlace();
  const bool alike = std::all_of(workers.begin(), workers.end(), [](const Membership::Worker* worker) {
    const v1::Join& offer = worker->offer;
    return offer.rows_independent() && offer.messages_mix() && !offer.weights().streamed() &&
           !offer.weights().sharded();
  });
  if (workers.empty() || !alike) return std::nullopt;
  return OneRankOf(CapacityOn(workers));
}

int64_t RunPlacer::MostRankBytes() const {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const Membership::Worker* worker : members_.ByPlace()) {
    const auto offered = static_cast<int64_t>(worker->offer.memory_bytes());
    if (offered == 0) continue;
    const auto ranks = static_cast<int64_t>(worker->offer.ranks());
    const TakenBytes taken = live_.TakenOn(*worker, WeightShare(), short_rank_bytes_);
    const int64_t most = taken.all == 0 ? offered : MostBeside(offered, ranks * short_rank_bytes_, taken);
    least = std::min(least, most / ranks);
  }
  return least;
}

void RunPlacer::KeepPieces(LiveRequest& live) {
  if (!live.pieces.has_value()) return;
  PromptPieces& pieces = *live.pieces;
  if (pieces.first()) return live.pieces.reset();  // to be planned anew
  const Plan plan = pieces.plan();
  pieces.HoldAhead(nullptr);
  pieces.HoldAhead(kv_.HoldAhead(plan, plan.layout.tokens() + pieces.tokens_ahead(), WorkersFor(live)));
}

HeldRuns::Workers RunPlacer::WorkersFor(const LiveRequest& live) const {
  if (!live.pieces.has_value()) return members_.ByPlace();
  HeldRuns::Workers workers;
  for (const LeaderActions::Connection connection : live.pieces->workers()) {
    workers.push_back(&members_.all().at(connection));
  }
  return workers;
}

absl::StatusOr<PlanChoice> RunPlacer::PlanOn(const HeldRuns::Workers& workers, const LiveRequest& live,
                                             const KvSlabs& prefix) const {
  const PoolRequest& request = live.request;
  return planner_(CapacityOn(workers), std::ssize(request.tokens), request.options,
                  KvDirectory::Describe(prefix));
}

std::vector<HeldRuns::Workers> RunPlacer::SubmeshesFor(const LiveRequest& live, const KvSlabs& prefix) const {
  if (live.request.options.submeshes == 1 || SharesAllWeights()) return {};
  std::vector<HeldRuns::Workers> meshes = DivideWorkers(members_.ByPlace(), live.request.options.submeshes);
  // Runs on it that compute, whether it lacks the prefix, and all runs on it.
  using Order = std::tuple<int, bool, int>;
  std::vector<std::pair<Order, HeldRuns::Workers>> places;
  for (HeldRuns::Workers& mesh : meshes) {
    auto& [computing, lacks_prefix, all] = places.emplace_back(Order(), mesh).first;
    lacks_prefix = !kv_.CanFollow(prefix, mesh);
    for (const auto& [number, run] : live_.runs) {
      if (std::none_of(mesh.begin(), mesh.end(), [&, &of = run.coordinator](const Membership::Worker* each) {
            return of.Has(each->connection);
          })) {
        continue;
      }
      computing += live_.HasTurn(run) ? 1 : 0;
      ++all;
    }
  }
  std::stable_sort(places.begin(), places.end(),
                   [](const auto& left, const auto& right) { return left.first < right.first; });
  std::transform(places.begin(), places.end(), meshes.begin(),
                 [](auto& place) { return std::move(place.second); });
  return meshes;
}

HeldRuns::Workers RunPlacer::HoldersElsewhere(const KvSlabs& prefix, const HeldRuns::Workers& all) const {
  if (prefix.tokens() == 0 || kv_.CanFollow(prefix, all) || SharesAllWeights()) return {};
  return kv_.HoldersOf(prefix, all);
}

std::vector<PlanSite> RunPlacer::SitesFor(const PrefillOptions& options) const {
  const KvSlabs prefix = kv_.LookUpPrefix(options);
  const CachedPrefix cached = KvDirectory::Describe(prefix);
  if (options.submeshes > 1) {
    if (std::optional<PoolCapacity> submesh = SubmeshCapacity(options.submeshes)) {
      // On another sub-mesh than that which has it, it is of no use.
      const bool has_it = cached.ranks == submesh->ranks;
      return {{*std::move(submesh), has_it ? cached : CachedPrefix()}};
    }
  }
  const HeldRuns::Workers workers = members_.ByPlace();
  const bool follows = kv_.CanFollow(prefix, workers);
  std::vector<PlanSite> sites = {{CapacityOn(workers), follows ? cached : CachedPrefix()}};
  const HeldRuns::Workers holders = HoldersElsewhere(prefix, workers);
  if (!holders.empty()) sites.push_back({CapacityOn(holders), cached});
  return sites;
}

std::optional<PoolCapacity> RunPlacer::SubmeshCapacity(int submeshes) const {
  if (submeshes > members_.workers_to_stay() || SharesAllWeights()) return std::nullopt;
  std::vector<PoolCapacity> capacities;
  for (const HeldRuns::Workers& mesh : DivideWorkers(members_.ByPlace(), submeshes)) {
    capacities.push_back(CapacityOn(mesh));
  }
  const auto flops = [](const PoolCapacity& of) { return of.ranks / SecondsPerFlop(of.speed); };
  return *std::min_element(
      capacities.begin(), capacities.end(),
      [&](const PoolCapacity& left, const PoolCapacity& right) { return flops(left) < flops(right); });
}

// Workers that share weights on their own account would keep other shares for each set of them.
PoolCapacity RunPlacer::CapacityOn(const HeldRuns::Workers& workers) const {
  PoolCapacity capacity = CapacityOf(workers, survey_.links());
  if (std::ssize(workers) < members_.workers_to_stay()) capacity.shared_weights.reset();
  SetShortRoom(capacity, short_rank_bytes_);
  return capacity;
}

bool RunPlacer::SharesAllWeights() const {
  return std::any_of(members_.all().begin(), members_.all().end(),
                     [](const auto& entry) { return entry.second.offer.weights().sharded(); });
}

bool RunPlacer::HasRoom(const Plan& plan, const HeldRuns::Workers& workers, bool shares_weights) const {
  const std::vector<SeatsOfWorker> seated = SeatWorkers(workers, plan.ranks());
  for (size_t i = 0; i < seated.size(); ++i) {
    const auto& [worker, first, count] = seated[i];
    WeightShare share;
    if (shares_weights) share = {.index = static_cast<int>(i), .of = static_cast<int>(seated.size())};
    const auto offered = static_cast<int64_t>(worker->offer.memory_bytes());
    const TakenBytes taken = live_.TakenOn(*worker, share, short_rank_bytes_);
    if (offered == 0 || taken.all == 0) continue;
    const int64_t bytes = ReservedBytes(plan, count);
    const int64_t short_bytes = short_rank_bytes_ * worker->offer.ranks();
    if (bytes > RoomBeside(offered, short_bytes, taken, bytes <= count * short_rank_bytes_)) return false;
  }
  return true;
}

}  // namespace meshfill
