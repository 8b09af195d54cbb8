#include "engine/kv/kv_charge.h"

#include <algorithm>
#include <utility>

namespace meshfill {

void KvBytes::SetObserver(std::function<void()> changed) {
  const MutexLock lock(mu_);
  changed_ = std::move(changed);
}

void KvBytes::Notify() {
  const MutexLock lock(mu_);
  if (changed_ != nullptr) changed_();
}

std::unique_ptr<KvCharge> KvCharge::Split(int64_t bytes) {
  const int64_t split = std::min(bytes, bytes_);
  bytes_ -= split;
  return std::make_unique<KvCharge>(sum_, split);
}

void KvCharge::Drop(int64_t bytes) {
  const int64_t dropped = std::min(bytes, bytes_);
  if (dropped <= 0) return;
  bytes_ -= dropped;
  sum_->Add(-dropped);
  sum_->Notify();
}

}  // namespace meshfill
