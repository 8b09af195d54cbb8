// The threads inside one rank: a fixed team that shares out the tiles of one operation at a time.
#ifndef MESHFILL_KERNELS_CPU_THREAD_POOL_H_
#define MESHFILL_KERNELS_CPU_THREAD_POOL_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "kernels/mutex.h"

namespace meshfill {

// Owned and called by one thread (the rank's), which is worker 0 of the team. A team of one starts no thread.
//
// The teams of several ranks may share fewer cores than they have threads, so nobody spins, and a run waits
// only for the workers that joined it: one that is woken too late to find a task finds no run either and
// sleeps again.
class ThreadPool {
 public:
  using Body = std::function<void(int64_t task, int worker)>;

  // ≥ 1 threads, the caller's included. Throws std::system_error where one cannot be started.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(task, worker) once for each task in [0, tasks), dealt out one by one in rising order to
  // whichever worker is free; worker is in [0, threads()). Returns when all have returned. Not reentrant.
  void ParallelFor(int64_t tasks, const Body& body);

 private:
  void Quit();  // ends and joins the workers
  void WorkerLoop(int worker);
  void DrawTasks(const Body& body, int64_t tasks, int worker);

  // Mutex rather than absl::Mutex: ThreadSanitizer does not see through the latter where the
  // distribution built it without instrumentation.
  Mutex mu_;
  CondVar start_;                                    // a run is open, or quit_
  CondVar left_;                                     // the last worker left a closed run
  const Body* body_ ABSL_GUARDED_BY(mu_) = nullptr;  // the open run's; null: none is open
  int64_t tasks_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t run_ ABSL_GUARDED_BY(mu_) = 0;  // counts runs, so that no worker joins one twice
  int joined_ ABSL_GUARDED_BY(mu_) = 0;   // workers inside the run, the caller not counted
  bool quit_ ABSL_GUARDED_BY(mu_) = false;
  std::atomic<int64_t> next_task_{0};
  std::vector<std::thread> workers_;  // last: they use all of the above
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_THREAD_POOL_H_
