#include "server/config/tenants.h"

namespace meshfill {
namespace {

TenantLimits Limits(const v1::Tenant& tenant, TenantLimits limits) {
  if (tenant.has_weight()) limits.weight = tenant.weight();
  if (tenant.has_max_requests()) limits.max_requests = tenant.max_requests();
  if (tenant.has_max_tokens()) limits.max_tokens = static_cast<int64_t>(tenant.max_tokens());
  if (tenant.has_max_kv_bytes()) limits.max_kv_bytes = static_cast<int64_t>(tenant.max_kv_bytes());
  if (tenant.has_max_priority()) limits.max_priority = tenant.max_priority();
  return limits;
}

}  // namespace

Tenants::Tenants(const v1::Config& config) : others_(Limits(config.tenant_limits(), {})) {
  for (const auto& [name, tenant] : config.tenants()) named_[name] = Limits(tenant, others_);
}

}  // namespace meshfill
