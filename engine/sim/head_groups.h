// Head parallelism around a mesh or a ring: n = h · m ranks; an all-to-all in groups of h trades sequence for
// heads before, and back after (DESIGN §4). h = n is Ulysses.
//
// Rank j·m + i is place i of head group j. The all-to-all is pairwise: h − 1 rounds, in each of which a rank
// sends one h-th of what it will hold. KV heads fewer than the head groups are replicated: every group gets
// at least one, and its bytes count.
#ifndef MESHFILL_ENGINE_SIM_HEAD_GROUPS_H_
#define MESHFILL_ENGINE_SIM_HEAD_GROUPS_H_

#include <vector>

#include "absl/status/status.h"
#include "engine/sim/attention_job.h"
#include "engine/sim/rank_program.h"

namespace meshfill::sim {

class HeadGroups {
 public:
  // `places`: ranks of one group's mesh or ring. CheckHeadGroups has passed.
  HeadGroups(const AttentionJob& job, int heads, int places);

  int ranks() const { return heads_ * places_; }
  const ChunkBytes& share() const { return share_; }  // a rank's part of the sequence, all heads
  const ChunkBytes& chunk() const { return chunk_; }  // a place's part of the sequence, this group's heads
  // FLOPs of the block of one chunk with another.
  double BlockFlops(Pass pass) const;

  // `from` within the places of one group, for all ranks.
  std::vector<int> InEveryGroup(const std::vector<int>& from) const;

  // All-to-alls that deliver `bytes` to each rank in all, its own h-th included. Nothing for one group.
  void Exchange(ProgramBuilder& builder, int64_t bytes) const;

 private:
  const AttentionJob job_;
  const int heads_;
  const int places_;
  ChunkBytes share_;
  ChunkBytes chunk_;
};

// INVALID_ARGUMENT unless heads ≥ 1 divides the query heads, and divides the KV heads or is a multiple of
// them.
absl::Status CheckHeadGroups(const AttentionJob& job, int heads);

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_HEAD_GROUPS_H_
