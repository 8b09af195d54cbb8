// A flag that ends a prefill early: raised once, by any thread, read by compute loops between tiles.
#ifndef MESHFILL_KERNELS_STOP_TOKEN_H_
#define MESHFILL_KERNELS_STOP_TOKEN_H_

#include <atomic>

namespace meshfill {

class StopToken {
 public:
  // With a parent, the parent's stop is also this token's; not the other way. The parent outlives the token.
  explicit StopToken(const StopToken* parent = nullptr) : parent_(parent) {}

  void Stop() { stopped_.store(true, std::memory_order_relaxed); }
  bool stopped() const {
    return stopped_.load(std::memory_order_relaxed) || (parent_ != nullptr && parent_->stopped());
  }

 private:
  const StopToken* const parent_;
  std::atomic<bool> stopped_{false};
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_STOP_TOKEN_H_
