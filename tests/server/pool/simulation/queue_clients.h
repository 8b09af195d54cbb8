// The clients of a story's queue. Each sends one prompt: its header, its tokens, and then it waits. One that
// is refused with RetryInfo comes again as it is told, or gives up. Each ends once.
//
// They outlive the leader: whoever has a place in its queue then ends, and the others come to the next one.
#ifndef MESHFILL_TESTS_SERVER_POOL_SIMULATION_QUEUE_CLIENTS_H_
#define MESHFILL_TESTS_SERVER_POOL_SIMULATION_QUEUE_CLIENTS_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/queue/queue_room.h"
#include "server/queue/run_order.h"
#include "tests/server/pool/simulation/requests.h"

namespace meshfill {

class PoolSimulation;

class QueueClients {
 public:
  // QueueRoom counts so many tokens for each of a prompt: then uploads claim less than all, at first.
  static constexpr int64_t kTokensOfOne = 4096;

  explicit QueueClients(PoolSimulation& story) : story_(story) {}
  QueueClients(const QueueClients&) = delete;
  QueueClients& operator=(const QueueClients&) = delete;

  // What a queue of the story may hold. Its tenants are "a", "b" and "c".
  QueueRoom::Limits DrawLimits();
  // `last`: alone, in a pool that is whole, so that nothing may refuse it.
  void Add(story::DrawnRequest drawn, bool last);
  int count() const { return static_cast<int>(clients_.size()); }
  const story::DrawnRequest& drawn(uint64_t client) const { return clients_.at(client).drawn; }

  void OnEnd(uint64_t client, const absl::Status& status);  // from the queue
  int OnLeaderGone();                                       // so many end
  void CheckPatience();

 private:
  struct Client {
    story::DrawnRequest drawn;
    RunOrder::Job run;                                 // without what is said of it once it has a place
    bool last = false, cancels = false, gone = false;  // gone: it has cancelled
    absl::Time came_at;
    uint64_t losses = 0;  // of workers, when it came
    int leader_incarnation = 0;
    RunOrder::Ticket ticket = 0;  // 0: it has no place
    int refusals = 0;             // in a row
    bool again = false;           // it has been refused, and comes again
  };
  int64_t TokensOf(const Client& client) const;
  void Come(uint64_t id);
  void Predict(const Client& client);
  void Upload(uint64_t id, RunOrder::Ticket ticket, int64_t tokens_so_far);
  void Leave(uint64_t id, RunOrder::Ticket ticket);
  void OnRefused(uint64_t id, const absl::Status& refused);
  void End(uint64_t id, const absl::Status& status);
  // Nothing has failed since it came that it could suffer from.
  bool IsCalm(const Client& client) const;

  PoolSimulation& story_;
  std::map<uint64_t, Client> clients_;
  uint64_t last_client_ = 0;
};

}  // namespace meshfill

#endif  // MESHFILL_TESTS_SERVER_POOL_SIMULATION_QUEUE_CLIENTS_H_
