// The text as the specification has it; that others read it the same is open_metrics_test.py's.
#include "server/observe/metrics_text.h"

#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "prometheus/summary.h"

namespace meshfill {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(MetricsTextTest, IsOpenMetrics) {
  prometheus::Registry registry;
  auto& counter = prometheus::BuildCounter().Name("done_total").Help("A \"line\"\nof \\.").Register(registry);
  counter.Add({{"code", "a\"b\\c\nd"}, {"x", "1"}}).Increment(3);
  auto& gauge = prometheus::BuildGauge().Name("level").Help("Now.").Register(registry);
  gauge.Add({{"at", "0"}}).Set(0.1);
  auto& histogram = prometheus::BuildHistogram().Name("took_seconds").Help("Time.").Register(registry);
  auto& took = histogram.Add({}, prometheus::Histogram::BucketBoundaries{0.5, 600});
  for (const double seconds : {0.25, 3.0, 5.0, 601.0}) took.Observe(seconds);
  auto& labelled = prometheus::BuildHistogram().Name("by_seconds").Help("Time.").Register(registry);
  labelled.Add({{"up_to", "8"}}, prometheus::Histogram::BucketBoundaries{1}).Observe(2);
  prometheus::BuildSummary()
      .Name("left_out")
      .Help("No.")
      .Register(registry)
      .Add({}, prometheus::Summary::Quantiles{});
  const BucketExemplars exemplars = {
      {600, {.trace_id = "0af7651916cd43dd8448eb211c80319c", .value = 5, .at = absl::FromUnixMillis(1500)}},
      {kInfinity, {.trace_id = "1", .value = 601, .at = absl::FromUnixSeconds(1'700'000'000)}}};
  const std::string text = MetricsText(registry.Collect(), MetricsFormat::kOpenMetrics,
                                       {{"took_seconds", exemplars}, {"by_seconds", exemplars}});
  EXPECT_EQ(text, R"(# HELP done A \"line\"\nof \\.
# TYPE done counter
done_total{code="a\"b\\c\nd",x="1"} 3.0
# HELP level Now.
# TYPE level gauge
level{at="0"} 0.1
# HELP took_seconds Time.
# TYPE took_seconds histogram
took_seconds_bucket{le="0.5"} 1
took_seconds_bucket{le="600.0"} 3 # {trace_id="0af7651916cd43dd8448eb211c80319c"} 5.0 1.500
took_seconds_bucket{le="+Inf"} 4 # {trace_id="1"} 601.0 1700000000.000
took_seconds_count 4
took_seconds_sum 609.25
# HELP by_seconds Time.
# TYPE by_seconds histogram
by_seconds_bucket{up_to="8",le="1.0"} 0
by_seconds_bucket{up_to="8",le="+Inf"} 1
by_seconds_count{up_to="8"} 1
by_seconds_sum{up_to="8"} 2.0
# EOF
)");
}

TEST(MetricsTextTest, WritesEveryNumber) {
  prometheus::Registry registry;
  auto& gauge = prometheus::BuildGauge().Name("level").Help("").Register(registry);
  const auto number = [&](double value) {
    gauge.Add({}).Set(value);
    const std::string text = MetricsText(registry.Collect(), MetricsFormat::kOpenMetrics);
    const size_t begin = text.rfind("\nlevel ") + 7;
    return text.substr(begin, text.find('\n', begin) - begin);
  };
  EXPECT_EQ(number(kInfinity), "+Inf");
  EXPECT_EQ(number(-kInfinity), "-Inf");
  EXPECT_EQ(number(std::numeric_limits<double>::quiet_NaN()), "NaN");
  EXPECT_EQ(number(0), "0.0");
  EXPECT_EQ(number(-2), "-2.0");
  EXPECT_EQ(number(1e30), "1e+30");
  EXPECT_EQ(std::stod(number(0.1 + 0.2)), 0.1 + 0.2);
}

TEST(MetricsTextTest, IsPrometheusTextOtherwise) {
  prometheus::Registry registry;
  prometheus::BuildCounter().Name("done_total").Help("Done.").Register(registry).Add({}).Increment(3);
  EXPECT_EQ(MetricsText(registry.Collect(), MetricsFormat::kPrometheus),
            "# HELP done_total Done.\n# TYPE done_total counter\ndone_total 3\n");
}

}  // namespace
}  // namespace meshfill
