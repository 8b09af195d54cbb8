#include "server/queue/prefill_queue.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"

namespace meshfill {

class PrefillQueue::ProgressObserver final : public PrefillObserver {
 public:
  ProgressObserver(PrefillQueue& queue, Job& job) : queue_(queue), job_(job) {}
  void OnLayerDone(int layers_done, int layers) override { queue_.OnLayerDone(job_, layers_done, layers); }
  void OnBegunAnew() override { queue_.OnBegunAnew(job_); }

 private:
  PrefillQueue& queue_;
  Job& job_;
};

// Requests that lose their places. Their waiters hear why when this is destroyed, after the lock.
class PrefillQueue::Dropped {
 public:
  explicit Dropped(const Clock& clock) : clock_(clock) {}
  Dropped(const Dropped&) = delete;
  Dropped& operator=(const Dropped&) = delete;
  ~Dropped() {
    for (const auto& job : jobs) {
      if (job->waiter == nullptr) continue;
      job->waiter->OnPrefillDone(job->stop_reason, absl::ToDoubleSeconds(clock_() - job->submitted_at));
    }
  }

  std::vector<std::unique_ptr<Job>> jobs;

 private:
  const Clock& clock_;
};

namespace {

constexpr absl::Duration kLook = absl::Milliseconds(50);  // between two looks at whose turn it is
constexpr absl::Duration kRetry = absl::Seconds(1);       // for memory that others than prefills have

// Requests that the last of `turns` waits for: not those that compute beside it or share its pass.
int CountBefore(std::span<const RunOrder::Turn> turns) {
  const RunOrder::Turn& own = turns.back();
  if (own.begins_seconds <= 0) return 0;
  const auto shares_pass = [&](const RunOrder::Turn& turn) {
    return own.pack_prompts > 1 && turn.begins_seconds == own.begins_seconds;
  };
  const auto others = turns.first(turns.size() - 1);
  return static_cast<int>(std::ssize(others) - std::count_if(others.begin(), others.end(), shares_pass));
}

// The same, whatever may be cached of it.
RunOrder::Job Uncached(RunOrder::Job job) {
  job.may_save_seconds = 0;
  return job;
}

}  // namespace

void PrefillQueue::Slot::SetPredictedSeconds(double seconds, std::vector<SubmeshSeconds> submeshes,
                                             const PackShare& pack) {
  queue_.SetPredictedSeconds(ticket_, seconds, std::move(submeshes), pack);
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
  metrics_.SetQueueLimits(limits.max_requests, limits.max_tokens, limits.max_wait);
  metrics_.SetQueue(room_.load());
  for (int place = 0; place < engine_.capacity(); ++place) {
    runners_.emplace_back([this] { RunJobs(); });
  }
}

PrefillQueue::~PrefillQueue() {
  StopAll(absl::UnavailableError("the server is shutting down; try another one"));
  for (std::thread& runner : runners_) runner.join();
}

absl::StatusOr<std::unique_ptr<PrefillQueue::Slot>> PrefillQueue::Reserve(const Request& request) {
  Dropped dropped(clock_);
  const MutexLock lock(mu_);
  if (draining_) return absl::UnavailableError("the server is draining; try another one");
  RETURN_IF_ERROR(CheckUnused(request.tenant, request.id));
  const RunOrder::Job run = ToRunOrder(request);
  RETURN_IF_ERROR(room_.CheckClass(run));
  const std::vector<QueueRoom::LostPlace> places = room_.PlacesToTakeFor(run, request.tokens, order_);
  if (places.empty()) RETURN_IF_ERROR(room_.MayEnter(run, request.tokens, order_));
  RemoveLosers(places, dropped);
  const uint64_t ticket = ++last_ticket_;
  auto job = std::make_unique<Job>();
  job->ticket = ticket;
  job->request = request;
  job->needs_cache = run.may_save_seconds > 0 && !room_.CheckWait(Uncached(run), order_).ok();
  job->reserved_at = clock_();
  order_.Announce(ticket, run, job->reserved_at);
  room_.Enter(ticket, run, request.tokens);
  ids_.emplace(request.tenant, request.id);
  jobs_.emplace(ticket, std::move(job));
  TellLosers(places, dropped);
  PublishCount();
  return std::make_unique<Slot>(*this, ticket);
}

absl::Status PrefillQueue::CheckId(const std::string& tenant, const std::string& id) const {
  const MutexLock lock(mu_);
  return CheckUnused(tenant, id);
}

RunOrder::Job PrefillQueue::ToRunOrder(const Request& request) const {
  return {.tenant = request.tenant,
          .priority = request.priority,
          .work_seconds = request.predicted_seconds,
          .weight = room_.limits().tenants.LimitsOf(request.tenant).weight,
          .deadline = request.deadline,
          .submeshes = request.submeshes,
          .pack = request.pack,
          .may_save_seconds = request.may_save_seconds};
}

absl::Status PrefillQueue::CheckUnused(const std::string& tenant, const std::string& id) const {
  if (!ids_.contains({tenant, id})) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(
      "request_id \"", id, "\" is in use by a live request; wait for its end or choose another"));
}

absl::StatusOr<PrefillQueue::Turn> PrefillQueue::Submit(uint64_t ticket, std::vector<uint32_t> tokens,
                                                        const PrefillOptions& options,
                                                        std::shared_ptr<Waiter> waiter) {
  const MutexLock lock(mu_);
  const auto entry = jobs_.find(ticket);
  if (entry == jobs_.end()) return lost_.at(ticket);
  Job& job = *entry->second;
  job.submitted_at = clock_();
  if (job.needs_cache) {
    RunOrder ahead = order_;
    ahead.Complete(ticket, job.submitted_at);
    const double wait_seconds = ahead.TurnsUpTo(ticket, job.submitted_at).back().begins_seconds;
    RETURN_IF_ERROR(room_.CheckDeadline(Uncached(ToRunOrder(job.request)), wait_seconds));
  }
  job.tokens = std::move(tokens);
  job.options = options;
  job.options.request_id = job.request.id;
  job.waiter = std::move(waiter);
  room_.Complete(ticket);
  order_.Complete(ticket, job.submitted_at);
  const std::vector<RunOrder::Turn> turns = order_.TurnsUpTo(ticket, job.submitted_at);
  const RunOrder::Turn& own = turns.back();
  const Turn turn = {
      .before = CountBefore(turns),
      .wait_seconds = own.begins_seconds + order_.LikelyEndSeconds(own, job.submitted_at) - own.ends_seconds,
      .submeshes = own.submeshes,
      .pass_seconds = own.pack_prompts > 1 ? own.ends_seconds - own.begins_seconds : 0};
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
      layer_seconds = std::max(layer_seconds, order_.WholeSeconds(ticket) / engine_.model().layers);
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

void PrefillQueue::SetPredictedSeconds(uint64_t ticket, double seconds, std::vector<SubmeshSeconds> submeshes,
                                       const PackShare& pack) {
  const MutexLock lock(mu_);
  const auto job = jobs_.find(ticket);
  if (job == jobs_.end()) return;  // it has lost its place
  job->second->request.predicted_seconds = seconds;
  job->second->request.submeshes = submeshes;
  job->second->request.pack = pack;
  order_.SetWork(ticket, seconds, std::move(submeshes), pack);
}

absl::Status PrefillQueue::Pay(uint64_t ticket, int64_t tokens_so_far) {
  Dropped dropped(clock_);
  const MutexLock lock(mu_);
  const auto entry = jobs_.find(ticket);
  if (entry == jobs_.end()) return lost_.at(ticket);
  if (2 * tokens_so_far >= entry->second->request.tokens) order_.Pay(ticket);
  const int64_t claim_before = room_.ClaimOf(ticket);
  const std::vector<QueueRoom::LostPlace> places = room_.PlacesToTakeToPay(ticket, tokens_so_far);
  RemoveLosers(places, dropped);
  const absl::Status paid = room_.Pay(ticket, tokens_so_far, order_);
  TellLosers(places, dropped);
  RETURN_IF_ERROR(paid);
  if (room_.ClaimOf(ticket) != claim_before) PublishCount();
  return absl::OkStatus();
}

void PrefillQueue::RemoveLosers(std::span<const QueueRoom::LostPlace> places, Dropped& dropped) {
  std::vector<uint64_t> tickets;
  for (const QueueRoom::LostPlace& place : places) tickets.push_back(place.ticket);
  dropped.jobs = Remove(tickets);
}

void PrefillQueue::TellLosers(std::span<const QueueRoom::LostPlace> places, Dropped& dropped) {
  std::vector<QueueRoom::Loser> losers;
  for (size_t i = 0; i < places.size(); ++i) {
    const Request& request = dropped.jobs[i]->request;
    losers.push_back({places[i], ToRunOrder(request), request.tokens});
  }
  const std::vector<absl::Status> told = room_.PlacesLost(losers, order_);
  for (size_t i = 0; i < told.size(); ++i) Lose(*dropped.jobs[i], told[i]);
}

void PrefillQueue::Lose(Job& job, const absl::Status& why) {
  job.stop_reason = why;
  if (job.waiter == nullptr) lost_[job.ticket] = why;
}

void PrefillQueue::Withdraw(uint64_t ticket) {
  std::unique_ptr<Job> gone;  // freed after the lock
  const MutexLock lock(mu_);
  lost_.erase(ticket);
  const auto entry = jobs_.find(ticket);
  if (entry == jobs_.end()) return;
  if (entry->second->begun) return StopLive(*entry->second);
  gone = Remove(ticket);
  GiveTurn();
  PublishCount();
}

std::unique_ptr<PrefillQueue::Job> PrefillQueue::Remove(uint64_t ticket) {
  return std::move(Remove({&ticket, 1}).front());
}

std::vector<std::unique_ptr<PrefillQueue::Job>> PrefillQueue::Remove(std::span<const uint64_t> tickets) {
  std::vector<std::unique_ptr<Job>> jobs;
  for (const uint64_t ticket : tickets) {
    jobs.push_back(std::move(jobs_.at(ticket)));
    jobs_.erase(ticket);
    ids_.erase({jobs.back()->request.tenant, jobs.back()->request.id});
    room_.Remove(ticket);
  }
  order_.Remove(tickets, clock_());
  return jobs;
}

void PrefillQueue::Drain() {
  const MutexLock lock(mu_);
  draining_ = true;
}

void PrefillQueue::StopAll(const absl::Status& reason) {
  Dropped dropped(clock_);
  const MutexLock lock(mu_);
  if (stopping_) return;
  draining_ = stopping_ = true;
  std::vector<uint64_t> tickets;
  for (const auto& [ticket, job] : jobs_) {
    Lose(*job, reason);
    job->begun ? StopLive(*job) : tickets.push_back(ticket);
  }
  dropped.jobs = Remove(tickets);
  PublishCount();
  changed_.NotifyAll();
}

void PrefillQueue::StopLive(Job& job) {
  job.stopped = true;
  if (job.prefill != nullptr) job.prefill->Stop();
  order_.Leave(job.ticket, clock_());
  GiveTurn();
}

void PrefillQueue::GiveTurn() {
  if (stopping_) return;
  for (const auto& [ticket, job] : jobs_) {
    if (job->prefill != nullptr && job->options.submeshes > 1) order_.SetPlace(ticket, job->prefill->place());
  }
  order_.SetPackRoom(engine_.pack_room());
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
  bool begin_pack = false;
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
    if (!begin_pack) to_begin_.emplace_back();
    to_begin_.back().push_back(ticket);
    begin_pack = job.options.submeshes == 1;
    changed_.NotifyAll();
  }
}

void PrefillQueue::Preempt(Prefill& prefill) {
  prefill.Pause();
  metrics_.OnPreempted();
}

void PrefillQueue::RunJobs() {
  while (true) {
    std::vector<Job*> jobs;
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
      for (const uint64_t ticket : to_begin_.front()) {
        jobs.push_back(jobs_.at(ticket).get());
        jobs.back()->begin = clock_();
      }
      to_begin_.pop_front();
      PublishCount();
    }
    RunTogether(jobs);
  }
}

// The jobs live until they are erased here: whoever withdraws a live one only stops its prefill.
void PrefillQueue::RunTogether(const std::vector<Job*>& jobs) {
  std::vector<Job*> begin;
  for (Job* const job : jobs) {
    const absl::Status may_begin = CheckBegin(*job);
    may_begin.ok() ? begin.push_back(job) : EndJob(*job, may_begin);
  }
  if (begin.empty()) return;
  std::vector<std::unique_ptr<Prefill>> prefills = Begin(begin);
  while (!prefills.empty()) {
    auto first = prefills.begin();  // of a pack, one that is done: it need not wait for the others' retries
    if (prefills.size() > 1) {
      (*first)->WaitForAny();
      first = std::find_if(first, prefills.end(), [](const auto& prefill) { return prefill->done(); });
    }
    Job& job = *begin[static_cast<size_t>(first - prefills.begin())];
    absl::StatusOr<PrefillResult> result = (*first)->Wait();
    {
      const MutexLock lock(mu_);
      job.prefill = nullptr;
    }
    begin.erase(begin.begin() + (first - prefills.begin()));
    prefills.erase(first);
    EndJob(job, std::move(result));
  }
}

absl::Status PrefillQueue::CheckBegin(const Job& job) const {
  if (job.begin >= job.request.deadline) {
    return absl::DeadlineExceededError(absl::StrFormat("the deadline passed after %.3g s in the queue",
                                                       absl::ToDoubleSeconds(job.begin - job.submitted_at)));
  }
  const MutexLock lock(mu_);
  return job.stopped ? absl::CancelledError("stopped before it began") : absl::OkStatus();
}

std::vector<std::unique_ptr<Prefill>> PrefillQueue::Begin(const std::vector<Job*>& jobs) {
  bool alone = true;
  std::vector<std::shared_ptr<Waiter>> waiters;
  {
    const MutexLock lock(mu_);
    alone = order_.live() == 1;
    for (const Job* job : jobs) waiters.push_back(job->waiter);
  }
  for (const auto& waiter : waiters) waiter->OnPrefillBegin();
  absl::StatusOr<std::vector<std::unique_ptr<Prefill>>> prefills = StartOnEngine(jobs);
  std::vector<Job*> ended;
  {
    const MutexLock lock(mu_);
    if (prefills.ok()) {
      for (size_t i = 0; i < jobs.size(); ++i) OnBegun(*jobs[i], *(*prefills)[i]);
      return *std::move(prefills);
    }
    const bool no_memory = absl::IsResourceExhausted(prefills.status()) && !alone;
    const bool again = no_memory || jobs.size() > 1;
    for (Job* const job : jobs) {
      again && !job->stopped ? WaitAgain(*job, /*apart=*/!no_memory) : ended.push_back(job);
    }
    if (again) {
      GiveTurn();
      PublishCount();
    }
  }
  const bool waiting_helps = absl::IsResourceExhausted(prefills.status());  // until leases lapse
  for (Job* const job : ended) {
    EndJob(*job, waiting_helps ? WithRetryAfter(prefills.status(), kRetry) : prefills.status());
  }
  return {};
}

absl::StatusOr<std::vector<std::unique_ptr<Prefill>>> PrefillQueue::StartOnEngine(
    const std::vector<Job*>& jobs) {
  std::vector<PrefillRequest> requests;
  std::vector<PrefillObserver*> observers;
  for (Job* const job : jobs) {
    job->observer = std::make_unique<ProgressObserver>(*this, *job);
    requests.push_back({job->tokens, job->options});
    observers.push_back(job->observer.get());
  }
  if (jobs.size() > 1) return engine_.StartPack(requests, observers);
  std::vector<std::unique_ptr<Prefill>> prefills(1);
  ASSIGN_OR_RETURN(prefills.front(), engine_.Start(requests.front(), observers.front()));
  return prefills;
}

void PrefillQueue::OnBegun(Job& job, Prefill& prefill) {
  metrics_.OnPrefillStart(absl::ToDoubleSeconds(job.begin - job.submitted_at));
  job.prefill = &prefill;
  if (job.stopped) {
    prefill.Stop();
  } else if (!Computes(job.ticket)) {
    Preempt(prefill);  // its turn went while it was started
  }
}

void PrefillQueue::WaitAgain(Job& job, bool apart) {
  job.begun = false;
  room_.PutBack(job.ticket);
  apart ? order_.PutApart(job.ticket, clock_()) : order_.PutBack(job.ticket, clock_());
  std::erase(computing_, job.ticket);
}

void PrefillQueue::EndJob(Job& job, absl::StatusOr<PrefillResult> result) {
  double queue_seconds = absl::ToDoubleSeconds(job.begin - job.submitted_at);
  if (result.ok()) {
    queue_seconds += result->paused_seconds;
    metrics_.OnPrefillDone(*result);
    last_prefill_.OnPrefillDone(*result);
  }
  std::unique_ptr<Job> done;
  {
    const MutexLock lock(mu_);
    done = Remove(job.ticket);
    GiveTurn();
    PublishCount();
    if (!result.ok() && !done->stop_reason.ok()) result = done->stop_reason;
  }
  done->waiter->OnPrefillDone(std::move(result), queue_seconds);
}

void PrefillQueue::OnLayerDone(Job& job, int layers_done, int layers) {
  std::shared_ptr<Waiter> waiter;
  double seconds = 0;
  {
    const MutexLock lock(mu_);
    const absl::Time now = clock_();
    job.layers_done = layers_done;
    job.layers = layers;
    waiter = job.waiter;
    const bool tells_of_pass = order_.StandsForPack(job.ticket);
    if (tells_of_pass) order_.SetDone(job.ticket, static_cast<double>(layers_done) / layers, now);
    seconds = order_.ComputedSeconds(job.ticket, now);
    if (tells_of_pass) {
      CountComputing(others_wait_);
      GiveTurn();
    }
  }
  waiter->OnLayerDone(layers_done, layers, seconds);
}

void PrefillQueue::OnBegunAnew(const Job& job) {
  const MutexLock lock(mu_);
  order_.BeginAnew(job.ticket);
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
                             .predicted_rest_seconds = order_.LikelyEndSeconds(turn, now),
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
