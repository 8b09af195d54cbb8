// Totals of stories that show that these had what they are for.
#ifndef MESHFILL_TESTS_SERVER_POOL_SIMULATION_CENSUS_H_
#define MESHFILL_TESTS_SERVER_POOL_SIMULATION_CENSUS_H_

namespace meshfill::story {

struct Census {
  int answers = 0, results = 0, errors = 0, retries = 0, losses = 0, poisoned = 0, cancelled = 0;
  int leases = 0, refused = 0, reads = 0, lost_reads = 0, missed_reads = 0, renewals = 0, releases = 0,
      lapses = 0;
  int behind_a_prefix = 0, evictions = 0;
  int in_pieces = 0, pieces_again = 0, pieces_lost = 0;
  int streamed = 0, shared = 0;            // runs prepared where workers may share weights
  int on_submeshes = 0, side_by_side = 0;  // runs on one, of these beside another that goes on
  int most_at_once = 0, pauses = 0, crowded_out = 0, attempts_of_innocents = 0;
  int agreements = 0;           // of all workers of a run on where to stand still
  int packs = 0, in_packs = 0;  // that began, and prompts in them
  int packs_refused = 0;        // packs that had no room
  int left_in_packs = 0;        // prompts that were computed to the end without their clients
  int packs_again = 0;          // results of prompts whose pack failed, each by a run of its own
  // In stories whose turns are the queue's.
  int came = 0, entered = 0, ended_without_result = 0;          // clients
  int refused_by_queue = 0, entered_again = 0;                  // of these, when they came again
  int places_lost = 0, slow_places_lost = 0;                    // to others
  int put_back = 0;                                             // had no room at the leader
  int preempted = 0, packs_by_turn = 0, submeshes_by_turn = 0;  // by the order
  int aged = 0, elders_gave_way = 0;                            // waited for max_age; choices

  void Add(const Census& other);
  void Print() const;
};

}  // namespace meshfill::story

#endif  // MESHFILL_TESTS_SERVER_POOL_SIMULATION_CENSUS_H_
