#include "engine/comm/message_gate.h"

#include <algorithm>

#include "kernels/return_if_error.h"

namespace meshfill {

absl::Status MessageGate::Pass(int rank, const std::function<absl::Status()>& finish) {
  while (true) {
    {
      const MutexLock lock(mu_);
      if (begun_[rank] < limit_) {
        ++begun_[rank];
        return absl::OkStatus();
      }
    }
    RETURN_IF_ERROR(finish());
    StandStill(rank);
  }
}

void MessageGate::StandStill(int rank) {
  MutexLock lock(mu_);
  if (begun_[rank] < limit_) return;
  ++standing_;
  if (const std::optional<uint64_t> still = TakeStill()) {
    lock.Unlock();
    on_still_(*still);
    lock.Lock();
  }
  while (begun_[rank] >= limit_) changed_.Wait(mu_);
  --standing_;
}

std::optional<uint64_t> MessageGate::TakeStill() {
  const auto there = std::count(begun_.begin(), begun_.end(), limit_);
  const bool all_there = there == std::ssize(begun_) && standing_ == std::ssize(begun_);
  return agreed_ && all_there ? std::optional(pause_) : std::nullopt;
}

int64_t MessageGate::MostBegun() const { return *std::max_element(begun_.begin(), begun_.end()); }

int64_t MessageGate::Close(uint64_t pause) {
  const MutexLock lock(mu_);
  if (!stopped_) {
    pause_ = pause;
    limit_ = MostBegun();
    agreed_ = false;
  }
  return MostBegun();
}

void MessageGate::CloseAt(uint64_t pause, int64_t messages) {
  std::optional<uint64_t> still;
  {
    const MutexLock lock(mu_);
    if (pause_ != pause || agreed_) return;
    agreed_ = true;
    limit_ = std::max(messages, limit_);
    changed_.NotifyAll();
    still = TakeStill();
  }
  if (still.has_value()) on_still_(*still);
}

void MessageGate::Open() {
  const MutexLock lock(mu_);
  limit_ = kOpen;
  pause_ = 0;
  agreed_ = false;
  changed_.NotifyAll();
}

void MessageGate::Stop() {
  {
    const MutexLock lock(mu_);
    stopped_ = true;
  }
  Open();
}

}  // namespace meshfill
