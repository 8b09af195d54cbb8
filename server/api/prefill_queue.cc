#include "server/api/prefill_queue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/monotonic_time.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"
#include "server/api/status_details.h"

namespace meshfill {

class PrefillQueue::ProgressObserver final : public PrefillObserver {
 public:
  ProgressObserver(PrefillQueue& queue, Job& job) : queue_(queue), job_(job) {}
  void OnLayerDone(int layers_done, int layers) override { queue_.OnLayerDone(job_, layers_done, layers); }

 private:
  PrefillQueue& queue_;
  Job& job_;
};

// When the engine's places get free, in seconds from now.
class PrefillQueue::Places {
 public:
  explicit Places(int places) : free_in_(std::max(1, places), 0.0) {}

  double NextFree() const { return *std::min_element(free_in_.begin(), free_in_.end()); }
  // Something of so many seconds takes the place that gets free next. Returns when it ends.
  double Take(double seconds) { return *std::min_element(free_in_.begin(), free_in_.end()) += seconds; }

 private:
  std::vector<double> free_in_;
};

void PrefillQueue::Slot::SetPredictedSeconds(double seconds) { queue_.SetPredictedSeconds(ticket_, seconds); }

absl::StatusOr<int> PrefillQueue::Slot::Submit(std::vector<uint32_t> tokens, const PrefillOptions& options,
                                               std::shared_ptr<Waiter> waiter) {
  return queue_.Submit(ticket_, std::move(tokens), options, std::move(waiter));
}

PrefillQueue::PrefillQueue(PrefillEngine& engine, const Limits& limits, Metrics& metrics,
                           LastPrefill& last_prefill)
    : engine_(engine), limits_(limits), metrics_(metrics), last_prefill_(last_prefill) {
  metrics_.SetQueueLimits(limits_.max_tokens, limits_.max_wait);
  for (int place = 0; place < engine_.capacity(); ++place) {
    runners_.emplace_back([this] { RunJobs(); });
  }
}

PrefillQueue::~PrefillQueue() {
  StopAll(absl::UnavailableError("the server is shutting down; try another one"));
  for (std::thread& runner : runners_) runner.join();
}

absl::StatusOr<std::unique_ptr<PrefillQueue::Slot>> PrefillQueue::Reserve(const Request& request) {
  const MutexLock lock(mu_);
  if (draining_) return absl::UnavailableError("the server is draining; try another one");
  for (const auto& [ticket, job] : jobs_) {
    if (job->request.id != request.id) continue;
    return absl::AlreadyExistsError(absl::StrCat(
        "request_id \"", request.id, "\" is in use by a live request; wait for its end or choose another"));
  }
  RETURN_IF_ERROR(CheckRoom(request));
  const uint64_t ticket = ++last_ticket_;
  auto job = std::make_unique<Job>();
  job->request = request;
  job->reserved_at = MonotonicNow();
  jobs_.emplace(ticket, std::move(job));
  PublishCount();
  return std::make_unique<Slot>(*this, ticket);
}

absl::Status PrefillQueue::CheckRoom(const Request& request) const {
  const auto refuse = [](const std::string& message, double retry_seconds) {
    return WithRetryAfter(absl::ResourceExhaustedError(message), absl::Seconds(std::max(1.0, retry_seconds)));
  };
  const Snapshot count = Count();
  if (count.requests + 1 > limits_.max_requests) {
    return refuse(absl::StrCat("the queue is full: ", count.requests, " requests (queue.max_requests is ",
                               limits_.max_requests, "); try again later"),
                  SecondsUntilRoom(request));
  }
  if (count.tokens + request.tokens > limits_.max_tokens) {
    return refuse(
        absl::StrCat("the queue has no room for ", request.tokens, " tokens beside the ", count.tokens,
                     " in it (queue.max_tokens is ", limits_.max_tokens, "); ",
                     request.tokens > limits_.max_tokens ? "send a shorter prompt" : "try again later"),
        SecondsUntilRoom(request));
  }
  const double wait_seconds = PredictedWaitSeconds(request.priority);
  const double max_wait_seconds = absl::ToDoubleSeconds(limits_.max_wait);
  if (wait_seconds > max_wait_seconds) {
    return refuse(absl::StrFormat("the predicted wait is %.3g s (queue.max_wait is %.3g s); try again later",
                                  wait_seconds, max_wait_seconds),
                  wait_seconds - max_wait_seconds);
  }
  const double left_seconds = absl::ToDoubleSeconds(request.deadline - MonotonicNow());
  if (left_seconds <= 0)
    return absl::DeadlineExceededError("the deadline passed before the request was read");
  if (wait_seconds + request.predicted_seconds > left_seconds) {
    return refuse(
        absl::StrFormat("the deadline is in %.3g s, but the prediction is %.3g s of waiting and %.3g s of "
                        "prefill; allow more time, or try again later",
                        left_seconds, wait_seconds, request.predicted_seconds),
        wait_seconds);
  }
  return absl::OkStatus();
}

absl::StatusOr<int> PrefillQueue::Submit(uint64_t ticket, std::vector<uint32_t> tokens,
                                         const PrefillOptions& options, std::shared_ptr<Waiter> waiter) {
  const MutexLock lock(mu_);
  const auto entry = jobs_.find(ticket);
  if (entry == jobs_.end()) return stop_reason_;  // StopAll dropped the upload
  Job& job = *entry->second;
  job.phase = Phase::kWaiting;
  job.arrival = ++last_arrival_;
  job.submitted_at = MonotonicNow();
  job.tokens = std::move(tokens);
  job.options = options;
  job.options.request_id = job.request.id;
  job.waiter = std::move(waiter);
  int before = 0;
  for (const auto& [other_ticket, other] : jobs_) {
    const bool waits_before = other->phase == Phase::kWaiting && Before(*other, job);
    if (other->phase == Phase::kRunning || waits_before) ++before;
  }
  changed_.NotifyAll();
  return before;
}

void PrefillQueue::SetPredictedSeconds(uint64_t ticket, double seconds) {
  const MutexLock lock(mu_);
  const auto entry = jobs_.find(ticket);
  if (entry != jobs_.end()) entry->second->request.predicted_seconds = seconds;  // StopAll drops uploads
}

void PrefillQueue::Withdraw(uint64_t ticket) {
  std::unique_ptr<Job> gone;  // freed after the lock
  const MutexLock lock(mu_);
  const auto entry = jobs_.find(ticket);
  if (entry == jobs_.end()) return;
  if (entry->second->phase == Phase::kRunning) return StopRunning(*entry->second);
  gone = std::move(entry->second);
  jobs_.erase(entry);
  PublishCount();
}

void PrefillQueue::Drain() {
  const MutexLock lock(mu_);
  draining_ = true;
}

void PrefillQueue::StopAll(const absl::Status& reason) {
  std::vector<std::unique_ptr<Job>> dropped;
  {
    const MutexLock lock(mu_);
    if (stopping_) return;
    draining_ = stopping_ = true;
    stop_reason_ = reason;
    for (auto entry = jobs_.begin(); entry != jobs_.end();) {
      if (entry->second->phase == Phase::kRunning) {
        entry->second->stop_reason = reason;
        StopRunning(*entry->second);
        ++entry;
        continue;
      }
      dropped.push_back(std::move(entry->second));
      entry = jobs_.erase(entry);
    }
    PublishCount();
    changed_.NotifyAll();
  }
  const absl::Time now = MonotonicNow();
  for (const auto& job : dropped) {
    if (job->waiter != nullptr)
      job->waiter->OnPrefillDone(reason, absl::ToDoubleSeconds(now - job->submitted_at));
  }
}

void PrefillQueue::StopRunning(Job& job) {
  job.stopped = true;
  if (job.prefill != nullptr) job.prefill->Stop();
}

void PrefillQueue::RunJobs() {
  while (true) {
    uint64_t ticket = 0;
    Job* job = nullptr;
    {
      MutexLock lock(mu_);
      while (!stopping_ && NextTicket() == 0) changed_.Wait(mu_);
      if (stopping_) return;
      ticket = NextTicket();
      job = jobs_.at(ticket).get();
      job->phase = Phase::kRunning;
      job->begin = job->last_layer_at = MonotonicNow();
      job->layers = engine_.model().layers;
      PublishCount();
    }
    RunJob(ticket, *job);
  }
}

// The job lives until it is erased here: whoever withdraws a running one only stops its prefill.
void PrefillQueue::RunJob(uint64_t ticket, Job& job) {
  const absl::Time now = MonotonicNow();
  const double queue_seconds = absl::ToDoubleSeconds(now - job.submitted_at);
  metrics_.OnPrefillStart(queue_seconds);
  absl::StatusOr<PrefillResult> result =
      now < job.request.deadline ? RunOnEngine(job)
                                 : absl::DeadlineExceededError(absl::StrFormat(
                                       "the deadline passed after %.3g s in the queue", queue_seconds));
  if (result.ok()) {
    metrics_.OnPrefillDone(*result);
    last_prefill_.OnPrefillDone(*result);
  }

  std::unique_ptr<Job> done;
  {
    const MutexLock lock(mu_);
    done = std::move(jobs_.at(ticket));
    jobs_.erase(ticket);
    PublishCount();
    if (!result.ok() && !done->stop_reason.ok()) result = done->stop_reason;
  }
  done->waiter->OnPrefillDone(std::move(result), queue_seconds);
}

absl::StatusOr<PrefillResult> PrefillQueue::RunOnEngine(Job& job) {
  ProgressObserver observer(*this, job);
  ASSIGN_OR_RETURN(std::unique_ptr<Prefill> prefill, engine_.Start({job.tokens, job.options}, &observer));
  {
    const MutexLock lock(mu_);
    job.prefill = prefill.get();
    if (job.stopped) prefill->Stop();
  }
  absl::StatusOr<PrefillResult> result = prefill->Wait();
  const MutexLock lock(mu_);
  job.prefill = nullptr;
  return result;
}

void PrefillQueue::OnLayerDone(Job& job, int layers_done, int layers) {
  std::shared_ptr<Waiter> waiter;
  double seconds = 0;
  {
    const MutexLock lock(mu_);
    job.layers_done = layers_done;
    job.layers = layers;
    job.last_layer_at = MonotonicNow();
    seconds = absl::ToDoubleSeconds(job.last_layer_at - job.begin);
    waiter = job.waiter;
  }
  waiter->OnLayerDone(layers_done, layers, seconds);
}

bool PrefillQueue::Before(const Job& left, const Job& right) {
  if (left.request.priority != right.request.priority) return left.request.priority > right.request.priority;
  return left.arrival < right.arrival;
}

uint64_t PrefillQueue::NextTicket() const {
  uint64_t best = 0;
  for (const auto& [ticket, job] : jobs_) {
    if (job->phase != Phase::kWaiting) continue;
    if (best == 0 || Before(*job, *jobs_.at(best))) best = ticket;
  }
  return best;
}

// By the pace of the layers done so far; before the first one, by the prediction.
double PrefillQueue::RestSeconds(const Job& running) const {
  if (running.stopped) return 0;
  const absl::Time now = MonotonicNow();
  if (running.layers_done == 0) {
    return std::max(0.0, running.request.predicted_seconds - absl::ToDoubleSeconds(now - running.begin));
  }
  const double layer_seconds =
      absl::ToDoubleSeconds(running.last_layer_at - running.begin) / running.layers_done;
  const double rest = layer_seconds * (running.layers - running.layers_done);
  return std::max(0.0, rest - absl::ToDoubleSeconds(now - running.last_layer_at));
}

PrefillQueue::Places PrefillQueue::PlacesOfEngine() const {
  Places places(engine_.capacity());
  for (const auto& [ticket, job] : jobs_) {
    if (job->phase == Phase::kRunning) places.Take(RestSeconds(*job));
  }
  return places;
}

std::vector<const PrefillQueue::Job*> PrefillQueue::Order() const {
  std::vector<const Job*> order;
  for (const auto& [ticket, job] : jobs_) {
    if (job->phase != Phase::kRunning) order.push_back(job.get());
  }
  std::stable_sort(order.begin(), order.end(), [](const Job* left, const Job* right) {
    if (left->phase != right->phase) return left->phase == Phase::kWaiting;
    return Before(*left, *right);
  });
  return order;
}

double PrefillQueue::PredictedWaitSeconds(int priority) const {
  Places places = PlacesOfEngine();
  for (const Job* job : Order()) {
    if (job->request.priority >= priority) places.Take(job->request.predicted_seconds);
  }
  return places.NextFree();
}

// A place in the queue gets free when its prefill begins. Uploads are taken in order of their headers, after
// what waits.
double PrefillQueue::SecondsUntilRoom(const Request& request) const {
  Snapshot count = Count();
  Places places = PlacesOfEngine();
  for (const Job* job : Order()) {
    --count.requests;
    count.tokens -= job->request.tokens;
    if (count.requests < limits_.max_requests && count.tokens + request.tokens <= limits_.max_tokens) break;
    places.Take(job->request.predicted_seconds);
  }
  return places.NextFree();
}

PrefillQueue::Snapshot PrefillQueue::Count() const {
  Snapshot count;
  for (const auto& [ticket, job] : jobs_) {
    if (job->phase == Phase::kRunning) continue;
    ++count.requests;
    count.tokens += job->request.tokens;
  }
  return count;
}

void PrefillQueue::PublishCount() {
  QueueLoad load;
  for (const auto& [ticket, job] : jobs_) {
    if (job->phase == Phase::kRunning) {
      load.running_tokens += job->request.tokens;
      continue;
    }
    ++load.requests;
    load.tokens += job->request.tokens;
    if (job->phase == Phase::kWaiting) load.oldest = std::min(load.oldest, job->submitted_at);
  }
  metrics_.SetQueue(load);
}

PrefillQueue::Snapshot PrefillQueue::snapshot() const {
  const MutexLock lock(mu_);
  const absl::Time now = MonotonicNow();
  Snapshot snapshot = Count();
  const auto add = [&](const Job& job, absl::Time since, double rest_seconds) -> JobView& {
    return snapshot.jobs.emplace_back(JobView{.id = job.request.id,
                                              .phase = job.phase,
                                              .tokens = job.request.tokens,
                                              .elapsed_seconds = absl::ToDoubleSeconds(now - since),
                                              .predicted_rest_seconds = rest_seconds});
  };
  std::vector<const Job*> running;
  for (const auto& [ticket, job] : jobs_) {
    if (job->phase == Phase::kRunning) running.push_back(job.get());
  }
  std::sort(running.begin(), running.end(),
            [](const Job* left, const Job* right) { return left->begin < right->begin; });
  for (const Job* job : running) {
    JobView& view = add(*job, job->begin, RestSeconds(*job));
    view.layers_done = job->layers_done;
    view.layers = job->layers;
  }
  Places places = PlacesOfEngine();
  for (const Job* job : Order()) add(*job, job->reserved_at, places.Take(job->request.predicted_seconds));
  return snapshot;
}

}  // namespace meshfill
