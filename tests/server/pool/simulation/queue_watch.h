// What must hold of a story's queue, whatever fails. The queue says what happens. This counts along, by what
// the headers of server/queue promise alone, and fails the story where RunOrder or QueueRoom says otherwise.
//
// Who is there: RunOrder, QueueRoom, the queue and the leader have the same requests in the same states, and
// the leader lets those go on whose turn it is. RunOrder counts their turns. At the end nothing is left.
//
// Who enters: one for which there is room in the queue's and in its tenant's bounds. Nobody is refused where
// there is. Who loses a place is slow, or the newest of the lowest class of its tenant. Where all tenants
// have the same weight, one that has nothing here is not kept out by another that has several places.
//
// Whose turn it is: somebody's, wherever one may compute, and nobody's beside another on the very same
// workers. A request that has stood for max_age is aged. While an aged one may begin or lives, the oldest of
// these has the turn, or one whose rest is no longer than what that one has computed. So an aged request,
// while it stands still, has this bound:
//
//     turns of those that    ≤   turns of the others, whole   +   slack
//     came after it, began           those that came before it,
//     when it was aged, and          that lived then, or that
//     are not aged                   are aged themselves
//
// It stands for at most max_age, twice the turns of the others, and the slack. The slack is two looks, and
// kSlackOfWork of a prompt's work. While no aged one may begin, for want of memory or of a place, what lives
// has to end first: then what begins takes no longer than one of these has computed.
#ifndef MESHFILL_TESTS_SERVER_POOL_SIMULATION_QUEUE_WATCH_H_
#define MESHFILL_TESTS_SERVER_POOL_SIMULATION_QUEUE_WATCH_H_

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/pool/leader.h"
#include "server/queue/queue_room.h"
#include "server/queue/run_order.h"

namespace meshfill {

class StoryQueue;

namespace story {

// A request in the queue of a story.
struct QueueJob {
  RunOrder::Ticket ticket = 0;
  uint64_t client = 0;
  RunOrder::Job run;
  int64_t tokens = 0;       // announced
  int64_t paid_tokens = 0;  // that have come
  bool needs_cache = false;
  bool complete = false, begun = false, stopped = false;
  absl::Time entered_at, complete_at, begun_at = absl::InfiniteFuture();
  absl::Time asked_at;                   // the leader, for a run
  Leader::Ticket at_leader = 0;          // 0: the leader has not been asked
  bool alone = false;                    // nothing else lived then
  bool no_room = false;                  // the leader's answer, before it had begun
  bool prefill = false;                  // it has begun at the leader
  std::optional<absl::Status> answered;  // the leader's last word
  int attempt = 1;                       // that layers were told of
  bool over_bounds = false;              // its claim may be beyond them: put back, or refused in its upload
  bool put_back = false;                 // it waits for memory
  bool in_pack = false;                  // its turn is that of a pack
  uint64_t group = 0;                    // whose thread has it
  uint64_t choice = 0;                   // in which it began
  absl::Duration computed;               // had the turn
  absl::Time aged_at = absl::InfiniteFuture();
  absl::Duration others_first, after_others;  // since it is aged: its bound's two sides
};

}  // namespace story

class QueueWatch {
 public:
  explicit QueueWatch(StoryQueue& queue) : queue_(queue) {}

  void Advance();     // before an event
  void Check();       // after it
  void CheckTurns();  // after a choice
  void CheckEntered(const RunOrder::Job& run, int64_t tokens);
  void CheckRefused(const RunOrder::Job& run, int64_t tokens, const absl::Status& refused);
  void CheckTold(const absl::Status& refused);  // what its RetryInfo says
  void CheckLosers(std::span<const QueueRoom::LostPlace> places);
  void CheckEmpty();

 private:
  using Job = story::QueueJob;
  struct Load {
    int64_t requests = 0, tokens = 0;
  };
  void Fail(const std::string& what);
  absl::Time now() const;
  static int64_t ClaimOf(const Job& job);
  // Of one tenant, or of all: "".
  Load Claims(const std::string& tenant, bool within_bounds = false) const;
  bool HasRoom(const Load& claims, const Load& more, const std::string& tenant) const;
  absl::Duration Stood(const Job& job, absl::Time at) const;
  bool IsAged(const Job& job, absl::Time at) const;
  bool IsOlder(const Job& one, const Job& other) const;
  // Whether `other` may have a turn before an aged one without end: it does not come after that.
  bool GoesBefore(const Job& other, const Job& aged) const;
  bool IsSlow(const Job& job) const;
  const Job* Elder() const;
  absl::Duration MostComputed(absl::Time at) const;  // of those that live, by one
  void CheckSubmeshes();
  void CheckStates();
  void CheckLeader();
  void CheckPredictions();

  StoryQueue& queue_;
  absl::Time last_ = absl::InfinitePast();
  bool has_elder_ = false;  // since the last choice
  int checks_ = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_POOL_SIMULATION_QUEUE_WATCH_H_
