// Names of leases: who knows one may read what it is on.
#ifndef MESHFILL_ENGINE_KV_LEASE_NAME_H_
#define MESHFILL_ENGINE_KV_LEASE_NAME_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace meshfill {

// A new name that nobody can guess: 128 random bits in hex. INTERNAL: the system gives none.
absl::StatusOr<std::string> NewLeaseName();

// What logs and errors show of a name: its begin, so that their readers cannot use it.
std::string ShownLease(const std::string& lease);

// NOT_FOUND for a lease that is unknown, has ended, or is another tenant's.
absl::Status NoLease(const std::string& lease);

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_KV_LEASE_NAME_H_
