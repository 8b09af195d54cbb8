// Metrics as text: in Prometheus' format, or in OpenMetrics', which carries exemplars: the trace of one
// request beside a bucket.
//
// Source: OpenMetrics 1.0.0,
// https://github.com/prometheus/OpenMetrics/blob/v1.0.0/specification/OpenMetrics.md
#ifndef MESHFILL_SERVER_OBSERVE_METRICS_TEXT_H_
#define MESHFILL_SERVER_OBSERVE_METRICS_TEXT_H_

#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "prometheus/metric_family.h"
#include "server/observe/metrics_format.h"

namespace meshfill {

// The latest observation of a bucket whose trace is known.
struct Exemplar {
  std::string trace_id;  // 32 hexadecimal digits
  double value = 0;
  absl::Time at;  // by the wall clock
};
using BucketExemplars = std::map<double, Exemplar>;  // by the bucket's upper bound

// The families in `format`. OpenMetrics has counters, gauges and histograms, with `exemplars` of histograms
// without labels, by the family's name; families of other types are left out.
std::string MetricsText(const std::vector<prometheus::MetricFamily>& families, MetricsFormat format,
                        const std::map<std::string, BucketExemplars>& exemplars = {});

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_METRICS_TEXT_H_
