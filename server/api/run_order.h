// Decides whose turn it is: which complete prefill computes now, and in which order the others
// follow. Pure: no threads, no clock, no engine; the queue (prefill_queue.h) tells it what happens and does
// what it says.
//
// One prefill computes at a time. It is the first of this order:
//   1. those that have waited for `max_age`, the oldest first: nobody starves;
//   2. the higher priority class;
//   3. those whose deadline can still be met, but not if they wait any longer, the earliest deadline first.
//      They are taken as late as that can be: so late that all deadlines of a class are met, one after the
//      other, with a quarter of each rest to spare. A tenant that has had kLeadSeconds more than another
//      gets no such turns;
//   4. the least log2(rest) + lead / kLeadSeconds. The rest is the predicted work that is left of it, or, of
//      one that is over its prediction, by how much it is. The lead is the seconds that the ranks have
//      computed for its tenant, by the tenant's weight. Shorter prompts go first, so they never wait for long
//      ones; each kLeadSeconds that a tenant has had more than another make its prompts look twice as long.
//      A tenant that comes starts where the one with the least stands;
//   5. the order of arrival.
// What uploads has no part in that, nor in anybody's lead, until it is complete.
// What computes gives way only to what has a higher class or an urgent deadline, or at most half its (so
// weighted) rest. It then stands still, alive, with what it has computed. At most `most_live` have begun and
// not ended; where that is one, nothing gives way.
//
// What is to come is told by running this very order ahead.
//
//     Announce ──► Complete ──► [waits] ──Choose──► [lives: computes or stands still] ──► Remove
//                                  ◄────PutBack────┘  (no memory beside the others)
#ifndef MESHFILL_SERVER_API_RUN_ORDER_H_
#define MESHFILL_SERVER_API_RUN_ORDER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace meshfill {

class RunOrder {
 public:
  using Ticket = uint64_t;  // above 0, rising

  static constexpr double kLeadSeconds = 5;
  // Classes: −kTopPriority to kTopPriority; others count as the nearest.
  static constexpr int kTopPriority = 2;

  struct Options {
    absl::Duration max_age = absl::Minutes(10);  // longest time that a prefill waits or stands still, in all
    int most_live = 1;
  };
  struct Job {
    std::string tenant;
    int priority = 0;         // higher first
    double work_seconds = 0;  // predicted
    double weight = 1;        // the tenant's weight: 2 gets twice the seconds of 1
    absl::Time deadline = absl::InfiniteFuture();
  };
  enum class State { kUploading, kWaiting, kLive };

  explicit RunOrder(const Options& options) : options_(options) {}

  // ---- What happens; `now` never falls.
  void Announce(Ticket ticket, const Job& job, absl::Time now);
  void SetWork(Ticket ticket, double work_seconds);  // it uploads, and its work is predicted anew
  void Pay(Ticket ticket);                           // most of it is uploaded: from now on others wait for it
  void Complete(Ticket ticket, absl::Time now);      // from now on it may be chosen
  // `share` of its work is done, 0 to 1. This corrects the prediction of its rest.
  void SetDone(Ticket ticket, double share, absl::Time now);
  // It could not begin beside those that live: it waits until one of them is gone, and what comes after it
  // does not begin before it.
  void PutBack(Ticket ticket, absl::Time now);
  // A live one is being stopped: it computes no more, and lives until Remove.
  void Leave(Ticket ticket, absl::Time now);
  void Remove(Ticket ticket, absl::Time now);

  // ---- What to do: decides anew whose turn it is; that one lives from now on. 0: nobody's.
  Ticket Choose(absl::Time now);

  State state(Ticket ticket) const { return entries_.at(ticket).state; }
  int live() const;
  double RestSeconds(Ticket ticket, absl::Time now) const;
  // Seconds that it has computed.
  double ComputedSeconds(Ticket ticket, absl::Time now) const;

  // ---- What is to come, if nothing else arrives.
  struct Turn {
    Ticket ticket;
    double begins_seconds;  // from now on, until it computes; 0 if it does now
    double ends_seconds;
  };
  // The turns to come, by when they compute next. Uploads are taken to be complete when all others have
  // ended.
  std::vector<Turn> Turns(absl::Time now) const;
  // The same up to `ticket`, which is complete: its turn is the last.
  std::vector<Turn> TurnsUpTo(Ticket ticket, absl::Time now) const;
  // Seconds until `job`, added now, would begin. Uploads that are paid for are taken to be complete; others
  // count for nothing.
  double WaitSeconds(const Job& job, absl::Time now) const;
  // A bound on WaitSeconds for any job, found without running ahead.
  double MostWaitSeconds(absl::Time now) const;

 private:
  struct Entry {
    Job job;
    State state = State::kUploading;
    bool paid = false;  // it uploads, and others wait for it (Pay)
    bool leaving = false;
    bool put_back = false;
    bool urgent = false;  // once it could wait no longer, for good
    absl::Time complete_at = absl::InfiniteFuture();
    absl::Duration computed;  // before `since`, where it computes
    absl::Time since;         // it computes since then
    double rest_seconds = 0;  // when it had computed `measured_at`
    absl::Duration measured_at;
  };
  // What the order compares.
  struct Rank {
    bool stays;  // it lives, and no other can
    bool aged;
    int priority;
    bool urgent;
    absl::Time deadline;
    double weighted_rest;
    absl::Time complete_at;
    Ticket ticket;
    bool Before(const Rank& other) const;
  };

  absl::Duration Computed(Ticket ticket, const Entry& entry, absl::Time now) const;
  double Rest(Ticket ticket, const Entry& entry, absl::Time now) const;
  Rank RankOf(Ticket ticket, const Entry& entry, absl::Time now) const;
  std::vector<Ticket> Ranked(absl::Time now);  // all, the first to compute first
  // The first of `ranked` that may compute. 0: nobody may.
  Ticket FirstThatMay(const std::vector<Ticket>& ranked) const;
  void Give(Ticket ticket, absl::Time now);  // the turn
  bool CanMeetDeadline(Ticket ticket, const Entry& entry, absl::Time now) const;
  void FindUrgent(absl::Time now);
  // Lets time pass, as if nothing else came, until all have ended or `stop` computes.
  std::vector<Turn> RunAhead(absl::Time now, Ticket stop);
  double LeadOfNew(const std::string& tenant) const;  // lead that a job of this tenant begins with
  double LeastLead() const;  // smallest lead of the tenants that have something complete here; 0: none has
  void End(Ticket ticket, absl::Time now);
  void Settle(absl::Time now);  // adds what was computed since the last time to its tenant's lead
  void ForgetTenants();

  const Options options_;
  std::map<Ticket, Entry> entries_;
  Ticket computing_ = 0;
  std::map<std::string, double> leads_;  // by tenant: seconds computed for it
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_API_RUN_ORDER_H_
