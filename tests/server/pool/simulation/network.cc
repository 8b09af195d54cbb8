// The network between the leader and its workers: streams that open, close and are cut, and messages that
// come late or twice.
#include <algorithm>

#include "tests/server/pool/simulation/pool_simulation.h"

namespace meshfill {

void PoolSimulation::Connect(int index, uint64_t connection) {
  Node& node = nodes_[index];
  const uint64_t id = ++last_link_;
  node.link = id;
  links_[id] = {.node = index,
                .node_incarnation = node.incarnation,
                .node_connection = connection,
                .leader_incarnation = leader_incarnation_,
                .to_leader = now_,
                .to_node = now_};
  if (leader_ == nullptr) return CutLink(id, false, true);
  Link& link = links_[id];
  link.to_leader = std::max(now_ + Latency(), node.partitioned_until);
  At(link.to_leader, -1, [this, id] {
    const Link& link = links_[id];
    if (link.cut || leader_ == nullptr || link.leader_incarnation != leader_incarnation_) return;
    leader_->OnConnected(id, now_);
  });
}

// What is under way is lost; who is not told learns it from silence.
void PoolSimulation::CutLink(uint64_t id, bool tell_leader, bool tell_node) {
  links_[id].cut = true;
  if (tell_leader) {
    After(DrawMs(0, 50), -1, [this, id] {
      Link& link = links_[id];
      if (!link.open_at_leader || leader_ == nullptr || link.leader_incarnation != leader_incarnation_)
        return;
      link.open_at_leader = false;
      leader_->OnDisconnected(id, now_);
      DoLeaderActions();
    });
  }
  if (tell_node) {
    const int index = links_[id].node;
    After(DrawMs(0, 50), index, [this, id, index] {
      Link& link = links_[id];
      Node& node = nodes_[index];
      if (!link.open_at_node || node.machine == nullptr || node.incarnation != link.node_incarnation) return;
      CloseAtNode(id);
      if (node.link == id) node.link = 0;
      node.machine->OnDisconnected(link.node_connection, absl::UnavailableError("cut"), now_);
      DoNodeActions(index);
    });
  }
}

// The other side hears of it after what was sent before, unless the link is cut.
void PoolSimulation::CloseAtNode(uint64_t id) {
  Link& link = links_[id];
  if (!link.open_at_node) return;
  link.open_at_node = false;
  if (link.cut) return;
  link.to_leader = std::max({link.to_leader, now_ + Latency(), nodes_[link.node].partitioned_until});
  At(link.to_leader, -1, [this, id] {
    Link& link = links_[id];
    if (link.cut || !link.open_at_leader || leader_ == nullptr ||
        link.leader_incarnation != leader_incarnation_)
      return;
    link.open_at_leader = false;
    leader_->OnDisconnected(id, now_);
    DoLeaderActions();
  });
}

void PoolSimulation::CloseAtLeader(uint64_t id) {
  Link& link = links_[id];
  if (!link.open_at_leader) return;
  link.open_at_leader = false;
  if (link.cut) return;
  link.to_node = std::max({link.to_node, now_ + Latency(), nodes_[link.node].partitioned_until});
  const int index = link.node;
  At(link.to_node, index, [this, id, index] {
    Link& link = links_[id];
    Node& node = nodes_[index];
    if (link.cut || !link.open_at_node || node.machine == nullptr ||
        node.incarnation != link.node_incarnation)
      return;
    link.open_at_node = false;
    if (node.link == id) node.link = 0;
    node.machine->OnDisconnected(link.node_connection, absl::UnavailableError("closed by the leader"), now_);
    DoNodeActions(index);
  });
}

void PoolSimulation::DeliverToNode(uint64_t id, v1::LeaderMessage message) {
  Link& link = links_[id];
  if (link.cut || !link.open_at_leader) return;
  const int index = link.node;
  // An old one of these would count for the present one.
  const bool once = message.has_kv_lasts() || message.has_pause() || message.has_resume();
  const bool twice = !once && Chance(0.02);
  if (message.has_shard() && message.shard().ids_size() > 0 && !healed_ && !quiet_ && Chance(0.003)) {
    Note("a shard is corrupted");
    Fault(absl::ZeroDuration());
    message.mutable_shard()->set_ids(0, message.shard().ids(0) ^ 1);
  }
  for (int copy = 0; copy < (twice ? 2 : 1); ++copy) {
    const absl::Duration delay = copy == 0 ? Latency() : DrawMs(1, 300);
    const absl::Time arrival = std::max(now_ + delay, nodes_[index].partitioned_until);
    // A late copy does not hold up what comes after the first.
    const absl::Time when =
        copy == 0 ? (link.to_node = std::max(link.to_node, arrival)) : std::max(link.to_node, arrival);
    At(when, index, [this, id, index, message] {
      Link& link = links_[id];
      Node& node = nodes_[index];
      if (link.cut || !link.open_at_node || node.machine == nullptr ||
          node.incarnation != link.node_incarnation)
        return;
      if (message.has_prepare() && MayCrashAt(index, Step::kPrepare)) return;
      if (message.has_shard() && MayCrashAt(index, Step::kShard)) return;
      if (message.has_run() && MayCrashAt(index, Step::kRun)) return;
      if (message.has_finish() && MayCrashAt(index, Step::kFinish)) return;
      if (message.has_abort() && MayCrashAt(index, Step::kAbort)) return;
      node.machine->OnMessage(link.node_connection, message, now_);
      DoNodeActions(index);
    });
  }
}

void PoolSimulation::DeliverToLeader(uint64_t id, v1::WorkerMessage message) {
  Link& link = links_[id];
  if (link.cut || !link.open_at_node) return;
  const bool twice = Chance(0.02);
  for (int copy = 0; copy < (twice ? 2 : 1); ++copy) {
    const absl::Duration delay = copy == 0 ? Latency() : DrawMs(1, 300);
    const absl::Time arrival = std::max(now_ + delay, nodes_[link.node].partitioned_until);
    const absl::Time when =
        copy == 0 ? (link.to_leader = std::max(link.to_leader, arrival)) : std::max(link.to_leader, arrival);
    At(when, -1, [this, id, message] {
      Link& link = links_[id];
      if (link.cut || !link.open_at_leader || leader_ == nullptr ||
          link.leader_incarnation != leader_incarnation_)
        return;
      if (message.has_paused() && message.paused().still()) OnStillTold(id, message.paused());
      if (message.has_rank_done() && runs_told_.contains(message.rank_done().run())) {
        runs_told_.at(message.rank_done().run()).done = true;
      }
      leader_->OnMessage(id, message, now_);
      DoLeaderActions();
    });
  }
}

}  // namespace meshfill
