// The seam between the API's calls about K and V and whoever keeps them.
//
//     KvSource    what FetchKv needs: on the front-end, and on a worker for what it holds (held_kv.h)
//     KvLeases    and who gives leases: an embedded pool's KvStore (store_leases.h), or the leader of a pool
//                 of workers (pool_kv_leases.h)
//
// Thread-safe. A caller may hold locks of its own; observers are called without any lock that the calls take.
#ifndef MESHFILL_SERVER_API_KV_LEASES_H_
#define MESHFILL_SERVER_API_KV_LEASES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/kv/kv_prompt.h"
#include "engine/kv/kv_store.h"
#include "engine/plan/plan.h"
#include "meshfill/v1/prefill.pb.h"
#include "server/api/kv_reader.h"

namespace meshfill {

class KvSource {
 public:
  virtual ~KvSource() = default;

  // The reader of one FetchKv call. Parts are below `max_message_bytes`. `changed` is called, from any
  // thread, when a reader that had nothing yet may have something; the observer below is another such sign.
  // NOT_FOUND: unknown, ended, or another tenant's. INVALID_ARGUMENT: those of CheckFetch.
  virtual absl::StatusOr<std::unique_ptr<KvReader>> Open(const v1::FetchKvRequest& request,
                                                         const std::string& tenant, int64_t max_message_bytes,
                                                         std::function<void()> changed) = 0;

  // Frees what has lapsed. When the next lease lapses; infinite: none does.
  virtual absl::Time EndLapsed() = 0;
  virtual KvStore::Counts counts() const = 0;

  // Calls `changed` whenever a lease has changed or a layer is there, from any thread. It must return
  // quickly, and not call back in. Null: nothing.
  virtual void SetObserver(std::function<void()> changed) = 0;
};

// A new lease, held while its prefill waits and runs: it cannot lapse meanwhile. Its destructor ends the
// lease, unless Keep was called.
class HeldKvLease {
 public:
  virtual ~HeldKvLease() = default;
  virtual const std::string& id() const = 0;
  // The prefill is done: from now on the lease lasts its time, or until it was renewed for. How long that is;
  // NOT_FOUND: it was released meanwhile.
  virtual absl::StatusOr<absl::Duration> Keep() = 0;
  // Adds who holds what to the manifest.
  virtual void AddHolders(v1::KvManifest& manifest) const = 0;
};

class KvLeases : public KvSource {
 public:
  virtual int64_t budget_bytes() const = 0;
  // The live leases of a tenant.
  virtual std::vector<KvStore::LeaseEnd> LeasesOf(const std::string& tenant) const = 0;

  // A lease for a prompt that no run has begun, and that is expected to run by `plan`. RESOURCE_EXHAUSTED: no
  // room (RoomIn says when to try again).
  virtual absl::StatusOr<std::unique_ptr<HeldKvLease>> Admit(const std::shared_ptr<KvPrompt>& prompt,
                                                             const Plan& plan, std::string tenant,
                                                             absl::Duration lasts) = 0;
  // How long until there will be room for such a prompt, if no lease is renewed. Nothing: never.
  virtual std::optional<absl::Duration> RoomIn(const KvPrompt& prompt, const Plan& plan) const = 0;

  // The lease lasts `lasts` from now on, as the answer says. NOT_FOUND: as for Open.
  virtual absl::StatusOr<absl::Duration> Renew(const std::string& lease, const std::string& tenant,
                                               absl::Duration lasts) = 0;
  // Ends a lease; does nothing where there is none.
  virtual void Release(const std::string& lease, const std::string& tenant) = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_KV_LEASES_H_
