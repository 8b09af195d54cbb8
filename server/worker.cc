#include "server/worker.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"
#include "server/config/config.h"
#include "server/idle_memory.h"
#include "server/observe/http_pages.h"
#include "server/observe/liveness.h"
#include "server/observe/log.h"
#include "server/observe/worker_metrics.h"
#include "server/pool/worker/worker_process.h"
#include "server/process_setup.h"
#include "server/shutdown_signals.h"
#include "server/stoppable_load.h"

namespace meshfill {
namespace {

// Null: the address is empty.
absl::StatusOr<std::unique_ptr<HttpPages>> ListenForPages(const std::string& address,
                                                          const WorkerMetrics& metrics,
                                                          const Liveness& liveness) {
  if (address.empty()) return nullptr;
  std::vector<HttpPage> served = metrics.Pages();
  served.push_back(liveness.Page());
  auto pages = HttpPages::Listen(address, std::move(served));
  if (!pages.ok()) {
    return absl::Status(pages.status().code(),
                        absl::StrCat("pool.worker.metrics_listen: ", pages.status().message()));
  }
  Log(absl::StrCat("metrics listening on ", (*pages)->address()));
  return pages;
}

}  // namespace

absl::Status RunWorker(const v1::Config& config, const std::string& join) {
  SetUpProcess(config.log());
  const LogFlush flush;
  RETURN_IF_ERROR(CheckModelFolder(config));
  ShutdownSignals signals;
  WorkerMetrics metrics;
  Liveness liveness;
  ASSIGN_OR_RETURN(const auto pages,
                   ListenForPages(config.pool().worker().metrics_listen(), metrics, liveness));
  Log(absl::StrCat("loading ", config.model().path()));
  ASSIGN_OR_RETURN(const std::unique_ptr<WorkerProcess> worker,
                   LoadUnlessStopped(signals, [&] { return WorkerProcess::Start(config, join); }));
  IdleMemory memory;
  bool draining = false;
  while (true) {
    const WorkerLoad load = worker->load();
    metrics.Set(load);
    memory.Look(load.runs == 0, MonotonicNow());
    liveness.Beat(worker->standstill());
    if (const std::optional<absl::Status> exit = worker->Tick()) {
      Log("stopped");
      return *exit;
    }
    if (!signals.Wait(WorkerProcess::kTick)) continue;
    if (draining) return absl::CancelledError("stopped by a second signal");
    draining = true;
    Log("draining: the run that this worker takes part in finishes, and its leases are served until they "
        "end; a second signal stops at once");
    worker->Drain();
  }
}

}  // namespace meshfill
