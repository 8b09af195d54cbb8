// Kept K and V under one budget of bytes: who may read them, and for how long (leases), and what later
// prompts that begin alike need not compute again (a cache).
//
//     Admit ──► held ──KvLease::Keep──► running ──► ended, by the first of: Release, the lapse of its time
//                 └──── the KvLease goes without Keep: its prefill failed ────► ended
//
// One store serves all ranks of a process: they share its memory, and a lease spans their slabs. A prompt is
// charged whole when it is admitted, before anything is computed, and until its memory is free again; what it
// shares with a cached prefix is charged once. A lease that has ended is found no more, and its prompt goes
// with it, as soon as no run, no reader and no cache holds it: a run that leaves its K and V to the cache
// does so, too, where the lease ends before the run.
//
// The cache is what room the others leave: what is admitted may take its place. That goes, least recently
// used first, in MakeRoom, before the memory for new K and V is allocated.
//
// Where the ranks' memory is not the host's, the budget is of host memory, and what was used last of all this
// stays on the devices (kv_device_memory.h). Whatever leaves these has its room on the host.
//
// Invariants: what is charged, without what the cache alone holds, never exceeds the budget, and after
// MakeRoom neither does the whole; no prompt is found by a lease that has ended; a tenant finds its own
// alone. Thread-safe. Time is the caller's clock.
#ifndef MESHFILL_ENGINE_KV_KV_STORE_H_
#define MESHFILL_ENGINE_KV_KV_STORE_H_

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
#include "engine/kv/kv_charge.h"
#include "engine/kv/kv_device_memory.h"
#include "engine/kv/kv_prefix_cache.h"
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
    int64_t bytes = 0;           // charged, without what the cache will give up for it
    uint64_t lapsed = 0;         // leases, since the start
    uint64_t refused = 0;        // prompts, since the start
    int64_t cached_bytes = 0;    // bytes that the cache holds, under leases too
    uint64_t hit_tokens = 0;     // cached tokens that prompts began with, since the start
    uint64_t miss_tokens = 0;    // tokens that prompts computed after a look in the cache, since the start
    uint64_t evictions = 0;      // entries that the cache gave up, since the start
    uint64_t evicted_bytes = 0;  // bytes that evictions freed, since the start
    int64_t device_bytes = 0;    // bytes in the memory of devices
  };

  struct LeaseEnd {
    absl::Duration ends_in;  // time left if the lease is not renewed; zero while its prefill runs
    int64_t bytes = 0;
  };

  // `device_memory` may be null.
  explicit KvStore(int64_t budget_bytes, Clock clock = MonotonicNow,
                   std::shared_ptr<KvDeviceMemory> device_memory = nullptr);
  ~KvStore();  // no KvLease is left
  KvStore(const KvStore&) = delete;
  KvStore& operator=(const KvStore&) = delete;

  int64_t budget_bytes() const { return budget_bytes_; }
  int64_t RoomBytes() const;  // what one more prompt could be charged now, with all that the cache gives up

  // Charges a prompt that no run has begun, under a new lease of `tenant`, whose name nobody can guess.
  // RESOURCE_EXHAUSTED: no room (RoomIn says when to try again).
  absl::StatusOr<std::unique_ptr<KvLease>> Admit(const std::shared_ptr<KvPrompt>& prompt, std::string tenant,
                                                 absl::Duration lasts);
  // How long about until leases will have lapsed that hold this many bytes, if none is renewed; leases whose
  // prefill still runs are taken for ones that end now. Nothing: above the budget.
  std::optional<absl::Duration> RoomIn(int64_t bytes) const;

  // The live leases of a tenant.
  std::vector<LeaseEnd> LeasesOf(const std::string& tenant) const;

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

  // The longest prefix of whole blocks in the cache. `usable` maps its tokens to how many of them the caller
  // takes, at most all. The prefix is held from now on. Nothing is found where a promise to others needs its
  // room: the caller of a prompt that is charged already gives `returned_bytes_per_token` back for each token
  // of the prefix, as its run begins.
  std::shared_ptr<const KvSlabs> FindPrefix(const KvBlockNames& names, int64_t returned_bytes_per_token,
                                            const std::function<int64_t(int64_t)>& usable);
  // How many tokens the cache has.
  int64_t PrefixTokens(const KvBlockNames& names) const;
  // Charges `bytes` to a prompt that no run has begun, for the cache alone. False: no room.
  bool AdmitToCache(const std::shared_ptr<KvPrompt>& prompt, int64_t bytes);
  // Frees what the cache holds beyond the budget. Before the memory of an admitted prompt is allocated.
  void MakeRoom();
  // A run has computed the whole prompt: from now on FindPrefix knows it. Nothing, where the prompt was
  // dropped meanwhile (KvPrompt::KeepWithoutLease).
  void Enter(const KvBlockNames& names, const KvPrompt& prompt);
  // A prompt has begun, with `cached` tokens from the cache and `computed` to compute. Counts has their sums.
  void CountTokens(int64_t cached, int64_t computed);

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
    bool held = true;                           // its KvLease lives
    absl::Time expires = absl::InfinitePast();  // not before, if held
  };
  // Charges `bytes`, where the cache leaves room for them or can make some; else null.
  std::unique_ptr<KvCharge> Charge(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Attach(KvPrompt& prompt, std::unique_ptr<KvCharge> charge) const;
  // Evicts one entry where the cache holds more than its room. Empty: it does not.
  std::vector<KvPiece> EvictOne();

  absl::StatusOr<absl::Duration> Keep(const std::string& lease, absl::Duration lasts);
  void End(const std::string& lease);
  // The entry of a lease that has not ended; null: there is none.
  const Entry* Live(const std::string& lease, const std::string& tenant) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int64_t budget_bytes_;
  const Clock clock_;
  const std::shared_ptr<KvDeviceMemory> device_memory_;
  // Shared: K and V outlive the store with somebody who still reads them.
  const std::shared_ptr<KvBytes> bytes_ = std::make_shared<KvBytes>();

  mutable Mutex mu_;
  std::map<std::string, Entry> leases_ ABSL_GUARDED_BY(mu_);
  uint64_t lapsed_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t refused_ ABSL_GUARDED_BY(mu_) = 0;
  KvPrefixCache cache_ ABSL_GUARDED_BY(mu_);
  uint64_t hit_tokens_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t miss_tokens_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t evictions_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t evicted_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_KV_STORE_H_
