// The seconds of one layer's attention.
#ifndef MESHFILL_ENGINE_PLAN_ATTENTION_SECONDS_H_
#define MESHFILL_ENGINE_PLAN_ATTENTION_SECONDS_H_

#include <utility>
#include <vector>

#include "engine/mesh/mesh.h"
#include "engine/schedule/messages_under_way.h"
#include "engine/schedule/schedule.h"

namespace meshfill {

// What the parts of one layer's attention take, on every rank. Where a plan exchanges in slices, the work on
// tokens before and behind attention hides a part of the all-to-alls; of the first and the last layer, which
// have less of it, each layer here has its share.
struct AttentionSeconds {
  Tile tile;
  int kv_inner = 0;
  double block = 0;                     // one block, on average
  std::vector<double> blocks;           // [a·b], by u·b + v; empty: all take that
  PerTraffic<MessageSeconds> transfer;  // seconds of one Q, KV or O chunk; where they differ, the longest
  PerTraffic<std::vector<MessageSeconds>> by_hop;  // the first, second … of each; empty: all take that
  MessageSeconds kv_outer;                         // of a double ring: one KV chunk to the next inner ring
  double merge = 0;     // seconds to merge one partial output that arrived; 0: none arrives
  double to_heads = 0;  // this and the next: all-to-alls before and after the mesh; 0 with one head group
  double to_tokens = 0;
  double to_heads_wait = 0;  // this and the next: what of those two nothing hides
  double to_tokens_wait = 0;
  double reorder_to_heads = 0;  // passes of memory that put what they bring in order
  double reorder_to_tokens = 0;

  double Block(BlockIndex index) const;
  // The number-th of its traffic, from 0, and its ring.
  std::pair<Ring, const MessageSeconds&> MessageOf(Traffic traffic, int number) const;
  double Compute() const;  // seconds that a rank computes in one layer's attention
  double Wait(const Schedule& schedule) const;
  double Transfers(const Schedule& schedule) const;  // Wait, and what blocks and the work on tokens hide
};

}  // namespace meshfill

#endif  // MESHFILL_ENGINE_PLAN_ATTENTION_SECONDS_H_
