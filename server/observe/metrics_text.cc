#include "server/observe/metrics_text.h"

#include <charconv>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "prometheus/text_serializer.h"

namespace meshfill {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

constexpr absl::string_view kTotal = "_total";

// The shortest decimal that reads back as the same value, never like an integer: "600.0", "+Inf".
std::string Number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
  std::string text(digits, end);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string Escaped(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"\\", "\\\\"}, {"\n", "\\n"}, {"\"", "\\\""}});
}

// The labels with `more`, one more of them or none: {a="1",le="2.0"}
std::string Labels(const std::vector<ClientMetric::Label>& labels, const std::string& more = "") {
  std::string text;
  for (const ClientMetric::Label& label : labels) {
    absl::StrAppend(&text, text.empty() ? "" : ",", label.name, "=\"", Escaped(label.value), "\"");
  }
  if (!more.empty()) absl::StrAppend(&text, text.empty() ? "" : ",", more);
  return text.empty() ? "" : absl::StrCat("{", text, "}");
}

std::string ExemplarText(const Exemplar& exemplar) {
  return absl::StrFormat(" # {trace_id=\"%s\"} %s %.3f", exemplar.trace_id, Number(exemplar.value),
                         absl::ToDoubleSeconds(exemplar.at - absl::UnixEpoch()));
}

void AddHistogram(const std::string& name, const ClientMetric& metric, const BucketExemplars& exemplars,
                  std::string& text) {
  for (const ClientMetric::Bucket& bucket : metric.histogram.bucket) {
    const std::string bound = absl::StrCat("le=\"", Number(bucket.upper_bound), "\"");
    absl::StrAppend(&text, name, "_bucket", Labels(metric.label, bound), " ", bucket.cumulative_count);
    const auto exemplar = exemplars.find(bucket.upper_bound);
    if (exemplar != exemplars.end()) text += ExemplarText(exemplar->second);
    text += '\n';
  }
  absl::StrAppend(&text, name, "_count", Labels(metric.label), " ", metric.histogram.sample_count, "\n");
  absl::StrAppend(&text, name, "_sum", Labels(metric.label), " ", Number(metric.histogram.sample_sum), "\n");
}

const char* TypeName(MetricType type) {
  switch (type) {
    case MetricType::Counter:
      return "counter";
    case MetricType::Gauge:
      return "gauge";
    case MetricType::Histogram:
      return "histogram";
    default:
      return nullptr;
  }
}

}  // namespace

std::string MetricsText(const std::vector<MetricFamily>& families, MetricsFormat format,
                        const std::map<std::string, BucketExemplars>& exemplars) {
  if (format == MetricsFormat::kPrometheus) return prometheus::TextSerializer().Serialize(families);
  const BucketExemplars none;
  std::string text;
  for (const MetricFamily& family : families) {
    const char* type = TypeName(family.type);
    if (type == nullptr) continue;
    // A counter's family is named without what its samples end in.
    const bool counts = family.type == MetricType::Counter;
    const std::string name(counts ? absl::StripSuffix(family.name, kTotal) : family.name);
    absl::StrAppend(&text, "# HELP ", name, " ", Escaped(family.help), "\n# TYPE ", name, " ", type, "\n");
    for (const ClientMetric& metric : family.metric) {
      if (family.type == MetricType::Histogram) {
        const auto known = metric.label.empty() ? exemplars.find(name) : exemplars.end();
        AddHistogram(name, metric, known != exemplars.end() ? known->second : none, text);
      } else {
        absl::StrAppend(&text, name, counts ? kTotal : "", Labels(metric.label), " ",
                        Number(counts ? metric.counter.value : metric.gauge.value), "\n");
      }
    }
  }
  return text + "# EOF\n";
}

}  // namespace meshfill
