#include "kernels/cpu/thread_pool.h"

namespace meshfill {

ThreadPool::ThreadPool(int threads) {
  workers_.reserve(threads - 1);
  for (int worker = 1; worker < threads; ++worker) {
    workers_.emplace_back([this, worker] { WorkerLoop(worker); });
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    quit_ = true;
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::ParallelFor(int64_t tasks, const Body& body) {
  if (workers_.empty() || tasks <= 1) {
    for (int64_t task = 0; task < tasks; ++task) body(task, 0);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    body_ = &body;
    tasks_ = tasks;
    ++run_;
    next_task_.store(0, std::memory_order_relaxed);
  }
  start_.notify_all();
  DrawTasks(body, tasks, 0);
  std::unique_lock lock(mutex_);
  body_ = nullptr;  // closed: late workers stay out
  left_.wait(lock, [this] { return joined_ == 0; });
}

void ThreadPool::DrawTasks(const Body& body, int64_t tasks, int worker) {
  for (;;) {
    const int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks) return;
    body(task, worker);
  }
}

void ThreadPool::WorkerLoop(int worker) {
  int64_t last_run = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    start_.wait(lock, [&] { return quit_ || (body_ != nullptr && run_ != last_run); });
    if (quit_) return;
    last_run = run_;
    const Body& body = *body_;
    const int64_t tasks = tasks_;
    ++joined_;
    lock.unlock();
    DrawTasks(body, tasks, worker);
    lock.lock();
    if (--joined_ == 0) left_.notify_one();
  }
}

}  // namespace meshfill
