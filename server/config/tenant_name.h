// What a tenant may be called, in a prefill's header, in the configuration and in credentials alike.
//
// Calls about leases and requests say their tenant in gRPC metadata, which carries printable ASCII alone: a
// tenant of another name could never use its leases.
#ifndef MESHFILL_SERVER_CONFIG_TENANT_NAME_H_
#define MESHFILL_SERVER_CONFIG_TENANT_NAME_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace meshfill {

// INVALID_ARGUMENT: above 128 characters, or one that is not printable ASCII (0x20 to 0x7e). The message goes
// on after the name of what was checked.
absl::Status CheckTenantName(absl::string_view name);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CONFIG_TENANT_NAME_H_
