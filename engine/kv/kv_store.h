// Who may read kept K and V, and for how long: leases on prompts, under one budget of bytes.
//
//     Admit ──► held ──KvLease::Keep──► running ──► ended, by the first of: Release, the lapse of its time
//                 └──── the KvLease goes without Keep: its prefill failed ────► ended
//
// One store serves all ranks of a process: they share its memory, and a lease spans their slabs. A prompt is
// charged whole when it is admitted, before anything is computed, and until its memory is free again. A lease
// that has ended is found no more, and its prompt goes with it, as soon as no run and no reader holds it.
//
// Invariants: the charged bytes never exceed the budget; no prompt is found after its lease.
// Thread-safe. Time is the caller's clock.
#ifndef MESHFILL_ENGINE_KV_KV_STORE_H_
#define MESHFILL_ENGINE_KV_KV_STORE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/kv/kv_prompt.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"

namespace meshfill {

class KvStore;

// A new lease, held while its prefill waits and runs: it cannot lapse meanwhile. The store outlives it.
class KvLease {
 public:
  KvLease(KvStore& store, std::string id, absl::Duration lasts)
      : store_(store), id_(std::move(id)), lasts_(lasts) {}
  ~KvLease();  // ends the lease, unless Keep was called
  KvLease(const KvLease&) = delete;
  KvLease& operator=(const KvLease&) = delete;

  const std::string& id() const { return id_; }
  // The prefill is done: from now on the lease lasts its time, or until it was renewed for. How long that is;
  // NOT_FOUND: it was released meanwhile.
  absl::StatusOr<absl::Duration> Keep();

 private:
  KvStore& store_;
  const std::string id_;
  const absl::Duration lasts_;
  bool kept_ = false;
};

class KvStore {
 public:
  using Clock = std::function<absl::Time()>;

  struct Counts {
    int64_t leases = 0;
    int64_t bytes = 0;     // charged
    uint64_t lapsed = 0;   // leases, since the start
    uint64_t refused = 0;  // prompts, since the start
  };

  explicit KvStore(int64_t budget_bytes, Clock clock = MonotonicNow);
  ~KvStore();  // no KvLease is left
  KvStore(const KvStore&) = delete;
  KvStore& operator=(const KvStore&) = delete;

  int64_t budget_bytes() const { return budget_bytes_; }

  // Charges a prompt that no run has begun, under a new lease of `tenant`, whose name nobody can guess.
  // RESOURCE_EXHAUSTED: no room (RoomIn says when to try again).
  absl::StatusOr<std::unique_ptr<KvLease>> Admit(const std::shared_ptr<KvPrompt>& prompt, std::string tenant,
                                                 absl::Duration lasts);
  // How long until leases will have lapsed that hold this many bytes, if none is renewed; leases whose
  // prefill still runs are taken for ones that end now. Nothing: above the budget.
  std::optional<absl::Duration> RoomIn(int64_t bytes) const;

  // NOT_FOUND: unknown, ended, or another tenant's.
  absl::StatusOr<std::shared_ptr<const KvPrompt>> Find(const std::string& lease,
                                                       const std::string& tenant) const;
  // The lease lasts `lasts` from now on, as the answer says, or from its prefill's end on, where that is
  // later.
  absl::StatusOr<absl::Duration> Renew(const std::string& lease, const std::string& tenant,
                                       absl::Duration lasts);
  // Does nothing where Find finds nothing.
  void Release(const std::string& lease, const std::string& tenant);

  // Frees what has lapsed. When the next lease lapses; infinite: none does.
  absl::Time EndLapsed();

  Counts counts() const;

  // Calls `changed` after each change of a lease or of the bytes, and whenever a layer is there: from any
  // thread; it must return quickly, and not call the store. Null: nothing. Waits for a call that is under
  // way.
  void SetObserver(std::function<void()> changed);

 private:
  friend class KvLease;
  struct Entry {
    std::string tenant;
    std::shared_ptr<KvPrompt> prompt;
    bool held = true;                           // by its KvLease
    absl::Time expires = absl::InfinitePast();  // not before, if held
  };
  // What outlives the store with a prompt that somebody still reads.
  struct Shared {
    std::atomic<int64_t> bytes{0};  // charged
    Mutex mu;                       // held while `changed` runs
    std::function<void()> changed ABSL_GUARDED_BY(mu);
    void Notify();
  };

  absl::StatusOr<absl::Duration> Keep(const std::string& lease, absl::Duration lasts);
  void End(const std::string& lease);
  // The entry of a lease that has not ended; null: there is none.
  const Entry* Live(const std::string& lease, const std::string& tenant) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int64_t budget_bytes_;
  const Clock clock_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();

  mutable Mutex mu_;
  std::map<std::string, Entry> leases_ ABSL_GUARDED_BY(mu_);
  uint64_t lapsed_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t refused_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_KV_STORE_H_
