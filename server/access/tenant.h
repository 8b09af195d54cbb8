// The tenant that a call names where its message has no place for one: in the metadata `meshfill-tenant`.
#ifndef MESHFILL_SERVER_ACCESS_TENANT_H_
#define MESHFILL_SERVER_ACCESS_TENANT_H_

#include <string>

#include "grpcpp/server_context.h"

namespace meshfill {

inline constexpr char kTenantMetadata[] = "meshfill-tenant";

// Empty where the call names no tenant. All such calls are one tenant's.
inline std::string TenantOf(const grpc::ServerContextBase& context) {
  const auto found = context.client_metadata().find(kTenantMetadata);
  if (found == context.client_metadata().end()) return "";
  return std::string(found->second.data(), found->second.size());
}

}  // namespace meshfill

#endif  // MESHFILL_SERVER_ACCESS_TENANT_H_
