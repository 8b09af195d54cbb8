// Head parallelism around a mesh or a ring: n = h · m ranks; an all-to-all in groups of h trades sequence for
// heads before, and back after (docs/concepts.md, Head groups). h = n is Ulysses.
//
// Rank p·h + i is member i of the head group at place p, and works on the i-th part of the heads. As in
// engine/run/head_exchange.h an all-to-all of one tensor is h − 1 messages, each one h-th of what a rank will
// hold, all under way at once; the tensors go in turn. KV heads fewer than the members are replicated: every
// member gets at least one, and its bytes count.
#ifndef MESHFILL_ENGINE_SIM_HEAD_GROUPS_H_
#define MESHFILL_ENGINE_SIM_HEAD_GROUPS_H_

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "absl/status/status.h"
#include "engine/sim/attention_job.h"
#include "engine/sim/rank_program.h"

namespace meshfill::sim {

class HeadGroups {
 public:
  // `places`: ranks of one mesh or ring. CheckHeadGroups has passed.
  HeadGroups(const AttentionJob& job, int heads, int places);

  int ranks() const { return heads_ * places_; }
  const ChunkBytes& share() const { return share_; }  // a rank's part of the sequence, all heads
  const ChunkBytes& chunk() const {
    return chunk_;
  }  // a head group's part of the sequence, this member's heads
  // Bytes of K alone, or V alone.
  int64_t k_bytes() const { return chunk_.kv / 2; }
  // FLOPs of the block of one chunk with another.
  double BlockFlops(Pass pass) const;

  // `from` within the places of one mesh or ring, for all ranks.
  std::vector<int> InEveryMesh(const std::vector<int>& from) const;

  // One all-to-all for each tensor, which delivers its bytes to each rank in all, its own h-th included.
  // Nothing for one member.
  void Exchange(ProgramBuilder& builder, std::initializer_list<int64_t> tensor_bytes) const;

 private:
  const AttentionJob job_;
  const int heads_;
  const int places_;
  ChunkBytes share_;
  ChunkBytes chunk_;
};

// INVALID_ARGUMENT unless ModelShape::CanSplitHeads.
absl::Status CheckHeadGroups(const AttentionJob& job, int heads);

}  // namespace meshfill::sim

#endif  // MESHFILL_ENGINE_SIM_HEAD_GROUPS_H_
