#include "engine/plan/attention_seconds.h"

#include <algorithm>
#include <array>

namespace meshfill {

double AttentionSeconds::Block(BlockIndex index) const {
  return blocks.empty() ? block : blocks[index.u * tile.b + index.v];
}

std::pair<Ring, const MessageSeconds&> AttentionSeconds::MessageOf(Traffic traffic, int number) const {
  const Ring ring = traffic == Traffic::kKv ? KvHopOf(tile, kv_inner, number).ring : Ring::kQ;
  if (ring == Ring::kKvOuter) return {ring, kv_outer};
  return {ring, by_hop[traffic].empty() ? transfer[traffic] : by_hop[traffic][number]};
}

double AttentionSeconds::Compute() const {
  return tile.ranks() * block + (tile.a - 1) * merge + reorder_to_heads + reorder_to_tokens;
}

// A planner asks this of thousands of schedules, and no chunk matters to it: it reads the steps, and does not
// visit schedule_walk.h. predicted_timeline.cc does; a test holds the two to the same seconds.
double AttentionSeconds::Wait(const Schedule& schedule) const {
  double wait = to_heads_wait + to_tokens_wait;
  double now = 0;
  MessagesUnderWay messages;
  std::array<int, kRings> steps_left = {};  // 0: nothing is under way
  PerTraffic<int> number;
  int under_way = 0;
  for (const Step& step : schedule.steps) {
    double arrives = 0;  // of a message that has all links for itself, and ends with its step
    if (step.comm.has_value()) {
      const auto& [ring, message] = MessageOf(*step.comm, number[*step.comm]++);
      if (under_way == 0 && step.spans == 1) {
        arrives = now + message.total;
      } else {
        messages.Leave(ring, message, now);
        steps_left[static_cast<int>(ring)] = step.spans;
        ++under_way;
      }
    }
    if (blocks.empty()) {
      now += static_cast<double>(step.blocks.size()) * block;
    } else {
      for (const BlockIndex index : step.blocks) now += Block(index);
    }
    const auto wait_until = [&](double arrival) {
      const double waited = std::max(0.0, arrival - now);
      wait += waited;
      now += waited;
    };
    if (under_way == 0) {
      wait_until(arrives);
      continue;
    }
    for (const Ring ring : {Ring::kQ, Ring::kKv, Ring::kKvOuter}) {
      int& left = steps_left[static_cast<int>(ring)];
      if (left == 0 || --left > 0) continue;
      wait_until(messages.ArrivalOf(ring));
      --under_way;
    }
  }
  return wait;
}

double AttentionSeconds::Transfers(const Schedule& schedule) const {
  double seconds = to_heads + to_tokens;
  PerTraffic<int> number;
  for (const Step& step : schedule.steps) {
    if (step.comm.has_value()) seconds += MessageOf(*step.comm, number[*step.comm]++).second.total;
  }
  return seconds;
}

}  // namespace meshfill
