// What a worker's ranks keep of K and V, for leases that the leader gives, and for runs to come that begin
// with the same tokens (kv_directory.h).
//
//     Begin ──► the ranks fill it ──Keep─┬─► readable until its lease ends: Ends, or as last told ──► gone
//                      │                 └─► a prefix for later runs, until RunEnds ────────────────► gone
//                      └──Drop: the run was stopped ────────────────────────────────────────────────► gone
//
// A lease that ends while its run computes leaves it to the later runs, where they may have it. A lease holds
// the runs of its prefix, too. Readers may come while the run computes. A reader gives the
// tokens of a range that are here. Thread-safe; memory is freed outside of the lock. Time is the caller's
// clock.
#ifndef MESHFILL_SERVER_POOL_WORKER_HELD_KV_H_
#define MESHFILL_SERVER_POOL_WORKER_HELD_KV_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/kv/kv_prompt.h"
#include "engine/kv/kv_slabs.h"
#include "engine/kv/kv_store.h"
#include "kernels/mutex.h"
#include "server/api/kv_leases.h"

namespace meshfill {

class HeldKv final : public KvSource {
 public:
  // What becomes of a run's K and V.
  struct Keeping {
    std::string lease;  // empty: none
    std::string tenant;
    absl::Duration lasts;  // from Keep on
    bool cache = false;    // keeps K and V for later prompts, too
    bool operator==(const Keeping&) const = default;
  };
  // The first tokens that a run computed.
  struct RunTokens {
    uint64_t run = 0;
    int64_t tokens = 0;
    bool operator==(const RunTokens&) const = default;
  };

  // `device_memory` may be null.
  HeldKv(const KvShape& shape, int64_t budget_bytes, KvStore::Clock clock = MonotonicNow,
         std::shared_ptr<KvDeviceMemory> device_memory = nullptr)
      : shape_(shape), store_(budget_bytes, std::move(clock), std::move(device_memory)) {}

  int64_t budget_bytes() const { return store_.budget_bytes(); }

  // What earlier runs computed, one after the other, of the ranks that were here; null: of no run. It lives
  // as long as it is held. UNAVAILABLE: a run is not here.
  absl::StatusOr<std::shared_ptr<const KvSlabs>> PrefixOf(const std::vector<RunTokens>& runs) const;

  // A run begins behind `prefix`, whose `ranks` of `layout` are here, and were in the prefix's runs: where
  // their K and V go. It lives as long as the run. What an earlier run kept under this lease is dropped.
  // RESOURCE_EXHAUSTED: no room.
  absl::StatusOr<std::shared_ptr<KvPrompt>> Begin(uint64_t run, const Keeping& keeping,
                                                  const std::shared_ptr<const KvSlabs>& prefix,
                                                  const TokenLayout& layout, const std::vector<int>& ranks);
  void Keep(uint64_t run);  // the run is done; nothing happens where it keeps nothing
  void Drop(uint64_t run);  // the run was stopped; nothing happens where it keeps nothing

  // The next three do nothing for a lease, or a run, that is not here. A run whose lease ends while it
  // computes keeps what it caches.
  void Lasts(const std::string& lease, absl::Duration lasts);
  void Ends(const std::string& lease);
  void RunEnds(uint64_t run);
  void EndAll();

  absl::StatusOr<std::unique_ptr<KvReader>> Open(const v1::FetchKvRequest& request, const std::string& tenant,
                                                 int64_t max_message_bytes,
                                                 std::function<void()> changed) override;
  absl::Time EndLapsed() override;
  KvStore::Counts counts() const override { return store_.counts(); }
  void SetObserver(std::function<void()> changed) override { store_.SetObserver(std::move(changed)); }

 private:
  struct Entry {  // one lease's entry
    uint64_t run = 0;
    std::string stored;  // its lease's name in the store
    std::string tenant;
    int64_t tokens = 0;      // the prompt's tokens
    std::vector<bool> here;  // by rank
  };
  struct Begun {  // a run, until Keep or Drop
    std::unique_ptr<KvLease> held;
    std::shared_ptr<const KvPrompt> prompt;
    std::string lease;  // empty: none
    bool cache = false;
  };

  // `gives_up`: a run of it that computes keeps nothing for later prompts, either.
  void End(const std::string& lease, bool gives_up);
  absl::StatusOr<std::shared_ptr<const KvPrompt>> Find(const std::string& lease, const std::string& tenant,
                                                       uint64_t run) const;

  const KvShape shape_;
  KvStore store_;  // charges what is here; locks nothing of this
  mutable Mutex mu_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mu_);                          // by lease
  std::map<uint64_t, Begun> begun_ ABSL_GUARDED_BY(mu_);                               // by run
  std::map<uint64_t, std::shared_ptr<const KvRunSlabs>> cached_ ABSL_GUARDED_BY(mu_);  // by run
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_WORKER_HELD_KV_H_
