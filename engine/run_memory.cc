#include "engine/run_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace meshfill {

RunMemory::Share::Share(Share&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)), bytes_(other.bytes_) {}

RunMemory::Share::~Share() {
  if (memory_ == nullptr) return;
  const MutexLock lock(memory_->mu_);
  --memory_->runs_;
  memory_->bytes_ -= bytes_;
}

absl::StatusOr<RunMemory::Share> RunMemory::Take(int64_t bytes) {
  const MutexLock lock(mu_);
  if (runs_ == most_runs_) {
    return absl::ResourceExhaustedError(
        absl::StrCat(runs_, " prefills live on this pool, no more can; wait for the end of one"));
  }
  if (runs_ > 0 && bytes > budget_bytes_ - bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat("the prefill takes ", bytes, " bytes, and the ", runs_,
                                                     " that live here have ", bytes_, " of the ",
                                                     budget_bytes_, "; wait for the end of one"));
  }
  ++runs_;
  bytes_ += bytes;
  return Share(*this, bytes);
}

}  // namespace meshfill
