#include "server/observe/metrics_format.h"

#include <algorithm>

#include "server/observe/accept_header.h"

namespace meshfill {

const char* ContentTypeOf(MetricsFormat format) {
  return format == MetricsFormat::kOpenMetrics ? "application/openmetrics-text; version=1.0.0; charset=utf-8"
                                               : "text/plain; version=0.0.4; charset=utf-8";
}

MetricsFormat PreferredFormat(absl::string_view accept) {
  double open_metrics = 0, text = 0;
  for (const AcceptedElement& type : ParseAccept(accept)) {
    if (type.Is("text/plain")) text = std::max(text, type.weight);
    if (type.Is("application/openmetrics-text") && type.Parameter("version").value_or("1.0.0") == "1.0.0") {
      open_metrics = std::max(open_metrics, type.weight);
    }
  }
  return open_metrics > 0 && open_metrics >= text ? MetricsFormat::kOpenMetrics : MetricsFormat::kPrometheus;
}

}  // namespace meshfill
