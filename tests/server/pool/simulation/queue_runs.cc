// The runs of a story's queue: how prompts whose turn it is begin at the leader, wait again, and end.
#include <algorithm>
#include <utility>
#include <vector>

#include "engine/plan/pack.h"
#include "server/queue/refusal.h"
#include "tests/server/pool/simulation/pool_simulation.h"
#include "tests/server/pool/simulation/queue.h"

namespace meshfill {
namespace {

constexpr absl::Duration kRetry = absl::Seconds(1);  // prefill_queue.cc
constexpr int kWaitMs = 50;                          // pool_engine.h, between two looks for room

}  // namespace

void StoryQueue::RunTogether(Group group) {
  std::vector<std::pair<Ticket, absl::Status>> ended;
  for (const Ticket ticket : groups_.at(group)) {
    const Job& job = jobs_.at(ticket);
    if (now() >= job.run.deadline) {
      ended.emplace_back(ticket, absl::DeadlineExceededError("the deadline passed in the queue"));
    } else if (job.stopped) {
      ended.emplace_back(ticket, absl::CancelledError("stopped before it began"));
    }
  }
  for (const auto& [ticket, why] : ended) {
    std::erase(groups_.at(group), ticket);
    EndJob(ticket, why);
  }
  std::deque<Ticket>& begin = groups_.at(group);
  if (begin.empty()) {
    groups_.erase(group);
    return;
  }
  for (const Ticket ticket : begin) {
    Job& job = jobs_.at(ticket);
    job.alone = order_.live() == 1;
    job.asked_at = now();
    job.no_room = false;
    job.attempt = 1;
    job.answered.reset();
  }
  begin.size() > 1 ? StartPack(group) : Start(group, jobs_.at(begin.front()));
}

void StoryQueue::Start(Group group, Job& job) {
  story::DrawnRequest drawn = story_.queue_clients_.drawn(job.client);
  story_.NoteSubmitted(drawn.client);
  drawn.client.submeshes = drawn.options.submeshes = order_.submeshes(job.ticket);
  starting_ = {job.ticket};
  story_.SubmitAlone(std::move(drawn));
  Decide(group, job.ticket);
}

void StoryQueue::Attach(Leader::Ticket at_leader) {
  jobs_.at(starting_.front()).at_leader = at_leader;
  at_leader_[at_leader] = starting_.front();
  starting_.pop_front();
}

bool StoryQueue::Takes(const Leader::Answer& answer) {
  const auto found = at_leader_.find(answer.ticket);
  if (found == at_leader_.end()) return false;
  Job& job = jobs_.at(found->second);
  if (job.prefill) return false;
  job.no_room = job.no_room || absl::IsResourceExhausted(answer.result.status());
  return job.no_room;
}

void StoryQueue::Decide(Group group, Ticket ticket) {
  Job& job = jobs_.at(ticket);
  Leader& leader = *story_.leader_;
  if (!job.no_room && leader.Undecided(job.at_leader, job.asked_at, now())) {
    return Later(story_.DrawMs(1, kWaitMs), [this, group, ticket] { Decide(group, ticket); });
  }
  if (!job.no_room && !leader.CrowdedOut(job.at_leader)) return OnBegun(group, job);
  if (!std::exchange(job.no_room, true)) {  // it takes its request back
    leader.CancelRequest(job.at_leader, absl::CancelledError("no room"), now());
    story_.DoLeaderActions();
  }
  CouldNotBegin(group, absl::ResourceExhaustedError("no room beside those that live"));
}

void StoryQueue::StartPack(Group group) {
  Leader& leader = *story_.leader_;
  const std::deque<Ticket>& tickets = groups_.at(group);
  if (leader.MayGetRoom(jobs_.at(tickets.front()).asked_at, now())) {
    return Later(story_.DrawMs(1, kWaitMs), [this, group] { StartPack(group); });
  }
  Pack pack(PackRoomNow());
  std::vector<story::DrawnRequest> drawn;
  std::vector<Leader::PackedRequest> packed;
  for (const Ticket ticket : tickets) {
    const Job& job = jobs_.at(ticket);
    const std::optional<int> rank = pack.Add(job.run.pack);
    if (!rank.has_value()) {
      return CouldNotBegin(group, absl::FailedPreconditionError("too long by now to share a pass"));
    }
    drawn.push_back(story_.queue_clients_.drawn(job.client));
    story_.NoteSubmitted(drawn.back().client);
    packed.push_back({.request = {.id = "p", .tokens = {}, .options = drawn.back().options}, .rank = *rank});
  }
  const bool alone = leader.empty();
  starting_ = tickets;
  const bool begun = !story_.BeginPack(drawn, std::move(packed), pack.seconds()).empty();
  if (!begun) {
    return CouldNotBegin(group, alone ? absl::FailedPreconditionError("the pass does not fit the workers")
                                      : absl::ResourceExhaustedError("no room for the pass by now"));
  }
  ++story_.census_.packs_by_turn;
  const std::deque<Ticket> all = tickets;
  for (const Ticket ticket : all) OnBegun(group, jobs_.at(ticket));
}

void StoryQueue::OnBegun(Group group, Job& job) {
  job.prefill = true;
  if (order_.submeshes(job.ticket) > 1) ++story_.census_.submeshes_by_turn;
  if (job.stopped) {
    story_.CancelAtLeader(job.at_leader);
  } else if (!Computes(job.ticket)) {
    SetPaused(job, true);
    story_.DoLeaderActions();
  }
  if (job.answered.has_value()) Later(absl::ZeroDuration(), [this, group] { EndAnswered(group); });
}

void StoryQueue::CouldNotBegin(Group group, const absl::Status& why) {
  const std::deque<Ticket> tickets = std::move(groups_.extract(group).mapped());
  const bool no_memory = absl::IsResourceExhausted(why) && !jobs_.at(tickets.front()).alone;
  const bool again = no_memory || tickets.size() > 1;
  std::vector<Ticket> ended;
  for (const Ticket ticket : tickets) {
    Job& job = jobs_.at(ticket);
    again && !job.stopped ? WaitAgain(job, /*apart=*/!no_memory) : ended.push_back(ticket);
  }
  if (again) GiveTurn();
  for (const Ticket ticket : ended) {
    EndJob(ticket, absl::IsResourceExhausted(why) ? WithRetryAfter(why, kRetry) : why);
  }
}

void StoryQueue::WaitAgain(Job& job, bool apart) {
  ++story_.census_.put_back;
  const bool others_live = order_.live() > 1;
  job.begun = job.prefill = false;
  job.begun_at = absl::InfiniteFuture();
  job.over_bounds = true;
  at_leader_.erase(std::exchange(job.at_leader, 0));
  room_.PutBack(job.ticket);
  apart ? order_.PutApart(job.ticket, now()) : order_.PutBack(job.ticket, now());
  job.put_back = !apart && !job.in_pack && others_live;
  std::erase(computing_, job.ticket);
}

void StoryQueue::OnAnswer(Leader::Ticket at_leader, const absl::Status& status) {
  const auto found = at_leader_.find(at_leader);
  if (found == at_leader_.end()) return story_.Fail("an answer to a request that the queue does not have");
  jobs_.at(found->second).answered = status;
  for (const auto& [group, tickets] : groups_) {
    if (std::find(tickets.begin(), tickets.end(), found->second) == tickets.end()) continue;
    return Later(story_.DrawMs(0, 20), [this, group = group] { EndAnswered(group); });
  }
  story_.Fail("an answer to a request that has not begun");
}

// One waits for all of a pack, one after the other.
void StoryQueue::EndAnswered(Group group) {
  while (groups_.contains(group)) {
    std::deque<Ticket>& tickets = groups_.at(group);
    const Job& job = jobs_.at(tickets.front());
    if (!job.prefill || !job.answered.has_value()) return;
    tickets.pop_front();
    if (tickets.empty()) groups_.erase(group);
    EndJob(job.ticket, *job.answered);
  }
}

void StoryQueue::EndJob(Ticket ticket, const absl::Status& status) {
  const absl::Status why = status;  // it may be the job's
  const Job done = std::move(Remove({&ticket, 1}).front());
  GiveTurn();
  story_.queue_clients_.OnEnd(done.client, why);
}

void StoryQueue::OnLayersDone(const Leader::LayersDone& done) {
  const auto found = at_leader_.find(done.ticket);
  if (found == at_leader_.end()) return;  // it has ended
  Later(story_.DrawMs(0, 3), [this, ticket = found->second, done] {
    const auto job = jobs_.find(ticket);
    if (job == jobs_.end() || !job->second.prefill || job->second.at_leader != done.ticket) return;
    if (done.attempt > std::exchange(job->second.attempt, done.attempt)) order_.BeginAnew(ticket);
    if (!order_.StandsForPack(ticket)) return;
    order_.SetDone(ticket, static_cast<double>(done.layers) / done.of, now());
    GiveTurn();
  });
}

}  // namespace meshfill
