// A load of weights that SIGTERM and SIGINT end.
#ifndef MESHFILL_SERVER_STOPPABLE_LOAD_H_
#define MESHFILL_SERVER_STOPPABLE_LOAD_H_

#include <chrono>
#include <cstdlib>
#include <future>
#include <utility>

#include "absl/time/time.h"
#include "server/observe/log.h"
#include "server/shutdown_signals.h"

namespace meshfill {

// What `load` returns. It runs on a thread of its own, so that a signal is heard meanwhile and ends the
// process with EXIT_SUCCESS: nobody has been promised anything yet, and a load cannot be interrupted.
template <typename Load>
auto LoadUnlessStopped(ShutdownSignals& signals, Load load) {
  auto loading = std::async(std::launch::async, std::move(load));
  while (loading.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    if (!signals.Wait(absl::Milliseconds(50))) continue;
    Log("stopped while loading the model");
    FlushLog();
    std::_Exit(EXIT_SUCCESS);
  }
  return loading.get();
}

}  // namespace meshfill

#endif  // MESHFILL_SERVER_STOPPABLE_LOAD_H_
