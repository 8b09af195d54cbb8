// The room of the queue: what requests claim of it and of their tenants' bounds, and whether another may
// enter. The queue (prefill_queue.h) tells it what happens to each request; whose turn it is and what is
// predicted is RunOrder's.
//
//     Enter ──► [uploads] ──Complete──► [waits] ──Begin──► [lives] ──► Remove, from each of them
//                 │   ▲                    ◄────PutBack────┘
//                 └Pay┘
//
//     a request that   claims tokens
//     uploads          twice those that have come, at least kFreeTokens, at most those announced
//     waits            all
//     lives            none, and no place either
//
// A request may enter where all its tokens have room beside the claims, in the queue and in its tenant's
// bounds, and where its predicted turn comes within max_wait and its deadline: as if all that may be cached
// of it were. Whether that is so is known when it is complete. Where there is no room, uploads that are
// slower than kPlaceTokensPerSecond lose their places to it, the one furthest behind first. Nobody loses a
// place unless that makes the room. Within a tenant's bounds, places of its own alone are lost.
//
// Of what is full then, places or tokens, each tenant that has some or asks has a share by its weight, at
// least one prompt. One that is within its share takes what others have beyond theirs, to enter and to upload
// the rest: so nobody keeps it out by being first. The tenant that is furthest beyond its share loses the
// newest prompt of its lowest class, though it be accepted. What lives keeps its place.
//
//     max_requests = 6    a a a a a a    b asks, and has a share of 3
//                         a a a a a b    a's newest has lost its place
//                         a a a b b b    b asks again, and again; then it is refused, as a is
//
// A refusal names its limit. It has RetryInfo where waiting helps: the predicted seconds until that changes,
// at least kLeastRetry. Where many are refused, each comes after those of its tenant that were told before
// (refusal.h).
//
// Claims may go beyond the limits, and nobody enters then: an upload that Pay has refused claims what it paid
// until Remove, and what is put back claims its tokens again.
//
// Not thread-safe: the queue's lock guards it.
#ifndef MESHFILL_SERVER_QUEUE_QUEUE_ROOM_H_
#define MESHFILL_SERVER_QUEUE_QUEUE_ROOM_H_

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/config/priority_class.h"
#include "server/config/tenants.h"
#include "server/observe/metrics.h"
#include "server/queue/refusal.h"
#include "server/queue/refused_waits.h"
#include "server/queue/run_order.h"

namespace meshfill {

class QueueRoom {
 public:
  using Ticket = RunOrder::Ticket;
  using Clock = std::function<absl::Time()>;  // never falls
  struct LostPlace {
    Ticket ticket = 0;
    bool slow = false;  // it is a slow upload; if not, it is beyond its tenant's share

    bool operator==(const LostPlace&) const = default;
  };
  // One that has lost its place, with what was told of it.
  struct Loser {
    LostPlace place;
    RunOrder::Job job;
    int64_t tokens = 0;
  };

  static constexpr int64_t kFreeTokens = 65536;
  static constexpr double kPlaceTokensPerSecond = 10000;
  static constexpr absl::Duration kUploadGrace = absl::Seconds(1);  // until that pace counts
  // What RetryInfo says at least. Short beside what a pool of short prompts has in its queue: were it longer,
  // the queue would run empty before those that were refused come again.
  static constexpr absl::Duration kLeastRetry = absl::Milliseconds(100);

  struct Limits {
    int64_t max_requests = 64;  // waiting and uploading
    int64_t max_tokens = 16 << 20;
    absl::Duration max_wait = absl::Hours(1);    // longest predicted wait of who enters
    absl::Duration max_age = absl::Minutes(10);  // RunOrder's; RetryLine's longest, too
    Tenants tenants;
  };

  QueueRoom(const Limits& limits, Clock clock);

  const Limits& limits() const { return limits_; }

  // ---- Whether one may enter that announces so many tokens.
  // PERMISSION_DENIED: its tenant may not send that class.
  absl::Status CheckClass(const RunOrder::Job& job) const;
  // The places that go to it, for the caller to remove: then it may enter. None where it has room already, or
  // where that would not make it, or it may not enter all the same.
  std::vector<LostPlace> PlacesToTakeFor(const RunOrder::Job& job, int64_t tokens,
                                         const RunOrder& order) const;
  // RESOURCE_EXHAUSTED: it may not. DEADLINE_EXCEEDED: its deadline has passed. `order` predicts; one that
  // would wait too long may hear what another heard a moment ago (refused_waits.h).
  absl::Status MayEnter(const RunOrder::Job& job, int64_t tokens, const RunOrder& order);

  // Whether its turn comes soon enough. Errors: MayEnter's, of that alone.
  absl::Status CheckWait(const RunOrder::Job& job, const RunOrder& order) const;
  // Whether it meets its deadline, where its turn comes in so long. Errors: the same.
  absl::Status CheckDeadline(const RunOrder::Job& job, double wait_seconds) const;

  // ---- What happens to those that have entered.
  void Enter(Ticket ticket, const RunOrder::Job& job, int64_t tokens);
  // The places that go to this upload when so many of its tokens have come, for the caller to remove before
  // Pay; none where it needs none, or where they would not do.
  std::vector<LostPlace> PlacesToTakeToPay(Ticket ticket, int64_t tokens_so_far) const;
  // So many of its tokens have come. RESOURCE_EXHAUSTED: its claim has grown, and has no room; with
  // RetryInfo.
  absl::Status Pay(Ticket ticket, int64_t tokens_so_far, const RunOrder& order);
  void Complete(Ticket ticket);
  void Begin(Ticket ticket) { entries_.at(ticket).state = RunOrder::State::kLive; }
  void PutBack(Ticket ticket) { entries_.at(ticket).state = RunOrder::State::kWaiting; }
  void Remove(Ticket ticket) { entries_.erase(ticket); }

  // ---- What is claimed now.
  int64_t ClaimOf(Ticket ticket) const { return ClaimOf(entries_.at(ticket)); }
  QueueLoad load() const;
  // Tokens that an upload claims.
  static int64_t UploadClaim(int64_t announced_tokens, int64_t tokens_so_far);

  // What those hear that have lost their places to one request, when it has entered. Of each tenant the first
  // hears when there is room for it, and the others come after it.
  std::vector<absl::Status> PlacesLost(std::span<const Loser> losers, const RunOrder& order);

 private:
  struct Entry {
    std::string tenant;
    int priority = 0;
    int64_t tokens = 0;  // announced
    absl::Time entered_at;
    RunOrder::State state = RunOrder::State::kUploading;
    int64_t uploaded_tokens = 0;
    absl::Time complete_at = absl::InfiniteFuture();  // infinite: it uploads
  };
  struct Load {
    int64_t requests = 0;
    int64_t tokens = 0;
  };
  // All claims, as one of `tenant` finds them.
  struct Claims {
    std::string tenant;
    Load queue;
    std::map<std::string, Load> of_tenants;  // of `tenant`, and of all that have claims
    double weights = 0;                      // of these tenants

    const Load& of_tenant() const { return of_tenants.at(tenant); }
    void Count(const Entry& entry, int sign = 1);  // -1: its claim goes
  };

  static bool HasPlace(const Entry& entry) { return entry.state != RunOrder::State::kLive; }
  static int64_t ClaimOf(const Entry& entry);
  Claims ClaimsBeside(const std::string& tenant) const;
  int64_t TenantsTokens(const std::string& tenant) const {
    return limits_.tenants.LimitsOf(tenant).max_tokens;
  }

  // Whether there is ever room for so many tokens.
  absl::Status CheckSize(const std::string& tenant, int64_t tokens) const;
  // Whether there is room beside these claims.
  absl::Status CheckBeside(const Claims& claims, int64_t tokens) const;
  absl::Status CheckQueue(const Claims& claims, int64_t tokens) const;   // of the queue's bounds
  absl::Status CheckTenant(const Claims& claims, int64_t tokens) const;  // of its tenant's
  // Errors: CheckWait's, where its turn comes in so long.
  absl::Status CheckWaitOf(const RunOrder::Job& job, double wait_seconds) const;
  // Predicted, until its turn comes; or so long at least, where that is too long already. 0, where its work
  // alone is.
  double WaitSeconds(const RunOrder::Job& job, const RunOrder& order);
  // Whether its turn comes soon enough after so many seconds.
  bool IsSoonEnough(const RunOrder::Job& job, double wait_seconds, absl::Time now) const;
  // Takes all slow uploads, the furthest behind first.
  void TakeSlowUploads(Claims& claims, std::vector<LostPlace>& taken) const;
  // Takes what others have beyond their shares of what may be full, places or tokens, of which the queue has
  // `most`, for a tenant that asks for so much more, while that is within its own share. True: it has room.
  bool TakeBeyondShares(int64_t Load::*full, int64_t most, const Load& more, Claims& claims,
                        std::vector<LostPlace>& taken) const;
  // Of each tenant those that have places and are not taken: the highest class first, there the oldest.
  std::map<std::string, std::vector<Ticket>> Rows(const std::vector<LostPlace>& taken) const;
  // Gives back the places of slow uploads without which there is room as well, the least behind first.
  void SpareSlowUploads(int64_t tokens, Claims& claims, std::vector<LostPlace>& taken) const;
  // `refused` with the seconds until there is room for it, after those that were told before.
  absl::Status WithRetryForRoom(const absl::Status& refused, const RunOrder::Job& job,
                                double seconds_until_room);
  // Predicted, until one of `tenant` has room for so many tokens: a place gets free when its prefill begins.
  double SecondsUntilRoom(const std::string& tenant, int64_t tokens, const RunOrder& order);
  // The turns to come. They may be some times as old as it takes to find them: refusals cost the ranks
  // little.
  const std::vector<RunOrder::Turn>& RecentTurns(const RunOrder& order);

  const Limits limits_;
  const Clock clock_;
  std::map<Ticket, Entry> entries_;  // those that live, too, until Remove
  RetryLine retry_line_;
  std::vector<RunOrder::Turn> recent_turns_;
  absl::Time recent_turns_until_ = absl::InfinitePast();
  RefusedWaits refused_waits_;
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_QUEUE_QUEUE_ROOM_H_
