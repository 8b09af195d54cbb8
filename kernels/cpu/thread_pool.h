// The threads inside one rank: a fixed team that shares out the tiles of one operation at a time.
#ifndef MESHFILL_KERNELS_CPU_THREAD_POOL_H_
#define MESHFILL_KERNELS_CPU_THREAD_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace meshfill {

// Owned and called by one thread (the rank's), which is worker 0 of the team. A team of one starts no thread.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // ≥ 1, the caller's included
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(task, worker) once for each task in [0, tasks), dealt out one by one in rising order to whichever
  // worker is free; worker is in [0, threads()). Returns when all have returned. Not reentrant.
  void ParallelFor(int64_t tasks, const std::function<void(int64_t task, int worker)>& body);

 private:
  void WorkerLoop(int worker);
  void DrawTasks(int worker);

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  const std::function<void(int64_t, int)>* body_ = nullptr;  // guarded by mutex_ between runs
  int64_t tasks_ = 0;
  std::atomic<int64_t> next_{0};
  int64_t generation_ = 0;
  int running_ = 0;
  bool quit_ = false;
};

}  // namespace meshfill

#endif  // MESHFILL_KERNELS_CPU_THREAD_POOL_H_
