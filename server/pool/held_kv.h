// What a worker's ranks keep of K and V for leases that the leader gives (kv_directory.h).
//
//     Begin ──► the ranks fill it ──Keep──► readable until its lease ends: Ends, or lapses as last told
//       └──Drop: the run was stopped───► gone
//
// Readers may come while the run computes. A reader gives the tokens of a range that are here. Thread-safe.
// Time is the caller's clock.
#ifndef MESHFILL_SERVER_POOL_HELD_KV_H_
#define MESHFILL_SERVER_POOL_HELD_KV_H_

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
#include "engine/kv/kv_sink.h"
#include "engine/kv/kv_store.h"
#include "kernels/mutex.h"
#include "server/api/kv_leases.h"

namespace meshfill {

class HeldKv final : public KvSource {
 public:
  struct Lease {
    std::string name;
    std::string tenant;
    absl::Duration lasts;  // from Keep on
    bool operator==(const Lease&) const = default;
  };

  HeldKv(const KvShape& shape, int64_t budget_bytes, KvStore::Clock clock = MonotonicNow)
      : shape_(shape), store_(budget_bytes, std::move(clock)) {}

  int64_t budget_bytes() const { return store_.budget_bytes(); }

  // A run begins whose `ranks` of `layout` are here: where their K and V go. It lives as long as the run.
  // What an earlier run kept under this lease is dropped. RESOURCE_EXHAUSTED: no room.
  absl::StatusOr<std::shared_ptr<KvSink>> Begin(uint64_t run, const Lease& lease, const TokenLayout& layout,
                                                const std::vector<int>& ranks);
  void Keep(uint64_t run);  // it is done; nothing where it keeps nothing
  void Drop(uint64_t run);  // it was stopped; likewise

  // Of a lease that is not here, nothing happens.
  void Lasts(const std::string& lease, absl::Duration lasts);
  void Ends(const std::string& lease);
  void EndAll();

  absl::StatusOr<std::unique_ptr<KvReader>> Open(const v1::FetchKvRequest& request, const std::string& tenant,
                                                 int64_t max_message_bytes,
                                                 std::function<void()> changed) override;
  absl::Time EndLapsed() override;
  KvStore::Counts counts() const override { return store_.counts(); }
  void SetObserver(std::function<void()> changed) override { store_.SetObserver(std::move(changed)); }

 private:
  struct Entry {
    uint64_t run = 0;
    std::string stored;  // its lease's name in the store
    std::string tenant;
    TokenLayout layout;
    std::vector<bool> here;         // by rank
    std::unique_ptr<KvLease> held;  // until Keep
  };

  absl::StatusOr<std::shared_ptr<const KvPrompt>> Find(const std::string& lease, const std::string& tenant,
                                                       uint64_t run) const;
  std::map<std::string, Entry>::iterator OfRun(uint64_t run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const KvShape shape_;
  KvStore store_;  // charges what is here; locks nothing of this
  mutable Mutex mu_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mu_);  // by lease
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_HELD_KV_H_
