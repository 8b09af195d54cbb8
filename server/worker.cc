#include "server/worker.h"

#include <memory>
#include <optional>

#include "kernels/return_if_error.h"
#include "server/observe/log.h"
#include "server/pool/worker_process.h"
#include "server/process_setup.h"
#include "server/shutdown_signals.h"

namespace meshfill {

absl::Status RunWorker(const v1::Config& config, const std::string& join) {
  SetUpProcess(config.log());
  const LogFlush flush;
  ShutdownSignals signals([] { Log(kNothingToReload); });
  ASSIGN_OR_RETURN(const std::unique_ptr<WorkerProcess> worker, WorkerProcess::Start(config, join));
  bool draining = false;
  while (true) {
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
