// The queue of a story: who enters, whose turn it is, and what loses its place.
#include "tests/server/pool/simulation/queue.h"

#include <algorithm>
#include <utility>

#include "server/queue/refusal.h"
#include "tests/server/pool/simulation/pool_simulation.h"

namespace meshfill {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(50);  // prefill_queue.cc
constexpr int64_t kPassTokens = 64;                       // of a rank, that prompts share

RunOrder::Job Uncached(RunOrder::Job job) {
  job.may_save_seconds = 0;
  return job;
}

}  // namespace

StoryQueue::StoryQueue(PoolSimulation& story, const QueueRoom::Limits& limits, int most_live)
    : story_(story),
      most_live_(most_live),
      order_({.max_age = limits.max_age, .most_live = most_live}),
      room_(limits, [this] { return now(); }),
      watch_(*this) {}

absl::Time StoryQueue::now() const { return story_.now_; }

void StoryQueue::Later(absl::Duration delay, std::function<void()> what) {
  PoolSimulation& story = story_;
  story.After(delay, -1, [this, &story, what = std::move(what), incarnation = story.leader_incarnation_] {
    if (story.leader_ != nullptr && story.leader_incarnation_ == incarnation) Event(what);
  });
}

void StoryQueue::Event(const std::function<void()>& what) {
  watch_.Advance();
  what();
  watch_.Check();
}

absl::StatusOr<StoryQueue::Ticket> StoryQueue::Reserve(uint64_t client, const RunOrder::Job& run,
                                                       int64_t tokens) {
  absl::StatusOr<Ticket> entered;
  Event([&] {
    absl::Status may = room_.CheckClass(run);
    std::vector<QueueRoom::LostPlace> places;
    if (may.ok()) places = room_.PlacesToTakeFor(run, tokens, order_);
    if (may.ok() && places.empty()) may = room_.MayEnter(run, tokens, order_);
    if (!may.ok()) {
      watch_.CheckRefused(run, tokens, may);
      entered = may;
      return;
    }
    watch_.CheckLosers(places);
    RemoveLosers(places);
    watch_.CheckEntered(run, tokens);
    const Ticket ticket = ++last_ticket_;
    Job& job = jobs_[ticket];
    job = {.ticket = ticket, .client = client, .run = run, .tokens = tokens, .entered_at = now()};
    job.needs_cache = run.may_save_seconds > 0 && !room_.CheckWait(Uncached(run), order_).ok();
    order_.Announce(ticket, run, now());
    room_.Enter(ticket, run, tokens);
    TellLosers(places);
    entered = ticket;
  });
  return entered;
}

void StoryQueue::SetPredictedSeconds(Ticket ticket, double seconds, std::vector<SubmeshSeconds> submeshes,
                                     const PackShare& pack) {
  const auto job = jobs_.find(ticket);
  if (job == jobs_.end()) return;  // it has lost its place
  job->second.run.work_seconds = seconds;
  job->second.run.submeshes = submeshes;
  job->second.run.pack = pack;
  order_.SetWork(ticket, seconds, std::move(submeshes), pack);
}

absl::Status StoryQueue::Pay(Ticket ticket, int64_t tokens_so_far) {
  absl::Status paid;
  Event([&] {
    const auto job = jobs_.find(ticket);
    if (job == jobs_.end()) {
      paid = lost_.at(ticket);
      return;
    }
    if (2 * tokens_so_far >= job->second.tokens) order_.Pay(ticket);
    const std::vector<QueueRoom::LostPlace> places = room_.PlacesToTakeToPay(ticket, tokens_so_far);
    watch_.CheckLosers(places);
    RemoveLosers(places);
    job->second.paid_tokens = tokens_so_far;
    paid = room_.Pay(ticket, tokens_so_far, order_);
    job->second.over_bounds = !paid.ok();
    if (!paid.ok()) watch_.CheckTold(paid);
    TellLosers(places);
  });
  return paid;
}

absl::Status StoryQueue::Submit(Ticket ticket) {
  absl::Status submitted;
  Event([&] {
    const auto found = jobs_.find(ticket);
    if (found == jobs_.end()) {
      submitted = lost_.at(ticket);
      return;
    }
    Job& job = found->second;
    if (job.needs_cache) {
      RunOrder ahead = order_;
      ahead.Complete(ticket, now());
      const double wait_seconds = ahead.TurnsUpTo(ticket, now()).back().begins_seconds;
      submitted = room_.CheckDeadline(Uncached(job.run), wait_seconds);
      if (!submitted.ok()) return;
    }
    job.complete = true;
    job.complete_at = now();
    room_.Complete(ticket);
    order_.Complete(ticket, now());
    const RunOrder::Turn turn = order_.TurnsUpTo(ticket, now()).back();
    if (turn.ticket != ticket || turn.begins_seconds < 0 || turn.ends_seconds < turn.begins_seconds) {
      story_.Fail("a prompt is told of a turn that it cannot have");
    }
    GiveTurn();
    if (!std::exchange(looks_, true)) Later(kLook, [this] { Look(); });
  });
  return submitted;
}

void StoryQueue::Look() {
  looks_ = jobs_.size() > 1;
  if (!looks_) return;
  GiveTurn();
  Later(kLook, [this] { Look(); });
}

void StoryQueue::Withdraw(Ticket ticket) {
  Event([&] {
    lost_.erase(ticket);
    const auto job = jobs_.find(ticket);
    if (job == jobs_.end()) return;
    if (job->second.begun) return StopLive(job->second);
    Remove({&ticket, 1});
    GiveTurn();
  });
}

void StoryQueue::RemoveLosers(std::span<const QueueRoom::LostPlace> places) {
  std::vector<Ticket> tickets;
  for (const QueueRoom::LostPlace& place : places) tickets.push_back(place.ticket);
  losers_ = Remove(tickets);
}

void StoryQueue::TellLosers(std::span<const QueueRoom::LostPlace> places) {
  std::vector<QueueRoom::Loser> losers;
  for (size_t i = 0; i < places.size(); ++i) losers.push_back({places[i], losers_[i].run, losers_[i].tokens});
  const std::vector<absl::Status> told = room_.PlacesLost(losers, order_);
  for (size_t i = 0; i < told.size(); ++i) {
    watch_.CheckTold(told[i]);
    ++(places[i].slow ? story_.census_.slow_places_lost : story_.census_.places_lost);
    if (!losers_[i].complete) {
      lost_[losers_[i].ticket] = told[i];
      continue;
    }
    Later(absl::ZeroDuration(),
          [this, client = losers_[i].client, why = told[i]] { story_.queue_clients_.OnEnd(client, why); });
  }
  losers_.clear();
}

std::vector<StoryQueue::Job> StoryQueue::Remove(std::span<const Ticket> tickets) {
  std::vector<Job> jobs;
  for (const Ticket ticket : tickets) {
    jobs.push_back(std::move(jobs_.at(ticket)));
    jobs_.erase(ticket);
    at_leader_.erase(jobs.back().at_leader);
    room_.Remove(ticket);
  }
  order_.Remove(tickets, now());
  for (auto& [ticket, job] : jobs_) job.put_back = false;
  return jobs;
}

void StoryQueue::StopLive(Job& job) {
  job.stopped = true;
  if (job.prefill) story_.CancelAtLeader(job.at_leader);
  order_.Leave(job.ticket, now());
  GiveTurn();
}

bool StoryQueue::Computes(Ticket ticket) const {
  return std::find(computing_.begin(), computing_.end(), ticket) != computing_.end();
}

void StoryQueue::SetPaused(const Job& job, bool paused) {
  const auto request = story_.requests_.find(job.at_leader);
  if (request == story_.requests_.end()) return;  // the answer is out
  if (request->second.paused && !paused) request->second.resumed_at = now();
  request->second.paused = paused;
  story_.leader_->SetPaused(job.at_leader, paused, now());
}

// As PoolEngine has it: measured again when workers come and go.
PackRoom StoryQueue::PackRoomNow() {
  if (!story_.packs_) return {};
  const Leader& leader = *story_.leader_;
  const std::pair members(leader.counters().joins, leader.workers_to_stay());
  if (std::exchange(members_, members) != members) {
    const bool share = leader.RankCapacity().has_value();
    pack_room_ = share ? PackRoom{.ranks = leader.capacity().ranks, .rank_tokens = kPassTokens} : PackRoom();
  }
  PackRoom room = pack_room_;
  if (room.ranks > 0) room.rank_bytes = leader.MostRankBytes();
  return room;
}

void StoryQueue::GiveTurn() {
  for (const auto& [ticket, job] : jobs_) {
    if (job.prefill && order_.submeshes(ticket) > 1) {
      order_.SetPlace(ticket, story_.leader_->PlaceOf(job.at_leader));
    }
  }
  order_.SetPackRoom(PackRoomNow());
  order_.Choose(now());
  ++choices_;
  const std::vector<Ticket> before = std::exchange(computing_, order_.computing());
  for (const Ticket ticket : before) {
    const auto job = jobs_.find(ticket);
    if (Computes(ticket) || job == jobs_.end() || !job->second.prefill || job->second.stopped) continue;
    ++story_.census_.preempted;
    SetPaused(job->second, true);
  }
  bool begin_pack = false;
  for (const Ticket ticket : computing_) {
    Job& job = jobs_.at(ticket);
    if (std::find(before.begin(), before.end(), ticket) != before.end()) continue;
    if (job.prefill) SetPaused(job, false);
    if (job.begun) continue;
    job.begun = true;
    job.begun_at = now();
    job.choice = choices_;
    room_.Begin(ticket);
    if (!begin_pack) {
      Later(story_.DrawMs(0, 3), [this, group = ++last_group_] { RunTogether(group); });
    }
    groups_[last_group_].push_back(ticket);
    job.group = last_group_;
    begin_pack = order_.submeshes(ticket) == 1;
    job.in_pack = begin_pack && computing_.size() > 1;
  }
  watch_.CheckTurns();
  story_.DoLeaderActions();
}

}  // namespace meshfill
