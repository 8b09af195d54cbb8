// The metrics of a process that every Prometheus client library has: process_cpu_seconds_total and the like.
#ifndef MESHFILL_SERVER_OBSERVE_PROCESS_METRICS_H_
#define MESHFILL_SERVER_OBSERVE_PROCESS_METRICS_H_

#include <cstdint>
#include <vector>

#include "prometheus/metric_family.h"

namespace meshfill {

// The metrics of this process, now. A family that the system does not tell is left out.
std::vector<prometheus::MetricFamily> CollectProcessMetrics();

// Bytes of this process in memory now; 0 where the system does not tell.
int64_t ResidentBytes();

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_PROCESS_METRICS_H_
