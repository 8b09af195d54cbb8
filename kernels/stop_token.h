// A flag that ends a prefill early: raised once, by any thread, read by compute loops between tiles.
#ifndef MESHFILL_KERNELS_STOP_TOKEN_H_
#define MESHFILL_KERNELS_STOP_TOKEN_H_

#include <atomic>

namespace meshfill {

class StopToken {
 public:
  void Stop() { stopped_.store(true, std::memory_order_relaxed); }
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> stopped_{false};
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_STOP_TOKEN_H_
