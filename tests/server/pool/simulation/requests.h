// What a story remembers of requests, of the runs that its leader told workers of, and of leases.
#ifndef MESHFILL_TESTS_SERVER_POOL_SIMULATION_REQUESTS_H_
#define MESHFILL_TESTS_SERVER_POOL_SIMULATION_REQUESTS_H_

#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "engine/prefill_engine.h"
#include "server/pool/leader.h"

namespace meshfill::story {

struct ClientRequest {
  std::vector<uint32_t> tokens;
  bool poisonous = false;
  bool calm = false;    // no fault since it was submitted, and well before
  uint64_t losses = 0;  // of workers, before it
  bool cancelled = false;
  std::set<uint64_t> runs;   // of this leader
  int attempts = 0;          // that these began
  int deaths = 0;            // in its runs, by its poison
  std::string lease;         // empty: K and V are not kept
  std::string cache_tenant;  // whose prompts it may begin like
  bool ignores_cache = false;
  int submeshes = 1;
  // The same for all of a pack, which have their turns in common. 0: it was submitted by itself.
  Leader::Ticket pack = 0;
  int pack_prompts = 1;
  double pack_share = 1;
  bool paused = false;
  absl::Time resumed_at = absl::InfinitePast();
  absl::Time submitted_at;
};

// A run as its workers were told of it.
struct RunTold {
  std::vector<uint32_t> tokens;  // of the whole prompt
  std::string cache_tenant;
  std::vector<uint64_t> computed_by;  // by token, up to the end of the piece: the run
  bool stopped = false;
  bool cancelled = false;  // stopped for its client alone
  bool finished = false;
  uint64_t losses = 0;  // of workers, until it was
  bool begun = false;
  bool is_next_piece = false;                        // of its prompt: it runs where those before it did
  uint64_t pause = 0;                                // number of the last one
  std::set<uint64_t> still;                          // links whose workers stand still in it
  absl::Time paused_since = absl::InfiniteFuture();  // it goes on
  bool innocent = false;  // of its epoch's end: it had stood still for as long as a worker may be silent
  Leader::Ticket ticket = 0;
  std::map<int, int> nodes;           // its workers' incarnations
  std::map<uint64_t, int64_t> links;  // bytes that it reserves, by its worker's link
  absl::Time stopped_at = absl::InfiniteFuture();
  uint64_t pack = 0;  // 0: it shares no pass
  int pack_runs = 0, local_rank = 0;
  bool left = false;                                   // its client is gone
  bool done = false;                                   // the leader has its rank's last word
  absl::Time unwanted_since = absl::InfiniteFuture();  // nobody wants its pass
};

// A request before it is submitted.
struct DrawnRequest {
  ClientRequest client;
  PrefillOptions options;
};

// A client's lease, as it must be.
struct KvClient {
  int leader_incarnation = 0;
  int64_t tokens = 0;
  bool held = true;  // by its prefill
  bool ended = false;
  absl::Time expires;
  absl::Time changed_at;  // when the workers were told last
};

}  // namespace meshfill::story

#endif  // MESHFILL_TESTS_SERVER_POOL_SIMULATION_REQUESTS_H_
