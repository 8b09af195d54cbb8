// The queue of a story: what PrefillQueue (server/queue/prefill_queue.h) does with RunOrder and QueueRoom, in
// virtual time. Each function does what that of the same name does there; its threads are events here, each a
// moment late, so that whatever happens may come in between.
//
//     header ── Reserve ── Pay… ── Submit ──► waits ── GiveTurn ──► RunTogether ──► leader ──► EndJob
//                                               ▲                        │ no room there
//                                               └─────── WaitAgain ──────┘
//
// It lives and dies with its leader. What must hold whatever fails, QueueWatch checks after each event.
#ifndef MESHFILL_TESTS_SERVER_POOL_SIMULATION_QUEUE_H_
#define MESHFILL_TESTS_SERVER_POOL_SIMULATION_QUEUE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/pool/leader.h"
#include "server/queue/queue_room.h"
#include "server/queue/run_order.h"
#include "tests/server/pool/simulation/queue_watch.h"

namespace meshfill {

class PoolSimulation;

class StoryQueue {
 public:
  using Ticket = RunOrder::Ticket;

  StoryQueue(PoolSimulation& story, const QueueRoom::Limits& limits, int most_live);
  StoryQueue(const StoryQueue&) = delete;
  StoryQueue& operator=(const StoryQueue&) = delete;

  // ---- What clients ask. They hear of a request's end by QueueClients::OnEnd.
  absl::StatusOr<Ticket> Reserve(uint64_t client, const RunOrder::Job& run, int64_t tokens);
  void SetPredictedSeconds(Ticket ticket, double seconds, std::vector<SubmeshSeconds> submeshes,
                           const PackShare& pack);
  absl::Status Pay(Ticket ticket, int64_t tokens_so_far);
  absl::Status Submit(Ticket ticket);
  void Withdraw(Ticket ticket);

  // ---- What the leader says. Nothing of it has an effect at once.
  void Attach(Leader::Ticket at_leader);  // of the next prompt that is being started
  // Whether the answer is to nobody but the queue: the prompt could not begin, and waits again.
  bool Takes(const Leader::Answer& answer);
  void OnAnswer(Leader::Ticket at_leader, const absl::Status& status);
  void OnLayersDone(const Leader::LayersDone& done);

  bool Has(Ticket ticket) const { return jobs_.contains(ticket); }
  const QueueRoom::Limits& limits() const { return room_.limits(); }
  void CheckEmpty() { watch_.CheckEmpty(); }

 private:
  friend class QueueWatch;
  using Job = story::QueueJob;
  using Group = uint64_t;  // those that a thread of the queue has, in the order in which it waits for them

  // An event of the queue, a moment later; dropped with the leader.
  void Later(absl::Duration delay, std::function<void()> what);
  void Event(const std::function<void()>& what);
  void Look();  // at whose turn it is, now and then
  absl::Time now() const;

  void GiveTurn();
  bool Computes(Ticket ticket) const;
  void SetPaused(const Job& job, bool paused);
  void StopLive(Job& job);
  PackRoom PackRoomNow();

  void RunTogether(Group group);
  void Start(Group group, Job& job);
  void Decide(Group group, Ticket ticket);  // whether it has begun at the leader
  void StartPack(Group group);
  void OnBegun(Group group, Job& job);
  void CouldNotBegin(Group group, const absl::Status& why);
  void WaitAgain(Job& job, bool apart);
  void EndAnswered(Group group);
  void EndJob(Ticket ticket, const absl::Status& status);

  void RemoveLosers(std::span<const QueueRoom::LostPlace> places);
  void TellLosers(std::span<const QueueRoom::LostPlace> places);
  std::vector<Job> Remove(std::span<const Ticket> tickets);

  PoolSimulation& story_;
  const int most_live_;
  std::map<Ticket, Job> jobs_;
  RunOrder order_;
  QueueRoom room_;
  std::vector<Ticket> computing_;
  std::map<Group, std::deque<Ticket>> groups_;
  std::map<Leader::Ticket, Ticket> at_leader_;
  std::deque<Ticket> starting_;            // that Attach is about
  std::vector<Job> losers_;                // until they are told
  std::map<Ticket, absl::Status> lost_;    // why uploads have no places, until Withdraw
  std::pair<uint64_t, int> members_ = {};  // that pack_room_ is for: joins, and workers to stay
  PackRoom pack_room_;
  Ticket last_ticket_ = 0;
  Group last_group_ = 0;
  uint64_t choices_ = 0;
  bool looks_ = false;
  QueueWatch watch_;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_POOL_SIMULATION_QUEUE_H_
