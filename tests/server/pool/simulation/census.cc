#include "tests/server/pool/simulation/census.h"

#include <algorithm>
#include <cstdio>

namespace meshfill::story {

void Census::Add(const Census& other) {
  answers += other.answers;
  results += other.results;
  errors += other.errors;
  retries += other.retries;
  losses += other.losses;
  poisoned += other.poisoned;
  cancelled += other.cancelled;
  leases += other.leases;
  refused += other.refused;
  reads += other.reads;
  lost_reads += other.lost_reads;
  missed_reads += other.missed_reads;
  renewals += other.renewals;
  releases += other.releases;
  lapses += other.lapses;
  behind_a_prefix += other.behind_a_prefix;
  evictions += other.evictions;
  in_pieces += other.in_pieces;
  pieces_again += other.pieces_again;
  pieces_lost += other.pieces_lost;
  streamed += other.streamed;
  shared += other.shared;
  on_submeshes += other.on_submeshes;
  side_by_side += other.side_by_side;
  most_at_once = std::max(most_at_once, other.most_at_once);
  pauses += other.pauses;
  agreements += other.agreements;
  crowded_out += other.crowded_out;
  attempts_of_innocents += other.attempts_of_innocents;
  packs += other.packs;
  in_packs += other.in_packs;
  packs_refused += other.packs_refused;
  left_in_packs += other.left_in_packs;
  packs_again += other.packs_again;
  came += other.came;
  entered += other.entered;
  ended_without_result += other.ended_without_result;
  refused_by_queue += other.refused_by_queue;
  entered_again += other.entered_again;
  places_lost += other.places_lost;
  slow_places_lost += other.slow_places_lost;
  put_back += other.put_back;
  preempted += other.preempted;
  packs_by_turn += other.packs_by_turn;
  submeshes_by_turn += other.submeshes_by_turn;
  aged += other.aged;
  elders_gave_way += other.elders_gave_way;
}

void Census::Print() const {
  std::printf(
      "%d answers: %d results, %d errors (%d cancelled, %d poisonous); %d workers lost, %d runs begun "
      "again\n",
      answers, results, errors, cancelled, poisoned, losses, retries);
  std::printf(
      "%d leases, %d refused: %d reads, %d of lost ones, %d missed; %d renewed, %d released, %d lapsed\n",
      leases, refused, reads, lost_reads, missed_reads, renewals, releases, lapses);
  std::printf("%d runs behind a cached prefix, %d evictions\n", behind_a_prefix, evictions);
  std::printf("%d results in pieces, %d pieces ran again, %d prompts lost what they had of theirs\n",
              in_pieces, pieces_again, pieces_lost);
  std::printf("%d parts of runs streamed weights that may be shared, %d shared them\n", streamed, shared);
  std::printf("%d runs on sub-meshes, %d of them beside others that went on\n", on_submeshes, side_by_side);
  std::printf(
      "up to %d runs at once on a worker; ranks stood still %d times, %d runs before the same message; %d "
      "requests waited for memory or a place; %d results beside a poisonous request took more than one run\n",
      most_at_once, pauses, agreements, crowded_out, attempts_of_innocents);
  std::printf(
      "%d packs of %d prompts, %d had no room; %d prompts were computed without their clients; %d results "
      "after their packs failed\n",
      packs, in_packs, packs_refused, left_in_packs, packs_again);
  std::printf(
      "%d came to queues, which refused %d times and let in %d, %d of them again; %d lost their places, %d "
      "slow uploads theirs; %d ended without a result\n",
      came, refused_by_queue, entered, entered_again, places_lost, slow_places_lost, ended_without_result);
  std::printf(
      "by the order's turns %d were put back, %d gave way, %d packs and %d runs on sub-meshes began; %d "
      "aged, "
      "and others went before such a one in %d choices\n",
      put_back, preempted, packs_by_turn, submeshes_by_turn, aged, elders_gave_way);
}

}  // namespace meshfill::story
