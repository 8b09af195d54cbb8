// The memory of the runs that live on one pool at once: each takes the bytes that its plan needs at most
// before it begins, and gives them back when it is gone.
//
// One run alone is always admitted: its plan was made for the whole memory. Thread-safe.
#ifndef MESHFILL_ENGINE_RUN_MEMORY_H_
#define MESHFILL_ENGINE_RUN_MEMORY_H_

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "kernels/mutex.h"

namespace meshfill {

// Prefills that live at once in one engine. One computes, the others stand still: the longest that gave way
// to a shorter one, and so on. Each has threads of its own.
inline constexpr int kLiveRuns = 8;

class RunMemory {
 public:
  // What one run has taken. The memory outlives it.
  class Share {
   public:
    Share(RunMemory& memory, int64_t bytes) : memory_(&memory), bytes_(bytes) {}
    ~Share();
    Share(Share&& other) noexcept;
    Share& operator=(Share&&) = delete;

   private:
    RunMemory* memory_;  // null: moved from
    const int64_t bytes_;
  };

  // At most `most_runs` runs, in `budget_bytes` of memory.
  RunMemory(int64_t budget_bytes, int most_runs) : budget_bytes_(budget_bytes), most_runs_(most_runs) {}

  // RESOURCE_EXHAUSTED: not beside those that live now; try again when one of them is gone.
  absl::StatusOr<Share> Take(int64_t bytes);

 private:
  const int64_t budget_bytes_;
  const int most_runs_;
  Mutex mu_;
  int runs_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_RUN_MEMORY_H_
