#include "kernels/cpu/thread_pool.h"

#include "kernels/mutex.h"

namespace meshfill {

ThreadPool::ThreadPool(int threads) {
  workers_.reserve(threads - 1);
  try {
    for (int worker = 1; worker < threads; ++worker) {
      workers_.emplace_back([this, worker] { WorkerLoop(worker); });
    }
  } catch (...) {  // no thread is to be had: the caller's to say
    Quit();
    throw;
  }
}

ThreadPool::~ThreadPool() { Quit(); }

void ThreadPool::Quit() {
  {
    const MutexLock lock(mu_);
    quit_ = true;
  }
  start_.NotifyAll();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::ParallelFor(int64_t tasks, const Body& body) {
  if (workers_.empty() || tasks <= 1) {
    for (int64_t task = 0; task < tasks; ++task) body(task, 0);
    return;
  }
  {
    const MutexLock lock(mu_);
    body_ = &body;
    tasks_ = tasks;
    ++run_;
    next_task_.store(0, std::memory_order_relaxed);
  }
  start_.NotifyAll();
  DrawTasks(body, tasks, 0);
  MutexLock lock(mu_);
  body_ = nullptr;  // closed: late workers stay out
  while (joined_ > 0) left_.Wait(mu_);
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
  MutexLock lock(mu_);
  for (;;) {
    while (!quit_ && (body_ == nullptr || run_ == last_run)) start_.Wait(mu_);
    if (quit_) return;
    last_run = run_;
    const Body& body = *body_;
    const int64_t tasks = tasks_;
    ++joined_;
    lock.Unlock();
    DrawTasks(body, tasks, worker);
    lock.Lock();
    if (--joined_ == 0) left_.NotifyOne();
  }
}

}  // namespace meshfill
