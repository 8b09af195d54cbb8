#include "server/api/prefill_queue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"

namespace meshfill {

class PrefillQueue::ProgressObserver final : public PrefillObserver {
 public:
  ProgressObserver(PrefillQueue& queue, uint64_t ticket, Job& job)
      : queue_(queue), ticket_(ticket), job_(job) {}
  void OnLayerDone(int layers_done, int layers) override {
    queue_.OnLayerDone(ticket_, job_, layers_done, layers);
  }

 private:
  PrefillQueue& queue_;
  const uint64_t ticket_;
  Job& job_;
};

namespace {

constexpr absl::Duration kLook = absl::Milliseconds(50);  // between two looks at whose turn it is

}  // namespace

void PrefillQueue::Slot::SetPredictedSeconds(double seconds, std::vector<SubmeshSeconds> submeshes) {
  queue_.SetPredictedSeconds(ticket_, seconds, std::move(submeshes));
}

absl::Status PrefillQueue::Slot::Pay(int64_t tokens_so_far) { return queue_.Pay(ticket_, tokens_so_far); }

absl::StatusOr<PrefillQueue::Turn> PrefillQueue::Slot::Submit(std::vector<uint32_t> tokens,
                                                              const PrefillOptions& options,
                                                              std::shared_ptr<Waiter> waiter) {
  return queue_.Submit(ticket_, std::move(tokens), options, std::move(waiter));
}

PrefillQueue::PrefillQueue(PrefillEngine& engine, const Limits& limits, Metrics& metrics,
                           LastPrefill& last_prefill, Clock clock)
    : clock_(std::move(clock)),
      engine_(engine),
      metrics_(metrics),
      last_prefill_(last_prefill),
      order_({.max_age = limits.max_age, .most_live = engine.capacity()}),
      room_(limits, clock_) {
  metrics_.SetQueueLimits(limits.max_tokens, limits.max_wait);
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
  RETURN_IF_ERROR(CheckUnused(request.id));
  const std::vector<uint64_t> slow = room_.PlacesToTakeFor(request.tenant, request.tokens);
  for (const uint64_t ticket : slow) Remove(ticket);
  if (!slow.empty()) PublishCount();
  const RunOrder::Job run = ToRunOrder(request);
  RETURN_IF_ERROR(room_.MayEnter(run, request.tokens, order_));
  const uint64_t ticket = ++last_ticket_;
  auto job = std::make_unique<Job>();
  job->request = request;
  job->reserved_at = clock_();
  order_.Announce(ticket, run, job->reserved_at);
  room_.Enter(ticket, run, request.tokens);
  jobs_.emplace(ticket, std::move(job));
  PublishCount();
  return std::make_unique<Slot>(*this, ticket);
}

absl::Status PrefillQueue::CheckId(const std::string& id) const {
  const MutexLock lock(mu_);
  return CheckUnused(id);
}

RunOrder::Job PrefillQueue::ToRunOrder(const Request& request) const {
  return {.tenant = request.tenant,
          .priority = request.priority,
          .work_seconds = request.predicted_seconds,
          .weight = room_.limits().tenants.LimitsOf(request.tenant).weight,
          .deadline = request.deadline,
          .submeshes = request.submeshes};
}

absl::Status PrefillQueue::CheckUnused(const std::string& id) const {
  for (const auto& [ticket, job] : jobs_) {
    if (job->request.id != id) continue;
    return absl::AlreadyExistsError(absl::StrCat(
        "request_id \"", id, "\" is in use by a live request; wait for its end or choose another"));
  }
  return absl::OkStatus();
}

absl::StatusOr<PrefillQueue::Turn> PrefillQueue::Submit(uint64_t ticket, std::vector<uint32_t> tokens,
                                                        const PrefillOptions& options,
                                                        std::shared_ptr<Waiter> waiter) {
  const MutexLock lock(mu_);
  const auto entry = jobs_.find(ticket);
  if (entry == jobs_.end()) return PlaceLost();
  Job& job = *entry->second;
  job.submitted_at = clock_();
  job.tokens = std::move(tokens);
  job.options = options;
  job.options.request_id = job.request.id;
  job.waiter = std::move(waiter);
  room_.Complete(ticket);
  order_.Complete(ticket, job.submitted_at);
  const std::vector<RunOrder::Turn> turns = order_.TurnsUpTo(ticket, job.submitted_at);
  const RunOrder::Turn& own = turns.back();
  // Who computes beside it is not waited for.
  const Turn turn = {.before = own.begins_seconds > 0 ? static_cast<int>(turns.size()) - 1 : 0,
                     .wait_seconds = own.begins_seconds,
                     .submeshes = own.submeshes};
  GiveTurn();
  PublishCount();
  changed_.NotifyAll();  // there may be turns to look at from now on
  return turn;
}

std::string PrefillQueue::standstill(absl::Time now) {
  const MutexLock lock(mu_);
  // One that has the turn may wait until another has got to where it can give way.
  double layer_seconds = 0;
  for (const auto& [ticket, job] : jobs_) {
    if (job->begun) {
      const double seconds = ToRunOrder(job->request).SecondsOn(job->options.submeshes);
      layer_seconds = std::max(layer_seconds, seconds / engine_.model().layers);
    }
  }
  std::vector<StandstillWatch::At> all;
  for (const uint64_t ticket : computing_) {
    const auto job = jobs_.find(ticket);
    if (job == jobs_.end() || !job->second->begun) continue;
    all.push_back({.run = ticket,
                   .moves = static_cast<uint64_t>(job->second->layers_done),
                   .predicted_seconds = layer_seconds});
  }
  return watch_.Look(all, now);
}

void PrefillQueue::SetPredictedSeconds(uint64_t ticket, double seconds,
                                       std::vector<SubmeshSeconds> submeshes) {
  const MutexLock lock(mu_);
  const auto job = jobs_.find(ticket);
  if (job == jobs_.end()) return;  // it has lost its place
  job->second->request.predicted_seconds = seconds;
  job->second->request.submeshes = submeshes;
  order_.SetWork(ticket, seconds, std::move(submeshes));
}

absl::Status PrefillQueue::Pay(uint64_t ticket, int64_t tokens_so_far) {
  const MutexLock lock(mu_);
  const auto entry = jobs_.find(ticket);
  if (entry == jobs_.end()) return PlaceLost();
  if (2 * tokens_so_far >= entry->second->request.tokens) order_.Pay(ticket);
  const int64_t claim_before = room_.ClaimOf(ticket);
  RETURN_IF_ERROR(room_.Pay(ticket, tokens_so_far, order_));
  if (room_.ClaimOf(ticket) != claim_before) PublishCount();
  return absl::OkStatus();
}

// StopAll drops uploads, too.
absl::Status PrefillQueue::PlaceLost() const { return stopping_ ? stop_reason_ : QueueRoom::PlaceLost(); }

void PrefillQueue::Withdraw(uint64_t ticket) {
  std::unique_ptr<Job> gone;  // freed after the lock
  const MutexLock lock(mu_);
  const auto entry = jobs_.find(ticket);
  if (entry == jobs_.end()) return;
  if (entry->second->begun) return StopLive(ticket, *entry->second);
  gone = Remove(ticket);
  GiveTurn();
  PublishCount();
}

std::unique_ptr<PrefillQueue::Job> PrefillQueue::Remove(uint64_t ticket) {
  std::unique_ptr<Job> job = std::move(jobs_.at(ticket));
  jobs_.erase(ticket);
  room_.Remove(ticket);
  order_.Remove(ticket, clock_());
  return job;
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
      const uint64_t ticket = entry->first;
      Job& job = *entry->second;
      ++entry;
      if (job.begun) {
        job.stop_reason = reason;
        StopLive(ticket, job);
      } else {
        dropped.push_back(Remove(ticket));
      }
    }
    PublishCount();
    changed_.NotifyAll();
  }
  const absl::Time now = clock_();
  for (const auto& job : dropped) {
    if (job->waiter != nullptr)
      job->waiter->OnPrefillDone(reason, absl::ToDoubleSeconds(now - job->submitted_at));
  }
}

void PrefillQueue::StopLive(uint64_t ticket, Job& job) {
  job.stopped = true;
  if (job.prefill != nullptr) job.prefill->Stop();
  order_.Leave(ticket, clock_());
  GiveTurn();
}

void PrefillQueue::GiveTurn() {
  if (stopping_) return;
  for (const auto& [ticket, job] : jobs_) {
    if (job->prefill != nullptr && job->options.submeshes > 1) order_.SetPlace(ticket, job->prefill->place());
  }
  order_.Choose(clock_());
  const std::vector<uint64_t> before = std::exchange(computing_, order_.computing());
  const auto is_in = [](const std::vector<uint64_t>& tickets, uint64_t ticket) {
    return std::find(tickets.begin(), tickets.end(), ticket) != tickets.end();
  };
  for (const uint64_t ticket : before) {
    const auto job = jobs_.find(ticket);
    if (is_in(computing_, ticket) || job == jobs_.end() || job->second->prefill == nullptr) continue;
    if (!job->second->stopped) Preempt(*job->second->prefill);
  }
  for (const uint64_t ticket : computing_) {
    Job& job = *jobs_.at(ticket);
    if (is_in(before, ticket)) continue;
    if (job.prefill != nullptr) {
      job.prefill->Resume();
      continue;
    }
    if (job.begun) continue;  // its thread is about to have the prefill
    job.begun = true;
    room_.Begin(ticket);
    job.options.submeshes = order_.submeshes(ticket);
    to_begin_.push_back(ticket);
    changed_.NotifyAll();
  }
}

void PrefillQueue::Preempt(Prefill& prefill) {
  prefill.Pause();
  metrics_.OnPreempted();
}

void PrefillQueue::RunJobs() {
  while (true) {
    uint64_t ticket = 0;
    Job* job = nullptr;
    {
      MutexLock lock(mu_);
      while (!stopping_ && to_begin_.empty()) {
        if (jobs_.size() < 2) {
          changed_.Wait(mu_);
          continue;
        }
        // Time alone may change whose turn it is: prefills get old, and one may be over its prediction.
        changed_.WaitFor(mu_, kLook);
        GiveTurn();
      }
      if (to_begin_.empty()) return;
      ticket = to_begin_.front();
      to_begin_.pop_front();
      job = jobs_.at(ticket).get();
      job->begin = clock_();
      PublishCount();
    }
    RunJob(ticket, *job);
  }
}

// The job lives until it is erased here: whoever withdraws a live one only stops its prefill.
void PrefillQueue::RunJob(uint64_t ticket, Job& job) {
  double queue_seconds = absl::ToDoubleSeconds(job.begin - job.submitted_at);
  std::optional<absl::StatusOr<PrefillResult>> result =
      job.begin < job.request.deadline ? RunOnEngine(ticket, job)
                                       : absl::DeadlineExceededError(absl::StrFormat(
                                             "the deadline passed after %.3g s in the queue", queue_seconds));
  if (!result.has_value()) return;
  if (result->ok()) {
    queue_seconds += (*result)->paused_seconds;
    metrics_.OnPrefillDone(**result);
    last_prefill_.OnPrefillDone(**result);
  }

  std::unique_ptr<Job> done;
  {
    const MutexLock lock(mu_);
    done = Remove(ticket);
    GiveTurn();
    PublishCount();
    if (!result->ok() && !done->stop_reason.ok()) result = done->stop_reason;
  }
  done->waiter->OnPrefillDone(*std::move(result), queue_seconds);
}

std::optional<absl::StatusOr<PrefillResult>> PrefillQueue::RunOnEngine(uint64_t ticket, Job& job) {
  bool alone = true;
  std::shared_ptr<Waiter> waiter;
  {
    const MutexLock lock(mu_);
    if (job.stopped) return absl::CancelledError("stopped before it began");
    alone = order_.live() == 1;
    waiter = job.waiter;
  }
  waiter->OnPrefillBegin();
  ProgressObserver observer(*this, ticket, job);
  absl::StatusOr<std::unique_ptr<Prefill>> prefill = engine_.Start({job.tokens, job.options}, &observer);
  {
    const MutexLock lock(mu_);
    if (absl::IsResourceExhausted(prefill.status()) && !alone && !job.stopped) {
      job.begun = false;
      room_.PutBack(ticket);
      order_.PutBack(ticket, clock_());
      std::erase(computing_, ticket);
      GiveTurn();
      PublishCount();
      return std::nullopt;
    }
    if (!prefill.ok()) return prefill.status();
    metrics_.OnPrefillStart(absl::ToDoubleSeconds(job.begin - job.submitted_at));
    job.prefill = prefill->get();
    if (job.stopped) {
      job.prefill->Stop();
    } else if (!Computes(ticket)) {
      Preempt(*job.prefill);  // its turn went while it was started
    }
  }
  absl::StatusOr<PrefillResult> result = (*prefill)->Wait();
  const MutexLock lock(mu_);
  job.prefill = nullptr;
  return result;
}

void PrefillQueue::OnLayerDone(uint64_t ticket, Job& job, int layers_done, int layers) {
  std::shared_ptr<Waiter> waiter;
  double seconds = 0;
  {
    const MutexLock lock(mu_);
    const absl::Time now = clock_();
    job.layers_done = layers_done;
    job.layers = layers;
    order_.SetDone(ticket, static_cast<double>(layers_done) / layers, now);
    seconds = order_.ComputedSeconds(ticket, now);
    waiter = job.waiter;
    CountComputing(others_wait_);
    GiveTurn();
  }
  waiter->OnLayerDone(layers_done, layers, seconds);
}

bool PrefillQueue::Computes(uint64_t ticket) const {
  return std::find(computing_.begin(), computing_.end(), ticket) != computing_.end();
}

PrefillQueue::Phase PrefillQueue::PhaseOf(uint64_t ticket, const Job& job) const {
  if (job.begun) return Computes(ticket) ? Phase::kRunning : Phase::kPaused;
  return order_.state(ticket) == RunOrder::State::kWaiting ? Phase::kWaiting : Phase::kUploading;
}

void PrefillQueue::PublishCount() {
  metrics_.SetQueue(room_.load());
  int complete = 0;
  for (const auto& [ticket, job] : jobs_) {
    if (order_.state(ticket) != RunOrder::State::kUploading) ++complete;
  }
  CountComputing(complete > 1);
}

void PrefillQueue::CountComputing(bool others) {
  const absl::Time now = clock_();
  if (computes_) metrics_.OnComputed(absl::ToDoubleSeconds(now - counted_until_), others_wait_);
  counted_until_ = now;
  computes_ = !computing_.empty();
  others_wait_ = others;
}

PrefillQueue::Snapshot PrefillQueue::snapshot() const {
  const MutexLock lock(mu_);
  const absl::Time now = clock_();
  Snapshot snapshot;
  const QueueLoad load = room_.load();
  snapshot.requests = load.requests;
  snapshot.tokens = load.tokens;
  for (const RunOrder::Turn& turn : order_.Turns(now)) {
    const uint64_t ticket = turn.ticket;
    const Job& job = *jobs_.at(ticket);
    const absl::Time since = job.begun ? std::min(now, job.begin) : job.reserved_at;
    snapshot.jobs.push_back({.id = job.request.id,
                             .tenant = job.request.tenant,
                             .phase = PhaseOf(ticket, job),
                             .tokens = job.request.tokens,
                             .elapsed_seconds = absl::ToDoubleSeconds(now - since),
                             .predicted_rest_seconds = turn.ends_seconds,
                             .layers_done = job.layers_done,
                             .layers = !job.begun       ? 0
                                       : job.layers > 0 ? job.layers
                                                        : static_cast<int>(engine_.model().layers)});
  }
  std::stable_sort(snapshot.jobs.begin(), snapshot.jobs.end(),
                   [](const JobView& left, const JobView& right) { return left.phase < right.phase; });
  return snapshot;
}

}  // namespace meshfill
