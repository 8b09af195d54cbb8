// Decides whose turn it is: which complete prefills compute now, and in which order the others
// follow. Pure: no threads, no clock, no engine; the queue (prefill_queue.h) tells it what happens and does
// what it says.
//
// One prefill computes at a time, on all devices, or several side by side, each on a sub-mesh of its own. The
// first of this order computes:
//   1. those that have waited for `max_age`, the oldest first: nobody starves. The first of them that may
//      compute gives way as others do, but only to what takes no longer than it has computed itself, less
//      what has gone before it since (turn_rank.h). So it has half of the time, and short ones wait for it no
//      longer than for themselves;
//   2. the higher priority class;
//   3. those whose deadline can still be met, but not if they wait any longer, the earliest deadline first.
//      They are taken as late as that can be: so late that all deadlines of a class are met, one after the
//      other, with a quarter of each rest to spare. A tenant that has had kLeadSeconds more than another
//      gets no such turns;
//   4. the least log2(rest) − log2(1 + waited / (kPatience · work)) + lead / kLeadSeconds. The rest is the
//      predicted work that is left of it, or, of one that is over its prediction, by how much it is. What has
//      waited or stood still for kPatience times its work looks half as long, so that those that are about
//      as long go by arrival though their predictions were made at other times. The lead is the seconds that
//      the ranks have computed for its tenant, by the tenant's weight. Shorter prompts go first, so they
//      do not wait for long ones; each kLeadSeconds that a tenant has had more than another make its prompts
//      look twice as long. A tenant that comes starts where the one with the least stands;
//   5. the order of arrival.
// What uploads has no part in that, nor in anybody's lead, until it is complete.
// What computes gives way only to what has a higher class or an urgent deadline, or at most half its (so
// weighted) rest. It then stands still, alive, with what it has computed. At most `most_live` have begun and
// not ended; where that is one, nothing gives way. The last place is only for what takes at most half of the
// shortest rest of those that live (free_places.h).
//
// The first one that has not begun takes all devices or a sub-mesh: whichever makes the mean time until their
// ends shorter, over all prefills that wait and would take such a sub-mesh. What has begun stays on what it
// has. Where the first is on a sub-mesh, the next in the order that are on others of these compute, too;
// so do those that wait, where they end sooner beside these than after them on all devices. None runs on a
// sub-mesh that would lose its deadline there, and not on all devices.
//
//     all devices   A A A A B B B B C C C C D D D D     mean end 10      where four times the devices are
//     4 sub-meshes  A A A A A A A A A                    mean end  9      2.25 times as fast
//                   B B B B B B B B B
//                   C C C C C C C C C
//                   D D D D D D D D D
//
// Or it shares one pass on all devices with those after it that wait, too: a pack (engine/plan/pack.h). They
// are of one class, none is more than twice as long as another, none is old or put back, and none misses its
// deadline for the others. They are added by the order, until one finds no room. The pack is as large as
// makes the mean end earliest over all that could be in it, where that is earlier than in turn and on
// sub-meshes.
//
//     in turn       A A A B B B C C C D D D   mean end 7.5    where a pass takes 3 with one prompt
//     a pack        A A A A                   mean end 4      and 4 with four
//                   B B B B
//                   C C C C
//                   D D D D
//
// Those in a pack begin together, compute together and stand still together, and count as one that lives. The
// pack stands in the order where the first of them does. Each is charged its share of the devices' seconds.
//
// What is to come is told by running this very order ahead, as if nothing else came.
//
//     Announce ──► Complete ──► [waits] ──Choose──► [lives: computes or stands still] ──► Remove
//                                  ◄────PutBack────┘  (no memory beside the others)
#ifndef MESHFILL_SERVER_QUEUE_RUN_ORDER_H_
#define MESHFILL_SERVER_QUEUE_RUN_ORDER_H_

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "engine/prefill_engine.h"
#include "server/queue/free_places.h"
#include "server/queue/gang_choice.h"
#include "server/queue/recent_work.h"
#include "server/queue/run_entry.h"
#include "server/queue/turn_rank.h"

namespace meshfill {

class RunOrder {
 public:
  using Ticket = RunTicket;

  static constexpr double kLeadSeconds = 5;
  static constexpr double kPatience = 16;  // times its work

  struct Options {
    absl::Duration max_age = absl::Minutes(10);  // longest time that a prefill waits or stands still, in all
    int most_live = 1;
    PackRoom pack = {};  // what a pass holds that several share
  };
  using Job = RunJob;
  using State = RunState;

  explicit RunOrder(const Options& options) : options_(options) {}

  void SetPackRoom(const PackRoom& room) { options_.pack = room; }  // from now on

  // ---- What happens; `now` never falls.
  void Announce(Ticket ticket, const Job& job, absl::Time now);
  // It uploads, and its work is predicted anew.
  void SetWork(Ticket ticket, double work_seconds, std::vector<SubmeshSeconds> submeshes = {},
               const PackShare& pack = {});
  void Pay(Ticket ticket);                       // most of it is uploaded: from now on others wait for it
  void Complete(Ticket ticket, absl::Time now);  // from now on it may be chosen
  // `share` of its work is done, 0 to 1. This corrects the prediction of its rest, and of all in its pack: as
  // far as it is, what it took counts, else what was predicted. One slow layer says little of many.
  void SetDone(Ticket ticket, double share, absl::Time now);
  // Its run was begun anew: what it has computed is lost, but for what is predicted of the share that the
  // next SetDone tells.
  void BeginAnew(Ticket ticket);
  // It could not begin beside those that live: it waits until one of them is gone. Of what comes after it
  // only what takes at most half of its work, and of the shortest rest of those that live, begins before it.
  // Of a pack all are put back, and wait for nobody: each may have room by itself.
  void PutBack(Ticket ticket, absl::Time now);
  // Its pack could not begin: it waits again, and shares no pass any more.
  void PutApart(Ticket ticket, absl::Time now);
  // A live one shares its sub-mesh with others that have the same place (Prefill::place).
  void SetPlace(Ticket ticket, uint64_t place) { entries_.at(ticket).place = place; }
  // A live one is being stopped: it computes no more, and lives until Remove.
  void Leave(Ticket ticket, absl::Time now);
  void Remove(Ticket ticket, absl::Time now) { Remove({&ticket, 1}, now); }
  void Remove(std::span<const Ticket> tickets, absl::Time now);  // all at once

  // ---- What to do: decides anew who computes; they live from now on. The first of them; 0: nobody does.
  Ticket Choose(absl::Time now);
  // All that compute, by the order. Several on all devices are in one pack: when they begin, as they are
  // dealt to it (Pack::Add).
  const std::vector<Ticket>& computing() const { return computing_; }
  // Of a live one: it runs on one of so many sub-meshes; 1: on all devices.
  int submeshes(Ticket ticket) const { return entries_.at(ticket).submeshes; }

  // Of a live one: predicted, from its begin to its end, on what it has.
  double WholeSeconds(Ticket ticket) const { return entries_.at(ticket).whole_seconds; }
  // Of a live one: it is in no pack, or stands for those in its pack. One of them does.
  bool StandsForPack(Ticket ticket) const;

  State state(Ticket ticket) const { return entries_.at(ticket).state; }
  int live() const;  // a pack counts as one
  double RestSeconds(Ticket ticket, absl::Time now) const;
  // Seconds that it has computed.
  double ComputedSeconds(Ticket ticket, absl::Time now) const;

  // ---- What is to come, if nothing else arrives.
  struct Turn {
    Ticket ticket;
    double begins_seconds;  // from now on, until it computes; 0 if it does now
    double ends_seconds;
    int submeshes = 1;     // it runs on one of so many
    int pack_prompts = 1;  // that share its pass, it included
  };
  // The turns to come, by when they compute next. Uploads are taken to be complete when all others have
  // ended.
  std::vector<Turn> Turns(absl::Time now) const;
  // The same up to `ticket`, which is complete: its turn is the last, and ends as if nothing else computed.
  std::vector<Turn> TurnsUpTo(Ticket ticket, absl::Time now) const;
  // The turn's ends_seconds, if what goes before it keeps coming as in the last minutes (recent_work.h).
  double LikelyEndSeconds(const Turn& turn, absl::Time now) const;
  // Seconds until `job`, added now, would begin. Uploads that are paid for are taken to be complete; others
  // count for nothing.
  double WaitSeconds(const Job& job, absl::Time now) const;
  // A bound on WaitSeconds for any job, found without running ahead.
  double MostWaitSeconds(absl::Time now) const;

 private:
  using Entry = RunEntry;

  TurnRank RankOf(Ticket ticket, const Entry& entry, const FreePlaces& places, absl::Time now) const;
  Ranking Ranked(absl::Time now);  // all
  FreePlaces PlacesNow(absl::Time now) const;
  // The first of `ranked` that may compute, and those beside it.
  Gang FirstThatMay(std::span<const Ticket> ranked, absl::Time now) const;
  void Give(const Gang& gang, absl::Time now);  // the turn
  void TakeTurn(Ticket ticket, absl::Time now);
  void ReturnToWait(Ticket ticket, absl::Time now);
  void FindUrgent(absl::Time now);
  // Lets time pass, as if nothing else came, until all have ended or `stop` computes.
  std::vector<Turn> RunAhead(absl::Time now, Ticket stop);
  double LeadOfNew(const std::string& tenant) const;  // lead that a job of this tenant begins with
  double LeastLead() const;  // smallest lead of the tenants that have something complete here; 0: none has
  void Forget(Ticket ticket, absl::Time now);
  void FindRoomAgain();         // somebody is gone
  void Settle(absl::Time now);  // adds what was computed since the last time to its tenant's lead
  void ForgetTenants();

  Options options_;
  std::map<Ticket, Entry> entries_;
  std::vector<Ticket> computing_;
  Elder elder_;
  uint64_t last_pack_ = 0;
  std::map<std::string, double> leads_;  // by tenant: seconds computed for it
  RecentWork recent_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_QUEUE_RUN_ORDER_H_
