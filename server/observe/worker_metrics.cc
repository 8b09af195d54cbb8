#include "server/observe/worker_metrics.h"

#include <algorithm>
#include <iterator>

#include "prometheus/gauge.h"
#include "prometheus/registry.h"
#include "server/observe/build_name.h"
#include "server/observe/metrics_text.h"
#include "server/observe/process_metrics.h"

namespace meshfill {
namespace {

using prometheus::Gauge;

Gauge& AddGauge(prometheus::Registry& registry, const char* name, const char* help,
                const prometheus::Labels& labels = {}) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add(labels);
}

}  // namespace

class WorkerMetrics::Families {
 public:
  prometheus::Registry registry;
  Gauge& member =
      AddGauge(registry, "meshfill_worker_member", "1 while this worker belongs to a pool, else 0.");
  Gauge& runs = AddGauge(registry, "meshfill_worker_runs", "Prefills that this worker takes part in now.");
  Gauge& kv_leases =
      AddGauge(registry, "meshfill_worker_kept_leases", "Leases of whose K and V this worker holds a part.");
  Gauge& kv_bytes = AddGauge(registry, "meshfill_worker_kept_bytes",
                             "Bytes of K and V charged to this worker, cached ones too.");
  Gauge& kv_max_bytes =
      AddGauge(registry, "meshfill_worker_kept_max_bytes", "The bound on what this worker keeps.");
  Gauge& shared_weight_bytes =
      AddGauge(registry, "meshfill_worker_shared_weight_bytes",
               "Where workers share the weights: bytes of this one's share and of gathered layers.");
};

WorkerMetrics::WorkerMetrics() : families_(std::make_unique<Families>()) {
  AddGauge(families_->registry, "meshfill_build_info", "1, with the build as labels.",
           {{"version", MESHFILL_VERSION}, {"commit", kBuildCommit}})
      .Set(1);
}
WorkerMetrics::~WorkerMetrics() = default;

void WorkerMetrics::Set(const WorkerLoad& load) {
  member_ = load.member;
  families_->member.Set(load.member ? 1 : 0);
  families_->runs.Set(load.runs);
  families_->kv_leases.Set(static_cast<double>(load.kv_leases));
  families_->kv_bytes.Set(static_cast<double>(load.kv_bytes));
  families_->kv_max_bytes.Set(static_cast<double>(load.kv_max_bytes));
  families_->shared_weight_bytes.Set(static_cast<double>(load.shared_weight_bytes));
}

std::string WorkerMetrics::Text(MetricsFormat format) const {
  std::vector<prometheus::MetricFamily> families = families_->registry.Collect();
  std::ranges::move(CollectProcessMetrics(), std::back_inserter(families));
  return MetricsText(families, format);
}

std::vector<HttpPage> WorkerMetrics::Pages() const {
  return {
      MetricsPage([this](MetricsFormat format) { return Text(format); }),
      {"/readyz", "text/plain", [this] { return member_ ? "belongs to a pool\n" : "belongs to no pool\n"; },
       [this] { return member_.load(); }}};
}

}  // namespace meshfill
