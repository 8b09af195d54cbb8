// Which ranks each of the runs has that live on one embedded pool, and how much of their memory.
//
// A run has all ranks, or one of so many sub-meshes, each of as many neighbouring ranks. It takes the bytes
// that its plan needs at most before it begins, an equal part of each of its ranks, and gives them back when
// it is gone. A run that is alone on its ranks is always admitted: its plan was made for all their memory.
// Beside others, one that takes more of a rank than is left to short ones leaves them that.
//
//     ranks         0    1    2    3
//     run 1, all    ████████████████████    stands still
//     run 2, 1/2    ██████████
//     run 3, 1/2              ██████████    fewer compute here
//
// Thread-safe.
#ifndef MESHFILL_ENGINE_RUN_PLACES_H_
#define MESHFILL_ENGINE_RUN_PLACES_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "engine/plan/short_room.h"
#include "kernels/mutex.h"

namespace meshfill {

inline constexpr int kMostSubmeshes = 8;

// Prefills that live at once in one engine: one on each sub-mesh, and a short one
// (server/queue/free_places.h). Some compute, the others stand still: the longest that gave way to a shorter
// one, and so on. Each has threads of its own.
inline constexpr int kLiveRuns = kMostSubmeshes + 1;

class RunPlaces {
 public:
  // What one run has taken; it computes until it says otherwise. The places outlive it.
  class Place {
   public:
    Place(RunPlaces& places, int first_rank, int ranks, int64_t rank_bytes);
    ~Place();
    Place(Place&& other) noexcept;
    Place& operator=(Place&&) = delete;

    int first_rank() const { return first_rank_; }
    int ranks() const { return ranks_; }
    std::vector<int> pool_ranks() const;  // all of them
    void SetComputes(bool computes);      // false: it stands still

   private:
    friend class RunPlaces;
    RunPlaces* places_;  // null: moved from
    const int first_rank_;
    const int ranks_;
    const int64_t rank_bytes_;
    bool computes_ = true;  // guarded by the places' lock
  };

  // At most `most_runs` runs, in `budget_bytes` of memory, of which each rank has an equal part.
  RunPlaces(int64_t budget_bytes, int ranks, int most_runs);
  // From now on long runs leave so much of each rank to short ones (engine/plan/short_room.h). Before the
  // first run.
  void LeaveToShort(int64_t rank_bytes) { short_bytes_ = rank_bytes; }
  int64_t short_bytes() const { return short_bytes_; }  // of each rank

  // Ranks of one of so many sub-meshes; 1: of the pool. Never more sub-meshes than ranks.
  int RanksOf(int submeshes) const;
  // Memory of one of so many sub-meshes.
  int64_t BudgetOf(int submeshes) const;

  // A place for a run that takes `bytes`, of all its ranks together. Of the sub-meshes that have room, one on
  // which fewest compute; among these one that `preferred` is true of, given its first rank, and then one on
  // which fewest live. RESOURCE_EXHAUSTED: not beside those that live now; try again when one of them is
  // gone.
  absl::StatusOr<Place> Take(int submeshes, int64_t bytes,
                             const std::function<bool(int first_rank)>& preferred = nullptr);
  // The most that one more run on all ranks could take of each now.
  int64_t MostRankBytes() const;

 private:
  struct Rank {
    TakenBytes taken;
    int runs = 0;
    int computing = 0;
  };
  // What comes of a run to its ranks, or goes with it.
  void Add(const Place& place, int runs, int computing) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int64_t budget_bytes_;
  const int ranks_;
  const int most_runs_;
  int64_t short_bytes_ = 0;
  mutable Mutex mu_;
  int runs_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<Rank> by_rank_ ABSL_GUARDED_BY(mu_);
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_PLACES_H_
