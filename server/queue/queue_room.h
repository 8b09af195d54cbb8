// The room of the queue: what requests claim of it and of their tenants' shares, and whether another may
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
// share, and where its predicted turn comes within max_wait and its deadline. Where there is no room, uploads
// that are slower than kPlaceTokensPerSecond lose their places to it, the one furthest behind first. Nobody
// loses a place unless that makes the room. A full share takes places of its own tenant alone.
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
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/config/tenants.h"
#include "server/observe/metrics.h"
#include "server/queue/refusal.h"
#include "server/queue/run_order.h"

namespace meshfill {

class QueueRoom {
 public:
  using Ticket = RunOrder::Ticket;
  using Clock = std::function<absl::Time()>;  // never falls

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
  // The uploads that lose their places to it, for the caller to remove; none where it has room already, or
  // where that would not make it, or it may not enter all the same.
  std::vector<Ticket> PlacesToTakeFor(const RunOrder::Job& job, int64_t tokens, const RunOrder& order) const;
  // RESOURCE_EXHAUSTED: it may not. DEADLINE_EXCEEDED: its deadline has passed. `order` predicts.
  absl::Status MayEnter(const RunOrder::Job& job, int64_t tokens, const RunOrder& order);

  // ---- What happens to those that have entered.
  void Enter(Ticket ticket, const RunOrder::Job& job, int64_t tokens);
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

  // What an upload hears that has lost its place.
  static absl::Status PlaceLost();

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
    Load of_tenant;

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
  // Whether its turn comes soon enough.
  absl::Status CheckWait(const RunOrder::Job& job, const RunOrder& order) const;
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
};

}  // namespace meshfill

#endif  // MESHFILL_SERVER_QUEUE_QUEUE_ROOM_H_
