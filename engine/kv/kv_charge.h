// Bytes of kept K and V, counted against a budget from the moment that they are promised until their memory
// is free again, whoever holds it.
//
// Thread-safe, apart from Split and Drop.
#ifndef MESHFILL_ENGINE_KV_KV_CHARGE_H_
#define MESHFILL_ENGINE_KV_KV_CHARGE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "kernels/mutex.h"

namespace meshfill {

// The sum of all charges. It outlives its store with K and V that somebody still reads.
class KvBytes {
 public:
  int64_t charged() const { return charged_; }
  void Add(int64_t bytes) { charged_ += bytes; }

  // Calls `changed` whenever bytes are free again, and in Notify. Null: nothing. Waits for a call that is
  // under way.
  void SetObserver(std::function<void()> changed);
  void Notify();

 private:
  std::atomic<int64_t> charged_{0};
  Mutex mu_;  // held while `changed_` runs
  std::function<void()> changed_ ABSL_GUARDED_BY(mu_);
};

// A part of the sum; gives its bytes back as it goes.
class KvCharge {
 public:
  // `bytes` were added to `sum` before.
  KvCharge(std::shared_ptr<KvBytes> sum, int64_t bytes) : sum_(std::move(sum)), bytes_(bytes) {}
  ~KvCharge() { Drop(bytes_); }
  KvCharge(const KvCharge&) = delete;
  KvCharge& operator=(const KvCharge&) = delete;

  int64_t bytes() const { return bytes_; }
  // A charge of its own for `bytes` of these, or for all of them.
  std::unique_ptr<KvCharge> Split(int64_t bytes);
  // Gives `bytes` of these back, or all of them.
  void Drop(int64_t bytes);

 private:
  const std::shared_ptr<KvBytes> sum_;
  int64_t bytes_;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_KV_CHARGE_H_
