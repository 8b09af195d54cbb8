#include "engine/run_places.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"

namespace meshfill {
namespace {

TakenBytes MostOf(const TakenBytes& left, const TakenBytes& right) {
  return {std::max(left.all, right.all), std::max(left.by_long, right.by_long)};
}

}  // namespace

RunPlaces::Place::Place(RunPlaces& places, int first_rank, int ranks, int64_t rank_bytes)
    : places_(&places), first_rank_(first_rank), ranks_(ranks), rank_bytes_(rank_bytes) {}

RunPlaces::Place::Place(Place&& other) noexcept
    : places_(std::exchange(other.places_, nullptr)),
      first_rank_(other.first_rank_),
      ranks_(other.ranks_),
      rank_bytes_(other.rank_bytes_),
      computes_(other.computes_) {}

RunPlaces::Place::~Place() {
  if (places_ == nullptr) return;
  const MutexLock lock(places_->mu_);
  --places_->runs_;
  places_->Add(*this, -1, computes_ ? -1 : 0);
}

std::vector<int> RunPlaces::Place::pool_ranks() const {
  std::vector<int> ranks(static_cast<size_t>(ranks_));
  std::iota(ranks.begin(), ranks.end(), first_rank_);
  return ranks;
}

void RunPlaces::Place::SetComputes(bool computes) {
  const MutexLock lock(places_->mu_);
  if (std::exchange(computes_, computes) != computes) places_->Add(*this, 0, computes ? 1 : -1);
}

RunPlaces::RunPlaces(int64_t budget_bytes, int ranks, int most_runs)
    : budget_bytes_(budget_bytes),
      ranks_(ranks),
      most_runs_(most_runs),
      by_rank_(static_cast<size_t>(ranks)) {}

int RunPlaces::RanksOf(int submeshes) const { return ranks_ / std::clamp(submeshes, 1, ranks_); }

int64_t RunPlaces::BudgetOf(int submeshes) const {
  const int ranks = RanksOf(submeshes);
  return ranks == ranks_ ? budget_bytes_ : budget_bytes_ / ranks_ * ranks;
}

void RunPlaces::Add(const Place& place, int runs, int computing) {
  for (int rank = place.first_rank_; rank < place.first_rank_ + place.ranks_; ++rank) {
    Rank& of = by_rank_[static_cast<size_t>(rank)];
    of.taken.all += runs * place.rank_bytes_;
    if (place.rank_bytes_ > short_bytes_) of.taken.by_long += runs * place.rank_bytes_;
    of.runs += runs;
    of.computing += computing;
  }
}

absl::StatusOr<RunPlaces::Place> RunPlaces::Take(int submeshes, int64_t bytes,
                                                 const std::function<bool(int first_rank)>& preferred) {
  const int meshes = std::clamp(submeshes, 1, ranks_);
  const int ranks = RanksOf(submeshes);
  const int64_t rank_bytes = (bytes + ranks - 1) / ranks;
  const int64_t rank_budget = budget_bytes_ / ranks_;
  const bool is_short = rank_bytes <= short_bytes_;
  std::vector<bool> is_preferred;
  for (int mesh = 0; mesh < meshes; ++mesh) {
    is_preferred.push_back(preferred != nullptr && preferred(mesh * ranks_ / meshes));
  }
  const MutexLock lock(mu_);
  if (runs_ == most_runs_) {
    return absl::ResourceExhaustedError(
        absl::StrCat(runs_, " prefills live on this pool, no more can; wait for the end of one"));
  }
  using Order = std::tuple<int, bool, int>;  // as Take has it
  std::optional<Order> best;
  int first_rank = 0;
  int64_t most_room = 0;
  for (int mesh = 0; mesh < meshes; ++mesh) {
    const int first = mesh * ranks_ / meshes;
    Rank most;
    for (int rank = first; rank < first + ranks; ++rank) {
      const Rank& of = by_rank_[static_cast<size_t>(rank)];
      most.taken = MostOf(most.taken, of.taken);
      most.runs = std::max(most.runs, of.runs);
      most.computing = std::max(most.computing, of.computing);
    }
    const int64_t room = RoomBeside(rank_budget, short_bytes_, most.taken, is_short);
    most_room = std::max(most_room, room);
    if (most.runs > 0 && rank_bytes > room) continue;
    const Order order = {most.computing, !is_preferred[static_cast<size_t>(mesh)], most.runs};
    if (best.has_value() && *best <= order) continue;
    best = order;
    first_rank = first;
  }
  if (!best.has_value()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the prefill takes ", rank_bytes, " bytes of each of its ", ranks, " ranks; a rank has ",
                     rank_budget, ", of which those that live here, and short ones to come, leave ",
                     most_room, "; wait for the end of one"));
  }
  ++runs_;
  Place place(*this, first_rank, ranks, rank_bytes);
  Add(place, 1, 1);
  return place;
}

int64_t RunPlaces::MostRankBytes() const {
  const MutexLock lock(mu_);
  TakenBytes most;
  int runs = 0;
  for (const Rank& rank : by_rank_) {
    most = MostOf(most, rank.taken);
    runs = std::max(runs, rank.runs);
  }
  const int64_t rank_budget = budget_bytes_ / ranks_;
  return runs == 0 ? rank_budget : MostBeside(rank_budget, short_bytes_, most);
}

}  // namespace meshfill
