// In which text format /metrics answers.
#ifndef MESHFILL_SERVER_OBSERVE_METRICS_FORMAT_H_
#define MESHFILL_SERVER_OBSERVE_METRICS_FORMAT_H_

#include "absl/strings/string_view.h"

namespace meshfill {

enum class MetricsFormat {
  kPrometheus,   // 0.0.4
  kOpenMetrics,  // 1.0.0
};

const char* ContentTypeOf(MetricsFormat format);

// What a client whose request has this Accept header would rather have: OpenMetrics where it is named, with a
// weight above 0 and not below that of text/plain. Empty, or no such header: Prometheus' format.
MetricsFormat PreferredFormat(absl::string_view accept);

}  // namespace meshfill

#endif  // MESHFILL_SERVER_OBSERVE_METRICS_FORMAT_H_
