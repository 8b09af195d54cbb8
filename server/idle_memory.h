// Freed memory goes back to the system while the process is idle.
#ifndef MESHFILL_SERVER_IDLE_MEMORY_H_
#define MESHFILL_SERVER_IDLE_MEMORY_H_

#include <malloc.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "absl/time/time.h"
#include "kernels/cpu/host_memory.h"
#include "server/observe/process_metrics.h"

namespace meshfill {

// The allocator keeps what was freed for whoever asks next, and so do mappings while the pool is in use.
// After a very long prompt, or a crowd of clients that meant no good, that can be gigabytes which others on
// the machine could use. A pool in use keeps it: the next prompt wants it again, and pages that are new cost
// time. Not thread-safe.
class IdleMemory {
 public:
  static constexpr absl::Duration kIdle = absl::Seconds(10);  // before it is given back
  static constexpr int64_t kWorthwhile = int64_t{64} << 20;   // bytes more than after the last time

  // Call now and then. True where memory was given back.
  bool Look(bool idle, absl::Time now) {
    if (!idle) {
      busy_at_ = now;
      if (!spare_.has_value()) spare_.emplace();
    }
    if (now - busy_at_ < kIdle) return false;
    busy_at_ = now;  // not again at once
    const bool unmaps = SpareMappings::spare_bytes() > 0;
    spare_.reset();
    const int64_t resident = ResidentBytes();
    kept_ = std::min(kept_, resident);
    if (resident - kept_ < kWorthwhile) return unmaps;
    malloc_trim(0);
    kept_ = ResidentBytes();
    return true;
  }

 private:
  absl::Time busy_at_ = absl::InfinitePast();
  std::optional<SpareMappings> spare_;  // while the pool is in use: one run leaves it to the next
  int64_t kept_ = 0;                    // resident bytes after the last time
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_IDLE_MEMORY_H_
