#include "server/api/prefill_queue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/mutex.h"
#include "kernels/return_if_error.h"
#include "server/api/status_details.h"

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
constexpr int kRefusalsShare = 20;  // at most 1/20 of the time goes to the turns that refusals tell

absl::Status Refuse(Refusal refusal, const std::string& message) {
  return WithRefusal(absl::ResourceExhaustedError(message), refusal);
}

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
      limits_(limits),
      metrics_(metrics),
      last_prefill_(last_prefill),
      order_({.max_age = limits.max_age, .most_live = engine.capacity()}),
      retry_line_(limits.max_age) {
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
  RETURN_IF_ERROR(CheckUnused(request.id));
  RETURN_IF_ERROR(CheckRoom(request));
  const uint64_t ticket = ++last_ticket_;
  auto job = std::make_unique<Job>();
  job->request = request;
  job->reserved_at = clock_();
  order_.Announce(ticket, ToRunOrder(request), job->reserved_at);
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
          .weight = limits_.tenants.LimitsOf(request.tenant).weight,
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

std::optional<absl::Status> PrefillQueue::NoRoomBeside(const Load& queue, const Load& of_tenant,
                                                       const Request& request) const {
  if (queue.requests + 1 > limits_.max_requests) {
    return Refuse(Refusal::kQueueRequests,
                  absl::StrCat("the queue is full: ", queue.requests, " requests (queue.max_requests is ",
                               limits_.max_requests, "); try again later"));
  }
  if (queue.tokens + request.tokens > limits_.max_tokens) {
    return Refuse(
        Refusal::kQueueTokens,
        absl::StrCat("the queue has no room for ", request.tokens, " tokens beside the ", queue.tokens,
                     " in it (queue.max_tokens is ", limits_.max_tokens, "); try again later"));
  }
  const TenantLimits& tenant = limits_.tenants.LimitsOf(request.tenant);
  if (of_tenant.requests + 1 > tenant.max_requests) {
    return Refuse(Refusal::kTenantShare, absl::StrCat("the tenant has ", of_tenant.requests,
                                                      " requests in the queue (its max_requests is ",
                                                      tenant.max_requests, "); try again later"));
  }
  if (of_tenant.tokens + request.tokens > tenant.max_tokens) {
    return Refuse(
        Refusal::kTenantShare,
        absl::StrCat("the tenant has no room for ", request.tokens, " tokens beside its ", of_tenant.tokens,
                     " in the queue (its max_tokens is ", tenant.max_tokens, "); try again later"));
  }
  return std::nullopt;
}

absl::Status PrefillQueue::CheckRoom(const Request& request) {
  const auto retry_after = [](const absl::Status& status, double seconds) {
    return WithRetryAfter(status, std::max(kLeastRetry, absl::Seconds(seconds)));
  };
  const int64_t tenants_tokens = limits_.tenants.LimitsOf(request.tenant).max_tokens;
  if (request.tokens > limits_.max_tokens) {
    return Refuse(Refusal::kQueueTokens, absl::StrCat("the queue never has room for ", request.tokens,
                                                      " tokens (queue.max_tokens is ", limits_.max_tokens,
                                                      "); send a shorter prompt"));
  }
  if (request.tokens > tenants_tokens) {
    return Refuse(Refusal::kTenantShare,
                  absl::StrCat("the tenant never has room for ", request.tokens,
                               " tokens (its max_tokens is ", tenants_tokens, "); send a shorter prompt"));
  }
  const absl::Time now = clock_();
  std::optional<absl::Status> no_room = NoRoomBeside(LoadOf(nullptr), LoadOf(&request.tenant), request);
  if (no_room.has_value()) {
    TakePlacesFor(request, now);
    no_room = NoRoomBeside(LoadOf(nullptr), LoadOf(&request.tenant), request);
  }
  if (no_room.has_value()) {
    return retry_after(*no_room, SecondsUntilRoom(request) +
                                     retry_line_.Join(request.tenant, request.predicted_seconds, now));
  }
  const double max_wait_seconds = absl::ToDoubleSeconds(limits_.max_wait);
  const double left_seconds = absl::ToDoubleSeconds(request.deadline - now);
  const double most_seconds = order_.MostWaitSeconds(now);
  if (most_seconds <= max_wait_seconds && most_seconds + request.predicted_seconds <= left_seconds) {
    return absl::OkStatus();
  }
  const double wait_seconds = order_.WaitSeconds(ToRunOrder(request), now);
  if (wait_seconds > max_wait_seconds) {
    return retry_after(
        Refuse(Refusal::kQueueWait,
               absl::StrFormat("the predicted wait is %.3g s (queue.max_wait is %.3g s); try again later",
                               wait_seconds, max_wait_seconds)),
        wait_seconds - max_wait_seconds);
  }
  if (left_seconds <= 0)
    return absl::DeadlineExceededError("the deadline passed before the request was read");
  if (request.predicted_seconds > left_seconds) {
    return Refuse(
        Refusal::kDeadline,
        absl::StrFormat("the deadline is in %.3g s, but the prediction is %.3g s of prefill without "
                        "any waiting; allow more time, or send a shorter prompt",
                        left_seconds, request.predicted_seconds));
  }
  if (wait_seconds + request.predicted_seconds > left_seconds) {
    return retry_after(
        Refuse(Refusal::kDeadline,
               absl::StrFormat("the deadline is in %.3g s, but the prediction is %.3g s of waiting and "
                               "%.3g s of prefill; allow more time, or try again later",
                               left_seconds, wait_seconds, request.predicted_seconds)),
        wait_seconds);
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
  Job& job = *entry->second;
  const int64_t claim_before = ClaimOf(ticket, job);
  job.uploaded_tokens = tokens_so_far;
  if (2 * tokens_so_far >= job.request.tokens) order_.Pay(ticket);
  const int64_t claim = ClaimOf(ticket, job);
  if (claim == claim_before) return absl::OkStatus();
  const int64_t of_tenant = LoadOf(&job.request.tenant).tokens;
  const int64_t tenants_tokens = limits_.tenants.LimitsOf(job.request.tenant).max_tokens;
  const bool beyond_share = of_tenant > tenants_tokens;
  if (!beyond_share && LoadOf(nullptr).tokens <= limits_.max_tokens) {
    PublishCount();
    return absl::OkStatus();
  }
  return WithRetryAfter(
      Refuse(beyond_share ? Refusal::kTenantShare : Refusal::kQueueTokens,
             absl::StrCat("others have taken the room for the rest of this upload, after ", tokens_so_far,
                          " of ", job.request.tokens, " tokens (",
                          beyond_share ? absl::StrCat("the tenant's max_tokens is ", tenants_tokens)
                                       : absl::StrCat("queue.max_tokens is ", limits_.max_tokens),
                          "); try again later")),
      std::max(kLeastRetry, absl::Seconds(SecondsUntilRoom(job.request))));
}

absl::Status PrefillQueue::PlaceLost() const {
  if (stopping_) return stop_reason_;  // StopAll drops uploads
  return WithRetryAfter(
      Refuse(Refusal::kQueueRequests,
             absl::StrCat("the queue is full, and the upload was slower than ", kPlaceTokensPerSecond,
                          " tokens/s: its place went to others; upload without pauses, or try again later")),
      kUploadGrace);
}

void PrefillQueue::TakePlacesFor(const Request& request, absl::Time now) {
  // How far each upload is behind its pace, and its ticket.
  std::vector<std::pair<absl::Duration, uint64_t>> behind;
  for (const auto& [ticket, job] : jobs_) {
    if (order_.state(ticket) != RunOrder::State::kUploading) continue;
    const double paid_seconds = static_cast<double>(job->uploaded_tokens) / kPlaceTokensPerSecond;
    const absl::Duration late = now - job->reserved_at - kUploadGrace - absl::Seconds(paid_seconds);
    if (late > absl::ZeroDuration()) behind.emplace_back(late, ticket);
  }
  std::sort(behind.rbegin(), behind.rend());
  Load queue = LoadOf(nullptr), of_tenant = LoadOf(&request.tenant);
  std::vector<uint64_t> taken;
  for (const auto& [late, ticket] : behind) {
    if (!NoRoomBeside(queue, of_tenant, request).has_value()) break;
    const Job& job = *jobs_.at(ticket);
    const bool queue_full = queue.requests + 1 > limits_.max_requests ||  //
                            queue.tokens + request.tokens > limits_.max_tokens;
    if (!queue_full && job.request.tenant != request.tenant) continue;
    for (Load* load : {&queue, &of_tenant}) {
      if (load == &of_tenant && job.request.tenant != request.tenant) continue;
      --load->requests;
      load->tokens -= ClaimOf(ticket, job);
    }
    taken.push_back(ticket);
  }
  if (NoRoomBeside(queue, of_tenant, request).has_value()) return;
  for (const uint64_t ticket : taken) {
    jobs_.erase(ticket);
    order_.Remove(ticket, now);
  }
  PublishCount();
}

void PrefillQueue::Withdraw(uint64_t ticket) {
  std::unique_ptr<Job> gone;  // freed after the lock
  const MutexLock lock(mu_);
  const auto entry = jobs_.find(ticket);
  if (entry == jobs_.end()) return;
  if (Live(ticket)) return StopLive(ticket, *entry->second);
  gone = std::move(entry->second);
  jobs_.erase(entry);
  order_.Remove(ticket, clock_());
  GiveTurn();
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
      const uint64_t ticket = entry->first;
      if (Live(ticket)) {
        entry->second->stop_reason = reason;
        StopLive(ticket, *entry->second);
        ++entry;
        continue;
      }
      order_.Remove(ticket, clock_());
      dropped.push_back(std::move(entry->second));
      entry = jobs_.erase(entry);
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
    Preempt(*job->second->prefill);
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
    done = std::move(jobs_.at(ticket));
    jobs_.erase(ticket);
    order_.Remove(ticket, clock_());
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

bool PrefillQueue::Live(uint64_t ticket) const { return order_.state(ticket) == RunOrder::State::kLive; }

bool PrefillQueue::Computes(uint64_t ticket) const {
  return std::find(computing_.begin(), computing_.end(), ticket) != computing_.end();
}

PrefillQueue::Phase PrefillQueue::PhaseOf(uint64_t ticket) const {
  switch (order_.state(ticket)) {
    case RunOrder::State::kUploading:
      return Phase::kUploading;
    case RunOrder::State::kWaiting:
      return Phase::kWaiting;
    case RunOrder::State::kLive:
      break;
  }
  return Computes(ticket) ? Phase::kRunning : Phase::kPaused;
}

// A place in the queue gets free when its prefill begins.
double PrefillQueue::SecondsUntilRoom(const Request& request) {
  Load queue = LoadOf(nullptr), of_tenant = LoadOf(&request.tenant);
  double seconds = 0;
  for (const RunOrder::Turn& turn : RecentTurns(clock_())) {
    if (!jobs_.contains(turn.ticket) || Live(turn.ticket)) continue;
    seconds = turn.begins_seconds;
    const Job& begins = *jobs_.at(turn.ticket);
    for (Load* load : {&queue, &of_tenant}) {
      if (load == &of_tenant && begins.request.tenant != request.tenant) continue;
      --load->requests;
      load->tokens -= ClaimOf(turn.ticket, begins);
    }
    if (!NoRoomBeside(queue, of_tenant, request).has_value()) break;
  }
  return seconds;
}

const std::vector<RunOrder::Turn>& PrefillQueue::RecentTurns(absl::Time now) {
  if (now >= recent_turns_until_) {
    recent_turns_ = order_.Turns(now);
    const absl::Time found = clock_();
    recent_turns_until_ = found + kRefusalsShare * (found - now);
  }
  return recent_turns_;
}

PrefillQueue::Load PrefillQueue::LoadOf(const std::string* tenant) const {
  Load load;
  for (const auto& [ticket, job] : jobs_) {
    if (Live(ticket) || (tenant != nullptr && job->request.tenant != *tenant)) continue;
    ++load.requests;
    load.tokens += ClaimOf(ticket, *job);
  }
  return load;
}

int64_t PrefillQueue::ClaimOf(uint64_t ticket, const Job& job) const {
  if (order_.state(ticket) != RunOrder::State::kUploading) return job.request.tokens;
  return std::min(job.request.tokens, std::max(kFreeTokens, 2 * job.uploaded_tokens));
}

void PrefillQueue::PublishCount() {
  QueueLoad load;
  int complete = 0;
  for (const auto& [ticket, job] : jobs_) {
    const RunOrder::State state = order_.state(ticket);
    if (state != RunOrder::State::kUploading) ++complete;
    if (state == RunOrder::State::kLive) {
      load.running_tokens += job->request.tokens;
      continue;
    }
    ++load.requests;
    load.tokens += ClaimOf(ticket, *job);
    constexpr int kTop = RunOrder::kTopPriority;
    ++load.requests_by_class[std::clamp(job->request.priority, -kTop, kTop) + kTop];
    if (state == RunOrder::State::kWaiting) load.oldest = std::min(load.oldest, job->submitted_at);
  }
  metrics_.SetQueue(load);
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
  const Load load = LoadOf(nullptr);
  snapshot.requests = load.requests;
  snapshot.tokens = load.tokens;
  for (const RunOrder::Turn& turn : order_.Turns(now)) {
    const uint64_t ticket = turn.ticket;
    const Job& job = *jobs_.at(ticket);
    const bool began = Live(ticket);
    const absl::Time since = began ? std::min(now, job.begin) : job.reserved_at;
    snapshot.jobs.push_back({.id = job.request.id,
                             .tenant = job.request.tenant,
                             .phase = PhaseOf(ticket),
                             .tokens = job.request.tokens,
                             .elapsed_seconds = absl::ToDoubleSeconds(now - since),
                             .predicted_rest_seconds = turn.ends_seconds,
                             .layers_done = job.layers_done,
                             .layers = !began           ? 0
                                       : job.layers > 0 ? job.layers
                                                        : static_cast<int>(engine_.model().layers)});
  }
  std::stable_sort(snapshot.jobs.begin(), snapshot.jobs.end(),
                   [](const JobView& left, const JobView& right) { return left.phase < right.phase; });
  return snapshot;
}

}  // namespace meshfill
