// What the configuration gives to each tenant: its share of the ranks' time and of the queue, and its bounds.
#ifndef MESHFILL_SERVER_CONFIG_TENANTS_H_
#define MESHFILL_SERVER_CONFIG_TENANTS_H_

#include <cstdint>
#include <limits>
#include <map>
#include <string>

#include "meshfill/v1/config.pb.h"

namespace meshfill {

struct TenantLimits {
  // Weight of its share of the ranks' time and of a full queue, beside other tenants.
  double weight = 1;
  int64_t max_requests = std::numeric_limits<int64_t>::max();  // requests that wait or upload
  int64_t max_tokens = std::numeric_limits<int64_t>::max();    // tokens of the requests that wait or upload
  int64_t max_kv_bytes = std::numeric_limits<int64_t>::max();  // bytes of K and V under its leases
  int max_priority = std::numeric_limits<int>::max();          // highest class of its requests
};

class Tenants {
 public:
  Tenants() = default;
  // `config` has its defaults. A tenant that it names has what is said of it, and else what all others have.
  explicit Tenants(const v1::Config& config);

  const TenantLimits& LimitsOf(const std::string& tenant) const {
    const auto named = named_.find(tenant);
    return named == named_.end() ? others_ : named->second;
  }
  // Those that the configuration names.
  const std::map<std::string, TenantLimits>& named() const { return named_; }

 private:
  TenantLimits others_;
  std::map<std::string, TenantLimits> named_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_CONFIG_TENANTS_H_
