// What fails, at random, until the pool must heal.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/server/pool/simulation/pool_simulation.h"
#include "tests/server/pool/simulation/simulated_pool.h"

namespace meshfill {

void PoolSimulation::Fault(absl::Duration duration) {
  last_fault_end_ = std::max(last_fault_end_, now_ + duration);
}

void PoolSimulation::Chaos() {
  if (healed_) return;
  const int index = Draw(0, static_cast<int>(nodes_.size()) - 1);
  Node& node = nodes_[index];
  const absl::Duration duration = Chance(0.5) ? DrawMs(50, 800) : DrawMs(800, 6000);
  const absl::Time until = now_ + duration;
  switch (Draw(0, 11)) {
    case 0:
    case 1:
      CrashNode(index, Chance(0.3));
      break;
    case 2:
      Note(absl::StrCat(node.name, " is stopped"));
      // A shorter fault does not end a longer one: a process that thaws too early would read its messages out
      // of order.
      node.frozen_until = std::max(node.frozen_until, until);
      break;
    case 3:
      Note(absl::StrCat(node.name, " freezes in compute"));
      node.compute_frozen_until = std::max(node.compute_frozen_until, until + DrawMs(0, 4000));
      break;
    case 4:
      Note(absl::StrCat(node.name, " is cut off"));
      node.partitioned_until = std::max(node.partitioned_until, until);
      break;
    case 5:
      Note(absl::StrCat(node.name, " is cut off from its peers"));
      node.data_partitioned_until = std::max(node.data_partitioned_until, until);
      break;
    case 6:
      if (node.link != 0) {
        Note(absl::StrCat(node.name, "'s stream is cut"));
        const int told = Draw(0, 3);
        CutLink(node.link, (told & 1) != 0, (told & 2) != 0);
      }
      break;
    case 7:
      if (Chance(0.3)) CrashLeader();
      break;
    case 8:
      if (node.machine != nullptr) {
        Note(absl::StrCat(node.name, " drains"));
        Fault(absl::Seconds(6));  // it stays for its leases
        node.machine->Drain(now_);
        DoNodeActions(index);
      }
      break;
    case 9: {  // another worker of this name knocks
      const uint64_t id = ++last_link_;
      links_[id] = {.node = index,
                    .node_incarnation = -1,
                    .leader_incarnation = leader_incarnation_,
                    .open_at_node = false,
                    .to_leader = now_,
                    .to_node = now_};
      if (leader_ == nullptr) break;
      v1::WorkerMessage message;
      v1::Join& offer = *message.mutable_join();
      offer.set_protocol(kControlProtocol);
      offer.set_build("simulated");
      offer.set_name(node.name);
      offer.set_ranks(1);
      offer.set_messages_mix(messages_mix_);
      offer.set_rows_independent(packs_);
      *offer.mutable_model() = SimulatedModel();
      *offer.mutable_speed() = SimulatedSpeed();
      leader_->OnConnected(id, now_);
      leader_->OnMessage(id, message, now_);
      DoLeaderActions();
      After(DrawMs(0, 500), -1, [this, id, incarnation = leader_incarnation_] {
        if (leader_ == nullptr || incarnation != leader_incarnation_) return;
        links_[id].open_at_leader = false;
        leader_->OnDisconnected(id, now_);
        DoLeaderActions();
      });
      break;
    }
    default:
      break;  // a quiet while
  }
  Fault(duration);
  After(DrawMs(20, 1500), -1, [this] { Chaos(); });
}

void PoolSimulation::Heal() {
  healed_ = true;
  Note("no faults from now on");
  for (Node& node : nodes_) {
    for (absl::Time* until : {&node.frozen_until, &node.compute_frozen_until, &node.partitioned_until,
                              &node.data_partitioned_until}) {
      if (*until > now_) Fault(*until - now_);
    }
  }
  Fault(absl::ZeroDuration());
}

}  // namespace meshfill
