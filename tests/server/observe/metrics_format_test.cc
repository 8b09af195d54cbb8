#include "server/observe/metrics_format.h"

#include "gtest/gtest.h"

namespace meshfill {
namespace {

TEST(MetricsFormatTest, IsWhatTheClientWouldRatherHave) {
  // The first two are what Prometheus 2.42 and 3.0 send.
  for (const char* open_metrics :
       {"application/openmetrics-text;version=1.0.0;q=0.8,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
        "application/openmetrics-text;version=0.0.1;q=0.5,"
        "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
        "application/openmetrics-text", "application/openmetrics-text;version=\"1.0.0\";q=0.1",
        "text/plain;q=0.5, application/openmetrics-text;q=0.5",
        "application/openmetrics-text;q=0.5,text/plain;q=0.3,application/openmetrics-text;q=0.1"}) {
    EXPECT_EQ(PreferredFormat(open_metrics), MetricsFormat::kOpenMetrics) << open_metrics;
  }
  for (const char* text :
       {"", "*/*", "text/plain", "text/html,*/*;q=0.8", "application/openmetrics-text;version=0.0.1",
        "application/openmetrics-text;q=0", "application/openmetrics-text;q=0.5,text/plain;q=0.6",
        "application/openmetrics-text;q=0.5,text/plain", "application/json",
        "text/plain;q=0.7,application/openmetrics-text;q=0.5,text/plain;q=0.3"}) {
    EXPECT_EQ(PreferredFormat(text), MetricsFormat::kPrometheus) << text;
  }
}

}  // namespace
}  // namespace meshfill
