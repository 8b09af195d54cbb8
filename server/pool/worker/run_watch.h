// Whether a worker's ranks stand still where they have to move: while they are inside an operation and their
// run is not paused, and from when their run was told to stop. A rank that waits for a peer has a deadline of
// its own. Pure: no threads, no clock.
#ifndef MESHFILL_SERVER_POOL_WORKER_RUN_WATCH_H_
#define MESHFILL_SERVER_POOL_WORKER_RUN_WATCH_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/time/time.h"
#include "server/observe/liveness.h"
#include "server/pool/worker/worker_machine.h"

namespace meshfill {

class RunWatch {
 public:
  // Follows what the machine wants done (worker_machine.h), on ranks with `layers` layers; what is of no
  // run's course changes nothing.
  void Hear(const WorkerMachine::Action& action, int layers);
  void End(uint64_t run) { runs_.erase(run); }

  // What stands still for too long, as StandstillWatch says; empty: nothing. Runs that have not begun here
  // count for nothing.
  std::string Look(const WorkerMachine::ProgressOfRuns& progress, absl::Time now);

 private:
  struct Run {
    double layer_seconds = 0;  // predicted
    bool paused = false;
    bool stopping = false;
  };

  std::map<uint64_t, Run> runs_;
  StandstillWatch watch_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_POOL_WORKER_RUN_WATCH_H_
